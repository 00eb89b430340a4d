//! Commands of the ledger and their answers.

use types::Decimal;

use crate::{
    limit::{OperationTypes, Side, VelocityLimit},
    model::{
        AccountType, Amount, Hold, Id, Operation, OperationType, Posting, SubAccount,
        SubAccountStatus,
    },
    refusal::{Position, Refusal, Refused},
};

/// One write, with its caller.
#[derive(Debug)]
pub struct Command {
    pub kind: CommandKind,
    /// `None` for work that is idempotent by nature (consumed events, sweepers).
    pub key: Option<CallKey>,
    /// The caller is a service: it may touch holds of services (`design.md` 4), and operations that
    /// await the chain.
    pub is_service: bool,
}

#[derive(Debug)]
pub struct CallKey {
    pub key: Id,
    /// User on whose behalf the caller acts.
    pub user_id: Id,
    /// Fingerprint of the request without its context.
    pub digest: i64,
}

#[derive(Debug)]
pub enum CommandKind {
    Post(Batch),
    CreateHold(NewHold),
    ReleaseHold {
        hold_id: Id,
        reason: String,
    },
    ConsumeHold {
        hold_id: Id,
        /// `None`: all that remains (T03).
        amount: Option<Amount>,
        operation_kind: OperationType,
        external_ref: Option<Id>,
    },
    AdjustHold {
        hold_id: Id,
        remaining: Amount,
    },
    /// Holds that the sweeper found expired.
    ExpireHolds(Vec<Id>),
    /// Finality reported by a caller: an unknown operation or an illegal transition is refused.
    Finalize {
        targets: Vec<Target>,
        tx_hash: Option<Id>,
    },
    /// Finality reported by an event: a notice for an unknown operation is parked until it is
    /// created.
    Confirm {
        targets: Vec<Target>,
        tx_hash: Option<Id>,
    },
    /// A receipt for all operations with this hash (R220, T30).
    Receipt {
        tx_hash: Id,
        reverted: bool,
    },
    Reverse {
        operation_id: Id,
        reason: String,
    },
    SetStatus {
        subaccount_id: Id,
        status: SubAccountStatus,
    },
    SetLimit {
        limit: LimitTerms,
        actor: String,
        reason: String,
    },
    RemoveLimit {
        limit_id: Id,
        actor: String,
        reason: String,
    },
    CreateUser {
        user_id: Id,
    },
    BlockUser {
        user_id: Id,
        blocked: bool,
    },
    RegisterInstrument {
        instrument_id: Id,
        decimals: u8,
    },
    /// Drops parked notices about operations that were never created; done by the store alone.
    PurgePendingReceipts {
        before_us: i64,
    },
}

/// Identifies an operation by its id, its key or its reference.
#[derive(Clone, Debug)]
pub enum Target {
    Id(Id),
    /// Made by CreateOperation(s) for this user and key.
    Key {
        user_id: Id,
        key: Id,
    },
    Reference {
        kind: OperationType,
        external_ref: Id,
    },
}

/// Operations and hold steps, executed in order in one transaction.
#[derive(Debug, Default)]
pub struct Batch {
    /// CreateOperation: one operation, whose key is the call's.
    pub single: bool,
    /// A malformed operation is refused at its index.
    pub operations: Vec<Result<NewOperation, Refusal>>,
    pub steps: Vec<Result<Step, Refusal>>,
    /// Each operation succeeds or fails alone; otherwise the first refusal refuses all.
    pub independent: bool,
    pub source: Option<Source>,
    /// Decimals of instruments that may be new.
    pub scales: Vec<(Id, u8)>,
    /// Posted because of an event: an operation with the same reference is only confirmed (T11).
    pub from_event: bool,
}

/// The log a batch was derived from, and the sequences it covers.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: Id,
    pub first_sequence: u64,
    pub through_sequence: u64,
}

#[derive(Clone, Debug)]
pub struct NewOperation {
    /// `None`: assigned by the ledger.
    pub operation_id: Option<Id>,
    pub kind: OperationType,
    pub user_id: Id,
    pub idempotency_key: Id,
    pub external_ref: Option<Id>,
    pub tx_hash: Option<Id>,
    pub awaits_chain: bool,
    pub postings: Vec<NewPosting>,
    pub digest: i64,
    /// The chain has confirmed it already: it comes from an event.
    pub is_final: bool,
}

#[derive(Clone, Debug)]
pub struct NewPosting {
    pub debit_subaccount_id: Id,
    pub credit_subaccount_id: Id,
    pub amount: Amount,
    /// The hold that pays the debit.
    pub hold_id: Option<Id>,
    /// The credit cannot be spent before the operation is final.
    pub unsettled: bool,
}

#[derive(Clone, Debug)]
pub struct NewHold {
    /// `None`: assigned by the ledger.
    pub hold_id: Option<Id>,
    pub subaccount_id: Id,
    pub amount: Amount,
    pub reason: String,
    pub owner: String,
    pub destination_subaccount_id: Option<Id>,
    pub expires_at_us: Option<i64>,
}

/// Requested terms of a velocity limit.
#[derive(Clone, Debug)]
pub struct LimitTerms {
    pub limit_id: Id,
    pub user_id: Id,
    pub account_kind: Option<AccountType>,
    pub instrument_id: Id,
    pub side: Side,
    pub window_s: i64,
    pub amount: Decimal,
    pub kinds: OperationTypes,
}

#[derive(Clone, Debug)]
pub struct Step {
    /// Executed before the operation of this index; past the last one: after all.
    pub before_operation: usize,
    pub kind: StepKind,
}

#[derive(Clone, Debug)]
pub enum StepKind {
    Open(NewHold),
    Split {
        parent_hold_id: Id,
        hold_id: Id,
        amount: Amount,
        reason: String,
    },
    Grow {
        hold_id: Id,
        amount: Amount,
    },
    Return {
        hold_id: Id,
        amount: Option<Amount>,
        reason: String,
    },
    Shrink {
        hold_id: Id,
        amount: Option<Amount>,
        reason: String,
    },
}

/// Whether an answer is new or repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    No,
    Same,
    /// The key was reused with different content; the stored answer is returned nevertheless.
    Different,
}

impl Replay {
    pub fn of(is_same: bool) -> Self {
        if is_same {
            Replay::Same
        } else {
            Replay::Different
        }
    }
}

/// An operation with its postings.
#[derive(Clone, Debug)]
pub struct Posted {
    pub operation: Operation,
    pub postings: Vec<Posting>,
    pub replay: Replay,
}

#[derive(Debug)]
pub enum Answer {
    /// One outcome per operation, in order.
    Batch {
        outcomes: Vec<Result<Posted, Refused>>,
    },
    Hold {
        hold: Hold,
        operation: Option<Posted>,
    },
    Finalized {
        changed: u32,
    },
    SubAccount(SubAccount),
    Limit(VelocityLimit),
    Done,
}

#[derive(Debug)]
pub struct CommandResult {
    pub answer: Answer,
    pub replay: Replay,
}

impl CommandResult {
    pub fn new(answer: Answer) -> Self {
        CommandResult {
            answer,
            replay: Replay::No,
        }
    }
}

/// The stored answer of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAnswer {
    pub digest: i64,
    pub outcome: StoredOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredOutcome {
    Refused {
        reason: String,
        at: Option<Position>,
    },
    /// The hold at the time of the answer, not its current state.
    Hold {
        hold: Hold,
        operation_id: Option<Id>,
    },
    /// Operation id or refusal, per index.
    Batch(Vec<Result<Id, StoredRefusal>>),
    SubAccount(Id),
    /// The limit at the time of the answer.
    Limit(VelocityLimit),
}

/// Refusal of one operation in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRefusal {
    pub reason: String,
    pub text: String,
}

impl StoredRefusal {
    /// Restores the refusal. An answer stored by an older release has no text, so that an invalid
    /// field is reported without its name.
    pub fn refusal(&self) -> Refusal {
        Refusal::from_stored(&self.reason, &self.text).unwrap_or_else(|| {
            Refusal::invalid("operation", "was refused when the batch was first sent")
        })
    }
}

impl StoredAnswer {
    pub fn refused(refused: &Refused, digest: i64) -> Self {
        StoredAnswer {
            digest,
            outcome: StoredOutcome::Refused {
                reason: refused.refusal.bound_reason().to_owned(),
                at: refused.at,
            },
        }
    }
}

impl Command {
    pub fn digest(&self) -> i64 {
        self.key.as_ref().map_or(0, |key| key.digest)
    }

    /// The answer to store. Operations of a single call are found by their own key, so nothing more
    /// is stored for them.
    pub(super) fn to_store(&self, result: &CommandResult) -> Option<StoredAnswer> {
        let outcome = match (&self.kind, &result.answer) {
            (CommandKind::Post(batch), _) if batch.single => return None,
            (CommandKind::Reverse { .. }, _) => return None,
            (_, Answer::Batch { outcomes }) => StoredOutcome::Batch(
                outcomes
                    .iter()
                    .map(|outcome| match outcome {
                        Ok(posted) => Ok(posted.operation.terms.operation_id.clone()),
                        Err(Refused { refusal, .. }) => Err(StoredRefusal {
                            reason: refusal.bound_reason().to_owned(),
                            text: refusal.to_string(),
                        }),
                    })
                    .collect(),
            ),
            (_, Answer::Hold { hold, operation }) => StoredOutcome::Hold {
                hold: hold.clone(),
                operation_id: operation
                    .as_ref()
                    .map(|posted| posted.operation.terms.operation_id.clone()),
            },
            (_, Answer::SubAccount(subaccount)) => {
                StoredOutcome::SubAccount(subaccount.terms.subaccount_id.clone())
            }
            (_, Answer::Limit(limit)) => StoredOutcome::Limit(limit.clone()),
            (_, Answer::Finalized { .. } | Answer::Done) => return None,
        };
        Some(StoredAnswer {
            digest: self.digest(),
            outcome,
        })
    }
}
