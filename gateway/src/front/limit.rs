//! The TRADING limit of session orders: a local budget, and above it identity (`design.md` 3).

use admission::NewRequest;
use rpc::Context;
use types::{InstrumentSpec, Minor, RejectReason};

use crate::budget::Budget;
use crate::market::Market;

/// Subtracts an order from the user's budget; false when the budget does not cover it. An order
/// that admission refuses for its form subtracts nothing. `day`: see [`Market::day`].
pub fn is_in_budget(
    spec: Option<&InstrumentSpec>,
    budget: &Budget,
    new: &NewRequest,
    day: impl FnOnce() -> u32,
) -> bool {
    let (Some(spec), false) = (spec, new.quantity.is_zero()) else {
        return true;
    };
    // A market order may cost up to the highest price of the band.
    let price = new.price.unwrap_or(spec.band_high);
    if price.0 <= 0 {
        return true;
    }
    match spec.terms.value(price, new.quantity) {
        Some(value) => budget.take(value, day()),
        None => new.price.is_some(),
    }
}

/// Above the budget: reads again what is left, then asks identity about this order. `Ok(true)`:
/// identity allows it. `Ok(false)`: the budget decides. `Err`: a dependency is unavailable.
pub async fn check(
    market: &Market,
    user: types::UserIx,
    user_id: &str,
    budget: &Budget,
    new: &NewRequest,
) -> Result<bool, RejectReason> {
    let mut context = Context::new("market");
    context.user_id = user_id.to_owned();
    let away = |status: tonic::Status| {
        tracing::warn!(%status, user_id, "order limit not checked: dependency unavailable");
        RejectReason::NotReady
    };
    let Some(spec) = market.spec(new.instrument) else {
        return Ok(false);
    };
    let day = market.day();
    match budget.is_stale(day) {
        true => market.refresh_budget(&context, user, user_id).await,
        false => market.read_budget(user, day).await,
    }
    .map_err(away)?;
    // As admission values it.
    let price = new.price.unwrap_or(spec.band_high);
    let price = market.price_to_trade(new, price).await.map_err(away)?;
    let value = spec.terms.value(price, new.quantity);
    if value.is_some_and(|value| budget.take(value, day)) {
        return Ok(false);
    }
    let quantity = spec.quantity(new.quantity);
    let notional = value.unwrap_or(Minor::MAX);
    match market
        .identity
        .check_trading(&context, user_id, quantity, notional)
        .await
    {
        Ok(()) => Ok(true),
        Err(status) if status.code() == tonic::Code::FailedPrecondition => Ok(false),
        Err(status) => Err(away(status)),
    }
}
