//! Rows as JSON arrays, which carry many of them in one bound value.

use serde_json::{Value, json};

use crate::model::{Account, Hold, Id, Operation, Posting, SubAccount};

/// Many ids in one bound value.
pub fn ids<'a>(items: impl IntoIterator<Item = &'a Id>) -> String {
    let items: Vec<&str> = items.into_iter().map(|id| &**id).collect();
    serde_json::to_string(&items).expect("texts have a JSON form")
}

/// Many rows in one bound value.
pub fn rows(items: impl IntoIterator<Item = Value>) -> String {
    Value::Array(items.into_iter().collect()).to_string()
}

pub fn account(row: &Account) -> Value {
    json!([
        &*row.account_id,
        &*row.user_id,
        row.kind.code(),
        row.created_at_us,
        row.updated_at_us
    ])
}

pub fn subaccount(row: &SubAccount) -> Value {
    let terms = &row.terms;
    json!([
        &*terms.subaccount_id,
        &*terms.account_id,
        &*terms.user_id,
        &*terms.instrument_id,
        row.balance.0,
        row.held.0,
        row.unsettled.0,
        row.version,
        row.freeze,
        i32::from(row.closed),
        i32::from(terms.may_be_negative),
        terms.created_at_us,
        row.updated_at_us
    ])
}

pub fn operation(row: &Operation) -> Value {
    let terms = &row.terms;
    json!([
        &*terms.operation_id,
        terms.scope.code(),
        terms.kind.code(),
        row.status.code(),
        &*terms.user_id,
        &*terms.idempotency_key,
        terms.external_ref.as_deref(),
        row.tx_hash.as_deref(),
        row.rejection_code,
        row.rejection_message,
        i32::from(terms.awaits_chain),
        terms.reverses.as_deref(),
        row.reversed_by.as_deref(),
        terms.digest,
        terms.created_at_us,
        row.finalized_at_us
    ])
}

/// Only what may change.
pub fn operation_state(row: &Operation) -> Value {
    json!([
        &*row.terms.operation_id,
        row.status.code(),
        row.tx_hash.as_deref(),
        row.rejection_code,
        row.rejection_message,
        row.reversed_by.as_deref(),
        row.finalized_at_us
    ])
}

pub fn posting(row: &Posting) -> Value {
    json!([
        &*row.operation_id,
        row.ordinal,
        &*row.posting_id,
        &*row.debit_subaccount_id,
        &*row.credit_subaccount_id,
        &*row.amount.instrument_id,
        row.amount.minor.0,
        row.hold_id.as_deref(),
        i32::from(row.unsettled),
        row.debit_balance_after.0,
        row.debit_version,
        row.credit_balance_after.0,
        row.credit_version,
        row.created_at_us
    ])
}

pub fn hold(row: &Hold) -> Value {
    let terms = &row.terms;
    json!([
        &*terms.hold_id,
        &*terms.subaccount_id,
        &*terms.user_id,
        &*terms.instrument_id,
        row.amount.0,
        row.remaining.0,
        row.added.0,
        row.split_off.0,
        row.consumed.0,
        row.released.0,
        row.returned.0,
        row.status.code(),
        i32::from(row.expiry_told),
        terms.reason,
        terms.owner,
        terms.parent_hold_id.as_deref(),
        terms.destination_subaccount_id.as_deref(),
        terms.expires_at_us,
        terms.created_at_us,
        row.updated_at_us
    ])
}
