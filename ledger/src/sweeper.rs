//! Timer tasks: expiry of due holds that no call touches (T31), and deletion of parked notices past
//! their retention.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    Clock, Error, LedgerConfig,
    committer::Committer,
    fold::{Command, CommandKind},
    repo::Store,
};

/// Holds expired per transaction.
const BATCH: i64 = 1_000;
const US_PER_HOUR: i64 = 3_600_000_000;

#[derive(Clone)]
pub struct Sweeper {
    pub store: Store,
    pub committer: Committer,
    pub clock: Clock,
    pub parked_retention_h: u32,
}

impl Sweeper {
    /// Sweeps at the configured interval until `shutdown`.
    pub async fn run(self, config: LedgerConfig, shutdown: CancellationToken) {
        let interval = Duration::from_millis(config.hold_sweep_interval_ms.max(10));
        let mut purged_at_us = i64::MIN;
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(interval) => {}
            }
            let now_us = self.clock.now_us();
            let purge = now_us.saturating_sub(purged_at_us) > US_PER_HOUR;
            let swept = async {
                self.sweep().await?;
                if purge {
                    self.purge_notices(now_us).await?;
                }
                Ok::<_, Error>(())
            };
            match swept.await {
                Ok(()) if purge => purged_at_us = now_us,
                Ok(()) => {}
                Err(Error::Closed) => return,
                Err(error) => tracing::warn!(%error, "sweep failed"),
            }
        }
    }

    /// Expires every due hold. Returns how many were due.
    pub async fn sweep(&self) -> Result<usize, Error> {
        let mut swept = 0;
        loop {
            let due = self.store.holds_due(self.clock.now_us(), BATCH).await?;
            let found = due.len();
            if found > 0 {
                self.submit(CommandKind::ExpireHolds(due)).await?;
            }
            swept += found;
            if found < BATCH as usize {
                return Ok(swept);
            }
        }
    }

    async fn purge_notices(&self, now_us: i64) -> Result<(), Error> {
        let before_us = now_us - i64::from(self.parked_retention_h) * US_PER_HOUR;
        self.submit(CommandKind::PurgePendingReceipts { before_us })
            .await
    }

    async fn submit(&self, kind: CommandKind) -> Result<(), Error> {
        let command = Command {
            kind,
            key: None,
            is_service: true,
            author: None,
        };
        let outcome = self
            .committer
            .submit(command, rpc::Context::new("ledger"))
            .await?;
        if let Err(refused) = outcome {
            tracing::error!(refusal = %refused.refusal, "sweep command refused");
        }
        Ok(())
    }
}
