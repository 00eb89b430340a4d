//! Connect in front of tonic: the same handlers answer unary, GET and streaming calls, in protobuf
//! and JSON.
//!
//! `connectrpc` is the protocol engine (framing, GET rules, compression, deadlines, HTTP status).
//! [`bridge`] passes each decoded message to the tonic routes as an in-process gRPC call and
//! returns the answer. [`codec`] converts JSON by descriptor. gRPC and gRPC-Web requests do not use
//! this module. Only this folder names `connectrpc`.
//!
//! Known limitation: gRPC sends leading and trailing metadata of a refused unary call in one block.
//! Connect clients get all of it as trailers.

mod bridge;
mod codec;
mod errors;
mod trailers;

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
};
use connectrpc::{CompressionPolicy, ConnectRpcService, Limits};
use http::{
    HeaderMap, HeaderValue, Method, StatusCode,
    header::{ALLOW, CONTENT_TYPE, WWW_AUTHENTICATE},
};
use tonic::{Code, Status};
use tower::{Service, ServiceExt, util::BoxCloneSyncService};

use crate::contract::Contract;

/// Request extension of a Connect GET: its raw query.
#[derive(Clone, Debug)]
pub struct GetQuery(pub String);

/// Serves Connect for the methods of `contract` by calling `rpc`, a router of tonic services.
pub(crate) fn service(
    contract: Arc<Contract>,
    rpc: Router,
    message_bytes_max: usize,
) -> BoxCloneSyncService<Request, Response, Infallible> {
    let limits = Limits::unlimited()
        .with_max_request_body_size(message_bytes_max + codec::PREFIX_BYTES)
        .with_max_message_size(message_bytes_max);
    let engine = ConnectRpcService::new(bridge::Bridge::new(contract, rpc))
        .with_limits(limits)
        .with_compression_policy(CompressionPolicy::default());
    let service = tower::service_fn(move |mut request: Request| {
        let mut engine = engine.clone();
        async move {
            let late = trailers::LateTrailers::default();
            request.extensions_mut().insert(late.clone());
            if *request.method() == Method::GET {
                let query = GetQuery(request.uri().query().unwrap_or_default().to_owned());
                request.extensions_mut().insert(query);
            }
            let response = engine.call(request).await?;
            Ok(response.map(|body| Body::new(trailers::WithLate::new(Body::new(body), late))))
        }
    });
    BoxCloneSyncService::new(service.map_response(|response: Response| response))
}

/// True for gRPC and gRPC-Web requests: tonic handles them.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    content_type(headers).starts_with("application/grpc")
}

/// Refuses a request that only claims gRPC: a method other than POST, or a codec that tonic would
/// mistake for protobuf.
pub(crate) fn not_grpc(request: &Request) -> Option<Response> {
    if *request.method() != Method::POST {
        return Some((StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "POST")]).into_response());
    }
    let media_type = content_type(request.headers());
    let media_type = media_type.split(';').next().unwrap_or_default().trim_end();
    let known = ["application/grpc", "application/grpc+proto"].contains(&media_type)
        || media_type.starts_with("application/grpc-web");
    (!known).then(|| StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response())
}

fn content_type(headers: &HeaderMap) -> &str {
    headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// A refusal before any handler, in the protocol of the request.
pub(crate) fn refusal(method: &Method, headers: &HeaderMap, status: Status) -> Response {
    if *method == Method::POST && is_grpc(headers) {
        let mut response: Response = status.into_http();
        if content_type(headers).starts_with("application/grpc-web") {
            let web = HeaderValue::from_static("application/grpc-web+proto");
            response.headers_mut().insert(CONTENT_TYPE, web);
        }
        return response;
    }
    let response = errors::to_connect(&status).into_http_response(headers);
    challenge(response.map(Body::new), status.code())
}

/// The response for an error of a unary call or an HTTP read: Connect's JSON form and HTTP status.
pub(crate) fn unary_error(status: &Status) -> Response {
    challenge(errors::to_connect(status).into_response(), status.code())
}

/// Adds the required scheme to a 401 (RFC 9110 11.6.1).
fn challenge(mut response: Response, code: Code) -> Response {
    if code == Code::Unauthenticated && response.status() == StatusCode::UNAUTHORIZED {
        let bearer = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
    }
    response
}
