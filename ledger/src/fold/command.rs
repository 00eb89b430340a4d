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
    /// `None` for commands that are idempotent without a key (consumed events, sweeper).
    pub key: Option<CallKey>,
    /// The caller is a service. It may touch holds of services (`design.md` 4), debit system
    /// sub-accounts (`design.md` 10) and end operations that await the chain.
    pub is_service: bool,
    /// Set if what the command changes is recorded for the audit (D34).
    pub author: Option<Author>,
}

/// The caller of a recorded command, and the ids of its request.
#[derive(Debug)]
pub struct Author {
    /// Subject of the credential.
    pub subject: String,
    pub request_id: String,
    pub correlation_id: String,
}

#[derive(Debug)]
pub struct CallKey {
    pub key: Id,
    /// User for whom the caller acts.
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
    /// Finality reported by a caller. Refused for an unknown operation or an illegal transition.
    Finalize {
        targets: Vec<Target>,
        tx_hash: Option<Id>,
    },
    /// Finality reported by an event. A notice for an unknown operation is parked until the
    /// operation is created.
    Confirm {
        targets: Vec<Target>,
        tx_hash: Option<Id>,
    },
    /// The receipt of a transaction, for all operations with its hash (R220, T30).
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
        reason: String,
    },
    SetLimit {
        limit: LimitTerms,
        reason: String,
        /// The limit may allow what it refuses now: a service, or two persons (D32).
        may_raise: bool,
    },
    RemoveLimit {
        limit_id: Id,
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
    /// Deletes notices parked before `before_us`. Executed by the store, not by the fold.
    PurgePendingReceipts {
        before_us: i64,
    },
}

impl CommandKind {
    /// True for a command that ends open operations and does nothing else. Of an operation that has
    /// ended it needs no postings.
    pub fn only_ends(&self) -> bool {
        matches!(
            self,
            CommandKind::Finalize { .. }
                | CommandKind::Confirm { .. }
                | CommandKind::Receipt { .. }
        )
    }
}

/// Identifies an operation by its id, its key or its reference.
#[derive(Clone, Debug)]
pub enum Target {
    Id(Id),
    /// Created by CreateOperation(s) for this user and key.
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
    /// The batch is a CreateOperation call: one operation, with the key of the call.
    pub single: bool,
    /// `Err`: the operation is malformed and is refused at its index.
    pub operations: Vec<Result<NewOperation, Refusal>>,
    pub steps: Vec<Result<Step, Refusal>>,
    /// Each operation succeeds or fails alone. Otherwise the first refusal refuses the batch.
    pub independent: bool,
    pub source: Option<Source>,
    /// Decimals of instruments that may be new.
    pub scales: Vec<(Id, u8)>,
    /// The batch posts an event. If an operation has the same reference, it only becomes final
    /// (T11).
    pub from_event: bool,
}

/// The log that a batch derives from, and the sequences that the batch covers.
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
    /// The chain has already confirmed the operation, which comes from an event.
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
    /// Index of the operation before which the step runs. Past the last one: runs after all of
    /// them.
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
    Spend {
        hold_id: Id,
        amount: Amount,
    },
}

/// Whether an answer is new or repeats the stored answer of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    No,
    Same,
    /// The request differs from the one that stored the answer.
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
        /// Number of operations that changed their status.
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
    /// The hold at the time of the answer, not in its current state.
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
    /// Restores the refusal. An answer stored by an older release has no text, so an invalid field
    /// is reported without its name.
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

    /// Returns the answer to store. `None` if the rows answer a replay: the operation of a single
    /// call is found by its own key.
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
