//! One call as gRPC over HTTP/2, by the method's name.

use bytes::{Buf, BufMut};
use prost::Message;
use prost_reflect::DynamicMessage;
use rpc::Channel;
use serde_json::Value;
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status};

use crate::Platform;
use crate::call::path_of;
use crate::wire::{self, Answer};

/// Sends the request to the common port.
pub async fn unary(platform: &Platform, token: &str, name: &str, request: &Value) -> Answer {
    let method = wire::method(&wire::pool(), name);
    let message = wire::message(method.input(), request).encode_to_vec();
    let mut client = client(platform, "all", token).await;
    let asked = client.unary(Request::new(message), path(&path_of(name)), Bytes);
    match asked.await {
        Ok(answer) => {
            let answer = answer.into_inner();
            Ok(DynamicMessage::decode(method.output(), &*answer).expect("proto"))
        }
        Err(status) => Err((status.code() as i32, status.message().to_owned())),
    }
}

/// Sends a stream of encoded messages to a method of a listener.
///
/// # Errors
/// The status of the answer.
pub async fn streamed(
    platform: &Platform,
    listener: &str,
    token: &str,
    method: &str,
    messages: impl Stream<Item = Vec<u8>> + Send + 'static,
) -> Result<Vec<u8>, Status> {
    let mut client = client(platform, listener, token).await;
    let asked = client.client_streaming(Request::new(messages), path(method), Bytes);
    asked.await.map(tonic::Response::into_inner)
}

async fn client(platform: &Platform, listener: &str, token: &str) -> Grpc<Channel> {
    let channel = Channel::remote(&platform.url(listener), token).expect("an address");
    let mut client = Grpc::new(channel);
    client.ready().await.expect("a connection");
    client
}

/// The path of `package.Service/Method`.
fn path(method: &str) -> PathAndQuery {
    PathAndQuery::try_from(format!("/{method}")).expect("a path")
}

/// Messages as their encoded bytes.
#[derive(Clone, Copy)]
struct Bytes;

impl Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut message = vec![0; buffer.remaining()];
        buffer.copy_to_slice(&mut message);
        Ok(Some(message))
    }
}
