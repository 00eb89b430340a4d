//! JSON-RPC 2.0 over HTTP for tools that want to look at the development chain (wallets, explorers, `cast`).

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{DevChain, RpcFailure};

/// Requests in one JSON-RPC batch.
const BATCH_LIMIT: usize = 100;

/// Serves until `shutdown`.
pub async fn serve(
    chain: DevChain,
    listener: tokio::net::TcpListener,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new().route("/", post(answer)).with_state(chain);
    axum::serve(listener, router)
        .with_graceful_shutdown(async move { shutdown.cancelled().await })
        .await
}

async fn answer(State(chain): State<DevChain>, body: String) -> Json<Value> {
    let Ok(request) = serde_json::from_str::<Value>(&body) else {
        return Json(failure(Value::Null, RpcFailure::new(-32700, "Parse error")));
    };
    match request {
        Value::Array(requests) if requests.is_empty() || requests.len() > BATCH_LIMIT => {
            Json(failure(
                Value::Null,
                RpcFailure::new(-32600, "a batch has 1 to 100 requests"),
            ))
        }
        Value::Array(requests) => {
            let mut answers = Vec::with_capacity(requests.len());
            for request in requests {
                answers.push(one(&chain, request).await);
            }
            Json(Value::Array(answers))
        }
        request => Json(one(&chain, request).await),
    }
}

async fn one(chain: &DevChain, request: Value) -> Value {
    let id = request.get("id").cloned().unwrap_or(Value::Null);
    let Some(method) = request.get("method").and_then(Value::as_str) else {
        return failure(id, RpcFailure::new(-32600, "Invalid request"));
    };
    match chain
        .handle(
            method,
            request.get("params").cloned().unwrap_or(Value::Null),
        )
        .await
    {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(error) => failure(id, error),
    }
}

fn failure(id: Value, error: RpcFailure) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": error})
}
