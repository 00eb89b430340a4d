//! Background work: payouts, polls and expiry of intents, daily reconciliation, open differences,
//! alerts, user blocks.
//!
//! Each worker sleeps until its next row is due or it is notified. A failure is logged and the row
//! is retried after its pause.

use std::{collections::HashSet, sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use service_kit::clock;
use tokio::{sync::Notify, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use types::BusinessDay;

use crate::{
    alert::AlertSinks,
    api::publish as emit,
    intent::Intent,
    payout::Payout,
    repo::{intents, payouts, reports},
    service::{Fault, Gateway},
};

/// Maximum rows per read. More than [`STEPS_MAX`], because rows of running steps are among them.
const BATCH: i64 = 64;
/// Maximum payouts that are ordered or polled in parallel, and maximum intents that are polled in
/// parallel. More than one, so that a bank response that takes the whole timeout does not delay the
/// others. Fewer than the failures in a row after which no call is sent to the bank
/// (`breaker_failures`, 5): orders or polls that time out together must not stop deposits.
const STEPS_MAX: usize = 4;
/// Longest sleep of a worker, also when nothing is due.
const SLEEP_MS_MAX: u64 = 2_000;
/// Shortest sleep after work, so that a row that stays due does not spin.
const SLEEP_MS_MIN: u64 = 20;
/// Pause after a failed reconciliation at the cut-off.
const CUT_OFF_RETRY_MS: u64 = 30_000;
/// How many days back a missed day is reconciled. Bounds the reports after a long downtime: all of
/// them have today's amounts.
const CATCH_UP_DAYS: i64 = 31;

const ALERT_GROUP: &str = "payments.alerts";
const USERS_GROUP: &str = "payments.users";

/// Id of a due row, and its step, which has not begun.
type Due = (String, BoxFuture<'static, ()>);
/// Reads due rows, and the time in microseconds at which the next row is due.
type ReadDue = fn(Arc<Gateway>) -> BoxFuture<'static, (Vec<Due>, Option<i64>)>;

/// Orders released payouts at the bank and polls their transfers.
pub async fn run_payouts(gateway: Arc<Gateway>, shutdown: CancellationToken) {
    run_steps(&gateway, due_payouts, &gateway.payouts_due, shutdown).await;
}

/// Polls intents, and expires pending ones after their lifetime.
pub async fn run_intents(gateway: Arc<Gateway>, shutdown: CancellationToken) {
    // No call makes a poll due at once.
    run_steps(&gateway, due_intents, &Notify::new(), shutdown).await;
}

/// Executes the steps of due rows until the shutdown.
async fn run_steps(
    gateway: &Arc<Gateway>,
    read_due: ReadDue,
    wake: &Notify,
    shutdown: CancellationToken,
) {
    let mut steps = JoinSet::new();
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = drive_steps(gateway, read_due, wake, &mut steps) => {}
    }
    // Cancel-safe: a step of a payout stores its state before it calls the bank, and a poll changes
    // nothing at the bank.
    steps.shutdown().await;
}

/// Keeps up to [`STEPS_MAX`] steps running, in the order in which their rows are due. They are
/// tasks, so that a step with a store connection is not suspended while this loop waits for the
/// store.
async fn drive_steps(
    gateway: &Arc<Gateway>,
    read_due: ReadDue,
    wake: &Notify,
    steps: &mut JoinSet<String>,
) {
    // Rows with a running step. They are due again while the bank does not answer.
    let mut running = HashSet::<String>::new();
    loop {
        let (mut due, next_us) = read_due(gateway.clone()).await;
        // Here and not when a row is taken: its step may end in between, and would run twice.
        due.retain(|(id, _)| !running.contains(id));
        let mut due = due.into_iter();
        let mut wake_at = Instant::now() + sleep_until(next_us);
        loop {
            while steps.len() < STEPS_MAX
                && let Some((id, step)) = due.next()
            {
                running.insert(id.clone());
                let step = async move {
                    step.await;
                    id
                };
                steps.spawn(step.in_current_span());
            }
            let is_full = steps.len() == STEPS_MAX;
            tokio::select! {
                () = wake.notified() => break,
                () = tokio::time::sleep_until(wake_at), if !is_full => break,
                Some(ended) = steps.join_next() => {
                    // A violated invariant of one row stops all of its kind.
                    let id = ended.expect("a step does not panic");
                    running.remove(&id);
                    // It may be due again.
                    wake_at = wake_at.min(Instant::now() + Duration::from_millis(SLEEP_MS_MIN));
                }
            }
        }
    }
}

/// A [`ReadDue`] of payouts.
fn due_payouts(gateway: Arc<Gateway>) -> BoxFuture<'static, (Vec<Due>, Option<i64>)> {
    Box::pin(async move {
        let now_us = clock::now_us();
        let due = payouts::due(gateway.db.read(), now_us, BATCH).await;
        let next_us = payouts::next_due_us(gateway.db.read(), now_us).await;
        let step = |payout: Payout| {
            let id = payout.payout_id.clone();
            (id, step_payout(gateway.clone(), payout).boxed())
        };
        let due = log_store(&gateway, due).unwrap_or_default();
        let next_us = log_store(&gateway, next_us).flatten();
        (due.into_iter().map(step).collect(), next_us)
    })
}

/// Executes the due action of a payout.
async fn step_payout(gateway: Arc<Gateway>, payout: Payout) {
    if let Err(fault) = gateway.step_payout(&payout.payout_id).await {
        tracing::warn!(payout_id = payout.payout_id, user_id = payout.user_id,
            correlation_id = payout.correlation_id, %fault, "payout step failed; retrying later");
    }
}

/// A [`ReadDue`] of intents.
fn due_intents(gateway: Arc<Gateway>) -> BoxFuture<'static, (Vec<Due>, Option<i64>)> {
    Box::pin(async move {
        let now_us = clock::now_us();
        let due = intents::due(gateway.db.read(), now_us, BATCH).await;
        let next_us = intents::next_due_us(gateway.db.read(), now_us).await;
        let step = |(intent, polls): (Intent, u32)| {
            let id = intent.payment_id.clone();
            (id, poll_intent(gateway.clone(), intent, polls).boxed())
        };
        let due = log_store(&gateway, due).unwrap_or_default();
        let next_us = log_store(&gateway, next_us).flatten();
        (due.into_iter().map(step).collect(), next_us)
    })
}

async fn poll_intent(gateway: Arc<Gateway>, intent: Intent, polls: u32) {
    if let Err(fault) = gateway.poll_intent(&intent, polls).await {
        tracing::warn!(payment_id = intent.payment_id, user_id = intent.user_id,
            correlation_id = intent.correlation_id, %fault, "intent poll failed; retrying later");
    }
}

/// Shows the bank's unexplained difference after each report, and its age; restores the health
/// finding after a start.
pub async fn run_difference(gateway: Arc<Gateway>, shutdown: CancellationToken) {
    loop {
        log_store(&gateway, gateway.show_difference().await);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = gateway.reported.notified() => {}
            () = tokio::time::sleep(Duration::from_millis(SLEEP_MS_MAX)) => {}
        }
    }
}

/// Reconciles each day after it ends, and first the days that were missed during downtime.
pub async fn run_cut_off(gateway: Arc<Gateway>, shutdown: CancellationToken) {
    loop {
        let today = BusinessDay::of(clock::now_us());
        let closed = tokio::select! {
            () = shutdown.cancelled() => return,
            closed = close_days_before(&gateway, today) => closed,
        };
        let sleep_ms = match closed {
            Ok(()) => {
                let left_us = today.end_us() - clock::now_us();
                u64::try_from(left_us / 1_000 + 1).unwrap_or(1)
            }
            Err(fault) => {
                tracing::warn!(%fault, "reconciliation at the cut-off failed, retrying");
                CUT_OFF_RETRY_MS
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(Duration::from_millis(sleep_ms)) => {}
        }
    }
}

/// Reconciles the open days of the past [`CATCH_UP_DAYS`] together.
async fn close_days_before(gateway: &Gateway, today: BusinessDay) -> Result<(), Fault> {
    let mut open = Vec::new();
    for number in today.number() - CATCH_UP_DAYS..today.number() {
        let day = BusinessDay::from_number(number);
        if is_open(gateway, day).await? {
            open.push(day);
        }
    }
    let correlation_id = rpc::Context::new("payments").correlation_id;
    gateway.reconcile_past_days(&open, &correlation_id).await
}

/// Whether a past day has no report and does not precede the first intent.
async fn is_open(gateway: &Gateway, day: BusinessDay) -> Result<bool, Fault> {
    let db = gateway.db.read();
    Ok(intents::any_before(db, day.end_us()).await? && !reports::is_closed(db, day).await?)
}

/// Delivers alerts to their receivers.
pub async fn run_alerts(log: Arc<dyn events::Log>, sinks: AlertSinks, shutdown: CancellationToken) {
    let handler = |event: events::Event| {
        let sinks = sinks.clone();
        async move {
            if let Some((report_id, text)) = emit::read_alert(&event) {
                sinks.send(&report_id, &text).await?;
            }
            Ok(())
        }
    };
    let topics = [events::topics::PAYMENTS];
    let consumed = events::consume(log, ALERT_GROUP, &topics, handler, shutdown).await;
    if let Err(error) = consumed {
        tracing::error!(%error, "alerts cannot be consumed");
    }
}

/// Applies user changes from identity events (T48).
pub async fn run_users(
    gateway: Arc<Gateway>,
    log: Arc<dyn events::Log>,
    shutdown: CancellationToken,
) {
    let handler = |event: events::Event| {
        let gateway = gateway.clone();
        async move {
            if let Some((user_id, change)) = emit::read_user_change(&event) {
                gateway.apply_user_change(&event, &user_id, &change).await?;
            }
            Ok(())
        }
    };
    let topics = [events::topics::IDENTITY];
    let consumed = events::consume(log, USERS_GROUP, &topics, handler, shutdown).await;
    if let Err(error) = consumed {
        tracing::error!(%error, "identity events cannot be consumed");
    }
}

/// Reports blocked event consumers in the health of payments.
pub async fn run_log_health(
    health: rpc::Health,
    log: Arc<dyn events::Log>,
    shutdown: CancellationToken,
) {
    let set_health = |part: &str, reason: Option<&str>| health.set(part, reason);
    events::report_health(log, &[ALERT_GROUP, USERS_GROUP], set_health, shutdown).await;
}

fn log_store<T>(gateway: &Gateway, result: sqlx::Result<T>) -> Option<T> {
    match result {
        Ok(value) => {
            gateway.health.set_ok("store");
            Some(value)
        }
        Err(error) => {
            tracing::error!(%error, "payments store cannot be read; retrying");
            gateway.health.set_failing("store", "cannot be read");
            None
        }
    }
}

fn sleep_until(due_us: Option<i64>) -> Duration {
    let left_ms = due_us.map_or(SLEEP_MS_MAX, |due_us| {
        u64::try_from((due_us - clock::now_us()) / 1_000 + 1).unwrap_or(0)
    });
    Duration::from_millis(left_ms.clamp(SLEEP_MS_MIN, SLEEP_MS_MAX))
}
