//! Every hold of the market ends, whatever crashed in between (`design.md` 4): compares the ledger's active
//! holds with the journal and heals what a crash left between the two.
//!
//! - A hold that the journal does not know at its commit position and that is older than
//!   [`GatewayConfig::orphan_hold_age_ms`]: adopted (funded); a trading hold then serves, the hold of an order
//!   that never came is closed at once, which binds its id, so that a late retry of that call is refused.
//! - A pool that was funded less than its hold was given: funded.
//! - A pool that was defunded or closed, money not back yet: given back.
//! - The pool of an order that was funded and never used: closed.
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
use types::{Id128, PoolKind};

use crate::funding;
use crate::market::{Market, SOURCE, now_ns, now_us};

/// Sweeps until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.sweep_interval_ms.max(10));
    loop {
        if let Err(status) = sweep(&market).await {
            tracing::warn!(%status, "the sweep of trading holds was cut short");
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
    // Looked up after the ledger has answered: what was funded meanwhile is known here.
    market.passed(market.commit.position()).await?;
    for hold in &holds {
        let healed = match market.hold_of(hold.hold_id) {
            Some(pool) => heal(market, hold, &pool).await,
            None => adopt(market, hold).await,
        };
        if let Err(status) = healed {
            // One hold must not keep the others waiting.
            tracing::warn!(%status, hold_id = %hold.hold_id, "a trading hold is not healed yet");
        }
    }
    close_abandoned(market).await;
    Ok(())
}

/// Trading holds of users who have left.
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
            Ok(()) => tracing::info!(hold_ix, "nobody has traded for long: trading hold closed"),
            // One hold must not keep the others waiting.
            Err(status) => tracing::warn!(%status, hold_ix, "a trading hold left behind stays"),
        }
    }
}

fn age_ms(since_us: i64) -> u64 {
    u64::try_from(now_us().saturating_sub(since_us) / 1_000).unwrap_or(0)
}

/// A hold that the journal knows.
async fn heal(market: &Arc<Market>, hold: &LedgerHold, pool: &Hold) -> Result<(), Status> {
    if pool.closed {
        return give_back_behind_settlement(market, hold.hold_id, pool).await;
    }
    let idle_ms = now_ns().saturating_sub(pool.changed_ns) / 1_000_000;
    let is_unused = pool.kind == PoolKind::Order && pool.orders == 0;
    if is_unused && idle_ms >= market.config.orphan_hold_age_ms {
        return funding::close_idle(market, pool.hold).await;
    }
    let asset = market.asset_of(pool.asset);
    if asset.minor(hold.amount)? > pool.funded {
        // A call that is growing it right now has the turn: behind it there may be nothing left to do.
        let _turn = market.funding_turn(pool.user).await;
        let hold = market
            .ledger
            .hold(&Context::new("market"), hold.hold_id)
            .await?;
        if let Some(hold) = hold.filter(LedgerHold::is_active) {
            let (user, kind) = (pool.user, pool.kind);
            funding::bring_up(market, user, &asset, kind, &hold, Id128::NONE).await?;
        }
    }
    give_back_behind_settlement(market, hold.hold_id, pool).await
}

/// Only what settlement has passed already: a sweep waits for nobody.
async fn give_back_behind_settlement(
    market: &Arc<Market>,
    hold_id: Id128,
    pool: &Hold,
) -> Result<(), Status> {
    if !market.is_posted(pool.taken_at) {
        return Ok(());
    }
    funding::give_back(market, hold_id).await
}

/// A hold that the journal does not know.
async fn adopt(market: &Arc<Market>, hold: &LedgerHold) -> Result<(), Status> {
    if age_ms(hold.created_at_us) < market.config.orphan_hold_age_ms {
        return Ok(()); // Its call may still be on the way.
    }
    let Some((user_id, instrument_id)) = hold.subaccount_id.split_once(':') else {
        return Ok(());
    };
    let asset = market.asset(instrument_id).await?;
    let user = market.bind_user(user_id).await?;
    let serves = hold.reason.starts_with(funding::TRADING_REASON)
        && market.default_pool(user, asset.ix).await?.is_none();
    let kind = match serves {
        true => PoolKind::Trading,
        false => PoolKind::Order,
    };
    let turn = market.funding_turn(user).await;
    let pool = funding::bring_up(market, user, &asset, kind, hold, Id128::NONE).await?;
    drop(turn);
    tracing::warn!(hold_id = %hold.hold_id, user_id, serves, "a hold that the journal did not know was taken up");
    if kind == PoolKind::Order {
        funding::close_idle(market, pool).await?;
    }
    Ok(())
}
