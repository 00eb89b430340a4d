//! HTTP reads (D43) and the bank's webhook (D29).
//!
//! The webhook returns 200 for an accepted or repeated event, 401 for a bad signature, 404 for an
//! unknown payment or payout, 409 for another amount, 400 for a signed but invalid body, 413 for an
//! oversized body. Any other failure is 5xx, and the bank retries.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use rpc::{
    Caller,
    json::{HttpError, Json, resource},
};
use serde_json::json;
use tonic::Status;

use super::convert;
use rail::webhook::{BODY_BYTES_MAX, ID_HEADER, SIGNATURE_HEADER, Signed, TIMESTAMP_HEADER};

use crate::{
    repo::payouts,
    service::{Fault, Gateway},
};

pub fn router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/payouts/{payout_id}", get(payout))
        .route("/reconciliation/latest", get(latest_report))
        .route(
            "/webhook",
            post(webhook).layer(DefaultBodyLimit::max(BODY_BYTES_MAX)),
        )
        .with_state(gateway)
}

async fn payout(
    State(gateway): State<Arc<Gateway>>,
    caller: Caller,
    Path(payout_id): Path<String>,
) -> Result<Json, HttpError> {
    let found = payouts::get(gateway.db.read(), &payout_id)
        .await
        .map_err(|error| Status::from(Fault::from(error)))?
        .ok_or_else(|| Status::from(Fault::PayoutNotFound))?;
    caller.require_user(&found.user_id)?;
    let shown = convert::payout_for(&caller, &found);
    Ok(resource(&shown, "dfa.payments.v1.Payout"))
}

async fn latest_report(State(gateway): State<Arc<Gateway>>) -> Result<Json, HttpError> {
    let report = gateway.latest_report().await.map_err(Status::from)?;
    Ok(resource(
        &convert::report(&report),
        "dfa.payments.v1.ReconcileReport",
    ))
}

async fn webhook(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, body: Bytes) -> Response {
    let header = |name| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
    };
    let signed = Signed {
        id: header(ID_HEADER),
        timestamp: header(TIMESTAMP_HEADER),
        signatures: header(SIGNATURE_HEADER),
    };
    match gateway.handle_webhook(signed, &body, None).await {
        Ok(_) => axum::Json(json!({ "received": true })).into_response(),
        Err(fault) => {
            let conflict = matches!(fault, Fault::AmountMismatch);
            let mut response = HttpError(fault.into()).into_response();
            if conflict {
                *response.status_mut() = StatusCode::CONFLICT;
            }
            response
        }
    }
}
