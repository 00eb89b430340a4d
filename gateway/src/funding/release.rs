//! Releases in the ledger what the journal has taken out of a hold.

use std::sync::Arc;
use std::time::Duration;

use replica::Hold;
use rpc::Context;
use service_clients::ledger::HoldChange;
use tonic::Status;
use types::{HoldKind, Id128, Minor, Sequence};

use super::{ledger_hold, user_id};
use crate::market::Market;
use crate::refusal;

/// Time limit of one wait for settlement: if it has ended, tasks and locks must not pile up.
const RELEASE_MAX: Duration = Duration::from_secs(30);

/// Releases in the ledger what the journal has taken out of a hold: all of a closed one, the
/// defunded part of an open one. Waits for settlement, since before it part of the money may still
/// be in the hold of an order that was just cancelled. Idempotent: the missing amount is computed
/// from both sides, and the keys derive from it.
pub async fn release_to_holder(market: &Market, hold_id: Id128) -> Result<(), Status> {
    let Some(market_hold) = market.hold_of(hold_id) else {
        return Ok(());
    };
    if market_hold.taken_at == Sequence::ZERO || settlement_releases(&market_hold) {
        return Ok(());
    }
    market.posted(market_hold.taken_at).await?;
    // Two calls that read the same figures would both release the difference.
    let _one_at_a_time = market.releases.lock(hold_id).await;
    let Some(market_hold) = market.hold_of(hold_id) else {
        return Ok(());
    };
    if !market.is_posted(market_hold.taken_at) {
        // More was taken meanwhile: the call that took it releases it.
        return Ok(());
    }
    let asset = market.asset_of(market_hold.asset);
    let user_id = user_id(market, market_hold.user);
    let mut context = Context::new("market");
    context.user_id = user_id;
    let hold = ledger_hold(market, &context, hold_id).await?;
    if !hold.is_active() {
        return Ok(());
    }
    if market_hold.closed {
        let released = market.ledger.release_hold(&context, hold_id, &hold.reason);
        return match released.await {
            Err(error) if error.reason().as_deref() != Some("HOLD_NOT_ACTIVE") => Err(error.into()),
            // A hold that has ended meanwhile is fine.
            Ok(()) | Err(_) => Ok(()),
        };
    }
    let missing = market_hold.defunded - asset.minor(hold.released)?;
    if missing <= Minor::ZERO {
        return Ok(());
    }
    // The stored form of the key: a repeat after an upgrade must find it.
    const ACTION: &str = concat!("give", " back");
    let key = format!("{ACTION}:{hold_id}:{}", market_hold.defunded);
    let (change, missing) = (HoldChange::Shrink, asset.amount(missing));
    let shrunk = market
        .ledger
        .change_hold(&context, &key, hold_id, change, missing, &hold.reason);
    Ok(shrunk.await?)
}

/// Settlement releases the hold of an order that reached the journal.
pub fn settlement_releases(hold: &Hold) -> bool {
    hold.kind == HoldKind::Order && hold.orders > 0
}

/// Releases and waits for the end. The release continues if the caller stops waiting.
pub(super) async fn release_when_settled(
    market: &Arc<Market>,
    hold_id: Id128,
    sequence: Sequence,
) -> Result<(), Status> {
    let own = market.clone();
    let release = tokio::spawn(async move {
        let given = async {
            own.passed(sequence).await?;
            release_to_holder(&own, hold_id).await
        };
        let given = tokio::time::timeout(RELEASE_MAX, given).await;
        // The sweeper continues.
        given.unwrap_or_else(|_| Err(rpc::status::unavailable("Settlement", 1_000)))
    });
    let released = release.await;
    released.unwrap_or_else(|error| Err(refusal::internal(error)))
}

/// Starts a release and waits for it within bounds. The answer to the call does not depend on it.
pub(super) async fn released(market: &Arc<Market>, hold_id: Id128, sequence: Sequence) {
    let own = market.clone();
    let release = tokio::spawn(async move {
        if let Err(status) = release_when_settled(&own, hold_id, sequence).await {
            // The sweeper retries.
            tracing::warn!(%status, %hold_id, "release of a trading hold pending: the sweeper retries");
        }
    });
    let bound = Duration::from_millis(market.config.release_wait_ms);
    let _ = tokio::time::timeout(bound, release).await;
}
