//! Redemption of a whole issue at maturity or by call (specification 1.5).
//!
//! 0. Checks before any change: the issue has a nominal, the record date is the day of maturity
//!    (before maturity: the current day, by an operator's call), and the payment is not zero while
//!    there are units.
//! 1. The issue stops trading (MATURED). The call waits until open operations of the issue are
//!    final, because they may move units. Holders' offers to sell units end, because they hold
//!    units.
//! 2. The holders at the record date are read from the registry and their payments computed.
//! 3. The issuer's CFA-RUB moves to the redemption account, in the ledger and on the chain. Without
//!    enough money the redemption stays UNDERFUNDED and is retried.
//! 4. In parts of up to `PART` holders, the ledger posts payments and burns, the contract
//!    distributes and burns, and the ledger is finalized.
//! 5. Holders are notified.
//!
//! A holder whose operation the ledger refuses, for example because an order holds the units, is
//! deferred and delays no other holder. The redemption ends when all are served. A redemption that
//! failed because the chain reverted a step can be restarted under another key. Completed parts
//! stay.
//!
//! Holders at the end of the record day are paid. If trading stopped by then, these are the current
//! holders of step 2. A trade that settlement resends or that arrives late can move units after
//! step 2. Its parties are not paid, and their units not burned, until an operator resolves the
//! difference.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use service_clients::OperationType;
use service_clients::ledger::{Operation as LedgerOperation, Posting};
use types::{Amount, Decimal, Minor, derived, subaccount};

use super::drive::count_ended;
use super::proceeds::release_steps;
use super::workers::log_failure;
use super::{RequestMeta, Service, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CFA_RUB, EnforcementAct, Flow, Instrument, InstrumentStatus, IssueRedemption, Operation,
    REDEMPTION_ACCOUNT, REVERTED_MESSAGE, RedemptionLine, RedemptionReason, RedemptionStatus,
    Rejection, Status,
};
use crate::peers;
use crate::plan;
use crate::repo::Inserted;
use crate::saga::Chain;
use chain::{Action, Address, Payout, Receipt, ReceiptStatus};

/// Holders per chain transaction.
const PART: usize = 100;
const RECEIPT_WAIT: Duration = Duration::from_secs(20);
/// Polling interval for the issue's open operations.
const MOVING_POLL: Duration = Duration::from_millis(50);
const NOT_RECORDED: &str = "trading has stopped and no redemption is recorded: start it again";

/// Arguments of `start_redemption`.
#[derive(Debug, Clone)]
pub struct NewRedemption {
    pub instrument_id: String,
    /// Unset: the day of maturity, or before maturity the current day.
    pub record_date_us: Option<i64>,
    pub reason: RedemptionReason,
    /// The caller may redeem before maturity.
    pub may_be_early: bool,
    /// Longest wait of the call for the issue's open operations.
    pub wait: Duration,
}

impl Service {
    /// Starts the redemption of an issue, or restarts a failed one under a new key. A repeat of the
    /// key returns the stored redemption and true.
    ///
    /// # Errors
    /// Before any change: `RedemptionExists`, `InstrumentNotActive`, `NominalMissing`,
    /// `NotMatured`, a refused `record_date`, `PlacementUnderWay`, `NothingToPay`. After the stop
    /// of trading, with the issue MATURED and no redemption recorded: `OperationsOpen`,
    /// `Unavailable` of the ledger, and `NothingToPay` for units that an operation moved meanwhile.
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
            tx_hash: None,
            idempotency_key: meta.idempotency_key.clone(),
            created_at_us: self.now_us(),
            finalized_at_us: None,
        };
        self.record_redemption(meta, &redemption).await?;
        Ok((self.drive_redemption_best_effort(redemption).await?, false))
    }

    /// # Errors
    /// `RedemptionExists` if another call has recorded one.
    async fn record_redemption(
        &self,
        meta: &RequestMeta,
        redemption: &IssueRedemption,
    ) -> Result<(), Error> {
        let mut tx = self.repo.begin().await?;
        if !self
            .repo
            .insert_redemption_in_tx(&mut tx, redemption)
            .await?
        {
            return Err(Refusal::RedemptionExists.into());
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

    /// The payment of each holder at the end of the record day, and the sum.
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
        let holders = self
            .all_holders(&instrument.contract_address, at_us)
            .await?;
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

    async fn has_holders(&self, instrument: &Instrument) -> Result<bool, Error> {
        let holders = self.all_holders(&instrument.contract_address, None).await?;
        Ok(!holders.is_empty())
    }

    async fn restart_redemption(
        &self,
        meta: &RequestMeta,
        mut redemption: IssueRedemption,
    ) -> Result<IssueRedemption, Error> {
        let before = redemption.status.as_str();
        // A part was submitted, so the redemption is funded.
        redemption.status = if redemption.tx_hash.is_some() {
            RedemptionStatus::Funded
        } else {
            RedemptionStatus::Snapshot
        };
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
        match self.drive_redemption(&redemption.redemption_id).await {
            Ok(redemption) => Ok(redemption),
            Err(error) => {
                tracing::warn!(redemption_id = redemption.redemption_id, %error, "redemption is left to the sweep");
                Ok(self
                    .repo
                    .redemption(&redemption.redemption_id)
                    .await?
                    .unwrap_or(redemption))
            }
        }
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
            .redemption(redemption_id)
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
        let (mut refused, mut waiting) = (BTreeSet::new(), VecDeque::new());
        loop {
            match redemption.status {
                RedemptionStatus::Snapshot | RedemptionStatus::Underfunded => {
                    if !self.fund(&mut redemption, &instrument).await? {
                        return Ok(redemption);
                    }
                }
                RedemptionStatus::Funded | RedemptionStatus::Submitted => {
                    let advanced = self
                        .distribute(&mut redemption, &instrument, &mut refused, &mut waiting)
                        .await?;
                    if !advanced {
                        return Ok(redemption);
                    }
                }
                RedemptionStatus::Finalized | RedemptionStatus::Failed => return Ok(redemption),
            }
        }
    }

    async fn save_redemption(
        &self,
        redemption: &IssueRedemption,
        events: &[events::Event],
    ) -> Result<(), Error> {
        let mut tx = self.repo.begin().await?;
        self.repo.save_redemption_in_tx(&mut tx, redemption).await?;
        self.repo.publish_in_tx(&mut tx, events).await?;
        Ok(tx.commit().await?)
    }

    /// Moves the issuer's money to the redemption account. False if the issuer lacks it (R101).
    async fn fund(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
    ) -> Result<bool, Error> {
        let id = attempt_key(format!("{}:fund", redemption.redemption_id), redemption);
        if redemption.total_minor > 0 {
            let posting = Posting {
                debit: subaccount::of_user(&instrument.issuer_id, CFA_RUB),
                credit: subaccount::of_user(REDEMPTION_ACCOUNT, CFA_RUB),
                amount: Amount::rubles(Minor(redemption.total_minor)),
                hold: None,
                unsettled: false,
            };
            let operation = peers::operation(
                &id,
                OperationType::Payment,
                &instrument.issuer_id,
                vec![posting],
            );
            match self
                .peers
                .post(&redemption.redemption_id, &[operation], &[])
                .await
            {
                Ok(()) => {}
                Err(error) if error.is_shortage() => {
                    if redemption.status != RedemptionStatus::Underfunded {
                        tracing::error!(
                            redemption_id = redemption.redemption_id,
                            instrument_id = redemption.instrument_id,
                            needed_minor = redemption.total_minor,
                            severity = "critical",
                            "issuer lacks the money for the redemption: fund the issuer's CFA-RUB"
                        );
                        let record = publish::audit(
                            "redemption.underfunded",
                            &redemption.instrument_id,
                            &instrument.issuer_id,
                            redemption.status.as_str(),
                            RedemptionStatus::Underfunded.as_str(),
                            "",
                            &redemption.redemption_id,
                            self.now_us(),
                        );
                        redemption.status = RedemptionStatus::Underfunded;
                        self.save_redemption(redemption, &[record]).await?;
                    }
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
            let action = Action::Transfer {
                token: self.contracts.money,
                from: Address::of_user(&instrument.issuer_id),
                to: Address::of_user(REDEMPTION_ACCOUNT),
                units: unsigned(redemption.total_minor),
            };
            let receipt = self.send_and_wait(&id, &action).await?;
            if receipt.status == ReceiptStatus::Reverted {
                self.peers
                    .reverse(&redemption.redemption_id, &id, REVERTED_MESSAGE)
                    .await?;
                return self
                    .fail(redemption, "funding reverted")
                    .await
                    .map(|()| true);
            }
            self.peers
                .finalize(
                    &redemption.redemption_id,
                    &[id],
                    &receipt.tx_hash.to_string(),
                )
                .await?;
        }
        redemption.status = RedemptionStatus::Funded;
        self.save_redemption(redemption, &[]).await?;
        Ok(true)
    }

    async fn send_and_wait(&self, key: &str, action: &Action) -> Result<Receipt, Error> {
        let submitted = self.chain.submit(key, &action.call()).await?;
        failpoint::reach(failpoint::REDEMPTION_SUBMITTED);
        let receipt = self
            .chain
            .wait_receipt(&submitted.tx_hash, RECEIPT_WAIT)
            .await?
            .ok_or(Error::Unavailable("Blockchain"))?;
        failpoint::reach(failpoint::REDEMPTION_STEP);
        Ok(receipt)
    }

    async fn fail(&self, redemption: &mut IssueRedemption, why: &str) -> Result<(), Error> {
        tracing::error!(
            redemption_id = redemption.redemption_id,
            why,
            severity = "critical",
            "redemption failed"
        );
        let before = redemption.status.as_str();
        redemption.status = RedemptionStatus::Failed;
        let id = redemption.redemption_id.clone();
        let record = publish::audit(
            "redemption.failed",
            &redemption.instrument_id,
            "",
            before,
            redemption.status.as_str(),
            why,
            &id,
            self.now_us(),
        );
        self.save_redemption(redemption, &[record]).await
    }

    /// The operations of the next part. These are open ones left by a crash or an unavailable peer,
    /// or else new ones for holders that are neither served nor in `refused`. Adds holders whose
    /// units differ from their line to `refused`. `waiting` keeps the holders that are left between
    /// the parts of one drive, so the holders are read twice per drive and not once per part.
    async fn next_part(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        refused: &mut BTreeSet<String>,
        waiting: &mut VecDeque<RedemptionLine>,
    ) -> Result<Vec<Operation>, Error> {
        let left = self
            .repo
            .open_maturity_operations(&redemption.redemption_id)
            .await?;
        if !left.is_empty() {
            return Ok(left);
        }
        self.catch_up_registry().await?;
        let mut is_read = false;
        loop {
            if waiting.is_empty() {
                // A second reading finds holders that the first one of this drive did not.
                if is_read {
                    return Ok(Vec::new());
                }
                *waiting = self.waiting_lines(redemption, instrument, refused).await?;
                is_read = true;
            }
            let part: Vec<_> = waiting.drain(..PART.min(waiting.len())).collect();
            let addresses: Vec<&str> = part.iter().map(|line| line.address.as_str()).collect();
            let token = &instrument.contract_address;
            let held = self.repo.units_of(token, &addresses).await?;
            let is_changed = |line: &RedemptionLine| {
                held.get(&line.address).copied().unwrap_or_default() != line.units_minor
            };
            let (changed, part): (Vec<_>, Vec<_>) = part.into_iter().partition(is_changed);
            for line in changed {
                tracing::error!(
                    redemption_id = redemption.redemption_id,
                    address = line.address,
                    recorded_minor = line.units_minor,
                    held_minor = held.get(&line.address).copied().unwrap_or_default(),
                    "units of a holder changed after the redemption was recorded: resolve the difference"
                );
                refused.insert(reference_of(redemption, &line));
            }
            let rows = self.record_part(redemption, instrument, &part).await?;
            if !rows.is_empty() {
                return Ok(rows);
            }
        }
    }

    /// The holders that are neither served nor in `refused`: those of the redemption, and others
    /// that have units now, whose line has none.
    async fn waiting_lines(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        refused: &BTreeSet<String>,
    ) -> Result<VecDeque<RedemptionLine>, Error> {
        let mut lines: BTreeMap<String, RedemptionLine> = BTreeMap::new();
        for line in &redemption.lines {
            lines.insert(line.address.clone(), line.clone());
        }
        let holders = self.all_holders(&instrument.contract_address, None).await?;
        // The next drive ends the redemption as failed.
        if redemption.total_minor == 0 && !holders.is_empty() {
            return Err(Refusal::NothingToPay.into());
        }
        for holder in holders {
            lines
                .entry(holder.address.clone())
                .or_insert(RedemptionLine {
                    user_id: holder.user_id,
                    address: holder.address,
                    units_minor: 0,
                    payment_minor: 0,
                });
        }
        // Holders of a reverted part are served again after a restart of the redemption.
        let served = self.repo.served_holders(&redemption.redemption_id).await?;
        let is_waiting = |line: &RedemptionLine| {
            let reference = reference_of(redemption, line);
            !served.contains(&reference) && !refused.contains(&reference)
        };
        Ok(lines.into_values().filter(is_waiting).collect())
    }

    /// Stores an operation per line, and returns those that were not stored before.
    async fn record_part(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        part: &[RedemptionLine],
    ) -> Result<Vec<Operation>, Error> {
        let now_us = self.now_us();
        let mut rows = Vec::with_capacity(part.len());
        let mut tx = self.repo.begin().await?;
        for line in part {
            let operation = holder_operation(redemption, instrument, line, now_us);
            let inserted = self.repo.insert_operation_in_tx(&mut tx, &operation);
            match inserted.await? {
                Inserted::Done => rows.push(operation),
                Inserted::Exists(stored) if stored.operation_id == operation.operation_id => {}
                // Skipping the holder would end the redemption without the holder's payment.
                Inserted::Exists(stored) => {
                    return Err(Error::Damaged(format!(
                        "reference {} belongs to operation {}",
                        operation.external_ref, stored.operation_id
                    )));
                }
            }
        }
        tx.commit().await?;
        Ok(rows)
    }

    /// Distributes the next part, or ends the redemption if none is left. False if only refused
    /// holders are left.
    async fn distribute(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
        refused: &mut BTreeSet<String>,
        waiting: &mut VecDeque<RedemptionLine>,
    ) -> Result<bool, Error> {
        let next = self.next_part(redemption, instrument, refused, waiting);
        let rows = next.await?;
        if rows.is_empty() && !refused.is_empty() {
            self.report_refused(redemption, refused.len());
            return Ok(false);
        }
        if rows.is_empty() {
            self.finish(redemption, &instrument.instrument_id).await?;
            self.health.set_ok(&health_part(&redemption.instrument_id));
            return Ok(true);
        }
        let freezes = self.freezes_of(instrument, &rows).await?;
        let rows = self.post_rows(redemption, instrument, rows, &freezes, refused);
        let rows = rows.await?;
        if !rows.is_empty() {
            self.send_part(redemption, instrument, rows, &freezes)
                .await?;
        }
        Ok(true)
    }

    /// Posts the operations of a part. Returns those that the ledger has posted; deletes the others
    /// and adds their holders to `refused`.
    async fn post_rows(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        rows: Vec<Operation>,
        freezes: &[EnforcementAct],
        refused: &mut BTreeSet<String>,
    ) -> Result<Vec<Operation>, Error> {
        let operations = ledger_operations(&rows, instrument)?;
        if operations.is_empty() {
            return Ok(rows);
        }
        let scales = [(instrument.instrument_id.clone(), instrument.decimals)];
        let unposted = self
            .post_part(&redemption.redemption_id, &operations, freezes, &scales)
            .await?;
        if unposted.is_empty() {
            return Ok(rows);
        }
        let (left, posted): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .partition(|row| unposted.contains_key(&row.operation_id));
        for row in &left {
            tracing::error!(
                redemption_id = redemption.redemption_id,
                user_id = row.user_id,
                why = unposted[&row.operation_id],
                "ledger refuses to redeem a holder's units"
            );
        }
        self.delete_unposted(&left).await?;
        refused.extend(left.into_iter().map(|row| row.external_ref));
        Ok(posted)
    }

    /// Distributes a posted part on the chain and makes it final in the ledger.
    async fn send_part(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
        mut rows: Vec<Operation>,
        freezes: &[EnforcementAct],
    ) -> Result<(), Error> {
        let part = redemption.parts_done;
        redemption.status = RedemptionStatus::Submitted;
        let now_us = self.now_us();
        let mut payouts = Vec::with_capacity(rows.len());
        let mut tx = self.repo.begin().await?;
        self.repo.save_redemption_in_tx(&mut tx, redemption).await?;
        for row in &mut rows {
            row.progress.gated = true;
            if row.status == Status::Created {
                row.set_status(Status::Processing, now_us);
            }
            self.repo.save_operation_in_tx(&mut tx, row).await?;
            payouts.push(Payout {
                holder: holder_address(row)?,
                units: unsigned(row.units_minor),
                payment: unsigned(row.payment_minor),
            });
        }
        tx.commit().await?;
        let action = Action::Distribute {
            redemption: self.contracts.redemption,
            id: redemption.redemption_id.clone(),
            part,
            token: self.token(instrument)?,
            account: Address::of_user(REDEMPTION_ACCOUNT),
            payouts,
        };
        let name = format!("{}:part:{part}", redemption.redemption_id);
        let key = attempt_key(name, redemption);
        let receipt = self.send_and_wait(&key, &action).await?;
        let reverted = receipt.status == ReceiptStatus::Reverted;
        self.end_posted(redemption, &ledger_operations(&rows, instrument)?, &receipt)
            .await?;
        self.end_part(redemption, instrument, rows, freezes, &receipt)
            .await?;
        if reverted {
            self.fail(redemption, "distribution reverted").await?;
        }
        Ok(())
    }

    /// Makes the operations of a part final in the ledger, or reverses them with the chain.
    async fn end_posted(
        &self,
        redemption: &IssueRedemption,
        operations: &[LedgerOperation],
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let ids: Vec<_> = operations
            .iter()
            .map(|operation| operation.operation_id.clone())
            .collect();
        let correlation_id = &redemption.redemption_id;
        if receipt.status == ReceiptStatus::Reverted {
            for id in &ids {
                self.peers
                    .reverse(correlation_id, id, REVERTED_MESSAGE)
                    .await?;
            }
        } else if !ids.is_empty() {
            let tx_hash = receipt.tx_hash.to_string();
            self.peers.finalize(correlation_id, &ids, &tx_hash).await?;
        }
        Ok(())
    }

    fn report_refused(&self, redemption: &IssueRedemption, holders: usize) {
        tracing::error!(
            redemption_id = redemption.redemption_id,
            instrument_id = redemption.instrument_id,
            holders,
            severity = "critical",
            "holders of a redeemed issue cannot be paid yet"
        );
        let part = health_part(&redemption.instrument_id);
        let reason = format!("{holders} holders cannot be paid yet");
        self.health.set_failing(&part, reason);
    }

    /// Posts the operations of a part together, or one by one if the ledger refuses them together.
    /// Takes the units of `freezes` too. Returns the reason of each refused operation by its id.
    /// Does not use the ledger's independent mode, because it stores a refusal under the
    /// operation's key forever.
    async fn post_part(
        &self,
        correlation_id: &str,
        operations: &[LedgerOperation],
        freezes: &[EnforcementAct],
        scales: &[(String, u8)],
    ) -> Result<BTreeMap<String, String>, Error> {
        let mut refused = BTreeMap::new();
        let posted = self.post_redeeming(correlation_id, operations, freezes, scales);
        match posted.await {
            Ok(()) => {
                failpoint::reach(failpoint::PART_POSTED);
                return Ok(refused);
            }
            Err(error) if error.is_transient() => return Err(error),
            Err(_) => {}
        }
        for operation in operations {
            let alone = std::slice::from_ref(operation);
            let posted = self.post_redeeming(correlation_id, alone, freezes, scales);
            match posted.await {
                Ok(()) => {}
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    refused.insert(operation.operation_id.clone(), error.to_string());
                }
            }
        }
        Ok(refused)
    }

    async fn post_redeeming(
        &self,
        correlation_id: &str,
        operations: &[LedgerOperation],
        freezes: &[EnforcementAct],
        scales: &[(String, u8)],
    ) -> Result<(), Error> {
        let steps = release_steps(freezes, operations);
        let posted = self
            .peers
            .post_with_steps(correlation_id, operations, steps, scales);
        posted.await
    }

    /// Deletes operations that the ledger refused, for example because an order holds the units.
    /// The next drive recreates them with current amounts.
    async fn delete_unposted(&self, rows: &[Operation]) -> Result<(), Error> {
        let mut tx = self.repo.begin().await?;
        for row in rows {
            self.repo
                .delete_created_operation_in_tx(&mut tx, &row.operation_id)
                .await?;
        }
        Ok(tx.commit().await?)
    }

    /// Stores the result of a part: its operations, events and metrics.
    async fn end_part(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
        mut rows: Vec<Operation>,
        freezes: &[EnforcementAct],
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let taken = self.take_freezes(instrument, &rows, freezes).await?;
        let now_us = self.now_us();
        let is_redeemed = receipt.status == ReceiptStatus::Success;
        let mut tx = self.repo.begin().await?;
        let (mut events, frozen) = self
            .replace_freezes_in_tx(&mut tx, &taken, instrument, &rows, is_redeemed)
            .await?;
        for operation in &mut rows {
            operation.tx_hash = Some(receipt.tx_hash.to_string());
            operation.block_number = Some(receipt.block_number);
            operation.set_status(Status::OnchainSubmitted, now_us);
            match receipt.status {
                ReceiptStatus::Reverted => {
                    operation.progress.chain = Chain::Reverted;
                    operation.progress.undone = true;
                    operation.rejection =
                        Some((Rejection::IntegrationError, REVERTED_MESSAGE.to_owned()));
                    operation.set_status(Status::Rejected, now_us);
                }
                ReceiptStatus::Success => {
                    operation.progress.chain = Chain::Succeeded;
                    operation.progress.settled = true;
                    operation.set_status(Status::Finalized, now_us);
                    events.push(publish::redeemed(operation));
                    if operation.payment_minor > 0 {
                        events.push(publish::notification(redemption, operation, now_us));
                    }
                }
            }
            self.repo.save_operation_in_tx(&mut tx, operation).await?;
        }
        redemption.tx_hash = Some(receipt.tx_hash.to_string());
        if is_redeemed {
            redemption.parts_done += 1;
        }
        self.repo.save_redemption_in_tx(&mut tx, redemption).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        drop(taken);
        self.freeze_replaced(&frozen).await;
        failpoint::reach(failpoint::PART_ENDED);
        rows.iter().for_each(count_ended);
        Ok(())
    }

    /// Ends the redemption as FINALIZED and the issue as REDEEMED.
    async fn finish(
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

fn health_part(instrument_id: &str) -> String {
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

/// The key or id of a step in the current attempt. The first attempt has no suffix.
fn attempt_key(name: String, redemption: &IssueRedemption) -> String {
    match redemption.attempt {
        0 => name,
        attempt => format!("{name}:try-{attempt}"),
    }
}

fn reference_of(redemption: &IssueRedemption, line: &RedemptionLine) -> String {
    format!("{}:{}", redemption.redemption_id, line.address)
}

/// The operation that pays a holder and burns the units, in the current attempt.
fn holder_operation(
    redemption: &IssueRedemption,
    instrument: &Instrument,
    line: &RedemptionLine,
    now_us: i64,
) -> Operation {
    let reference = reference_of(redemption, line);
    let name = attempt_key(reference.clone(), redemption);
    let operation_id = derived::holder_redemption(&name).to_string();
    // A holder without a user id is served only on the chain.
    let user_id = if line.user_id.is_empty() {
        &line.address
    } else {
        &line.user_id
    };
    let mut operation = Operation::new(
        Flow::Maturity,
        user_id,
        &operation_id,
        &redemption.redemption_id,
        now_us,
    );
    operation.operation_id = operation_id;
    operation.amount = Decimal::from_minor(line.units_minor, instrument.decimals);
    operation.units_minor = line.units_minor;
    operation.currency_code = instrument.instrument_id.clone();
    operation.instrument_id = instrument.instrument_id.clone();
    operation.external_ref = reference;
    operation.from_user_id = user_id.clone();
    operation.payment_minor = line.payment_minor;
    operation
}

/// The holder's address, which is the end of the operation's reference.
fn holder_address(operation: &Operation) -> Result<Address, Error> {
    let address = operation
        .external_ref
        .rsplit(':')
        .next()
        .unwrap_or_default();
    address
        .parse()
        .map_err(|_| Error::Damaged("holder address".into()))
}

/// The ledger operations of a part, without those that have no postings.
fn ledger_operations(
    rows: &[Operation],
    instrument: &Instrument,
) -> Result<Vec<LedgerOperation>, Error> {
    let made = rows.iter().map(|row| ledger_operation(row, instrument));
    let mut operations = made.collect::<Result<Vec<_>, _>>()?;
    operations.retain(|operation| !operation.postings.is_empty());
    Ok(operations)
}

/// The ledger operation of a holder's payment and burn. Without postings for a holder without a
/// user id.
fn ledger_operation(
    operation: &Operation,
    instrument: &Instrument,
) -> Result<LedgerOperation, Error> {
    let user_id = &operation.user_id;
    let has_account = user_id.parse::<Address>().is_err();
    let mut postings = Vec::new();
    if has_account && operation.payment_minor > 0 {
        postings.push(Posting {
            debit: subaccount::of_user(REDEMPTION_ACCOUNT, CFA_RUB),
            credit: subaccount::of_user(user_id, CFA_RUB),
            amount: Amount::rubles(Minor(operation.payment_minor)),
            hold: None,
            unsettled: true,
        });
    }
    if has_account && operation.units_minor > 0 {
        postings.push(Posting {
            debit: subaccount::of_user(user_id, &instrument.instrument_id),
            credit: subaccount::reserve(&instrument.instrument_id),
            amount: peers::units(instrument, operation.units_minor)?,
            hold: None,
            unsettled: false,
        });
    }
    let (id, kind) = (&operation.operation_id, operation.flow.kind());
    Ok(peers::operation(id, kind, user_id, postings))
}
