//! Webhooks as the bank sends them, signed with the secret that it shares with `payments`.
//!
//! Implements the published rule independently of the platform's code: the signature is
//! `v1,<base64 HMAC-SHA256(secret, id.timestamp.body)>`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, Mac};
use serde_json::{Value, json};
pub use service_kit::clock::now_s;
use sha2::Sha256;

use crate::{Platform, Refusal};

/// A webhook ready to send.
#[derive(Clone, Debug)]
pub struct Webhook {
    pub id: String,
    pub timestamp: String,
    pub signature: String,
    pub body: String,
}

/// The bank's notice of a payment.
pub fn notice(payment_id: &str, status: &str, rub: &str) -> Value {
    json!({ "type": "payment", "paymentId": payment_id, "status": status,
        "amount": { "value": rub, "currency": "RUB" }, "occurredAt": "2026-01-01T00:00:00Z" })
}

impl Platform {
    /// Signs a notice with the shared secret.
    pub fn signed(&self, notice: &Value, at_s: i64) -> Webhook {
        let file = std::fs::read_to_string(self.data_dir().join("keys/webhook_secret"))
            .expect("the shared secret");
        let secret = file
            .lines()
            .next()
            .and_then(|line| line.trim().strip_prefix("whsec_"))
            .expect("whsec_..");
        let secret = STANDARD.decode(secret).expect("base64");
        let (id, body) = (uuid::Uuid::now_v7().to_string(), notice.to_string());
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret).expect("any length");
        mac.update(format!("{id}.{at_s}.{body}").as_bytes());
        let signature = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
        Webhook {
            id,
            timestamp: at_s.to_string(),
            signature,
            body,
        }
    }

    /// Posts a webhook to the listener of `payments`.
    pub async fn post_webhook(&self, webhook: &Webhook) -> Result<Value, Refusal> {
        let response = self
            .http
            .post(format!("{}/webhook", self.url("payments")))
            .header("content-type", "application/json")
            .header("webhook-id", &webhook.id)
            .header("webhook-timestamp", &webhook.timestamp)
            .header("webhook-signature", &webhook.signature)
            .body(webhook.body.clone())
            .send()
            .await
            .expect("an answer");
        let status = response.status();
        let body: Value = response.json().await.unwrap_or_default();
        if status.is_success() {
            Ok(body)
        } else {
            Err(Refusal::read(status.as_u16(), body))
        }
    }
}
