//! Executes the steps of an operation until it waits for an event or ends.
//!
//! One worker at a time drives an operation. The progress of a step is stored after its execution,
//! so a crash between the two repeats the step. This is safe, because the keys of ledger
//! operations, payouts and chain submissions derive from the operation's id.

use events::{Event, Tx};
use futures::{StreamExt, stream};
use service_clients::ledger::{Operation as LedgerOperation, Posting};
use service_clients::{CallError, OperationType, PaymentStatus, caused_by};
use types::{Amount, Minor, derived, subaccount};

use super::workers::log_failure;
use super::{PEER_CALLS, Service, call_wait, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    BatchStatus, CFA_RUB, Flow, Instrument, OfferLimit, Operation, PAYOUT_FAILED_MESSAGE,
    REVERTED_MESSAGE, Rejection, Status, SuspendedDeposit,
};
use crate::peers::{self, MARKET};
use crate::saga::{self, Chain, End, LimitReservation, Payout, Step};
use chain::{Action, Address, ChainError, ReceiptStatus, TxHash};

const REFUSED_MESSAGE: &str = "Blockchain refused the transaction";
/// Limit of reservations that a sweep ends.
const LIMITS_PER_SWEEP: i64 = 500;
const REFUNDED_MESSAGE: &str = "Redemption was refunded";
/// Reason that the ledger records when a refused limit undoes an operation.
const LIMIT_REFUSED: &str = "Limit refused";

impl Service {
    /// Executes steps until none is possible and returns the operation. An error leaves it
    /// unchanged for the next sweep.
    pub async fn drive(&self, operation_id: &str) -> Result<Operation, Error> {
        let _lock = self.object_locks.lock(operation_id).await;
        let operation = self
            .repo
            .operation(operation_id)
            .await?
            .ok_or(Refusal::OperationNotFound)?;
        self.drive_held(operation).await
    }

    /// Like `drive`; the caller holds the operation's lock.
    async fn drive_held(&self, mut operation: Operation) -> Result<Operation, Error> {
        while !operation.status.is_terminal() && !is_driven_elsewhere(operation.flow) {
            let step = saga::next(
                operation.flow,
                operation.trade_id.is_empty(),
                &operation.progress,
            );
            match step {
                Step::Wait => break,
                // The sweep releases it later.
                Step::ReleasePayout if self.is_money_broken() => break,
                Step::Gate => self.gate(&mut operation).await?,
                Step::ReserveLimit => self.reserve_limit(&mut operation).await?,
                Step::SendChain => self.send_chain(&mut operation).await?,
                Step::StartPayout => self.start_payout(&mut operation).await?,
                Step::ReleasePayout => self.release_payout(&mut operation).await?,
                Step::CancelPayout => self.cancel_payout(&mut operation).await?,
                Step::FindBurn => self.find_burn(&mut operation).await?,
                Step::AbandonRefund => self.abandon_refund(&mut operation).await?,
                Step::Settle => self.settle_gate(&mut operation).await?,
                Step::MintBack => self.mint_back(&mut operation).await?,
                Step::Undo => self.undo(&mut operation).await?,
                Step::End(end) => self.end(&mut operation, end).await?,
            }
        }
        Ok(operation)
    }

    /// Like `drive`, but leaves a failed step to the sweep and returns the operation as stored.
    pub(super) async fn drive_best_effort(&self, operation: Operation) -> Result<Operation, Error> {
        match self.drive(&operation.operation_id).await {
            Ok(operation) => Ok(operation),
            // Trading money is not available yet and the operation has no effect: the caller
            // retries.
            Err(error @ Error::Unavailable(MARKET)) => {
                let _lock = self.object_locks.lock(&operation.operation_id).await;
                if self.delete_unexecuted(&operation).await? {
                    return Err(error);
                }
                let advanced = self.repo.operation(&operation.operation_id).await?;
                advanced.ok_or(error)
            }
            Err(error)
                if error.is_transient()
                    || matches!(error, Error::Chain(ChainError::Refused(_))) =>
            {
                tracing::warn!(operation_id = operation.operation_id, %error, "operation is left to the sweep");
                Ok(self
                    .repo
                    .operation(&operation.operation_id)
                    .await?
                    .unwrap_or(operation))
            }
            Err(error) => Err(error),
        }
    }

    async fn save(&self, operation: &mut Operation) -> Result<(), Error> {
        operation.updated_at_us = self.now_us();
        self.repo.save_operation(operation).await
    }

    /// Reserves the money or units before the chain moves them. A refusal deletes the operation.
    async fn gate(&self, operation: &mut Operation) -> Result<(), Error> {
        let gated = if operation.flow == Flow::RedeemRub {
            let hold_id = derived::redemption_hold(&operation.operation_id);
            let held = self.hold_redemption(operation, hold_id).await;
            operation.hold_id = Some(hold_id.to_string());
            held
        } else {
            let posted = self.ledger_operation(operation).await?;
            let instrument = self.require_instrument(&operation.instrument_id).await?;
            let scales = [(instrument.instrument_id, instrument.decimals)];
            self.peers
                .post(&operation.correlation_id, &[posted], &scales)
                .await
        };
        match gated {
            Ok(()) => failpoint::reach(failpoint::GATED),
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                self.delete_unexecuted(operation).await?;
                // A user without any units yet has no sub-account, but gets the same refusal.
                let has_no_account = error.has_reason("SUB_ACCOUNT_NOT_FOUND");
                return Err(if has_no_account {
                    Refusal::InsufficientBalance.into()
                } else {
                    error
                });
            }
        }
        operation.progress.gated = true;
        operation.set_status(Status::Processing, self.now_us());
        self.repo.save_operation(operation).await
    }

    /// Deletes an operation that has no effect yet. False if it has advanced meanwhile.
    async fn delete_unexecuted(&self, operation: &Operation) -> Result<bool, Error> {
        let mut tx = self.repo.begin().await?;
        let deleted = self
            .repo
            .delete_created_operation_in_tx(&mut tx, &operation.operation_id)
            .await?;
        if deleted {
            self.restore_offer_in_tx(&mut tx, operation).await?;
        }
        if deleted && operation.flow == Flow::ForceTransfer {
            self.delete_transfer_act_in_tx(&mut tx, operation).await?;
        }
        if deleted && operation.flow == Flow::IssueInvestment {
            self.repo
                .unreserve_issue_in_tx(&mut tx, &operation.instrument_id, operation.units_minor)
                .await?;
        }
        tx.commit().await?;
        Ok(deleted)
    }

    /// Reserves the amount in the user's day limit (T24). This answer decides, not that of
    /// CheckLimits before: it also counts what other operations have reserved meanwhile.
    async fn reserve_limit(&self, operation: &mut Operation) -> Result<(), Error> {
        operation.rejection = self.peers.reserve_limit(operation).await?;
        operation.progress.limit = match operation.rejection {
            None => LimitReservation::Reserved,
            Some(_) => LimitReservation::Refused,
        };
        failpoint::reach(match operation.progress.limit {
            LimitReservation::Refused => failpoint::LIMIT_REFUSED,
            _ => failpoint::LIMIT_RESERVED,
        });
        self.save(operation).await
    }

    /// Confirms or cancels the oldest reservations of ended operations. Only the sweep calls this,
    /// so the end of an operation does not wait for identity.
    pub(super) async fn end_limits(&self) -> Result<(), Error> {
        let operations = self.repo.unended_limits(LIMITS_PER_SWEEP).await?;
        let open = operations.len();
        let calls = stream::iter(operations).map(|operation| async move {
            let ended = self.peers.end_limit(&operation).await;
            (operation.operation_id, ended)
        });
        let answers: Vec<_> = calls.buffer_unordered(PEER_CALLS).collect().await;
        let (mut ended, mut failing) = (Vec::new(), None);
        for (operation_id, answer) in answers {
            match answer {
                Ok(()) => ended.push(operation_id),
                // Identity has no open reservation with this id.
                Err(error)
                    if error.is_not_found()
                        || error.reason().as_deref() == Some("RESERVATION_ENDED") =>
                {
                    tracing::error!(
                        operation_id,
                        error = error.describe(),
                        "limit reservation is unknown to identity or already ended"
                    );
                    ended.push(operation_id);
                }
                Err(error) => failing = Some(error.describe()),
            }
        }
        if !ended.is_empty() {
            failpoint::reach(failpoint::LIMITS_ENDED);
        }
        self.repo.end_limits(&ended).await?;
        let left = open - ended.len();
        let reason = failing.map(|reason| format!("{left} reservations cannot be ended: {reason}"));
        self.health.set("limit reservations", reason.as_deref());
        Ok(())
    }

    /// The ledger postings that mirror the chain action (T18).
    async fn ledger_operation(&self, operation: &Operation) -> Result<LedgerOperation, Error> {
        let instrument = self.require_instrument(&operation.instrument_id).await?;
        let amount = peers::units(&instrument, operation.units_minor)?;
        let units = |debit: String, credit: String, unsettled| Posting {
            debit,
            credit,
            amount,
            hold: None,
            unsettled,
        };
        let money = |debit: String, credit: String, kopecks| Posting {
            debit,
            credit,
            amount: Amount::rubles(Minor(kopecks)),
            hold: None,
            unsettled: true,
        };
        let of = subaccount::of_user;
        let reserve = subaccount::reserve(&instrument.instrument_id);
        let mut postings = Vec::new();
        match operation.flow {
            Flow::IssueInvestment => {
                if operation.payment_minor > 0 {
                    postings.extend(payment_postings(operation, &instrument.issuer_id)?);
                }
                postings.push(units(
                    reserve,
                    of(&operation.user_id, &instrument.instrument_id),
                    true,
                ));
            }
            Flow::RedeemInvestment => {
                if operation.payment_minor > 0 {
                    postings.push(money(
                        of(&instrument.issuer_id, CFA_RUB),
                        of(&operation.user_id, CFA_RUB),
                        operation.payment_minor,
                    ));
                }
                let account = of(&operation.user_id, &instrument.instrument_id);
                // Without an offer's hold at maturity, and if recorded before offers existed.
                let hold = operation.hold_id.as_deref();
                let hold = hold.map(|id| peers::hold_id(Some(id))).transpose()?;
                postings.push(Posting {
                    hold,
                    ..units(account, reserve, false)
                });
            }
            Flow::Transfer | Flow::ForceTransfer => {
                require_unpaid(operation)?;
                let account = |user_id: &str| of(user_id, &instrument.instrument_id);
                // Of the freeze whose units a forced transfer takes.
                let hold = operation.hold_id.as_deref();
                let hold = hold.map(|id| peers::hold_id(Some(id))).transpose()?;
                let (from, to) = (&operation.from_user_id, &operation.to_user_id);
                postings.push(Posting {
                    hold,
                    ..units(account(from), account(to), true)
                });
            }
            flow => unreachable!("{} has no ledger operation of its own", flow.as_str()),
        }
        let (id, kind) = (&operation.operation_id, operation.flow.kind());
        Ok(peers::operation(id, kind, &operation.user_id, postings))
    }

    /// The operation's chain action, and the users that must be on the allow-list for it.
    fn action(
        &self,
        operation: &Operation,
        instrument: &Instrument,
    ) -> Result<(Action, Vec<String>), Error> {
        let token = self.token(instrument)?;
        let user = Address::of_user(&operation.user_id);
        let units = unsigned(operation.units_minor);
        let id = operation.operation_id.clone();
        Ok(match operation.flow {
            Flow::IssueRub => (
                Action::Mint {
                    token,
                    to: user,
                    units,
                    id: self.contracts.operation_id(&id),
                },
                vec![operation.user_id.clone()],
            ),
            Flow::RedeemRub => (
                Action::Burn {
                    token,
                    from: user,
                    units,
                    id: self.contracts.operation_id(&id),
                },
                Vec::new(),
            ),
            Flow::IssueInvestment => (
                Action::IssueAgainstPayment {
                    settlement: self.contracts.settlement,
                    id,
                    token,
                    investor: user,
                    units,
                    issuer: Address::of_user(&instrument.issuer_id),
                    payment: unsigned(operation.payment_minor),
                },
                vec![operation.user_id.clone(), instrument.issuer_id.clone()],
            ),
            Flow::RedeemInvestment => (
                Action::Distribute {
                    redemption: self.contracts.redemption,
                    id,
                    part: 0,
                    token,
                    account: Address::of_user(&instrument.issuer_id),
                    payouts: vec![chain::Payout {
                        holder: user,
                        units,
                        payment: unsigned(operation.payment_minor),
                    }],
                },
                vec![operation.user_id.clone()],
            ),
            Flow::Transfer => {
                require_unpaid(operation)?;
                let (from_id, to_id) = (&operation.from_user_id, &operation.to_user_id);
                let (from, to) = (Address::of_user(from_id), Address::of_user(to_id));
                let transfer = Action::Transfer {
                    token,
                    from,
                    to,
                    units,
                };
                (transfer, vec![from_id.clone(), to_id.clone()])
            }
            flow @ (Flow::Trade
            | Flow::Maturity
            | Flow::Placement
            | Flow::ForceTransfer
            | Flow::Coupon) => {
                unreachable!("{} has no action here", flow.as_str())
            }
        })
    }

    /// Submits the chain transaction. Counts a refusal of the node as an attempt.
    async fn send_chain(&self, operation: &mut Operation) -> Result<(), Error> {
        let instrument = self.require_instrument(&operation.instrument_id).await?;
        let (action, users) = match operation.flow {
            Flow::ForceTransfer => (None, vec![operation.to_user_id.clone()]),
            _ => {
                let (action, users) = self.action(operation, &instrument)?;
                (Some(action), users)
            }
        };
        let submitted = async {
            let users: Vec<&str> = users.iter().map(String::as_str).collect();
            self.ensure_registered(&users, &operation.correlation_id)
                .await?;
            let action = match action {
                Some(action) => action,
                None => self.forced_transfer_action(operation, &instrument).await?,
            };
            Ok::<_, Error>(
                self.chain
                    .submit(&format!("op:{}", operation.operation_id), &action.call())
                    .await?,
            )
        };
        match submitted.await {
            Ok(submitted) => {
                failpoint::reach(match operation.flow {
                    Flow::RedeemRub => failpoint::BURN_SUBMITTED,
                    Flow::IssueRub => failpoint::MINT_SUBMITTED,
                    _ => failpoint::UNITS_SUBMITTED,
                });
                operation.tx_hash = Some(submitted.tx_hash.to_string());
                operation.progress.chain = Chain::Sent;
                operation.set_status(Status::OnchainSubmitted, self.now_us());
                let mut tx = self.repo.begin().await?;
                self.repo.save_operation_in_tx(&mut tx, operation).await?;
                if operation.flow == Flow::IssueRub {
                    self.repo
                        .publish_in_tx(&mut tx, &[publish::issuance_started(operation)])
                        .await?;
                }
                Ok(tx.commit().await?)
            }
            // Too little gas, no coins, or another nonce expected. An operator can fix these, so
            // the submission is retried a limited number of times.
            Err(Error::Chain(ChainError::Refused(reason))) => {
                operation.attempts += 1;
                tracing::error!(
                    operation_id = operation.operation_id,
                    reason,
                    attempts = operation.attempts,
                    "blockchain refused a transaction, retrying up to cfa.submit_attempts_max"
                );
                if operation.attempts >= self.config.submit_attempts_max {
                    operation.progress.chain = Chain::Refused;
                    return self.save(operation).await;
                }
                // Keeps `updated_at`: the sweep pages by it and would read the operation again.
                self.repo.save_operation(operation).await?;
                Err(ChainError::Refused(reason).into())
            }
            // Another user has the address, so no retry can succeed (T14).
            Err(error @ Error::Refused(Refusal::AddressTaken)) => {
                tracing::error!(operation_id = operation.operation_id, %error, "operation cannot be sent to the chain");
                operation.progress.chain = Chain::Refused;
                self.save(operation).await
            }
            Err(error) => Err(error),
        }
    }

    /// Records the payout at payments. It is released only after the burn (T06).
    async fn start_payout(&self, operation: &mut Operation) -> Result<(), Error> {
        let profile = self
            .peers
            .profile(&operation.correlation_id, &operation.user_id)
            .await?;
        let started = self
            .peers
            .initiate_payout(
                &operation.correlation_id,
                &operation.external_ref,
                &operation.user_id,
                Minor(operation.units_minor),
                &profile.bank_account,
            )
            .await;
        operation.progress.payout = match started {
            Ok(()) => {
                failpoint::reach(failpoint::PAYOUT_STARTED);
                Payout::Started
            }
            Err(error @ (Error::Peer(_) | Error::Refused(Refusal::PayoutIdTaken))) => {
                tracing::error!(operation_id = operation.operation_id, %error, "payout refused");
                Payout::Failed
            }
            Err(error) => return Err(error),
        };
        self.save(operation).await
    }

    /// Releases the payout. A refusal is retried, because payments may see the burn later. After
    /// `submit_attempts_max` refusals `report_releases` reports the payout.
    async fn release_payout(&self, operation: &mut Operation) -> Result<(), Error> {
        let context = caused_by(&operation.correlation_id);
        let payments = &self.peers.payments;
        let released = payments.release_payout(&context, &operation.external_ref);
        let released = released.await;
        if matches!(released, Err(CallError::Refused(_)))
            && operation.attempts < self.config.submit_attempts_max
        {
            operation.attempts += 1;
            // Keeps `updated_at`: the sweep pages by it and would read the operation again.
            self.repo.save_operation(operation).await?;
        }
        released?;
        failpoint::reach(failpoint::PAYOUT_RELEASED);
        operation.progress.payout = Payout::Released;
        self.save(operation).await
    }

    /// Cancels the payout, or records that the bank has it.
    async fn cancel_payout(&self, operation: &mut Operation) -> Result<(), Error> {
        let context = caused_by(&operation.correlation_id);
        let why = match operation.progress.refunding {
            true => "AML_REFUND",
            false => "BURN_REVERTED",
        };
        let payments = &self.peers.payments;
        let cancelled = payments.cancel_payout(&context, &operation.external_ref, why);
        let cancelled = cancelled.await?;
        failpoint::reach(failpoint::PAYOUT_CANCELLED);
        operation.progress.payout = match cancelled {
            None | Some(PaymentStatus::Failed | PaymentStatus::Expired) => Payout::Cancelled,
            status if !operation.progress.refunding => {
                // The burn has failed, so payments cannot have released the payout.
                let id = &operation.operation_id;
                let status = status.map_or("?", PaymentStatus::as_str);
                return Err(Error::Damaged(format!("payout of {id} is {status}")));
            }
            Some(PaymentStatus::Success) => Payout::Succeeded,
            Some(_) => Payout::Released,
        };
        self.save(operation).await
    }

    /// Reports the number of payouts whose release is refused, and the oldest one, to health.
    pub(super) async fn report_releases(&self) -> Result<(), Error> {
        let refused = self
            .repo
            .refused_releases(self.config.submit_attempts_max)
            .await?;
        let reason = refused.map(|(count, oldest)| {
            format!("{count} payouts refused by payments, oldest: {oldest}")
        });
        self.health.set("payout releases", reason.as_deref());
        Ok(())
    }

    /// Consumes the hold, or finalizes the ledger operation.
    async fn settle_gate(&self, operation: &mut Operation) -> Result<(), Error> {
        if operation.flow == Flow::RedeemRub {
            let hold_id = peers::hold_id(operation.hold_id.as_deref())?;
            let context = caused_by(&operation.correlation_id);
            let (kind, id) = (OperationType::Redemption, &operation.operation_id);
            let ledger = &self.peers.ledger;
            ledger.consume_hold(&context, hold_id, kind, id).await?;
            failpoint::reach(failpoint::HOLD_CONSUMED);
        } else {
            let tx_hash = operation.tx_hash.as_deref().unwrap_or_default();
            self.peers
                .finalize(
                    &operation.correlation_id,
                    std::slice::from_ref(&operation.operation_id),
                    tx_hash,
                )
                .await?;
            failpoint::reach(failpoint::OPERATION_SETTLED);
        }
        operation.progress.settled = true;
        self.save(operation).await
    }

    /// Mints burned tokens back (T09): a compensation, not an issuance. The saga requests this only
    /// after a final burn (T07).
    async fn mint_back(&self, operation: &mut Operation) -> Result<(), Error> {
        assert_eq!(
            operation.progress.chain,
            Chain::Succeeded,
            "a mint-back needs a final burn of its operation"
        );
        // One id for all attempts: the contract accepts one of them.
        let id = format!("{}:mint-back", operation.operation_id);
        let action = Action::Mint {
            token: self.contracts.money,
            to: Address::of_user(&operation.user_id),
            units: unsigned(operation.units_minor),
            id: self.contracts.operation_id(&id),
        };
        let key = format!(
            "op:{}:mint-back:{}",
            operation.operation_id, operation.attempts
        );
        let submitted = self.chain.submit(&key, &action.call()).await?;
        failpoint::reach(failpoint::MINT_BACK_SENT);
        let receipt = self
            .chain
            .wait_receipt(&submitted.tx_hash, call_wait())
            .await?
            .ok_or(Error::Unavailable("Blockchain"))?;
        match receipt.status {
            ReceiptStatus::Success => {
                failpoint::reach(failpoint::MINTED_BACK);
                operation.progress.minted_back = true;
            }
            ReceiptStatus::Reverted => {
                operation.attempts += 1;
                // Keeps `updated_at`, as `send_chain` does.
                self.repo.save_operation(operation).await?;
                tracing::error!(operation_id = operation.operation_id,
                    tx_hash = %receipt.tx_hash, severity = "critical", "mint-back reverted, retrying");
                return Err(Error::Unavailable("Blockchain"));
            }
        }
        self.save(operation).await
    }

    /// Releases the hold, or reverses the ledger operation.
    async fn undo(&self, operation: &mut Operation) -> Result<(), Error> {
        if operation.flow == Flow::RedeemRub {
            let reason = match operation.progress.chain {
                _ if operation.progress.refunding => "Refunded",
                Chain::Succeeded => "Payout failed",
                Chain::Unsent => LIMIT_REFUSED,
                _ => "Burn reverted",
            };
            let hold_id = peers::hold_id(operation.hold_id.as_deref())?;
            let context = caused_by(&operation.correlation_id);
            let ledger = &self.peers.ledger;
            ledger.release_hold(&context, hold_id, reason).await?;
            failpoint::reach(failpoint::HOLD_RELEASED);
        } else {
            let reason = match operation.progress.chain {
                Chain::Unsent => LIMIT_REFUSED,
                _ => REVERTED_MESSAGE,
            };
            let id = &operation.operation_id;
            let reversed = self.peers.reverse(&operation.correlation_id, id, reason);
            reversed.await?;
            failpoint::reach(failpoint::REVERSED);
        }
        operation.progress.undone = true;
        self.save(operation).await
    }

    /// Stores the end of an operation with its effects, events and audit record.
    async fn end(&self, operation: &mut Operation, end: End) -> Result<(), Error> {
        let before = operation.status.as_str();
        let now_us = self.now_us();
        let failed = |message: &str| Some((Rejection::IntegrationError, message.to_owned()));
        let (status, rejection) = match end {
            End::Finalized => (Status::Finalized, None),
            // Keeps the reason of the block.
            End::Refunded => (Status::Refunded, operation.rejection.take()),
            // `reserve_limit` has stored the rejection.
            End::LimitRefused => (Status::Rejected, operation.rejection.take()),
            End::Reverted => (Status::Rejected, failed(REVERTED_MESSAGE)),
            // The deposit can be issued again or refunded (T24).
            End::Refused if operation.flow == Flow::IssueRub => {
                (Status::Rejected, failed(REFUSED_MESSAGE))
            }
            End::Refused => (Status::Failed, failed(REFUSED_MESSAGE)),
            End::PayoutFailed => (Status::Failed, failed(PAYOUT_FAILED_MESSAGE)),
        };
        assert_eq!(status == Status::Finalized, rejection.is_none(), "{end:?}");
        let message = match end {
            // The reason of the block is not published.
            End::Refunded => Some(REFUNDED_MESSAGE.to_owned()),
            _ => rejection.as_ref().map(|(_, message)| message.clone()),
        };
        let message = message.as_deref();
        operation.set_status(status, now_us);
        operation.rejection = rejection;
        let mut tx = self.repo.begin().await?;
        let (subject, mut events) = self.conclude_in_tx(&mut tx, operation, message).await?;
        let action = format!("{subject}.{}", operation.status.as_str().to_lowercase());
        events.push(publish::audit_end(operation, &action, before));
        self.repo.save_operation_in_tx(&mut tx, operation).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        count_ended(operation);
        if operation.flow == Flow::ForceTransfer && status != Status::Finalized {
            let id = &operation.operation_id;
            log_failure("freeze", id, self.freeze_again(id).await);
        }
        Ok(())
    }

    /// Applies the other effects of an operation's end: returned units and a suspended deposit.
    /// Returns the first part of the audit action, and the events.
    async fn conclude_in_tx(
        &self,
        tx: &mut Tx,
        operation: &Operation,
        message: Option<&str>,
    ) -> Result<(&'static str, Vec<Event>), Error> {
        let mut events = Vec::new();
        let subject = match operation.flow {
            Flow::IssueRub | Flow::IssueInvestment => {
                events.push(match message {
                    None => publish::issued(operation),
                    Some(message) => publish::issuance_failed(operation, message),
                });
                if message.is_some() && operation.flow == Flow::IssueInvestment {
                    self.repo
                        .unreserve_issue_in_tx(tx, &operation.instrument_id, operation.units_minor)
                        .await?;
                }
                if operation.flow == Flow::IssueInvestment {
                    let end = limit_end(message.is_none());
                    let id = &operation.operation_id;
                    self.repo.end_limit_of_in_tx(tx, id, end).await?;
                }
                if let Some(message) = message
                    && operation.flow == Flow::IssueRub
                {
                    self.repo
                        .suspend_deposit_in_tx(
                            tx,
                            &suspended(operation, message, operation.updated_at_us),
                        )
                        .await?;
                }
                "issuance"
            }
            Flow::RedeemRub | Flow::RedeemInvestment => {
                events.push(match message {
                    None => publish::redeemed(operation),
                    Some(message) => publish::redemption_failed(operation, message),
                });
                "redemption"
            }
            Flow::Transfer => {
                if message.is_none() {
                    events.push(publish::transferred(operation));
                }
                "transfer"
            }
            Flow::ForceTransfer => {
                let has_failed = message.is_some();
                let ended = self.end_transfer_act_in_tx(tx, operation, has_failed);
                events.extend(ended.await?);
                "forced_transfer"
            }
            flow @ (Flow::Trade | Flow::Maturity | Flow::Placement | Flow::Coupon) => {
                unreachable!("{} is driven elsewhere", flow.as_str())
            }
        };
        Ok((subject, events))
    }

    /// Applies the receipt of a transaction and drives its operations. Ignores unknown hashes.
    pub async fn on_receipt(&self, tx_hash: &str) -> Result<(), Error> {
        let hash: TxHash = tx_hash
            .parse()
            .map_err(|_| Refusal::field("tx_hash", "must be `0x` and 64 hex digits"))?;
        if let Some(batch) = self.repo.batch_by_tx(tx_hash).await? {
            // Both the event and the caller that waits for the batch come here.
            if batch.status != BatchStatus::Submitted {
                return Ok(());
            }
            let Some(receipt) = self.chain.receipt(&hash).await? else {
                return Ok(());
            };
            return self.finish_batch(&batch.batch_id, &receipt).await;
        }
        let waiting = self.repo.operations_by_tx(tx_hash).await?;
        if waiting.is_empty() && self.repo.users_to_confirm(tx_hash).await?.is_empty() {
            return Ok(());
        }
        let Some(receipt) = self.chain.receipt(&hash).await? else {
            return Ok(());
        };
        self.confirm_registration(tx_hash, &receipt).await?;
        for operation in waiting {
            if is_driven_elsewhere(operation.flow) {
                continue;
            }
            let _lock = self.object_locks.lock(&operation.operation_id).await;
            let Some(mut operation) = self.repo.operation(&operation.operation_id).await? else {
                continue;
            };
            if operation.progress.chain == Chain::Sent {
                let moved =
                    receipt.status == ReceiptStatus::Success && receipt.failed_trades.is_empty();
                operation.progress.chain = if moved {
                    Chain::Succeeded
                } else {
                    Chain::Reverted
                };
                operation.block_number = Some(receipt.block_number);
                self.save(&mut operation).await?;
                if operation.flow == Flow::RedeemRub {
                    failpoint::reach(failpoint::BURN_FINAL);
                }
            }
            self.drive_held(operation).await?;
        }
        Ok(())
    }
}

/// A batch drives its trades, an issue's redemption and a coupon their holders' operations, and a
/// placement its deliveries.
fn is_driven_elsewhere(flow: Flow) -> bool {
    matches!(
        flow,
        Flow::Trade | Flow::Maturity | Flow::Placement | Flow::Coupon
    )
}

/// How the reservation of a subscription ends with the operation that used it (F35).
pub(super) fn limit_end(is_done: bool) -> OfferLimit {
    match is_done {
        true => OfferLimit::ToConfirm,
        false => OfferLimit::ToCancel,
    }
}

/// A deposit whose tokens were not issued (T24).
pub(super) fn suspended(operation: &Operation, reason: &str, now_us: i64) -> SuspendedDeposit {
    SuspendedDeposit {
        payment_id: operation.external_ref.clone(),
        user_id: operation.user_id.clone(),
        amount_minor: operation.units_minor,
        operation_id: operation.operation_id.clone(),
        reason: reason.to_owned(),
        created_at_us: now_us,
        resolved: false,
    }
}

/// Counts an ended operation in the metrics (specification 1.6, T39).
pub(super) fn count_ended(operation: &Operation) {
    let kind = operation.flow.as_str();
    let status = operation.status.as_str();
    let seconds = (operation.updated_at_us - operation.created_at_us).max(0) as f64 / 1e6;
    match operation.flow {
        Flow::IssueRub | Flow::IssueInvestment | Flow::Placement => {
            metrics::counter!("cfa_issuances_total", "type" => kind, "status" => status)
                .increment(1);
            metrics::histogram!("issuance_duration_seconds").record(seconds);
        }
        Flow::RedeemRub | Flow::RedeemInvestment | Flow::Maturity => {
            metrics::counter!("cfa_redemptions_total", "type" => kind, "status" => status)
                .increment(1);
            metrics::histogram!("redemption_duration_seconds").record(seconds);
        }
        Flow::Coupon => {
            metrics::counter!("cfa_coupons_total", "status" => status).increment(1);
        }
        Flow::Transfer | Flow::Trade | Flow::ForceTransfer => {
            if operation.status == Status::Finalized {
                let id = operation.instrument_id.clone();
                metrics::counter!("cfa_transfers_total", "instrument_id" => id).increment(1);
            }
        }
    }
}

/// Refuses a transfer with a payment: earlier versions recorded them without a call of the payer.
fn require_unpaid(transfer: &Operation) -> Result<(), Error> {
    if transfer.payment_minor == 0 && transfer.fee_minor == 0 {
        return Ok(());
    }
    let id = &transfer.operation_id;
    Err(Error::Damaged(format!(
        "transfer {id} has a payment without a trade"
    )))
}

/// The postings of an investor's payment for an issue, out of the subscription's hold.
///
/// # Errors
/// `NotSubscribed` for an issue that was recorded before subscriptions existed. It has no effect
/// yet, so the caller deletes it.
fn payment_postings(operation: &Operation, issuer_id: &str) -> Result<[Posting; 2], Error> {
    let hold = operation.hold_id.as_deref().ok_or(Refusal::NotSubscribed)?;
    let hold = Some(peers::hold_id(Some(hold))?);
    let payment = |debit, credit, hold, unsettled| Posting {
        debit,
        credit,
        amount: Amount::rubles(Minor(operation.payment_minor)),
        hold,
        unsettled,
    };
    let (of, reserve) = (subaccount::of_user, subaccount::reserve(CFA_RUB));
    Ok([
        payment(
            of(&operation.user_id, CFA_RUB),
            reserve.clone(),
            hold,
            false,
        ),
        payment(reserve, of(issuer_id, CFA_RUB), None, true),
    ])
}
