//! Unmatched receipts, resolved by two persons (D51): assigned to an intent or a user, or refunded
//! to the sender.

use rail::account;
use service_clients::caused_by;
use service_kit::{audit::Act, clock};
use types::{PaymentStatus, SYSTEM_USER};
use uuid::Uuid;

use super::{Acting, Fault, Gateway, record_in_tx};
use crate::{
    api::publish as emit,
    intent::{Intent, PaymentMethod, Transition, on_report},
    payout::Payout,
    receipt::Receipt,
    repo::{intents, payouts, receipts},
};

/// Whom the money of a receipt belongs to.
#[derive(Clone, Debug)]
pub enum Owner {
    /// The user of this unpaid intent, which has the amount.
    Intent(String),
    /// This user, who gets an intent for it.
    User(String),
}

/// Arguments of `refund_receipt`.
#[derive(Clone, Debug)]
pub struct NewRefund {
    pub receipt_id: String,
    /// The sender's account.
    pub bank_account: String,
    pub reason: String,
}

impl Gateway {
    /// Assigns a receipt: its intent is paid, and tokens are minted as for every deposit. Returns
    /// both as they are now, and `true` for a used key.
    ///
    /// # Errors
    /// `ReceiptNotFound`, `ReceiptNotOpen`, `IntentNotFound`, `IntentPaid`, `AmountMismatch`.
    pub async fn assign_receipt(
        &self,
        acting: &Acting,
        receipt_id: &str,
        owner: &Owner,
        reason: &str,
    ) -> Result<(Receipt, Intent, bool), Fault> {
        if let Some(receipt_id) = acting.earlier(&self.db).await? {
            return self.assigned(&receipt_id).await;
        }
        if let Owner::User(user_id) = owner {
            // Refuses an unknown user.
            let context = caused_by(&acting.context.correlation_id);
            self.identity.profile(&context, user_id).await?;
        }
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        if let Some(receipt_id) = acting.earlier_in_tx(&mut tx).await? {
            return self.assigned(&receipt_id).await;
        }
        let found = receipts::get(&mut *tx, receipt_id).await?;
        let mut receipt = found.ok_or(Fault::ReceiptNotFound)?;
        if !receipt.is_open() {
            return Err(Fault::ReceiptNotOpen);
        }
        let before = receipt.audit_text();
        let intent = match owner {
            Owner::Intent(payment_id) => pay_intent(&mut tx, payment_id, &receipt, now_us).await?,
            Owner::User(user_id) => {
                let correlation_id = &acting.context.correlation_id;
                make_intent(&mut tx, user_id, &receipt, correlation_id, now_us).await?
            }
        };
        receipt.unmatched = None;
        receipt.assigned = Some(intent.payment_id.clone());
        receipt.updated_at_us = now_us;
        receipts::save_in_tx(&mut tx, &receipt).await?;
        let deposited = emit::fiat_deposited(&intent, now_us);
        events::outbox::append_in_tx(&mut tx, &[deposited]).await?;
        let act = Act {
            before: &before,
            after: &receipt.audit_text(),
            reason,
            ..acting.act("receipt.assigned", receipt_id)
        };
        record_in_tx(&mut tx, now_us, act).await?;
        acting.answer_in_tx(&mut tx, receipt_id).await?;
        tx.commit().await?;
        tracing::info!(receipt_id, payment_id = intent.payment_id, user_id = intent.user_id,
            amount = %receipt.amount, by = acting.caller.subject, "receipt assigned");
        Ok((receipt, intent, false))
    }

    /// The answer to a repeat of `assign_receipt`.
    async fn assigned(&self, receipt_id: &str) -> Result<(Receipt, Intent, bool), Fault> {
        let receipt = receipts::get(self.db.read(), receipt_id).await?;
        let receipt = receipt.ok_or(Fault::ReceiptNotFound)?;
        let payment_id = receipt.assigned.as_deref().unwrap_or_default();
        let intent = intents::get(self.db.read(), payment_id).await?;
        Ok((receipt, intent.ok_or(Fault::IntentNotFound)?, true))
    }

    /// Orders the refund of a receipt. The receipt is in suspense until the bank has executed it.
    /// Returns receipt and payout as they are now, and `true` for a used key.
    ///
    /// # Errors
    /// `ReceiptNotFound`, `ReceiptNotOpen`, `Invalid`.
    pub async fn refund_receipt(
        &self,
        acting: &Acting,
        ask: NewRefund,
    ) -> Result<(Receipt, Payout, bool), Fault> {
        if let Some(payout_id) = acting.earlier(&self.db).await? {
            return self.refund(&payout_id).await;
        }
        account::check(&ask.bank_account).map_err(|error| Fault::Invalid {
            field: "bank_account",
            problem: error.to_string(),
        })?;
        let now_us = clock::now_us();
        let mut tx = self.db.write().await?;
        if let Some(payout_id) = acting.earlier_in_tx(&mut tx).await? {
            return self.refund(&payout_id).await;
        }
        let found = receipts::get(&mut *tx, &ask.receipt_id).await?;
        let mut receipt = found.ok_or(Fault::ReceiptNotFound)?;
        if !receipt.is_open() {
            return Err(Fault::ReceiptNotOpen);
        }
        let before = receipt.audit_text();
        let payout = refund_of(&mut tx, &receipt, ask.bank_account, acting, now_us).await?;
        payouts::save_in_tx(&mut tx, &payout).await?;
        receipt.refund = Some(payout.payout_id.clone());
        receipt.updated_at_us = now_us;
        receipts::save_in_tx(&mut tx, &receipt).await?;
        let after = format!("{} to {}", receipt.audit_text(), payout.bank_account);
        let act = Act {
            before: &before,
            after: &after,
            reason: &ask.reason,
            ..acting.act("receipt.refunded", &receipt.receipt_id)
        };
        record_in_tx(&mut tx, now_us, act).await?;
        acting.answer_in_tx(&mut tx, &payout.payout_id).await?;
        tx.commit().await?;
        self.payouts_due.notify_one();
        tracing::info!(receipt_id = receipt.receipt_id, payout_id = payout.payout_id,
            amount = %receipt.amount, by = acting.caller.subject, "refund of a receipt ordered");
        Ok((receipt, payout, false))
    }

    /// The answer to a repeat of `refund_receipt`.
    async fn refund(&self, payout_id: &str) -> Result<(Receipt, Payout, bool), Fault> {
        let payout = payouts::get(self.db.read(), payout_id).await?;
        let payout = payout.ok_or(Fault::PayoutNotFound)?;
        let receipt_id = payout.refunds_receipt.as_deref().unwrap_or_default();
        let receipt = receipts::get(self.db.read(), receipt_id).await?;
        Ok((receipt.ok_or(Fault::ReceiptNotFound)?, payout, true))
    }
}

/// Pays an unpaid intent with a receipt of its amount.
async fn pay_intent(
    tx: &mut events::Tx,
    payment_id: &str,
    receipt: &Receipt,
    now_us: i64,
) -> Result<Intent, Fault> {
    let found = intents::get(&mut **tx, payment_id).await?;
    let mut intent = found.ok_or(Fault::IntentNotFound)?;
    if intent.amount != receipt.amount {
        return Err(Fault::AmountMismatch);
    }
    let Transition::Move { to, late, .. } = on_report(intent.status, PaymentStatus::Success) else {
        return Err(Fault::IntentPaid);
    };
    intent.status = to;
    intent.late |= late;
    intent.updated_at_us = now_us;
    intents::set_status_in_tx(tx, payment_id, to, late, now_us).await?;
    Ok(intent)
}

/// Makes a paid intent of a user for a receipt. It has no payment code.
async fn make_intent(
    tx: &mut events::Tx,
    user_id: &str,
    receipt: &Receipt,
    correlation_id: &str,
    now_us: i64,
) -> Result<Intent, Fault> {
    let reported = intents::get(&mut **tx, &receipt.payment_id).await?;
    let method = reported.map_or(PaymentMethod::BankTransfer, |intent| intent.method);
    let payment_id = Uuid::now_v7().to_string();
    let intent = Intent {
        // No call has this key: the id is new.
        idempotency_key: payment_id.clone(),
        payment_id,
        user_id: user_id.to_owned(),
        amount: receipt.amount,
        method,
        status: PaymentStatus::Success,
        payment_url: String::new(),
        qr_payload: String::new(),
        correlation_id: correlation_id.to_owned(),
        late: false,
        created_at_us: now_us,
        expires_at_us: now_us,
        updated_at_us: now_us,
    };
    let is_new = intents::insert_in_tx(tx, &intent, now_us).await?;
    assert!(is_new, "a new id is no used key: {}", intent.payment_id);
    let created = emit::intent_created(&intent);
    events::outbox::append_in_tx(tx, &[created]).await?;
    Ok(intent)
}

/// The released payout that refunds a receipt. Its user is that of the intent that the bank
/// reported; without one there is none.
async fn refund_of(
    tx: &mut events::Tx,
    receipt: &Receipt,
    bank_account: String,
    acting: &Acting,
    now_us: i64,
) -> Result<Payout, Fault> {
    let reported = intents::get(&mut **tx, &receipt.payment_id).await?;
    let user_id = reported.map_or_else(|| SYSTEM_USER.to_owned(), |intent| intent.user_id);
    Ok(Payout {
        payout_id: Uuid::now_v7().to_string(),
        stopped: payouts::blocked_reason(&mut **tx, &user_id).await?,
        user_id,
        amount: receipt.amount,
        bank_account,
        refunds: None,
        refunds_receipt: Some(receipt.receipt_id.clone()),
        status: PaymentStatus::Pending,
        released_at_us: Some(now_us),
        ordered_at_us: None,
        bank_transfer_id: String::new(),
        failure_code: String::new(),
        failure_message: String::new(),
        attempts: 0,
        next_attempt_at_us: now_us,
        idempotency_key: None,
        correlation_id: acting.context.correlation_id.clone(),
        created_at_us: now_us,
        updated_at_us: now_us,
    })
}
