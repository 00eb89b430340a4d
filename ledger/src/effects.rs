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
    PostingCreated {
        posting_id: Id,
        operation_id: Id,
        debit_subaccount_id: Id,
        credit_subaccount_id: Id,
        amount: Units,
    },
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
    HoldCreated {
        hold_id: Id,
        subaccount_id: Id,
        amount: Units,
        reason: String,
    },
    HoldReleased {
        hold_id: Id,
        subaccount_id: Id,
        reason: String,
    },
    /// An act that the store seals in its audit records.
    ActRecorded(Box<Act>),
    HoldConsumed {
        hold_id: Id,
        subaccount_id: Id,
    },
}
