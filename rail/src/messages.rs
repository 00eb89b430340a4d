//! JSON messages of the bank's contract (specification 2.4): requests, responses, webhooks.
//!
//! | call | path | idempotent by |
//! |---|---|---|
//! | createQR | `POST /sbp/v1/qr` | `paymentId` |
//! | expect a bank transfer | `POST /bank/v1/incoming` | `paymentId` |
//! | getPaymentStatus | `GET /sbp/v1/payments/{paymentId}` | |
//! | getBalance | `GET /sbp/v1/balance`, `GET /bank/v1/accounts/{accountNumber}/balance` | |
//! | initiateTransfer | `POST /bank/v1/transfers` | `requestId` |
//! | getTransferStatus | `GET /bank/v1/transfers/{transferId}` | |
//!
//! Units: the fast-payment half writes kopecks as a JSON integer; the bank half and the webhooks
//! write roubles as decimal text. Each has its own field type. No amount passes through a binary
//! float (T47).

use serde::{Deserialize, Serialize};

use types::PaymentStatus;

use crate::{CURRENCY, Rub};

/// Kopecks as a JSON integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kopecks(pub i64);

impl From<Rub> for Kopecks {
    fn from(amount: Rub) -> Kopecks {
        Kopecks(amount.kopecks())
    }
}

impl From<Kopecks> for Rub {
    fn from(amount: Kopecks) -> Rub {
        Rub::from_kopecks(amount.0)
    }
}

/// An amount as decimal text, with its currency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    pub value: String,
    pub currency: String,
}

impl From<Rub> for Amount {
    fn from(amount: Rub) -> Amount {
        Amount {
            value: amount.to_string(),
            currency: CURRENCY.to_owned(),
        }
    }
}

impl Amount {
    /// `None` if it is not in roubles or not exact in kopecks.
    pub fn rub(&self) -> Option<Rub> {
        (self.currency == CURRENCY)
            .then(|| self.value.parse().ok())
            .flatten()
    }
}

/// Request of createQR.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateQr {
    pub payment_id: String,
    pub amount: Kopecks,
    pub purpose: String,
    pub life_seconds: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QrCreated {
    pub qr_payload: String,
    pub payment_url: String,
    /// RFC 3339.
    pub expires_at: String,
}

/// Announces a transfer whose purpose will contain the code of `payment_id`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExpectTransfer {
    pub payment_id: String,
    pub amount: Amount,
    pub purpose_code: String,
    pub life_seconds: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransferExpected {
    /// RFC 3339.
    pub expires_at: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PaymentReport {
    pub payment_id: String,
    pub status: Status,
    pub amount: Kopecks,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub transaction_id: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Balance {
    pub account_number: String,
    pub balance: Amount,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransferOrder {
    /// Idempotency key: all orders with this id are one transfer.
    pub request_id: String,
    pub account_number: String,
    pub recipient_account: String,
    pub amount: Amount,
    pub purpose: String,
}

/// Response to a transfer order (HTTP 422 when refused), and the state of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransferReport {
    pub transfer_id: String,
    pub request_id: String,
    pub status: Status,
    pub amount: Amount,
    /// Why the transfer was refused; empty otherwise.
    #[serde(default)]
    pub error_register: Vec<RegisterEntry>,
}

/// One entry of the bank's error register.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterEntry {
    pub code: String,
    pub message: String,
}

/// Body of a refusal without a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub code: String,
    pub message: String,
}

/// Webhook that the bank posts to the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Notice {
    Payment {
        payment_id: String,
        status: Status,
        amount: Amount,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        transaction_id: Option<String>,
        occurred_at: String,
    },
    Transfer {
        #[serde(flatten)]
        report: TransferReport,
        occurred_at: String,
    },
}

/// `PENDING`, `SUCCESS`, `FAILED` or `EXPIRED` in the bank's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    Pending,
    Success,
    Failed,
    Expired,
}

impl From<Status> for PaymentStatus {
    fn from(status: Status) -> PaymentStatus {
        match status {
            Status::Pending => PaymentStatus::Pending,
            Status::Success => PaymentStatus::Success,
            Status::Failed => PaymentStatus::Failed,
            Status::Expired => PaymentStatus::Expired,
        }
    }
}

/// Microseconds since the epoch as RFC 3339 in UTC; empty if out of range.
pub fn time_text(time_us: i64) -> String {
    time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(time_us) * 1_000)
        .ok()
        .and_then(|time| {
            time.format(&time::format_description::well_known::Rfc3339)
                .ok()
        })
        .unwrap_or_default()
}

/// Microseconds since the epoch from RFC 3339 text.
pub fn time_us(text: &str) -> Option<i64> {
    let time =
        time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339).ok()?;
    i64::try_from(time.unix_timestamp_nanos() / 1_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R134
    #[test]
    fn r134_fast_payment_amounts_are_integer_kopecks() {
        let ask = CreateQr {
            payment_id: "p1".into(),
            amount: "1500.50".parse::<Rub>().unwrap().into(),
            purpose: "top-up".into(),
            life_seconds: 900,
        };
        let json = serde_json::to_string(&ask).unwrap();
        assert_eq!(
            json,
            r#"{"paymentId":"p1","amount":150050,"purpose":"top-up","lifeSeconds":900}"#
        );
        assert!(serde_json::from_str::<CreateQr>(&json.replace("150050", "1500.50")).is_err());
    }

    // rows: R135
    #[test]
    fn r135_notices_round_trip() {
        for notice in [
            Notice::Payment {
                payment_id: "p1".into(),
                status: Status::Success,
                amount: Rub::from_kopecks(100).into(),
                transaction_id: Some("t".into()),
                occurred_at: time_text(0),
            },
            Notice::Transfer {
                report: TransferReport {
                    transfer_id: "t1".into(),
                    request_id: "r1".into(),
                    status: Status::Failed,
                    amount: Rub::from_kopecks(100).into(),
                    error_register: vec![RegisterEntry {
                        code: "INVALID_RECIPIENT_ACCOUNT".into(),
                        message: "no such account".into(),
                    }],
                },
                occurred_at: time_text(1),
            },
        ] {
            let json = serde_json::to_string(&notice).unwrap();
            assert_eq!(
                serde_json::from_str::<Notice>(&json).unwrap(),
                notice,
                "{json}"
            );
        }
        assert_eq!(
            time_us(&time_text(1_700_000_000_123_456)),
            Some(1_700_000_000_123_456)
        );
    }
}
