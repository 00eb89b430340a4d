//! Life cycle of a payment intent (specification 3.4, D12, T25); pure.
//!
//! ```text
//! PENDING --> SUCCESS --> REFUNDED
//!    |           ^
//!    +-> FAILED -+        late success: the money arrived, so it counts; the intent is flagged
//!    +-> EXPIRED +
//! ```
//!
//! No report changes SUCCESS; REFUNDED follows only when the bank has executed a refund payout. A
//! report without an arrow leaves the intent unchanged.

use rail::Rub;
use types::{PaymentStatus, code_enum};

code_enum! {
    /// Payment method.
    PaymentMethod: i32 {
        /// A fast-payment link to open on the payer's phone, without a QR code.
        SbpC2b = 1 "SBP_C2B",
        /// A fast-payment QR code and its link.
        SbpQr = 2 "SBP_QR",
        /// Bank requisites with a unique purpose code.
        BankTransfer = 3 "BANK_TRANSFER",
    }
}

/// A stored intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    pub payment_id: String,
    pub user_id: String,
    pub amount: Rub,
    pub method: PaymentMethod,
    pub status: PaymentStatus,
    /// Link or requisites for the payer; never empty.
    pub payment_url: String,
    /// Content of the QR code; empty for [`PaymentMethod::SbpC2b`].
    pub qr_payload: String,
    pub idempotency_key: String,
    pub correlation_id: String,
    /// SUCCESS followed FAILED or EXPIRED.
    pub late: bool,
    pub created_at_us: i64,
    pub expires_at_us: i64,
    pub updated_at_us: i64,
}

impl Intent {
    /// A violated invariant of the row: an error before a write and after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        if self.amount.kopecks() <= 0 {
            return Some("intent amount is not positive");
        }
        late_contradiction(self.status, self.late)
    }
}

/// Only money that arrived can be late.
pub fn late_contradiction(status: PaymentStatus, late: bool) -> Option<&'static str> {
    let is_paid = matches!(status, PaymentStatus::Success | PaymentStatus::Refunded);
    (late && !is_paid).then_some("intent is late without its money")
}

/// Effect of a bank report on an intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Nothing new: a repeat, or a report outranked by a final state.
    Unchanged,
    /// Store the status. `deposited`: publish FiatDeposited, in the same transaction.
    Move {
        to: PaymentStatus,
        deposited: bool,
        late: bool,
    },
}

/// The transition rule for webhooks and status polls.
pub fn on_report(current: PaymentStatus, reported: PaymentStatus) -> Transition {
    use PaymentStatus::{Expired, Failed, Pending, Success};
    let late = match (current, reported) {
        (Pending, Success) => false,
        (Failed | Expired, Success) => true,
        (Pending, Failed | Expired) => {
            return Transition::Move {
                to: reported,
                deposited: false,
                late: false,
            };
        }
        _ => return Transition::Unchanged,
    };
    Transition::Move {
        to: Success,
        deposited: true,
        late,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R118 R119 R323
    #[test]
    fn r118_every_pair_of_stored_and_reported_status() {
        use PaymentStatus::{Expired, Failed, Pending, Success};
        for current in PaymentStatus::ALL {
            for reported in PaymentStatus::ALL {
                let expected = match (current, reported) {
                    (Pending, Success) => Some((Success, true, false)),
                    (Failed | Expired, Success) => Some((Success, true, true)),
                    (Pending, Failed) => Some((Failed, false, false)),
                    (Pending, Expired) => Some((Expired, false, false)),
                    _ => None,
                };
                let expected = expected.map_or(Transition::Unchanged, |(to, deposited, late)| {
                    Transition::Move {
                        to,
                        deposited,
                        late,
                    }
                });
                assert_eq!(
                    on_report(*current, *reported),
                    expected,
                    "{current} {reported}"
                );
            }
        }
    }

    // rows: R120
    #[test]
    fn r120_no_sequence_of_reports_deposits_twice() {
        // Every sequence of five reports: at most one deposit, and SUCCESS is never lost.
        for code in 0..5_u32.pow(5) {
            let (mut status, mut deposits) = (PaymentStatus::Pending, 0);
            for place in 0..5 {
                let reported = PaymentStatus::ALL[(code / 5_u32.pow(place) % 5) as usize];
                if let Transition::Move { to, deposited, .. } = on_report(status, reported) {
                    assert_ne!(status, PaymentStatus::Success);
                    status = to;
                    deposits += u32::from(deposited);
                }
            }
            assert_eq!(deposits, u32::from(status == PaymentStatus::Success));
        }
    }

    // rows: R014 R110
    #[test]
    fn r014_names_round_trip() {
        for status in PaymentStatus::ALL {
            assert_eq!(status.as_str().parse(), Ok(*status));
        }
        for method in PaymentMethod::ALL {
            assert_eq!(method.as_str().parse(), Ok(*method));
        }
        assert!("SUCCEEDED".parse::<PaymentStatus>().is_err());
    }
}
