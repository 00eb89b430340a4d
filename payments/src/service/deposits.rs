//! Deposits: creation of intents and the bank's reports of them (specification 4.2.1 to 4.2.5).

use service_clients::{LimitType, OperationType};
use uuid::Uuid;

use super::{Fault, Gateway};
use rail::{
    Rub,
    client::BankError,
    messages::{self, CreateQr, ExpectTransfer},
    purpose_code,
};
use service_kit::{backoff::doubled_us, clock};
use types::PaymentStatus;

use crate::{
    api::publish as emit,
    intent::{Intent, PaymentMethod, Transition, on_report},
    receipt::{Match, Receipt, match_receipt, valid_transaction_id},
    repo::{intents, receipts},
};

/// Maximum intents polled before a reconciliation; those with the earliest due poll go first.
const POLLS_BEFORE_RECONCILIATION: i64 = 200;

/// Arguments of `create_intent`.
#[derive(Clone, Debug)]
pub struct NewIntent {
    pub user_id: String,
    pub amount: Rub,
    pub method: PaymentMethod,
    pub context: rpc::Context,
}

/// A bank report of one payment, from a webhook or a poll.
#[derive(Clone, Debug)]
pub struct PaymentOutcome {
    pub payment_id: String,
    pub status: PaymentStatus,
    /// `None`: not an amount of roubles.
    pub amount: Option<Rub>,
    /// The bank's id of the transaction that brought the money.
    pub transaction_id: Option<String>,
    /// Event id and body, when it came by webhook.
    pub webhook: Option<(String, Vec<u8>)>,
}

impl Gateway {
    /// Creates an intent. Returns the stored one and `true` if the user's key was used before
    /// (T12).
    ///
    /// # Errors
    /// `TooManyIntents`, `LimitExceeded`.
    pub async fn create_intent(&self, ask: NewIntent) -> Result<(Intent, bool), Fault> {
        let key = &ask.context.idempotency_key;
        // Before the look-up of the key: otherwise a call with the key may take the last place in
        // between, and its repeat would be refused.
        let polled = intents::count_polled(self.db.read(), &ask.user_id).await?;
        if let Some(stored) = intents::by_key(self.db.read(), &ask.user_id, key).await? {
            warn_on_mismatch(&stored, &ask);
            return Ok((stored, true));
        }
        self.check_polled(polled)?;
        // Specification 4.2.1.
        let (limit, operation) = (LimitType::Deposit, OperationType::Deposit);
        let (user_id, amount) = (&ask.user_id, ask.amount.to_decimal());
        let refused =
            self.identity
                .check_limits(&ask.context, user_id, limit, operation, amount, None);
        if let Some(reason) = refused.await? {
            return Err(Fault::LimitExceeded(reason));
        }
        let intent = self.register_at_bank(&ask).await?;
        let now_us = intent.created_at_us;
        let first_poll_us =
            now_us + doubled_us(self.config.poll_first_ms, 0, self.config.poll_most_ms);

        let mut tx = self.db.write().await?;
        // Concurrent calls may have been first. The payment code of a call that ends here is never
        // returned, so it is never paid.
        if let Some(stored) = intents::by_key(&mut *tx, &ask.user_id, key).await? {
            warn_on_mismatch(&stored, &ask);
            return Ok((stored, true));
        }
        self.check_polled(intents::count_polled(&mut *tx, &ask.user_id).await?)?;
        let first_poll_us = first_poll_us.min(intent.expires_at_us);
        let is_new = intents::insert_in_tx(&mut tx, &intent, first_poll_us).await?;
        assert!(is_new, "no intent has the key: {}", intent.payment_id);
        events::outbox::append_in_tx(&mut tx, &[emit::intent_created(&intent)]).await?;
        tx.commit().await?;
        metrics::counter!("payment_intents_created_total", "method" => ask.method.as_str())
            .increment(1);
        tracing::info!(payment_id = intent.payment_id, user_id = intent.user_id,
            amount = %intent.amount, "payment intent created");
        Ok((intent, false))
    }

    /// Refuses a further intent of a user with these pending and polled ones. Each is polled at the
    /// bank until it is paid or the window of late polls has ended.
    fn check_polled(&self, (pending, polled): (i64, i64)) -> Result<(), Fault> {
        let config = &self.config;
        let is_full = pending >= i64::from(config.pending_intents_per_user)
            || polled >= i64::from(config.polled_intents_per_user);
        match is_full {
            true => Err(Fault::TooManyIntents),
            false => Ok(()),
        }
    }

    /// Registers the payment at the bank, which returns the link or code for the payer.
    async fn register_at_bank(&self, ask: &NewIntent) -> Result<Intent, Fault> {
        let payment_id = Uuid::now_v7().to_string();
        let now_us = clock::now_us();
        let life_seconds = self.config.intent_life_s;
        let purpose = &self.config.deposit_purpose;
        let (payment_url, qr_payload, expires_at) = match ask.method {
            PaymentMethod::SbpC2b | PaymentMethod::SbpQr => {
                let ask_qr = CreateQr {
                    payment_id: payment_id.clone(),
                    amount: ask.amount.into(),
                    purpose: purpose.clone(),
                    life_seconds,
                };
                let created = self.record_bank_health(self.bank.create_qr(&ask_qr).await)?;
                // Only SBP_QR returns a QR code; an SBP_C2B link opens directly.
                let qr_payload = match ask.method {
                    PaymentMethod::SbpQr => created.qr_payload,
                    _ => String::new(),
                };
                (created.payment_url, qr_payload, created.expires_at)
            }
            PaymentMethod::BankTransfer => {
                let announcement = ExpectTransfer {
                    payment_id: payment_id.clone(),
                    amount: ask.amount.into(),
                    purpose_code: purpose_code::code(&payment_id),
                    life_seconds,
                };
                let expected =
                    self.record_bank_health(self.bank.expect_transfer(&announcement).await)?;
                let payload = purpose_code::payload(
                    &self.config.requisites,
                    ask.amount,
                    purpose,
                    &payment_id,
                );
                (payload.clone(), payload, expected.expires_at)
            }
        };
        let expires_at_us = messages::time_us(&expires_at).ok_or_else(|| {
            BankError::Protocol(format!("expiresAt `{expires_at}` is not a time"))
        })?;
        Ok(Intent {
            payment_id,
            user_id: ask.user_id.clone(),
            amount: ask.amount,
            method: ask.method,
            status: PaymentStatus::Pending,
            payment_url,
            qr_payload,
            idempotency_key: ask.context.idempotency_key.clone(),
            correlation_id: ask.context.correlation_id.clone(),
            late: false,
            created_at_us: now_us,
            expires_at_us,
            updated_at_us: now_us,
        })
    }

    /// Applies a bank report, from a webhook or a poll. Money that pays no intent is stored as an
    /// unmatched receipt, also if the report is refused.
    ///
    /// # Errors
    /// `IntentNotFound`, `AmountMismatch`.
    pub async fn on_payment_report(&self, report: &PaymentOutcome) -> Result<Intent, Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let intent = intents::get(&mut *tx, &report.payment_id).await?;
        let matching = intent
            .as_ref()
            .filter(|intent| report.amount == Some(intent.amount));
        if let (Some(intent), Some((event_id, body))) = (matching, &report.webhook) {
            let (status, id) = (report.status.as_str(), &report.payment_id);
            if !receipts::note_webhook_in_tx(&mut tx, event_id, id, status, body, now_us).await? {
                metrics::counter!("payment_webhooks_repeated_total").increment(1);
                return Ok(intent.clone());
            }
        }
        let matched = self
            .record_receipt(&mut tx, intent.as_ref(), report, now_us)
            .await?;
        let is_matching = matching.is_some();
        let Some(mut intent) = intent else {
            tx.commit().await?;
            return Err(Fault::IntentNotFound);
        };
        if !is_matching {
            tx.commit().await?;
            tracing::warn!(payment_id = intent.payment_id, expected = %intent.amount,
                reported = ?report.amount, "payment report has another amount than the intent");
            return Err(Fault::AmountMismatch);
        }
        if matched.is_some_and(|matched| matched != Match::Pays) {
            tx.commit().await?;
            return Ok(intent);
        }
        let mut deposited_now = false;
        match on_report(intent.status, report.status) {
            Transition::Unchanged => {
                if report.status != intent.status {
                    metrics::counter!("payment_reports_outranked_total").increment(1);
                }
            }
            Transition::Move {
                to,
                deposited,
                late,
            } => {
                intent.status = to;
                intent.late |= late;
                intent.updated_at_us = now_us;
                intents::set_status_in_tx(&mut tx, &intent.payment_id, to, late, now_us).await?;
                deposited_now = deposited;
                if deposited {
                    let event = emit::fiat_deposited(&intent, now_us);
                    events::outbox::append_in_tx(&mut tx, &[event]).await?;
                }
                tracing::info!(payment_id = intent.payment_id, user_id = intent.user_id,
                    correlation_id = intent.correlation_id, status = %to, late, "payment intent changed status");
            }
        }
        tx.commit().await?;
        if deposited_now {
            let method = intent.method.as_str();
            let seconds = (now_us - intent.created_at_us).max(0) as f64 / 1e6;
            metrics::histogram!("payment_processing_duration_seconds", "method" => method)
                .record(seconds);
        }
        Ok(intent)
    }

    /// Stores or updates the receipt of a report of received money; `None` for any other report.
    async fn record_receipt(
        &self,
        tx: &mut events::Tx,
        intent: Option<&Intent>,
        report: &PaymentOutcome,
        now_us: i64,
    ) -> Result<Option<Match>, Fault> {
        let amount = report.amount.filter(|amount| amount.kopecks() > 0);
        let (PaymentStatus::Success, Some(amount)) = (report.status, amount) else {
            return Ok(None);
        };
        let (bank_id, payment_id) = (&self.config.bank_id, &report.payment_id);
        let transaction_id = report.transaction_id.as_deref();
        let stored =
            receipts::of_report_in_tx(tx, bank_id, transaction_id, payment_id, amount).await?;
        let matched = match_receipt(intent, stored.as_ref(), amount);
        let mut receipt = stored.clone().unwrap_or_else(|| Receipt {
            receipt_id: Uuid::now_v7().to_string(),
            bank_id: bank_id.clone(),
            transaction_id: None,
            payment_id: payment_id.clone(),
            amount,
            unmatched: None,
            assigned: None,
            refund: None,
            is_refunded: false,
            created_at_us: now_us,
            updated_at_us: now_us,
        });
        let is_resolved = receipt.assigned.is_some() || receipt.refund.is_some();
        if is_resolved && receipt.amount != amount {
            tracing::error!(
                receipt_id = receipt.receipt_id,
                payment_id,
                resolved = %receipt.amount,
                reported = %amount,
                severity = "critical",
                "bank reported another amount for a receipt that persons have resolved; clarify with the bank"
            );
        }
        if matched == Match::Repeat && receipt.payment_id != *payment_id {
            tracing::warn!(
                transaction_id,
                paid = receipt.payment_id,
                reported = payment_id,
                "bank reported a transaction for another payment than the one it has paid; report ignored"
            );
            return Ok(Some(matched));
        }
        receipt.transaction_id = receipt
            .transaction_id
            .or_else(|| report.transaction_id.clone());
        // A receipt that pays an intent keeps its payment and amount.
        if matched != Match::Repeat {
            receipt.payment_id.clone_from(payment_id);
            receipt.amount = amount;
            receipt.unmatched = match matched {
                Match::Unmatched(reason) => Some(reason),
                Match::Pays | Match::Repeat => None,
            };
        }
        if stored.as_ref() == Some(&receipt) {
            return Ok(Some(matched));
        }
        receipt.updated_at_us = now_us;
        log_change(stored.as_ref(), &receipt, intent);
        receipts::save_in_tx(tx, &receipt).await?;
        Ok(Some(matched))
    }

    /// Polls the bank for an intent, in case a webhook is lost, and expires the intent after its
    /// lifetime (D12). A failed or expired intent is polled for `late_poll_window_s` more, because
    /// late money counts (T25).
    pub async fn poll_intent(&self, intent: &Intent, polls: u32) -> Result<(), Fault> {
        let asked = self.record_bank_health(self.bank.payment_status(&intent.payment_id).await);
        let now_us = clock::now_us();
        let reported = match asked {
            Ok(report) => Some(PaymentOutcome {
                payment_id: intent.payment_id.clone(),
                status: report.status.into(),
                amount: Some(report.amount.into()),
                transaction_id: valid_transaction_id(report.transaction_id),
                webhook: None,
            }),
            Err(BankError::NotFound) => None,
            Err(error) => {
                self.schedule_poll(intent, polls, now_us).await?;
                return Err(error.into());
            }
        };
        let is_pending = intent.status == PaymentStatus::Pending;
        let is_news = |report: &PaymentOutcome| match report.status {
            PaymentStatus::Success => true,
            // Of a failed or expired intent only late money is news.
            status => is_pending && status != PaymentStatus::Pending,
        };
        let mut current = intent.clone();
        if let Some(report) = reported.filter(is_news) {
            match self.on_payment_report(&report).await {
                Ok(after) => current = after,
                // The bank may still correct its report.
                Err(Fault::AmountMismatch) => {}
                Err(fault) => return Err(fault),
            }
        }
        if current.status == PaymentStatus::Success {
            return Ok(());
        }
        if current.status == PaymentStatus::Pending && now_us >= intent.expires_at_us {
            // The last poll found no money: the gateway itself reports EXPIRED.
            let expired = PaymentOutcome {
                payment_id: intent.payment_id.clone(),
                status: PaymentStatus::Expired,
                amount: Some(intent.amount),
                transaction_id: None,
                webhook: None,
            };
            current = self.on_payment_report(&expired).await?;
        }
        self.schedule_poll(&current, polls, now_us).await
    }

    async fn schedule_poll(&self, intent: &Intent, polls: u32, now_us: i64) -> Result<(), Fault> {
        let config = &self.config;
        let next_us = if intent.status == PaymentStatus::Pending {
            let pause_us = doubled_us(
                config.poll_first_ms,
                polls.saturating_add(1),
                config.poll_most_ms,
            );
            let next_us = now_us + pause_us;
            Some(match now_us < intent.expires_at_us {
                true => next_us.min(intent.expires_at_us),
                false => next_us,
            })
        } else {
            let last_us = intent.expires_at_us + i64::from(config.late_poll_window_s) * 1_000_000;
            let pause_ms = config.late_poll_pause_ms;
            let next_us = now_us.saturating_add(doubled_us(pause_ms, 0, pause_ms));
            (next_us <= last_us).then_some(next_us)
        };
        let mut tx = self.db.write().await?;
        intents::schedule_in_tx(&mut tx, &intent.payment_id, next_us).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Polls pending intents, so that a lost webhook does not look like a difference. The worker
    /// polls failed and expired ones.
    pub async fn poll_pending(&self) -> Result<(), Fault> {
        let pending = intents::pending(self.db.read(), POLLS_BEFORE_RECONCILIATION).await?;
        for (intent, polls) in pending {
            match self.poll_intent(&intent, polls).await {
                Ok(()) => {}
                Err(fault) if fault.is_bank_unavailable() => return Err(fault),
                Err(fault) => {
                    tracing::error!(payment_id = intent.payment_id, %fault, "intent cannot be polled");
                }
            }
        }
        Ok(())
    }
}

/// Counts and logs a receipt that became unmatched, and logs a corrected amount.
fn log_change(stored: Option<&Receipt>, receipt: &Receipt, intent: Option<&Intent>) {
    let user_id = intent.map(|intent| intent.user_id.as_str());
    let correlation_id = intent.map(|intent| intent.correlation_id.as_str());
    if let Some(reason) = receipt.unmatched
        && stored.is_none_or(|stored| stored.unmatched != receipt.unmatched)
    {
        let reason = reason.as_str();
        metrics::counter!("payment_receipts_unmatched_total", "reason" => reason).increment(1);
        tracing::warn!(receipt_id = receipt.receipt_id, payment_id = receipt.payment_id, user_id,
            correlation_id, transaction_id = receipt.transaction_id, amount = %receipt.amount, reason,
            "received money matches no payment intent");
    }
    if let Some(stored) = stored.filter(|stored| stored.amount != receipt.amount) {
        tracing::warn!(receipt_id = receipt.receipt_id, payment_id = receipt.payment_id, user_id,
            correlation_id, before = %stored.amount, amount = %receipt.amount,
            "bank corrected the amount of a receipt");
    }
}

fn warn_on_mismatch(stored: &Intent, ask: &NewIntent) {
    if stored.amount != ask.amount || stored.method != ask.method {
        rpc::context::note_difference("CreatePaymentIntent", &ask.context.idempotency_key);
    }
}
