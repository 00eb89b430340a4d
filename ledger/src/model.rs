//! Rows of the ledger in the fold: immutable terms in an `Arc`, small mutable state next to it.
//!
//! Invariants (the database checks the first and the last too):
//! - `balance >= 0` and `balance - held - unsettled >= 0`, unless the sub-account may be negative.
//! - `held` is the sum of `remaining` over the active holds of the sub-account.
//! - `amount + returned = remaining + split_off + consumed + released` for every hold (`design.md`
//!   4). Each side of this hold equation fits 64 bits.

use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

use types::{Decimal, Minor, code_enum};
pub use types::{HoldStatus, OperationStatus, OperationType, subaccount::AccountType};

use crate::refusal::Refusal;

/// A text id, cheap to clone.
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
    /// The call that created an operation. Keys of different calls are independent (T12).
    Scope: i32 { Create = 1 "CREATE", Reverse = 2 "REVERSE", Consume = 3 "CONSUME", Event = 4 "EVENT" }
);
code_enum!(
    /// Calls whose answers are stored under their key.
    Call: i32 {
        CreateOperation = 1 "CREATE_OPERATION", CreateOperations = 2 "CREATE_OPERATIONS", CreateHold = 3 "CREATE_HOLD",
        ReleaseHold = 4 "RELEASE_HOLD", ConsumeHold = 5 "CONSUME_HOLD", AdjustHold = 6 "ADJUST_HOLD",
        ReverseOperation = 7 "REVERSE_OPERATION", SetSubAccountStatus = 8 "SET_SUB_ACCOUNT_STATUS",
        SetVelocityLimit = 9 "SET_VELOCITY_LIMIT", RemoveVelocityLimit = 10 "REMOVE_VELOCITY_LIMIT",
    }
);

/// A requested amount, before the instrument's decimals are known.
#[derive(Clone, Debug)]
pub struct Amount {
    pub instrument_id: Id,
    pub value: Decimal,
}

/// An amount in minor units.
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

/// A user of the ledger. New sub-accounts of a blocked user start frozen.
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

/// Reasons of a freeze. Clearing one keeps the other.
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
    /// Number of the posting that produced `version`, in stores that number postings; 0: none.
    pub last_posting: i64,
}

impl SubAccount {
    /// `balance - held - unsettled`. Saturates: a house sub-account has no lower bound.
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

    /// True if neither balance nor available is negative, or the sub-account may be negative.
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
    /// Original amount plus `added`.
    pub amount: Minor,
    pub remaining: Minor,
    /// In a child less the amount netted against `released` ([`Self::add`]).
    pub added: Minor,
    /// Moved to children, less the amount netted against `returned` ([`Self::add_returned`]).
    pub split_off: Minor,
    pub consumed: Minor,
    /// In a child less the netted amount.
    pub released: Minor,
    /// Returned by children, less the netted amount.
    pub returned: Minor,
    pub status: HoldStatus,
    /// False after the sweeper expired the hold: the first call that touches the hold is refused as
    /// if it had found the expiry itself (3.3).
    pub expiry_reported: bool,
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

    /// Adds an amount that a child returns. `returned` grows with each call, so in a long-lived
    /// hold the sides of the equation would overflow 64 bits. Then the amount is netted against
    /// `split_off`, which is large enough: `split_off - returned` is what the children hold or have
    /// used.
    pub fn add_returned(&mut self, amount: Minor) {
        if self.has_room_for(amount) {
            self.returned += amount;
        } else {
            self.split_off -= amount;
        }
        self.remaining += amount;
    }

    /// Adds to the hold itself. Nets `returned` against `split_off` if the sum would overflow, and
    /// in a child `released` against `added`: an order that is amended up and down returns money to
    /// its parent each time.
    ///
    /// # Errors
    /// [`Refusal::Invalid`]: the equation would overflow 64 bits.
    pub fn add(&mut self, amount: Minor) -> Result<(), Refusal> {
        if !self.has_room_for(amount) {
            self.split_off -= self.returned;
            self.returned = Minor::ZERO;
            // The market reads what a hold without a parent has released.
            if self.terms.parent_hold_id.is_some() {
                let netted = self.released.min(self.added);
                self.released -= netted;
                self.added -= netted;
                self.amount -= netted;
            }
        }
        if !self.has_room_for(amount) {
            return Err(Refusal::invalid("amount", "is out of range"));
        }
        self.amount += amount;
        self.added += amount;
        self.remaining += amount;
        Ok(())
    }

    /// True if a side of the equation plus `more` fits the 64-bit columns of the database.
    fn has_room_for(&self, more: Minor) -> bool {
        let sides = self.amount.checked_add(self.returned);
        sides.and_then(|sum| sum.checked_add(more)).is_some()
    }

    /// Asserts the hold equation.
    ///
    /// # Panics
    /// Bug: money appeared in or vanished from a hold.
    pub fn assert_equation(&self) {
        let parts = [self.remaining, self.split_off, self.consumed, self.released];
        let wide = |minor: &Minor| i128::from(minor.0);
        let left = wide(&self.amount) + wide(&self.returned);
        let right: i128 = parts.iter().map(wide).sum();
        assert!(
            left == right
                && left <= i128::from(i64::MAX)
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
    /// Fingerprint of the request, to detect a key reused with different content.
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
    /// Index among the postings of its operation.
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
    /// Set in a new posting; zeros in a posting read from the store.
    pub link: Link,
}

/// Links of a posting to the previous posting on each side, in stores that chain postings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub number: i64,
    /// Number of the posting that produced the previous version; 0: none.
    pub debit_previous: i64,
    pub credit_previous: i64,
}

/// Applied position of a source log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcePosition {
    pub through_sequence: u64,
    pub first_sequence: u64,
    /// Fingerprint of the last batch.
    pub digest: i64,
}

/// A parked notice: finality of an operation that does not exist yet, applied at creation (T30).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingReceipt {
    pub tx_hash: Option<Id>,
    pub reverted: bool,
    pub at_us: i64,
}
