//! The bank's workers: clearing of transfers, and webhooks (Standard Webhooks, D29).
//!
//! All attempts of a webhook share its id and body; timestamp and signature are per attempt. A 2xx
//! ends the delivery, and so does a 4xx (refused by the gateway). Any other result is retried with
//! growing pauses, up to `webhook_attempts_max` attempts.

use rail::webhook::{ID_HEADER, SIGNATURE_HEADER, Secret, TIMESTAMP_HEADER};
use service_kit::{backoff::doubled_us, clock};
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

use super::{
    BankConfig,
    operations::{Bank, Fault, Refusal},
    repo::{self, Queued},
};

const BATCH: i64 = 64;
const TIMEOUT_MS: u64 = 5_000;
/// Longest sleep without a notification.
const SLEEP_MS_MAX: u64 = 500;

/// Clears transfers as they arrive.
pub async fn run_clearing(bank: Arc<Bank>, shutdown: CancellationToken) {
    loop {
        let cleared = tokio::select! {
            () = shutdown.cancelled() => return,
            cleared = bank.clear_transfers() => cleared,
        };
        record_health(&bank, &cleared);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = bank.transfers_due.notified() => {}
            () = tokio::time::sleep(Duration::from_millis(SLEEP_MS_MAX)) => {}
        }
    }
}

/// Sends webhooks.
pub struct WebhookSender {
    http: reqwest::Client,
    url: String,
    secret: Secret,
    retry_delay_ms: u64,
    retry_delay_max_ms: u64,
    attempts_max: u32,
}

impl WebhookSender {
    /// The first secret signs.
    pub fn new(config: &BankConfig, secrets: Vec<Secret>) -> Result<WebhookSender, reqwest::Error> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(WebhookSender {
            http: reqwest::Client::builder()
                .timeout(Duration::from_millis(TIMEOUT_MS))
                .no_proxy()
                .build()?,
            url: config.webhook_url.clone(),
            secret: secrets
                .into_iter()
                .next()
                .expect("keys contain at least one secret"),
            retry_delay_ms: config.webhook_pause_first_ms,
            retry_delay_max_ms: config.webhook_pause_most_ms,
            attempts_max: config.webhook_attempts_max,
        })
    }

    pub async fn run(self, bank: Arc<Bank>, shutdown: CancellationToken) {
        loop {
            let sent = tokio::select! {
                () = shutdown.cancelled() => return,
                sent = self.send_due(&bank) => sent,
            };
            record_health(&bank, &sent);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = bank.webhooks_due.notified() => {}
                () = tokio::time::sleep(Duration::from_millis(SLEEP_MS_MAX)) => {}
            }
        }
    }

    /// Sends the due webhooks once each.
    async fn send_due(&self, bank: &Bank) -> Result<(), Refusal> {
        if repo::has_fault(bank.db.read(), Fault::WebhookLost, "").await? {
            return Ok(());
        }
        let forged = repo::has_fault(bank.db.read(), Fault::WebhookForged, "").await?;
        let twice = repo::has_fault(bank.db.read(), Fault::WebhookTwice, "").await?;
        for queued in repo::due_webhooks(bank.db.read(), clock::now_us(), BATCH).await? {
            if twice {
                self.send(&queued, forged).await;
            }
            let status = self.send(&queued, forged).await;
            let attempts = queued.attempts + 1;
            let state = match status {
                Some(200..300) => "DELIVERED",
                Some(400..500) => "REFUSED",
                _ if attempts >= self.attempts_max => "GIVEN_UP",
                _ => "QUEUED",
            };
            let pause_us = doubled_us(
                self.retry_delay_ms,
                queued.attempts,
                self.retry_delay_max_ms,
            );
            let next_us = clock::now_us() + pause_us;
            let mut tx = bank.db.write().await?;
            repo::end_attempt_in_tx(&mut tx, &queued.webhook_id, state, next_us).await?;
            tx.commit().await?;
            if state != "DELIVERED" {
                tracing::warn!(
                    webhook_id = queued.webhook_id,
                    ?status,
                    state,
                    "webhook was not accepted"
                );
            }
        }
        Ok(())
    }

    /// One attempt; `None` if the gateway is unreachable.
    async fn send(&self, queued: &Queued, forged: bool) -> Option<u16> {
        let now_s = clock::now_us() / 1_000_000;
        let signature = if forged {
            let wrong = Secret::new(b"another party's secret".to_vec());
            wrong.sign(&queued.webhook_id, now_s, &queued.body)
        } else {
            self.secret.sign(&queued.webhook_id, now_s, &queued.body)
        };
        let answer = self
            .http
            .post(&self.url)
            .header("content-type", "application/json")
            .header(ID_HEADER, &queued.webhook_id)
            .header(TIMESTAMP_HEADER, now_s)
            .header(SIGNATURE_HEADER, signature)
            .body(queued.body.clone())
            .send()
            .await;
        Some(answer.ok()?.status().as_u16())
    }
}

fn record_health(bank: &Bank, result: &Result<(), Refusal>) {
    match result {
        Ok(()) => bank.health.set_ok("bank"),
        Err(error) => {
            tracing::error!(%error, "bank worker failed");
            bank.health.set_failing("bank", "store failed");
        }
    }
}
