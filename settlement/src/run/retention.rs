//! Removes batches that have been final for longer than their retention. No later step reads them:
//! the ledger has the position, the chain service the batch. Cases, differences and bust trades
//! stay.

use std::sync::Arc;
use std::time::Duration;

use super::{Halt, Shared, now_us};
use crate::repo::StoreError;

/// Pause between two sweeps.
const INTERVAL: Duration = Duration::from_secs(3_600);
/// Pause between two transactions of a sweep.
const PAUSE: Duration = Duration::from_millis(20);
/// Batches per transaction.
const BATCHES_MAX: i64 = 500;
const US_PER_DAY: i64 = 86_400_000_000;

/// Sweeps at the start and every hour, until shutdown. A failed sweep is logged and repeated.
///
/// # Errors
/// [`Halt::Stopped`].
pub(super) async fn run(shared: Arc<Shared>) -> Result<(), Halt> {
    loop {
        let days = shared.config.final_retention_days;
        if days > 0 {
            let before_us = now_us() - i64::from(days) * US_PER_DAY;
            match shared.unless_stopped(sweep(&shared, before_us)).await? {
                Ok(removed) => events::retention::report("batches", "settlement.db", removed),
                Err(error) => tracing::warn!(%error, "final batches cannot be removed"),
            }
        }
        let pause = tokio::time::sleep(INTERVAL);
        shared.unless_stopped(pause).await?;
    }
}

async fn sweep(shared: &Shared, before_us: i64) -> Result<u64, StoreError> {
    let mut removed = 0;
    loop {
        let now = shared.repo.remove_final(before_us, BATCHES_MAX).await?;
        removed += now;
        if now < BATCHES_MAX.unsigned_abs() {
            return Ok(removed);
        }
        tokio::time::sleep(PAUSE).await;
    }
}
