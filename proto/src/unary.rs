//! Unary calls over encoded messages, for the generated servers and clients.
//!
//! tonic's call is generic over the messages of a method, so each service compiled it once per
//! method, a fifth of the code of a large service. Here it transports bytes and is compiled once per
//! service; only decoding and encoding depend on the method. The build script directs generated code here.

use std::future::Future;
use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes};
use prost::{Message, Name};
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codec::{Codec, DecodeBuf, Decoder, EnabledCompressionEncodings, EncodeBuf, Encoder};
use tonic::codegen::{BoxFuture, StdError, http};
use tonic::server::UnaryService;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::checks;

/// A method as a call on encoded messages.
type Method = Box<dyn FnMut(Request<Bytes>) -> BoxFuture<Response<Bytes>, Status> + Send>;

/// Server side of one call, with the interface of `tonic::server::Grpc` that generated code uses.
/// Checks requests ([`checks`]).
pub struct Server<T, U> {
    grpc: tonic::server::Grpc<BytesCodec>,
    messages: PhantomData<fn(U) -> T>,
}

impl<T, U> Server<T, U>
where
    T: Message + 'static,
    U: Message + Name + Default + 'static,
{
    /// The codec only names the messages.
    pub fn new(_: ProstCodec<T, U>) -> Self {
        Self {
            grpc: tonic::server::Grpc::new(BytesCodec),
            messages: PhantomData,
        }
    }

    pub fn apply_compression_config(
        mut self,
        accept: EnabledCompressionEncodings,
        send: EnabledCompressionEncodings,
    ) -> Self {
        self.grpc = self.grpc.apply_compression_config(accept, send);
        self
    }

    pub fn apply_max_message_size_config(
        mut self,
        decoding: Option<usize>,
        encoding: Option<usize>,
    ) -> Self {
        self.grpc = self.grpc.apply_max_message_size_config(decoding, encoding);
        self
    }

    /// Answers the call.
    pub fn unary<S, B>(
        self,
        mut method: S,
        request: http::Request<B>,
    ) -> impl Future<Output = http::Response<Body>> + Send + 'static
    where
        S: UnaryService<U, Response = T> + Send + 'static,
        S::Future: Send + 'static,
        B: tonic::codegen::Body + Send + 'static,
        B::Error: Into<StdError> + Send,
    {
        let method: Method = Box::new(move |request| {
            let (metadata, extensions, message) = request.into_parts();
            let response = checks::decode(message)
                .map(|message| method.call(Request::from_parts(metadata, extensions, message)));
            Box::pin(async move { Ok(response?.await?.map(|message| encoded(&message))) })
        });
        answer(self.grpc, method, request)
    }
}

async fn answer<B>(
    mut grpc: tonic::server::Grpc<BytesCodec>,
    method: Method,
    request: http::Request<B>,
) -> http::Response<Body>
where
    B: tonic::codegen::Body + Send + 'static,
    B::Error: Into<StdError> + Send,
{
    grpc.unary(Encoded(method), request).await
}

struct Encoded(Method);

impl UnaryService<Bytes> for Encoded {
    type Response = Bytes;
    type Future = BoxFuture<Response<Bytes>, Status>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        self.0(request)
    }
}

/// Client side of one call. The codec only names the messages.
///
/// # Errors
/// Those of `tonic::client::Grpc::unary`.
pub async fn call<S, T, U>(
    grpc: &mut tonic::client::Grpc<S>,
    request: Request<T>,
    path: http::uri::PathAndQuery,
    _: ProstCodec<T, U>,
) -> Result<Response<U>, Status>
where
    S: GrpcService<Body>,
    S::ResponseBody: tonic::codegen::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as tonic::codegen::Body>::Error: Into<StdError>,
    T: Message,
    U: Message + Default,
{
    let request = request.map(|message| encoded(&message));
    let response = grpc.unary(request, path, BytesCodec).await?;
    let (metadata, message, extensions) = response.into_parts();
    let message = U::decode(message).map_err(|error| Status::internal(error.to_string()))?;
    Ok(Response::from_parts(metadata, message, extensions))
}

fn encoded(message: &impl Message) -> Bytes {
    message.encode_to_vec().into()
}

/// Transports messages as they are.
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
