//! The hold of a redemption, covered from undrawn trading money if necessary (`design.md` 4), and
//! trading holds that keep units from the redemption of their issue.
//!
//! Trading money that no order has drawn is redeemable. It covers a shortage of available money.
//! `Insufficient balance` is returned only if it does not suffice.
//!
//! The market cancels the orders of an issue whose trading has ended. Units in a trading hold stay
//! there until its owner closes it (T49), so the redemption has the market release them.

use std::time::Duration;

use futures::future::join_all;
use service_clients::ledger::NewHold;
use service_clients::{CallError, TradingHold, caused_by};
use tonic_types::StatusExt;
use types::{Amount, CFA_RUB, Id128, Minor, subaccount};

use super::workers::log_failure;
use super::{PEER_CALLS, Service};
use crate::error::Error;
use crate::model::Operation;
use crate::peers::{MARKET, MARKET_OWNER, SOURCE};

/// Retries of the hold after the market's response: the ledger may return the money later.
const HOLD_RETRIES: u32 = 20;
/// Pause between two retries.
const PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// Creates the hold, or finds the existing one.
    ///
    /// # Errors
    /// The ledger's refusal. `Insufficient balance` has the user's trading money in its metadata.
    /// `Unavailable` of the market if it does not respond, or if the ledger has not returned the
    /// money after all retries.
    pub(super) async fn hold_redemption(
        &self,
        operation: &Operation,
        hold_id: Id128,
    ) -> Result<(), Error> {
        let shortage = match self.create_redemption_hold(operation, hold_id).await {
            Err(error) if error.is_insufficient() => error,
            other => return other,
        };
        let (correlation_id, user_id) = (&operation.correlation_id, &operation.user_id);
        let context = caused_by(correlation_id);
        let trading = self.peers.market.trading_hold(&context, user_id).await?;
        let available = self.peers.available_money(correlation_id, user_id).await?;
        let missing = operation.units_minor - available.max(0);
        let cover = trading
            .as_ref()
            .filter(|hold| missing > 0 && hold.undrawn.0 >= missing);
        if let Some(hold) = cover {
            let key = format!("{hold_id}:cover");
            let rest = Minor(hold.undrawn.0 - missing);
            let market = &self.peers.market;
            match market.set_undrawn(&context, &key, hold.hold_id, rest).await {
                Ok(()) => {}
                // Orders have drawn the money meanwhile, or the hold is closed.
                Err(CallError::Refused(_)) => return Err(with_trading(shortage, Some(hold))),
                Err(error) => return Err(error.into()),
            }
        } else if missing > 0 {
            return Err(with_trading(shortage, trading.as_ref()));
        }
        for _ in 0..HOLD_RETRIES {
            match self.create_redemption_hold(operation, hold_id).await {
                Err(error) if error.is_insufficient() => tokio::time::sleep(PAUSE).await,
                other => return other,
            }
        }
        Err(Error::Unavailable(MARKET))
    }

    async fn create_redemption_hold(
        &self,
        operation: &Operation,
        hold_id: Id128,
    ) -> Result<(), Error> {
        let reason = format!("Redemption payout {}", operation.external_ref);
        let new = NewHold {
            hold_id,
            subaccount_id: &subaccount::of_user(&operation.user_id, CFA_RUB),
            amount: Amount::rubles(Minor(operation.units_minor)),
            reason: &reason,
            owner: SOURCE,
            destination: Some(&subaccount::reserve(CFA_RUB)),
            expires_at_us: None,
        };
        let context = caused_by(&operation.correlation_id);
        self.peers.ledger.create_hold(&context, new).await?;
        Ok(())
    }

    /// Has the market release the units that trading holds of these users have and no order draws.
    /// They are available in the ledger shortly after. Failures are logged; after a round in which
    /// no call was answered, no other user is tried.
    pub(super) async fn release_trading_units(
        &self,
        correlation_id: &str,
        instrument_id: &str,
        user_ids: &[String],
    ) {
        for round in user_ids.chunks(PEER_CALLS) {
            let releases = round
                .iter()
                .map(|user_id| self.release_units_of(correlation_id, instrument_id, user_id));
            let mut is_unavailable = true;
            for (user_id, released) in round.iter().zip(join_all(releases).await) {
                is_unavailable &= matches!(&released, Err(error) if error.is_transient());
                log_failure("trading hold", user_id, released);
            }
            if is_unavailable {
                return;
            }
        }
    }

    async fn release_units_of(
        &self,
        correlation_id: &str,
        instrument_id: &str,
        user_id: &str,
    ) -> Result<(), Error> {
        let context = caused_by(correlation_id);
        let account = subaccount::of_user(user_id, instrument_id);
        let ledger = &self.peers.ledger;
        let holds = ledger.active_holds_of(&context, &account, MARKET_OWNER);
        let holds = holds.await?.into_iter();
        // Settlement returns the rest of an order's hold to the trading hold, which is its parent.
        for hold in holds.filter(|hold| hold.parent.is_none() && !hold.remaining.is_zero()) {
            // A new key: under an old one the market repeats what it did before it had cancelled
            // the orders.
            let key = uuid::Uuid::now_v7().to_string();
            let market = &self.peers.market;
            let set = market.set_undrawn(&context, &key, hold.hold_id, Minor::ZERO);
            match set.await {
                // Closed, or the own hold of an order: the market releases it without this call.
                Err(error) if error.is_not_found() => {}
                set => set?,
            }
        }
        Ok(())
    }
}

/// Adds the undrawn and drawn trading money to the metadata of the ledger's refusal.
fn with_trading(mut shortage: Error, trading: Option<&TradingHold>) -> Error {
    if let Error::Peer(status) = &mut shortage
        && let Some(mut info) = status.get_details_error_info()
    {
        let figures = trading.map(|hold| (hold.undrawn, hold.drawn));
        let (undrawn, drawn) = figures.unwrap_or_default();
        for (name, amount) in [("undrawn", undrawn), ("drawn", drawn)] {
            let amount = Amount::rubles(amount).decimal();
            info.metadata.insert(name.to_owned(), amount.to_string());
        }
        let (code, text) = (status.code(), status.message());
        *status = rpc::status::with_metadata(code, &info.reason, text, info.metadata);
    }
    shortage
}
