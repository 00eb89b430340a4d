//! Payment of coupons by the calendar of an issue (F32, R099 to R103).
//!
//! 1. After the end of a coupon's day (Moscow time), no person's call needed, the holders at that
//!    end are read from the registry, in the last block of the day, and their payments computed.
//!    Trading goes on: later trades do not change the snapshot.
//! 2. The payments are distributed (`distribution`). No unit is burned.
//!
//! Coupons are independent of each other and of the redemption of the issue: one that waits for
//! money delays no other. A coupon of the day of maturity is paid with the redemption, of the issue
//! or of single units; before maturity single units are bought back without a coupon. Holders are
//! paid whatever their state: a blocked or frozen holder is credited (D47). The snapshot waits
//! while the token is quarantined, or its holders are being moved to a new one.
//!
//! A coupon whose part the chain reverts ends FAILED and is restarted by `restart_coupon`; its
//! completed parts stay.

use types::derived;

use super::workers::log_failure;
use super::{RequestMeta, Service, call_wait};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CouponPayment, CouponStatus, Instrument, InstrumentStatus, IssueRedemption, RedemptionReason,
    RedemptionStatus,
};
use crate::peers::SOURCE;
use crate::plan;

/// Name of the call under which answers are stored (D50).
const RESTART: &str = "RestartCoupon";
/// Coupons per read of a sweep.
const SWEEP_PAGE: i64 = 100;
/// Time after the end of the day until the snapshot: clocks of the chain's nodes may differ by it.
const RECORD_GRACE_US: i64 = 60_000_000;
/// Kinds of findings in the health read.
const UNDERFUNDED: &str = "underfunded distributions";
const FAILED: &str = "failed coupons";
/// Findings that a reason names.
const NAMED_MAX: usize = 10;

impl Service {
    /// Records the coupons whose day has ended, drives those that are not paid, and reports those
    /// that wait for money or for a restart.
    pub(super) async fn sweep_coupons(&self) -> Result<(), Error> {
        let days_over = self.clock.now_us() - RECORD_GRACE_US;
        let through_us = plan::day_us(days_over).0 - 1;
        let mut after = (i64::MIN, String::new(), 0);
        loop {
            let from = (after.0, after.1.as_str(), after.2);
            let page = self.repo.due_coupons(through_us, from, SWEEP_PAGE).await?;
            let Some(last) = page.last() else { break };
            let (id, number) = (last.instrument_id.clone(), i64::from(last.number));
            after = (last.pays_at_us, id, number);
            for coupon in &page {
                let recorded = self.record_coupon(coupon).await;
                log_failure("coupon", &coupon.instrument_id, recorded);
            }
        }
        self.drive_coupons().await
    }

    /// Drives the coupons that are not paid, and reports distributions without the issuer's money,
    /// and failed coupons, to health (R101).
    async fn drive_coupons(&self) -> Result<(), Error> {
        let (mut underfunded, mut failed) = (Named::default(), Named::default());
        for instrument_id in self.repo.underfunded_redemptions().await? {
            underfunded.add(instrument_id);
        }
        let mut after = (i64::MIN, String::new(), 0);
        loop {
            let from = (after.0, after.1.as_str(), after.2);
            let page = self.repo.open_coupons(from, SWEEP_PAGE).await?;
            let Some(last) = page.last() else { break };
            let recorded_at_us = last.recorded_at_us.unwrap_or_default();
            let (id, number) = (last.instrument_id.clone(), i64::from(last.number));
            after = (recorded_at_us, id, number);
            for coupon in &page {
                let name = format!("coupon {} of {}", coupon.number, coupon.instrument_id);
                match self.driven_status(coupon).await {
                    CouponStatus::Underfunded => underfunded.add(name),
                    CouponStatus::Failed => failed.add(name),
                    _ => {}
                }
            }
        }
        for (kind, found) in [(UNDERFUNDED, underfunded), (FAILED, failed)] {
            self.health.set_finding(kind, found.reason().as_deref());
        }
        Ok(())
    }

    /// Drives a coupon, unless it has failed. Returns its last known status.
    async fn driven_status(&self, coupon: &CouponPayment) -> CouponStatus {
        let instrument_id = coupon.instrument_id.as_str();
        if coupon.status == CouponStatus::Failed {
            return coupon.status;
        }
        match self.drive_coupon(instrument_id, coupon.number).await {
            Ok(status) => status,
            Err(error) => {
                log_failure("coupon", instrument_id, Err(error));
                coupon.status
            }
        }
    }

    /// Takes the snapshot of a scheduled coupon. A repeat changes nothing.
    async fn record_coupon(&self, coupon: &CouponPayment) -> Result<(), Error> {
        let instrument = self.require_instrument(&coupon.instrument_id).await?;
        if is_of_redemption(coupon, &instrument) || instrument.status == InstrumentStatus::Draft {
            return Ok(());
        }
        // A sweep after the move records it. The transaction checks this too.
        if self.repo.is_moving(&coupon.instrument_id).await? {
            return Ok(());
        }
        let (_, cut_off_us) = plan::day_us(coupon.pays_at_us);
        self.catch_up_registry().await?;
        self.require_blocks_through(cut_off_us).await?;
        let holders = self.all_holders(&instrument, Some(cut_off_us)).await?;
        let too_large = |_| Refusal::field("instrument_id", "amounts are too large");
        let (lines, total_minor) =
            plan::coupon(&holders, instrument.decimals, coupon.amount).map_err(too_large)?;
        let now_us = self.now_us();
        let run = IssueRedemption {
            redemption_id: derived::coupon(&coupon.instrument_id, coupon.number).to_string(),
            instrument_id: coupon.instrument_id.clone(),
            reason: RedemptionReason::Coupon,
            status: RedemptionStatus::Snapshot,
            record_date_us: coupon.pays_at_us,
            total_minor,
            lines,
            parts_done: 0,
            attempt: 0,
            coupon_number: coupon.number,
            tx_hash: None,
            idempotency_key: String::new(),
            created_at_us: now_us,
            finalized_at_us: None,
        };
        let record = record_of(&run, "coupon.started", SOURCE, "SCHEDULED", now_us);
        let mut tx = self.repo.begin().await?;
        if self.repo.record_coupon_in_tx(&mut tx, &run).await? {
            self.repo.publish_in_tx(&mut tx, &[record]).await?;
            tx.commit().await?;
            failpoint::reach(failpoint::COUPON_RECORDED);
        }
        Ok(())
    }

    /// # Errors
    /// `Unavailable` while the chain has a block up to this time that the registry has not read.
    async fn require_blocks_through(&self, time_us: i64) -> Result<(), Error> {
        let next = self.repo.registry_block().await?.map_or(0, |last| last + 1);
        let unread = self.chain.block(Some(next)).await?;
        let time_s = unread.map_or(u64::MAX, |block| block.time_s);
        match time_s > (time_us / 1_000_000).unsigned_abs() {
            true => Ok(()),
            false => Err(Error::Unavailable("Holder registry")),
        }
    }

    /// Executes steps of a coupon's payment until it waits or ends.
    async fn drive_coupon(&self, instrument_id: &str, number: u32) -> Result<CouponStatus, Error> {
        let id = derived::coupon(instrument_id, number).to_string();
        let _lock = self.object_locks.lock(id).await;
        let run = self.repo.coupon_run(instrument_id, number).await?;
        let mut run = run.ok_or(Refusal::CouponNotFound)?;
        let instrument = self.require_instrument(instrument_id).await?;
        self.run(&mut run, &instrument).await?;
        Ok(run.status.into())
    }

    /// Ends a coupon as PAID.
    pub(super) async fn finish_coupon(&self, run: &mut IssueRedemption) -> Result<(), Error> {
        let now_us = self.now_us();
        let before = run.status.as_str();
        run.status = RedemptionStatus::Finalized;
        run.finalized_at_us = Some(now_us);
        let record = record_of(run, "coupon.paid", SOURCE, before, now_us);
        let mut tx = self.repo.begin().await?;
        self.repo.save_redemption_in_tx(&mut tx, run).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        Ok(tx.commit().await?)
    }

    /// Restarts a coupon whose funding or part the chain has reverted. True for a repeat. Returns
    /// the coupon as it is after `call_wait`; the sweep continues.
    ///
    /// # Errors
    /// `CouponNotFound`; `OperationState` unless it is FAILED.
    pub async fn restart_coupon(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        number: u32,
    ) -> Result<(CouponPayment, bool), Error> {
        let id = derived::coupon(instrument_id, number).to_string();
        let lock = self.lock_call(meta, RESTART, &id).await;
        let is_repeat = self.stored_answer(meta, RESTART).await?.is_some();
        if !is_repeat {
            let coupon = self.repo.coupon(instrument_id, number).await?;
            coupon.ok_or(Refusal::CouponNotFound)?;
            // Without a snapshot it is not FAILED.
            let run = self.repo.coupon_run(instrument_id, number).await?;
            self.restart_run(meta, run.ok_or(Refusal::OperationState)?)
                .await?;
        }
        drop(lock);
        if !is_repeat {
            let driven = self.drive_coupon(instrument_id, number);
            // The end of the wait cancels a step as a crash would: every step is idempotent.
            if let Ok(driven) = tokio::time::timeout(call_wait(), driven).await {
                log_failure("coupon", instrument_id, driven.map(|_| ()));
            }
        }
        let coupon = self.repo.coupon(instrument_id, number).await?;
        Ok((coupon.ok_or(Refusal::CouponNotFound)?, is_repeat))
    }

    async fn restart_run(&self, meta: &RequestMeta, mut run: IssueRedemption) -> Result<(), Error> {
        if run.status != RedemptionStatus::Failed {
            return Err(Refusal::OperationState.into());
        }
        let before = run.status.as_str();
        run.status = run.restarted();
        run.attempt += 1;
        let record = record_of(&run, "coupon.restarted", &meta.actor, before, self.now_us());
        let mut tx = self.repo.begin().await?;
        self.repo.save_redemption_in_tx(&mut tx, &run).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, RESTART, &run.redemption_id)
            .await?;
        Ok(tx.commit().await?)
    }
}

/// Whether redemptions pay the coupon, of the issue or of single units: it is of the day of
/// maturity. An issue without a nominal is never redeemed.
fn is_of_redemption(coupon: &CouponPayment, instrument: &Instrument) -> bool {
    let matures_at_us = instrument
        .matures_at_us
        .filter(|_| instrument.nominal.is_some());
    matures_at_us.is_some_and(|at_us| plan::is_same_day(coupon.pays_at_us, at_us))
}

/// Distributions with one finding: the first names, and the number of all.
#[derive(Default)]
struct Named {
    first: Vec<String>,
    count: usize,
}

impl Named {
    fn add(&mut self, name: String) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(name);
        }
    }

    /// `None` without a distribution.
    fn reason(&self) -> Option<String> {
        let first = self.first.join(", ");
        match self.count - self.first.len() {
            0 => (self.count > 0).then_some(first),
            others => Some(format!("{first} and {others} more")),
        }
    }
}

fn record_of(
    run: &IssueRedemption,
    action: &str,
    actor: &str,
    before: &str,
    at_us: i64,
) -> events::Event {
    publish::audit(
        action,
        &run.instrument_id,
        actor,
        before,
        run.status.as_str(),
        &run.coupon_text(),
        &run.redemption_id,
        at_us,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_a_bounded_number_of_distributions() {
        let mut named = Named::default();
        assert_eq!(named.reason(), None);
        (0..2).for_each(|number| named.add(number.to_string()));
        assert_eq!(named.reason().as_deref(), Some("0, 1"));
        (2..12).for_each(|number| named.add(number.to_string()));
        let long = named.reason().expect("a reason");
        assert!(long.ends_with("9 and 2 more"), "{long}");
    }
}
