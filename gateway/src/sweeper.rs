//! Reconciles the ledger's active holds of the market with the journal (`design.md` 4). Repairs
//! differences that a crash left, and closes holds that are no longer used.
//!
//! | hold | repair |
//! |---|---|
//! | unknown to the journal, older than `orphan_hold_age_ms` | adopted: funded in the journal |
//! | larger in the ledger than the journal has funded | the difference is funded |
//! | defunded or closed in the journal, not yet released in the ledger | released |
//! | of an order, funded but not used for `orphan_hold_age_ms` | closed |
//! | trading hold without open orders, user blocked or long without a session | closed |
//!
//! An adopted hold becomes the user's trading hold if it was opened as one, the user has no other,
//! and it has no units of a matured issue. Every other adopted hold is closed at once. The journal
//! then knows its id, so that a late retry of the call that created it is refused.

use std::sync::Arc;
use std::time::Duration;

use replica::Hold;
use rpc::Context;
use service_clients::ledger::Hold as LedgerHold;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::subaccount::SubAccountName;
use types::{HoldKind, Id128};

use crate::funding::{self, AbandonedHolds};
use crate::market::{Market, SOURCE, now_ns, now_us};

/// Sweeps the market's holds until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.sweep_interval_ms.max(10));
    loop {
        if let Err(status) = sweep(&market).await {
            tracing::warn!(%status, "sweep of trading holds aborted: the next sweep retries");
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Sweeps once: repairs every active hold, then closes abandoned trading holds.
///
/// # Errors
/// The ledger's holds cannot be listed, or the replica has ended.
pub async fn sweep(market: &Arc<Market>) -> Result<(), Status> {
    let context = Context::new("market");
    let mut holds = market.ledger.active_holds(&context, SOURCE, None).await?;
    holds.retain(|hold| hold.parent.is_none());
    // The replica is read after the ledger, so that it has every hold that was funded before.
    market.await_applied(market.commit.position()).await?;
    for hold in &holds {
        let repaired = match market.hold_of(hold.hold_id) {
            Some(market_hold) => repair(market, hold, &market_hold).await,
            None => adopt(market, hold).await,
        };
        if let Err(status) = repaired {
            // One hold must not delay the others.
            tracing::warn!(%status, hold_id = %hold.hold_id, "hold not repaired: the next sweep retries");
        }
    }
    close_abandoned(market).await;
    Ok(())
}

/// Closes abandoned trading holds. See [`AbandonedHolds`].
async fn close_abandoned(market: &Arc<Market>) {
    let idle_ns = market.config.trading_hold_idle_ms.saturating_mul(1_000_000);
    if idle_ns == 0 {
        return;
    }
    let mut search = AbandonedHolds::before(now_ns().saturating_sub(idle_ns));
    while let Some(page) = market.replica.read(|state| search.next_page(state)) {
        for hold in page {
            let hold_ix = hold.get();
            match funding::close_abandoned(market, hold, &mut search).await {
                Ok(()) => tracing::info!(hold_ix, "abandoned trading hold closed"),
                // One hold must not delay the others.
                Err(status) => {
                    tracing::warn!(%status, hold_ix, "abandoned trading hold not closed: the next sweep retries")
                }
            }
        }
    }
}

fn age_ms(since_us: i64) -> u64 {
    u64::try_from(now_us().saturating_sub(since_us) / 1_000).unwrap_or(0)
}

/// Repairs a hold that the journal knows.
async fn repair(market: &Arc<Market>, hold: &LedgerHold, market_hold: &Hold) -> Result<(), Status> {
    if market_hold.closed {
        return release_if_settled(market, hold, market_hold).await;
    }
    let idle_ms = now_ns().saturating_sub(market_hold.changed_ns) / 1_000_000;
    let is_unused = market_hold.kind == HoldKind::Order && market_hold.orders == 0;
    if is_unused && idle_ms >= market.config.orphan_hold_age_ms {
        return funding::close_idle(market, market_hold.hold).await;
    }
    let asset = market.asset_of(market_hold.asset);
    if asset.minor(hold.amount)? > market_hold.funded {
        // A call may be growing the hold. It has the lock, so read the hold again under the lock.
        let _lock = market.lock_funding(market_hold.user).await;
        let hold = market
            .ledger
            .hold(&Context::new("market"), hold.hold_id)
            .await?;
        if let Some(hold) = hold.filter(LedgerHold::is_active) {
            let (user, kind) = (market_hold.user, market_hold.kind);
            funding::sync_funding(market, user, &asset, kind, &hold, Id128::NONE).await?;
        }
    }
    // Nothing is left to release.
    if asset.minor(hold.released)? >= market_hold.defunded {
        return Ok(());
    }
    release_if_settled(market, hold, market_hold).await
}

/// Releases the money if settlement has posted it. A sweep does not wait for settlement.
async fn release_if_settled(
    market: &Arc<Market>,
    hold: &LedgerHold,
    market_hold: &Hold,
) -> Result<(), Status> {
    if !market.is_posted(market_hold.taken_at) {
        return Ok(());
    }
    funding::release_to_holder(market, hold.hold_id).await
}

/// Journals the funding of a hold that the journal does not know.
async fn adopt(market: &Arc<Market>, hold: &LedgerHold) -> Result<(), Status> {
    if age_ms(hold.created_at_us) < market.config.orphan_hold_age_ms {
        return Ok(()); // Its call may still be in flight.
    }
    let Some(name) = SubAccountName::parse(&hold.subaccount_id) else {
        return Ok(());
    };
    let (user_id, asset) = (name.user_id, market.asset(name.instrument_id).await?);
    let user = market.bind_user(user_id).await?;
    let lock = market.lock_funding(user).await;
    let known = market.default_hold(user, asset.ix).await?;
    // A repeat of its call may have journalled this hold since.
    let has_other = known.is_some_and(|(_, balance)| balance.hold_id != hold.hold_id);
    let is_trading =
        hold.reason.starts_with(funding::TRADING_REASON) && !asset.is_matured() && !has_other;
    let kind = match is_trading {
        true => HoldKind::Trading,
        false => HoldKind::Order,
    };
    let hold_ix = funding::sync_funding(market, user, &asset, kind, hold, Id128::NONE).await?;
    drop(lock);
    tracing::warn!(hold_id = %hold.hold_id, user_id, is_trading, "ledger hold was unknown to the journal: adopted");
    if kind == HoldKind::Order {
        funding::close_idle(market, hold_ix).await?;
    }
    Ok(())
}
