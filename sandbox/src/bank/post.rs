//! The bank's workers: clearing of transfers, and webhooks (Standard Webhooks, D29).
//!
//! All attempts of a webhook share its id and body; timestamp and signature are per attempt. 2xx
//! ends it, and so does 4xx (refused by the gateway). Anything else is retried with a growing
//! pause.

use rail::webhook::{ID_HEADER, SIGNATURE_HEADER, Secret, TIMESTAMP_HEADER};
use service_kit::{backoff::doubled_us, clock};
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

use super::{
    BankConfig,
    desk::{Desk, Fault, Refusal},
    repo::{self, Queued},
};

const BATCH: i64 = 64;
const TIMEOUT_MS: u64 = 5_000;
/// Longest sleep without a notification.
const SLEEP_MS_MAX: u64 = 500;

/// Clears transfers as they arrive.
pub async fn run_clearing(desk: Arc<Desk>, shutdown: CancellationToken) {
    loop {
        let cleared = tokio::select! {
            () = shutdown.cancelled() => return,
            cleared = desk.clear_transfers() => cleared,
        };
        seen(&desk, &cleared);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = desk.taken.notified() => {}
            () = tokio::time::sleep(Duration::from_millis(SLEEP_MS_MAX)) => {}
        }
    }
}

/// Sends webhooks.
pub struct Postman {
    http: reqwest::Client,
    url: String,
    secret: Secret,
    pause_first_ms: u64,
    pause_most_ms: u64,
    attempts_max: u32,
}

impl Postman {
    /// The first secret signs.
    pub fn new(config: &BankConfig, secrets: Vec<Secret>) -> Result<Postman, reqwest::Error> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        Ok(Postman {
            http: reqwest::Client::builder()
                .timeout(Duration::from_millis(TIMEOUT_MS))
                .no_proxy()
                .build()?,
            url: config.webhook_url.clone(),
            secret: secrets
                .into_iter()
                .next()
                .expect("keys contain at least one secret"),
            pause_first_ms: config.webhook_pause_first_ms,
            pause_most_ms: config.webhook_pause_most_ms,
            attempts_max: config.webhook_attempts_max,
        })
    }

    pub async fn run(self, desk: Arc<Desk>, shutdown: CancellationToken) {
        loop {
            let round = tokio::select! {
                () = shutdown.cancelled() => return,
                round = self.round(&desk) => round,
            };
            seen(&desk, &round);
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = desk.written.notified() => {}
                () = tokio::time::sleep(Duration::from_millis(SLEEP_MS_MAX)) => {}
            }
        }
    }

    async fn round(&self, desk: &Desk) -> Result<(), Refusal> {
        if repo::has_fault(desk.db.read(), Fault::WebhookLost, "").await? {
            return Ok(());
        }
        let forged = repo::has_fault(desk.db.read(), Fault::WebhookForged, "").await?;
        let twice = repo::has_fault(desk.db.read(), Fault::WebhookTwice, "").await?;
        for queued in repo::due_webhooks(desk.db.read(), clock::now_us(), BATCH).await? {
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
            let pause_us = doubled_us(self.pause_first_ms, queued.attempts, self.pause_most_ms);
            let next_us = clock::now_us() + pause_us;
            let mut tx = desk.db.write().await?;
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

fn seen(desk: &Desk, result: &Result<(), Refusal>) {
    match result {
        Ok(()) => desk.health.set_ok("bank"),
        Err(error) => {
            tracing::error!(%error, "bank worker failed");
            desk.health.set_failing("bank", "store failed");
        }
    }
}
