//! Forgets sessions that have been closed for longer than the retention (`design.md` 2). Otherwise
//! closed sessions would use up a user's maximum number of sessions.

use std::sync::Arc;
use std::time::Duration;

use admission::Request;
use replica::State;
use sequencer::SubmitError;
use tokio_util::sync::CancellationToken;
use types::{Sequence, SessionIx};

use crate::front::FrontMessage;
use crate::market::{Market, now_ns};

/// Sessions inspected per interval. Bounds the duration of one replica read.
const PAGE: u32 = 1_024;

/// Forgets idle sessions until shutdown, one page per `sweep_interval_ms`.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(market.config.sweep_interval_ms.max(10));
    let mut from = 0;
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            () = shutdown.cancelled() => return,
        }
        from = forget_page(&market, from).await;
    }
}

/// Forgets the idle sessions of the page that starts at `from`. Returns the start of the next page.
/// Returns `from` if the trading path refuses requests.
async fn forget_page(market: &Market, from: u32) -> u32 {
    let retention_ns = market
        .config
        .session_retention_s
        .saturating_mul(1_000_000_000);
    if retention_ns == 0 {
        return 0;
    }
    let before_ns = now_ns().saturating_sub(retention_ns);
    let (idle, next) = market
        .replica
        .read(|state| idle_sessions(state, from, before_ns));
    for (session, epoch) in idle {
        let request = Request::ForgetSession { session, epoch };
        match market.submit(request).await {
            Ok(record) => {
                if market.await_durable(record.command.sequence).await.is_err() {
                    return from;
                }
                market.front.send(FrontMessage::Forget(session)).await;
                tracing::info!(session = session.0, "idle session forgotten");
            }
            // The session has open or unsettled orders, or was opened again.
            Err(SubmitError::Refused(_)) => {}
            Err(_) => return from,
        }
    }
    next
}

/// The sessions of a page without open orders that were closed before `before_ns`, with their
/// epochs, and the start of the next page (0 after the last page).
fn idle_sessions(state: &State, from: u32, before_ns: u64) -> (Vec<(SessionIx, Sequence)>, u32) {
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
