//! Outbox: events of a transaction, in its own database, relayed to the log in commit order (R248, D26).
//!
//! Why nothing is skipped on SQLite: positions are given by the single writer, so they become visible in order; on PostgreSQL see
//! [`crate::postgres::outbox`]. Why nothing is lost: rows are deleted only after the log has made them durable. A crash between the two
//! publishes the same ids again; consumers drop them. A relay never has two batches under way, so the order of each key is that of the commits.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sqlx::{FromRow, SqliteConnection};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Error, Event, Log, Sqlite, consumer,
    many::{self, Many, Script, Shared},
};

/// Rows handed to the log at once: what a batch of the ledger leaves is moved in a few steps, each with one durable write.
pub(crate) const BATCH: i64 = 2_048;
/// After a step the relay lets commits gather, so that a stream of small ones shares its durable writes, in milliseconds.
const PACE_MS: u64 = 2;
/// The relay is woken by commits; this is how long it sleeps at most, for rows written by another process, in milliseconds.
const POLL_MS: u64 = 1_000;
/// How long it sleeps while rows are there that may go out in a moment, in milliseconds.
const SOON_MS: u64 = 20;

static APPEND: Many = Many::new(
    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, subject, source, correlation_id, occurred_at_us) \
     SELECT * FROM (VALUES ",
    9,
    ") LIMIT +?",
);

/// Writes events next to the change that caused them. They keep the order of the slice. Many rows go in one statement, since a batch of
/// the ledger has thousands.
///
/// # Errors
/// [`Error::Store`]; an id that is in the outbox already is an error too.
pub async fn append_in_tx(tx: &mut SqliteConnection, events: &[Event]) -> Result<(), Error> {
    let mut script = Script::default();
    append_to(&mut script, tx, events).await?;
    Ok(script.run(tx).await?)
}

/// As [`append_in_tx`], together with what waits in the script.
///
/// # Errors
/// As [`append_in_tx`].
pub async fn append_to(
    script: &mut Script,
    tx: &mut SqliteConnection,
    events: &[Event],
) -> Result<(), Error> {
    let mut shared = Shared::default();
    script
        .add(tx, &APPEND, events, |event, row| {
            row.put(many::uuid_text(&event.id));
            row.put(shared.text(0, &event.topic));
            row.put(shared.text(1, &event.key));
            row.put(shared.text(2, &event.type_name));
            row.put(event.payload.clone());
            row.put(shared.text(1, &event.subject));
            row.put(shared.text(3, &event.source));
            row.put(shared.text(4, &event.correlation_id));
            row.put(event.occurred_at_us);
        })
        .await?;
    Ok(())
}

/// Rows still to be relayed, for health and metrics.
///
/// # Errors
/// [`Error::Store`].
pub async fn backlog(db: &impl Queue) -> Result<i64, Error> {
    db.backlog().await
}

/// What one batch of a relay came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    pub rows: usize,
    /// More may go out at once or in a moment: a full batch, rows of transactions still under way, another relay at work.
    pub more_soon: bool,
}

/// A database with an outbox.
#[async_trait]
pub trait Queue: Clone + Send + Sync + 'static {
    /// Rows still to be relayed.
    async fn backlog(&self) -> Result<i64, Error>;

    /// Publishes the oldest rows and deletes them once the log has them.
    async fn move_batch(&self, log: &dyn Log) -> Result<Moved, Error>;

    /// Woken after commits of this process; at least once for each commit made after the last wake.
    async fn committed(&self);

    /// For people.
    fn name(&self) -> String;
}

#[derive(FromRow)]
pub(crate) struct Row {
    pub position: i64,
    id: String,
    aggregatetype: String,
    aggregateid: String,
    r#type: String,
    payload: Vec<u8>,
    subject: String,
    source: String,
    correlation_id: String,
    occurred_at_us: i64,
}

impl Row {
    pub fn into_event(self) -> Result<Event, Error> {
        let id = Uuid::parse_str(&self.id).map_err(|error| Error::Malformed {
            position: format!("outbox {}", self.position),
            reason: error.to_string(),
        })?;
        Ok(Event {
            id,
            topic: self.aggregatetype,
            key: self.aggregateid,
            type_name: self.r#type,
            subject: self.subject,
            source: self.source,
            correlation_id: self.correlation_id,
            occurred_at_us: self.occurred_at_us,
            payload: self.payload,
        })
    }
}

/// Moves outbox rows to the log.
pub struct Relay;

impl Relay {
    /// Runs until `shutdown`. Failures are logged and retried with backoff, nothing is skipped.
    pub async fn run(db: impl Queue, log: Arc<dyn Log>, shutdown: CancellationToken) {
        let policy = consumer::RetryPolicy::default();
        let mut failures = 0;
        loop {
            let moved = tokio::select! {
                biased;
                // A log that is away may keep a batch waiting for ever; the rows stay and go out after the next start.
                () = shutdown.cancelled() => break,
                moved = db.move_batch(&*log) => moved,
            };
            let pause = match moved {
                Ok(moved) => {
                    failures = 0;
                    metrics::counter!("outbox_relayed_total").increment(moved.rows as u64);
                    match (moved.more_soon, moved.rows) {
                        (true, 1..) => continue,
                        (true, 0) => Duration::from_millis(SOON_MS),
                        (false, 0) => Duration::from_millis(POLL_MS),
                        (false, 1..) => {
                            tokio::time::sleep(Duration::from_millis(PACE_MS)).await;
                            Duration::from_millis(POLL_MS)
                        }
                    }
                }
                Err(error) => {
                    failures += 1;
                    tracing::warn!(error = %error, failures, store = db.name(), "outbox relay failed");
                    metrics::counter!("outbox_relay_failures_total").increment(1);
                    policy.delay(failures)
                }
            };
            let woken = async {
                if failures == 0 {
                    db.committed().await;
                } else {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = woken => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        // What was committed before the shutdown still goes out, if the log takes it in time.
        let flush = async { while Self::step(&db, &*log).await.is_ok_and(|moved| moved > 0) {} };
        let _ = tokio::time::timeout(Duration::from_millis(POLL_MS), flush).await;
    }

    /// Publishes the oldest batch and deletes it; returns how many rows it moved.
    ///
    /// # Errors
    /// [`Error`] of the store or of the log; the batch then stays.
    pub async fn step(db: &impl Queue, log: &dyn Log) -> Result<usize, Error> {
        Ok(db.move_batch(log).await?.rows)
    }
}

#[async_trait]
impl Queue for Sqlite {
    async fn backlog(&self) -> Result<i64, Error> {
        Ok(sqlx::query_scalar("SELECT COUNT(*) FROM outbox")
            .fetch_one(self.read())
            .await?)
    }

    async fn move_batch(&self, log: &dyn Log) -> Result<Moved, Error> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM outbox ORDER BY position LIMIT $1")
            .bind(BATCH)
            .fetch_all(self.read())
            .await?;
        let Some(last) = rows.last().map(|row| row.position) else {
            return Ok(Moved {
                rows: 0,
                more_soon: false,
            });
        };
        let events = rows
            .into_iter()
            .map(Row::into_event)
            .collect::<Result<Vec<_>, _>>()?;
        log.publish(&events).await?;
        // Rows that a power loss brings back are published again under their ids, which everybody bears.
        self.execute_lazily("DELETE FROM outbox WHERE position <= $1", last)
            .await?;
        Ok(Moved {
            rows: events.len(),
            more_soon: events.len() == BATCH as usize,
        })
    }

    async fn committed(&self) {
        Sqlite::committed(self).await;
    }

    fn name(&self) -> String {
        self.path().display().to_string()
    }
}
