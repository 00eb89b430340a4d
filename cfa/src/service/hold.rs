//! The hold of a redemption, covered from undrawn trading money if necessary (`design.md` 4).
//!
//! Trading money that no order has drawn is redeemable. It covers a shortage of available money.
//! `Insufficient balance` is returned only if it does not suffice.

use std::time::Duration;

use service_clients::ledger::NewHold;
use service_clients::{CallError, TradingHold, caused_by};
use tonic_types::StatusExt;
use types::{Amount, CFA_RUB, Id128, Minor, subaccount};

use super::Service;
use crate::error::Error;
use crate::model::{CFA_RUB_DECIMALS, Operation};
use crate::peers::{MARKET, SOURCE};

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
        let account = subaccount::of_user(user_id, CFA_RUB);
        let balance = self.peers.ledger.balance(&context, &account).await?;
        let available = balance.available.to_minor(CFA_RUB_DECIMALS);
        let available = available.map_err(|error| Error::Damaged(error.to_string()))?;
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
