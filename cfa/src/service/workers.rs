//! Background tasks. One applies new blocks to the holder registry. The other, the sweep, resumes
//! operations after a crash or an unavailable peer (T13), polls payouts without an event (T29),
//! starts redemptions at maturity, pays coupons, closes placements, and moves holders.

use std::sync::Arc;
use std::time::Duration;

use service_clients::IdentityClient;
use tokio_util::sync::CancellationToken;

use super::Service;
use crate::error::Error;
use crate::model::{Flow, Operation, Status};
use crate::saga::{Chain, Payout};

/// The sweep skips operations changed within this time: their caller still drives them.
const QUIET_US: i64 = 1_500_000;
/// Payouts are polled in every n-th sweep, because normally their event arrives.
const PAYOUT_SWEEPS: u64 = 10;
/// Operations per page.
const SWEEP_PAGE: i64 = 500;

/// Applies new blocks to the holder registry.
pub async fn follow_chain(service: Arc<Service>, shutdown: CancellationToken) {
    let mut last_read_block = service.chain.last_read_block();
    loop {
        last_read_block.borrow_and_update();
        let followed = async {
            service.catch_up_registry().await?;
            service.halt_quarantined().await
        };
        if let Err(error) = followed.await {
            tracing::warn!(%error, "holder registry cannot catch up, retrying at the next block");
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = last_read_block.changed() => if changed.is_err() { return },
        }
    }
}

/// Sweeps until shutdown.
pub async fn sweep(service: Arc<Service>, health: rpc::Health, shutdown: CancellationToken) {
    let interval = Duration::from_millis(service.config.sweep_interval_ms.max(1));
    let mut sweeps = 0u64;
    loop {
        // Shutdown cancels the sweep as a crash would: every step is idempotent.
        let swept = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            swept = service.sweep_once(sweeps.is_multiple_of(PAYOUT_SWEEPS), false) => swept,
        };
        match swept {
            Ok(()) => health.set_ok("sweep"),
            Err(error) => {
                tracing::warn!(%error, "sweep failed");
                health.set_failing("sweep", error.to_string());
            }
        }
        sweeps += 1;
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
    }
}

impl Service {
    /// Runs one sweep over the open operations. `ask_payouts`: polls payouts. `all`: includes
    /// operations changed within `QUIET_US`.
    pub async fn sweep_once(&self, ask_payouts: bool, all: bool) -> Result<(), Error> {
        for instrument in self.repo.draft_instruments().await? {
            let instrument_id = instrument.instrument_id.clone();
            log_failure(
                "instrument",
                &instrument_id,
                self.complete_instrument(instrument).await.map(|_| ()),
            );
        }
        let before_us = if all {
            i64::MAX
        } else {
            self.now_us() - QUIET_US
        };
        let mut after = (i64::MIN, String::new());
        let mut is_identity_unavailable = false;
        loop {
            let page = self
                .repo
                .open_operations(before_us, (after.0, &after.1), SWEEP_PAGE)
                .await?;
            let Some(last) = page.last() else { break };
            after = (last.updated_at_us, last.operation_id.clone());
            for operation in &page {
                let id = &operation.operation_id;
                // One timeout of identity per sweep is enough.
                let asks_identity = operation.limit_use().is_some();
                if is_identity_unavailable && asks_identity && operation.progress.waits_for_limit()
                {
                    continue;
                }
                let resumed = self.resume(operation, ask_payouts).await;
                let identity = IdentityClient::SERVICE;
                is_identity_unavailable |=
                    matches!(resumed, Err(Error::Unavailable(of)) if of == identity);
                log_failure("operation", id, resumed);
            }
        }
        log_failure("releases", "", self.report_releases().await);
        log_failure("batches", "", self.resume_batches().await);
        log_failure("registrations", "", self.confirm_registrations().await);
        self.start_due_redemptions().await?;
        self.report_unrecorded().await?;
        for redemption_id in self.repo.open_redemption_ids().await? {
            log_failure(
                "redemption",
                &redemption_id,
                self.drive_redemption(&redemption_id).await.map(|_| ()),
            );
        }
        log_failure("coupons", "", self.sweep_coupons().await);
        log_failure("offers", "", self.sweep_offers(before_us).await);
        log_failure("placements", "", self.close_due_placements().await);
        log_failure("freezes", "", self.sweep_freezes(before_us).await);
        log_failure("moves of holders", "", self.sweep_moves().await);
        log_failure("limits", "", self.end_limits().await);
        log_failure("limits", "", self.end_offer_limits().await);
        log_failure("quarantined tokens", "", self.halt_quarantined().await);
        Ok(())
    }

    /// Resumes an operation: reads a missed receipt, polls a released payout, or drives it.
    async fn resume(&self, operation: &Operation, ask_payouts: bool) -> Result<(), Error> {
        if operation.status == Status::Blocked && !operation.progress.refunding {
            return Ok(());
        }
        if operation.progress.chain == Chain::Sent
            && let Some(tx_hash) = &operation.tx_hash
        {
            self.on_receipt(tx_hash).await?;
        }
        if operation.flow == Flow::RedeemRub && operation.progress.payout == Payout::Released {
            if ask_payouts {
                self.finalize_redemption(&operation.external_ref).await?;
            }
            return Ok(());
        }
        self.drive(&operation.operation_id).await.map(|_| ())
    }
}

/// Logs a failure instead of returning it, so the sweep continues.
pub(super) fn log_failure(what: &str, id: &str, outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        tracing::warn!(what, id, %error, "cannot be resumed yet, retrying at the next sweep");
    }
}
