//! Redemption of a whole issue at maturity or by call (specification 1.5).
//!
//! 0. Checks before any change: the issue has a nominal, the record date is the day of maturity
//!    (before maturity: the current day, by an approved call), and the payment is not zero while
//!    there are units.
//! 1. The issue stops trading (MATURED). The call waits until open operations of the issue are
//!    final, because they may move units. Holders' offers to sell units end, because they hold
//!    units.
//! 2. The holders at the record date are read from the registry and their payments computed:
//!    nominal, and the coupon of the record day. Coupons of earlier days have payments of their own
//!    (`coupons`), later ones are void.
//! 3. The payments are distributed and the units burned (`distribution`).
//!
//! Holders at the end of the record day are paid. If trading stopped by then, these are the current
//! holders of step 2. Otherwise redemptions of single units may have burned units after the record
//! day. They have paid those units, so step 2 leaves them out: after step 1 none is open or added.
//! A trade that settlement resends or that arrives late can move units after step 2. Its parties
//! are not paid, and their units not burned, until an operator resolves the difference.

use std::collections::BTreeSet;
use std::time::Duration;

use types::derived;

use super::workers::log_failure;
use super::{RequestMeta, Service, call_wait};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::model::{
    CFA_RUB, Holder, Instrument, InstrumentStatus, IssueRedemption, RedemptionLine,
    RedemptionReason, RedemptionStatus,
};
use crate::plan;

/// Polling interval for the issue's open operations.
const MOVING_POLL: Duration = Duration::from_millis(50);
/// Holders per read of their redemptions of single units.
const HOLDERS_PER_READ: usize = 1_000;
const NOT_RECORDED: &str = "trading has stopped and no redemption is recorded: start it again";

/// Arguments of `start_redemption`.
#[derive(Debug, Clone)]
pub struct NewRedemption {
    pub instrument_id: String,
    /// Unset: the day of maturity, or before maturity the current day.
    pub record_date_us: Option<i64>,
    pub reason: RedemptionReason,
    /// The call may redeem before maturity: of a service, or of two persons (D32).
    pub may_be_early: bool,
    /// Longest wait of the call for the issue's open operations.
    pub wait: Duration,
}

impl Service {
    /// Starts the redemption of an issue, or restarts a failed one under a new key. A repeat of the
    /// key returns the stored redemption and true. A call returns the redemption as it is after
    /// `call_wait`; the sweep continues.
    ///
    /// # Errors
    /// Before any change: `RedemptionExists`, `InstrumentNotActive`, `NominalMissing`,
    /// `NotMatured`, a refused `record_date`, `PlacementUnderWay`, `NothingToPay`, `HoldersMoving`.
    /// After the stop of trading, with the issue MATURED and no redemption recorded:
    /// `OperationsOpen`, `Unavailable` of the ledger, and `NothingToPay` for units that an
    /// operation moved meanwhile.
    pub async fn start_redemption(
        &self,
        meta: &RequestMeta,
        request: NewRedemption,
    ) -> Result<(IssueRedemption, bool), Error> {
        let instrument_id = request.instrument_id.as_str();
        if let Some(known) = self.repo.redemption_of_instrument(instrument_id).await? {
            if known.idempotency_key == meta.idempotency_key {
                return Ok((known, true));
            }
            if known.status != RedemptionStatus::Failed {
                return Err(Refusal::RedemptionExists.into());
            }
            if known.tx_hash.is_none() {
                let instrument = self.require_instrument(instrument_id).await?;
                record_date(&instrument, &request, self.clock.now_us())?;
            }
            return Ok((self.restart_redemption(meta, known).await?, false));
        }
        let instrument = self.require_instrument(instrument_id).await?;
        if instrument.instrument_id == CFA_RUB
            || matches!(
                instrument.status,
                InstrumentStatus::Draft | InstrumentStatus::Redeemed
            )
        {
            return Err(Refusal::InstrumentNotActive.into());
        }
        let record_date_us = record_date(&instrument, &request, self.clock.now_us())?;
        let placement = self.repo.placement(instrument_id).await?;
        if placement.is_some_and(|placement| placement.is_under_way()) {
            return Err(Refusal::PlacementUnderWay.into());
        }
        // The snapshot is at the end of the record day (R099).
        let cut_off_us = plan::end_of_day_us(record_date_us);
        self.payments_due(&instrument, cut_off_us).await?;
        self.stop_trading(meta, instrument).await?;
        self.wait_for_moving(instrument_id, request.wait).await?;
        self.end_sales(instrument_id).await?;
        let instrument = self.require_instrument(instrument_id).await?;
        let (lines, total_minor) = self.payments_due(&instrument, cut_off_us).await?;
        if let Some(unknown) = lines.iter().find(|line| line.user_id.is_empty()) {
            tracing::warn!(
                address = unknown.address,
                instrument_id,
                "holder without a user id is paid only on the chain"
            );
        }
        let redemption = IssueRedemption {
            redemption_id: derived::issue_redemption(instrument_id).to_string(),
            instrument_id: instrument_id.to_owned(),
            reason: request.reason,
            status: RedemptionStatus::Snapshot,
            record_date_us,
            total_minor,
            lines,
            parts_done: 0,
            attempt: 0,
            coupon_number: 0,
            tx_hash: None,
            idempotency_key: meta.idempotency_key.clone(),
            created_at_us: self.now_us(),
            finalized_at_us: None,
        };
        self.record_redemption(meta, &redemption).await?;
        Ok((self.drive_redemption_best_effort(redemption).await?, false))
    }

    /// # Errors
    /// `RedemptionExists` if another call has recorded one; `OperationsOpen` if the coupon of the
    /// record day has a payment of its own already: it is a past day, the next call takes today.
    async fn record_redemption(
        &self,
        meta: &RequestMeta,
        redemption: &IssueRedemption,
    ) -> Result<(), Error> {
        let instrument_id = redemption.instrument_id.as_str();
        let mut tx = self.repo.begin().await?;
        if !self
            .repo
            .insert_redemption_in_tx(&mut tx, redemption)
            .await?
        {
            return Err(Refusal::RedemptionExists.into());
        }
        let (first_us, last_us) = plan::day_us(redemption.record_date_us);
        let ends = (self.repo).end_coupons_in_tx(&mut tx, instrument_id, first_us, last_us);
        if !ends.await? {
            return Err(Refusal::OperationsOpen.into());
        }
        let record = publish::audit(
            "redemption.started",
            &redemption.instrument_id,
            &meta.actor,
            "",
            redemption.status.as_str(),
            redemption.reason.as_str(),
            &meta.correlation_id,
            redemption.created_at_us,
        );
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        Ok(tx.commit().await?)
    }

    /// The payment of each holder at the end of the record day, and the sum. Units that were
    /// redeemed alone since are left out.
    async fn payments_due(
        &self,
        instrument: &Instrument,
        cut_off_us: i64,
    ) -> Result<(Vec<RedemptionLine>, i64), Error> {
        let nominal = instrument.nominal.ok_or(Refusal::NominalMissing)?;
        self.catch_up_registry().await?;
        // If trading stopped by the cut-off, takes the current holders: operations open at the stop
        // may have become final after it, and none was added since.
        let stopped_in_time = instrument.status == InstrumentStatus::Matured
            && instrument.updated_at_us <= cut_off_us;
        let at_us = (!stopped_in_time).then_some(cut_off_us);
        let mut holders = self.all_holders(instrument, at_us).await?;
        // Current holders have no burned units.
        if at_us.is_some() {
            self.leave_out_redeemed(&instrument.instrument_id, &mut holders)
                .await?;
        }
        let too_large = |_| Refusal::field("instrument_id", "amounts are too large");
        let worth =
            plan::worth_per_unit(nominal, &instrument.coupons, cut_off_us).map_err(too_large)?;
        let (lines, total_minor) =
            plan::redemption(&holders, instrument.decimals, worth).map_err(too_large)?;
        if total_minor == 0 && self.has_holders(instrument).await? {
            return Err(Refusal::NothingToPay.into());
        }
        Ok((lines, total_minor))
    }

    /// Subtracts the units that redemptions of single units have burned after the record day, and
    /// removes the holders without others.
    async fn leave_out_redeemed(
        &self,
        instrument_id: &str,
        holders: &mut Vec<Holder>,
    ) -> Result<(), Error> {
        for read in holders.chunks_mut(HOLDERS_PER_READ) {
            let redeemed = self.repo.redeemed_after(instrument_id, read).await?;
            for holder in read {
                let units_minor = redeemed.get(&holder.user_id).copied();
                holder.units_minor -= units_minor.unwrap_or_default();
            }
        }
        // Below zero if the holder received units after the record day and redeemed them too.
        holders.retain(|holder| holder.units_minor > 0);
        Ok(())
    }

    async fn has_holders(&self, instrument: &Instrument) -> Result<bool, Error> {
        let holders = self.all_holders(instrument, None).await?;
        Ok(!holders.is_empty())
    }

    async fn restart_redemption(
        &self,
        meta: &RequestMeta,
        mut redemption: IssueRedemption,
    ) -> Result<IssueRedemption, Error> {
        let before = redemption.status.as_str();
        redemption.status = redemption.restarted();
        redemption.attempt += 1;
        redemption.idempotency_key = meta.idempotency_key.clone();
        let mut tx = self.repo.begin().await?;
        if !self
            .repo
            .restart_redemption_in_tx(&mut tx, &redemption)
            .await?
        {
            return Err(Refusal::RedemptionExists.into());
        }
        let record = publish::audit(
            "redemption.restarted",
            &redemption.instrument_id,
            &meta.actor,
            before,
            redemption.status.as_str(),
            redemption.reason.as_str(),
            &meta.correlation_id,
            self.now_us(),
        );
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        tx.commit().await?;
        self.drive_redemption_best_effort(redemption).await
    }

    async fn drive_redemption_best_effort(
        &self,
        redemption: IssueRedemption,
    ) -> Result<IssueRedemption, Error> {
        let redemption_id = &redemption.redemption_id;
        let driven = self.drive_redemption(redemption_id);
        // The sweep has no deadline.
        let wait = rpc::time_left().map_or(Duration::MAX, |_| call_wait());
        // The end of the wait cancels a step as a crash would: every step is idempotent.
        match tokio::time::timeout(wait, driven).await {
            Ok(Ok(redemption)) => return Ok(redemption),
            Ok(Err(error)) => {
                tracing::warn!(redemption_id, %error, "redemption is left to the sweep");
            }
            Err(_) => tracing::info!(redemption_id, "redemption under way is left to the sweep"),
        }
        let stored = self.repo.redemption_head(redemption_id).await?;
        Ok(stored.unwrap_or(redemption))
    }

    async fn stop_trading(&self, meta: &RequestMeta, instrument: Instrument) -> Result<(), Error> {
        let _lock = self.object_locks.lock(&instrument.instrument_id).await;
        let mut instrument = self.require_instrument(&instrument.instrument_id).await?;
        if instrument.status == InstrumentStatus::Matured {
            return Ok(());
        }
        // Another caller may have ended the issue meanwhile.
        if !instrument.status.may_become(InstrumentStatus::Matured) {
            return Err(Refusal::InstrumentNotActive.into());
        }
        self.require_not_moving(&instrument.instrument_id).await?;
        instrument.status = InstrumentStatus::Matured;
        instrument.updated_at_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        self.repo
            .publish_in_tx(
                &mut tx,
                &[publish::instrument_updated(
                    &instrument,
                    &meta.correlation_id,
                )],
            )
            .await?;
        Ok(tx.commit().await?)
    }

    /// Waits until no open operation moves units of the issue. Trading has stopped, so none is
    /// added except trades that the market matched before it received the stop.
    ///
    /// # Errors
    /// `OperationsOpen` after `wait`.
    async fn wait_for_moving(&self, instrument_id: &str, wait: Duration) -> Result<(), Error> {
        let part = health_part(instrument_id);
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let open = self.repo.count_moving(instrument_id).await?;
            if open == 0 {
                self.health.set_ok(&part);
                return Ok(());
            }
            if tokio::time::Instant::now() >= deadline {
                self.health
                    .set_failing(&part, format!("waits for {open} open operations"));
                return Err(Refusal::OperationsOpen.into());
            }
            tokio::time::sleep(MOVING_POLL).await;
        }
    }

    /// Executes steps of a redemption until it waits or ends.
    pub async fn drive_redemption(&self, redemption_id: &str) -> Result<IssueRedemption, Error> {
        let _lock = self.object_locks.lock(redemption_id).await;
        let mut redemption = self
            .repo
            .redemption_head(redemption_id)
            .await?
            .ok_or(Refusal::RedemptionNotFound)?;
        let instrument = self.require_instrument(&redemption.instrument_id).await?;
        let is_open = !matches!(
            redemption.status,
            RedemptionStatus::Finalized | RedemptionStatus::Failed
        );
        // The total was 0 when it was recorded. Units may have been issued since.
        if is_open && redemption.total_minor == 0 {
            self.catch_up_registry().await?;
        }
        if is_open && redemption.total_minor == 0 && self.has_holders(&instrument).await? {
            self.fail(&mut redemption, "units would be burned without payment")
                .await?;
        }
        self.run(&mut redemption, &instrument).await?;
        Ok(redemption)
    }

    /// Ends the redemption as FINALIZED and the issue as REDEEMED.
    pub(super) async fn finish(
        &self,
        redemption: &mut IssueRedemption,
        instrument_id: &str,
    ) -> Result<(), Error> {
        let now_us = self.now_us();
        // The instrument may have changed since the part was distributed.
        let _lock = self.object_locks.lock(instrument_id).await;
        let mut instrument = self.require_instrument(instrument_id).await?;
        instrument.status = InstrumentStatus::Redeemed;
        instrument.updated_at_us = now_us;
        redemption.status = RedemptionStatus::Finalized;
        redemption.finalized_at_us = Some(now_us);
        let mut tx = self.repo.begin().await?;
        self.repo.save_redemption_in_tx(&mut tx, redemption).await?;
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        let events = [
            publish::instrument_updated(&instrument, &redemption.redemption_id),
            publish::audit(
                "redemption.finalized",
                &instrument.instrument_id,
                &instrument.issuer_id,
                RedemptionStatus::Submitted.as_str(),
                redemption.status.as_str(),
                redemption.reason.as_str(),
                &redemption.redemption_id,
                now_us,
            ),
        ];
        self.repo.publish_in_tx(&mut tx, &events).await?;
        Ok(tx.commit().await?)
    }

    /// Starts the redemptions of matured issues (R097).
    pub(super) async fn start_due_redemptions(&self) -> Result<(), Error> {
        for instrument in self.repo.due_instruments(self.clock.now_us()).await? {
            let meta = RequestMeta {
                idempotency_key: format!("maturity:{}", instrument.instrument_id),
                correlation_id: format!("maturity:{}", instrument.instrument_id),
                actor: "cfa".into(),
                digest: 0,
            };
            let request = NewRedemption {
                instrument_id: instrument.instrument_id.clone(),
                record_date_us: instrument.matures_at_us,
                reason: RedemptionReason::Maturity,
                may_be_early: false,
                // The next sweep retries.
                wait: Duration::ZERO,
            };
            let started = self.start_redemption(&meta, request).await;
            log_failure("maturity", &instrument.instrument_id, started.map(|_| ()));
        }
        Ok(())
    }

    /// Reports issues that wait for StartRedemption to health: trading has stopped before maturity,
    /// so no sweep redeems them.
    pub(super) async fn report_unrecorded(&self) -> Result<(), Error> {
        let unrecorded = self
            .repo
            .unrecorded_redemptions(self.clock.now_us())
            .await?;
        let parts: BTreeSet<String> = unrecorded.iter().map(|id| health_part(id)).collect();
        for (part, reason) in self.health.failing() {
            if reason == NOT_RECORDED && !parts.contains(&part) {
                self.health.set_ok(&part);
            }
        }
        for part in parts {
            self.health.set_failing(&part, NOT_RECORDED);
        }
        Ok(())
    }
}

pub(super) fn health_part(instrument_id: &str) -> String {
    format!("redemption of {instrument_id}")
}

/// The record date: a time in the day of maturity, or before maturity in the current day (issues
/// have no call terms yet).
fn record_date(
    instrument: &Instrument,
    request: &NewRedemption,
    now_us: i64,
) -> Result<i64, Refusal> {
    let matured_us = instrument
        .matures_at_us
        .filter(|_| instrument.is_mature(now_us));
    if matured_us.is_none() && !request.may_be_early {
        return Err(Refusal::NotMatured);
    }
    let due_us = matured_us.unwrap_or(now_us);
    match request.record_date_us {
        None => Ok(due_us),
        Some(asked_us) if plan::is_same_day(asked_us, due_us) => Ok(asked_us),
        Some(_) => Err(Refusal::field(
            "record_date",
            match matured_us {
                Some(_) => "must be the day of maturity (Moscow time)",
                None => "must be the current day (Moscow time) before maturity",
            },
        )),
    }
}
