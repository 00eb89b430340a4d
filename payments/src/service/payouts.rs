//! Payouts: recorded at once, sent after the burn, followed until the bank's result (T06, D16).

use service_clients::caused_by;

use super::{Acting, Fault, Gateway, record_in_tx};
use rail::{
    Rub,
    client::{BankError, TransferOrderResult},
    messages::{Status, TransferReport},
};
use service_kit::{audit::Act, backoff::doubled_us, clock};
use types::{PaymentStatus, SYSTEM_USER};

use crate::{
    api::publish::{self as emit, UserChange},
    failpoint,
    payout::{
        Cancel, Next, Outcome, Payout, TransferOutcome, next_action, on_cancel, on_transfer_report,
        refund_candidate,
    },
    reconcile::TokenState,
    repo::{intents, payouts, receipts},
};

/// Payment purpose of the refund of an unmatched receipt; the payout id is appended.
const REFUND_PURPOSE: &str = "Возврат ошибочного платежа";
/// Failure code of a refusal whose error register is empty.
const REFUSED: &str = "REFUSED_BY_BANK";
/// The bank's code for a request id that it received before with another order.
const REQUEST_ID_REUSED: &str = "REQUEST_ID_REUSED";

/// Arguments of `initiate_payout`.
#[derive(Clone, Debug)]
pub struct NewPayout {
    pub payout_id: String,
    pub user_id: String,
    pub amount: Rub,
    pub bank_account: String,
    pub context: rpc::Context,
}

impl From<TransferReport> for TransferOutcome {
    fn from(report: TransferReport) -> TransferOutcome {
        let transfer_id = report.transfer_id;
        match report.status {
            Status::Pending => TransferOutcome::Accepted { transfer_id },
            Status::Success => TransferOutcome::Executed { transfer_id },
            Status::Failed | Status::Expired => {
                let entry = report.error_register.into_iter().next();
                let (code, message) = entry.map_or_else(
                    || (REFUSED.to_owned(), String::new()),
                    |entry| (entry.code, entry.message),
                );
                TransferOutcome::Refused {
                    transfer_id,
                    code,
                    message,
                }
            }
        }
    }
}

/// Converts a bank error that fails the payout into a refusal.
///
/// HTTP 400 for the first order is final: the bank did not accept it. For a later order it proves
/// nothing, because the response to an earlier one may be lost. Nor does it if the request id
/// belongs to another order.
fn refused_order(payout: &Payout, error: BankError) -> Result<TransferOutcome, BankError> {
    match error {
        BankError::Refused {
            status: 400,
            code,
            message,
        } if payout.ordered_at_us.is_none() && code != REQUEST_ID_REUSED => {
            Ok(TransferOutcome::Refused {
                transfer_id: String::new(),
                code,
                message,
            })
        }
        error => Err(error),
    }
}

/// Logs a refusal that a retry does not resolve: an operator must act.
fn log_refused_order(payout: &Payout, error: &BankError) {
    if matches!(error, BankError::Refused { .. }) {
        tracing::error!(
            payout_id = payout.payout_id,
            user_id = payout.user_id,
            %error,
            severity = "critical",
            "bank refused the order of a payout, which stays open: clarify with the bank"
        );
    }
}

/// Ends the refund of a receipt with its payout. A failed one leaves the receipt open.
async fn end_refund(tx: &mut events::Tx, payout: &Payout, now_us: i64) -> Result<(), Fault> {
    let Some(receipt_id) = payout
        .refunds_receipt
        .as_ref()
        .filter(|_| !payout.is_open())
    else {
        return Ok(());
    };
    let is_executed = payout.status == PaymentStatus::Success;
    let payout_id = payout.payout_id.as_str();
    receipts::end_refund_in_tx(tx, receipt_id, payout_id, is_executed, now_us).await?;
    if !is_executed {
        tracing::error!(
            receipt_id,
            payout_id,
            failure_code = payout.failure_code,
            severity = "critical",
            "refund of a receipt failed: resolve the receipt again"
        );
    }
    Ok(())
}

fn warn_on_mismatch(stored: &Payout, ask: &NewPayout) {
    let same = stored.payout_id == ask.payout_id
        && stored.user_id == ask.user_id
        && stored.amount == ask.amount
        && stored.bank_account == ask.bank_account;
    if !same {
        rpc::context::note_difference("InitiatePayout", &ask.context.idempotency_key);
    }
}

impl Gateway {
    /// Records a payout. Returns the stored one and `true` if the user's key or the payout id was
    /// used before (T12).
    pub async fn initiate_payout(&self, ask: NewPayout) -> Result<(Payout, bool), Fault> {
        let key = &ask.context.idempotency_key;
        let (user_id, payout_id) = (&ask.user_id, &ask.payout_id);
        if let Some(stored) = payouts::recorded(self.db.read(), user_id, key, payout_id).await? {
            warn_on_mismatch(&stored, &ask);
            return Ok((stored, true));
        }
        self.require_own_account(&ask).await?;
        let refunds = self.refunded_deposit(&ask).await?;
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        if let Some(stored) = payouts::recorded(&mut *tx, user_id, key, payout_id).await? {
            warn_on_mismatch(&stored, &ask);
            return Ok((stored, true));
        }
        let payout = Payout {
            stopped: payouts::blocked_reason(&mut *tx, &ask.user_id).await?,
            payout_id: ask.payout_id,
            user_id: ask.user_id,
            amount: ask.amount,
            bank_account: ask.bank_account,
            refunds,
            refunds_receipt: None,
            status: PaymentStatus::Pending,
            released_at_us: None,
            ordered_at_us: None,
            bank_transfer_id: String::new(),
            failure_code: String::new(),
            failure_message: String::new(),
            attempts: 0,
            next_attempt_at_us: 0,
            idempotency_key: Some(ask.context.idempotency_key),
            correlation_id: ask.context.correlation_id,
            created_at_us: now_us,
            updated_at_us: now_us,
        };
        payouts::save_in_tx(&mut tx, &payout).await?;
        tx.commit().await?;
        tracing::info!(payout_id = payout.payout_id, user_id = payout.user_id,
            amount = %payout.amount, "payout recorded");
        Ok((payout, false))
    }

    /// Refuses an account other than that of the user's profile.
    async fn require_own_account(&self, ask: &NewPayout) -> Result<(), Fault> {
        let correlation_id = &ask.context.correlation_id;
        let profile = self
            .identity
            .profile(&caused_by(correlation_id), &ask.user_id)
            .await?;
        if profile.bank_account.trim() != ask.bank_account {
            return Err(Fault::AccountMismatch);
        }
        Ok(())
    }

    /// Payment id of the deposit that a payout refunds. `None`: an ordinary payout, also that of a
    /// redemption whose id looks like a refund.
    ///
    /// # Errors
    /// `DepositNotRefundable`: the id looks like a refund, but has neither a redemption nor a
    /// refundable deposit. The payout could never be released.
    async fn refunded_deposit(&self, ask: &NewPayout) -> Result<Option<String>, Fault> {
        let Some(payment_id) = refund_candidate(&ask.payout_id) else {
            return Ok(None);
        };
        let correlation_id = &ask.context.correlation_id;
        let redemption = self
            .tokens
            .redemption(&ask.payout_id, correlation_id)
            .await?;
        if !matches!(redemption.state, TokenState::Missing | TokenState::Ended) {
            return Ok(None);
        }
        let (user_id, amount) = (&ask.user_id, ask.amount);
        let refundable = self
            .is_refundable(payment_id, user_id, amount, correlation_id)
            .await?;
        refundable
            .then(|| Some(payment_id.to_owned()))
            .ok_or(Fault::DepositNotRefundable)
    }

    /// Whether the deposit came from this user in this amount, and its tokens were refused and not
    /// issued since.
    async fn is_refundable(
        &self,
        payment_id: &str,
        user_id: &str,
        amount: Rub,
        correlation_id: &str,
    ) -> Result<bool, Fault> {
        let intent = intents::get(self.db.read(), payment_id).await?;
        let received = intent.is_some_and(|intent| {
            intent.status == PaymentStatus::Success
                && intent.user_id == user_id
                && intent.amount == amount
        });
        if !received {
            return Ok(false);
        }
        let issue = self.tokens.issue(payment_id, correlation_id).await?;
        Ok(matches!(
            issue.state,
            TokenState::Ended | TokenState::Refunded
        ))
    }

    /// Releases the money for a successful burn, or for the refund of a refused deposit. Returns an
    /// ended or released payout unchanged, and `true`.
    pub async fn release_payout(
        &self,
        payout_id: &str,
        correlation_id: &str,
    ) -> Result<(Payout, bool), Fault> {
        let found = payouts::get(self.db.read(), payout_id).await?;
        let found = found.ok_or(Fault::PayoutNotFound)?;
        if !found.awaits_release() {
            return Ok((found, true));
        }
        self.require_reason(&found, correlation_id).await?;
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let found = payouts::get(&mut *tx, payout_id).await?;
        let mut payout = found.ok_or(Fault::PayoutNotFound)?;
        if !payout.awaits_release() {
            return Ok((payout, true));
        }
        if let Some(payment_id) = &payout.refunds
            && payouts::is_refunded_by_another(&mut *tx, payment_id, payout_id).await?
        {
            return Err(Fault::DepositNotRefundable);
        }
        payout.released_at_us = Some(now_us);
        payout.next_attempt_at_us = now_us;
        payout.updated_at_us = now_us;
        payouts::save_in_tx(&mut tx, &payout).await?;
        tx.commit().await?;
        self.payouts_due.notify_one();
        Ok((payout, false))
    }

    /// Requires a successful burn, or a refundable deposit for a refund (T06, T24). Both are read
    /// from the services that own them, not from the request.
    async fn require_reason(&self, payout: &Payout, correlation_id: &str) -> Result<(), Fault> {
        if let Some(payment_id) = &payout.refunds {
            let (user_id, amount) = (&payout.user_id, payout.amount);
            let refundable = self
                .is_refundable(payment_id, user_id, amount, correlation_id)
                .await?;
            return refundable.then_some(()).ok_or(Fault::DepositNotRefundable);
        }
        // The redemption is still ONCHAIN_SUBMITTED, because the bank's report finalizes it (T08).
        // The receipt proves the burn.
        let amount = payout.amount.to_decimal();
        let burn = self.tokens.burn(&payout.payout_id, correlation_id).await?;
        let burn = burn
            .filter(|burn| burn.user_id == payout.user_id && burn.amount == Some(amount))
            .ok_or(Fault::NotBurned)?;
        let context = caused_by(correlation_id);
        let receipt = self.tokens.chain.has_succeeded(&context, &burn.tx_hash);
        match receipt.await? {
            Some(true) => Ok(()),
            Some(false) => Err(Fault::NotBurned),
            None => Err(Fault::BurnNotFinal),
        }
    }

    /// Cancels a payout that was not ordered at the bank. Returns the payout as it is now, and
    /// `true` for a used key.
    pub async fn cancel_payout(
        &self,
        acting: &Acting,
        payout_id: &str,
        code: &str,
    ) -> Result<(Payout, bool), Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let earlier = acting.earlier_in_tx(&mut tx).await?;
        let payout_id = earlier.as_deref().unwrap_or(payout_id);
        let found = payouts::get(&mut *tx, payout_id).await?;
        let mut payout = found.ok_or(Fault::PayoutNotFound)?;
        if earlier.is_some() {
            return Ok((payout, true));
        }
        match on_cancel(&payout, code) {
            Cancel::AlreadyFinal => {
                acting.answer_in_tx(&mut tx, payout_id).await?;
                tx.commit().await?;
                Ok((payout, false))
            }
            Cancel::AlreadySent => Err(Fault::PayoutSent),
            Cancel::Fail { event } => {
                payout.status = PaymentStatus::Failed;
                payout.failure_code = code.to_owned();
                payout.failure_message = "Cancelled before it was sent".into();
                payout.updated_at_us = now_us;
                payouts::save_in_tx(&mut tx, &payout).await?;
                end_refund(&mut tx, &payout, now_us).await?;
                if event && payout.refunds_receipt.is_none() {
                    let failed = emit::payout_failed(&payout, now_us);
                    events::outbox::append_in_tx(&mut tx, &[failed]).await?;
                }
                // A service cancels the payout of a failed redemption by itself.
                if !acting.caller.acts_by_itself() {
                    let act = Act {
                        before: PaymentStatus::Pending.as_str(),
                        after: PaymentStatus::Failed.as_str(),
                        reason: code,
                        ..acting.act("payout.cancelled", payout_id)
                    };
                    record_in_tx(&mut tx, now_us, act).await?;
                }
                acting.answer_in_tx(&mut tx, payout_id).await?;
                tx.commit().await?;
                tracing::info!(
                    payout_id,
                    code,
                    by = acting.caller.subject,
                    "payout cancelled"
                );
                Ok((payout, false))
            }
        }
    }

    /// Applies the bank's report of a transfer: a response, a webhook or a poll.
    pub async fn on_transfer_report(
        &self,
        payout_id: &str,
        report: &TransferOutcome,
    ) -> Result<Payout, Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let found = payouts::get(&mut *tx, payout_id).await?;
        let mut payout = found.ok_or(Fault::PayoutNotFound)?;
        let outcome = on_transfer_report(&payout, report);
        // No other service waits for the refund of a receipt.
        let is_announced = payout.refunds_receipt.is_none();
        let event = match outcome {
            Outcome::Unchanged => return Ok(payout),
            Outcome::Accepted => None,
            Outcome::Confirmed => {
                payout.status = PaymentStatus::Success;
                is_announced.then(|| emit::payout_confirmed(&payout, now_us))
            }
            Outcome::Failed => {
                payout.status = PaymentStatus::Failed;
                if let TransferOutcome::Refused { code, message, .. } = report {
                    payout.failure_code.clone_from(code);
                    payout.failure_message.clone_from(message);
                }
                is_announced.then(|| emit::payout_failed(&payout, now_us))
            }
        };
        let (TransferOutcome::Accepted { transfer_id }
        | TransferOutcome::Executed { transfer_id }
        | TransferOutcome::Refused { transfer_id, .. }) = report;
        payout.bank_transfer_id.clone_from(transfer_id);
        if outcome == Outcome::Accepted {
            // From now on `attempts` counts polls, not orders.
            payout.attempts = 0;
            payout.next_attempt_at_us = now_us + self.payout_pause_us(0);
        }
        payout.updated_at_us = now_us;
        let reach = |place: &str| {
            if outcome != Outcome::Accepted {
                failpoint::reach(place);
            }
        };
        payouts::save_in_tx(&mut tx, &payout).await?;
        end_refund(&mut tx, &payout, now_us).await?;
        reach(failpoint::RESULT_WRITTEN);
        if let Some(payment_id) = payout
            .refunds
            .as_ref()
            .filter(|_| outcome == Outcome::Confirmed)
        {
            let refunded = PaymentStatus::Refunded;
            intents::set_status_in_tx(&mut tx, payment_id, refunded, false, now_us).await?;
        }
        events::outbox::append_in_tx(&mut tx, event.as_slice()).await?;
        reach(failpoint::EVENT_WRITTEN);
        tx.commit().await?;
        reach(failpoint::RESULT_COMMITTED);
        tracing::info!(
            payout_id,
            user_id = payout.user_id,
            correlation_id = payout.correlation_id,
            ?outcome,
            failure_code = payout.failure_code,
            "payout changed status"
        );
        Ok(payout)
    }

    /// Executes the due action of one payout. Steps of different payouts may run in parallel.
    pub async fn step_payout(&self, payout_id: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.stepping.lock(payout_id).await;
        let Some(payout) = payouts::get(self.db.read(), payout_id).await? else {
            return Err(Fault::PayoutNotFound);
        };
        match next_action(&payout, clock::now_us()) {
            Next::Wait => Ok(()),
            Next::Order => self.send_order(&payout).await,
            Next::Poll => self.poll_payout(&payout).await,
        }
    }

    /// Screens the user before the first order, then sends the order and applies the response.
    async fn send_order(&self, payout: &Payout) -> Result<(), Fault> {
        if payout.ordered_at_us.is_none()
            && let Some(reason) = self.screen(payout).await?
        {
            return self.stop_payout(payout, &reason).await;
        }
        let Some(ordered) = self.begin_order(&payout.payout_id).await? else {
            return Ok(());
        };
        failpoint::reach(failpoint::ORDER_BEGUN);
        let purpose = match ordered.refunds_receipt {
            Some(_) => REFUND_PURPOSE,
            None => &self.config.payout_purpose,
        };
        let purpose = format!("{purpose} {}", ordered.payout_id);
        let answer = self.bank.initiate_transfer(
            &ordered.payout_id,
            &ordered.bank_account,
            ordered.amount,
            &purpose,
        );
        let answer = answer.await;
        failpoint::reach(failpoint::ORDER_SENT);
        let report = match self.record_bank_health(answer) {
            Ok(TransferOrderResult::Accepted(report)) => TransferOutcome::from(report),
            Ok(TransferOrderResult::Refused(report)) => TransferOutcome::from(TransferReport {
                status: Status::Failed,
                ..report
            }),
            Err(error) => match refused_order(payout, error) {
                Ok(report) => report,
                Err(error) => {
                    log_refused_order(payout, &error);
                    return Err(error.into());
                }
            },
        };
        self.on_transfer_report(&ordered.payout_id, &report).await?;
        Ok(())
    }

    /// Stores that the bank may have the order, before it is sent, and the time of the next
    /// attempt. `None`: the payout must not be ordered any more.
    async fn begin_order(&self, payout_id: &str) -> Result<Option<Payout>, Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let Some(mut payout) = payouts::get(&mut *tx, payout_id).await? else {
            return Err(Fault::PayoutNotFound);
        };
        if next_action(&payout, now_us) != Next::Order {
            return Ok(None);
        }
        payout.ordered_at_us.get_or_insert(now_us);
        payout.next_attempt_at_us = now_us + self.payout_pause_us(payout.attempts);
        payout.attempts += 1;
        payout.updated_at_us = now_us;
        payouts::save_in_tx(&mut tx, &payout).await?;
        tx.commit().await?;
        Ok(Some(payout))
    }

    async fn poll_payout(&self, payout: &Payout) -> Result<(), Fault> {
        self.postpone(payout).await?;
        let asked = self.bank.transfer_status(&payout.bank_transfer_id).await;
        match self.record_bank_health(asked) {
            Ok(report) => {
                self.on_transfer_report(&payout.payout_id, &report.into())
                    .await?;
                Ok(())
            }
            Err(error) => {
                if matches!(error, BankError::NotFound) {
                    tracing::error!(
                        payout_id = payout.payout_id,
                        transfer_id = payout.bank_transfer_id,
                        "bank does not find a transfer that it accepted; clarify with the bank"
                    );
                }
                Err(error.into())
            }
        }
    }

    /// Checks sanctions again before money leaves, not only at registration. Returns the reason of
    /// a hit.
    async fn screen(&self, payout: &Payout) -> Result<Option<String>, Fault> {
        // The sender of money for an unknown payment is no user.
        if payout.user_id == SYSTEM_USER {
            return Ok(None);
        }
        let context = caused_by(&payout.correlation_id);
        let screened = self
            .identity
            .check_sanctions(&context, &payout.user_id, &payout.payout_id)
            .await;
        if screened.is_err() {
            self.postpone(payout).await?;
        }
        Ok(screened?)
    }

    async fn stop_payout(&self, payout: &Payout, reason: &str) -> Result<(), Fault> {
        let mut tx = self.db.write().await?;
        let Some(mut stored) = payouts::get(&mut *tx, &payout.payout_id).await? else {
            return Err(Fault::PayoutNotFound);
        };
        if stored.is_open() && stored.ordered_at_us.is_none() {
            stored.stopped = Some(reason.to_owned());
            stored.updated_at_us = clock::now_us();
            payouts::save_in_tx(&mut tx, &stored).await?;
            tx.commit().await?;
            tracing::warn!(
                payout_id = stored.payout_id,
                user_id = stored.user_id,
                reason,
                "payout stopped"
            );
        }
        Ok(())
    }

    /// Counts an attempt and schedules the next one.
    async fn postpone(&self, payout: &Payout) -> Result<(), Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let Some(mut stored) = payouts::get(&mut *tx, &payout.payout_id).await? else {
            return Err(Fault::PayoutNotFound);
        };
        stored.next_attempt_at_us = now_us + self.payout_pause_us(stored.attempts);
        stored.attempts += 1;
        payouts::save_in_tx(&mut tx, &stored).await?;
        tx.commit().await?;
        Ok(())
    }

    fn payout_pause_us(&self, attempts: u32) -> i64 {
        let config = &self.config;
        let (first_ms, max_ms) = (config.payout_pause_first_ms, config.payout_pause_most_ms);
        doubled_us(first_ms, attempts, max_ms)
    }

    /// Polls every transfer that the bank has accepted, so that a lost report does not look like a
    /// difference.
    pub async fn poll_ordered(&self) -> Result<(), Fault> {
        let open = payouts::due(self.db.read(), i64::MAX, i64::MAX).await?;
        for payout in open
            .iter()
            .filter(|payout| !payout.bank_transfer_id.is_empty())
        {
            let _one_at_a_time = self.stepping.lock(payout.payout_id.as_str()).await;
            // The worker may have ended it while this waited.
            let Some(payout) = payouts::get(self.db.read(), &payout.payout_id).await? else {
                continue;
            };
            if !payout.is_open() {
                continue;
            }
            match self.poll_payout(&payout).await {
                Ok(()) => {}
                Err(fault) if fault.is_bank_unavailable() => return Err(fault),
                Err(fault) => {
                    tracing::error!(payout_id = payout.payout_id, %fault, "payout cannot be polled");
                }
            }
        }
        Ok(())
    }

    /// Applies a user change from identity (T48). A resumed payout is screened again.
    pub async fn apply_user_change(
        &self,
        event: &events::Event,
        user_id: &str,
        change: &UserChange,
    ) -> Result<(), Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        if !events::inbox::accept_in_tx(&mut tx, "payments.users", event.id).await? {
            return Ok(());
        }
        match change {
            UserChange::Blocked(reason) => {
                let reason = if reason.is_empty() {
                    "User is blocked"
                } else {
                    reason
                };
                payouts::block_user_in_tx(&mut tx, user_id, reason, now_us).await?;
            }
            UserChange::Unblocked => payouts::unblock_user_in_tx(&mut tx, user_id, now_us).await?,
            UserChange::Updated => payouts::resume_user_in_tx(&mut tx, user_id, now_us).await?,
        }
        tx.commit().await?;
        self.payouts_due.notify_one();
        Ok(())
    }
}
