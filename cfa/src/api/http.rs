//! HTTP diagnostic reads (specification 4.6, D43): `GET /operations/{id}`, `/operations`,
//! `/instruments`, `/instruments/{id}`, `/holders`.

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::routing::get;
use proto::cfa::v1 as pb;
use proto::common::v1::PaginationRequest;
use rpc::json::{HttpError, Json, list, resource};
use serde::Deserialize;
use types::OperationType;

use super::{Api, to_status};
use crate::model::{InstrumentStatus, Status};

#[derive(Deserialize, Default)]
#[serde(default)]
struct Filters {
    user_id: String,
    instrument_id: String,
    #[serde(rename = "type")]
    kind: String,
    status: String,
    external_ref: String,
    page_size: i32,
    page_token: String,
}

impl Filters {
    fn pagination(&self) -> Option<PaginationRequest> {
        Some(PaginationRequest {
            page_size: self.page_size,
            page_token: self.page_token.clone(),
        })
    }
}

/// Parses a name with or without its enum prefix (T40). An unknown name gets a code of no row.
fn code(text: &str, prefix: &str, known: impl Fn(&str) -> Option<i32>) -> i32 {
    if text.is_empty() {
        0
    } else {
        known(text.strip_prefix(prefix).unwrap_or(text)).unwrap_or(i32::MAX)
    }
}

pub(super) fn router(api: Api) -> Router {
    Router::new()
        .route("/operations/{operation_id}", get(operation))
        .route("/operations", get(operations))
        .route("/instruments/{instrument_id}", get(instrument))
        .route("/instruments", get(instruments))
        .route("/holders", get(holders))
        .with_state(api)
}

async fn operation(
    State(api): State<Api>,
    caller: rpc::Caller,
    Path(operation_id): Path<String>,
) -> Result<Json, HttpError> {
    Ok(resource(
        &api.operation(&caller, &operation_id).await?,
        "dfa.cfa.v1.CfaOperation",
    ))
}

async fn operations(
    State(api): State<Api>,
    caller: rpc::Caller,
    Query(filters): Query<Filters>,
) -> Result<Json, HttpError> {
    let pagination = filters.pagination();
    let request = pb::ListOperationsRequest {
        context: None,
        user_id: filters.user_id,
        r#type: code(&filters.kind, "OPERATION_TYPE_", |name| {
            name.parse().ok().map(OperationType::code)
        }),
        status: code(&filters.status, "OPERATION_STATUS_", |name| {
            name.parse().ok().map(Status::code)
        }),
        external_ref: filters.external_ref,
        pagination,
        ..Default::default()
    };
    let page = api.operations(&caller, request).await?;
    Ok(list(
        &page.operations,
        "dfa.cfa.v1.CfaOperation",
        &page.pagination.unwrap_or_default().next_page_token,
    ))
}

async fn instrument(
    State(api): State<Api>,
    Path(instrument_id): Path<String>,
) -> Result<Json, HttpError> {
    let instrument = api
        .service
        .require_instrument(&instrument_id)
        .await
        .map_err(to_status)?;
    let message = api.instrument_message(&instrument).await?;
    Ok(resource(&message, "dfa.cfa.v1.Instrument"))
}

async fn instruments(
    State(api): State<Api>,
    Query(filters): Query<Filters>,
) -> Result<Json, HttpError> {
    let status = code(&filters.status, "INSTRUMENT_STATUS_", |name| {
        name.parse().ok().map(InstrumentStatus::code)
    });
    let page = api
        .instruments(pb::ListInstrumentsRequest {
            context: None,
            status,
            pagination: filters.pagination(),
        })
        .await?;
    Ok(list(
        &page.instruments,
        "dfa.cfa.v1.Instrument",
        &page.pagination.unwrap_or_default().next_page_token,
    ))
}

async fn holders(
    State(api): State<Api>,
    caller: rpc::Caller,
    Query(filters): Query<Filters>,
) -> Result<Json, HttpError> {
    let pagination = filters.pagination();
    let request = pb::ListHoldersRequest {
        context: None,
        instrument_id: filters.instrument_id,
        pagination,
        as_of: None,
    };
    let page = api.holders(&caller, request).await?;
    Ok(list(
        &page.holders,
        "dfa.cfa.v1.HolderBalance",
        &page.pagination.unwrap_or_default().next_page_token,
    ))
}
