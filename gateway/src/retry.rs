//! Pauses of a part that follows the replica, while its store or the log is away: on a full disk,
//! for example. The health read names the part and the reason meanwhile.

use std::time::Duration;

use rpc::Health;
use tokio_util::sync::CancellationToken;

use crate::Error;

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The tries of one piece of work. Healthy again when it is dropped.
pub struct Retry<'a> {
    part: &'static str,
    health: &'a Health,
    shutdown: &'a CancellationToken,
    /// The next pause.
    pause: Duration,
}

impl<'a> Retry<'a> {
    pub fn new(part: &'static str, health: &'a Health, shutdown: &'a CancellationToken) -> Self {
        Self {
            part,
            health,
            shutdown,
            pause: RETRY_FIRST,
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
            () = tokio::time::sleep(self.pause) => {}
            () = self.shutdown.cancelled() => return Err(error),
        }
        self.pause = (self.pause * 2).min(RETRY_MAX);
        Ok(())
    }
}

impl Drop for Retry<'_> {
    fn drop(&mut self) {
        if self.pause > RETRY_FIRST {
            self.health.set_ok(self.part);
        }
    }
}
