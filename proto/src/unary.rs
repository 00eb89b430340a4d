//! Unary calls over encoded messages, for the generated servers and clients.
//!
//! tonic's calls are generic over the messages of a method, so each service compiled them once per
//! method, a fifth of the code of a large service. These calls transport bytes and are compiled
//! once per crate; only decoding and encoding depend on the method.
//!
//! The build script puts them into the generated code, whose codec is [`BytesCodec`]. A call that
//! is not replaced does not compile, so no generated server is without the checks of requests.

use std::future::Future;

use bytes::{Buf, BufMut, Bytes};
use prost::{Message, Name};
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::{BoxFuture, StdError, http};
use tonic::server::UnaryService;
use tonic::{Request, Response, Status};

use crate::checks;

/// A method as a call on encoded messages. Boxed, so that tonic's call is not compiled per method.
type Method = Box<dyn FnMut(Request<Bytes>) -> BoxFuture<Response<Bytes>, Status> + Send>;

/// Server side of one call. Checks the request ([`checks`]).
pub fn answer<S, T, U, B>(
    grpc: &mut tonic::server::Grpc<BytesCodec>,
    mut method: S,
    request: http::Request<B>,
) -> impl Future<Output = http::Response<Body>> + Send
where
    S: UnaryService<U, Response = T> + Send + 'static,
    S::Future: Send + 'static,
    T: Message + 'static,
    U: Message + Name + Default + 'static,
    B: tonic::codegen::Body + Send + 'static,
    B::Error: Into<StdError> + Send,
{
    let method: Method = Box::new(move |request| {
        let (metadata, extensions, message) = request.into_parts();
        let response = checks::decode(message)
            .map(|message| method.call(Request::from_parts(metadata, extensions, message)));
        Box::pin(async move { Ok(response?.await?.map(|message| encoded(&message))) })
    });
    grpc.unary(Encoded(method), request)
}

struct Encoded(Method);

impl UnaryService<Bytes> for Encoded {
    type Response = Bytes;
    type Future = BoxFuture<Response<Bytes>, Status>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        self.0(request)
    }
}

/// Client side of one call.
///
/// # Errors
/// Those of `tonic::client::Grpc::unary`.
pub async fn call<S, T, U>(
    grpc: &mut tonic::client::Grpc<S>,
    request: Request<T>,
    path: http::uri::PathAndQuery,
    codec: BytesCodec,
) -> Result<Response<U>, Status>
where
    S: GrpcService<Body>,
    S::ResponseBody: tonic::codegen::Body<Data = Bytes> + Send + 'static,
    <S::ResponseBody as tonic::codegen::Body>::Error: Into<StdError>,
    T: Message,
    U: Message + Default,
{
    let request = request.map(|message| encoded(&message));
    let response = grpc.unary(request, path, codec).await?;
    let (metadata, message, extensions) = response.into_parts();
    let message = U::decode(message).map_err(|error| Status::internal(error.to_string()))?;
    Ok(Response::from_parts(metadata, message, extensions))
}

fn encoded(message: &impl Message) -> Bytes {
    message.encode_to_vec().into()
}

/// Transports messages as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct BytesCodec;

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
