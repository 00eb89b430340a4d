//! Use cases: they load state, apply the core's rules, and commit the result with its events.

mod deposits;
mod payouts;
mod receipts;
mod reconciliation;
mod webhook;

use events::calls::{self, Answered, CallKey};
use rail::{RubError, client::BankClient, client::BankError, webhook::Verifier};
use rpc::{Caller, Context, context::Once};
use service_clients::{CallError, IdentityClient};
use service_kit::{KeyedMutex, audit::Act};
use tokio::sync::{Mutex, Notify};

use crate::{config::PaymentsConfig, tokens::Tokens};

pub use deposits::NewIntent;
pub use payouts::NewPayout;
pub use receipts::{NewRefund, Owner};
pub use webhook::{Claim, WebhookSubject};

/// Name of this service in its audit records.
pub const SERVICE: &str = "payments";

/// The caller of a write that acts once per key (D50).
pub struct Acting {
    pub caller: Caller,
    pub context: Context,
    pub once: Once,
}

impl Acting {
    fn key(&self) -> CallKey {
        CallKey {
            call: self.once.call,
            subject: self.once.subject.clone(),
            key: self.once.key.clone(),
        }
    }

    /// The object of an earlier call with the key. Logs and counts other content.
    async fn earlier(&self, db: &events::Sqlite) -> Result<Option<String>, Fault> {
        self.object_of(calls::find(db.read(), &self.key()).await?)
    }

    /// The same in the transaction of a new call.
    async fn earlier_in_tx(&self, tx: &mut events::Tx) -> Result<Option<String>, Fault> {
        self.object_of(calls::find(&mut **tx, &self.key()).await?)
    }

    fn object_of(&self, stored: Option<Answered>) -> Result<Option<String>, Fault> {
        let Some(stored) = stored else {
            return Ok(None);
        };
        if stored.digest != self.once.digest {
            rpc::context::note_difference(self.once.call, &self.once.key);
        }
        let damaged = |error: std::string::FromUtf8Error| sqlx::Error::Decode(Box::new(error));
        let object_id = String::from_utf8(stored.answer).map_err(damaged)?;
        Ok(Some(object_id))
    }

    /// Stores the object that answers repeats.
    async fn answer_in_tx(&self, tx: &mut events::Tx, object_id: &str) -> Result<(), Fault> {
        let answered = Answered {
            digest: self.once.digest,
            answer: object_id.as_bytes().to_vec(),
        };
        calls::store_in_tx(tx, &self.key(), &answered).await?;
        Ok(())
    }

    /// What the caller did to an object, without states and reason.
    fn act<'a>(&'a self, action: &'a str, object_id: &'a str) -> Act<'a> {
        rpc::audit::act(&self.caller, &self.context, action, object_id)
    }
}

/// Records what a caller did (D34).
async fn record_in_tx(tx: &mut events::Tx, now_us: i64, act: Act<'_>) -> Result<(), Fault> {
    events::audit::append_in_tx(tx, SERVICE, now_us, act, rpc::audit::event).await?;
    Ok(())
}

/// Dependencies of the use cases.
pub struct Gateway {
    pub config: PaymentsConfig,
    pub db: events::Sqlite,
    pub bank: BankClient,
    pub verifier: Verifier,
    pub identity: IdentityClient,
    pub tokens: Tokens,
    pub health: rpc::Health,
    /// Wakes the payout worker.
    pub payouts_due: Notify,
    /// Notified of each stored report.
    pub reported: Notify,
    /// One reconciliation at a time.
    reconciling: Mutex<()>,
    /// One step at a time per payout id, so that worker and reconciliation do not order or poll a
    /// payout in parallel. Held from the read of the payout until the bank's response is recorded.
    stepping: KeyedMutex<String>,
}

impl Gateway {
    pub fn new(
        config: PaymentsConfig,
        db: events::Sqlite,
        bank: BankClient,
        verifier: Verifier,
        identity: IdentityClient,
        tokens: Tokens,
        health: rpc::Health,
    ) -> Gateway {
        Gateway {
            config,
            db,
            bank,
            verifier,
            identity,
            tokens,
            health,
            payouts_due: Notify::new(),
            reported: Notify::new(),
            reconciling: Mutex::new(()),
            stepping: KeyedMutex::default(),
        }
    }

    /// Records the result of a bank call in the health.
    fn record_bank_health<T>(&self, result: Result<T, BankError>) -> Result<T, BankError> {
        match &result {
            Err(error @ (BankError::Unavailable(_) | BankError::Protocol(_))) => {
                self.health.set_failing("bank", error.to_string());
            }
            _ => self.health.set_ok("bank"),
        }
        result
    }
}

impl Fault {
    /// Whether the bank is unavailable for all calls, not only for this one.
    pub fn is_bank_unavailable(&self) -> bool {
        matches!(self, Self::Bank(BankError::Unavailable(_)))
    }
}

/// Why a use case failed: business rejections first, then operational errors.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("Invalid signature")]
    InvalidSignature,
    #[error("Payment intent not found")]
    IntentNotFound,
    #[error("Amount mismatch")]
    AmountMismatch,
    #[error("Payout not found")]
    PayoutNotFound,
    #[error("Receipt not found")]
    ReceiptNotFound,
    #[error("Receipt is not open")]
    ReceiptNotOpen,
    #[error("Payment intent is paid")]
    IntentPaid,
    #[error("Too many unpaid payment intents")]
    TooManyIntents,
    #[error("Reconciliation report not found")]
    ReportNotFound,
    /// The reason of the limit check, verbatim.
    #[error("{0}")]
    LimitExceeded(String),
    #[error("Payout is at the bank already")]
    PayoutSent,
    #[error("No tokens of this user and amount were burned for this payout")]
    NotBurned,
    #[error("Burn is not final")]
    BurnNotFinal,
    #[error("Deposit is not open for a refund")]
    DepositNotRefundable,
    #[error("Bank account is not that of the user's profile")]
    AccountMismatch,
    #[error("{field}: {problem}")]
    Invalid {
        field: &'static str,
        problem: String,
    },

    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Bank(#[from] BankError),
    #[error(transparent)]
    Store(#[from] events::Error),
    #[error("store failed: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("amount: {0}")]
    Amount(#[from] RubError),
}
