//! Money that the bank reports as received: one receipt per bank transaction (D51); pure.
//!
//! A matched receipt pays an intent. An unmatched receipt is part of the suspense until two persons
//! resolve it: they assign it to an intent or a user, or refund it to its sender. Until the bank
//! reports a transaction id, the receipt has none, and the next report of the payment counts as the
//! same transaction.

use rail::Rub;
use types::{PaymentStatus, code_enum};
use uuid::Uuid;

use crate::intent::Intent;

code_enum! {
    /// Whether an intent accounts for a receipt.
    ReceiptStatus: i32 {
        Matched = 1 "MATCHED",
        Unmatched = 2 "UNMATCHED",
        /// The bank has executed its refund.
        Refunded = 3 "REFUNDED",
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
    /// Payment id of the intent to which persons assigned it.
    pub assigned: Option<String>,
    /// Payout that refunds it; `None` again after the payout has failed.
    pub refund: Option<String>,
    /// The bank has executed the refund.
    pub is_refunded: bool,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl Receipt {
    pub fn status(&self) -> ReceiptStatus {
        match self.unmatched {
            None => ReceiptStatus::Matched,
            Some(_) if self.is_refunded => ReceiptStatus::Refunded,
            Some(_) => ReceiptStatus::Unmatched,
        }
    }

    /// Whether it may be matched, assigned or refunded: unmatched, and no refund is under way.
    pub fn is_open(&self) -> bool {
        self.status() == ReceiptStatus::Unmatched && self.refund.is_none()
    }

    /// A violated invariant of the row: an error before a write and after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_matched = self.unmatched.is_none();
        if self.amount.kopecks() <= 0 {
            Some("receipt amount is not positive")
        } else if self.assigned.is_some() && !is_matched {
            Some("receipt is assigned and unmatched")
        } else if self.refund.is_some() && is_matched {
            Some("receipt is matched and refunded")
        } else if self.is_refunded && self.refund.is_none() {
            Some("receipt is refunded without a payout")
        } else {
            None
        }
    }

    /// Describes its state in an audit record.
    pub fn audit_text(&self) -> String {
        let status = self.status();
        match (&self.assigned, &self.refund) {
            (Some(payment_id), _) => format!("{status}, assigned to payment {payment_id}"),
            (None, Some(payout_id)) => format!("{status}, refund by payout {payout_id}"),
            (None, None) => status.to_string(),
        }
    }
}

/// Result of matching a report of received money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// The money pays the intent.
    Pays,
    /// The transaction has paid an intent before, or persons have resolved its receipt.
    Repeat,
    Unmatched(UnmatchedReason),
}

/// Matches a report of received money with its intent. `stored`: the receipt of its transaction.
///
/// An open receipt is matched again, also with another payment, because the bank may correct amount
/// and payment. A matched receipt stays matched, and one whose refund is ordered stays as it is.
pub fn match_receipt(intent: Option<&Intent>, stored: Option<&Receipt>, amount: Rub) -> Match {
    use PaymentStatus::{Expired, Failed, Pending, Refunded, Success};
    if stored.is_some_and(|receipt| !receipt.is_open()) {
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

/// Longest id of a bank report, in bytes (D49).
const ID_BYTES_MAX: usize = 128;

fn is_valid_id(id: &str) -> bool {
    !id.trim().is_empty() && id.len() <= ID_BYTES_MAX && !id.chars().any(char::is_control)
}

/// The payment id of a bank report. In place of an invalid one an id that no intent has, different
/// for different texts, so that the money is still recorded.
pub fn valid_payment_id(reported: String) -> String {
    if is_valid_id(&reported) {
        return reported;
    }
    tracing::warn!(
        bytes = reported.len(),
        "bank reported an invalid payment id; it is replaced"
    );
    let hash = Uuid::new_v5(&Uuid::NAMESPACE_OID, reported.as_bytes());
    format!("invalid-{hash}")
}

/// A valid transaction id of a bank report. An invalid one counts as absent, so that the money is
/// still recorded.
pub fn valid_transaction_id(named: Option<String>) -> Option<String> {
    let named = named.filter(|id| !id.trim().is_empty())?;
    if !is_valid_id(&named) {
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
            assigned: None,
            refund: None,
            is_refunded: false,
            created_at_us: 1,
            updated_at_us: 1,
        }
    }

    // rows: R120
    #[test]
    fn d51_a_resolved_receipt_pays_nothing_and_a_failed_refund_opens_it_again() {
        let open = receipt(Some(UnmatchedReason::SecondPayment));
        let refunding = Receipt {
            refund: Some("po".into()),
            ..open.clone()
        };
        let refunded = Receipt {
            is_refunded: true,
            ..refunding.clone()
        };
        let assigned = Receipt {
            unmatched: None,
            assigned: Some("p2".into()),
            ..open.clone()
        };
        let pending = intent(PaymentStatus::Pending);
        let matched = |stored: &Receipt| match_receipt(Some(&pending), Some(stored), stored.amount);
        assert_eq!(matched(&open), Match::Pays);
        for (stored, status, text) in [
            (&refunding, "UNMATCHED", "UNMATCHED, refund by payout po"),
            (&refunded, "REFUNDED", "REFUNDED, refund by payout po"),
            (&assigned, "MATCHED", "MATCHED, assigned to payment p2"),
        ] {
            assert!(!stored.is_open());
            assert_eq!(matched(stored), Match::Repeat, "{text}");
            assert_eq!(stored.status().as_str(), status);
            assert_eq!(stored.audit_text(), text);
        }
        let failed = Receipt {
            refund: None,
            ..refunding
        };
        assert!(failed.is_open());
    }

    // rows: R120
    #[test]
    fn r120_a_receipt_whose_money_counts_twice_is_a_contradiction() {
        let matched = receipt(None);
        let open = receipt(Some(UnmatchedReason::SecondPayment));
        let of = |base: &Receipt, change: fn(&mut Receipt)| {
            let mut receipt = base.clone();
            change(&mut receipt);
            receipt.contradiction()
        };
        let refund = |receipt: &mut Receipt| receipt.refund = Some("po".into());
        let assign = |receipt: &mut Receipt| receipt.assigned = Some("p2".into());
        let end = |receipt: &mut Receipt| receipt.is_refunded = true;
        assert_eq!(of(&matched, |_| {}), None);
        assert_eq!(of(&open, |_| {}), None);
        assert_eq!(of(&matched, assign), None);
        assert_eq!(of(&open, refund), None);
        let free = of(&matched, |receipt| receipt.amount = Rub::ZERO);
        assert_eq!(free, Some("receipt amount is not positive"));
        let assigned = of(&open, assign);
        assert_eq!(assigned, Some("receipt is assigned and unmatched"));
        let refunded = of(&matched, refund);
        assert_eq!(refunded, Some("receipt is matched and refunded"));
        let unpaid = of(&open, end);
        assert_eq!(unpaid, Some("receipt is refunded without a payout"));
    }

    #[test]
    fn d49_an_invalid_payment_id_is_replaced_by_one_of_its_own() {
        assert_eq!(valid_payment_id("p-1".into()), "p-1");
        let long = |last: &str| valid_payment_id("x".repeat(200) + last);
        assert!(long("a").starts_with("invalid-") && long("a").len() <= ID_BYTES_MAX);
        assert_eq!(long("a"), long("a"));
        assert_ne!(long("a"), long("b"));
        for text in ["", " ", "a\0b"] {
            assert!(valid_payment_id(text.into()).starts_with("invalid-"));
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
