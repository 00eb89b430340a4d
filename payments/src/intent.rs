//! Life of a payment intent (specification 3.4, D12, T25), pure: what is stored, what the bank reports, what follows.
//!
//! ```text
//! PENDING --> SUCCESS --> REFUNDED
//!    |           ^
//!    +-> FAILED -+        a late success: the money did arrive, so it counts, and is flagged
//!    +-> EXPIRED +
//! ```
//!
//! SUCCESS is never taken back by a report; only a refund that the bank has paid moves it on.
//! Anything else leaves the intent as it is.

use std::{fmt, str::FromStr};

use crate::rub::Rub;

/// `PaymentStatus` of the specification; also that of payouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PaymentStatus {
    Pending,
    Success,
    Failed,
    Expired,
    Refunded,
}

/// How the payer pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PaymentMethod {
    /// A fast-payment link to open on the payer's phone; no picture.
    SbpC2b,
    /// A fast-payment QR code and its link.
    SbpQr,
    /// Bank requisites with a unique purpose code.
    BankTransfer,
}

macro_rules! names {
    ($kind:ident { $($variant:ident = $name:literal),+ $(,)? }) => {
        impl $kind {
            pub const ALL: &[$kind] = &[$($kind::$variant),+];

            /// Bare name, as in rows, logs, labels and the bank's messages (T40).
            pub const fn as_str(self) -> &'static str {
                match self { $($kind::$variant => $name),+ }
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $kind {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                match text { $($name => Ok($kind::$variant),)+ _ => Err(UnknownName(text.to_owned())) }
            }
        }
    };
}

names!(PaymentStatus {
    Pending = "PENDING",
    Success = "SUCCESS",
    Failed = "FAILED",
    Expired = "EXPIRED",
    Refunded = "REFUNDED",
});
names!(PaymentMethod {
    SbpC2b = "SBP_C2B",
    SbpQr = "SBP_QR",
    BankTransfer = "BANK_TRANSFER",
});

/// A name that is none of the known ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a known name")]
pub struct UnknownName(pub String);

/// A stored intent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intent {
    pub payment_id: String,
    pub user_id: String,
    pub amount: Rub,
    pub method: PaymentMethod,
    pub status: PaymentStatus,
    /// What the payer opens; never empty.
    pub payment_url: String,
    /// What the payer scans; empty for [`PaymentMethod::SbpC2b`].
    pub qr_payload: String,
    pub idempotency_key: String,
    pub correlation_id: String,
    /// The success came after FAILED or EXPIRED.
    pub late: bool,
    pub created_at_us: i64,
    pub expires_at_us: i64,
    pub updated_at_us: i64,
}

/// What follows from a report of the bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing new: a repeat, or a report that a final state outranks.
    Unchanged,
    /// Store the status. `deposited`: publish FiatDeposited, in the same transaction.
    Move {
        to: PaymentStatus,
        deposited: bool,
        late: bool,
    },
}

/// The one rule for webhooks and status polls.
pub fn on_report(current: PaymentStatus, reported: PaymentStatus) -> Step {
    use PaymentStatus::{Expired, Failed, Pending, Success};
    let late = match (current, reported) {
        (Pending, Success) => false,
        (Failed | Expired, Success) => true,
        (Pending, Failed | Expired) => {
            return Step::Move {
                to: reported,
                deposited: false,
                late: false,
            };
        }
        _ => return Step::Unchanged,
    };
    Step::Move {
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
                let expected =
                    expected.map_or(Step::Unchanged, |(to, deposited, late)| Step::Move {
                        to,
                        deposited,
                        late,
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
        // Every sequence of five reports over five statuses: at most one deposit, and a success is never lost again.
        for code in 0..5_u32.pow(5) {
            let (mut status, mut deposits) = (PaymentStatus::Pending, 0);
            for place in 0..5 {
                let reported = PaymentStatus::ALL[(code / 5_u32.pow(place) % 5) as usize];
                if let Step::Move { to, deposited, .. } = on_report(status, reported) {
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
