//! Orders over RPC: place, cancel, amend, mass cancel (specification 4.3, D13, D23, T22).
//!
//! Order of checks when placing: idempotency key, KYC, limit, money, book (R150). Money: the user's
//! trading hold if there is one and it covers the order; otherwise a hold of the order's own,
//! created in the ledger first and then journalled (`design.md` 4). Every answer waits until it is
//! durable. It does not need the history, which may be far behind: an open order, and what a record
//! did to one, are read from the replica. Cancel safe: the sweeper completes what a dropped call
//! leaves.
//!
//! | file | calls |
//! |---|---|
//! | `place` | PlaceOrder |
//! | `change` | CancelOrder, AmendOrder, MassCancel |
//! | `kill` | SetKillSwitch |
//! | `over_rate` | CancelOrder, MassCancel, SetKillSwitch beyond the caller's rate |
//!
//! `changed` builds the answers of `place` and `change`.

mod change;
mod changed;
mod kill;
pub mod members;
pub mod over_rate;
mod place;

use tonic::Status;
use types::Id128;

pub use change::{Change, MassCancel, amend, cancel, mass_cancel};
pub use changed::Target;
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

/// The order with an id, as it is now: from the replica while it is open, else from the history.
///
/// # Errors
/// `Order not found`; UNAVAILABLE while the order is not open and the history is behind (R178).
pub async fn find(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    let id = parsed(order_id)?;
    // While the replica lags, the history lags too: that error has the lag.
    if let Ok(Some((order, Some(updated_ns)))) = market.look(|state| state.open_order(id)).await {
        return changed::row(market, &order, updated_ns, "", None).await;
    }
    market.fresh().await?;
    let row = stored(market, order_id).await?;
    row.ok_or_else(refusal::order_not_found)
}

/// The order with an id, to change it: as replica or history have it, which may be older than the
/// order. Waits only if neither has it.
pub async fn find_to_change(market: &Market, order_id: &str) -> Result<Target, Status> {
    let id = parsed(order_id)?;
    if let Some((order, _)) = market.replica.read(|state| state.open_order(id)) {
        return Ok(Target::of(market, &order));
    }
    // Ended, or entered so recently that the replica must catch up. The latter needs no history.
    match stored(market, order_id).await {
        Ok(Some(row)) => Ok(row.into()),
        _ => find(market, order_id).await.map(Target::from),
    }
}

fn parsed(order_id: &str) -> Result<Id128, Status> {
    refusal::check_given("order_id", order_id)?;
    Id128::parse(order_id).ok_or_else(refusal::order_not_found)
}

async fn stored(market: &Market, order_id: &str) -> Result<Option<OrderRow>, Status> {
    market
        .stored(repo::order(&market.projection.db, order_id))
        .await
}
