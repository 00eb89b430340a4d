//! Business refusals as values, each with its reason (D23). Operational failures are
//! [`crate::Error`].

use std::fmt;

use types::Decimal;

use crate::fold::Replay;

/// Status family of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    NotFound,
    Precondition,
    Exists,
    Invalid,
}

/// Why the ledger refused a command. `Display` is the exact text of the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    AccountNotFound,
    SubAccountNotFound,
    OperationNotFound,
    HoldNotFound,
    InstrumentNotFound,
    /// With the figures of the sub-account; `None` in a stored answer.
    InsufficientBalance(Option<Box<Shortage>>),
    /// A velocity limit would be exceeded. With the limit's figures; `None` in a stored answer.
    LimitExceeded(Option<Box<Excess>>),
    LimitNotFound,
    /// A person changes a limit so that it allows what it refuses (D32).
    ApprovalRequired,
    HoldNotActive,
    HoldExpired,
    /// A caller that is not a service touches a hold of a service (`design.md` 4).
    HoldInUse,
    /// The requested amount exceeds the remainder of a hold.
    HoldAmountExceeded,
    HoldExists,
    SubAccountFrozen,
    SubAccountClosed,
    /// Only an empty sub-account can be closed (D15).
    SubAccountNotEmpty,
    /// System sub-accounts cannot be frozen or closed, because deposits and settlement post to
    /// them. Only services debit them or open holds on them (`design.md` 10).
    SystemSubAccount,
    OperationExists,
    /// A transition that the state table forbids (D10).
    OperationStatus,
    /// A caller that is not a service requests finality or reversal of an operation that awaits the
    /// chain.
    OperationInFlight,
    AlreadyReversed,
    /// The batch does not follow the last batch of its source.
    SourceGap {
        expected_first: u64,
    },
    /// The batch has the sequences of the last stored batch but different content.
    SourceConflict,
    /// An invalid field, named as in the schema.
    Invalid {
        field: String,
        problem: String,
    },
}

/// Figures sent with `Insufficient balance`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub subaccount_id: String,
    pub balance: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
    pub available: Decimal,
}

/// Figures sent with an exceeded velocity limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    pub limit_id: String,
    pub subaccount_id: String,
    pub instrument_id: String,
    pub window_s: i64,
    pub amount: Decimal,
    /// Usage before the requested amount.
    pub used: Decimal,
    pub left: Decimal,
    pub asked: Decimal,
}

impl Refusal {
    /// Prefixes an invalid field with the posting's index.
    pub fn of_posting(self, index: usize) -> Self {
        self.under(&format!("postings[{index}]"))
    }

    /// Prefixes an invalid field with the field `outer`.
    pub fn under(self, outer: &str) -> Self {
        match self {
            Self::Invalid { field, problem } => Self::Invalid {
                field: format!("{outer}.{field}"),
                problem,
            },
            other => other,
        }
    }

    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Refusal::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub fn class(&self) -> Class {
        match self {
            Self::AccountNotFound
            | Self::SubAccountNotFound
            | Self::OperationNotFound
            | Self::HoldNotFound
            | Self::InstrumentNotFound
            | Self::LimitNotFound => Class::NotFound,
            Self::HoldExists | Self::OperationExists => Class::Exists,
            Self::Invalid { .. } => Class::Invalid,
            Self::InsufficientBalance(_)
            | Self::LimitExceeded(_)
            | Self::ApprovalRequired
            | Self::HoldNotActive
            | Self::HoldExpired
            | Self::HoldInUse
            | Self::HoldAmountExceeded
            | Self::SubAccountFrozen
            | Self::SubAccountClosed
            | Self::SubAccountNotEmpty
            | Self::SystemSubAccount
            | Self::OperationStatus
            | Self::OperationInFlight
            | Self::AlreadyReversed
            | Self::SourceGap { .. }
            | Self::SourceConflict => Class::Precondition,
        }
    }

    /// `google.rpc.ErrorInfo.reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::AccountNotFound => "ACCOUNT_NOT_FOUND",
            Self::SubAccountNotFound => "SUB_ACCOUNT_NOT_FOUND",
            Self::OperationNotFound => "OPERATION_NOT_FOUND",
            Self::HoldNotFound => "HOLD_NOT_FOUND",
            Self::InstrumentNotFound => "INSTRUMENT_NOT_FOUND",
            Self::InsufficientBalance(_) => "INSUFFICIENT_BALANCE",
            Self::LimitExceeded(_) => "LIMIT_EXCEEDED",
            Self::LimitNotFound => "LIMIT_NOT_FOUND",
            Self::ApprovalRequired => "APPROVAL_REQUIRED",
            Self::HoldNotActive => "HOLD_NOT_ACTIVE",
            Self::HoldExpired => "HOLD_EXPIRED",
            Self::HoldInUse => "HOLD_IN_USE",
            Self::HoldAmountExceeded => "HOLD_AMOUNT_EXCEEDED",
            Self::HoldExists => "HOLD_EXISTS",
            Self::SubAccountFrozen => "SUB_ACCOUNT_FROZEN",
            Self::SubAccountClosed => "SUB_ACCOUNT_CLOSED",
            Self::SubAccountNotEmpty => "SUB_ACCOUNT_NOT_EMPTY",
            Self::SystemSubAccount => "SYSTEM_SUB_ACCOUNT",
            Self::OperationExists => "OPERATION_EXISTS",
            Self::OperationStatus | Self::OperationInFlight => "OPERATION_STATUS",
            Self::AlreadyReversed => "ALREADY_REVERSED",
            Self::SourceGap { .. } => "SOURCE_GAP",
            Self::SourceConflict => "SOURCE_CONFLICT",
            Self::Invalid { .. } => "INVALID_ARGUMENT",
        }
    }

    /// Reason under which a bound refusal is stored. Finer than [`Self::reason`] where two refusals
    /// share one.
    pub fn bound_reason(&self) -> &'static str {
        match self {
            Self::OperationInFlight => "OPERATION_IN_FLIGHT",
            other => other.reason(),
        }
    }

    /// True for refusals that stay bound to the idempotency key: a retry gets the same refusal. A
    /// retry may succeed after an invalid field, a missing or existing object, a batch out of
    /// order, or by an approval.
    pub fn stays_bound(&self) -> bool {
        self.class() == Class::Precondition
            && !matches!(
                self,
                Self::SourceGap { .. } | Self::SourceConflict | Self::ApprovalRequired
            )
    }

    /// Restores a refusal from its [`Self::bound_reason`] and text, without figures. `None` if no
    /// item of a batch can have this reason or the text of an invalid field lacks the field name.
    pub fn from_stored(reason: &str, text: &str) -> Option<Self> {
        Some(match reason {
            "ACCOUNT_NOT_FOUND" => Self::AccountNotFound,
            "SUB_ACCOUNT_NOT_FOUND" => Self::SubAccountNotFound,
            "OPERATION_NOT_FOUND" => Self::OperationNotFound,
            "HOLD_NOT_FOUND" => Self::HoldNotFound,
            "INSTRUMENT_NOT_FOUND" => Self::InstrumentNotFound,
            "LIMIT_NOT_FOUND" => Self::LimitNotFound,
            "HOLD_EXISTS" => Self::HoldExists,
            "OPERATION_EXISTS" => Self::OperationExists,
            "INVALID_ARGUMENT" => {
                let (field, problem) = text.split_once(": ")?;
                Self::invalid(field, problem)
            }
            bound => return Self::from_bound_reason(bound),
        })
    }

    /// Restores the refusal of a loaded answer.
    ///
    /// # Panics
    /// If the reason is never bound. The store refuses to load such an answer.
    pub fn bound(reason: &str) -> Self {
        Self::from_bound_reason(reason).expect("the reasons of loaded answers are checked")
    }

    /// Restores a bound refusal from its reason, without figures. `None` for a reason that is never
    /// bound.
    pub fn from_bound_reason(reason: &str) -> Option<Self> {
        Some(match reason {
            "INSUFFICIENT_BALANCE" => Self::InsufficientBalance(None),
            "LIMIT_EXCEEDED" => Self::LimitExceeded(None),
            "HOLD_NOT_ACTIVE" => Self::HoldNotActive,
            "HOLD_EXPIRED" => Self::HoldExpired,
            "HOLD_IN_USE" => Self::HoldInUse,
            "HOLD_AMOUNT_EXCEEDED" => Self::HoldAmountExceeded,
            "SUB_ACCOUNT_FROZEN" => Self::SubAccountFrozen,
            "SUB_ACCOUNT_CLOSED" => Self::SubAccountClosed,
            "SUB_ACCOUNT_NOT_EMPTY" => Self::SubAccountNotEmpty,
            "SYSTEM_SUB_ACCOUNT" => Self::SystemSubAccount,
            "OPERATION_STATUS" => Self::OperationStatus,
            "OPERATION_IN_FLIGHT" => Self::OperationInFlight,
            "ALREADY_REVERSED" => Self::AlreadyReversed,
            _ => return None,
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AccountNotFound => "Account not found",
            Self::SubAccountNotFound => "Sub-account not found",
            Self::OperationNotFound => "Operation not found",
            Self::HoldNotFound => "Hold not found",
            Self::InstrumentNotFound => "Instrument not found",
            Self::InsufficientBalance(_) => "Insufficient balance",
            Self::LimitExceeded(_) => "Velocity limit exceeded",
            Self::LimitNotFound => "Limit not found",
            Self::ApprovalRequired => "This call needs an approval",
            Self::HoldNotActive => "Hold is not active",
            Self::HoldExpired => "Hold has expired",
            Self::HoldInUse => "Hold is in use",
            Self::HoldAmountExceeded => "Amount exceeds what remains of the hold",
            Self::HoldExists => "Hold already exists",
            Self::SubAccountFrozen => "Sub-account is frozen",
            Self::SubAccountClosed => "Sub-account is closed",
            Self::SubAccountNotEmpty => "Sub-account is not empty",
            Self::SystemSubAccount => {
                "System sub-account cannot be frozen, closed, or debited by a person"
            }
            Self::OperationExists => "Operation already exists",
            Self::OperationStatus => "Operation status does not allow this",
            Self::OperationInFlight => {
                "Operation is in flight to the chain, only a service may end it"
            }
            Self::AlreadyReversed => "Operation is already reversed",
            Self::SourceGap { expected_first } => {
                return write!(
                    f,
                    "Batch does not follow its source, expected first sequence {expected_first}"
                );
            }
            Self::SourceConflict => "Batch differs from the one stored for these sequences",
            Self::Invalid { field, problem } => return write!(f, "{field}: {problem}"),
        })
    }
}

/// Item of a batch that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    Operation(usize),
    HoldStep(usize),
}

/// A refused command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub refusal: Refusal,
    pub at: Option<Position>,
    /// Whether this repeats an earlier refusal of the key.
    pub replay: Replay,
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Refused {
            refusal,
            at: None,
            replay: Replay::No,
        }
    }
}

impl Refused {
    /// Sets the position in the batch.
    pub fn at(self, position: Position) -> Self {
        Refused {
            at: Some(position),
            ..self
        }
    }

    /// A refusal that repeats the stored outcome of its key.
    pub fn replayed(refusal: Refusal, at: Option<Position>, replay: Replay) -> Self {
        Refused {
            refusal,
            at,
            replay,
        }
    }
}
