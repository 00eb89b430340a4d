//! Parts that have to run until shutdown: one that ends before, by a panic too, fails the health read (D41).

use rpc::Health;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::Error;

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
                "a part of the market has stopped"
            );
            self.health
                .set_failing(self.part, std::mem::take(&mut self.reason));
        }
    }
}

/// Starts a part. `shutdown` is the token that ends it.
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
        assert_eq!(failing["failed"], "9 is no node number");
    }
}
