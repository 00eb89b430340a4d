//! Waiting for what becomes so.

use std::time::Duration;

/// Longer than anything in a test takes on any machine; it only ends a test that would hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks again until there is an answer.
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
        .expect("what the test waits for happens")
}
