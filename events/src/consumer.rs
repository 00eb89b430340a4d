//! Consumer runner: delivers at least once and in order, retries with backoff, then writes to the
//! dead-letter topic (D26).
//!
//! A record's position is committed only after its handler succeeded or the record is in
//! `<topic>.dlq`. Commits happen at the end of each read, every [`COMMIT_EVERY`] within a read,
//! after a failure, and before a stop. After a crash the records since the last commit are
//! redelivered; handlers must be idempotent. A failing record blocks its subscription while it is
//! retried, which keeps the order of its key. A handler is never cancelled: shutdown waits for it.
//!
//! There are three kinds of failure. A record that fails with [`Poison`] is dead-lettered at once.
//! One that fails with [`RetryLater`], or with an error of an unavailable store, is retried without
//! a limit, and [`crate::log::Waiting`] has the reason. Any other failure is dead-lettered after
//! [`RetryPolicy::attempts_max`] attempts.

use std::{error::Error as StdError, fmt, future::Future, sync::Arc, time::Duration};

use service_kit::backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{Delivery, Error, Event, Log, Position, Subscription, dlq, sqlite::direct};

/// Maximum records per read.
const READ_MAX: usize = 256;
/// Commit interval while records of a read remain.
const COMMIT_EVERY: Duration = Duration::from_millis(200);

/// Longest pause while a peer, a store or the log is unavailable: events resume within this time.
pub(crate) const AWAY_MAX_MS: u64 = 5_000;
/// Log interval per waiting record.
const WAITING_LOG_EVERY: Duration = Duration::from_secs(60);

/// Why a record was not handled. Every error is retried. Use [`Poison`] for a record that can never
/// be handled, [`RetryLater`] for one that has to wait.
pub type Failure = Box<dyn StdError + Send + Sync>;

/// Result of a handler of one record.
pub type HandlerResult = Result<(), Failure>;

/// Result of a batch handler: it handled all records, or stopped at one.
pub type BatchResult = Result<(), Stopped>;

/// The first `handled` records are handled. The next one failed, and none after it was handled.
#[derive(Debug)]
pub struct Stopped {
    pub handled: usize,
    pub error: Failure,
}

/// A record that no retry can handle: it is dead-lettered at once.
#[derive(Debug, Clone)]
pub struct Poison(pub String);

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Poison {}

/// A peer or a store is unavailable. The record is retried without a limit, and the attempts do not
/// count towards [`RetryPolicy::attempts_max`]. Never use it for a fault of the record itself: all
/// later records wait too.
#[derive(Debug, Clone)]
pub struct RetryLater(pub String);

impl fmt::Display for RetryLater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for RetryLater {}

/// The failure as [`RetryLater`], if it is one or an unavailable store caused it.
///
/// An unavailable store is, for example, one on a full disk. Its error may also be the source of
/// the handler's own error.
fn retry_later(failure: &Failure) -> Option<RetryLater> {
    if let Some(later) = failure.downcast_ref::<RetryLater>() {
        return Some(later.clone());
    }
    let is_away = |error: &(dyn StdError + 'static)| {
        error.downcast_ref().is_some_and(Error::is_away)
            || error.downcast_ref().is_some_and(crate::is_away)
            || error.downcast_ref().is_some_and(direct::is_away)
    };
    let first: &(dyn StdError + 'static) = &**failure;
    std::iter::successors(Some(first), |&error| error.source())
        .any(is_away)
        .then(|| RetryLater(failure.to_string()))
}

/// Backoff between attempts: doubling, with jitter of up to a quarter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub first_ms: u64,
    pub max_ms: u64,
    /// Attempts before the record is dead-lettered, including the first.
    pub attempts_max: u32,
}

impl Default for RetryPolicy {
    /// D26: from 1 s to 5 min; twelve attempts take about half an hour.
    fn default() -> Self {
        RetryPolicy {
            first_ms: 1_000,
            max_ms: 300_000,
            attempts_max: 12,
        }
    }
}

impl RetryPolicy {
    /// The policy for outages, which are retried without a limit: pauses of at most
    /// [`AWAY_MAX_MS`].
    pub(crate) fn for_outage(self) -> Self {
        RetryPolicy {
            max_ms: self.max_ms.min(AWAY_MAX_MS),
            ..self
        }
    }

    /// Pause after this number of failures (1 = after the first).
    pub fn delay(&self, failures: u32) -> Duration {
        let first = Duration::from_millis(self.first_ms);
        let max = Duration::from_millis(self.max_ms);
        let pause = backoff::doubled(first, failures.saturating_sub(1), max);
        pause - backoff::jitter(pause)
    }
}

/// Handles the topics one record at a time, as a member of `group`, until `shutdown`. See
/// [`consume_batches`].
///
/// # Errors
/// [`Error`] if the subscription cannot be created.
pub async fn consume<H, F>(
    log: Arc<dyn Log>,
    group: &str,
    topics: &[&str],
    handler: H,
    shutdown: CancellationToken,
) -> Result<(), Error>
where
    H: Fn(Event) -> F + Send + Sync,
    F: Future<Output = HandlerResult> + Send,
{
    let policy = RetryPolicy::default();
    consume_with(log, group, topics, handler, shutdown, policy).await
}

/// [`consume`] with another retry policy.
///
/// # Errors
/// [`Error`] if the subscription cannot be created.
pub async fn consume_with<H, F>(
    log: Arc<dyn Log>,
    group: &str,
    topics: &[&str],
    handler: H,
    shutdown: CancellationToken,
    policy: RetryPolicy,
) -> Result<(), Error>
where
    H: Fn(Event) -> F + Send + Sync,
    F: Future<Output = HandlerResult> + Send,
{
    let one = |mut events: Vec<Event>| {
        let handled = events.pop().map(&handler);
        async move {
            match handled {
                Some(handled) => handled.await.map_err(|error| Stopped { handled: 0, error }),
                None => Ok(()),
            }
        }
    };
    Runner::new(log, group, 1, one, shutdown, policy)
        .run(topics)
        .await
}

/// Handles the topics in batches, as a member of `group`, until `shutdown`. One call of the handler
/// gets the available records in order, up to `records_max`, so it can handle them in one
/// transaction. A single record is not delayed.
///
/// # Errors
/// [`Error`] if the subscription cannot be created. Later failures of the log are retried without a
/// limit.
pub async fn consume_batches<H, F>(
    log: Arc<dyn Log>,
    group: &str,
    topics: &[&str],
    records_max: usize,
    handler: H,
    shutdown: CancellationToken,
) -> Result<(), Error>
where
    H: Fn(Vec<Event>) -> F + Send + Sync,
    F: Future<Output = BatchResult> + Send,
{
    let policy = RetryPolicy::default();
    Runner::new(log, group, records_max, handler, shutdown, policy)
        .run(topics)
        .await
}

/// A running member of a group.
struct Runner<'a, H> {
    log: Arc<dyn Log>,
    group: &'a str,
    records_max: usize,
    handler: H,
    shutdown: CancellationToken,
    policy: RetryPolicy,
}

/// Shutdown was requested: the runner must stop.
struct ShuttingDown;

impl<'a, H, F> Runner<'a, H>
where
    H: Fn(Vec<Event>) -> F + Send + Sync,
    F: Future<Output = BatchResult> + Send,
{
    fn new(
        log: Arc<dyn Log>,
        group: &'a str,
        records_max: usize,
        handler: H,
        shutdown: CancellationToken,
        policy: RetryPolicy,
    ) -> Self {
        Runner {
            log,
            group,
            records_max: records_max.max(1),
            handler,
            shutdown,
            policy,
        }
    }

    async fn run(self, topics: &[&str]) -> Result<(), Error> {
        let mut subscription = self.log.subscribe(self.group, topics).await?;
        let mut failures = 0;
        loop {
            let next = tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return Ok(()),
                next = subscription.next_many(READ_MAX) => next,
            };
            match next {
                Ok(deliveries) => {
                    failures = 0;
                    if self
                        .handle_all(&mut subscription, &deliveries)
                        .await
                        .is_err()
                    {
                        return Ok(());
                    }
                }
                Err(Error::Closed) => return Ok(()),
                Err(error) => {
                    failures += 1;
                    tracing::warn!(error = %error, group = self.group, "cannot read the event log; retrying");
                    if pause(self.policy.for_outage().delay(failures), &self.shutdown).await {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Handles the records of a read and commits periodically and at the end.
    async fn handle_all(
        &self,
        subscription: &mut Subscription,
        deliveries: &[Delivery],
    ) -> Result<(), ShuttingDown> {
        let mut done = Uncommitted::default();
        let mut rest = deliveries;
        // Number of records to handle one by one: their batch failed, and any of them may be the
        // cause.
        let mut one_by_one = 0_usize;
        while !rest.is_empty() && !self.shutdown.is_cancelled() {
            if !subscription.is_assigned(&rest[0].position) {
                // The partition was reassigned; the new member starts after the committed position.
                rest = &rest[1..];
                continue;
            }
            let records_max = if one_by_one > 0 { 1 } else { self.records_max };
            let batch = &rest[..rest.len().min(records_max)];
            let (handled, error) = self.handle_batch(batch).await;
            done.add(&batch[..handled]);
            rest = &rest[handled..];
            one_by_one = one_by_one.saturating_sub(handled);
            if error.is_some() || done.since.elapsed() >= COMMIT_EVERY {
                self.commit(subscription, &mut done).await;
            }
            let Some(error) = error else { continue };
            let left = batch.len() - handled;
            if left > 1 && !error.is::<Poison>() && retry_later(&error).is_none() {
                tracing::warn!(
                    %error,
                    group = self.group,
                    records = left,
                    "batch of events failed; handling its events one by one"
                );
                one_by_one = left;
                continue;
            }
            self.retry_or_dead_letter(&rest[0], error).await?;
            done.add(&rest[..1]);
            rest = &rest[1..];
            one_by_one = one_by_one.saturating_sub(1);
        }
        self.commit(subscription, &mut done).await;
        if rest.is_empty() {
            Ok(())
        } else {
            Err(ShuttingDown)
        }
    }

    /// Calls the handler with a batch. Returns the number of leading records that are done, and the
    /// failure of the next one.
    async fn handle_batch(&self, batch: &[Delivery]) -> (usize, Option<Failure>) {
        let own: Vec<usize> = (0..batch.len())
            .filter(|index| self.is_for_group(&batch[*index]))
            .collect();
        let Some(first) = own.first() else {
            return (batch.len(), None);
        };
        let events: Vec<Event> = own
            .iter()
            .map(|index| batch[*index].record.event.clone())
            .collect();
        let span = match events.as_slice() {
            [event] => span(event),
            events => tracing::info_span!("events", group = self.group, records = events.len()),
        };
        match (self.handler)(events).instrument(span).await {
            Ok(()) => {
                self.count("handled", own.len());
                (batch.len(), None)
            }
            Err(Stopped { handled, error }) => {
                self.count("handled", handled);
                (own.get(handled).copied().unwrap_or(*first), Some(error))
            }
        }
    }

    /// False for a dead letter replayed for another group.
    fn is_for_group(&self, delivery: &Delivery) -> bool {
        let replayed_for = delivery.record.header(dlq::REPLAY_FOR);
        replayed_for.is_none_or(|group| group == self.group)
    }

    /// Retries a failed record until it is handled or dead-lettered.
    async fn retry_or_dead_letter(
        &self,
        delivery: &Delivery,
        first: Failure,
    ) -> Result<(), ShuttingDown> {
        let event = &delivery.record.event;
        let span = span(event);
        let mut attempt = 0;
        let mut wait = None;
        let mut failed = Some(first);
        loop {
            let error = match failed.take() {
                Some(error) => error,
                None => match (self.handler)(vec![event.clone()])
                    .instrument(span.clone())
                    .await
                {
                    Ok(()) => {
                        self.count("handled", 1);
                        return Ok(());
                    }
                    Err(stopped) => stopped.error,
                },
            };
            if self.shutdown.is_cancelled() {
                return Err(ShuttingDown);
            }
            if let Some(later) = retry_later(&error) {
                let wait = wait.get_or_insert_with(|| Wait::new(&*self.log, self.group, delivery));
                span.in_scope(|| wait.log_waiting(&later));
                self.count("waited", 1);
                self.pause(wait.delay(self.policy)).await?;
                continue;
            }
            wait = None;
            attempt += 1;
            let is_poison = error.is::<Poison>();
            span.in_scope(|| {
                tracing::warn!(
                    %error,
                    attempt,
                    group = self.group,
                    event_id = %event.id,
                    position = %delivery.position,
                    "event handler failed"
                );
            });
            if is_poison || attempt >= self.policy.attempts_max {
                self.dead_letter(delivery, attempt, &error.to_string())
                    .await?;
                self.count("dead", 1);
                return Ok(());
            }
            self.count("retried", 1);
            self.pause(self.policy.delay(attempt)).await?;
        }
    }

    /// Writes the record to its dead-letter topic; retries without a limit.
    async fn dead_letter(
        &self,
        delivery: &Delivery,
        attempts: u32,
        reason: &str,
    ) -> Result<(), ShuttingDown> {
        let group = self.group;
        let letter = dlq::letter(delivery, group, attempts, reason);
        let mut failures = 0;
        while let Err(error) = self.log.append(std::slice::from_ref(&letter)).await {
            failures += 1;
            tracing::error!(error = %error, group, "cannot write the dead letter; retrying");
            self.pause(self.policy.for_outage().delay(failures)).await?;
        }
        tracing::error!(
            group,
            reason,
            event_id = %letter.event.id,
            topic = %letter.event.topic,
            "event moved to the dead-letter topic"
        );
        Ok(())
    }

    /// Commits, with retries until shutdown. Records without a commit are redelivered.
    async fn commit(&self, subscription: &mut Subscription, done: &mut Uncommitted) {
        for position in std::mem::take(&mut done.positions) {
            let mut failures = 0;
            while let Err(error) = subscription.commit(&position).await {
                failures += 1;
                tracing::warn!(error = %error, position = %position, "cannot commit the position; retrying");
                if pause(self.policy.for_outage().delay(failures), &self.shutdown).await {
                    return;
                }
            }
        }
        done.since = Instant::now();
    }

    async fn pause(&self, delay: Duration) -> Result<(), ShuttingDown> {
        if pause(delay, &self.shutdown).await {
            return Err(ShuttingDown);
        }
        Ok(())
    }

    fn count(&self, outcome: &'static str, records: usize) {
        let group = self.group.to_owned();
        metrics::counter!("events_consumed_total", "group" => group, "outcome" => outcome)
            .increment(records as u64);
    }
}

fn span(event: &Event) -> tracing::Span {
    tracing::info_span!(
        "event",
        correlation_id = %event.correlation_id,
        event_type = %event.type_name,
    )
}

/// Positions to commit: the last handled one per partition.
struct Uncommitted {
    positions: Vec<Position>,
    since: Instant,
}

impl Default for Uncommitted {
    fn default() -> Self {
        Uncommitted {
            positions: Vec::new(),
            since: Instant::now(),
        }
    }
}

impl Uncommitted {
    fn add(&mut self, deliveries: &[Delivery]) {
        for Delivery { position, .. } in deliveries {
            let same = |known: &&mut Position| {
                known.partition == position.partition && known.topic == position.topic
            };
            match self.positions.iter_mut().find(same) {
                Some(known) => known.offset = position.offset,
                None => self.positions.push(position.clone()),
            }
        }
    }
}

/// A record that waits: from its first [`RetryLater`] until any other result.
struct Wait<'a> {
    log: &'a dyn Log,
    group: &'a str,
    delivery: &'a Delivery,
    since: Instant,
    logged_at: Option<Instant>,
    tries: u32,
}

impl<'a> Wait<'a> {
    fn new(log: &'a dyn Log, group: &'a str, delivery: &'a Delivery) -> Self {
        Wait {
            log,
            group,
            delivery,
            since: Instant::now(),
            logged_at: None,
            tries: 0,
        }
    }

    fn topic(&self) -> &str {
        &self.delivery.record.event.topic
    }

    /// Publishes the reason, and logs it once per [`WAITING_LOG_EVERY`].
    fn log_waiting(&mut self, later: &RetryLater) {
        self.tries = self.tries.saturating_add(1);
        self.log.waiting().set(self.group, self.topic(), &later.0);
        if self
            .logged_at
            .is_none_or(|logged_at| logged_at.elapsed() >= WAITING_LOG_EVERY)
        {
            self.logged_at = Some(Instant::now());
            tracing::warn!(
                reason = %later, group = self.group, waited_s = self.since.elapsed().as_secs(), tries = self.tries,
                event_id = %self.delivery.record.event.id,
                position = %self.delivery.position,
                "event waits for an unavailable peer or store"
            );
        }
    }

    fn delay(&self, policy: RetryPolicy) -> Duration {
        policy.for_outage().delay(self.tries)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.log.waiting().clear(self.group, self.topic());
    }
}

/// True if shutdown ended the pause.
async fn pause(delay: Duration, shutdown: &CancellationToken) -> bool {
    tokio::select! {
        () = shutdown.cancelled() => true,
        () = tokio::time::sleep(delay) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d26_backoff_grows_from_one_second_to_five_minutes() {
        let policy = RetryPolicy::default();
        for (failures, base_ms) in [
            (1, 1_000),
            (2, 2_000),
            (9, 256_000),
            (10, 300_000),
            (99, 300_000),
        ] {
            for _ in 0..50 {
                let delay_ms = policy.delay(failures).as_millis() as u64;
                assert!((base_ms - base_ms / 4..=base_ms).contains(&delay_ms));
            }
        }
    }
}
