//! Forgets sessions that have been closed for longer than the retention (`design.md` 2), so that a
//! user's names are not used up for good.

use std::sync::Arc;
use std::time::Duration;

use admission::Request;
use replica::State;
use sequencer::SubmitError;
use tokio_util::sync::CancellationToken;
use types::{Sequence, SessionIx};

use crate::front::FrontMessage;
use crate::market::{Market, now_ns};

/// Sessions looked at per interval: a read of the replica must stay short however many there are.
const PAGE: u32 = 1_024;

/// Forgets until shutdown, one page of sessions per sweep interval.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.sweep_interval_ms.max(10));
    let mut from = 0;
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = shutdown.cancelled() => return,
        }
        from = sweep(&market, from).await;
    }
}

/// Forgets the idle sessions of the page that starts at `from`; returns the start of the next.
async fn sweep(market: &Market, from: u32) -> u32 {
    let retention_ns = market
        .config
        .session_retention_s
        .saturating_mul(1_000_000_000);
    if retention_ns == 0 {
        return 0;
    }
    let before_ns = now_ns().saturating_sub(retention_ns);
    let (idle, next) = market.replica.read(|state| page(state, from, before_ns));
    for (session, epoch) in idle {
        let request = Request::ForgetSession { session, epoch };
        match market.submit(request).await {
            Ok(record) => {
                if market.durable(record.command.sequence).await.is_err() {
                    return from;
                }
                market.front.send(FrontMessage::Forget(session)).await;
                tracing::info!(session = session.0, "idle session forgotten");
            }
            // It has open or unsettled orders, or was opened again.
            Err(SubmitError::Refused(_)) => {}
            Err(_) => return from,
        }
    }
    next
}

/// The sessions of a page that were closed before `before_ns`, with their last login, and the start
/// of the next page.
fn page(state: &State, from: u32, before_ns: u64) -> (Vec<(SessionIx, Sequence)>, u32) {
    let admission = state.core().admission();
    let mut idle = Vec::new();
    for at in from..from.saturating_add(PAGE) {
        let session = SessionIx(at);
        let (Some(row), Some(known)) = (admission.session(session), state.session(session)) else {
            return (idle, 0);
        };
        let is_idle = !row.open && !row.key.is_none() && known.changed_ns < before_ns;
        if is_idle && row.open_orders == 0 {
            idle.push((session, row.epoch));
        }
    }
    (idle, from.saturating_add(PAGE))
}
