//! Order calls over RPC (specification 4.3, D13, D23, T22).
//!
//! Order of checks when placing: idempotency key, KYC, limit, money, book (R150). The money is in
//! the user's trading hold if that covers the order. Otherwise it is in a hold of the order's own,
//! created in the ledger first and then journalled (`design.md` 4).
//!
//! A call returns after its command is durable. The answer does not wait for the history, which may
//! lag: open orders, and the effects of a recent record on an order, are read from the replica.
//! Cancel safe: the sweeper completes what a dropped call leaves.
//!
//! | file | calls |
//! |---|---|
//! | `place` | PlaceOrder |
//! | `change` | CancelOrder, AmendOrder, MassCancel |
//! | `kill` | SetKillSwitch |
//! | `members` | SetMemberBounds, SetMemberGroup |
//! | `over_rate` | CancelOrder, MassCancel, SetKillSwitch beyond the caller's rate |
//!
//! `replica_rows` builds the answers of `place` and `change`.

mod change;
mod kill;
pub mod members;
pub mod over_rate;
mod place;
mod replica_rows;

use replica::Order;
use tonic::Status;
use types::Id128;

pub use change::{Change, MassCancel, amend, cancel, mass_cancel};
pub use kill::set_kill_switch;
pub use place::place;
pub use replica_rows::Target;

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

/// The answer to a call that writes.
pub struct Answered<T> {
    pub value: T,
    /// An earlier call with the same idempotency key was answered.
    pub replayed: bool,
}

impl<T> Answered<T> {
    pub fn executed(value: T) -> Self {
        Self {
            value,
            replayed: false,
        }
    }

    pub fn replayed(value: T) -> Self {
        Self {
            value,
            replayed: true,
        }
    }
}

/// The order with an id, as it is now: from the replica while it is open, else from the history.
///
/// # Errors
/// `Order not found`. UNAVAILABLE if the replica lags, or if the order is not open and the history
/// lags (R178).
pub async fn find(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    let id = parse_order_id(order_id)?;
    let open = market.query(|state| state.open_order(id)).await;
    row_or_stored(market, order_id, open).await
}

/// As [`find`], for a call that changes something: waits longer for the replica.
async fn find_for_write(market: &Market, order_id: &str) -> Result<OrderRow, Status> {
    let id = parse_order_id(order_id)?;
    let open = market.state(|state| state.open_order(id)).await;
    row_or_stored(market, order_id, open).await
}

/// `open`: the order of the fresh replica, with the time of its last change. After a restore from a
/// checkpoint only the history has that time.
async fn row_or_stored(
    market: &Market,
    order_id: &str,
    open: Result<Option<(Order, Option<u64>)>, Status>,
) -> Result<OrderRow, Status> {
    let open = match open {
        // The history may be complete.
        Err(_) if market.replica.has_ended() => None,
        open => open?,
    };
    if let Some((order, Some(updated_ns))) = open {
        return replica_rows::row(market, &order, updated_ns, "", None).await;
    }
    market.await_fresh_history().await?;
    let row = stored_order(market, order_id).await?;
    row.ok_or_else(refusal::order_not_found)
}

/// The order with an id, to cancel or amend it. The result may be older than the order's current
/// state. Waits only if neither replica nor history has the order.
pub async fn find_to_change(market: &Market, order_id: &str) -> Result<Target, Status> {
    let id = parse_order_id(order_id)?;
    if let Some((order, _)) = market.replica.read(|state| state.open_order(id)) {
        return Ok(Target::of(market, &order));
    }
    // The order has ended, or is so new that the replica lacks it, so wait for the replica.
    match stored_order(market, order_id).await {
        Ok(Some(row)) => Ok(row.into()),
        _ => find_for_write(market, order_id).await.map(Target::from),
    }
}

fn parse_order_id(order_id: &str) -> Result<Id128, Status> {
    refusal::check_not_empty("order_id", order_id)?;
    Id128::parse(order_id).ok_or_else(refusal::order_not_found)
}

async fn stored_order(market: &Market, order_id: &str) -> Result<Option<OrderRow>, Status> {
    market
        .access_store(repo::order(&market.projection.db, order_id))
        .await
}
