//! Diagnostic HTTP reads of specification 4.6 (D43) for staff: the same resources as the RPCs.

use std::{str::FromStr, sync::Arc};

use axum::{
    Router,
    extract::{Path, Query, State},
    routing::get,
};
use proto::{
    common::v1::PaginationRequest, ledger::v1 as wire,
    ledger::v1::ledger_service_server::LedgerService,
};
use rpc::{
    Caller,
    json::{HttpError, Json, list, resource},
};
use serde::Deserialize;
use tonic::Request;

use super::Api;
use crate::model::{HoldStatus, OperationStatus, OperationType};

const ACCOUNT: &str = "dfa.ledger.v1.Account";
const OPERATION: &str = "dfa.ledger.v1.Operation";
const POSTING: &str = "dfa.ledger.v1.Posting";
const HOLD: &str = "dfa.ledger.v1.Hold";

type Answer = Result<Json, HttpError>;
type Reader = State<Arc<Api>>;

pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/accounts/{account_id}", get(account))
        .route("/operations", get(operations))
        .route("/operations/{operation_id}", get(operation))
        .route("/postings", get(postings))
        .route("/holds", get(holds))
        .route("/holds/{hold_id}", get(hold))
        .with_state(api)
}

/// Builds an RPC request with the caller that the access layer identified.
fn request<M>(caller: Caller, message: M) -> Request<M> {
    let mut request = Request::new(message);
    request.extensions_mut().insert(caller);
    request
}

/// Converts an enum name, bare or prefixed, to its number; empty is 0.
fn code<T: FromStr>(
    name: &str,
    prefix: &str,
    field: &str,
    code: impl Fn(T) -> i32,
) -> Result<i32, HttpError> {
    if name.is_empty() {
        return Ok(0);
    }
    let known: Result<T, _> = name.strip_prefix(prefix).unwrap_or(name).parse();
    known
        .map(code)
        .map_err(|_| rpc::status::invalid_argument(field, "is not a known value").into())
}

fn missing(message: &str) -> HttpError {
    rpc::status::internal(&crate::Error::Invariant(format!(
        "response without {message}"
    )))
    .into()
}

async fn account(State(api): Reader, caller: Caller, Path(account_id): Path<String>) -> Answer {
    let message = wire::GetAccountRequest {
        context: None,
        account_id,
    };
    let answer = LedgerService::get_account(&*api, request(caller, message))
        .await?
        .into_inner();
    Ok(resource(
        &answer.account.ok_or_else(|| missing("account"))?,
        ACCOUNT,
    ))
}

async fn operation(State(api): Reader, caller: Caller, Path(operation_id): Path<String>) -> Answer {
    let message = wire::GetOperationRequest {
        context: None,
        operation_id,
    };
    let answer = LedgerService::get_operation(&*api, request(caller, message))
        .await?
        .into_inner();
    Ok(resource(
        &answer.operation.ok_or_else(|| missing("operation"))?,
        OPERATION,
    ))
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListQuery {
    user_id: String,
    r#type: String,
    status: String,
    idempotency_key: String,
    operation_id: String,
    subaccount_id: String,
    owner: String,
    parent_hold_id: String,
    page_size: i32,
    page_token: String,
}

impl ListQuery {
    fn pagination(&self) -> Option<PaginationRequest> {
        Some(PaginationRequest {
            page_size: self.page_size,
            page_token: self.page_token.clone(),
        })
    }
}

async fn operations(State(api): Reader, caller: Caller, Query(query): Query<ListQuery>) -> Answer {
    let message = wire::ListOperationsRequest {
        context: None,
        r#type: code(
            &query.r#type,
            "OPERATION_TYPE_",
            "type",
            OperationType::code,
        )?,
        status: code(
            &query.status,
            "OPERATION_STATUS_",
            "status",
            OperationStatus::code,
        )?,
        pagination: query.pagination(),
        user_id: query.user_id,
        idempotency_key: query.idempotency_key,
    };
    let answer = LedgerService::list_operations(&*api, request(caller, message))
        .await?
        .into_inner();
    let next = answer.pagination.unwrap_or_default().next_page_token;
    Ok(list(&answer.operations, OPERATION, &next))
}

async fn postings(State(api): Reader, caller: Caller, Query(query): Query<ListQuery>) -> Answer {
    let message = wire::GetOperationRequest {
        context: None,
        operation_id: query.operation_id,
    };
    let answer = LedgerService::get_operation(&*api, request(caller, message))
        .await?
        .into_inner();
    Ok(list(&answer.postings, POSTING, ""))
}

async fn hold(State(api): Reader, caller: Caller, Path(hold_id): Path<String>) -> Answer {
    let message = wire::GetHoldRequest {
        context: None,
        hold_id,
    };
    let answer = LedgerService::get_hold(&*api, request(caller, message))
        .await?
        .into_inner();
    Ok(resource(&answer.hold.ok_or_else(|| missing("hold"))?, HOLD))
}

async fn holds(State(api): Reader, caller: Caller, Query(query): Query<ListQuery>) -> Answer {
    let message = wire::ListHoldsRequest {
        context: None,
        status: code(&query.status, "HOLD_STATUS_", "status", HoldStatus::code)?,
        pagination: query.pagination(),
        subaccount_id: query.subaccount_id,
        owner: query.owner,
        parent_hold_id: query.parent_hold_id,
    };
    let answer = LedgerService::list_holds(&*api, request(caller, message))
        .await?
        .into_inner();
    let next = answer.pagination.unwrap_or_default().next_page_token;
    Ok(list(&answer.holds, HOLD, &next))
}
