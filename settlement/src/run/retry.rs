//! Retries idempotent steps until they succeed.
//!
//! Failures are retried within seconds, with growing pauses. [`REFUSALS_MAX`] consecutive refusals
//! raise a critical alarm, because every later step waits for this one. Then the step is retried
//! every `refused_retry_ms`, since an operator may remove the cause. An operator may end the pause
//! of one step or of all (`RetrySettlement`).

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use sequencer::SubmitError;
use service_clients::CallError;
use service_kit::backoff;
use tokio::sync::Notify;

use super::{Halt, Shared, failure};
use crate::repo::StoreError;

/// Pause between two attempts: first and longest.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Consecutive refusals after which an operator must act.
const REFUSALS_MAX: u32 = 5;

/// Repeats a call of another service until it succeeds. Meanwhile `part` of the health is failing
/// with `id`.
pub(super) async fn retry_call<T, F: Future<Output = Result<T, CallError>> + Send>(
    shared: &Shared,
    part: &'static str,
    id: &str,
    mut call: impl FnMut() -> F + Send,
) -> Result<T, Halt> {
    // A refusal: the service has processed the request, and a repeat alone changes nothing.
    let is_refused = |error: &CallError| !error.is_unavailable();
    let mut call = || call().boxed();
    repeat(shared, part, id, CallError::describe, is_refused, &mut call).await
}

/// Repeats a read or write of settlement's store until it succeeds.
pub(super) async fn retry_store<T, F: Future<Output = Result<T, StoreError>> + Send>(
    shared: &Shared,
    id: &str,
    mut write: impl FnMut() -> F + Send,
) -> Result<T, Halt> {
    let describe = |error: &StoreError| error.to_string();
    let mut write = || write().boxed();
    repeat(shared, failure::STORE, id, describe, |_| false, &mut write).await
}

/// Repeats a command until it is journalled.
pub(super) async fn until_journalled<T, F: Future<Output = Result<T, SubmitError>> + Send>(
    shared: &Shared,
    name: &str,
    mut submit: impl FnMut() -> F + Send,
) -> Result<T, Halt> {
    let is_refused = |error: &SubmitError| matches!(error, SubmitError::Refused(_));
    let describe = |error: &SubmitError| error.to_string();
    let mut submit = || submit().boxed();
    repeat(
        shared,
        failure::JOURNAL,
        name,
        describe,
        is_refused,
        &mut submit,
    )
    .await
}

/// Repeats `call` until it succeeds. Attempts are boxed, so this is compiled once per result type.
async fn repeat<'a, T, E>(
    shared: &Shared,
    part: &'static str,
    id: &str,
    describe: fn(&E) -> String,
    is_refused: fn(&E) -> bool,
    call: &mut (dyn FnMut() -> BoxFuture<'a, Result<T, E>> + Send),
) -> Result<T, Halt> {
    let mut failures = Failures::default();
    loop {
        match shared.unless_stopped(call()).await? {
            Ok(value) => {
                shared.failures.clear(part, id);
                return Ok(value);
            }
            Err(error) => {
                let (pause, retry) =
                    failures.note(shared, part, id, &describe(&error), is_refused(&error));
                let pausing = async {
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = retry.notified() => {}
                    }
                };
                shared.unless_stopped(pausing).await?;
            }
        }
    }
}

/// Failures of one step.
#[derive(Default)]
struct Failures {
    total: u32,
    consecutive_refusals: u32,
}

impl Failures {
    /// Logs and counts a failure; returns the pause before the next attempt, and what ends it.
    fn note(
        &mut self,
        shared: &Shared,
        part: &'static str,
        id: &str,
        reason: &str,
        is_refused: bool,
    ) -> (Duration, Arc<Notify>) {
        self.consecutive_refusals = if is_refused {
            self.consecutive_refusals + 1
        } else {
            0
        };
        let is_stuck = self.consecutive_refusals >= REFUSALS_MAX;
        let mut pause = backoff::doubled(PAUSE_FIRST, self.total, PAUSE_MAX);
        self.total += 1;
        if is_stuck {
            tracing::error!(
                part,
                id,
                reason,
                severity = "critical",
                "settlement step is refused repeatedly; all later steps wait: remove the cause"
            );
            pause = Duration::from_millis(shared.config.refused_retry_ms);
        } else if is_refused {
            tracing::error!(part, id, reason, "settlement step refused; retrying");
        } else {
            tracing::warn!(part, id, reason, "settlement step failed; retrying");
        }
        let retry = shared.failures.note_step(part, id, reason, is_stuck);
        metrics::counter!("settlement_retries_total", "step" => part).increment(1);
        (pause + backoff::jitter(pause), retry)
    }
}
