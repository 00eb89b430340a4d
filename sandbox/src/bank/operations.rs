//! The bank's operations: payment codes, payments, transfers and their clearing.
//!
//! An operation and its webhook share one transaction. A transfer is accepted (PENDING), then
//! cleared: executed, refused with an error register, or held by a fault. The balance changes on
//! execution. Until then the amounts of accepted transfers are reserved.

use events::Sqlite;
use rail::{
    Rub, account,
    messages::{
        Balance, CreateQr, ErrorBody, ExpectTransfer, Notice, PaymentReport, QrCreated,
        RegisterEntry, Status, TransferExpected, TransferOrder, TransferReport, time_text,
    },
    purpose_code,
    sbp_link::{LinkKind, SbpLink},
};
use rand::Rng;
use service_kit::clock;
use tokio::sync::Notify;
use types::{PaymentStatus, code_enum};
use uuid::Uuid;

use super::{BankConfig, repo};

/// Maximum lifetime of a code: 90 days.
const LIFE_SECONDS_MAX: u32 = 90 * 86_400;

/// A payable code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    pub payment_id: String,
    /// The link, or the purpose code of a bank transfer.
    pub payload: String,
    pub amount: Rub,
    pub purpose: String,
    pub status: PaymentStatus,
    /// The amount that was paid.
    pub paid: Option<Rub>,
    pub transaction_id: Option<String>,
    pub created_at_us: i64,
    pub expires_at_us: i64,
}

/// A transfer from the platform's account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub transfer_id: String,
    pub request_id: String,
    pub recipient_account: String,
    pub amount: Rub,
    pub purpose: String,
    pub status: PaymentStatus,
    pub error_code: String,
    pub error_message: String,
    pub created_at_us: i64,
}

impl Transfer {
    pub fn report(&self) -> TransferReport {
        let error = RegisterEntry {
            code: self.error_code.clone(),
            message: self.error_message.clone(),
        };
        TransferReport {
            transfer_id: self.transfer_id.clone(),
            request_id: self.request_id.clone(),
            status: wire_status(self.status),
            amount: self.amount.into(),
            error_register: if error.code.is_empty() {
                Vec::new()
            } else {
                vec![error]
            },
        }
    }
}

code_enum! {
    /// Injectable bank fault.
    Fault: i32 {
        RefuseTransfer = 2 "REFUSE_TRANSFER",
        HoldTransfer = 3 "HOLD_TRANSFER",
        Unavailable = 4 "UNAVAILABLE",
        WebhookTwice = 5 "WEBHOOK_TWICE",
        WebhookForged = 6 "WEBHOOK_FORGED",
        WebhookAmount = 7 "WEBHOOK_AMOUNT",
        WebhookLost = 8 "WEBHOOK_LOST",
    }
}

/// Why the bank does not execute a request.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{}", .0.message)]
    BadRequest(ErrorBody),
    #[error("not found")]
    NotFound,
    #[error(transparent)]
    Store(#[from] events::Error),
    #[error(transparent)]
    Sql(#[from] sqlx::Error),
}

pub fn bad_request(code: &str, message: impl Into<String>) -> Refusal {
    Refusal::BadRequest(ErrorBody {
        code: code.to_owned(),
        message: message.into(),
    })
}

/// The bank's state and operations.
pub struct Bank {
    pub config: BankConfig,
    pub db: Sqlite,
    pub health: rpc::Health,
    /// Wakes the clearing worker.
    pub transfers_due: Notify,
    /// Wakes the webhook worker.
    pub webhooks_due: Notify,
}

impl Bank {
    pub async fn open(config: BankConfig, db: Sqlite) -> Result<Bank, super::Error> {
        let balance = Rub::from_kopecks(config.initial_balance_kopecks);
        let mut tx = db.write().await?;
        repo::open_account_in_tx(&mut tx, &config.account_number, balance).await?;
        tx.commit().await?;
        Ok(Bank {
            config,
            db,
            health: rpc::Health::new("sandbox"),
            transfers_due: Notify::new(),
            webhooks_due: Notify::new(),
        })
    }

    /// createQR.
    pub async fn create_qr(&self, ask: CreateQr) -> Result<QrCreated, Refusal> {
        let amount: Rub = ask.amount.into();
        let link = SbpLink::new(
            &code_id(),
            LinkKind::Dynamic,
            &self.config.member_id,
            Some(amount),
        )
        .map_err(|error| bad_request("INVALID_REQUEST", error.to_string()))?
        .to_string();
        let code = self
            .make_code(ask.payment_id, link, amount, ask.purpose, ask.life_seconds)
            .await?;
        Ok(QrCreated {
            qr_payload: code.payload.clone(),
            payment_url: code.payload,
            expires_at: time_text(code.expires_at_us),
        })
    }

    /// Announces a transfer from another bank.
    pub async fn expect_transfer(&self, ask: ExpectTransfer) -> Result<TransferExpected, Refusal> {
        let amount = ask.amount.rub().filter(|amount| amount.is_positive());
        let amount = amount.ok_or_else(|| {
            bad_request(
                "INVALID_AMOUNT",
                "amount must be a positive number of roubles",
            )
        })?;
        if purpose_code::payment_id(&ask.purpose_code) != Some(ask.payment_id.as_str()) {
            return Err(bad_request(
                "INVALID_REQUEST",
                "purposeCode belongs to another payment",
            ));
        }
        let code = self
            .make_code(
                ask.payment_id,
                ask.purpose_code,
                amount,
                "Bank transfer".into(),
                ask.life_seconds,
            )
            .await?;
        Ok(TransferExpected {
            expires_at: time_text(code.expires_at_us),
        })
    }

    /// Stores a code. Idempotent by payment id: returns the first one.
    async fn make_code(
        &self,
        payment_id: String,
        payload: String,
        amount: Rub,
        purpose: String,
        life_seconds: u32,
    ) -> Result<Code, Refusal> {
        if payment_id.is_empty() || payment_id.len() > 64 {
            return Err(bad_request(
                "INVALID_REQUEST",
                "paymentId must have 1 to 64 characters",
            ));
        }
        if life_seconds == 0 || life_seconds > LIFE_SECONDS_MAX {
            return Err(bad_request(
                "INVALID_REQUEST",
                "lifetime must be 1 second to 90 days",
            ));
        }
        let mut tx = self.db.write().await?;
        if let Some(code) = repo::code_of(&mut *tx, &payment_id).await? {
            if code.amount != amount {
                return Err(bad_request(
                    "PAYMENT_ID_REUSED",
                    "paymentId has another amount",
                ));
            }
            return Ok(code);
        }
        let now_us = clock::now_us();
        let code = Code {
            payment_id,
            payload,
            amount,
            purpose,
            status: PaymentStatus::Pending,
            paid: None,
            transaction_id: None,
            created_at_us: now_us,
            expires_at_us: now_us + i64::from(life_seconds) * 1_000_000,
        };
        repo::save_code_in_tx(&mut tx, &code).await?;
        tx.commit().await?;
        Ok(code)
    }

    /// getPaymentStatus.
    pub async fn payment_status(&self, payment_id: &str) -> Result<PaymentReport, Refusal> {
        let code = repo::code_of(self.db.read(), payment_id)
            .await?
            .ok_or(Refusal::NotFound)?;
        let mut status = code.status;
        if status == PaymentStatus::Pending && clock::now_us() >= code.expires_at_us {
            status = PaymentStatus::Expired;
        }
        Ok(PaymentReport {
            payment_id: code.payment_id.clone(),
            status: wire_status(status),
            amount: self.reported_amount(&code).await?.into(),
            transaction_id: code.transaction_id,
        })
    }

    /// The amount to report: a kopeck too much under the WEBHOOK_AMOUNT fault.
    async fn reported_amount(&self, code: &Code) -> Result<Rub, Refusal> {
        let amount = code.paid.unwrap_or(code.amount);
        let reports_wrong_amount =
            repo::has_fault(self.db.read(), Fault::WebhookAmount, "").await?;
        let kopeck = Rub::from_kopecks(i64::from(reports_wrong_amount));
        Ok(amount.plus(kopeck).unwrap_or(amount))
    }

    /// getBalance.
    pub async fn balance(&self, account_number: &str) -> Result<Balance, Refusal> {
        if account_number != self.config.account_number {
            return Err(Refusal::NotFound);
        }
        let balance = repo::balance(self.db.read(), account_number).await?;
        Ok(Balance {
            account_number: account_number.to_owned(),
            balance: balance.into(),
        })
    }

    /// initiateTransfer; idempotent by request id. A refused order is also stored as a transfer,
    /// with an error register.
    pub async fn accept_order(&self, order: TransferOrder) -> Result<Transfer, Refusal> {
        let amount = order.amount.rub().filter(|amount| amount.is_positive());
        let amount = amount.ok_or_else(|| {
            bad_request(
                "INVALID_AMOUNT",
                "amount must be a positive number of roubles",
            )
        })?;
        if order.account_number != self.config.account_number {
            return Err(bad_request(
                "UNKNOWN_ACCOUNT",
                "account is not the caller's",
            ));
        }
        if order.request_id.is_empty() || order.request_id.len() > 128 {
            return Err(bad_request(
                "INVALID_REQUEST",
                "requestId must have 1 to 128 characters",
            ));
        }
        let mut tx = self.db.write().await?;
        if let Some(known) = repo::transfer_of_request(&mut *tx, &order.request_id).await? {
            if known.amount != amount || known.recipient_account != order.recipient_account {
                return Err(bad_request(
                    "REQUEST_ID_REUSED",
                    "requestId belongs to another transfer",
                ));
            }
            return Ok(known);
        }
        let now_us = clock::now_us();
        let mut transfer = Transfer {
            transfer_id: Uuid::now_v7().to_string(),
            request_id: order.request_id,
            recipient_account: order.recipient_account,
            amount,
            purpose: order.purpose,
            status: PaymentStatus::Pending,
            error_code: String::new(),
            error_message: String::new(),
            created_at_us: now_us,
        };
        let refusal = self.check_transfer(&mut tx, &transfer).await?;
        if let Some((code, message)) = refusal {
            transfer.status = PaymentStatus::Failed;
            transfer.error_code = code.to_owned();
            transfer.error_message = message;
        }
        repo::save_transfer_in_tx(&mut tx, &transfer).await?;
        tx.commit().await?;
        self.transfers_due.notify_one();
        Ok(transfer)
    }

    /// Checks the recipient's account and the available balance; returns the code and message of a
    /// refusal.
    async fn check_transfer(
        &self,
        tx: &mut events::Tx,
        transfer: &Transfer,
    ) -> Result<Option<(&'static str, String)>, Refusal> {
        let account = account::check(&transfer.recipient_account);
        let lenient = !self.config.control_key_check;
        match account {
            Err(account::AccountError::ControlKey) if lenient => {}
            Err(error) => return Ok(Some(("INVALID_RECIPIENT_ACCOUNT", error.to_string()))),
            Ok(()) => {}
        }
        let balance = repo::balance(&mut **tx, &self.config.account_number).await?;
        let reserved = repo::reserved(&mut **tx).await?;
        let free = balance.minus(reserved).unwrap_or(Rub::ZERO);
        if transfer.amount > free {
            return Ok(Some((
                "INSUFFICIENT_FUNDS",
                format!("{free} RUB available"),
            )));
        }
        Ok(None)
    }

    /// getTransferStatus.
    pub async fn transfer(&self, transfer_id: &str) -> Result<Transfer, Refusal> {
        let found = repo::transfer_of(self.db.read(), transfer_id).await?;
        found.ok_or(Refusal::NotFound)
    }

    /// Executes or refuses accepted transfers, except those held by a fault. A transfer that cannot
    /// be cleared does not stop the others; returns the first error.
    pub async fn clear_transfers(&self) -> Result<(), Refusal> {
        let mut cleared = Ok(());
        for open in repo::open_transfers(self.db.read()).await? {
            let transfer_id = open.transfer_id.clone();
            if let Err(error) = self.clear(open).await {
                tracing::error!(transfer_id, %error, "transfer cannot be cleared; retrying later");
                cleared = cleared.and(Err(error));
            }
        }
        cleared
    }

    async fn clear(&self, mut transfer: Transfer) -> Result<(), Refusal> {
        let account = transfer.recipient_account.as_str();
        if repo::has_fault(self.db.read(), Fault::HoldTransfer, account).await? {
            return Ok(());
        }
        let refuse = repo::has_fault(self.db.read(), Fault::RefuseTransfer, account).await?;
        let mut tx = self.db.write().await?;
        if refuse {
            transfer.status = PaymentStatus::Failed;
            transfer.error_code = "RECIPIENT_ACCOUNT_CLOSED".into();
            transfer.error_message = "Recipient's bank returned the transfer".into();
        } else {
            transfer.status = PaymentStatus::Success;
            let debit = Rub::from_kopecks(-transfer.amount.kopecks());
            repo::move_money_in_tx(&mut tx, &self.config.account_number, debit).await?;
        }
        repo::save_transfer_in_tx(&mut tx, &transfer).await?;
        let now_us = clock::now_us();
        let notice = Notice::Transfer {
            report: transfer.report(),
            occurred_at: time_text(now_us),
        };
        let webhook_id = format!("transfer-{}", transfer.transfer_id);
        queue(&mut tx, &webhook_id, &notice, now_us).await?;
        tx.commit().await?;
        self.webhooks_due.notify_one();
        Ok(())
    }

    /// Pays a code as the payer would. A code has one outcome: one that has failed or expired is
    /// not paid any more.
    pub async fn pay_in_tx(
        &self,
        tx: &mut events::Tx,
        text: &str,
        amount: Option<Rub>,
        outcome: PaymentStatus,
    ) -> Result<(String, PaymentStatus), Refusal> {
        let payload = payload_of(text)?;
        let reports_wrong_amount =
            repo::has_fault(self.db.read(), Fault::WebhookAmount, "").await?;
        let found = repo::code_by_payload(&mut **tx, &payload).await?;
        let mut code = found.ok_or(Refusal::NotFound)?;
        let now_us = clock::now_us();
        match code.status {
            PaymentStatus::Pending => {}
            PaymentStatus::Success => {
                return Err(bad_request("ALREADY_PAID", "Payment code is already paid"));
            }
            _ => return Err(bad_request("CODE_ENDED", "Payment code has ended")),
        }
        if now_us >= code.expires_at_us {
            return Err(bad_request("EXPIRED", "Payment code has expired"));
        }
        let paid = amount.unwrap_or(code.amount);
        let transaction_id = Uuid::now_v7().to_string();
        code.status = outcome;
        code.paid = Some(paid);
        code.transaction_id = Some(transaction_id.clone());
        if outcome == PaymentStatus::Success {
            let account_number = &self.config.account_number;
            let balance = repo::balance(&mut **tx, account_number).await?;
            if balance.plus(paid).is_err() {
                return Err(bad_request(
                    "AMOUNT_TOO_LARGE",
                    "Balance would be too large",
                ));
            }
            repo::move_money_in_tx(tx, account_number, paid).await?;
        }
        repo::save_code_in_tx(tx, &code).await?;
        if outcome != PaymentStatus::Pending {
            let kopeck = Rub::from_kopecks(i64::from(reports_wrong_amount));
            let notice = Notice::Payment {
                payment_id: code.payment_id.clone(),
                status: wire_status(outcome),
                amount: paid.plus(kopeck).unwrap_or(paid).into(),
                transaction_id: Some(transaction_id.clone()),
                occurred_at: time_text(now_us),
            };
            queue(tx, &format!("payment-{transaction_id}"), &notice, now_us).await?;
        }
        Ok((transaction_id, outcome))
    }

    pub async fn set_fault_in_tx(
        &self,
        tx: &mut events::Tx,
        account: &str,
        fault: Option<Fault>,
    ) -> Result<(), Refusal> {
        repo::set_fault_in_tx(tx, account, fault).await?;
        Ok(())
    }

    /// Wakes the workers after a commit.
    pub fn wake(&self) {
        self.transfers_due.notify_one();
        self.webhooks_due.notify_one();
    }
}

async fn queue(
    tx: &mut events::Tx,
    webhook_id: &str,
    notice: &Notice,
    now_us: i64,
) -> Result<(), Refusal> {
    let body = serde_json::to_vec(notice).expect("a webhook serializes to JSON");
    repo::queue_webhook_in_tx(tx, webhook_id, &body, now_us).await?;
    Ok(())
}

/// The stored payload of a payer's input: a link, requisites as QR payload, or a purpose code.
fn payload_of(text: &str) -> Result<String, Refusal> {
    if let Some((payment_id, _)) = purpose_code::read(text) {
        return Ok(purpose_code::code(&payment_id));
    }
    if let Some(payment_id) = purpose_code::payment_id(text) {
        return Ok(purpose_code::code(payment_id));
    }
    let link =
        SbpLink::parse(text).map_err(|error| bad_request("INVALID_CODE", error.to_string()))?;
    Ok(link.to_string())
}

/// A new identifier of a dynamic code: `AD` and 30 letters and digits.
fn code_id() -> String {
    const ALPHABET: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let mut random = rand::rng();
    let mut id = String::from("AD");
    for _ in 0..30 {
        id.push(ALPHABET[random.random_range(0..ALPHABET.len())] as char);
    }
    id
}

fn wire_status(status: PaymentStatus) -> Status {
    match status {
        PaymentStatus::Pending => Status::Pending,
        PaymentStatus::Success | PaymentStatus::Refunded => Status::Success,
        PaymentStatus::Failed => Status::Failed,
        PaymentStatus::Expired => Status::Expired,
    }
}
