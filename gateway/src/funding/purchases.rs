//! The yearly limit for purchases of users who are not qualified investors (F35).
//!
//! Money that the market holds may become a purchase without another question to identity. So it is
//! compared with the rest of the year's limit when it enters a hold: a trading hold that is opened
//! or grows, and the own hold of an order. Profiles are cached, so a qualified investor costs no
//! call. Identity counts a purchase from the trade's event: purchases of the last moments may be
//! missing from its answer.

use rpc::Context;
use tonic::Status;
use types::{Id128, Minor};

use crate::market::{Asset, Market, SOURCE};

const EXCEEDED: &str = "Yearly investment limit exceeded: the user is not a qualified investor";

/// Checks `amount` of money that is to enter the hold `hold_id`, or for a growing hold `None`.
/// Counts what the market's other holds of the user's money have. Accepts units of an instrument.
///
/// # Errors
/// FAILED_PRECONDITION `LIMIT_EXCEEDED`; errors of identity and the ledger.
pub async fn check_purchases(
    market: &Market,
    context: &Context,
    user_id: &str,
    asset: &Asset,
    hold_id: Option<Id128>,
    amount: Minor,
) -> Result<(), Status> {
    if asset.instrument.is_some() {
        return Ok(());
    }
    let profile = market.identity.profile(context, user_id).await?;
    if profile.is_qualified {
        return Ok(());
    }
    let identity = &market.identity.client;
    let Some(left) = identity.purchases_left(context, user_id).await? else {
        return Ok(());
    };
    let subaccount_id = asset.subaccount(user_id);
    let holds = market
        .ledger
        .active_holds_of(context, &subaccount_id, SOURCE);
    // A repeat of the call has made the hold already.
    let others = holds.await?.into_iter();
    let others = others.filter(|hold| Some(hold.hold_id) != hold_id);
    let mut total = i128::from(amount.0);
    for hold in others {
        total += i128::from(asset.minor(hold.remaining)?.0);
    }
    match total <= i128::from(left.0) {
        true => Ok(()),
        false => Err(rpc::status::failed_precondition("LIMIT_EXCEEDED", EXCEEDED)),
    }
}
