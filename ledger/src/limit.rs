//! Velocity limits: the amount that may leave or enter a user's sub-account in a sliding window.
//!
//! At time t the window contains the postings of (t - window, t]; a posting exactly one window old
//! does not count. Usage is the sum of the postings themselves, so it cannot drift. A reversed
//! operation and its reversal do not count.

use types::Minor;

use crate::{
    model::{AccountType, Id, OperationType},
    names::SubAccountName,
};

/// Longest window: 366 days.
pub const WINDOW_S_MAX: i64 = 366 * 24 * 3_600;

types::code_enum! {
    /// Side of a posting.
    #[derive(serde::Serialize, serde::Deserialize)]
    Side: i32 {
        Debit = 1 "debits",
        Credit = 2 "credits",
    }
}

/// A set of operation types as a bit mask of their numbers. The empty set means all types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct OperationTypes(pub i64);

impl OperationTypes {
    pub fn of(kinds: impl IntoIterator<Item = OperationType>) -> Self {
        OperationTypes(
            kinds
                .into_iter()
                .fold(0, |bits, kind| bits | 1 << kind.code()),
        )
    }

    pub fn contains(self, kind: OperationType) -> bool {
        self.0 == 0 || self.0 >> kind.code() & 1 == 1
    }

    /// The types in the set; none if the set means all types.
    pub fn iter(self) -> impl Iterator<Item = OperationType> {
        (0..63)
            .filter(move |bit| self.0 >> bit & 1 == 1)
            .filter_map(OperationType::from_code)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VelocityLimit {
    pub limit_id: Id,
    /// Empty: every user, each separately.
    pub user_id: Id,
    /// `None`: sub-accounts of every kind, each separately.
    pub account_kind: Option<AccountType>,
    pub instrument_id: Id,
    pub decimals: u8,
    pub side: Side,
    pub window_s: i64,
    /// Usage may reach this amount but not exceed it.
    pub amount: Minor,
    pub kinds: OperationTypes,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl VelocityLimit {
    /// True if postings on this sub-account count. House sub-accounts have no limits.
    pub fn applies_to(&self, subaccount_id: &str) -> bool {
        SubAccountName::parse(subaccount_id).is_some_and(|name| {
            !name.is_system()
                && name.instrument_id == &*self.instrument_id
                && (self.user_id.is_empty() || name.user_id == &*self.user_id)
                && self
                    .account_kind
                    .is_none_or(|kind| kind == name.account_type())
        })
    }

    /// Start of the window, exclusive.
    pub fn since_us(&self, now_us: i64) -> i64 {
        now_us.saturating_sub(self.window_s * 1_000_000)
    }

    /// Compares the terms but not the times of creation and update.
    pub fn has_same_terms(&self, other: &Self) -> bool {
        let at = (self.created_at_us, self.updated_at_us);
        let other = VelocityLimit {
            created_at_us: at.0,
            updated_at_us: at.1,
            ..other.clone()
        };
        *self == other
    }

    /// True if it refuses whatever the other limit refuses: same postings or more, no larger
    /// amount, no shorter window.
    pub fn is_as_strict_as(&self, other: &Self) -> bool {
        let covers_user = self.user_id.is_empty() || self.user_id == other.user_id;
        let covers_account = self.account_kind.is_none() || self.account_kind == other.account_kind;
        let covers_kinds = self.kinds.0 == 0
            || other.kinds.0 != 0 && self.kinds.0 & other.kinds.0 == other.kinds.0;
        covers_user
            && covers_account
            && covers_kinds
            && self.instrument_id == other.instrument_id
            && self.side == other.side
            && self.window_s >= other.window_s
            && self.amount <= other.amount
    }

    /// Describes the terms in an audit record.
    pub fn audit_text(&self) -> String {
        let user = if self.user_id.is_empty() {
            "every user"
        } else {
            &self.user_id
        };
        let kinds: Vec<&str> = self.kinds.iter().map(OperationType::as_str).collect();
        format!(
            "{user}, {}, {} at most {} {} in {} s, {}",
            self.account_kind.map_or("any account", AccountType::as_str),
            self.side,
            types::Decimal::from_minor(self.amount.0, self.decimals),
            self.instrument_id,
            self.window_s,
            if kinds.is_empty() {
                "all types".to_owned()
            } else {
                kinds.join(" ")
            },
        )
    }
}
