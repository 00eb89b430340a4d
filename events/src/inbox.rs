//! Inbox: ids of the events a consumer has handled, in the database and transaction of the effect
//! (D26).
//!
//! The key is the event id, not its offset, so an event republished after a relay's crash is
//! detected too. An id is removed a day after the log has no record any more that was appended
//! before the id was accepted ([`Log::delivers_since`]).

use std::{collections::HashSet, sync::Arc, time::Duration};

use async_recursion::async_recursion as boxed;
use sqlx::SqliteConnection;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{Error, Log, outbox::Queue, retention};

/// Binds consumer, event id and time in microseconds.
pub(crate) const ACCEPT: &str = "INSERT INTO inbox (consumer, event_id, accepted_at_us) \
                                 VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";

pub(crate) const NEXT_CONSUMER: &str = "SELECT MIN(consumer) FROM inbox WHERE consumer > $1";
/// Binds consumer, two texts around the ids, number of ids.
pub(crate) const PAGE: &str = "SELECT event_id, accepted_at_us FROM inbox \
     WHERE consumer = $1 AND event_id > $2 AND event_id < $3 ORDER BY event_id LIMIT $4";
/// Binds consumer, the text before the first id, the last id, time in microseconds.
pub(crate) const FORGET: &str = "DELETE FROM inbox \
     WHERE consumer = $1 AND event_id > $2 AND event_id <= $3 AND accepted_at_us < $4";
/// Ids read at once, and at most deleted in one transaction.
pub(crate) const PAGE_IDS: i64 = 1_000;

/// Pause between two sweeps, and between two pages of one.
const INTERVAL: Duration = Duration::from_secs(3_600);
const PAUSE: Duration = Duration::from_millis(20);
/// Time for which an id outlives the records of its time: covers clocks that differ, and rows of an
/// outbox that are published again after a crash.
const MARGIN_US: i64 = 24 * 3_600 * 1_000_000;
/// Follows every id in the order of texts.
const LAST: &str = "g";

/// Records the event in the caller's transaction. `false` = seen before: do nothing and commit or
/// drop the transaction.
///
/// `consumer` names the handler, not the process: `ledger.chain-receipts`.
///
/// # Errors
/// [`Error::Store`].
#[boxed]
pub async fn accept_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_id: Uuid,
) -> Result<bool, Error> {
    let accepted = accept_many_in_tx(tx, consumer, &[event_id]).await?;
    Ok(accepted == [true])
}

/// As [`accept_in_tx`], for several events: whether each is new. Of duplicates in the slice only
/// the first counts.
///
/// # Errors
/// [`Error::Store`].
#[boxed]
pub async fn accept_many_in_tx(
    tx: &mut SqliteConnection,
    consumer: &str,
    event_ids: &[Uuid],
) -> Result<Vec<bool>, Error> {
    let texts: Vec<String> = event_ids.iter().map(Uuid::to_string).collect();
    let accepted: Vec<String> = sqlx::query_scalar(
        "INSERT INTO inbox (consumer, event_id, accepted_at_us) SELECT $1, value, $3 FROM json_each($2) WHERE TRUE \
         ON CONFLICT DO NOTHING RETURNING event_id",
    )
    .bind(consumer)
    .bind(serde_json::json!(texts).to_string())
    .bind(service_kit::clock::now_us())
    .fetch_all(tx)
    .await?;
    Ok(flag_first_occurrences(
        event_ids,
        accepted.into_iter().collect(),
    ))
}

/// Removes ids that no record of the log can need any more, every hour until `shutdown`. A failed
/// sweep is logged and repeated.
pub async fn retain(db: impl Queue, log: Arc<dyn Log>, shutdown: CancellationToken) {
    loop {
        let pause = tokio::time::sleep(INTERVAL);
        if shutdown.run_until_cancelled(pause).await.is_none() {
            return;
        }
        match shutdown.run_until_cancelled(sweep(&db, &*log)).await {
            None => return,
            Some(Ok(removed)) => retention::report("inbox", &db.name(), removed),
            Some(Err(error)) => {
                tracing::warn!(%error, store = db.name(), "old ids of the inbox cannot be removed");
            }
        }
    }
}

/// Removes the ids that no record of the log can need any more; returns how many.
///
/// # Errors
/// [`Error`] of the database or of the log.
pub async fn sweep(db: &impl Queue, log: &dyn Log) -> Result<u64, Error> {
    match log.delivers_since().await? {
        Some(since_us) => remove_before(db, since_us.saturating_sub(MARGIN_US)).await,
        None => Ok(0),
    }
}

/// Removes the ids that were accepted before `before_us`.
///
/// There is no index on the time: it would be as large as the table. Ids with a time (UUID versions
/// 7 and 8) are in its order, so those made since `before_us` and not in the future are skipped.
/// Ids without a time are one per chain transaction, not per trade, and are all read.
async fn remove_before(db: &impl Queue, before_us: i64) -> Result<u64, Error> {
    let tomorrow_us = service_kit::clock::now_us().saturating_add(MARGIN_US);
    let (first_kept, last_kept) = (id_prefix(before_us), id_prefix(tomorrow_us));
    let mut removed = 0;
    let mut last = String::new();
    while let Some(consumer) = db.next_consumer(&last).await? {
        for (after, until) in [("", first_kept.as_str()), (last_kept.as_str(), LAST)] {
            removed += remove_between(db, &consumer, after, until, before_us).await?;
        }
        last = consumer;
    }
    Ok(removed)
}

/// As [`remove_before`], of a consumer's ids strictly between two texts.
async fn remove_between(
    db: &impl Queue,
    consumer: &str,
    after: &str,
    until: &str,
    before_us: i64,
) -> Result<u64, Error> {
    let mut removed = 0;
    let mut after = after.to_owned();
    loop {
        let page = db.inbox_page(consumer, &after, until).await?;
        let Some((last, _)) = page.last() else {
            return Ok(removed);
        };
        if page.iter().any(|(_, accepted_us)| *accepted_us < before_us) {
            removed += db.forget(consumer, &after, last, before_us).await?;
        }
        after.clone_from(last);
        tokio::time::sleep(PAUSE).await;
    }
}

/// Beginning of the ids that are made at this time: the 48 bits of milliseconds of UUID version 7.
fn id_prefix(at_us: i64) -> String {
    let milliseconds = (at_us / 1_000).max(0);
    format!("{:08x}-{:04x}", milliseconds >> 16, milliseconds & 0xffff)
}

/// Whether each event is in `new` and its first occurrence.
pub(crate) fn flag_first_occurrences(event_ids: &[Uuid], mut new: HashSet<String>) -> Vec<bool> {
    event_ids
        .iter()
        .map(|event_id| new.remove(&event_id.to_string()))
        .collect()
}

#[cfg(test)]
mod tests {
    use sqlx::{AssertSqlSafe, Connection, Row};

    use super::*;

    #[tokio::test]
    async fn a_sweep_reads_ids_by_key() {
        let mut db = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(crate::migrations::SQL)
            .execute(&mut db)
            .await
            .unwrap();
        for statement in [NEXT_CONSUMER, PAGE, FORGET] {
            let explain = format!("EXPLAIN QUERY PLAN {statement}");
            let plan = sqlx::query(AssertSqlSafe(explain)).fetch_all(&mut db);
            let lines: Vec<String> = plan.await.unwrap().iter().map(|row| row.get(3)).collect();
            assert_eq!(lines.len(), 1, "{statement}: {lines:?}");
            assert!(
                lines[0].starts_with("SEARCH inbox USING PRIMARY KEY (consumer"),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn ids_of_a_time_begin_with_its_milliseconds() {
        let at_us = 0x019a_2215_12c7_i64 * 1_000 + 999;
        assert_eq!(id_prefix(at_us), "019a2215-12c7");
        assert_eq!(id_prefix(-1), "00000000-0000");
    }
}
