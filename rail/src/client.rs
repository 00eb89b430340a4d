//! The gateway's bank client: signed requests (R021), timeouts, bounded retries, a circuit breaker
//! (D30).
//!
//! A transport failure, a 5xx, a 429 or an oversized response counts against the breaker. Reads and
//! writes that are idempotent by payment id are retried. `initiate_transfer` is sent once; after a
//! lost response the payout worker sends it again with the same request id.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use serde::{Serialize, de::DeserializeOwned};

use service_kit::{backoff, clock};

use crate::{
    Rub,
    messages::{
        Balance, CreateQr, ErrorBody, ExpectTransfer, PaymentReport, QrCreated, TransferExpected,
        TransferOrder, TransferReport,
    },
    policy::{Admitted, Breaker, ClientPolicy},
    request_signature::{KEY_ID_HEADER, SIGNATURE_HEADER, Signer, TIMESTAMP_HEADER},
};

/// Largest response body read from the bank, in bytes.
const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Why a bank call returned no valid response.
#[derive(Debug, thiserror::Error)]
pub enum BankError {
    /// No response, or a 5xx or 429. The request may or may not have been executed.
    #[error("bank is unavailable: {0}")]
    Unavailable(String),
    /// The bank has no such object.
    #[error("not found at the bank")]
    NotFound,
    /// The bank refused the request and changed nothing.
    #[error("bank refuses: HTTP {status}: {code}: {message}")]
    Refused {
        status: u16,
        code: String,
        message: String,
    },
    /// The response violates the contract.
    #[error("invalid response from the bank: {0}")]
    Protocol(String),
    #[error("bank client: {0}")]
    Client(String),
}

/// The bank's response to a transfer order.
pub enum TransferOrderResult {
    Accepted(TransferReport),
    /// Refused with the error register filled.
    Refused(TransferReport),
}

/// Client of the bank and the fast-payment system, which share one address in this contract.
pub struct BankClient {
    http: reqwest::Client,
    base: String,
    account_number: String,
    signer: Signer,
    policy: ClientPolicy,
    breaker: Mutex<Breaker>,
}

impl BankClient {
    /// `base`: `http://host:port`. `account_number`: the platform's own account.
    ///
    /// # Errors
    /// [`BankError::Client`].
    pub fn new(
        base: &str,
        account_number: &str,
        signer: Signer,
        policy: ClientPolicy,
    ) -> Result<BankClient, BankError> {
        // Fails only when the process has a provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_millis(policy.connect_timeout_ms))
            .timeout(Duration::from_millis(policy.call_timeout_ms))
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| BankError::Client(error.to_string()))?;
        Ok(BankClient {
            http,
            base: base.trim_end_matches('/').to_owned(),
            account_number: account_number.to_owned(),
            signer,
            policy,
            breaker: Mutex::default(),
        })
    }

    /// createQR; idempotent by payment id.
    #[boxed]
    pub async fn create_qr(&self, ask: &CreateQr) -> Result<QrCreated, BankError> {
        self.post("/sbp/v1/qr", ask).await
    }

    /// Announces a transfer from another bank; idempotent by payment id.
    #[boxed]
    pub async fn expect_transfer(
        &self,
        ask: &ExpectTransfer,
    ) -> Result<TransferExpected, BankError> {
        self.post("/bank/v1/incoming", ask).await
    }

    /// getPaymentStatus.
    #[boxed]
    pub async fn payment_status(&self, payment_id: &str) -> Result<PaymentReport, BankError> {
        self.get(&format!("/sbp/v1/payments/{payment_id}")).await
    }

    /// getBalance of the platform's account.
    #[boxed]
    pub async fn balance(&self) -> Result<Rub, BankError> {
        let path = format!("/bank/v1/accounts/{}/balance", self.account_number);
        let balance: Balance = self.get(&path).await?;
        balance
            .balance
            .rub()
            .ok_or_else(|| BankError::Protocol("balance is not an amount of roubles".into()))
    }

    /// initiateTransfer: one attempt.
    #[boxed]
    pub async fn initiate_transfer(
        &self,
        request_id: &str,
        recipient_account: &str,
        amount: Rub,
        purpose: &str,
    ) -> Result<TransferOrderResult, BankError> {
        let order = TransferOrder {
            request_id: request_id.to_owned(),
            account_number: self.account_number.clone(),
            recipient_account: recipient_account.to_owned(),
            amount: amount.into(),
            purpose: purpose.to_owned(),
        };
        let (status, body) = self
            .attempt("POST", "/bank/v1/transfers", &encode(&order)?)
            .await?;
        // 422 carries the error register: a contract response, not a failed call.
        if status == 422
            && let Ok(report) = decode::<TransferReport>(&body)
        {
            return Ok(TransferOrderResult::Refused(report));
        }
        read(status, &body).map(TransferOrderResult::Accepted)
    }

    /// getTransferStatus.
    #[boxed]
    pub async fn transfer_status(&self, transfer_id: &str) -> Result<TransferReport, BankError> {
        self.get(&format!("/bank/v1/transfers/{transfer_id}")).await
    }

    async fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, BankError> {
        self.repeat("GET", path, &[]).await
    }

    async fn post<A: DeserializeOwned>(
        &self,
        path: &str,
        ask: &impl Serialize,
    ) -> Result<A, BankError> {
        self.repeat("POST", path, &encode(ask)?).await
    }

    async fn repeat<A: DeserializeOwned>(
        &self,
        method: &'static str,
        path: &str,
        body: &[u8],
    ) -> Result<A, BankError> {
        let first = Duration::from_millis(self.policy.retry_pause_ms);
        let mut attempt = 1;
        loop {
            match self.attempt(method, path, body).await {
                Ok((status, answer)) => return read(status, &answer),
                Err(error) if attempt >= self.policy.tries => return Err(error),
                Err(error) => tracing::warn!(%error, path, attempt, "bank call failed, retrying"),
            }
            tokio::time::sleep(backoff::doubled(first, attempt - 1, Duration::MAX)).await;
            attempt += 1;
        }
    }

    /// Sends one signed request; returns status and body. `Err` only without a usable response.
    async fn attempt(
        &self,
        method: &'static str,
        path: &str,
        body: &[u8],
    ) -> Result<(u16, Vec<u8>), BankError> {
        let Some(mut call) = Call::begin(self) else {
            return Err(BankError::Unavailable("circuit breaker is open".into()));
        };
        let now_s = clock::now_s();
        let url = format!("{}{path}", self.base);
        let request = match method {
            "GET" => self.http.get(url),
            _ => self.http.post(url).body(body.to_vec()),
        };
        let request = request
            .header("content-type", "application/json")
            .header(KEY_ID_HEADER, self.signer.key_id())
            .header(TIMESTAMP_HEADER, now_s)
            .header(
                SIGNATURE_HEADER,
                self.signer.sign(method, path, now_s, body),
            );
        let unavailable =
            |error: reqwest::Error| BankError::Unavailable(error.without_url().to_string());
        let mut answer = request.send().await.map_err(unavailable)?;
        let status = answer.status().as_u16();
        let mut bytes = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(unavailable)? {
            if bytes.len() + chunk.len() > ANSWER_BYTES_MAX {
                return Err(BankError::Protocol("response is too long".into()));
            }
            bytes.extend_from_slice(&chunk);
        }
        if status >= 500 || status == 429 {
            return Err(BankError::Unavailable(format!("HTTP {status}")));
        }
        call.succeeded = true;
        Ok((status, bytes))
    }

    fn with_breaker<T>(&self, act: impl FnOnce(&mut Breaker) -> T) -> T {
        act(&mut self.breaker.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One admitted call. On drop it records the result in the breaker, also when the call is
/// cancelled.
struct Call<'a> {
    client: &'a BankClient,
    admitted: Admitted,
    succeeded: bool,
}

impl<'a> Call<'a> {
    /// `None`: the breaker is open. No guard is made then, because its drop would count as a
    /// failure.
    fn begin(client: &'a BankClient) -> Option<Call<'a>> {
        let admitted = client.with_breaker(|breaker| breaker.admit(monotonic_us()))?;
        Some(Call {
            client,
            admitted,
            succeeded: false,
        })
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let client = self.client;
        client.with_breaker(|breaker| {
            let now_us = monotonic_us();
            breaker.record(self.admitted, self.succeeded, now_us, &client.policy);
        });
    }
}

/// Monotonic microseconds, so a clock step neither shortens nor extends the breaker's pause.
fn monotonic_us() -> i64 {
    i64::try_from(clock::monotonic_ns() / 1_000).unwrap_or(i64::MAX)
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>, BankError> {
    serde_json::to_vec(message).map_err(|error| BankError::Client(error.to_string()))
}

fn decode<A: DeserializeOwned>(body: &[u8]) -> Result<A, BankError> {
    serde_json::from_slice(body).map_err(|error| BankError::Protocol(error.to_string()))
}

fn read<A: DeserializeOwned>(status: u16, body: &[u8]) -> Result<A, BankError> {
    match status {
        200..300 => decode(body),
        404 => Err(BankError::NotFound),
        _ => {
            let refusal = decode::<ErrorBody>(body)
                .map_err(|_| BankError::Protocol(format!("HTTP {status}")))?;
            Err(BankError::Refused {
                status,
                code: refusal.code,
                message: refusal.message,
            })
        }
    }
}
