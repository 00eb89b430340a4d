//! Orders over RPC: place, cancel, amend, mass cancel (specification 4.3, D13, D23, T22).
//!
//! Order of checks when placing: idempotency key, KYC, limit, money, book (R150). Money: the user's
//! trading hold if there is one and it covers the order; otherwise a hold of the order's own,
//! created in the ledger first and then journalled (`design.md` 4). Every answer waits until it is
//! durable, and that of a change until the history has it. Cancel safe: the sweeper completes what
//! a dropped call leaves.
//!
//! | file | calls |
//! |---|---|
//! | `place` | PlaceOrder |
//! | `change` | CancelOrder, AmendOrder, MassCancel |
//! | `kill` | SetKillSwitch |

mod change;
mod entered;
mod kill;
pub mod members;
mod place;

use sequencer::Record;
use tonic::Status;
use types::Id128;

pub use change::{Change, MassCancel, amend, cancel, mass_cancel};
pub use kill::set_kill_switch;
pub use place::place;

use crate::market::Market;
use crate::projection::repo;
use crate::projection::rows::OrderRow;
use crate::refusal;

/// The caller's relation to the orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// The owner of the orders.
    Owner,
    /// Staff or a service, for any user.
    Staff,
}

/// The answer to a write: the current value, and whether the call was answered before.
pub struct Answered<T> {
    pub value: T,
    pub replayed: bool,
}

impl<T> Answered<T> {
    pub fn now(value: T) -> Self {
        Self {
            value,
            replayed: false,
        }
    }

    pub fn before(value: T) -> Self {
        Self {
            value,
            replayed: true,
        }
    }
}

/// The order with an id, as it is now. Fails with `Order not found`.
pub async fn find(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    if Id128::parse(order_id).is_none() {
        return Err(refusal::order_not_found());
    }
    let lag = market.freshen().await;
    let found = stored(market, order_id).await?;
    found.ok_or_else(|| refusal::missing(lag, refusal::order_not_found))
}

/// The order with an id, to cancel it: as the history has it, which may be older than the order.
/// Waits for the history only if it has no such order.
pub async fn find_to_cancel(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    match stored(market, order_id).await? {
        Some(found) => Ok(found),
        None => find(market, order_id).await,
    }
}

async fn stored(market: &Market, order_id: &str) -> Result<Option<OrderRow>, Status> {
    let row = repo::order(&market.projection.db, order_id).await;
    row.map_err(refusal::internal)
}

/// The order once everything up to the record is durable and in the history.
async fn shown(market: &Market, record: &Record, order_id: &str) -> Result<OrderRow, Status> {
    market.written(record.command.sequence).await?;
    stored(market, order_id)
        .await?
        .ok_or_else(refusal::order_not_found)
}
