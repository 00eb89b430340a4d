//! The hold of a redemption. Money that trading has and no order has drawn is the user's to redeem:
//! what is missing in available money is taken out of it first, and only then there is
//! `Insufficient balance` (`design.md` 4).

use std::time::Duration;

use types::Decimal;

use super::Service;
use crate::api::peers::{MARKET, TradingHold};
use crate::error::Error;
use crate::model::{CFA_RUB_DECIMALS, Operation};

/// The market may answer before the ledger has given the money back: so often, with such pauses,
/// the hold is tried again.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);

impl Service {
    /// Makes the hold, or finds it made.
    ///
    /// # Errors
    /// The ledger's refusal, `Insufficient balance` with what trading has among its facts;
    /// `Unavailable` of the market when it did not say what it has, or the ledger has not given it
    /// back yet.
    pub(super) async fn hold_redemption(
        &self,
        operation: &Operation,
        hold_id: &str,
    ) -> Result<(), Error> {
        let shortage = match self.create_redemption_hold(operation, hold_id).await {
            Err(error) if error.is_insufficient() => error,
            other => return other,
        };
        let (correlation_id, user_id) = (&operation.correlation_id, &operation.user_id);
        let trading = self.peers.trading_hold(correlation_id, user_id).await?;
        let available = self.peers.available(correlation_id, user_id).await?;
        let missing = operation.units_minor - available.max(0);
        let cover = trading
            .as_ref()
            .filter(|hold| missing > 0 && hold.undrawn_minor >= missing);
        if let Some(hold) = cover {
            let key = format!("{hold_id}:cover");
            let rest = hold.undrawn_minor - missing;
            let adjusted = self
                .peers
                .set_undrawn(correlation_id, &key, &hold.hold_id, rest)
                .await;
            match adjusted {
                Ok(()) => {}
                // orders drew it meanwhile, or the hold was closed
                Err(Error::Peer { .. }) => return Err(with_trading(shortage, Some(hold))),
                Err(error) => return Err(error),
            }
        } else if missing > 0 {
            return Err(with_trading(shortage, trading.as_ref()));
        }
        for _ in 0..TRIES {
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
        hold_id: &str,
    ) -> Result<(), Error> {
        let reason = format!("Redemption payout {}", operation.external_ref);
        self.peers
            .create_hold(
                &operation.correlation_id,
                hold_id,
                &operation.user_id,
                operation.units_minor,
                &reason,
            )
            .await
    }
}

/// The ledger's breakdown, with what of the held is trading's.
fn with_trading(mut shortage: Error, trading: Option<&TradingHold>) -> Error {
    if let Error::Peer { facts, .. } = &mut shortage {
        let figures = trading.map_or((0, 0), |hold| (hold.undrawn_minor, hold.drawn_minor));
        for (name, amount_minor) in [("undrawn", figures.0), ("drawn", figures.1)] {
            let amount = Decimal::from_minor(amount_minor, CFA_RUB_DECIMALS);
            facts.insert(name.to_owned(), amount.to_string());
        }
    }
    shortage
}
