//! Releases in the ledger the money that the journal has taken out of a hold.

use std::sync::Arc;
use std::time::Duration;

use replica::Hold;
use rpc::Context;
use service_clients::ledger::HoldChange;
use service_kit::failpoint;
use tonic::Status;
use types::{HoldKind, Id128, Minor, Sequence};

use super::{ledger_hold, user_id};
use crate::market::Market;
use crate::refusal;

/// Time limit of one wait for settlement, so that tasks and locks do not pile up if it has ended.
const RELEASE_MAX: Duration = Duration::from_secs(30);

/// Releases in the ledger the money that the journal has taken out of a hold: all of a closed hold,
/// the defunded amount of an open one.
///
/// Waits for settlement: before, some of the money may still be in the hold of an order that was
/// just cancelled. Idempotent: the amount is the difference between journal and ledger, and the
/// idempotency key derives from the defunded total.
pub async fn release_to_holder(market: &Market, hold_id: Id128) -> Result<(), Status> {
    let Some(market_hold) = market.hold_of(hold_id) else {
        return Ok(());
    };
    if market_hold.taken_at == Sequence::ZERO || settlement_releases(&market_hold) {
        return Ok(());
    }
    market.await_posted(market_hold.taken_at).await?;
    // Two calls that read the same figures would both release the difference.
    let _one_at_a_time = market.releases.lock(hold_id).await;
    let Some(market_hold) = market.hold_of(hold_id) else {
        return Ok(());
    };
    if !market.is_posted(market_hold.taken_at) {
        // The journal has taken out more meanwhile. The call that did so releases the money.
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
            // The hold may have ended meanwhile.
            Ok(()) | Err(_) => Ok(()),
        };
    }
    let missing = market_hold.defunded - asset.minor(hold.released)?;
    if missing <= Minor::ZERO {
        return Ok(());
    }
    // Do not change: the ledger has stored keys of this form.
    const ACTION: &str = concat!("give", " back");
    let key = format!("{ACTION}:{hold_id}:{}", market_hold.defunded);
    let (change, missing) = (HoldChange::Shrink, asset.amount(missing));
    let shrunk = market
        .ledger
        .change_hold(&context, &key, hold_id, change, missing, &hold.reason);
    Ok(shrunk.await?)
}

/// True for the hold of an order that was journalled: settlement releases it.
pub fn settlement_releases(hold: &Hold) -> bool {
    hold.kind == HoldKind::Order && hold.orders > 0
}

/// Releases and waits until the ledger has released. Continues if the caller stops waiting.
pub(super) async fn release_when_settled(
    market: &Arc<Market>,
    hold_id: Id128,
    sequence: Sequence,
) -> Result<(), Status> {
    // The journal has taken the money out of the hold, the ledger has not released it.
    failpoint::reach("market.hold_taken");
    let own = market.clone();
    let release = tokio::spawn(async move {
        let releasing = async {
            own.await_applied(sequence).await?;
            release_to_holder(&own, hold_id).await
        };
        let releasing = tokio::time::timeout(RELEASE_MAX, releasing).await;
        // The sweeper retries.
        releasing.unwrap_or_else(|_| Err(rpc::status::unavailable("Settlement", 1_000)))
    });
    let released = release.await;
    released.unwrap_or_else(|error| Err(refusal::internal(error)))
}

/// Starts a release and waits at most `release_wait_ms` for it. A failure is logged, and the
/// sweeper retries.
pub(super) async fn start_release(market: &Arc<Market>, hold_id: Id128, sequence: Sequence) {
    let own = market.clone();
    let release = tokio::spawn(async move {
        if let Err(status) = release_when_settled(&own, hold_id, sequence).await {
            tracing::warn!(%status, %hold_id, "release of a trading hold pending: the sweeper retries");
        }
    });
    let bound = Duration::from_millis(market.config.release_wait_ms);
    let _ = tokio::time::timeout(bound, release).await;
}
