//! Forwards calls that connectrpc has decoded to in-process tonic routes.
//!
//! Each call becomes one gRPC request with the caller's metadata, extensions (including the
//! authenticated caller) and remaining deadline. Streams remain streams in both directions. At most
//! one DATA frame of a response stream is buffered. A response of one message is collected.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body};
use bytes::{Bytes, BytesMut};
use connectrpc::{
    CodecFormat, ConnectError, EncodedBody, EncodedStream, MethodDescriptor, MethodKind, Payload,
    RequestContext, Response,
    dispatcher::{Dispatcher, RequestStream, StreamingResult, UnaryResult},
};
use futures::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Request, header};
use http_body::Frame;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use tower::ServiceExt;

use super::{codec, errors, trailers::LateTrailers};
use crate::contract::{Contract, Method};

pub(super) struct Bridge {
    contract: Arc<Contract>,
    rpc: Router,
}

/// Inputs of a call besides its messages.
struct Call {
    rpc: Router,
    path: String,
    method: Method,
    format: CodecFormat,
    late: Option<LateTrailers>,
    context: RequestContext,
}

impl Bridge {
    pub(super) fn new(contract: Arc<Contract>, rpc: Router) -> Self {
        Bridge { contract, rpc }
    }

    fn call(
        &self,
        path: &str,
        context: RequestContext,
        format: CodecFormat,
    ) -> Result<Call, ConnectError> {
        let path = format!("/{path}");
        let method = self
            .contract
            .method(&path)
            .cloned()
            .ok_or_else(|| ConnectError::unimplemented("Unknown method"))?;
        Ok(Call {
            rpc: self.rpc.clone(),
            path,
            method,
            format,
            late: context.extensions().get::<LateTrailers>().cloned(),
            context,
        })
    }
}

impl Dispatcher for Bridge {
    fn lookup(&self, path: &str) -> Option<MethodDescriptor> {
        let method = self.contract.method(&format!("/{path}"))?;
        let kind = match (method.client_streaming, method.server_streaming) {
            (false, false) => MethodKind::Unary,
            (false, true) => MethodKind::ServerStreaming,
            (true, false) => MethodKind::ClientStreaming,
            (true, true) => MethodKind::BidiStreaming,
        };
        let allows_get = kind == MethodKind::Unary && method.reads_only;
        Some(MethodDescriptor::from_kind(kind).with_idempotent(allows_get))
    }

    fn call_unary(
        &self,
        path: &str,
        context: RequestContext,
        request: Payload,
        format: CodecFormat,
    ) -> UnaryResult {
        let call = self.call(path, context, format);
        Box::pin(async move {
            let call = call?;
            let message = codec::to_proto(request.encoded()?, format, &call.method.input)?;
            call.unary_response(Body::new(Full::new(codec::frame(&message))))
                .await
        })
    }

    fn call_server_streaming(
        &self,
        path: &str,
        context: RequestContext,
        request: Bytes,
        format: CodecFormat,
    ) -> StreamingResult {
        let call = self.call(path, context, format);
        Box::pin(async move {
            let call = call?;
            let message = codec::to_proto(request, format, &call.method.input)?;
            call.response_stream(Body::new(Full::new(codec::frame(&message))))
                .await
        })
    }

    fn call_client_streaming(
        &self,
        path: &str,
        context: RequestContext,
        requests: RequestStream,
        format: CodecFormat,
    ) -> UnaryResult {
        let call = self.call(path, context, format);
        Box::pin(async move {
            let call = call?;
            let body = call.request_body(requests);
            call.unary_response(body).await
        })
    }

    fn call_bidi_streaming(
        &self,
        path: &str,
        context: RequestContext,
        requests: RequestStream,
        format: CodecFormat,
    ) -> StreamingResult {
        let call = self.call(path, context, format);
        Box::pin(async move {
            let call = call?;
            let body = call.request_body(requests);
            call.response_stream(body).await
        })
    }
}

impl Call {
    fn request_body(&self, requests: RequestStream) -> Body {
        let (format, input) = (self.format, self.method.input.clone());
        let frames = requests.map(move |message| {
            message
                .and_then(|message| codec::to_proto(message, format, &input))
                .map(|message| Frame::data(codec::frame(&message)))
                .map_err(|error| errors::to_status(&error))
        });
        Body::new(StreamBody::new(frames))
    }

    /// Sends the gRPC request. `Err` for a trailers-only response with an error status.
    async fn send(&mut self, body: Body) -> Result<http::Response<Body>, ConnectError> {
        let mut request = Request::post(&*self.path)
            .body(body)
            .map_err(|error| ConnectError::invalid_argument(error.to_string()))?;
        *request.headers_mut() = errors::metadata(std::mem::take(self.context.headers_mut()));
        let headers = request.headers_mut();
        let grpc = HeaderValue::from_static("application/grpc");
        headers.insert(header::CONTENT_TYPE, grpc);
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        if let Some(left) = self.context.time_remaining() {
            headers.insert("grpc-timeout", grpc_timeout(left));
        }
        *request.extensions_mut() = std::mem::take(self.context.extensions_mut());
        let response = match self.rpc.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        match errors::failure(response.headers()) {
            Some(status) => Err(errors::to_connect(&status)),
            None => Ok(response),
        }
    }

    /// Calls the method and returns its one response message.
    async fn unary_response(mut self, body: Body) -> Result<Response<EncodedBody>, ConnectError> {
        let (parts, body) = self.send(body).await?.into_parts();
        let collected = body
            .collect()
            .await
            .map_err(|error| ConnectError::internal(error.to_string()))?;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        if let Some(status) = errors::failure(&trailers) {
            let error = errors::to_connect(&status);
            return Err(error.with_headers(errors::metadata(parts.headers)));
        }
        let mut buffer = BytesMut::from(&collected.to_bytes()[..]);
        let message = codec::take_message(&mut buffer)
            .ok_or_else(|| ConnectError::internal("handler returned no message"))?;
        let message = codec::from_proto(message, self.format, &self.method.output)?;
        let mut response = Response::new(EncodedBody::Contiguous(message));
        response.headers = errors::metadata(parts.headers);
        response.trailers = errors::metadata(trailers);
        Ok(response)
    }

    /// Calls the method and returns its response stream. [`LateTrailers`] keeps the trailers for
    /// the end-of-stream message.
    async fn response_stream(
        mut self,
        body: Body,
    ) -> Result<Response<EncodedStream>, ConnectError> {
        let (parts, body) = self.send(body).await?.into_parts();
        let messages = messages(body, self.format, self.method, self.late);
        let mut response = Response::new(Box::pin(messages) as EncodedStream);
        response.headers = errors::metadata(parts.headers);
        Ok(response)
    }
}

/// Messages of a gRPC response body in the caller's format. The stream ends with an error if the
/// body fails or the trailers have an error status.
fn messages(
    body: Body,
    format: CodecFormat,
    method: Method,
    late: Option<LateTrailers>,
) -> impl Stream<Item = Result<EncodedBody, ConnectError>> + Send {
    struct State {
        frames: BodyStream<Body>,
        buffer: BytesMut,
        ended: bool,
    }
    let state = State {
        frames: BodyStream::new(body),
        buffer: BytesMut::new(),
        ended: false,
    };
    stream::unfold(
        (state, method, late),
        move |(mut state, method, late)| async move {
            loop {
                if let Some(message) = codec::take_message(&mut state.buffer) {
                    let message = codec::from_proto(message, format, &method.output);
                    return Some((message.map(EncodedBody::Contiguous), (state, method, late)));
                }
                if state.ended {
                    return None;
                }
                let failed = match state.frames.next().await {
                    None => {
                        state.ended = true;
                        None
                    }
                    Some(Err(error)) => Some(ConnectError::internal(error.to_string())),
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(data) => {
                            state.buffer.extend_from_slice(&data);
                            None
                        }
                        Err(frame) => {
                            state.ended = true;
                            end_of_stream(frame.into_trailers().unwrap_or_default(), late.as_ref())
                        }
                    },
                };
                if let Some(error) = failed {
                    state.ended = true;
                    return Some((Err(error), (state, method, late)));
                }
            }
        },
    )
}

fn end_of_stream(trailers: HeaderMap, late: Option<&LateTrailers>) -> Option<ConnectError> {
    if let Some(status) = errors::failure(&trailers) {
        return Some(errors::to_connect(&status));
    }
    if let Some(late) = late {
        late.put(errors::metadata(trailers));
    }
    None
}

/// Formats `grpc-timeout`. It has at most eight digits, so the unit grows with the time left.
fn grpc_timeout(left: Duration) -> HeaderValue {
    // Exclusive: eight digits.
    const TIMEOUT_VALUE_END: u128 = 100_000_000;
    let text = if left.as_micros() < TIMEOUT_VALUE_END {
        format!("{}u", left.as_micros())
    } else if left.as_millis() < TIMEOUT_VALUE_END {
        format!("{}m", left.as_millis())
    } else {
        format!("{}S", u128::from(left.as_secs()).min(TIMEOUT_VALUE_END - 1))
    };
    HeaderValue::try_from(text).expect("digits and a letter are a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_of_any_length_fit_eight_digits() {
        for (left, text) in [
            (Duration::ZERO, "0u"),
            (Duration::from_millis(200), "200000u"),
            (Duration::from_secs(9_999_999), "9999999S"),
            (Duration::from_millis(9_999_999_999), "9999999S"),
            (Duration::from_secs(10_000), "10000000m"),
        ] {
            assert_eq!(grpc_timeout(left), text);
        }
    }
}
