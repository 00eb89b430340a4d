//! Calls beyond their caller's rate: a call passes if it reduces risk. Any other call is refused
//! before it writes anything (`design.md` 5).

use replica::State;
use rpc::{Caller, OverRate};
use tonic::Status;
use types::{Id128, UserId};

use super::MassCancel;
use crate::market::Market;

/// Passes a cancel of an open order that the caller may cancel.
pub async fn check_cancel(
    market: &Market,
    over: Option<OverRate>,
    caller: &Caller,
    order_id: &str,
) -> Result<(), Status> {
    let id = Id128::parse(order_id);
    let is_open = |state: &State| {
        let order = id.and_then(|id| state.open_order(id));
        order.is_some_and(|(order, _)| {
            let user_id = state.names().user(order.user);
            caller.require_user(user_id.as_str()).is_ok()
        })
    };
    check(market, over, is_open).await
}

/// Passes a mass cancel of all users, or an unfiltered one of a user with open orders.
pub async fn check_mass_cancel(
    market: &Market,
    over: Option<OverRate>,
    wanted: &MassCancel,
) -> Result<(), Status> {
    let user_id = wanted.user_id.as_str();
    let is_filtered = wanted.instrument.is_some() || wanted.side.is_some();
    let has_orders = |state: &State| {
        let admission = state.core().admission();
        let user = UserId::new(user_id).ok();
        let user = user.and_then(|id| admission.user_ix(&id));
        let user = user.and_then(|user| admission.user(user));
        user_id.is_empty() || !is_filtered && user.is_some_and(|user| user.open_orders > 0)
    };
    check(market, over, has_orders).await
}

/// Passes a call that changes the kill switch of a user, and every call for all users (empty id).
pub async fn check_kill_switch(
    market: &Market,
    over: Option<OverRate>,
    user_id: &str,
    is_engaged: bool,
) -> Result<(), Status> {
    let changes = |state: &State| {
        let admission = state.core().admission();
        let user = UserId::new(user_id).ok();
        let user = user.and_then(|id| admission.user_ix(&id));
        user_id.is_empty() || user.is_none_or(|user| admission.kill_switch(user) != is_engaged)
    };
    check(market, over, changes).await
}

async fn check(
    market: &Market,
    over: Option<OverRate>,
    reduces: impl FnOnce(&State) -> bool,
) -> Result<(), Status> {
    let Some(over) = over else {
        return Ok(());
    };
    match market.query(reduces).await {
        Ok(false) => Err(over.into()),
        // A lagging replica may lack the order, so the call passes.
        _ => Ok(()),
    }
}
