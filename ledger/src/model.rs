//! The rows of the ledger as the fold sees them: immutable terms behind a shared pointer, small
//! mutable state beside it.
//!
//! Invariants: `balance - held - unsettled >= 0` and `balance >= 0` unless the sub-account may be
//! negative; `held` is the sum of what is left of its active holds; for every hold, always,
//! `amount + returned = remaining + split_off + consumed + released` (`design.md` 4), and each side
//! of that fits into 64 bits. The database checks the same.

use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

use types::{Decimal, Minor, code_enum};
pub use types::{HoldStatus, OperationStatus, OperationType, subaccount::AccountType};

use crate::refusal::Refusal;

/// A text id, cheap to copy.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(Arc<str>);

impl Deref for Id {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Id {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Id {
    fn from(text: &str) -> Self {
        Id(text.into())
    }
}

impl From<String> for Id {
    fn from(text: String) -> Self {
        Id(text.into())
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

code_enum!(SubAccountStatus: i32 { Active = 1 "ACTIVE", Frozen = 2 "FROZEN", Closed = 3 "CLOSED" });
code_enum!(
    /// Which call made an operation: idempotency keys of different calls never meet (T12).
    Scope: i32 { Create = 1 "CREATE", Reverse = 2 "REVERSE", Consume = 3 "CONSUME", Event = 4 "EVENT" }
);
code_enum!(
    /// Calls whose answers are stored for their key.
    Call: i32 {
        CreateOperation = 1 "CREATE_OPERATION", CreateOperations = 2 "CREATE_OPERATIONS", CreateHold = 3 "CREATE_HOLD",
        ReleaseHold = 4 "RELEASE_HOLD", ConsumeHold = 5 "CONSUME_HOLD", AdjustHold = 6 "ADJUST_HOLD",
        ReverseOperation = 7 "REVERSE_OPERATION", SetSubAccountStatus = 8 "SET_SUB_ACCOUNT_STATUS",
        SetVelocityLimit = 9 "SET_VELOCITY_LIMIT", RemoveVelocityLimit = 10 "REMOVE_VELOCITY_LIMIT",
    }
);

/// An amount as somebody asked for it: decimals of the instrument are not known yet.
#[derive(Clone, Debug)]
pub struct Amount {
    pub instrument_id: Id,
    pub value: Decimal,
}

/// An amount the ledger keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    pub instrument_id: Id,
    pub decimals: u8,
    pub minor: Minor,
}

impl Units {
    pub fn decimal(&self) -> Decimal {
        Decimal::from_minor(self.minor.0, self.decimals)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub account_id: Id,
    pub user_id: Id,
    pub kind: AccountType,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

/// A user as the ledger knows him: only whether new sub-accounts of his start frozen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub user_id: Id,
    pub blocked: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub struct SubAccountTerms {
    pub subaccount_id: Id,
    pub account_id: Id,
    pub user_id: Id,
    pub instrument_id: Id,
    pub decimals: u8,
    pub may_be_negative: bool,
    pub created_at_us: i64,
}

/// Who froze a sub-account; lifting one freeze leaves the other.
pub const FREEZE_USER_BLOCK: u8 = 1;
pub const FREEZE_STAFF: u8 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubAccount {
    pub terms: Arc<SubAccountTerms>,
    pub balance: Minor,
    pub held: Minor,
    pub unsettled: Minor,
    pub version: u64,
    /// Bits of `FREEZE_*`.
    pub freeze: u8,
    pub closed: bool,
    pub updated_at_us: i64,
    /// Number of the posting that made `version`, where the store keeps it; 0: none did.
    pub last_posting: i64,
}

impl SubAccount {
    /// Saturates, since a house sub-account may be as negative as it likes.
    pub fn available(&self) -> Minor {
        Minor(
            self.balance
                .0
                .saturating_sub(self.held.0)
                .saturating_sub(self.unsettled.0),
        )
    }

    pub fn status(&self) -> SubAccountStatus {
        match (self.closed, self.freeze) {
            (true, _) => SubAccountStatus::Closed,
            (false, 0) => SubAccountStatus::Active,
            (false, _) => SubAccountStatus::Frozen,
        }
    }

    pub fn is_covered(&self) -> bool {
        self.terms.may_be_negative
            || (!self.balance.is_negative() && !self.available().is_negative())
    }

    pub fn units(&self, minor: Minor) -> Units {
        Units {
            instrument_id: self.terms.instrument_id.clone(),
            decimals: self.terms.decimals,
            minor,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct HoldTerms {
    pub hold_id: Id,
    pub subaccount_id: Id,
    /// Owner of the sub-account.
    pub user_id: Id,
    pub instrument_id: Id,
    pub decimals: u8,
    pub reason: String,
    /// `market` for trading holds and their children, `cfa` for redemptions, otherwise free text.
    pub owner: String,
    pub parent_hold_id: Option<Id>,
    pub destination_subaccount_id: Option<Id>,
    pub expires_at_us: Option<i64>,
    pub created_at_us: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub terms: Arc<HoldTerms>,
    /// Original amount plus what was added.
    pub amount: Minor,
    pub remaining: Minor,
    pub added: Minor,
    /// What went to children, without what is netted against `returned` ([`Self::take_back`]).
    pub split_off: Minor,
    pub consumed: Minor,
    pub released: Minor,
    /// What came back from children, without what is netted.
    pub returned: Minor,
    pub status: HoldStatus,
    /// An expiry found by the sweeper is told once, to the first caller who touches the hold, as if
    /// he had found it himself (3.3).
    pub expiry_told: bool,
    pub updated_at_us: i64,
}

impl Hold {
    pub fn is_active(&self) -> bool {
        self.status == HoldStatus::Active
    }

    pub fn is_due(&self, now_us: i64) -> bool {
        self.is_active() && self.terms.expires_at_us.is_some_and(|at| at <= now_us)
    }

    pub fn units(&self, minor: Minor) -> Units {
        Units {
            instrument_id: self.terms.instrument_id.clone(),
            decimals: self.terms.decimals,
            minor,
        }
    }

    /// What a child gives back. `returned` grows with each, and a hold that lives long enough would
    /// outgrow 64 bits in it, with each side of its property: from there on what comes back is
    /// taken off `split_off` instead, as if it had never been split off. That much is in there
    /// always, since `split_off - returned` is what the children have, or have used.
    pub fn take_back(&mut self, amount: Minor) {
        if self.has_room_for(amount) {
            self.returned += amount;
        } else {
            self.split_off -= amount;
        }
        self.remaining += amount;
    }

    /// Adds to the hold itself; what was returned is netted against what was split off where that makes room for it.
    ///
    /// # Errors
    /// [`Refusal::Invalid`]: `amount` would outgrow 64 bits.
    pub fn add(&mut self, amount: Minor) -> Result<(), Refusal> {
        if !self.has_room_for(amount) {
            self.split_off -= self.returned;
            self.returned = Minor::ZERO;
        }
        if !self.has_room_for(amount) {
            return Err(Refusal::invalid("amount", "is out of range"));
        }
        self.amount += amount;
        self.added += amount;
        self.remaining += amount;
        Ok(())
    }

    /// Whether both sides of the property still fit into 64 bits, in which the database adds them,
    /// when this much is put on them.
    fn has_room_for(&self, more: Minor) -> bool {
        let sides = self.amount.checked_add(self.returned);
        sides.and_then(|sum| sum.checked_add(more)).is_some()
    }

    /// The property of every hold.
    ///
    /// # Panics
    /// Our own bug: money appeared in or vanished from a hold.
    pub fn assert_whole(&self) {
        let parts = [self.remaining, self.split_off, self.consumed, self.released];
        let wide = |minor: &Minor| i128::from(minor.0);
        let had = wide(&self.amount) + wide(&self.returned);
        let went: i128 = parts.iter().map(wide).sum();
        assert!(
            had == went
                && had <= i128::from(i64::MAX)
                && parts.iter().all(|part| !part.is_negative())
                && !self.returned.is_negative()
                && self.added <= self.amount
                && (self.is_active() || self.remaining.is_zero()),
            "hold equation broken: {self:?}"
        );
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct OperationTerms {
    pub operation_id: Id,
    pub scope: Scope,
    pub kind: OperationType,
    pub user_id: Id,
    pub idempotency_key: Id,
    pub external_ref: Option<Id>,
    pub awaits_chain: bool,
    pub reverses: Option<Id>,
    /// Fingerprint of the request, to notice a key that comes back with another content.
    pub digest: i64,
    pub created_at_us: i64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    pub terms: Arc<OperationTerms>,
    pub status: OperationStatus,
    pub tx_hash: Option<Id>,
    /// Number of `RejectionReasonCode`.
    pub rejection_code: Option<i32>,
    pub rejection_message: Option<String>,
    pub finalized_at_us: Option<i64>,
    pub reversed_by: Option<Id>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Posting {
    pub posting_id: Id,
    pub operation_id: Id,
    /// Place among the postings of its operation.
    pub ordinal: u32,
    pub debit_subaccount_id: Id,
    pub credit_subaccount_id: Id,
    pub amount: Units,
    pub hold_id: Option<Id>,
    pub unsettled: bool,
    pub debit_balance_after: Minor,
    pub debit_version: u64,
    pub credit_balance_after: Minor,
    pub credit_version: u64,
    pub created_at_us: i64,
    /// As written; of one that was read not known.
    pub link: Link,
}

/// Place of a posting in the chains of its two sub-accounts, where the store keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub number: i64,
    /// Number of the posting that made the version before; 0: there is none.
    pub debit_previous: i64,
    pub credit_previous: i64,
}

/// How far a log has been applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcePosition {
    pub through_sequence: u64,
    pub first_sequence: u64,
    /// Fingerprint of the last batch.
    pub digest: i64,
}

/// News about an operation that does not exist yet: applied the moment it appears (T30).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parked {
    pub tx_hash: Option<Id>,
    pub reverted: bool,
    pub at_us: i64,
}
