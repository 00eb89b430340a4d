//! Effects of commands. `publish.rs` encodes each as an event of specification 6.5.

use types::Decimal;

use crate::{
    audit::Act,
    model::{Id, OperationStatus, OperationType, Units},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    OperationCreated {
        operation_id: Id,
        kind: OperationType,
        user_id: Id,
        /// Amount of the first posting.
        amount: Units,
        /// Initial status.
        status: OperationStatus,
    },
    PostingCreated(PostingCreated),
    StatusChanged {
        operation_id: Id,
        old: OperationStatus,
        new: OperationStatus,
        reason: String,
    },
    /// One per side of a posting: `old` and `new` form a gapless chain per sub-account (R231).
    BalanceUpdated {
        subaccount_id: Id,
        old: Decimal,
        new: Decimal,
        operation_id: Id,
    },
    HoldChanged {
        hold_id: Id,
        subaccount_id: Id,
        change: HoldChange,
    },
    /// An act that the store seals in its audit records.
    ActRecorded(Box<Act>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostingCreated {
    pub posting_id: Id,
    pub operation_id: Id,
    pub debit_subaccount_id: Id,
    pub credit_subaccount_id: Id,
    pub amount: Units,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldChange {
    Created { amount: Units, reason: String },
    Released { reason: String },
    Consumed,
}
