//! The bank's contract over plain HTTP and JSON (`rail::messages`).
//!
//! Every request to a path of the contract needs the gateway's signature over its method, path,
//! time and body (R021). An unsigned or altered request gets 401 and has no effect. An unknown path
//! gets 404, signed or not.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::{Body, Bytes, to_bytes},
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use rail::{
    messages::ErrorBody,
    request_signature::{
        self, KEY_ID_HEADER, SIGNATURE_HEADER, SignatureError, Signed, TIMESTAMP_HEADER,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use service_kit::clock;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use types::PaymentStatus;

use super::{
    operations::{Bank, Fault, Refusal},
    repo,
};

/// Maximum request body, in bytes.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// HTTP state: the bank and the gateway's public key.
#[derive(Clone)]
pub struct HttpState {
    pub bank: Arc<Bank>,
    pub gateway_key: Arc<[u8]>,
}

pub async fn serve(
    listener: TcpListener,
    state: HttpState,
    limits: rpc::Limits,
    shutdown: CancellationToken,
) {
    let contract = Router::new()
        .route("/sbp/v1/qr", post(create_qr))
        .route("/sbp/v1/payments/{payment_id}", get(payment_status))
        .route("/sbp/v1/balance", get(sbp_balance))
        .route("/bank/v1/incoming", post(expect_transfer))
        .route("/bank/v1/transfers", post(initiate_transfer))
        .route("/bank/v1/transfers/{transfer_id}", get(transfer_status))
        .route("/bank/v1/accounts/{account_number}/balance", get(balance))
        // An unknown path is refused before its body is read.
        .route_layer(from_fn_with_state(state.clone(), check))
        .with_state(state);
    let index = rpc::serve::http_index("HTTP", "bank and fast payments (sandbox)", &["/health"]);
    let app = Router::new()
        .route("/", index)
        .route("/health", get(async || Json(json!({ "status": "ok" }))))
        .merge(contract);
    if let Err(error) = rpc::serve::serve_http_within(listener, app, limits, shutdown).await {
        tracing::error!(%error, "bank's HTTP server failed");
    }
}

/// Middleware: returns 503 under the UNAVAILABLE fault; verifies the signature of the raw body.
async fn check(State(state): State<HttpState>, request: Request, next: Next) -> Response {
    match repo::has_fault(state.bank.db.read(), Fault::Unavailable, "").await {
        Ok(false) => {}
        Ok(true) => {
            return error(
                StatusCode::SERVICE_UNAVAILABLE,
                "UNAVAILABLE",
                "retry later",
            );
        }
        Err(failure) => return Failed(failure.into()).into_response(),
    }
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_BYTES_MAX).await else {
        return error(
            StatusCode::PAYLOAD_TOO_LARGE,
            "TOO_LARGE",
            "body is too long",
        );
    };
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    let verdict = verify(
        &state.gateway_key,
        &parts.headers,
        parts.method.as_str(),
        path,
        &body,
    );
    if let Err(refusal) = verdict {
        tracing::warn!(path, %refusal, "bank refused a request: signature check failed");
        return error(StatusCode::UNAUTHORIZED, "SIGNATURE", &refusal.to_string());
    }
    next.run(Request::from_parts(parts, Body::from(body))).await
}

fn verify(
    gateway_key: &[u8],
    headers: &HeaderMap,
    method: &str,
    path: &str,
    body: &[u8],
) -> Result<(), SignatureError> {
    let header = |name| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .ok_or(SignatureError::Missing)
    };
    let signed = Signed {
        key_id: header(KEY_ID_HEADER)?,
        timestamp: header(TIMESTAMP_HEADER)?,
        signature: header(SIGNATURE_HEADER)?,
    };
    let now_s = clock::now_us() / 1_000_000;
    request_signature::verify(gateway_key, signed, method, path, body, now_s)
}

async fn create_qr(State(state): State<HttpState>, body: Bytes) -> Result<Response, Failed> {
    answer(state.bank.create_qr(read(&body)?).await)
}

async fn expect_transfer(State(state): State<HttpState>, body: Bytes) -> Result<Response, Failed> {
    answer(state.bank.expect_transfer(read(&body)?).await)
}

async fn payment_status(
    State(state): State<HttpState>,
    Path(payment_id): Path<String>,
) -> Result<Response, Failed> {
    answer(state.bank.payment_status(&payment_id).await)
}

async fn sbp_balance(State(state): State<HttpState>) -> Result<Response, Failed> {
    let account_number = &state.bank.config.account_number;
    answer(state.bank.balance(account_number).await)
}

async fn balance(
    State(state): State<HttpState>,
    Path(account_number): Path<String>,
) -> Result<Response, Failed> {
    answer(state.bank.balance(&account_number).await)
}

async fn initiate_transfer(
    State(state): State<HttpState>,
    body: Bytes,
) -> Result<Response, Failed> {
    let transfer = state.bank.accept_order(read(&body)?).await?;
    let status = if transfer.status == PaymentStatus::Failed {
        StatusCode::UNPROCESSABLE_ENTITY
    } else {
        StatusCode::OK
    };
    Ok((status, Json(transfer.report())).into_response())
}

async fn transfer_status(
    State(state): State<HttpState>,
    Path(transfer_id): Path<String>,
) -> Result<Response, Failed> {
    let transfer = state.bank.transfer(&transfer_id).await?;
    Ok(Json(transfer.report()).into_response())
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| super::operations::bad_request("INVALID_REQUEST", error.to_string()))
}

fn answer<T: Serialize>(result: Result<T, Refusal>) -> Result<Response, Failed> {
    Ok(Json(result?).into_response())
}

fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let body = ErrorBody {
        code: code.to_owned(),
        message: message.to_owned(),
    };
    (status, Json(body)).into_response()
}

/// A refusal in the contract's JSON form.
struct Failed(Refusal);

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Failed {
        Failed(refusal)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        match self.0 {
            Refusal::BadRequest(body) => (StatusCode::BAD_REQUEST, Json(body)).into_response(),
            Refusal::NotFound => error(StatusCode::NOT_FOUND, "NOT_FOUND", "not found"),
            failure => {
                tracing::error!(error = %failure, "bank request failed");
                error(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "INTERNAL",
                    "internal error",
                )
            }
        }
    }
}
