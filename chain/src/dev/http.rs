//! JSON-RPC 2.0 over HTTP for tools that read the development chain (wallets, explorers, `cast`).
//!
//! The port has the limits of all ports (`rpc::Limits`) and bodies of [`rpc::MESSAGE_BYTES_MAX`].
//! Browser pages may read it only from the configured origins.

use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower_http::cors::CorsLayer;

use super::rpc::Origin;
use super::{DevChain, RpcFailure};

/// Requests in one JSON-RPC batch.
const BATCH_MAX: usize = 100;
/// Bytes of the answers of a batch after which its remaining requests fail.
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
        .route("/", index.post(answer))
        .with_state(chain)
        .layer(DefaultBodyLimit::max(rpc::MESSAGE_BYTES_MAX))
        .layer(cors);
    rpc::serve::serve_http_within(listener, router, limits, shutdown).await
}

async fn answer(State(chain): State<DevChain>, body: String) -> Json<Value> {
    let Ok(request) = serde_json::from_str::<Value>(&body) else {
        return Json(failure(Value::Null, RpcFailure::new(-32700, "Parse error")));
    };
    match request {
        Value::Array(requests) if requests.is_empty() || requests.len() > BATCH_MAX => {
            Json(failure(
                Value::Null,
                RpcFailure::new(
                    -32600,
                    format!("a batch must have 1 to {BATCH_MAX} requests"),
                ),
            ))
        }
        Value::Array(requests) => {
            let (mut answers, mut bytes) = (Vec::with_capacity(requests.len()), 0);
            for request in requests {
                let answer = match bytes > BATCH_BYTES_MAX {
                    true => failure(id_of(&request), too_much()),
                    false => one(&chain, request).await,
                };
                bytes += answer.to_string().len();
                answers.push(answer);
            }
            Json(Value::Array(answers))
        }
        request => Json(one(&chain, request).await),
    }
}

async fn one(chain: &DevChain, request: Value) -> Value {
    let id = id_of(&request);
    let Some(method) = request.get("method").and_then(Value::as_str) else {
        return failure(id, RpcFailure::new(-32600, "Invalid request"));
    };
    match chain
        .handle(
            method,
            request.get("params").cloned().unwrap_or(Value::Null),
            Origin::Port,
        )
        .await
    {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(error) => failure(id, error),
    }
}

fn id_of(request: &Value) -> Value {
    request.get("id").cloned().unwrap_or(Value::Null)
}

fn too_much() -> RpcFailure {
    RpcFailure::rejected("answers of the batch too large: send the request again")
}

fn failure(id: Value, error: RpcFailure) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": error})
}
