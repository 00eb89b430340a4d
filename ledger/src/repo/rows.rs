//! Rows of both databases, and the JSON format of stored answers.

use std::sync::Arc;

use types::Minor;

use super::limits::LimitRow;
use crate::{
    Error,
    fold::{StoredAnswer, StoredOutcome, StoredRefusal},
    model::{
        Account, AccountType, Hold, HoldStatus, HoldTerms, Id, Link, Operation, OperationStatus,
        OperationTerms, OperationType, PendingReceipt, Posting, Scope, SubAccount, SubAccountTerms,
        Units,
    },
    refusal::{Position, Refusal},
};

/// The error of a row that violates the schema.
pub fn corrupt(what: &str, id: &str) -> Error {
    Error::Invariant(format!("corrupt {what} {id}"))
}

fn some_id(text: Option<String>) -> Option<Id> {
    text.map(Id::from)
}

/// Joins a sum that was read as two 32-bit halves, which cannot overflow.
pub fn wide(high: i64, low: i64) -> i128 {
    (i128::from(high) << 32) + i128::from(low)
}

events::row! {
    pub struct AccountRow {
        pub(super) account_id: String,
        pub(super) user_id: String,
        pub(super) kind: i32,
        pub(super) created_at_us: i64,
        pub(super) updated_at_us: i64,
    }
}

impl TryFrom<AccountRow> for Account {
    type Error = Error;

    fn try_from(row: AccountRow) -> Result<Self, Error> {
        Ok(Account {
            kind: AccountType::from_code(row.kind)
                .ok_or_else(|| corrupt("account", &row.account_id))?,
            account_id: row.account_id.into(),
            user_id: row.user_id.into(),
            created_at_us: row.created_at_us,
            updated_at_us: row.updated_at_us,
        })
    }
}

pub const SUB_ACCOUNT: &str = "SELECT s.*, COALESCE(i.decimals, 0) AS decimals FROM sub_accounts s \
     LEFT JOIN instruments i ON i.instrument_id = s.instrument_id";

events::row! {
    #[derive(Clone)]
    pub struct SubAccountRow {
        subaccount_id: String,
        account_id: String,
        user_id: String,
        instrument_id: String,
        decimals: u8 as i32,
        balance: i64,
        held: i64,
        unsettled: i64,
        version: i64,
        freeze: u8 as i32,
        closed: bool,
        may_be_negative: bool,
        created_at_us: i64,
        updated_at_us: i64,
    }
}

impl SubAccountRow {
    pub fn id(&self) -> &str {
        &self.subaccount_id
    }
}

impl From<SubAccountRow> for SubAccount {
    fn from(row: SubAccountRow) -> Self {
        SubAccount {
            terms: Arc::new(SubAccountTerms {
                subaccount_id: row.subaccount_id.into(),
                account_id: row.account_id.into(),
                user_id: row.user_id.into(),
                instrument_id: row.instrument_id.into(),
                decimals: row.decimals,
                may_be_negative: row.may_be_negative,
                created_at_us: row.created_at_us,
            }),
            balance: Minor(row.balance),
            held: Minor(row.held),
            unsettled: Minor(row.unsettled),
            version: row.version.unsigned_abs(),
            freeze: row.freeze,
            closed: row.closed,
            updated_at_us: row.updated_at_us,
            last_posting: 0,
        }
    }
}

events::row! {
    pub struct OperationRow {
        pub(super) operation_id: String,
        pub(super) scope: i32,
        pub(super) kind: i32,
        pub(super) status: i32,
        pub(super) user_id: String,
        pub(super) idempotency_key: String,
        pub(super) external_ref: Option<String>,
        pub(super) tx_hash: Option<String>,
        pub(super) rejection_code: Option<i32>,
        pub(super) rejection_message: Option<String>,
        pub(super) awaits_chain: bool,
        pub(super) reverses: Option<String>,
        pub(super) reversed_by: Option<String>,
        pub(super) digest: i64,
        pub(super) created_at_us: i64,
        pub(super) finalized_at_us: Option<i64>,
    }
}

impl TryFrom<OperationRow> for Operation {
    type Error = Error;

    fn try_from(row: OperationRow) -> Result<Self, Error> {
        let corrupt = || corrupt("operation", &row.operation_id);
        Ok(Operation {
            status: OperationStatus::from_code(row.status).ok_or_else(corrupt)?,
            terms: Arc::new(OperationTerms {
                scope: Scope::from_code(row.scope).ok_or_else(corrupt)?,
                kind: OperationType::from_code(row.kind).ok_or_else(corrupt)?,
                operation_id: row.operation_id.into(),
                user_id: row.user_id.into(),
                idempotency_key: row.idempotency_key.into(),
                external_ref: some_id(row.external_ref),
                awaits_chain: row.awaits_chain,
                reverses: some_id(row.reverses),
                digest: row.digest,
                created_at_us: row.created_at_us,
            }),
            tx_hash: some_id(row.tx_hash),
            rejection_code: row.rejection_code,
            rejection_message: row.rejection_message,
            finalized_at_us: row.finalized_at_us,
            reversed_by: some_id(row.reversed_by),
        })
    }
}

pub const POSTING: &str = "SELECT p.*, COALESCE(i.decimals, 0) AS decimals FROM postings p \
     LEFT JOIN instruments i ON i.instrument_id = p.instrument_id";

events::row! {
    pub struct PostingRow {
        pub(super) posting_id: String,
        pub(super) operation_id: String,
        pub(super) ordinal: u32 as i32,
        pub(super) debit_subaccount_id: String,
        pub(super) credit_subaccount_id: String,
        pub(super) instrument_id: String,
        pub(super) decimals: u8 as i32,
        pub(super) amount: i64,
        pub(super) hold_id: Option<String>,
        pub(super) unsettled: bool,
        pub(super) debit_balance_after: i64,
        pub(super) debit_version: i64,
        pub(super) credit_balance_after: i64,
        pub(super) credit_version: i64,
        pub(super) created_at_us: i64,
    }
}

impl From<PostingRow> for Posting {
    fn from(row: PostingRow) -> Self {
        Posting {
            posting_id: row.posting_id.into(),
            operation_id: row.operation_id.into(),
            ordinal: row.ordinal,
            debit_subaccount_id: row.debit_subaccount_id.into(),
            credit_subaccount_id: row.credit_subaccount_id.into(),
            amount: Units {
                instrument_id: row.instrument_id.into(),
                decimals: row.decimals,
                minor: Minor(row.amount),
            },
            hold_id: some_id(row.hold_id),
            unsettled: row.unsettled,
            debit_balance_after: Minor(row.debit_balance_after),
            debit_version: row.debit_version.unsigned_abs(),
            credit_balance_after: Minor(row.credit_balance_after),
            credit_version: row.credit_version.unsigned_abs(),
            created_at_us: row.created_at_us,
            link: Link::default(),
        }
    }
}

pub const HOLD: &str = "SELECT h.*, COALESCE(i.decimals, 0) AS decimals FROM holds h \
     LEFT JOIN instruments i ON i.instrument_id = h.instrument_id";

events::row! {
    /// A hold. Also its format in a stored answer.
    #[derive(serde::Serialize, serde::Deserialize)]
    pub struct HoldRow {
        pub(super) hold_id: String,
        pub(super) subaccount_id: String,
        pub(super) user_id: String,
        pub(super) instrument_id: String,
        pub(super) decimals: u8 as i32,
        pub(super) amount: i64,
        pub(super) remaining: i64,
        pub(super) added: i64,
        pub(super) split_off: i64,
        pub(super) consumed: i64,
        pub(super) released: i64,
        pub(super) returned_by_children: i64,
        pub(super) status: i32,
        pub(super) expiry_told: bool,
        pub(super) reason: String,
        pub(super) owner: String,
        pub(super) parent_hold_id: Option<String>,
        pub(super) destination_subaccount_id: Option<String>,
        pub(super) expires_at_us: Option<i64>,
        pub(super) created_at_us: i64,
        pub(super) updated_at_us: i64,
    }
}

impl TryFrom<HoldRow> for Hold {
    type Error = Error;

    fn try_from(row: HoldRow) -> Result<Self, Error> {
        Ok(Hold {
            status: HoldStatus::from_code(row.status)
                .ok_or_else(|| corrupt("hold", &row.hold_id))?,
            terms: Arc::new(HoldTerms {
                hold_id: row.hold_id.into(),
                subaccount_id: row.subaccount_id.into(),
                user_id: row.user_id.into(),
                instrument_id: row.instrument_id.into(),
                decimals: row.decimals,
                reason: row.reason,
                owner: row.owner,
                parent_hold_id: some_id(row.parent_hold_id),
                destination_subaccount_id: some_id(row.destination_subaccount_id),
                expires_at_us: row.expires_at_us,
                created_at_us: row.created_at_us,
            }),
            amount: Minor(row.amount),
            remaining: Minor(row.remaining),
            added: Minor(row.added),
            split_off: Minor(row.split_off),
            consumed: Minor(row.consumed),
            released: Minor(row.released),
            returned: Minor(row.returned_by_children),
            expiry_reported: row.expiry_told,
            updated_at_us: row.updated_at_us,
        })
    }
}

impl From<&Hold> for HoldRow {
    fn from(hold: &Hold) -> Self {
        let terms = &hold.terms;
        HoldRow {
            hold_id: terms.hold_id.to_string(),
            subaccount_id: terms.subaccount_id.to_string(),
            user_id: terms.user_id.to_string(),
            instrument_id: terms.instrument_id.to_string(),
            decimals: terms.decimals,
            amount: hold.amount.0,
            remaining: hold.remaining.0,
            added: hold.added.0,
            split_off: hold.split_off.0,
            consumed: hold.consumed.0,
            released: hold.released.0,
            returned_by_children: hold.returned.0,
            status: hold.status.code(),
            expiry_told: hold.expiry_reported,
            reason: terms.reason.clone(),
            owner: terms.owner.clone(),
            parent_hold_id: terms.parent_hold_id.as_ref().map(ToString::to_string),
            destination_subaccount_id: terms
                .destination_subaccount_id
                .as_ref()
                .map(ToString::to_string),
            expires_at_us: terms.expires_at_us,
            created_at_us: terms.created_at_us,
            updated_at_us: hold.updated_at_us,
        }
    }
}

events::row! {
    pub struct PendingReceiptRow {
        pub match_key: String,
        pub(super) tx_hash: Option<String>,
        pub(super) reverted: bool,
        pub(super) at_us: i64,
    }
}

impl From<PendingReceiptRow> for PendingReceipt {
    fn from(row: PendingReceiptRow) -> Self {
        PendingReceipt {
            tx_hash: some_id(row.tx_hash),
            reverted: row.reverted,
            at_us: row.at_us,
        }
    }
}

events::row! {
    pub struct AnswerRow {
        pub call: i32,
        pub user_id: String,
        pub idempotency_key: String,
        pub digest: i64,
        pub outcome: String,
    }
}

/// The outcome of a stored answer in its JSON format.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Refused {
        reason: String,
        operation: Option<usize>,
        hold_step: Option<usize>,
    },
    Hold {
        hold: Box<HoldRow>,
        operation_id: Option<String>,
    },
    /// (operation id, reason of refusal), one of the two per operation. Written by older releases
    /// without texts; only read.
    Batch(Vec<(Option<String>, Option<String>)>),
    Outcomes(Vec<Item>),
    SubAccount(String),
    Limit(LimitRow),
}

/// Outcome of one operation in a batch: its id, or reason and text of the refusal.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
enum Item {
    Made(String),
    Refused(String, String),
}

pub fn outcome_text(outcome: &StoredOutcome) -> String {
    let outcome = match outcome {
        StoredOutcome::Refused { reason, at } => Outcome::Refused {
            reason: reason.clone(),
            operation: at.and_then(|at| {
                if let Position::Operation(index) = at {
                    Some(index)
                } else {
                    None
                }
            }),
            hold_step: at.and_then(|at| {
                if let Position::HoldStep(index) = at {
                    Some(index)
                } else {
                    None
                }
            }),
        },
        StoredOutcome::Hold { hold, operation_id } => Outcome::Hold {
            hold: Box::new(hold.into()),
            operation_id: operation_id.as_ref().map(ToString::to_string),
        },
        StoredOutcome::Batch(outcomes) => Outcome::Outcomes(
            outcomes
                .iter()
                .map(|outcome| match outcome {
                    Ok(id) => Item::Made(id.to_string()),
                    Err(refused) => Item::Refused(refused.reason.clone(), refused.text.clone()),
                })
                .collect(),
        ),
        StoredOutcome::SubAccount(id) => Outcome::SubAccount(id.to_string()),
        StoredOutcome::Limit(limit) => Outcome::Limit(limit.into()),
    };
    serde_json::to_string(&outcome).expect("stored answers have a JSON form")
}

/// The stored refusal of one operation in a batch. `None` for a reason that no operation has.
fn stored_refusal(reason: String, text: String) -> Option<StoredRefusal> {
    // Answers of older releases have no text, so an invalid field has no name.
    let is_known = reason == "INVALID_ARGUMENT" || Refusal::from_stored(&reason, &text).is_some();
    is_known.then_some(StoredRefusal { reason, text })
}

impl AnswerRow {
    /// # Errors
    /// [`Error::Invariant`] if the row is damaged: not the stored format, or an unknown reason.
    pub fn answer(&self) -> Result<StoredAnswer, Error> {
        let corrupt = || corrupt("stored answer", &self.idempotency_key);
        let outcome = match serde_json::from_str(&self.outcome).map_err(|_| corrupt())? {
            Outcome::Refused {
                reason,
                operation,
                hold_step,
            } => {
                Refusal::from_bound_reason(&reason).ok_or_else(corrupt)?;
                let at = operation.map(Position::Operation);
                let at = at.or(hold_step.map(Position::HoldStep));
                StoredOutcome::Refused { reason, at }
            }
            Outcome::Hold { hold, operation_id } => StoredOutcome::Hold {
                hold: (*hold).try_into()?,
                operation_id: some_id(operation_id),
            },
            Outcome::Batch(outcomes) => StoredOutcome::Batch(
                outcomes
                    .into_iter()
                    .map(|outcome| match outcome {
                        (Some(id), _) => Ok(Ok(id.into())),
                        (None, Some(reason)) => stored_refusal(reason, String::new())
                            .map(Err)
                            .ok_or_else(corrupt),
                        (None, None) => Err(corrupt()),
                    })
                    .collect::<Result<_, _>>()?,
            ),
            Outcome::Outcomes(outcomes) => StoredOutcome::Batch(
                outcomes
                    .into_iter()
                    .map(|item| match item {
                        Item::Made(id) => Ok(Ok(id.into())),
                        Item::Refused(reason, text) => {
                            stored_refusal(reason, text).map(Err).ok_or_else(corrupt)
                        }
                    })
                    .collect::<Result<_, _>>()?,
            ),
            Outcome::SubAccount(id) => StoredOutcome::SubAccount(id.into()),
            Outcome::Limit(limit) => StoredOutcome::Limit(limit.try_into()?),
        };
        Ok(StoredAnswer {
            digest: self.digest,
            outcome,
        })
    }
}
