//! Removes the correlation ids of old calls. Only the feed reads one, when it publishes the events
//! of the call's command. Answers, orders and trades stay.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::market::{Market, now_us};
use crate::projection::repo;

/// Pause between two sweeps, and between two transactions of one.
const INTERVAL: Duration = Duration::from_secs(3_600);
const PAUSE: Duration = Duration::from_millis(20);
/// Rows per transaction.
const ROWS_MAX: i64 = 1_000;
const US_PER_DAY: i64 = 86_400_000_000;

/// Sweeps at the start and every hour, until shutdown. A failed sweep is logged and repeated.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let days = market.config.request_retention_days;
    if days == 0 {
        return shutdown.cancelled().await;
    }
    loop {
        let before_us = now_us() - i64::from(days) * US_PER_DAY;
        match shutdown
            .run_until_cancelled(sweep(&market, before_us))
            .await
        {
            None => return,
            Some(Ok(removed)) => events::retention::report("requests", "market.db", removed),
            Some(Err(error)) => tracing::warn!(%error, "old requests cannot be removed"),
        }
        let pause = tokio::time::sleep(INTERVAL);
        if shutdown.run_until_cancelled(pause).await.is_none() {
            return;
        }
    }
}

async fn sweep(market: &Market, before_us: i64) -> Result<u64, Error> {
    let mut removed = 0;
    loop {
        let now = repo::forget_requests(&market.projection.db, before_us, ROWS_MAX).await?;
        removed += now;
        if now < ROWS_MAX.unsigned_abs() {
            return Ok(removed);
        }
        tokio::time::sleep(PAUSE).await;
    }
}
