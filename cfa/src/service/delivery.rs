//! Delivery of a placement's units against the payments (F34), after the allotment.
//!
//! 1. MINT: all allotted units are issued to the placement account, in the ledger and on chain.
//! 2. DELIVER: in parts of up to `PART` subscriptions, one ledger transaction moves each payment
//!    out of its hold to the placement account, the units to the investor, and releases what the
//!    hold has more. One chain transaction exchanges both, each subscription alone. Then the
//!    ledger's operations become final.
//! 3. PAY: the raised money moves from the placement account to the issuer.
//! 4. BURN: units that could not be delivered are burned. An investor whose payment the ledger
//!    refuses, for example because the account is frozen, or whose exchange the contract leaves
//!    out, gets none, and the payment is available again.
//!
//! A step's chain transaction has a key of its own, so a repeat finds it. The contracts accept the
//! issue, each exchange and the burn once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use service_clients::OperationType;
use service_clients::ledger::{HoldChange, HoldStep, Operation as LedgerOperation, Posting};
use types::{Amount, Decimal, Id128, Minor, derived, subaccount};

use super::drive::{count_ended, limit_end};
use super::placements::correlation;
use super::{Service, unsigned};
use crate::api::publish;
use crate::error::Error;
use crate::failpoint;
use crate::model::{
    CFA_RUB, Flow, Instrument, Offer, OfferStatus, Operation, PLACEMENT_ACCOUNT, Rejection, Status,
};
use crate::peers::{self, SOURCE};
use crate::placement::{Placement, Stage};
use crate::repo::Inserted;
use crate::saga::Chain;
use chain::{Action, Address, Receipt, ReceiptStatus, Trade};

/// Subscriptions per ledger and chain transaction.
const PART: i64 = 100;
/// Number of a placement's first exchange at the settlement contract. The market's trades count
/// from 1.
const FIRST_NUMBER: u64 = 1 << 63;
const RECEIPT_WAIT: Duration = Duration::from_secs(20);
const LEFT_OUT_MESSAGE: &str = "Exchange left out by the settlement contract";
/// Reason in the ledger of the part of a payment that is not allotted.
const REST: &str = "Not allotted";

impl Service {
    /// Issues the allotted units to the placement account.
    pub(super) async fn mint_placed(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        let users = [PLACEMENT_ACCOUNT, instrument.issuer_id.as_str()];
        let correlation_id = correlation(&instrument.instrument_id);
        self.ensure_registered(&users, &correlation_id).await?;
        let id = step_id(instrument, "mint");
        let posting = Posting {
            debit: subaccount::reserve(&instrument.instrument_id),
            credit: subaccount::of_user(PLACEMENT_ACCOUNT, &instrument.instrument_id),
            amount: peers::units(instrument, placement.allotted_minor)?,
            hold: None,
            unsettled: true,
        };
        self.post_step(instrument, &id, OperationType::Issuance, posting)
            .await?;
        failpoint::reach(failpoint::PLACEMENT_MINT_POSTED);
        let action = Action::IssueAgainstPayment {
            settlement: self.contracts.settlement,
            id: id.clone(),
            token: self.token(instrument)?,
            investor: Address::of_user(PLACEMENT_ACCOUNT),
            units: unsigned(placement.allotted_minor),
            issuer: Address::of_user(&instrument.issuer_id),
            payment: 0,
        };
        let receipt = self.send_step(&mut placement, &id, &action).await?;
        failpoint::reach(failpoint::PLACEMENT_MINTED);
        self.end_placement_step(placement, &id, &receipt).await
    }

    /// Delivers the next part, or ends the delivery.
    pub(super) async fn deliver_part(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        let Some(rows) = self.record_delivered_part(&placement, instrument).await? else {
            let before = placement.stage;
            placement.stage = placement.next_stage();
            return self.save_placement(&placement, before, &[]).await;
        };
        failpoint::reach(failpoint::PLACEMENT_PART_RECORDED);
        let rows = self.post_part_of(&placement, instrument, rows).await?;
        if rows.is_empty() {
            placement.parts_done += 1;
            return self.save_placement(&placement, Stage::Deliver, &[]).await;
        }
        let receipt = self
            .exchange_part(&mut placement, instrument, &rows)
            .await?;
        failpoint::reach(failpoint::PLACEMENT_PART_EXCHANGED);
        let left_out: BTreeSet<u64> = receipt
            .failed_trades
            .iter()
            .map(|failed| failed.number)
            .collect();
        let is_left_out = |row: &Row| left_out.contains(&row.number);
        let (failed, done): (Vec<_>, Vec<_>) = rows.into_iter().partition(is_left_out);
        let correlation_id = correlation(&instrument.instrument_id);
        for row in &failed {
            let id = &row.operation.operation_id;
            let reversed = self.peers.reverse(&correlation_id, id, LEFT_OUT_MESSAGE);
            reversed.await?;
        }
        if !done.is_empty() {
            let ids = done.iter().map(|row| row.operation.operation_id.clone());
            let (ids, tx_hash) = (ids.collect::<Vec<_>>(), receipt.tx_hash.to_string());
            self.peers.finalize(&correlation_id, &ids, &tx_hash).await?;
        }
        failpoint::reach(failpoint::PLACEMENT_PART_FINAL);
        self.end_delivered(placement, done, failed, &receipt).await
    }

    /// Exchanges the units and payments of a part on chain.
    async fn exchange_part(
        &self,
        placement: &mut Placement,
        instrument: &Instrument,
        rows: &[Row],
    ) -> Result<Receipt, Error> {
        let users: BTreeSet<&str> = rows
            .iter()
            .map(|row| row.operation.user_id.as_str())
            .collect();
        let users: Vec<&str> = users.into_iter().collect();
        self.ensure_registered(&users, &correlation(&instrument.instrument_id))
            .await?;
        let id = step_id(instrument, &format!("part-{}", placement.parts_done));
        let token = self.token(instrument)?;
        let trades = rows.iter().map(|row| Trade {
            token,
            number: row.number,
            buyer: Address::of_user(&row.operation.user_id),
            seller: Address::of_user(PLACEMENT_ACCOUNT),
            quantity: unsigned(row.operation.units_minor),
            payment: unsigned(row.operation.payment_minor),
            fee: 0,
        });
        let action = Action::SettleTrades {
            settlement: self.contracts.settlement,
            id: id.clone(),
            trades: trades.collect(),
        };
        self.send_step(placement, &id, &action).await
    }

    /// Stores the operations of the next part, once, and returns those that have not ended. `None`
    /// if there is no further part.
    async fn record_delivered_part(
        &self,
        placement: &Placement,
        instrument: &Instrument,
    ) -> Result<Option<Vec<Row>>, Error> {
        let after = placement.parts_done * PART;
        let offers = self
            .repo
            .allotted(&placement.instrument_id, after, after + PART)
            .await?;
        if offers.is_empty() {
            return Ok(None);
        }
        let now_us = self.now_us();
        let mut rows = Vec::with_capacity(offers.len());
        let mut records = Vec::new();
        let mut tx = self.repo.begin().await?;
        for offer in &offers {
            let operation = operation_of(offer, instrument, now_us)?;
            let (id, used) = (&offer.offer_id, operation.operation_id.clone());
            let inserted = self.repo.insert_operation_in_tx(&mut tx, &operation);
            let operation = match inserted.await? {
                Inserted::Exists(stored) => *stored,
                Inserted::Done => {
                    self.repo.assign_operation_in_tx(&mut tx, id, &used).await?;
                    records.push(publish::audit(
                        "subscription.used",
                        id,
                        SOURCE,
                        OfferStatus::Active.as_str(),
                        OfferStatus::Used.as_str(),
                        &used,
                        &offer.correlation_id,
                        now_us,
                    ));
                    operation
                }
            };
            if operation.operation_id != used {
                let stored = operation.operation_id;
                let what = format!("subscription {id} belongs to operation {stored}");
                return Err(Error::Damaged(what));
            }
            let number = FIRST_NUMBER + unsigned(offer.allotted_number) as u64;
            rows.push(Row { operation, number });
        }
        self.repo.publish_in_tx(&mut tx, &records).await?;
        tx.commit().await?;
        rows.retain(|row| !row.operation.status.is_terminal());
        Ok(Some(rows))
    }

    /// Posts a part in the ledger and stores the result. Returns the posted operations. A refused
    /// one ends as REJECTED.
    async fn post_part_of(
        &self,
        placement: &Placement,
        instrument: &Instrument,
        mut rows: Vec<Row>,
    ) -> Result<Vec<Row>, Error> {
        let unposted = rows.iter().filter(|row| !row.operation.progress.gated);
        let unposted = unposted.map(|row| delivery(&row.operation, instrument));
        let unposted = unposted.collect::<Result<Vec<_>, _>>()?;
        let refused = self
            .post_deliveries(placement, instrument, unposted)
            .await?;
        failpoint::reach(failpoint::PLACEMENT_PART_POSTED);
        let now_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        let operations = rows.iter_mut().map(|row| &mut row.operation);
        for operation in operations.filter(|operation| !operation.progress.gated) {
            match refused.get(&operation.operation_id) {
                None => {
                    operation.progress.gated = true;
                    operation.set_status(Status::Processing, now_us);
                }
                Some(why) => {
                    tracing::error!(
                        instrument_id = operation.instrument_id,
                        user_id = operation.user_id,
                        why,
                        "ledger refuses an allotment"
                    );
                    operation.rejection = Some((Rejection::IntegrationError, why.clone()));
                    operation.set_status(Status::Rejected, now_us);
                    let (action, before) = ("issuance.rejected", Status::Created);
                    self.conclude_delivery_in_tx(&mut tx, operation, action, before)
                        .await?;
                }
            }
            self.repo.save_operation_in_tx(&mut tx, operation).await?;
        }
        tx.commit().await?;
        let (refused, rows): (Vec<_>, Vec<_>) = rows
            .into_iter()
            .partition(|row| row.operation.status.is_terminal());
        refused.iter().for_each(|row| count_ended(&row.operation));
        Ok(rows)
    }

    /// Posts deliveries together. If the ledger refuses them, halves them until the refused ones
    /// are alone. Returns the reason of each refused operation by its id.
    ///
    /// # Errors
    /// Everything but a refusal. A repeat continues.
    async fn post_deliveries(
        &self,
        placement: &Placement,
        instrument: &Instrument,
        deliveries: Vec<(LedgerOperation, Id128)>,
    ) -> Result<BTreeMap<String, String>, Error> {
        let correlation_id = correlation(&placement.instrument_id);
        let scales = [(instrument.instrument_id.clone(), instrument.decimals)];
        let mut refused = BTreeMap::new();
        let mut open = vec![deliveries.as_slice()];
        while let Some(part) = open.pop() {
            if part.is_empty() {
                continue;
            }
            let operations: Vec<_> = part.iter().map(|(posted, _)| posted.clone()).collect();
            // What the payment leaves of its hold is released. Such a step does nothing on a hold
            // that has ended, so a repeated part changes nothing.
            let rests = part
                .iter()
                .zip(1..)
                .map(|((_, hold), before_operation)| HoldStep {
                    before_operation,
                    hold: *hold,
                    change: HoldChange::Shrink,
                    amount: None,
                    reason: REST.to_owned(),
                });
            let posted =
                self.peers
                    .post_with_steps(&correlation_id, &operations, rests.collect(), &scales);
            match posted.await {
                Ok(()) => {}
                Err(error) if !is_refusal(&error) => return Err(error),
                Err(error) if part.len() == 1 => {
                    refused.insert(part[0].0.operation_id.clone(), error.to_string());
                }
                Err(_) => {
                    let (first, second) = part.split_at(part.len() / 2);
                    open.extend([second, first]);
                }
            }
        }
        Ok(refused)
    }

    /// Stores the results of a part.
    async fn end_delivered(
        &self,
        mut placement: Placement,
        done: Vec<Row>,
        failed: Vec<Row>,
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let now_us = self.now_us();
        let mut ended = Vec::with_capacity(done.len() + failed.len());
        let mut tx = self.repo.begin().await?;
        let done = done.into_iter().map(|row| (row.operation, true));
        let failed = failed.into_iter().map(|row| (row.operation, false));
        for (mut row, is_done) in done.chain(failed) {
            row.tx_hash = Some(receipt.tx_hash.to_string());
            row.block_number = Some(receipt.block_number);
            row.set_status(Status::OnchainSubmitted, now_us);
            if is_done {
                row.progress.chain = Chain::Succeeded;
                row.progress.settled = true;
                row.set_status(Status::Finalized, now_us);
                placement.issued_minor += row.units_minor;
                placement.raised_minor += row.payment_minor;
            } else {
                row.progress.chain = Chain::Reverted;
                row.progress.undone = true;
                row.rejection = Some((Rejection::IntegrationError, LEFT_OUT_MESSAGE.to_owned()));
                row.set_status(Status::Failed, now_us);
            }
            let action = match is_done {
                true => "issuance.finalized",
                false => "issuance.failed",
            };
            self.conclude_delivery_in_tx(&mut tx, &row, action, Status::OnchainSubmitted)
                .await?;
            self.repo.save_operation_in_tx(&mut tx, &row).await?;
            ended.push(row);
        }
        placement.parts_done += 1;
        placement.attempts = 0;
        self.save_placement_in_tx(&mut tx, &placement, Stage::Deliver)
            .await?;
        tx.commit().await?;
        ended.iter().for_each(count_ended);
        Ok(())
    }

    /// Publishes the end of a delivery and ends the reservation of its subscription, and without a
    /// delivery the subscription.
    async fn conclude_delivery_in_tx(
        &self,
        tx: &mut events::Tx,
        row: &Operation,
        action: &str,
        before: Status,
    ) -> Result<(), Error> {
        let message = row.rejection.as_ref().map(|(_, message)| message.as_str());
        let event = match message {
            None => publish::issued(row),
            Some(message) => publish::issuance_failed(row, message),
        };
        let id = &row.operation_id;
        let mut events = vec![event, publish::audit_end(row, action, before.as_str())];
        if let Some(message) = message {
            // Its hold has the payment, unless the ledger had posted it.
            let is_held = row.status == Status::Rejected;
            self.repo
                .return_allotted_in_tx(tx, id, is_held, row.updated_at_us)
                .await?;
            events.push(publish::audit(
                "subscription.not_allotted",
                &row.external_ref,
                SOURCE,
                OfferStatus::Used.as_str(),
                OfferStatus::NotAllotted.as_str(),
                message,
                &row.correlation_id,
                row.updated_at_us,
            ));
        }
        self.repo.publish_in_tx(tx, &events).await?;
        let end = limit_end(message.is_none());
        self.repo.end_limit_of_in_tx(tx, id, end).await
    }

    /// Pays the raised money to the issuer.
    pub(super) async fn pay_issuer(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        if placement.raised_minor == 0 {
            let before = placement.stage;
            placement.stage = placement.next_stage();
            return self.save_placement(&placement, before, &[]).await;
        }
        let id = step_id(instrument, "pay");
        let posting = Posting {
            debit: subaccount::of_user(PLACEMENT_ACCOUNT, CFA_RUB),
            credit: subaccount::of_user(&instrument.issuer_id, CFA_RUB),
            amount: Amount::rubles(Minor(placement.raised_minor)),
            hold: None,
            unsettled: true,
        };
        self.post_step(instrument, &id, OperationType::Payment, posting)
            .await?;
        let action = Action::Transfer {
            token: self.contracts.money,
            from: Address::of_user(PLACEMENT_ACCOUNT),
            to: Address::of_user(&instrument.issuer_id),
            units: unsigned(placement.raised_minor),
        };
        let receipt = self.send_step(&mut placement, &id, &action).await?;
        failpoint::reach(failpoint::PLACEMENT_PAID);
        self.end_placement_step(placement, &id, &receipt).await
    }

    /// Burns what could not be delivered, and ends the placement.
    pub(super) async fn burn_undelivered(
        &self,
        mut placement: Placement,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        let rest_minor = placement.allotted_minor - placement.issued_minor;
        if rest_minor > 0 {
            let id = step_id(instrument, "burn");
            let posting = Posting {
                debit: subaccount::of_user(PLACEMENT_ACCOUNT, &instrument.instrument_id),
                credit: subaccount::reserve(&instrument.instrument_id),
                amount: peers::units(instrument, rest_minor)?,
                hold: None,
                unsettled: false,
            };
            self.post_step(instrument, &id, OperationType::Redemption, posting)
                .await?;
            let action = Action::Distribute {
                redemption: self.contracts.redemption,
                id: id.clone(),
                part: 0,
                token: self.token(instrument)?,
                account: Address::of_user(PLACEMENT_ACCOUNT),
                payouts: vec![chain::Payout {
                    holder: Address::of_user(PLACEMENT_ACCOUNT),
                    units: unsigned(rest_minor),
                    payment: 0,
                }],
            };
            let receipt = self.send_step(&mut placement, &id, &action).await?;
            let correlation_id = correlation(&instrument.instrument_id);
            let tx_hash = receipt.tx_hash.to_string();
            self.peers
                .finalize(&correlation_id, &[id], &tx_hash)
                .await?;
        }
        self.finish_placement(placement, rest_minor).await
    }

    /// Ends a placement. One that has delivered nothing has failed.
    async fn finish_placement(
        &self,
        mut placement: Placement,
        rest_minor: i64,
    ) -> Result<(), Error> {
        let id = placement.instrument_id.clone();
        let _lock = self.object_locks.lock(&id).await;
        let instrument = self.require_instrument(&id).await?;
        let before = placement.stage;
        placement.stage = placement.next_stage();
        placement.attempts = 0;
        placement.failed = placement.issued_minor == 0;
        let reason = match placement.failed {
            true => "no units could be delivered",
            false => "",
        };
        let mut tx = self.repo.begin().await?;
        if rest_minor > 0 {
            self.repo
                .unreserve_issue_in_tx(&mut tx, &id, rest_minor)
                .await?;
        }
        let action = format!("placement.{}", placement.status().as_str().to_lowercase());
        let mut events = vec![
            self.audit_placement(&placement, &action, SOURCE, reason),
            self.closed_event(&placement, instrument.decimals, reason),
        ];
        if placement.failed {
            events.extend(self.fail_issue_in_tx(&mut tx, instrument).await?);
        }
        self.save_placement_in_tx(&mut tx, &placement, before)
            .await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        Ok(tx.commit().await?)
    }

    /// Posts the ledger operation of a step, once. Its id is also its key.
    async fn post_step(
        &self,
        instrument: &Instrument,
        id: &str,
        kind: OperationType,
        posting: Posting,
    ) -> Result<(), Error> {
        let scales = [(instrument.instrument_id.clone(), instrument.decimals)];
        let operation = peers::operation(id, kind, &instrument.issuer_id, vec![posting]);
        let correlation_id = correlation(&instrument.instrument_id);
        self.peers
            .post(&correlation_id, &[operation], &scales)
            .await
    }

    /// Submits the chain transaction of a step and waits for its receipt. A reverted one is
    /// counted, and the next round retries it under another key.
    async fn send_step(
        &self,
        placement: &mut Placement,
        id: &str,
        action: &Action,
    ) -> Result<Receipt, Error> {
        let key = match placement.attempts {
            0 => id.to_owned(),
            attempts => format!("{id}:{attempts}"),
        };
        let submitted = self.chain.submit(&key, &action.call()).await?;
        let receipt = self.chain.wait_receipt(&submitted.tx_hash, RECEIPT_WAIT);
        let receipt = receipt.await?.ok_or(Error::Unavailable("Blockchain"))?;
        if receipt.status == ReceiptStatus::Reverted {
            tracing::error!(
                instrument_id = placement.instrument_id,
                step = id,
                tx_hash = %receipt.tx_hash,
                severity = "critical",
                "a placement's transaction reverted, retrying up to cfa.submit_attempts_max"
            );
            placement.attempts += 1;
            let stage = placement.stage;
            self.save_placement(placement, stage, &[]).await?;
            return Err(Error::Unavailable("Blockchain"));
        }
        Ok(receipt)
    }

    /// Finalizes the ledger operation of a step and stores the next stage.
    async fn end_placement_step(
        &self,
        mut placement: Placement,
        id: &str,
        receipt: &Receipt,
    ) -> Result<(), Error> {
        let correlation_id = correlation(&placement.instrument_id);
        let tx_hash = receipt.tx_hash.to_string();
        self.peers
            .finalize(&correlation_id, &[id.to_owned()], &tx_hash)
            .await?;
        let before = placement.stage;
        placement.stage = placement.next_stage();
        placement.attempts = 0;
        self.save_placement(&placement, before, &[]).await
    }
}

/// Whether the ledger refuses the operation itself.
fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Peer(_)) && !error.is_credential_refused()
}

/// An allotment that is being delivered.
struct Row {
    operation: Operation,
    /// Number of its exchange at the settlement contract.
    number: u64,
}

/// Id of a step's ledger operation, and key of its chain transaction.
fn step_id(instrument: &Instrument, step: &str) -> String {
    format!("placement:{}:{step}", instrument.instrument_id)
}

/// The operation that delivers an allotment.
fn operation_of(offer: &Offer, instrument: &Instrument, now_us: i64) -> Result<Operation, Error> {
    let parent = Id128::parse(&offer.offer_id);
    let parent = parent.ok_or_else(|| Error::Damaged("subscription id".to_owned()))?;
    let id = derived::allotment(parent).to_string();
    let (user_id, correlation_id) = (&offer.user_id, &offer.correlation_id);
    let mut operation = Operation::new(Flow::Placement, user_id, &id, correlation_id, now_us);
    operation.operation_id = id;
    operation.amount = Decimal::from_minor(offer.allotted_minor, instrument.decimals);
    operation.units_minor = offer.allotted_minor;
    operation.currency_code = instrument.instrument_id.clone();
    operation.instrument_id = instrument.instrument_id.clone();
    operation.external_ref = offer.offer_id.clone();
    operation.bookbuilding_id = correlation(&instrument.instrument_id);
    operation.payment_minor = offer.allotted_payment_minor;
    operation.to_user_id = user_id.clone();
    operation.hold_id = Some(derived::offer_hold(&offer.offer_id).to_string());
    Ok(operation)
}

/// The ledger operation of a delivery, and the hold that pays.
fn delivery(
    operation: &Operation,
    instrument: &Instrument,
) -> Result<(LedgerOperation, Id128), Error> {
    let hold = peers::hold_id(operation.hold_id.as_deref())?;
    let (of, user_id) = (subaccount::of_user, operation.user_id.as_str());
    let payment = Posting {
        debit: of(user_id, CFA_RUB),
        credit: of(PLACEMENT_ACCOUNT, CFA_RUB),
        amount: Amount::rubles(Minor(operation.payment_minor)),
        hold: Some(hold),
        unsettled: true,
    };
    let units = Posting {
        debit: of(PLACEMENT_ACCOUNT, &instrument.instrument_id),
        credit: of(user_id, &instrument.instrument_id),
        amount: peers::units(instrument, operation.units_minor)?,
        hold: None,
        unsettled: true,
    };
    let (id, kind) = (&operation.operation_id, operation.flow.kind());
    let posted = peers::operation(id, kind, user_id, vec![payment, units]);
    Ok((posted, hold))
}
