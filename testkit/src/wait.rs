//! Waiting for a condition.

use std::time::Duration;

/// Time after which a test that would hang fails. Long enough for slow machines.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls until `ask` returns `Some`.
pub async fn eventually<T>(ask: impl AsyncFn() -> Option<T>) -> T {
    let answer = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, answer)
        .await
        .expect("the condition was not met in time")
}
