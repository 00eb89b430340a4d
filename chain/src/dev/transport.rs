//! The development chain as an alloy transport: JSON-RPC packets in process, without a socket.

use std::task::{Context, Poll};

use alloy::rpc::json_rpc::{
    RequestPacket, Response, ResponsePacket, ResponsePayload, SerializedRequest,
};
use alloy::transports::{TransportError, TransportFut};
use serde_json::Value;

use super::DevChain;
use super::rpc::Source;

impl DevChain {
    async fn respond(&self, request: SerializedRequest) -> Result<Response, TransportError> {
        let params = match request.params() {
            Some(raw) => serde_json::from_str(raw.get())
                .map_err(|error| TransportError::deser_err(error, raw.get()))?,
            None => Value::Null,
        };
        let answer = self.handle_as_text(request.method(), params, Source::Connector);
        let payload = match answer.await {
            Ok(text) => ResponsePayload::Success(text),
            Err(failure) => ResponsePayload::Failure(failure.into_payload()),
        };
        Ok(Response {
            id: request.id().clone(),
            payload,
        })
    }
}

impl tower::Service<RequestPacket> for DevChain {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        let chain = self.clone();
        Box::pin(async move {
            match packet {
                RequestPacket::Single(request) => {
                    Ok(ResponsePacket::Single(chain.respond(request).await?))
                }
                RequestPacket::Batch(requests) => {
                    let mut responses = Vec::with_capacity(requests.len());
                    for request in requests {
                        responses.push(chain.respond(request).await?);
                    }
                    Ok(ResponsePacket::Batch(responses))
                }
            }
        })
    }
}
