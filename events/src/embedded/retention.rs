//! Removes the oldest records: those beyond an age, and those beyond a number.
//!
//! A record is removed only after every group that has ever read its topic has consumed it, also
//! one that no longer runs, and if at least [`RETAIN_MIN`] records follow it. A topic without a
//! group and a dead-letter topic keep all their records. A group that is new begins at the oldest
//! record that is left. Each transaction removes at most [`ROWS_MAX`] rows.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{Embedded, source};
use crate::{Error, pack, retention, topics};

/// Fewest records that stay: the log recognizes repeats by the last ones.
pub const RETAIN_MIN: u64 = 200_000;
/// Rows per transaction, of up to 128 records each.
const ROWS_MAX: i64 = 200;
/// Rows read at once to find their age.
const AGED_ROWS_MAX: i64 = 50;
/// Pause between two sweeps, and between two transactions of one.
const INTERVAL: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// Which records stay. `None`: all, as far as this rule is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of records, at least [`RETAIN_MIN`].
    pub records: Option<u64>,
    /// Age of a record.
    pub age: Option<Duration>,
}

impl Embedded {
    /// Removes the records that no rule keeps, until cancelled. A failed sweep is logged and
    /// repeated.
    pub async fn retain(self, rules: Retention, until: CancellationToken) {
        loop {
            // Before the first sweep the groups of this process begin to read.
            let pause = tokio::time::sleep(INTERVAL);
            if until.run_until_cancelled(pause).await.is_none() {
                return;
            }
            match until.run_until_cancelled(self.sweep(rules)).await {
                None => return,
                Some(Ok(rows)) => retention::report("events", "log.db", rows),
                Some(Err(error)) => {
                    tracing::warn!(%error, "old rows of the event log cannot be removed");
                }
            }
        }
    }

    async fn sweep(&self, rules: Retention) -> Result<u64, Error> {
        let mut removed = 0;
        if let Some(age) = rules.age {
            let age_us = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
            let before_us = service_kit::clock::now_us().saturating_sub(age_us);
            removed += self.remove_older(before_us, RETAIN_MIN).await?;
        }
        if let Some(records) = rules.records {
            removed += self.remove_all_but(records.max(RETAIN_MIN)).await?;
        }
        Ok(removed)
    }

    /// Removes the rows that are consumed and before the last `records`, at least one: positions
    /// continue after the last row. Returns how many.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn remove_all_but(&self, records: u64) -> Result<u64, Error> {
        let mut removed = 0;
        for (topic, end) in self.removable(records).await? {
            removed += self.remove_before(&topic, end).await?;
        }
        Ok(removed)
    }

    /// As [`Self::remove_all_but`], only rows whose first record occurred before `before_us`, and
    /// only up to the first row of their topic that did not.
    ///
    /// # Errors
    /// [`Error::Store`]; [`Error::Malformed`]: a row is damaged.
    pub async fn remove_older(&self, before_us: i64, records: u64) -> Result<u64, Error> {
        let mut removed = 0;
        for (topic, end) in self.removable(records).await? {
            // Mostly not even the oldest row is due.
            let mut rows_max = 1;
            while let Some(through) = self.aged(&topic, end, before_us, rows_max).await? {
                removed += self.remove_before(&topic, through).await?;
                tokio::time::sleep(PAUSE).await;
                rows_max = AGED_ROWS_MAX;
            }
        }
        Ok(removed)
    }

    /// Each topic with a group, except those of dead letters, and the position before which all
    /// groups have consumed its records and the last `records` of the log do not begin.
    async fn removable(&self, records: u64) -> Result<Vec<(String, i64)>, Error> {
        let end: Option<i64> =
            sqlx::query_scalar("SELECT position + count FROM log ORDER BY position DESC LIMIT 1")
                .fetch_optional(self.0.log.read())
                .await?;
        let retain = i64::try_from(records.max(1)).unwrap_or(i64::MAX);
        let keep_from = end.unwrap_or(0).saturating_sub(retain);
        // One row per group and topic.
        let mut consumed: Vec<(String, i64)> =
            sqlx::query_as("SELECT topic, MIN(position) FROM offsets GROUP BY topic")
                .fetch_all(self.0.offsets.read())
                .await?;
        // A replay for one group also passes the letters of the others.
        consumed.retain(|(topic, _)| !topics::is_dlq(topic));
        for (_, end) in &mut consumed {
            *end = keep_from.min(*end);
        }
        Ok(consumed)
    }

    /// End of the oldest rows of a topic whose first records occurred before `before_us`, at most
    /// `rows_max` rows and not beyond `end`; `None`: no row.
    async fn aged(
        &self,
        topic: &str,
        end: i64,
        before_us: i64,
        rows_max: i64,
    ) -> Result<Option<i64>, Error> {
        let rows: Vec<(i64, i64, Vec<u8>)> = sqlx::query_as(
            "SELECT position, count, records FROM log INDEXED BY log_by_topic \
             WHERE topic = $1 AND position < $2 AND position + count <= $2 \
             ORDER BY position LIMIT $3",
        )
        .bind(topic)
        .bind(end)
        .bind(rows_max)
        .fetch_all(self.0.log.read())
        .await?;
        let mut aged = None;
        for (position, count, records) in rows {
            if first_occurred_at_us(topic, position, &records)? >= before_us {
                break;
            }
            aged = Some(position + count);
        }
        Ok(aged)
    }

    /// As [`crate::Log::delivers_since`]: the time of the oldest record of the topics that groups
    /// read. Every record was appended after it occurred, and after the records before it.
    pub(super) async fn oldest_us(&self) -> Result<Option<i64>, Error> {
        let consumed: Vec<String> = sqlx::query_scalar("SELECT DISTINCT topic FROM offsets")
            .fetch_all(self.0.offsets.read())
            .await?;
        let mut oldest_us = None;
        // A dead letter is a record that its group has not handled.
        for topic in consumed.iter().filter(|topic| !topics::is_dlq(topic)) {
            let first: Option<(i64, Vec<u8>)> = sqlx::query_as(
                "SELECT position, records FROM log INDEXED BY log_by_topic WHERE topic = $1 \
                 ORDER BY position LIMIT 1",
            )
            .bind(topic)
            .fetch_optional(self.0.log.read())
            .await?;
            if let Some((position, records)) = first {
                let first_us = first_occurred_at_us(topic, position, &records)?;
                oldest_us = Some(oldest_us.map_or(first_us, |oldest: i64| oldest.min(first_us)));
            }
        }
        Ok(oldest_us)
    }

    /// Removes rows of a topic whose records are all before `end`; returns how many.
    async fn remove_before(&self, topic: &str, end: i64) -> Result<u64, Error> {
        let mut removed = 0;
        loop {
            let now = self.remove_page(topic, end).await?;
            removed += now;
            if now < ROWS_MAX.unsigned_abs() {
                return Ok(removed);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn remove_page(&self, topic: &str, end: i64) -> Result<u64, Error> {
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

fn first_occurred_at_us(topic: &str, position: i64, records: &[u8]) -> Result<i64, Error> {
    pack::first_occurred_at_us(records)
        .map_err(|reason| source::malformed(&format!("{topic}/0@{position}"), reason))
}
