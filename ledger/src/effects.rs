//! Effects of commands. `publish.rs` encodes each as an event of specification 6.5.

use types::Decimal;

use crate::model::{Id, OperationStatus, OperationType, Units};

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
    /// A velocity limit was set, changed or removed. `before` and `after` describe its terms;
    /// empty: no limit.
    LimitChanged {
        limit_id: Id,
        before: String,
        after: String,
        actor: String,
        reason: String,
    },
    HoldConsumed {
        hold_id: Id,
        subaccount_id: Id,
    },
}
