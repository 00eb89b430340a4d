//! Builds history rows of orders from the replica, since the history may lag.

use replica::Order;
use tonic::Status;
use types::{Decimal, Handle, Sequence};

use super::stored_order;
use crate::market::Market;
use crate::projection::batch::{OrderChange, limit_price};
use crate::projection::repo;
use crate::projection::rows::OrderRow;
use crate::refusal;

/// An order to cancel or to amend. Price and quantity may be out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub order_id: String,
    pub user_id: String,
    pub instrument_id: String,
    pub handle: Handle,
    pub price: Option<Decimal>,
    pub quantity: Decimal,
}

impl Target {
    pub(super) fn of(market: &Market, order: &Order) -> Self {
        let names = market.replica.names();
        let spec = names.instrument(order.instrument);
        let price = limit_price(order.terms.order_type, order.price);
        Self {
            order_id: order.id.to_string(),
            user_id: names.user(order.user).to_string(),
            instrument_id: spec.id.to_string(),
            handle: order.handle,
            price: price.map(|ticks| spec.price(ticks)),
            quantity: spec.quantity(order.quantity),
        }
    }
}

impl From<OrderRow> for Target {
    fn from(row: OrderRow) -> Self {
        Self {
            order_id: row.order_id,
            user_id: row.user_id,
            instrument_id: row.instrument_id,
            handle: Handle::from_engine_id(row.engine_order_id),
            price: row.price,
            quantity: row.quantity,
        }
    }
}

/// The order that a durable record entered or changed, as the record left it. Waits for the
/// replica. Waits for the history only if the replica no longer has the record in memory.
/// `client_order_id`: the caller's text, if known.
///
/// # Errors
/// UNAVAILABLE with the lag of the replica, or of the history if that was read.
pub async fn order_after(
    market: &Market,
    sequence: Sequence,
    handle: Handle,
    order_id: &str,
    client_order_id: Option<&str>,
) -> Result<OrderRow, Status> {
    // The outcome is unused: the reads below show whether the replica has the record.
    let applied = market.replica.wait(sequence);
    let _ = tokio::time::timeout(market.read_wait(), applied).await;
    let left = market.replica.effects(sequence, |applied| {
        let change = OrderChange::last(applied, handle)?;
        Some((*change.order, change.updated_ns, change.reason))
    });
    if let Some((order, updated_ns, reason)) = left.flatten() {
        return row(market, &order, updated_ns, reason, client_order_id).await;
    }
    let position = market.replica.position();
    if position < sequence && !market.replica.has_ended() {
        return Err(refusal::replica_behind(sequence.get() - position.get()));
    }
    market.await_history(sequence).await?;
    let row = stored_order(market, order_id).await?;
    row.ok_or_else(refusal::order_not_found)
}

/// The history row of an order of the replica. `reason`: why the order was cancelled or refused,
/// else empty.
pub async fn row(
    market: &Market,
    order: &Order,
    updated_ns: u64,
    reason: &'static str,
    client_order_id: Option<&str>,
) -> Result<OrderRow, Status> {
    let names = market.replica.names();
    let client_order_id = match client_order_id {
        Some(text) => text.to_owned(),
        None => {
            let user_id = names.user(order.user);
            client_order_text(market, user_id.as_str(), order.client_order_id).await?
        }
    };
    let change = OrderChange {
        sequence: order.sequence,
        is_new: false,
        order,
        updated_ns,
        reason,
    };
    Ok(change.row(names, client_order_id))
}

/// The text of a client order id, or its number if a session sent it. Empty for none.
async fn client_order_text(market: &Market, user_id: &str, number: u64) -> Result<String, Status> {
    if number == 0 {
        return Ok(String::new());
    }
    let text = repo::client_order_text(&market.projection.db, user_id, number);
    let text = market.access_store(text).await?;
    Ok(text.unwrap_or_else(|| number.to_string()))
}
