//! Distribution of money to the holders of an issue, in parts: its redemption, or a coupon.
//!
//! 1. The issuer's CFA-RUB moves to the redemption account, in the ledger and on the chain. Without
//!    enough money the distribution stays UNDERFUNDED and is retried (R101). Until then a sweep
//!    reads the issuer's balance and not the holders.
//! 2. In parts of up to `PART` holders, the ledger posts payments and burns, the contract
//!    distributes and burns, and the ledger is finalized. A coupon burns nothing.
//! 3. Holders are notified (R103).
//!
//! A holder whose operation the ledger refuses, for example because an order holds the units, is
//! deferred and delays no other holder. The market is asked to release the units of deferred
//! holders' trading holds (`hold`). The distribution ends when all are served. One that failed
//! because the chain reverted a step can be restarted under another key. Completed parts stay.
//!
//! Each step has a key or id that follows from the distribution, its attempt and the holder, and
//! the contract accepts each part once, so a repeat after a crash pays no holder twice.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use service_clients::OperationType;
use service_clients::ledger::{Operation as LedgerOperation, Posting};
use types::{Amount, Decimal, Minor, derived, subaccount};

use super::drive::count_ended;
use super::proceeds::release_steps;
use super::{Service, maturity, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CFA_RUB, CFA_RUB_DECIMALS, EnforcementAct, Instrument, IssueRedemption, Operation,
    REDEMPTION_ACCOUNT, REVERTED_MESSAGE, RedemptionLine, RedemptionStatus, Rejection, Status,
};
use crate::peers;
use crate::repo::Inserted;
use crate::saga::Chain;
use chain::{Action, Address, Payout, Receipt, ReceiptStatus};

/// Holders per chain transaction.
const PART: usize = 100;
const RECEIPT_WAIT: Duration = Duration::from_secs(20);

impl Service {
    /// Reads the lines and executes steps of a distribution until it waits or ends. The caller
    /// holds its lock.
    pub(super) async fn run(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        if self.lacks_money(redemption, instrument).await? {
            return Ok(());
        }
        self.repo.read_lines(redemption).await?;
        let (mut refused, mut waiting) = (BTreeSet::new(), VecDeque::new());
        loop {
            match redemption.status {
                RedemptionStatus::Snapshot | RedemptionStatus::Underfunded => {
                    if !self.fund(redemption, instrument).await? {
                        return Ok(());
                    }
                }
                RedemptionStatus::Funded | RedemptionStatus::Submitted => {
                    let advanced = self
                        .distribute(redemption, instrument, &mut refused, &mut waiting)
                        .await?;
                    if !advanced {
                        return Ok(());
                    }
                }
                RedemptionStatus::Finalized | RedemptionStatus::Failed => return Ok(()),
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

    /// Whether a distribution that waits for money still lacks it.
    async fn lacks_money(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
    ) -> Result<bool, Error> {
        if redemption.status != RedemptionStatus::Underfunded {
            return Ok(false);
        }
        let (correlation_id, issuer_id) = (&redemption.redemption_id, &instrument.issuer_id);
        let available = self.peers.available_money(correlation_id, issuer_id);
        Ok(available.await? < redemption.total_minor)
    }

    /// Moves the issuer's money to the redemption account. False if the issuer lacks it (R101).
    async fn fund(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
    ) -> Result<bool, Error> {
        let id = attempt_key(format!("{}:fund", redemption.redemption_id), redemption);
        if redemption.total_minor > 0 {
            // Stored before the money moves. The comparison of chain and ledger expects no change
            // of one that waits for money, and its next drive would not find the money.
            let earlier = redemption.status;
            if earlier == RedemptionStatus::Underfunded {
                redemption.status = RedemptionStatus::Snapshot;
                self.save_redemption(redemption, &[]).await?;
            }
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
                    self.report_shortage(redemption, instrument).await?;
                    return Ok(false);
                }
                Err(error) => {
                    // Refused for another reason: no money moves, so it still waits for it.
                    if !error.is_transient() && earlier == RedemptionStatus::Underfunded {
                        redemption.status = earlier;
                        self.save_redemption(redemption, &[]).await?;
                    }
                    return Err(error);
                }
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

    /// Records that the issuer lacks the money.
    async fn report_shortage(
        &self,
        redemption: &mut IssueRedemption,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        tracing::error!(
            redemption_id = redemption.redemption_id,
            instrument_id = redemption.instrument_id,
            coupon = redemption.coupon_number,
            needed_minor = redemption.total_minor,
            severity = "critical",
            "issuer lacks the money for a distribution: fund the issuer's CFA-RUB"
        );
        let record = publish::audit(
            &format!("{}.underfunded", redemption.subject()),
            &redemption.instrument_id,
            &instrument.issuer_id,
            redemption.status.as_str(),
            RedemptionStatus::Underfunded.as_str(),
            &redemption.coupon_text(),
            &redemption.redemption_id,
            self.now_us(),
        );
        redemption.status = RedemptionStatus::Underfunded;
        self.save_redemption(redemption, &[record]).await
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

    pub(super) async fn fail(
        &self,
        redemption: &mut IssueRedemption,
        why: &str,
    ) -> Result<(), Error> {
        let record = self.failed(redemption, why);
        self.save_redemption(redemption, &[record]).await
    }

    /// Sets the status FAILED. Returns the audit record; the caller stores both.
    fn failed(&self, redemption: &mut IssueRedemption, why: &str) -> events::Event {
        tracing::error!(
            redemption_id = redemption.redemption_id,
            why,
            severity = "critical",
            "distribution failed"
        );
        let before = redemption.status.as_str();
        redemption.status = RedemptionStatus::Failed;
        publish::audit(
            &format!("{}.failed", redemption.subject()),
            &redemption.instrument_id,
            "",
            before,
            redemption.status.as_str(),
            why,
            &redemption.redemption_id,
            self.now_us(),
        )
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
            .open_part_operations(&redemption.redemption_id)
            .await?;
        if !left.is_empty() {
            return Ok(left);
        }
        if !redemption.is_coupon() {
            self.catch_up_registry().await?;
        }
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
            let part = match redemption.is_coupon() {
                // Holders of the record date are paid, whatever they hold now.
                true => part,
                false => {
                    self.unchanged(redemption, instrument, part, refused)
                        .await?
                }
            };
            let rows = self.record_part(redemption, instrument, &part).await?;
            if !rows.is_empty() {
                return Ok(rows);
            }
        }
    }

    /// The holders of a part that still have the units of the snapshot. Adds the others to
    /// `refused`.
    async fn unchanged(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        part: Vec<RedemptionLine>,
        refused: &mut BTreeSet<String>,
    ) -> Result<Vec<RedemptionLine>, Error> {
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
        Ok(part)
    }

    /// The holders that are neither served nor in `refused`: those of the snapshot, and for a
    /// redemption others that have units now, whose line has none.
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
        if !redemption.is_coupon() {
            self.add_late_holders(redemption, instrument, &mut lines)
                .await?;
        }
        // Holders of a reverted part are served again after a restart of the distribution.
        let kind = redemption.flow().kind();
        let served = self
            .repo
            .served_holders(kind, &redemption.redemption_id)
            .await?;
        let is_waiting = |line: &RedemptionLine| {
            let reference = reference_of(redemption, line);
            !served.contains(&reference) && !refused.contains(&reference)
        };
        Ok(lines.into_values().filter(is_waiting).collect())
    }

    /// Adds holders that have units now and none in the snapshot.
    async fn add_late_holders(
        &self,
        redemption: &IssueRedemption,
        instrument: &Instrument,
        lines: &mut BTreeMap<String, RedemptionLine>,
    ) -> Result<(), Error> {
        let holders = self.all_holders(instrument, None).await?;
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
        Ok(())
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
                Inserted::Exists(stored)
                    if stored.operation_id == operation.operation_id
                        && stored.status != Status::Rejected => {}
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
            if !redemption.is_coupon() {
                let users = users_of(redemption, refused);
                let (id, issue) = (&redemption.redemption_id, &instrument.instrument_id);
                self.release_trading_units(id, issue, &users).await;
            }
            return Ok(false);
        }
        if rows.is_empty() {
            match redemption.is_coupon() {
                true => self.finish_coupon(redemption).await?,
                false => self.finish(redemption, &instrument.instrument_id).await?,
            }
            self.health.set_ok(&health_part(redemption));
            return Ok(true);
        }
        // A coupon takes no units.
        let freezes = match redemption.is_coupon() {
            true => Vec::new(),
            false => self.freezes_of(instrument, &rows).await?,
        };
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
                "ledger refuses the operation of a holder"
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
        self.end_posted(redemption, &ledger_operations(&rows, instrument)?, &receipt)
            .await?;
        self.end_part(redemption, instrument, rows, freezes, &receipt)
            .await
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
            "holders cannot be paid yet"
        );
        let part = health_part(redemption);
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

    /// Stores the result of a part: its operations, events and metrics. A reverted part ends the
    /// distribution as FAILED.
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
                    if !redemption.is_coupon() {
                        events.push(publish::redeemed(operation));
                    }
                    if operation.payment_minor > 0 {
                        events.push(publish::notification(redemption, operation, now_us));
                    }
                }
            }
            self.repo.save_operation_in_tx(&mut tx, operation).await?;
        }
        redemption.tx_hash = Some(receipt.tx_hash.to_string());
        // With the end of its operations: a distribution that goes on takes them for served.
        match is_redeemed {
            true => redemption.parts_done += 1,
            false => events.push(self.failed(redemption, "distribution reverted")),
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

/// Users of the lines with these references.
fn users_of(redemption: &IssueRedemption, references: &BTreeSet<String>) -> Vec<String> {
    let is_of = |line: &&RedemptionLine| {
        !line.user_id.is_empty() && references.contains(&reference_of(redemption, line))
    };
    let lines = redemption.lines.iter().filter(is_of);
    lines.map(|line| line.user_id.clone()).collect()
}

/// Name of a distribution in the health read.
fn health_part(redemption: &IssueRedemption) -> String {
    match redemption.coupon_number {
        0 => maturity::health_part(&redemption.instrument_id),
        number => format!("coupon {number} of {}", redemption.instrument_id),
    }
}

/// The operation that pays a holder, and for a redemption burns the units, in the current attempt.
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
        redemption.flow(),
        user_id,
        &operation_id,
        &redemption.redemption_id,
        now_us,
    );
    operation.operation_id = operation_id;
    if redemption.is_coupon() {
        operation.amount = Decimal::from_minor(line.payment_minor, CFA_RUB_DECIMALS);
        operation.currency_code = CFA_RUB.to_owned();
        operation.to_user_id = user_id.clone();
    } else {
        operation.amount = Decimal::from_minor(line.units_minor, instrument.decimals);
        operation.units_minor = line.units_minor;
        operation.currency_code = instrument.instrument_id.clone();
        operation.from_user_id = user_id.clone();
    }
    operation.instrument_id = instrument.instrument_id.clone();
    operation.external_ref = reference;
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
    // A user id may have the format of an address (T14).
    let address = operation.external_ref.rsplit(':').next();
    let has_account = address != Some(user_id);
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
