//! Pauses of a part that follows the replica, while its store or the log is away: on a full disk,
//! for example. The health read names the part and the reason meanwhile.

use std::time::Duration;

use rpc::Health;
use service_kit::backoff;
use tokio_util::sync::CancellationToken;

use crate::Error;

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The tries of one piece of work. Healthy again when it is dropped.
pub struct Retry<'a> {
    part: &'static str,
    health: &'a Health,
    shutdown: &'a CancellationToken,
    /// Tries that failed.
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

    /// Pauses before the same is tried again.
    ///
    /// # Errors
    /// The error itself, where waiting cannot help or shutdown is near.
    pub async fn wait(&mut self, error: Error) -> Result<(), Error> {
        if !error.is_away() {
            return Err(error);
        }
        tracing::warn!(%error, part = self.part, "store or log is away: tried again");
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
