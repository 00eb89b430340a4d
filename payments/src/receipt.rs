//! Money that the bank reports as received: one receipt per bank transaction (D51); pure.
//!
//! A matched receipt pays an intent. An unmatched receipt is part of the suspense, and an operator
//! resolves it. Until the bank reports a transaction id, the receipt has none, and the
//! next report of the payment counts as the same transaction.

use rail::Rub;
use types::{PaymentStatus, code_enum};

use crate::intent::Intent;

code_enum! {
    /// Whether an intent accounts for a receipt.
    ReceiptStatus: i32 {
        Matched = 1 "MATCHED",
        Unmatched = 2 "UNMATCHED",
    }
}

code_enum! {
    /// Why no intent accounts for a receipt.
    UnmatchedReason: i32 {
        UnknownPayment = 1 "UNKNOWN_PAYMENT",
        AmountDiffers = 2 "AMOUNT_DIFFERS",
        /// The intent is paid by another transaction, or refunded.
        SecondPayment = 3 "SECOND_PAYMENT",
    }
}

/// A stored receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    pub receipt_id: String,
    pub bank_id: String,
    /// `None`: the bank has not reported it yet.
    pub transaction_id: Option<String>,
    /// Payment id of the bank's report; there may be no such intent.
    pub payment_id: String,
    pub amount: Rub,
    /// `None`: an intent accounts for it.
    pub unmatched: Option<UnmatchedReason>,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl Receipt {
    pub fn status(&self) -> ReceiptStatus {
        match self.unmatched {
            None => ReceiptStatus::Matched,
            Some(_) => ReceiptStatus::Unmatched,
        }
    }
}

/// Result of matching a report of received money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// The money pays the intent.
    Pays,
    /// The transaction has paid an intent before.
    Repeat,
    Unmatched(UnmatchedReason),
}

/// Matches a report of received money with its intent. `stored`: the receipt of its transaction.
///
/// An unmatched receipt is matched again, also with another payment, because the bank may correct
/// amount and payment. A matched receipt stays matched.
pub fn match_receipt(intent: Option<&Intent>, stored: Option<&Receipt>, amount: Rub) -> Match {
    use PaymentStatus::{Expired, Failed, Pending, Refunded, Success};
    if stored.is_some_and(|receipt| receipt.unmatched.is_none()) {
        return Match::Repeat;
    }
    let reason = match intent {
        None => UnmatchedReason::UnknownPayment,
        Some(intent) if intent.amount != amount => UnmatchedReason::AmountDiffers,
        Some(intent) => match intent.status {
            Pending | Failed | Expired => return Match::Pays,
            Success | Refunded => UnmatchedReason::SecondPayment,
        },
    };
    Match::Unmatched(reason)
}

/// Longest transaction id, in bytes (D49).
const TRANSACTION_ID_BYTES_MAX: usize = 128;

/// A valid transaction id of a bank report. An invalid one counts as absent, so that the money is
/// still recorded.
pub fn valid_transaction_id(named: Option<String>) -> Option<String> {
    let named = named.filter(|id| !id.trim().is_empty())?;
    if named.len() > TRANSACTION_ID_BYTES_MAX || named.chars().any(char::is_control) {
        tracing::warn!(
            bytes = named.len(),
            "bank reported an invalid transaction id; it is treated as absent"
        );
        return None;
    }
    Some(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intent::PaymentMethod;

    fn intent(status: PaymentStatus) -> Intent {
        Intent {
            payment_id: "p".into(),
            user_id: "u".into(),
            amount: Rub::from_kopecks(1_000),
            method: PaymentMethod::SbpQr,
            status,
            payment_url: String::new(),
            qr_payload: String::new(),
            idempotency_key: String::new(),
            correlation_id: String::new(),
            late: false,
            created_at_us: 1,
            expires_at_us: 2,
            updated_at_us: 1,
        }
    }

    fn receipt(unmatched: Option<UnmatchedReason>) -> Receipt {
        Receipt {
            receipt_id: "r".into(),
            bank_id: "bank".into(),
            transaction_id: Some("t".into()),
            payment_id: "p".into(),
            amount: Rub::from_kopecks(1_000),
            unmatched,
            created_at_us: 1,
            updated_at_us: 1,
        }
    }

    // rows: R120
    #[test]
    fn r120_only_the_first_transaction_with_the_amount_pays_an_intent() {
        use Match::{Pays, Repeat, Unmatched};
        use UnmatchedReason::{AmountDiffers, SecondPayment, UnknownPayment};
        let (asked, other) = (Rub::from_kopecks(1_000), Rub::from_kopecks(999));
        for status in PaymentStatus::ALL {
            let intent = intent(*status);
            let is_open = !["SUCCESS", "REFUNDED"].contains(&status.as_str());
            let of_amount = if is_open {
                Pays
            } else {
                Unmatched(SecondPayment)
            };
            for unmatched in [None, Some(AmountDiffers), Some(SecondPayment)] {
                let stored = receipt(unmatched);
                let expected = match unmatched {
                    None => [Repeat, Repeat],
                    Some(_) => [of_amount, Unmatched(AmountDiffers)],
                };
                let matched =
                    [asked, other].map(|sum| match_receipt(Some(&intent), Some(&stored), sum));
                assert_eq!(matched, expected, "{status} {unmatched:?}");
            }
            assert_eq!(
                match_receipt(Some(&intent), None, asked),
                of_amount,
                "{status}"
            );
            assert_eq!(
                match_receipt(Some(&intent), None, other),
                Unmatched(AmountDiffers)
            );
        }
        assert_eq!(match_receipt(None, None, asked), Unmatched(UnknownPayment));
    }

    #[test]
    fn d49_only_a_printable_text_is_a_transaction_id() {
        let read = |named: &str| valid_transaction_id(Some(named.to_owned()));
        assert_eq!(read("t-1"), Some("t-1".to_owned()));
        assert_eq!(read(&"x".repeat(128)).map(|id| id.len()), Some(128));
        for named in ["", "  ", "a\0b", &"x".repeat(129)] {
            assert_eq!(read(named), None, "{named:?}");
        }
        assert_eq!(valid_transaction_id(None), None);
    }
}
