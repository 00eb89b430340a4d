//! Conversions between the core's types and the messages of `dfa.payments.v1`.

use proto::{
    common::v1 as common,
    convert::{money_minor, to_money, to_timestamp_us},
    payments::v1 as pb,
};
use rail::Rub;
use rpc::Caller;
use tonic::Status;
use types::PaymentStatus;

use crate::{
    intent::{Intent, PaymentMethod},
    payout::Payout,
    receipt::{Receipt, ReceiptStatus},
    repo::reports::Report,
    service::Fault,
};

/// Retry hint for a user with too many unpaid intents, in milliseconds.
const UNPAID_RETRY_MS: u64 = 60_000;

pub fn money(amount: Rub) -> common::Money {
    to_money(amount.kopecks())
}

/// A required amount of roubles above zero.
pub fn rub(field: &'static str, amount: Option<&common::Money>) -> Result<Rub, Status> {
    money_minor(amount)
        .map(Rub::from_kopecks)
        .map_err(|error| rpc::status::invalid_argument(field, error.to_string()))
}

/// The unsigned amount of a webhook. `None` if it is not in roubles or not exact in kopecks: it
/// matches no intent.
pub fn claimed_rub(amount: Option<&common::Money>) -> Option<Rub> {
    let amount = amount.filter(|amount| amount.currency_code == rail::CURRENCY)?;
    amount.amount.as_ref()?.value.parse().ok()
}

pub fn method(method: i32) -> Result<PaymentMethod, Status> {
    PaymentMethod::from_code(method).ok_or_else(|| {
        rpc::status::invalid_argument("method", "must be SBP_C2B, SBP_QR or BANK_TRANSFER")
    })
}

/// A status filter or claim; `None` when unset.
pub fn status(field: &'static str, status: i32) -> Result<Option<PaymentStatus>, Status> {
    match (status, PaymentStatus::from_code(status)) {
        (0, _) => Ok(None),
        (_, Some(status)) => Ok(Some(status)),
        _ => Err(rpc::status::invalid_argument(field, "is not a status")),
    }
}

pub fn intent(intent: &Intent) -> pb::PaymentIntent {
    pb::PaymentIntent {
        payment_id: intent.payment_id.clone(),
        user_id: intent.user_id.clone(),
        amount: Some(money(intent.amount)),
        method: intent.method.code(),
        status: intent.status.code(),
        payment_url: intent.payment_url.clone(),
        qr_payload: intent.qr_payload.clone(),
        created_at: Some(to_timestamp_us(intent.created_at_us)),
        expires_at: Some(to_timestamp_us(intent.expires_at_us)),
        updated_at: Some(to_timestamp_us(intent.updated_at_us)),
    }
}

/// A status filter of receipts; `None` when unset.
pub fn receipt_status(status: i32) -> Result<Option<ReceiptStatus>, Status> {
    match (status, ReceiptStatus::from_code(status)) {
        (0, _) => Ok(None),
        (_, Some(status)) => Ok(Some(status)),
        _ => Err(rpc::status::invalid_argument("status", "is not a status")),
    }
}

pub fn receipt(receipt: &Receipt) -> pb::Receipt {
    pb::Receipt {
        receipt_id: receipt.receipt_id.clone(),
        bank_id: receipt.bank_id.clone(),
        transaction_id: receipt.transaction_id.clone().unwrap_or_default(),
        payment_id: receipt.payment_id.clone(),
        amount: Some(money(receipt.amount)),
        status: receipt.status().code(),
        reason: receipt.unmatched.map_or(0, |reason| reason.code()),
        assigned_payment_id: receipt.assigned.clone().unwrap_or_default(),
        refund_payout_id: receipt.refund.clone().unwrap_or_default(),
        created_at: Some(to_timestamp_us(receipt.created_at_us)),
        updated_at: Some(to_timestamp_us(receipt.updated_at_us)),
    }
}

pub fn payout(payout: &Payout) -> pb::Payout {
    pb::Payout {
        payout_id: payout.payout_id.clone(),
        user_id: payout.user_id.clone(),
        amount: Some(money(payout.amount)),
        bank_account: payout.bank_account.clone(),
        status: payout.status.code(),
        sent: payout.ordered_at_us.is_some(),
        bank_transfer_id: payout.bank_transfer_id.clone(),
        failure_code: payout.failure_code.clone(),
        failure_message: payout.failure_message.clone(),
        created_at: Some(to_timestamp_us(payout.created_at_us)),
        updated_at: Some(to_timestamp_us(payout.updated_at_us)),
        released: payout.released_at_us.is_some(),
        stopped_reason: payout.stopped.clone().unwrap_or_default(),
        refunds_receipt_id: payout.refunds_receipt.clone().unwrap_or_default(),
    }
}

/// The payout as the caller sees it: who need not know the account gets it masked.
pub fn payout_for(caller: &Caller, found: &Payout) -> pb::Payout {
    let mut shown = payout(found);
    if !caller.sees_bank_account_of(&found.user_id) {
        shown.bank_account = rail::account::masked(&found.bank_account);
    }
    shown
}

pub fn report(report: &Report) -> pb::ReconcileReport {
    let assessment = &report.assessment;
    let explained = &assessment.explained;
    pb::ReconcileReport {
        report_id: report.report_id.clone(),
        business_date: Some(to_timestamp_us(report.day.start_us())),
        bank_balance: Some(money(assessment.bank_balance)),
        token_supply: Some(money(assessment.token_supply)),
        balanced: assessment.balanced(),
        notes: assessment.notes().to_owned(),
        in_flight_deposits: Some(money(explained.in_flight_deposits)),
        in_flight_payouts: Some(money(explained.in_flight_payouts)),
        suspense: Some(money(explained.suspense)),
        unexplained_difference: Some(money(assessment.unexplained)),
        created_at: Some(to_timestamp_us(report.created_at_us)),
    }
}

/// Maps a fault to a status with the text, code and reason of D23.
impl From<Fault> for Status {
    fn from(fault: Fault) -> Status {
        use rpc::status::{
            failed_precondition, internal, invalid_argument, not_found, resource_exhausted,
            unauthenticated, unavailable,
        };

        use rail::client::BankError;
        let text = fault.to_string();
        match fault {
            Fault::InvalidSignature => unauthenticated("INVALID_SIGNATURE", text),
            Fault::IntentNotFound => not_found("PAYMENT_INTENT_NOT_FOUND", text),
            Fault::AmountMismatch => failed_precondition("AMOUNT_MISMATCH", text),
            Fault::PayoutNotFound => not_found("PAYOUT_NOT_FOUND", text),
            Fault::ReceiptNotFound => not_found("RECEIPT_NOT_FOUND", text),
            Fault::ReceiptNotOpen => failed_precondition("RECEIPT_NOT_OPEN", text),
            Fault::IntentPaid => failed_precondition("PAYMENT_INTENT_PAID", text),
            Fault::TooManyIntents => {
                resource_exhausted("TOO_MANY_PAYMENT_INTENTS", text, UNPAID_RETRY_MS)
            }
            Fault::ReportNotFound => not_found("REPORT_NOT_FOUND", text),
            Fault::LimitExceeded(_) => failed_precondition("LIMIT_EXCEEDED", text),
            Fault::PayoutSent => failed_precondition("PAYOUT_SENT", text),
            Fault::NotBurned => failed_precondition("NOT_BURNED", text),
            Fault::BurnNotFinal => failed_precondition("BURN_NOT_FINAL", text),
            Fault::DepositNotRefundable => failed_precondition("DEPOSIT_NOT_REFUNDABLE", text),
            Fault::AccountMismatch => failed_precondition("BANK_ACCOUNT_MISMATCH", text),
            Fault::Invalid { field, problem } => invalid_argument(field, problem),
            Fault::Call(error) => error.into(),
            Fault::Bank(error @ (BankError::Unavailable(_) | BankError::Protocol(_))) => {
                tracing::warn!(%error, "bank call failed");
                unavailable("Bank", 1_000)
            }
            Fault::Bank(error) => internal(&error),
            fault @ (Fault::Store(_) | Fault::Sql(_) | Fault::Amount(_)) => internal(&fault),
        }
    }
}
