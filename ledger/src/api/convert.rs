//! Converts between wire messages and the ledger's types. Refusals use the field names of the
//! schema.

use proto::{
    checks::{ID_BYTES_MAX, TEXT_BYTES_MAX, id_problem, text_problem},
    common::v1 as common,
    convert::{
        self, ConvertError, to_decimal, to_decimal_minor, to_monetary_amount, to_timestamp_us,
    },
    ledger::v1 as wire,
};
use tonic::{Code, Status};

use crate::{
    fold::{NewHold, NewOperation, NewPosting, Replay, Step, StepKind},
    model::{
        Account, Amount, Hold, Id, Operation, OperationType, Posting, SubAccount, SubAccountStatus,
        Units,
    },
    refusal::{Class, Position, Refusal, Refused},
};

/// Status of a refusal (D23). `in_batch`: the status includes the index of the refused item.
pub fn status(refused: &Refused, in_batch: bool) -> Status {
    let mut status = bare_status(refused, in_batch);
    if refused.replay != Replay::No {
        rpc::context::mark_replayed(status.metadata_mut());
    }
    status
}

fn bare_status(refused: &Refused, in_batch: bool) -> Status {
    let refusal = &refused.refusal;
    if let Refusal::Invalid { field, problem } = refusal {
        let field = match refused.at.filter(|_| in_batch) {
            Some(Position::Operation(index)) => format!("operations[{index}].{field}"),
            Some(Position::HoldStep(index)) => format!("hold_steps[{index}].{field}"),
            None => field.clone(),
        };
        return rpc::status::invalid_argument(field, problem.clone());
    }
    if *refusal == Refusal::ApprovalRequired {
        return rpc::status::approval_required("dfa.ledger.v1.LedgerService/SetVelocityLimit");
    }
    let mut metadata = std::collections::HashMap::new();
    if let Refusal::InsufficientBalance(Some(shortage)) = refusal {
        metadata.insert("subaccount_id".to_owned(), shortage.subaccount_id.clone());
        metadata.insert("balance".to_owned(), shortage.balance.to_string());
        metadata.insert("held".to_owned(), shortage.held.to_string());
        metadata.insert("unsettled".to_owned(), shortage.unsettled.to_string());
        metadata.insert("available".to_owned(), shortage.available.to_string());
    }
    if let Refusal::LimitExceeded(Some(excess)) = refusal {
        metadata.insert("limit_id".to_owned(), excess.limit_id.clone());
        metadata.insert("subaccount_id".to_owned(), excess.subaccount_id.clone());
        metadata.insert("instrument_id".to_owned(), excess.instrument_id.clone());
        metadata.insert("window_seconds".to_owned(), excess.window_s.to_string());
        metadata.insert("limit".to_owned(), excess.amount.to_string());
        metadata.insert("used".to_owned(), excess.used.to_string());
        metadata.insert("left".to_owned(), excess.left.to_string());
        metadata.insert("asked".to_owned(), excess.asked.to_string());
    }
    match refused.at.filter(|_| in_batch) {
        Some(Position::Operation(index)) => {
            metadata.insert("operation_index".to_owned(), index.to_string())
        }
        Some(Position::HoldStep(index)) => {
            metadata.insert("hold_step_index".to_owned(), index.to_string())
        }
        None => None,
    };
    let code = match refusal.class() {
        Class::NotFound => Code::NotFound,
        Class::Precondition => Code::FailedPrecondition,
        Class::Exists => Code::AlreadyExists,
        Class::Invalid => Code::InvalidArgument,
    };
    rpc::status::with_metadata(code, refusal.reason(), refusal.to_string(), metadata)
}

fn invalid_field(field: &str) -> impl FnOnce(ConvertError) -> Refusal {
    move |error| Refusal::invalid(field, error.to_string())
}

fn check_problem(field: &str, problem: Option<String>) -> Result<(), Refusal> {
    problem.map_or(Ok(()), |problem| Err(Refusal::invalid(field, problem)))
}

/// Converts a required id.
pub fn id(field: &str, text: String) -> Result<Id, Refusal> {
    check_id(field, &text)?;
    Ok(text.into())
}

/// Checks the required id of a requested object.
pub fn check_id(field: &str, text: &str) -> Result<(), Refusal> {
    if text.is_empty() {
        return Err(Refusal::invalid(field, "must not be empty"));
    }
    check_problem(field, id_problem(text, ID_BYTES_MAX))
}

/// Converts an optional id. An empty text is `None`.
pub fn optional_id(field: &str, text: Option<String>) -> Result<Option<Id>, Refusal> {
    match text {
        Some(text) if !text.is_empty() => id(field, text).map(Some),
        _ => Ok(None),
    }
}

/// Checks the id in a filter of a list; empty for no filter.
pub fn check_id_filter(field: &str, text: &str) -> Result<(), Refusal> {
    check_problem(field, id_problem(text, ID_BYTES_MAX))
}

/// Checks a text, which may be empty.
pub fn check_text(field: &str, text: &str) -> Result<(), Refusal> {
    check_problem(field, text_problem(text, TEXT_BYTES_MAX))
}

/// Converts free text that may be empty.
pub fn text(field: &str, text: String) -> Result<String, Refusal> {
    check_text(field, &text)?;
    Ok(text)
}

/// Converts a transaction hash, `0x` and 64 hexadecimal digits, to lower case, so that equal hashes
/// are equal texts. An empty text is `None`.
pub fn tx_hash(field: &str, text: Option<String>) -> Result<Option<Id>, Refusal> {
    let Some(hash) = optional_id(field, text)? else {
        return Ok(None);
    };
    let is_hash = hash.strip_prefix("0x").is_some_and(|digits| {
        digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    if !is_hash {
        return Err(Refusal::invalid(field, "must be `0x` and 64 hex digits"));
    }
    Ok(Some(hash.to_ascii_lowercase().into()))
}

/// Converts a required positive amount.
pub fn amount(field: &str, value: Option<&common::MonetaryAmount>) -> Result<Amount, Refusal> {
    let (code, value) = convert::monetary_amount(value).map_err(invalid_field(field))?;
    Ok(Amount {
        instrument_id: code.into(),
        value,
    })
}

/// Converts a required amount that may be zero.
pub fn amount_or_zero(
    field: &str,
    value: Option<&common::MonetaryAmount>,
) -> Result<Amount, Refusal> {
    let value = value
        .ok_or(ConvertError::Missing)
        .map_err(invalid_field(field))?;
    Ok(Amount {
        instrument_id: value.currency_code.as_str().into(),
        value: convert::decimal(value.amount.as_ref()).map_err(invalid_field(field))?,
    })
}

fn optional_amount(
    field: &str,
    value: Option<&common::MonetaryAmount>,
) -> Result<Option<Amount>, Refusal> {
    value.map(|value| amount(field, Some(value))).transpose()
}

/// Converts an operation to write. `key` and `user_id` of the call are defaults for its fields.
pub fn new_operation(
    operation: Option<wire::Operation>,
    postings: Vec<wire::Posting>,
    key: &str,
    user_id: &str,
) -> Result<NewOperation, Refusal> {
    let mut operation = operation.ok_or_else(|| Refusal::invalid("operation", "is required"))?;
    // The fingerprint excludes the key: it is removed here and restored below.
    let own_key = std::mem::take(&mut operation.idempotency_key);
    let whole = wire::NewOperation {
        operation: Some(operation),
        postings,
    };
    let digest = rpc::context::digest(&whole);
    let wire::NewOperation {
        operation,
        postings,
    } = whole;
    let operation = operation.unwrap_or_default();
    // The key of the call is checked already and may be longer than an id.
    let user_id = match operation.user_id.as_str() {
        "" => user_id.to_owned(),
        own => own.to_owned(),
    };
    let idempotency_key = match own_key.as_str() {
        "" => key.to_owned().into(),
        _ => id("operation.idempotency_key", own_key)?,
    };
    let postings = postings
        .into_iter()
        .enumerate()
        .map(|(index, posting)| new_posting(index, posting))
        .collect::<Result<_, _>>()?;
    Ok(NewOperation {
        operation_id: optional_id("operation.operation_id", Some(operation.operation_id))?,
        kind: OperationType::from_code(operation.r#type).ok_or_else(|| {
            Refusal::invalid("operation.type", "must be one of the operation types")
        })?,
        user_id: id("operation.user_id", user_id)?,
        idempotency_key,
        external_ref: optional_id("operation.external_ref", operation.external_ref)?,
        tx_hash: tx_hash("operation.onchain_tx_hash", operation.onchain_tx_hash)?,
        awaits_chain: operation.awaits_chain,
        postings,
        digest,
        is_final: false,
    })
}

fn new_posting(index: usize, posting: wire::Posting) -> Result<NewPosting, Refusal> {
    let read = || {
        Ok(NewPosting {
            debit_subaccount_id: id("debit_subaccount_id", posting.debit_subaccount_id)?,
            credit_subaccount_id: id("credit_subaccount_id", posting.credit_subaccount_id)?,
            amount: amount("amount", posting.amount.as_ref())?,
            hold_id: optional_id("hold_id", posting.hold_id)?,
            unsettled: posting.unsettled,
        })
    };
    read().map_err(|refusal: Refusal| refusal.of_posting(index))
}

/// Converts a hold to open.
pub fn new_hold(hold: Option<wire::Hold>) -> Result<NewHold, Refusal> {
    let hold = hold.ok_or_else(|| Refusal::invalid("hold", "is required"))?;
    Ok(NewHold {
        hold_id: optional_id("hold.hold_id", Some(hold.hold_id))?,
        subaccount_id: id("hold.subaccount_id", hold.subaccount_id)?,
        amount: amount("hold.amount", hold.amount.as_ref())?,
        reason: text("hold.reason", hold.reason)?,
        owner: text("hold.owner", hold.owner)?,
        destination_subaccount_id: optional_id(
            "hold.destination_subaccount_id",
            hold.destination_subaccount_id,
        )?,
        expires_at_us: hold.expires_at.as_ref().map(convert::timestamp_us),
    })
}

/// Converts a hold step of a batch.
pub fn step(step: wire::HoldStep) -> Result<Step, Refusal> {
    use wire::hold_step::Step as Wire;
    let kind = match step
        .step
        .ok_or_else(|| Refusal::invalid("step", "is required"))?
    {
        Wire::Open(open) => {
            StepKind::Open(new_hold(open.hold).map_err(|refusal| refusal.under("open"))?)
        }
        Wire::Split(split) => StepKind::Split {
            parent_hold_id: id("split.parent_hold_id", split.parent_hold_id)?,
            hold_id: id("split.hold_id", split.hold_id)?,
            amount: amount("split.amount", split.amount.as_ref())?,
            reason: text("split.reason", split.reason)?,
        },
        Wire::Grow(grow) => StepKind::Grow {
            hold_id: id("grow.hold_id", grow.hold_id)?,
            amount: amount("grow.amount", grow.amount.as_ref())?,
        },
        Wire::ReturnToParent(back) => StepKind::Return {
            hold_id: id("return_to_parent.hold_id", back.hold_id)?,
            amount: optional_amount("return_to_parent.amount", back.amount.as_ref())?,
            reason: text("return_to_parent.reason", back.reason)?,
        },
        Wire::Shrink(shrink) => StepKind::Shrink {
            hold_id: id("shrink.hold_id", shrink.hold_id)?,
            amount: optional_amount("shrink.amount", shrink.amount.as_ref())?,
            reason: text("shrink.reason", shrink.reason)?,
        },
        Wire::Spend(spend) => StepKind::Spend {
            hold_id: id("spend.hold_id", spend.hold_id)?,
            amount: amount("spend.amount", spend.amount.as_ref())?,
        },
    };
    Ok(Step {
        before_operation: step.before_operation as usize,
        kind,
    })
}

pub fn subaccount_status(code: i32) -> Result<SubAccountStatus, Refusal> {
    SubAccountStatus::from_code(code)
        .ok_or_else(|| Refusal::invalid("status", "must be ACTIVE, FROZEN or CLOSED"))
}

fn wire_amount(units: &Units) -> Option<common::MonetaryAmount> {
    Some(to_monetary_amount(&units.instrument_id, units.decimal()))
}

pub fn to_account(account: &Account) -> wire::Account {
    wire::Account {
        account_id: account.account_id.to_string(),
        user_id: account.user_id.to_string(),
        r#type: account.kind.code(),
        created_at: Some(to_timestamp_us(account.created_at_us)),
        updated_at: Some(to_timestamp_us(account.updated_at_us)),
    }
}

pub fn to_subaccount(row: &SubAccount) -> wire::SubAccount {
    let terms = &row.terms;
    let decimal = |minor| Some(to_decimal(row.units(minor).decimal()));
    wire::SubAccount {
        subaccount_id: terms.subaccount_id.to_string(),
        account_id: terms.account_id.to_string(),
        instrument_id: terms.instrument_id.to_string(),
        balance: decimal(row.balance),
        status: row.status().code(),
        created_at: Some(to_timestamp_us(terms.created_at_us)),
        updated_at: Some(to_timestamp_us(row.updated_at_us)),
        held: decimal(row.held),
        unsettled: decimal(row.unsettled),
        available: decimal(row.available()),
        version: row.version,
    }
}

pub fn to_operation(row: &Operation) -> wire::Operation {
    let terms = &row.terms;
    let text = |id: &Option<Id>| id.as_ref().map(ToString::to_string);
    wire::Operation {
        operation_id: terms.operation_id.to_string(),
        r#type: terms.kind.code(),
        status: row.status.code(),
        user_id: terms.user_id.to_string(),
        idempotency_key: terms.idempotency_key.to_string(),
        external_ref: text(&terms.external_ref),
        onchain_tx_hash: text(&row.tx_hash),
        rejection_reason: row.rejection_code,
        rejection_message: row.rejection_message.clone(),
        created_at: Some(to_timestamp_us(terms.created_at_us)),
        finalized_at: row.finalized_at_us.map(to_timestamp_us),
        reverses_operation_id: text(&terms.reverses),
        awaits_chain: terms.awaits_chain,
    }
}

pub fn to_posting(row: &Posting) -> wire::Posting {
    let decimals = row.amount.decimals;
    wire::Posting {
        posting_id: row.posting_id.to_string(),
        operation_id: row.operation_id.to_string(),
        debit_subaccount_id: row.debit_subaccount_id.to_string(),
        credit_subaccount_id: row.credit_subaccount_id.to_string(),
        amount: wire_amount(&row.amount),
        created_at: Some(to_timestamp_us(row.created_at_us)),
        hold_id: row.hold_id.as_ref().map(ToString::to_string),
        unsettled: row.unsettled,
        debit_balance_after: Some(to_decimal_minor(row.debit_balance_after.0, decimals)),
        credit_balance_after: Some(to_decimal_minor(row.credit_balance_after.0, decimals)),
    }
}

pub fn to_hold(row: &Hold) -> wire::Hold {
    let terms = &row.terms;
    let decimal = |minor| Some(to_decimal(row.units(minor).decimal()));
    wire::Hold {
        hold_id: terms.hold_id.to_string(),
        subaccount_id: terms.subaccount_id.to_string(),
        amount: wire_amount(&row.units(row.amount)),
        status: row.status.code(),
        reason: terms.reason.clone(),
        created_at: Some(to_timestamp_us(terms.created_at_us)),
        expires_at: terms.expires_at_us.map(to_timestamp_us),
        remaining_amount: wire_amount(&row.units(row.remaining)),
        destination_subaccount_id: terms
            .destination_subaccount_id
            .as_ref()
            .map(ToString::to_string),
        owner: terms.owner.clone(),
        parent_hold_id: terms.parent_hold_id.as_ref().map(ToString::to_string),
        split_off: decimal(row.split_off),
        consumed: decimal(row.consumed),
        released: decimal(row.released),
        returned_by_children: decimal(row.returned),
        added: decimal(row.added),
    }
}
