//! Outbox: a transaction stores its events in its own database, and a relay publishes them to the
//! log in commit order (R248, D26).
//!
//! No event is skipped: on SQLite ([`crate::sqlite::outbox`]) the single writer assigns positions,
//! so they become visible in order; for PostgreSQL see [`crate::postgres::outbox`]. No event is
//! lost: rows are deleted only after they are durable in the log. After a crash between publication
//! and delete the same ids are published again, and consumers drop them. A relay has one batch in
//! flight, so the order of each key is the commit order.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

pub use crate::sqlite::outbox::append_in_tx;
use crate::{Error, Log, consumer, inbox};

/// Pause after a batch, in milliseconds: small commits in sequence share the log's durable writes.
const PACE_MS: u64 = 2;
/// Pause after a batch of several commits, in milliseconds. Their writers do not wait for the
/// relay, and each durable write of the log and each reader wake-up delays the writers' next
/// commit. Adds at most this to the latency of an event.
const STREAM_PACE_MS: u64 = 8;
/// Longest sleep of the relay, in milliseconds. Commits wake it; polling finds rows of other
/// processes.
const POLL_MS: u64 = 1_000;
/// Sleep while rows may become ready soon or published rows wait to be deleted, in milliseconds.
const SOON_MS: u64 = 20;

/// Number of events to relay, for health and metrics.
///
/// # Errors
/// [`Error::Store`].
pub async fn backlog(db: &impl Queue) -> Result<i64, Error> {
    db.backlog().await
}

/// Result of one relay batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayResult {
    pub events: usize,
    /// More events may be ready soon: a full batch, rows of open transactions, or another active
    /// relay.
    pub more_soon: bool,
    /// The batch contained several commits, as far as the store can tell.
    pub is_stream: bool,
}

/// A database with an outbox.
#[async_trait]
pub trait Queue: Clone + Send + Sync + 'static {
    /// Number of events to relay.
    async fn backlog(&self) -> Result<i64, Error>;

    /// Publishes the oldest rows. Rows that are durable in the log are deleted later, at the latest
    /// by a call that finds no rows to publish.
    async fn relay_batch(&self, log: &dyn Log) -> Result<RelayResult, Error>;

    /// Waits for a commit of this process. Returns at once if there was one since the last call.
    async fn wait_for_commit(&self);

    /// Display name, for logs.
    fn name(&self) -> String;

    /// The first consumer in the inbox after this one, in the order of texts.
    async fn next_consumer(&self, after: &str) -> Result<Option<String>, Error>;

    /// A page of a consumer's ids strictly between two texts, in order, with the times at which
    /// they were accepted.
    async fn inbox_page(
        &self,
        consumer: &str,
        after: &str,
        until: &str,
    ) -> Result<Vec<(String, i64)>, Error>;

    /// Deletes a consumer's ids after a text and up to another that were accepted before
    /// `before_us`, in one transaction. Returns how many.
    async fn forget(
        &self,
        consumer: &str,
        after: &str,
        through: &str,
        before_us: i64,
    ) -> Result<u64, Error>;
}

/// Moves outbox rows to the log.
pub struct Relay;

impl Relay {
    /// Runs until `shutdown`. Failures are logged and retried with backoff, nothing is skipped.
    /// Also removes old ids from the inbox of the same database ([`inbox::retain`]).
    pub async fn run(db: impl Queue, log: Arc<dyn Log>, shutdown: CancellationToken) {
        let retaining = inbox::retain(db.clone(), log.clone(), shutdown.clone());
        tokio::join!(Self::relay(db, log, shutdown), retaining);
    }

    async fn relay(db: impl Queue, log: Arc<dyn Log>, shutdown: CancellationToken) {
        let policy = consumer::RetryPolicy::default().for_outage();
        let mut failures = 0;
        loop {
            let relayed = tokio::select! {
                biased;
                // An unavailable log may block a batch without a limit; the next start relays the
                // rows.
                () = shutdown.cancelled() => break,
                relayed = db.relay_batch(&*log) => relayed,
            };
            let pause = match relayed {
                Ok(relayed) => {
                    failures = 0;
                    metrics::counter!("outbox_relayed_total").increment(relayed.events as u64);
                    match (relayed.more_soon, relayed.events) {
                        (true, 1..) => continue,
                        (true, 0) => Duration::from_millis(SOON_MS),
                        (false, 0) => Duration::from_millis(POLL_MS),
                        (false, 1..) => {
                            let pace = if relayed.is_stream {
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
                    db.wait_for_commit().await;
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
        // Relay commits from before the shutdown, if the log accepts them in time.
        let flush = async { while Self::step(&db, &*log).await.is_ok_and(|count| count > 0) {} };
        let _ = tokio::time::timeout(Duration::from_millis(POLL_MS), flush).await;
    }

    /// Publishes the oldest batch, or deletes published rows if there is none; returns the number
    /// of events relayed. On PostgreSQL a step that relays none releases the lock for other relays.
    ///
    /// # Errors
    /// [`Error`] of the store or of the log; the batch then remains.
    pub async fn step(db: &impl Queue, log: &dyn Log) -> Result<usize, Error> {
        Ok(db.relay_batch(log).await?.events)
    }
}
