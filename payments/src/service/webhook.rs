//! The bank's webhooks, in HTTP and RPC form (specification 4.2.5, D29). The raw bytes are verified
//! before they are parsed.

use super::{Fault, Gateway, deposits::PaymentOutcome};
use rail::{
    Rub,
    messages::Notice,
    webhook::{InvalidSignature, Signed},
};
use service_kit::clock;
use types::PaymentStatus;

use crate::{intent::Intent, receipt};

/// Unsigned fields of the RPC form; they must match the signed body.
#[derive(Clone, Debug)]
pub struct Claim {
    pub payment_id: String,
    /// `None`: an unknown status.
    pub status: Option<PaymentStatus>,
    pub amount: Option<Rub>,
}

/// Subject of a webhook.
#[derive(Debug)]
pub enum WebhookSubject {
    Payment(Box<Intent>),
    Payout,
}

impl Gateway {
    /// Verifies, parses and applies a webhook.
    pub async fn handle_webhook(
        &self,
        signed: Signed<'_>,
        body: &[u8],
        claim: Option<Claim>,
    ) -> Result<WebhookSubject, Fault> {
        let now_s = clock::now_us() / 1_000_000;
        if let Err(InvalidSignature) = self.verifier.verify(signed, body, now_s) {
            count_webhook("INVALID_SIGNATURE");
            tracing::warn!(webhook_id = signed.id, "webhook with an invalid signature");
            return Err(Fault::InvalidSignature);
        }
        let notice: Notice = serde_json::from_slice(body).map_err(|error| {
            count_webhook("MALFORMED");
            Fault::Invalid {
                field: "webhook.provider_payload",
                problem: format!("is not a webhook of the bank: {error}"),
            }
        })?;
        match notice {
            Notice::Payment {
                payment_id,
                status,
                amount,
                transaction_id,
                ..
            } => {
                let status = PaymentStatus::from(status);
                let amount = amount.rub();
                count_webhook(status.as_str());
                if let Some(claim) = claim
                    && (claim.payment_id != payment_id
                        || claim.status != Some(status)
                        || claim.amount != amount)
                {
                    // The unsigned claim differs from the signed body.
                    return Err(Fault::InvalidSignature);
                }
                let report = PaymentOutcome {
                    payment_id: receipt::valid_payment_id(payment_id),
                    status,
                    amount,
                    transaction_id: receipt::valid_transaction_id(transaction_id),
                    webhook: Some((signed.id.to_owned(), body.to_vec())),
                };
                let intent = self.on_payment_report(&report).await?;
                Ok(WebhookSubject::Payment(Box::new(intent)))
            }
            Notice::Transfer { report, .. } => {
                count_webhook(PaymentStatus::from(report.status).as_str());
                if claim.is_some() {
                    return Err(Fault::Invalid {
                        field: "webhook.provider_payload",
                        problem: "is about a transfer, not about a payment".into(),
                    });
                }
                let payout_id = report.request_id.clone();
                self.on_transfer_report(&payout_id, &report.into()).await?;
                Ok(WebhookSubject::Payout)
            }
        }
    }
}

fn count_webhook(status: &'static str) {
    metrics::counter!("payment_webhooks_received_total", "status" => status).increment(1);
}
