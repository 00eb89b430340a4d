//! The TRADING limit of session orders: the front's budget estimate, and identity for orders above
//! it (`design.md` 3).

use admission::NewRequest;
use replica::State;
use rpc::Context;
use tonic::Status;
use types::{InstrumentSpec, Minor, OrderType, RejectReason, Side};

use crate::budget::Budget;
use crate::market::Market;

/// Subtracts an order from the user's budget estimate. False if the estimate does not cover it. An
/// order that admission refuses for its form passes and subtracts nothing. `day`: see
/// [`Market::day`].
pub fn is_in_budget(
    spec: Option<&InstrumentSpec>,
    budget: &Budget,
    new: &NewRequest,
    day: impl FnOnce() -> u32,
) -> bool {
    let (Some(spec), false) = (spec, new.quantity.is_zero()) else {
        return true;
    };
    // A market order may trade up to the highest price of the band. Without a band that price
    // exceeds any budget: `check` values the order by the book.
    let price = new.price.unwrap_or(spec.band_high);
    if price.0 <= 0 {
        return true;
    }
    match spec.terms.value(price, new.quantity) {
        Some(value) => budget.try_spend(value, day()),
        None => new.price.is_some(),
    }
}

/// Checks an order above the budget estimate: reads the estimate again, then lets identity check
/// the order. `Ok(true)`: identity allows the order. `Ok(false)`: admission checks its budget.
/// `Err`: the user's KYC level is too low, or a dependency is unavailable.
pub async fn check(
    market: &Market,
    user: types::UserIx,
    user_id: &str,
    budget: &Budget,
    new: &NewRequest,
) -> Result<bool, RejectReason> {
    let mut context = Context::new("market");
    context.user_id = user_id.to_owned();
    let unavailable = |status: Status| {
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
    .map_err(unavailable)?;
    if budget.is_kyc_too_low() {
        return Err(RejectReason::KycRequired);
    }
    if new.order_type == OrderType::Market && new.price.is_none() {
        // Identity is not asked about this value, which the next trade may change. Admission
        // checks the value at which it admits the order.
        let value = market_value(market, &spec, new).await;
        let value = value.map_err(unavailable)?;
        if value.is_some_and(|value| budget.try_spend(value, day)) {
            return Ok(false);
        }
    }
    // The highest price by which admission may value the order.
    let price = new.price.unwrap_or(spec.band_high);
    let price = market
        .valuation_price(new, price)
        .await
        .map_err(unavailable)?;
    let value = spec.terms.value(price, new.quantity);
    if value.is_some_and(|value| budget.try_spend(value, day)) {
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
        Err(status) => Err(unavailable(status)),
    }
}

/// The value of a market order without a price of its own, at the protection price and best bid
/// that admission would use now (T19). Zero if it has neither best price nor band: it spends
/// nothing. `None` past 64 bits.
async fn market_value(
    market: &Market,
    spec: &InstrumentSpec,
    new: &NewRequest,
) -> Result<Option<Minor>, Status> {
    let quote = |state: &State| state.core().admission().quote(spec.ix);
    let best = market.query(quote).await?.opposite(new.side);
    let Some(protection) = spec.protection_price(new.side, best) else {
        return Ok(Some(Minor::ZERO));
    };
    let price = match (new.side, best) {
        (Side::Sell, Some(bid)) => protection.max(bid),
        _ => protection,
    };
    Ok(spec.terms.value(price, new.quantity))
}
