//! Supervision of tasks that must run until shutdown. A task that ends early fails the health read,
//! also after a panic (D41). A task that can continue where it stopped is restarted.

use std::time::Duration;

use rpc::Health;
use service_kit::backoff;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::Error;

/// Shortest and longest pause before a restart. The pause doubles per restart. It starts again at
/// the shortest after the task has run for the longest pause.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);

struct Guard {
    health: Health,
    part: &'static str,
    shutdown: CancellationToken,
    reason: String,
}

impl Guard {
    fn ended(&mut self, outcome: Result<(), Error>) {
        if let Err(error) = outcome {
            self.reason = error.to_string();
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.shutdown.is_cancelled() {
            tracing::error!(
                part = self.part,
                reason = self.reason,
                "market task stopped before shutdown"
            );
            self.health
                .set_failing(self.part, std::mem::take(&mut self.reason));
        }
    }
}

/// Spawns a task. `shutdown` is the token that ends it. If it ends before, `part` fails in the
/// health read.
pub fn spawn(
    health: &Health,
    part: &'static str,
    shutdown: &CancellationToken,
    work: impl Future<Output = Result<(), Error>> + Send + 'static,
) -> JoinHandle<()> {
    let mut guard = Guard {
        health: health.clone(),
        part,
        shutdown: shutdown.clone(),
        reason: "has stopped".to_owned(),
    };
    tokio::spawn(async move {
        let ended = work.await;
        guard.ended(ended);
    })
}

/// Spawns the task that `make` returns, and spawns it again each time it ends. `make` continues
/// where the task stopped. `shutdown` is the token that ends it.
///
/// `part` fails in the health read when the task ends. It is ok again once the restarted task has
/// run for as long as the next pause. No other task may use `part`.
pub fn spawn_restarting<F>(
    health: &Health,
    part: &'static str,
    shutdown: &CancellationToken,
    mut make: impl FnMut() -> F + Send + 'static,
) -> JoinHandle<()>
where
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let (health, shutdown) = (health.clone(), shutdown.clone());
    tokio::spawn(async move {
        let mut failed = 0;
        loop {
            let probation = backoff::doubled(RETRY_FIRST, failed, RETRY_MAX);
            let begun = tokio::time::Instant::now();
            let mut work = tokio::spawn(make());
            let ended = match tokio::time::timeout(probation, &mut work).await {
                Ok(ended) => ended,
                Err(_) => {
                    health.set_ok(part);
                    work.await
                }
            };
            if shutdown.is_cancelled() {
                return;
            }
            let reason = match ended {
                Ok(Ok(())) => "has stopped".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(panic) => panic.to_string(),
            };
            if begun.elapsed() > RETRY_MAX {
                failed = 0;
            }
            tracing::error!(part, reason, "market task failed: restarting it");
            metrics::counter!("market_restarts_total", "part" => part).increment(1);
            health.set_failing(part, reason);
            tokio::select! {
                () = tokio::time::sleep(backoff::doubled(RETRY_FIRST, failed, RETRY_MAX)) => {}
                () = shutdown.cancelled() => return,
            }
            failed += 1;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R261
    #[tokio::test]
    async fn r261_a_part_that_ends_early_fails_the_health_read() {
        let (health, shutdown) = (Health::new("market"), CancellationToken::new());
        let _ = spawn(&health, "panicked", &shutdown, async {
            panic!("on purpose")
        })
        .await;
        let ended = spawn(&health, "ended", &shutdown, async { Ok(()) });
        ended.await.unwrap();
        let failed = spawn(&health, "failed", &shutdown, async { Err(Error::Node(9)) });
        failed.await.unwrap();
        shutdown.cancel();
        let in_order = spawn(&health, "in order", &shutdown, async { Ok(()) });
        in_order.await.unwrap();
        let failing = health.failing();
        let parts: Vec<_> = failing.keys().map(String::as_str).collect();
        assert_eq!(parts, ["ended", "failed", "panicked"]);
        assert_eq!(failing["failed"], "invalid node number 9");
    }

    #[tokio::test]
    async fn a_failed_task_is_restarted_until_it_runs() {
        let (health, shutdown) = (Health::new("market"), CancellationToken::new());
        let mut begun = 0;
        let stop = shutdown.clone();
        let kept = spawn_restarting(&health, "history", &shutdown, move || {
            begun += 1;
            let (at, stop) = (begun, stop.clone());
            async move {
                match at {
                    1 => return Err(Error::Node(9)),
                    2 => panic!("on purpose"),
                    _ => stop.cancelled().await,
                }
                Ok(())
            }
        });
        let until = async |is_failing: bool| {
            while health.failing().contains_key("history") != is_failing {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        until(true).await;
        until(false).await;
        shutdown.cancel();
        kept.await.expect("no panic");
    }
}
