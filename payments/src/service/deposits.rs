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
    intent::{Intent, PaymentMethod, Step, on_report},
    repo::{intents, receipts},
};

/// Limit of intents polled before a reconciliation; the oldest polls go first.
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
    /// Event id and body, when it came by webhook.
    pub webhook: Option<(String, Vec<u8>)>,
}

impl Gateway {
    /// Creates an intent. Returns the stored one and `true` if the user's key was used before
    /// (T12).
    pub async fn create_intent(&self, ask: NewIntent) -> Result<(Intent, bool), Fault> {
        let key = &ask.context.idempotency_key;
        if let Some(stored) = intents::by_key(self.db.read(), &ask.user_id, key).await? {
            warn_on_mismatch(&stored, &ask);
            return Ok((stored, true));
        }
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
        if !intents::insert_in_tx(&mut tx, &intent, first_poll_us.min(intent.expires_at_us)).await?
        {
            // A concurrent call with the same key won. Our payment code was never shown, so it is
            // never paid.
            let stored = intents::by_key(&mut *tx, &ask.user_id, key).await?;
            return Ok((stored.ok_or(Fault::IntentNotFound)?, true));
        }
        events::outbox::append_in_tx(&mut tx, &[emit::intent_created(&intent)]).await?;
        tx.commit().await?;
        metrics::counter!("payment_intents_created_total", "method" => ask.method.as_str())
            .increment(1);
        tracing::info!(payment_id = intent.payment_id, user_id = intent.user_id,
            amount = %intent.amount, "payment intent created");
        Ok((intent, false))
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
                let created = self.bank_seen(self.bank.create_qr(&ask_qr).await)?;
                // A link opens directly; only SBP_QR needs the picture.
                let picture = match ask.method {
                    PaymentMethod::SbpQr => created.qr_payload,
                    _ => String::new(),
                };
                (created.payment_url, picture, created.expires_at)
            }
            PaymentMethod::BankTransfer => {
                let announcement = ExpectTransfer {
                    payment_id: payment_id.clone(),
                    amount: ask.amount.into(),
                    purpose_code: purpose_code::code(&payment_id),
                    life_seconds,
                };
                let expected = self.bank_seen(self.bank.expect_transfer(&announcement).await)?;
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

    /// Applies a bank report, from a webhook or a poll.
    pub async fn on_payment_report(&self, report: &PaymentOutcome) -> Result<Intent, Fault> {
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        let Some(mut intent) = intents::get(&mut *tx, &report.payment_id).await? else {
            self.note_unmatched(tx, report, "unknown payment", now_us)
                .await?;
            return Err(Fault::IntentNotFound);
        };
        if report.amount != Some(intent.amount) {
            if intent.status != PaymentStatus::Success {
                self.note_unmatched(tx, report, "amount differs", now_us)
                    .await?;
            }
            tracing::warn!(payment_id = intent.payment_id, expected = %intent.amount,
                reported = ?report.amount, "payment report has another amount than the intent");
            return Err(Fault::AmountMismatch);
        }
        if let Some((event_id, body)) = &report.webhook {
            let (status, id) = (report.status.as_str(), &report.payment_id);
            if !receipts::note_webhook_in_tx(&mut tx, event_id, id, status, body, now_us).await? {
                metrics::counter!("payment_webhooks_repeated_total").increment(1);
                return Ok(intent);
            }
        }
        let mut deposited_now = false;
        match on_report(intent.status, report.status) {
            Step::Unchanged => {
                if report.status != intent.status {
                    metrics::counter!("payment_reports_outranked_total").increment(1);
                }
            }
            Step::Move {
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
                    receipts::resolve_unmatched_in_tx(&mut tx, &intent.payment_id).await?;
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

    /// Keeps money without a matching intent in suspense until it matches.
    async fn note_unmatched(
        &self,
        mut tx: events::Tx,
        report: &PaymentOutcome,
        reason: &str,
        now_us: i64,
    ) -> Result<(), Fault> {
        if let (PaymentStatus::Success, Some(amount)) = (report.status, report.amount) {
            receipts::note_unmatched_in_tx(&mut tx, &report.payment_id, amount, reason, now_us)
                .await?;
            tx.commit().await?;
        }
        Ok(())
    }

    /// Polls the bank for an intent, in case a webhook is lost, and expires the intent when it is
    /// due (D12).
    pub async fn poll_intent(&self, intent: &Intent, polls: u32) -> Result<(), Fault> {
        let asked = self.bank_seen(self.bank.payment_status(&intent.payment_id).await);
        let now_us = clock::now_us();
        let reported = match asked {
            Ok(report) => Some(PaymentOutcome {
                payment_id: intent.payment_id.clone(),
                status: report.status.into(),
                amount: Some(report.amount.into()),
                webhook: None,
            }),
            Err(BankError::NotFound) => None,
            Err(error) => {
                self.schedule_poll(intent, polls, now_us).await?;
                return Err(error.into());
            }
        };
        let open = reported
            .as_ref()
            .is_none_or(|report| report.status == PaymentStatus::Pending);
        if open && now_us >= intent.expires_at_us {
            // The last poll found no money: the service itself reports EXPIRED.
            self.on_payment_report(&PaymentOutcome {
                payment_id: intent.payment_id.clone(),
                status: PaymentStatus::Expired,
                amount: Some(intent.amount),
                webhook: None,
            })
            .await?;
            return Ok(());
        }
        if let Some(report) = reported.filter(|_| !open) {
            match self.on_payment_report(&report).await {
                Ok(_) => return Ok(()),
                // Stays pending and in suspense for an operator; the bank may still correct its
                // report.
                Err(Fault::AmountMismatch) => {}
                Err(fault) => return Err(fault),
            }
        }
        self.schedule_poll(intent, polls, now_us).await
    }

    async fn schedule_poll(&self, intent: &Intent, polls: u32, now_us: i64) -> Result<(), Fault> {
        let (first_ms, max_ms) = (self.config.poll_first_ms, self.config.poll_most_ms);
        let mut next_us = now_us + doubled_us(first_ms, polls.saturating_add(1), max_ms);
        if now_us < intent.expires_at_us {
            next_us = next_us.min(intent.expires_at_us);
        }
        let mut tx = self.db.write().await?;
        intents::schedule_in_tx(&mut tx, &intent.payment_id, next_us).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Polls pending intents, so that a lost webhook does not look like a difference.
    pub async fn poll_pending(&self) -> Result<(), Fault> {
        let pending = intents::due(self.db.read(), i64::MAX, POLLS_BEFORE_RECONCILIATION).await?;
        for (intent, polls) in pending {
            match self.poll_intent(&intent, polls).await {
                Ok(()) => {}
                Err(fault) if fault.is_bank_away() => return Err(fault),
                Err(fault) => {
                    tracing::error!(payment_id = intent.payment_id, %fault, "intent cannot be polled");
                }
            }
        }
        Ok(())
    }
}

fn warn_on_mismatch(stored: &Intent, ask: &NewIntent) {
    if stored.amount != ask.amount || stored.method != ask.method {
        metrics::counter!("idempotency_mismatch_total", "call" => "CreatePaymentIntent")
            .increment(1);
        tracing::warn!(payment_id = stored.payment_id, user_id = stored.user_id, stored = %stored.amount,
            asked = %ask.amount, "idempotency key was used for another intent, returning the stored one");
    }
}
