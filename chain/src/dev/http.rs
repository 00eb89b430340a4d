//! JSON-RPC 2.0 over HTTP for tools that read the development chain (wallets, explorers, `cast`).
//!
//! The port has the limits of all ports (`rpc::Limits`) and accepts bodies of up to
//! [`rpc::MESSAGE_BYTES_MAX`] bytes. Only browser pages of the configured origins may read it.

use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower_http::cors::CorsLayer;

use super::rpc::Source;
use super::{DevChain, RpcFailure};

/// Limit of requests per JSON-RPC batch.
const BATCH_MAX: usize = 100;
/// Limit of a batch's responses in bytes. Once they exceed it, the remaining requests fail.
const BATCH_BYTES_MAX: usize = 2 << 20;

/// Serves until `shutdown`.
pub async fn serve(
    chain: DevChain,
    listener: tokio::net::TcpListener,
    origins: Vec<HeaderValue>,
    limits: rpc::Limits,
    shutdown: CancellationToken,
) -> Result<(), rpc::Error> {
    let cors = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::POST])
        .allow_headers([CONTENT_TYPE]);
    let index = rpc::serve::http_index("JSON-RPC 2.0", "development chain", &[]);
    let router = Router::new()
        .route("/", index.post(handle_body))
        .with_state(chain)
        .layer(DefaultBodyLimit::max(rpc::MESSAGE_BYTES_MAX))
        .layer(cors);
    rpc::serve::serve_http_within(listener, router, limits, shutdown).await
}

async fn handle_body(State(chain): State<DevChain>, body: String) -> Json<Value> {
    let Ok(request) = serde_json::from_str::<Value>(&body) else {
        return Json(error_response(
            Value::Null,
            RpcFailure::new(-32700, "Parse error"),
        ));
    };
    match request {
        Value::Array(requests) if requests.is_empty() || requests.len() > BATCH_MAX => {
            Json(error_response(
                Value::Null,
                RpcFailure::new(
                    -32600,
                    format!("a batch must have 1 to {BATCH_MAX} requests"),
                ),
            ))
        }
        Value::Array(requests) => {
            let (mut responses, mut bytes) = (Vec::with_capacity(requests.len()), 0);
            for request in requests {
                let response = match bytes > BATCH_BYTES_MAX {
                    true => error_response(id_of(&request), batch_too_large()),
                    false => handle_request(&chain, request).await,
                };
                bytes += response.to_string().len();
                responses.push(response);
            }
            Json(Value::Array(responses))
        }
        request => Json(handle_request(&chain, request).await),
    }
}

async fn handle_request(chain: &DevChain, request: Value) -> Value {
    let id = id_of(&request);
    let Some(method) = request.get("method").and_then(Value::as_str) else {
        return error_response(id, RpcFailure::new(-32600, "Invalid request"));
    };
    match chain
        .handle(
            method,
            request.get("params").cloned().unwrap_or(Value::Null),
            Source::Port,
        )
        .await
    {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(error) => error_response(id, error),
    }
}

fn id_of(request: &Value) -> Value {
    request.get("id").cloned().unwrap_or(Value::Null)
}

fn batch_too_large() -> RpcFailure {
    RpcFailure::rejected(format!(
        "batch responses exceed {BATCH_BYTES_MAX} bytes: send this request in another batch"
    ))
}

fn error_response(id: Value, error: RpcFailure) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": error})
}
