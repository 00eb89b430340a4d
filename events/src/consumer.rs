//! The consumer runner: at least once, in order, retry with backoff, then the dead-letter topic (D26).
//!
//! The position is committed after the handler succeeded or the record is in `<topic>.dlq`. While a record is retried, the subscription
//! waits behind it, so the order of its key holds. A handler is never cancelled in the middle: shutdown waits for it.
//!
//! Three kinds of failure: [`Poison`] is given up at once; [`Later`] waits for as long as the peer or the store is away, shown by
//! [`crate::log::Waiting`]; anything else is given up after [`RetryPolicy::attempts_max`] attempts.

use std::{error::Error as StdError, fmt, future::Future, sync::Arc, time::Duration};

use rand::Rng;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{Delivery, Error, Event, Log, Subscription, dlq};

/// Longest pause while a peer or a store is away: once it is back, its events go on within this time.
const LATER_MAX_MS: u64 = 30_000;
/// How often the log tells of one record that waits.
const LATER_TELL: Duration = Duration::from_secs(60);

/// What a handler answers. Any error is retried; return [`Poison`] for a record that can never be handled, [`Later`] for one that has to wait.
pub type HandlerResult = Result<(), Box<dyn StdError + Send + Sync>>;

/// A record that retrying cannot help: it goes to the dead-letter topic at once.
#[derive(Debug, Clone)]
pub struct Poison(pub String);

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Poison {}

/// A peer or a store is away: nothing is wrong with the record, and it waits for as long as that takes. Does not count towards
/// [`RetryPolicy::attempts_max`]. Never to be answered for what only this record can mend: everything behind it waits too.
#[derive(Debug, Clone)]
pub struct Later(pub String);

impl fmt::Display for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Later {}

/// Backoff between attempts: doubling, with jitter of up to a quarter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    pub first_ms: u64,
    pub max_ms: u64,
    /// Attempts before the record is given up, the first one included.
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
    /// Pause after the given number of failures (1 = after the first).
    pub fn delay(&self, failures: u32) -> Duration {
        let doubled = self
            .first_ms
            .saturating_mul(1_u64 << failures.saturating_sub(1).min(32));
        let base = doubled.min(self.max_ms);
        Duration::from_millis(base - rand::rng().random_range(0..=base / 4))
    }
}

/// Handles the topics as a member of `group` until `shutdown`. See [`consume_with`].
///
/// # Errors
/// [`Error`] when the subscription cannot be made.
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
    consume_with(
        log,
        group,
        topics,
        handler,
        shutdown,
        RetryPolicy::default(),
    )
    .await
}

/// [`consume`] with a retry policy of one's own.
///
/// # Errors
/// [`Error`] when the subscription cannot be made. Later failures of the log are retried for ever.
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
    let mut subscription = log.subscribe(group, topics).await?;
    let mut failures = 0;
    loop {
        let next = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            next = subscription.next() => next,
        };
        let delivery = match next {
            Ok(delivery) => delivery,
            Err(Error::Closed) => return Ok(()),
            Err(error) => {
                failures += 1;
                tracing::warn!(error = %error, group, "event log cannot be read");
                if pause(policy.delay(failures), &shutdown).await {
                    return Ok(());
                }
                continue;
            }
        };
        failures = 0;
        if !settle(&*log, group, &delivery, &handler, &shutdown, policy).await {
            return Ok(());
        }
        commit(&mut subscription, &delivery, &shutdown, policy).await;
    }
}

/// Runs the handler until the record is done with; `false` when shutdown came first.
async fn settle<H, F>(
    log: &dyn Log,
    group: &str,
    delivery: &Delivery,
    handler: &H,
    shutdown: &CancellationToken,
    policy: RetryPolicy,
) -> bool
where
    H: Fn(Event) -> F + Send + Sync,
    F: Future<Output = HandlerResult> + Send,
{
    let event = &delivery.record.event;
    // Dead letters are replayed to the group that failed; to the others of the topic they are nothing new.
    if delivery
        .record
        .header(dlq::REPLAY_FOR)
        .is_some_and(|other| other != group)
    {
        return true;
    }
    let span = tracing::info_span!(
        "event",
        correlation_id = %event.correlation_id,
        event_type = %event.type_name,
    );
    let mut attempt = 0;
    let mut wait = None;
    loop {
        let error = match handler(event.clone()).instrument(span.clone()).await {
            Ok(()) => {
                count(group, "handled");
                return true;
            }
            Err(error) => error,
        };
        if let Some(later) = error.downcast_ref::<Later>() {
            let wait = wait.get_or_insert_with(|| Wait::new(log, group, delivery));
            span.in_scope(|| wait.tell(later));
            count(group, "waited");
            if pause(wait.delay(policy), shutdown).await {
                return false;
            }
            continue;
        }
        wait = None;
        attempt += 1;
        let hopeless = error.is::<Poison>();
        span.in_scope(|| {
            tracing::warn!(%error, attempt, group, event_id = %event.id, position = %delivery.position, "event not handled");
        });
        if hopeless || attempt >= policy.attempts_max {
            if !bury(
                log,
                group,
                delivery,
                attempt,
                &error.to_string(),
                shutdown,
                policy,
            )
            .await
            {
                return false;
            }
            count(group, "dead");
            return true;
        }
        count(group, "retried");
        if pause(policy.delay(attempt), shutdown).await {
            return false;
        }
    }
}

/// A record that waits for a peer or a store, from the first [`Later`] to the next other answer.
struct Wait<'a> {
    log: &'a dyn Log,
    group: &'a str,
    delivery: &'a Delivery,
    since: Instant,
    told: Option<Instant>,
    tries: u32,
}

impl<'a> Wait<'a> {
    fn new(log: &'a dyn Log, group: &'a str, delivery: &'a Delivery) -> Self {
        Wait {
            log,
            group,
            delivery,
            since: Instant::now(),
            told: None,
            tries: 0,
        }
    }

    fn topic(&self) -> &str {
        &self.delivery.record.event.topic
    }

    /// Shows the reason, and says it once in [`LATER_TELL`].
    fn tell(&mut self, later: &Later) {
        self.tries = self.tries.saturating_add(1);
        self.log.waiting().set(self.group, self.topic(), &later.0);
        if self.told.is_none_or(|told| told.elapsed() >= LATER_TELL) {
            self.told = Some(Instant::now());
            tracing::warn!(
                reason = %later, group = self.group, waited_s = self.since.elapsed().as_secs(), tries = self.tries,
                event_id = %self.delivery.record.event.id, position = %self.delivery.position, "event waits"
            );
        }
    }

    fn delay(&self, policy: RetryPolicy) -> Duration {
        RetryPolicy {
            max_ms: policy.max_ms.min(LATER_MAX_MS),
            ..policy
        }
        .delay(self.tries)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.log.waiting().clear(self.group, self.topic());
    }
}

/// Puts the record on its dead-letter topic, however long that takes; `false` when shutdown came first.
async fn bury(
    log: &dyn Log,
    group: &str,
    delivery: &Delivery,
    attempts: u32,
    reason: &str,
    shutdown: &CancellationToken,
    policy: RetryPolicy,
) -> bool {
    let letter = dlq::letter(delivery, group, attempts, reason);
    let mut failures = 0;
    while let Err(error) = log.append(std::slice::from_ref(&letter)).await {
        failures += 1;
        tracing::error!(error = %error, group, "dead letter cannot be written");
        if pause(policy.delay(failures), shutdown).await {
            return false;
        }
    }
    tracing::error!(group, reason, event_id = %letter.event.id, topic = %letter.event.topic, "event given up");
    true
}

async fn commit(
    subscription: &mut Subscription,
    delivery: &Delivery,
    shutdown: &CancellationToken,
    policy: RetryPolicy,
) {
    let mut failures = 0;
    while let Err(error) = subscription.commit(&delivery.position).await {
        failures += 1;
        tracing::warn!(error = %error, position = %delivery.position, "position cannot be committed");
        if pause(policy.delay(failures), shutdown).await {
            return;
        }
    }
}

/// True when shutdown cut the pause.
async fn pause(delay: Duration, shutdown: &CancellationToken) -> bool {
    tokio::select! {
        () = shutdown.cancelled() => true,
        () = tokio::time::sleep(delay) => false,
    }
}

fn count(group: &str, outcome: &'static str) {
    metrics::counter!("events_consumed_total", "group" => group.to_owned(), "outcome" => outcome)
        .increment(1);
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
