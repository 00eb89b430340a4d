//! Ends every hold of the market, also after a crash (`design.md` 4). Compares the ledger's active
//! holds with the journal and repairs what a crash left between the two.
//!
//! - A hold that the journal does not know at its commit position and that is older than
//!   [`GatewayConfig::orphan_hold_age_ms`]: adopted (funded). A trading hold then serves. The hold
//!   of an order that never arrived is closed at once, which binds its id, so that a late retry of
//!   that call is refused.
//! - A hold whose ledger amount is more than was funded: funded.
//! - A hold that was defunded or closed, money not yet released: released.
//! - The hold of an order that was funded and never used: closed.
//! - A trading hold without open orders, long after its user's last session: closed.
//!
//! [`GatewayConfig::orphan_hold_age_ms`]: crate::GatewayConfig

use std::sync::Arc;
use std::time::Duration;

use replica::{Hold, State};
use rpc::Context;
use service_clients::ledger::Hold as LedgerHold;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::subaccount::SubAccountName;
use types::{HoldKind, Id128};

use crate::funding;
use crate::market::{Market, SOURCE, now_ns, now_us};

/// Sweeps until shutdown.
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

/// One sweep.
pub async fn sweep(market: &Arc<Market>) -> Result<(), Status> {
    let context = Context::new("market");
    let mut holds = market.ledger.active_holds(&context, SOURCE, None).await?;
    holds.retain(|hold| hold.parent.is_none());
    // Read after the ledger has answered, so that it has what was funded meanwhile.
    market.passed(market.commit.position()).await?;
    for hold in &holds {
        let healed = match market.hold_of(hold.hold_id) {
            Some(market_hold) => heal(market, hold, &market_hold).await,
            None => adopt(market, hold).await,
        };
        if let Err(status) = healed {
            // One hold must not delay the others.
            tracing::warn!(%status, hold_id = %hold.hold_id, "hold not repaired: the next sweep retries");
        }
    }
    close_abandoned(market).await;
    Ok(())
}

/// Closes the trading holds of users who have left.
async fn close_abandoned(market: &Arc<Market>) {
    let idle_ns = market.config.trading_hold_idle_ms.saturating_mul(1_000_000);
    if idle_ns == 0 {
        return;
    }
    let before_ns = now_ns().saturating_sub(idle_ns);
    let abandoned = |state: &State| funding::abandoned(state, before_ns);
    for hold in market.replica.read(abandoned) {
        let hold_ix = hold.get();
        match funding::close_abandoned(market, hold, before_ns).await {
            Ok(()) => tracing::info!(hold_ix, "abandoned trading hold closed"),
            // One hold must not delay the others.
            Err(status) => tracing::warn!(%status, hold_ix, "abandoned trading hold not closed"),
        }
    }
}

fn age_ms(since_us: i64) -> u64 {
    u64::try_from(now_us().saturating_sub(since_us) / 1_000).unwrap_or(0)
}

/// Repairs a hold that the journal knows.
async fn heal(market: &Arc<Market>, hold: &LedgerHold, market_hold: &Hold) -> Result<(), Status> {
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
        // A call that grows the hold now has the lock; after it there may be nothing left to do.
        let _turn = market.funding_turn(market_hold.user).await;
        let hold = market
            .ledger
            .hold(&Context::new("market"), hold.hold_id)
            .await?;
        if let Some(hold) = hold.filter(LedgerHold::is_active) {
            let (user, kind) = (market_hold.user, market_hold.kind);
            funding::bring_up(market, user, &asset, kind, &hold, Id128::NONE).await?;
        }
    }
    // Released already: no call.
    if asset.minor(hold.released)? >= market_hold.defunded {
        return Ok(());
    }
    release_if_settled(market, hold, market_hold).await
}

/// Releases only what settlement has already passed: a sweep does not wait.
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

/// Adopts a hold that the journal does not know.
async fn adopt(market: &Arc<Market>, hold: &LedgerHold) -> Result<(), Status> {
    if age_ms(hold.created_at_us) < market.config.orphan_hold_age_ms {
        return Ok(()); // Its call may still be in flight.
    }
    let Some(name) = SubAccountName::parse(&hold.subaccount_id) else {
        return Ok(());
    };
    let (user_id, asset) = (name.user_id, market.asset(name.instrument_id).await?);
    let user = market.bind_user(user_id).await?;
    let serves = hold.reason.starts_with(funding::TRADING_REASON)
        && market.default_hold(user, asset.ix).await?.is_none();
    let kind = match serves {
        true => HoldKind::Trading,
        false => HoldKind::Order,
    };
    let turn = market.funding_turn(user).await;
    let hold_ix = funding::bring_up(market, user, &asset, kind, hold, Id128::NONE).await?;
    drop(turn);
    tracing::warn!(hold_id = %hold.hold_id, user_id, serves, "hold unknown to the journal adopted");
    if kind == HoldKind::Order {
        funding::close_idle(market, hold_ix).await?;
    }
    Ok(())
}
