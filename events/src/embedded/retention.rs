//! Removes the oldest records, if the operator sets how many stay.
//!
//! A record is removed only after every group that has ever read its topic has consumed it, also
//! one that no longer runs. A topic without a group keeps all its records. A group that is new
//! begins at the oldest record that is left. Each transaction removes at most [`ROWS_MAX`] rows.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Embedded;
use crate::Error;

/// Fewest records that stay: the log recognizes repeats by the last ones.
pub const RETAIN_MIN: u64 = 200_000;
/// Rows per transaction, of up to 128 records each.
const ROWS_MAX: i64 = 200;
/// Pause between two sweeps, and between two transactions of one.
const INTERVAL: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

impl Embedded {
    /// Keeps about the last `records`, at least [`RETAIN_MIN`], until cancelled. A failed sweep is
    /// logged and repeated.
    pub async fn retain(self, records: u64, until: CancellationToken) {
        let records = records.max(RETAIN_MIN);
        loop {
            // Before the first sweep the groups of this process begin to read.
            let pause = tokio::time::sleep(INTERVAL);
            if until.run_until_cancelled(pause).await.is_none() {
                return;
            }
            let swept = until
                .run_until_cancelled(self.remove_all_but(records))
                .await;
            match swept {
                None => return,
                Some(Ok(0)) => {}
                Some(Ok(rows)) => tracing::info!(rows, "old rows of the event log removed"),
                Some(Err(error)) => {
                    tracing::warn!(%error, "old rows of the event log cannot be removed");
                }
            }
        }
    }

    /// Removes the rows that are consumed and before the last `records`, at least one: positions
    /// continue after the last row. Returns how many.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn remove_all_but(&self, records: u64) -> Result<u64, Error> {
        let end: Option<i64> =
            sqlx::query_scalar("SELECT position + count FROM log ORDER BY position DESC LIMIT 1")
                .fetch_optional(self.0.log.read())
                .await?;
        let retain = i64::try_from(records.max(1)).unwrap_or(i64::MAX);
        let keep_from = end.unwrap_or(0).saturating_sub(retain);
        // One row per group and topic.
        let consumed: Vec<(String, i64)> =
            sqlx::query_as("SELECT topic, MIN(position) FROM offsets GROUP BY topic")
                .fetch_all(self.0.offsets.read())
                .await?;
        let mut removed = 0;
        for (topic, consumed) in consumed {
            let end = keep_from.min(consumed);
            loop {
                let now = self.remove_before(&topic, end).await?;
                removed += now;
                if now < ROWS_MAX.unsigned_abs() {
                    break;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(removed)
    }

    /// Removes rows of a topic whose records are all before `end`.
    async fn remove_before(&self, topic: &str, end: i64) -> Result<u64, Error> {
        // In turn with publishers, as every write of the log.
        let _recent = self.0.recent.lock().await;
        let mut tx = self.0.log.write().await?;
        let done = sqlx::query(
            "DELETE FROM log WHERE position IN (SELECT position FROM log INDEXED BY log_by_topic \
             WHERE topic = $1 AND position < $2 AND position + count <= $2 \
             ORDER BY position LIMIT $3)",
        )
        .bind(topic)
        .bind(end)
        .bind(ROWS_MAX)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(done.rows_affected())
    }
}
