//! Back-off of a replica follower while its store or the event log is unavailable, for example on a
//! full disk. Meanwhile the health read names the follower and the reason.

use std::time::Duration;

use rpc::Health;
use service_kit::backoff;
use tokio_util::sync::CancellationToken;

use crate::Error;

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Attempts at one operation. Dropping it after a failure sets the health part to ok.
pub struct Retry<'a> {
    part: &'static str,
    health: &'a Health,
    shutdown: &'a CancellationToken,
    /// Number of failed attempts.
    failed: u32,
}

impl<'a> Retry<'a> {
    pub fn new(part: &'static str, health: &'a Health, shutdown: &'a CancellationToken) -> Self {
        Self {
            part,
            health,
            shutdown,
            failed: 0,
        }
    }

    /// Pauses before the next attempt.
    ///
    /// # Errors
    /// The error itself, when a retry cannot help or shutdown begins.
    pub async fn wait(&mut self, error: Error) -> Result<(), Error> {
        if !error.is_away() {
            return Err(error);
        }
        tracing::warn!(%error, part = self.part, "store or log unavailable: retrying");
        self.health.set_failing(self.part, error.to_string());
        tokio::select! {
            () = tokio::time::sleep(backoff::doubled(RETRY_FIRST, self.failed, RETRY_MAX)) => {}
            () = self.shutdown.cancelled() => return Err(error),
        }
        self.failed += 1;
        Ok(())
    }
}

impl Drop for Retry<'_> {
    fn drop(&mut self) {
        if self.failed > 0 {
            self.health.set_ok(self.part);
        }
    }
}
