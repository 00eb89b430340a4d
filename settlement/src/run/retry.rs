//! Calls are repeated until they are answered: every step may be, and there is nobody to give the failure to.

use std::time::Duration;

use rand::Rng;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

const FIRST_MS: u64 = 100;
const MAX_MS: u64 = 5_000;

/// The token was cancelled while a call waited for its next try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped;

/// Repeats `call` until it succeeds. Failures that time cures are logged as warnings, others as errors: an operator has to look.
pub async fn until_done<T, F: Future<Output = Result<T, Status>>>(
    what: &str,
    id: &str,
    shutdown: &CancellationToken,
    health: &rpc::Health,
    mut call: impl FnMut() -> F,
) -> Result<T, Stopped> {
    let mut wait_ms = FIRST_MS;
    loop {
        let answer = tokio::select! {
            answer = call() => answer,
            () = shutdown.cancelled() => return Err(Stopped),
        };
        let status = match answer {
            Ok(value) => {
                health.set_ok(what);
                return Ok(value);
            }
            Err(status) => status,
        };
        let reason = rpc::status::reason(&status).unwrap_or_default();
        if is_passing(status.code()) {
            tracing::warn!(step = what, id, code = ?status.code(), reason, message = status.message(), "settlement step will be repeated");
        } else {
            tracing::error!(step = what, id, code = ?status.code(), reason, message = status.message(), "settlement step was refused");
        }
        health.set_failing(what, status.message());
        metrics::counter!("settlement_retries_total", "step" => what.to_owned()).increment(1);
        let jitter_ms = rand::rng().random_range(0..=wait_ms / 4);
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(wait_ms + jitter_ms)) => {}
            () = shutdown.cancelled() => return Err(Stopped),
        }
        wait_ms = (wait_ms * 2).min(MAX_MS);
    }
}

fn is_passing(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Aborted
            | Code::ResourceExhausted
    )
}
