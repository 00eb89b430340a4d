//! Publishes market events to their topic. The journal is the outbox (`design.md` 4).
//!
//! The feed follows the replica from its own position. It converts each record to events and
//! publishes them in journal order. Delivery is at least once: the position is saved up to a second
//! or 16,384 events after the events are published, and republished events keep their ids. While
//! the log is unavailable the feed waits, and the health read names it. The journal is retained
//! from the saved position ([`Durable`]).

mod publish;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use events::{Event, Log, outbox::Relay};
use replica::{Batch, Follower, Names, Replica};
use rpc::Health;
use sequencer::Durable;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use types::{Id128, NodeId, Sequence};

use crate::Error;
use crate::projection::repo::{self, Store};
use crate::retry::Retry;
use publish::Publisher;

/// Name in the health read.
pub const PART: &str = "feed";
/// Number of records after which no more batches are gathered.
const BATCH_RECORDS: usize = 4_096;
/// How long the first batch waits for more.
const PACE: Duration = Duration::from_millis(2);
/// How long the log may take for a batch before the health read fails.
const SLOW: Duration = Duration::from_secs(5);
/// Longest time between publishing and saving the position. A crash republishes the events of that
/// time.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Number of unsaved events after which the position is saved. The embedded log recognizes repeats
/// of four times as many.
const UNSAVED_MAX: usize = 16_384;
/// How long a shutdown waits for the log to accept events.
const FLUSH: Duration = Duration::from_secs(1);

/// Publishes the replica's effects as market events.
pub struct Feed {
    db: Store,
    node: NodeId,
    log: Arc<dyn Log>,
    durable: Durable,
    /// Last record whose events are published.
    published: Sequence,
    /// The stored position.
    saved: Sequence,
    /// Events since the last save.
    unsaved: usize,
    /// When `published` must be saved.
    save_at: Option<Instant>,
}

impl Feed {
    /// Starts at the stored position and reports it to `durable`.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn open(
        db: Store,
        node: NodeId,
        log: Arc<dyn Log>,
        durable: Durable,
    ) -> Result<Self, Error> {
        let position = repo::feed_position(&db).await?;
        durable.set(position);
        Ok(Self {
            db,
            node,
            log,
            durable,
            published: position,
            saved: position,
            unsaved: 0,
            save_at: None,
        })
    }

    /// Publishes until shutdown, from the stored position on.
    ///
    /// # Errors
    /// The replica has ended, or the log refuses an event for good.
    pub async fn run(
        mut self,
        replica: Replica,
        health: Health,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let ended = self.follow(&replica, &health, &shutdown).await;
        // Saved after an error too, so that fewer events are republished.
        self.save().await;
        ended
    }

    async fn follow(
        &mut self,
        replica: &Replica,
        health: &Health,
        shutdown: &CancellationToken,
    ) -> Result<(), Error> {
        self.drain_outbox(health, shutdown).await?;
        let mut follower = replica.follow_detached(PART, self.published);
        let names = replica.names().clone();
        loop {
            let first = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                () = wait_until(self.save_at) => None,
                batch = follower.next() => Some(batch?),
            };
            let Some(first) = first else {
                self.save().await;
                continue;
            };
            let batches = gather(first, &mut follower).await;
            // While the feed waits it must not occupy one of the replica's places for catching up.
            let on_wait = || follower.release_permit();
            let publishing = self.publish_with_retry(&names, &batches, health, shutdown, on_wait);
            publishing.await?;
            let is_due = self.save_at.is_some_and(|at| at <= Instant::now());
            if is_due || self.unsaved >= UNSAVED_MAX {
                self.save().await;
            }
            let lag = replica
                .position()
                .get()
                .saturating_sub(self.published.get());
            metrics::gauge!("market_feed_lag_records").set(lag as f64);
        }
        // Publishes the records that are already durable, if the log accepts them in time.
        let deadline = Instant::now() + FLUSH;
        while let Some(first) = follower.try_next() {
            match timeout_at(deadline, self.publish(&names, &[first])).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => break,
            }
        }
        Ok(())
    }

    /// Publishes the batches. Retries while the log is unavailable. Calls `on_wait` if an attempt
    /// takes longer than [`SLOW`] or fails.
    async fn publish_with_retry(
        &mut self,
        names: &Names,
        batches: &[Batch],
        health: &Health,
        shutdown: &CancellationToken,
        mut on_wait: impl FnMut(),
    ) -> Result<(), Error> {
        let mut retry = Retry::new(PART, health, shutdown);
        loop {
            // A slow attempt is not cancelled: its repeat would publish twice.
            let mut publishing = pin!(self.publish(names, batches));
            let published = tokio::select! {
                biased;
                published = &mut publishing => published,
                () = sleep(SLOW) => {
                    health.set_failing(PART, "the log accepts no events");
                    on_wait();
                    let published = tokio::select! {
                        biased;
                        published = &mut publishing => published,
                        () = shutdown.cancelled() => timeout(FLUSH, &mut publishing)
                            .await
                            .unwrap_or(Err(events::Error::Closed.into())),
                    };
                    health.set_ok(PART);
                    published
                }
                () = shutdown.cancelled() => timeout(FLUSH, &mut publishing)
                    .await
                    .unwrap_or(Err(events::Error::Closed.into())),
            };
            match published {
                Ok(()) => return Ok(()),
                Err(error) => {
                    on_wait();
                    retry.wait(error).await?;
                }
            }
        }
    }

    /// Publishes the events that an older version left in its outbox. They precede the position.
    async fn drain_outbox(
        &self,
        health: &Health,
        shutdown: &CancellationToken,
    ) -> Result<(), Error> {
        loop {
            let mut retry = Retry::new(PART, health, shutdown);
            let step = tokio::select! {
                biased;
                // The next start publishes the rest.
                () = shutdown.cancelled() => return Ok(()),
                step = Relay::step(&self.db.file, &*self.log) => step,
            };
            match step {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => retry.wait(error.into()).await?,
            }
        }
    }

    async fn publish(&mut self, names: &Names, batches: &[Batch]) -> Result<(), Error> {
        let events = self.events(names, batches).await?;
        if !events.is_empty() {
            self.log.publish(&events).await?;
            metrics::counter!("market_events_published_total").increment(events.len() as u64);
        }
        self.published = batches.last().expect("a batch").last();
        self.unsaved += events.len();
        self.save_at
            .get_or_insert_with(|| Instant::now() + SAVE_EVERY);
        Ok(())
    }

    async fn events(&self, names: &Names, batches: &[Batch]) -> Result<Vec<Event>, Error> {
        let records = || batches.iter().flat_map(|batch| batch.iter());
        let keys = records().map(|applied| applied.cause.key_hash);
        let keys: Vec<Id128> = keys.filter(|key| !key.is_none()).collect();
        let known = match keys.as_slice() {
            [] => Default::default(),
            keys => repo::correlations(&self.db, keys).await?,
        };
        let mut events = Vec::new();
        for applied in records().filter(|applied| !applied.effects.is_empty()) {
            let cause = applied.cause;
            let own = || format!("{}:{}", self.node.get(), cause.sequence);
            let correlation_id = known.get(&cause.key_hash).cloned().unwrap_or_else(own);
            let mut publisher = Publisher::new(self.node, names, cause, &correlation_id);
            let effects = applied.effects.iter();
            events.extend(effects.filter_map(|effect| publisher.event(effect)));
        }
        Ok(events)
    }

    /// Saves the position. On failure it is retried after [`SAVE_EVERY`].
    async fn save(&mut self) {
        self.save_at = None;
        if self.published == self.saved {
            return;
        }
        match repo::save_feed_position(&self.db, self.published).await {
            Ok(()) => {
                self.unsaved = 0;
                self.saved = self.published;
                self.durable.set(self.saved);
            }
            Err(error) => {
                tracing::warn!(%error, "feed position not saved: retrying");
                self.save_at = Some(Instant::now() + SAVE_EVERY);
            }
        }
    }
}

/// Returns the batch with those that follow within [`PACE`], so that small batches share the log's
/// durable writes.
async fn gather(first: Batch, follower: &mut Follower) -> Vec<Batch> {
    let deadline = Instant::now() + PACE;
    let mut records = first.len();
    let mut batches = vec![first];
    while records < BATCH_RECORDS
        && let Ok(Ok(more)) = timeout_at(deadline, follower.next()).await
    {
        records += more.len();
        batches.push(more);
    }
    batches
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
