//! Outbox: events of a transaction, in its own database, relayed to the log in commit order (R248, D26).
//!
//! Why nothing is skipped on SQLite ([`crate::sqlite::outbox`]): positions are given by the single
//! writer, so they become visible in order; on PostgreSQL see [`crate::postgres::outbox`]. Why
//! nothing is lost: rows are deleted only after the log has made them durable. A crash between the
//! two publishes the same ids again; consumers drop them. A relay never has two batches under way,
//! so the order of each key is that of the commits.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

pub use crate::sqlite::outbox::append_in_tx;
use crate::{Error, Log, consumer};

/// After a step the relay lets commits gather, so that a stream of small ones shares its durable
/// writes, in milliseconds.
const PACE_MS: u64 = 2;
/// The same where several commits went out together: nobody waited for the first of them to make
/// the next, and each durable write and each waking of a reader costs a lone writer's next commit
/// more than one of its own steps. The bound of what an event waits here.
const STREAM_PACE_MS: u64 = 8;
/// The relay is woken by commits; this is how long it sleeps at most, for rows written by another
/// process, in milliseconds.
const POLL_MS: u64 = 1_000;
/// How long it sleeps while rows are there that may go out in a moment, or that are out and wait to
/// be deleted, in milliseconds.
const SOON_MS: u64 = 20;

/// Events still to be relayed, for health and metrics.
///
/// # Errors
/// [`Error::Store`].
pub async fn backlog(db: &impl Queue) -> Result<i64, Error> {
    db.backlog().await
}

/// What one batch of a relay came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    pub events: usize,
    /// More may go out at once or in a moment: a full batch, rows of transactions still under way,
    /// another relay at work.
    pub more_soon: bool,
    /// They were of several commits, as far as the store tells.
    pub is_stream: bool,
}

/// A database with an outbox.
#[async_trait]
pub trait Queue: Clone + Send + Sync + 'static {
    /// Events still to be relayed.
    async fn backlog(&self) -> Result<i64, Error>;

    /// Publishes the oldest rows; they are deleted once the log has them, at the latest by a call that finds none.
    async fn move_batch(&self, log: &dyn Log) -> Result<Moved, Error>;

    /// Woken after commits of this process; at least once for each commit made after the last wake.
    async fn committed(&self);

    /// For people.
    fn name(&self) -> String;
}

/// Moves outbox rows to the log.
pub struct Relay;

impl Relay {
    /// Runs until `shutdown`. Failures are logged and retried with backoff, nothing is skipped.
    pub async fn run(db: impl Queue, log: Arc<dyn Log>, shutdown: CancellationToken) {
        let policy = consumer::RetryPolicy::default().while_away();
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
                    metrics::counter!("outbox_relayed_total").increment(moved.events as u64);
                    match (moved.more_soon, moved.events) {
                        (true, 1..) => continue,
                        (true, 0) => Duration::from_millis(SOON_MS),
                        (false, 0) => Duration::from_millis(POLL_MS),
                        (false, 1..) => {
                            let pace = if moved.is_stream {
                                STREAM_PACE_MS
                            } else {
                                PACE_MS
                            };
                            tokio::time::sleep(Duration::from_millis(pace)).await;
                            Duration::from_millis(SOON_MS)
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

    /// Publishes the oldest batch, or deletes what was published when there is none; returns how
    /// many events it moved. On PostgreSQL another relay is let in by a step that moves none.
    ///
    /// # Errors
    /// [`Error`] of the store or of the log; the batch then stays.
    pub async fn step(db: &impl Queue, log: &dyn Log) -> Result<usize, Error> {
        Ok(db.move_batch(log).await?.events)
    }
}
