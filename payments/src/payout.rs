//! Life of a payout (T06, T07, D16), pure: recorded, released by the final burn, ordered at the
//! bank, confirmed or failed.
//!
//! ```text
//! recorded --release--> released --order--> ordered --bank--> SUCCESS | FAILED
//!     |                    |
//!     +------cancel--------+--> FAILED, nothing was sent
//! ```
//!
//! Money leaves only after the release, which asks for a reason: a burn of the same user and amount
//! that succeeded, or a deposit that was refused. Once an order may have reached the bank
//! (`ordered_at_us` is set *before* the request goes out) the payout can no longer be cancelled,
//! and every further attempt repeats the same bank request id, which the bank answers with the same
//! transfer. A stopped payout (its user is blocked, T48) waits.
use rail::Rub;
use types::PaymentStatus;

/// Cancelled because the burn was reverted: no event, for no token is missing (T07).
pub const BURN_REVERTED: &str = "BURN_REVERTED";

/// A payout with this prefix may pay a suspended deposit back: the payment id follows (T24), and
/// `:<n>` after a refund that failed.
const REFUND_PREFIX: &str = "refund-";

/// Payment that a payout of this id would pay back.
pub fn refund_candidate(payout_id: &str) -> Option<&str> {
    let rest = payout_id.strip_prefix(REFUND_PREFIX)?;
    Some(
        rest.split_once(':')
            .map_or(rest, |(payment_id, _)| payment_id),
    )
}

/// A stored payout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payout {
    pub payout_id: String,
    pub user_id: String,
    pub amount: Rub,
    pub bank_account: String,
    /// Suspended deposit that this payout pays back. Decided once, when it is recorded: the id alone proves nothing.
    pub refunds: Option<String>,
    pub status: PaymentStatus,
    /// The burn is final; the money may leave.
    pub released_at_us: Option<i64>,
    /// An order may have reached the bank since then.
    pub ordered_at_us: Option<i64>,
    /// Why it must wait, when it must.
    pub stopped: Option<String>,
    /// Empty until the bank has accepted the order.
    pub bank_transfer_id: String,
    pub failure_code: String,
    pub failure_message: String,
    pub attempts: u32,
    pub next_attempt_at_us: i64,
    /// Of the call that recorded it; `None` for payouts from before keys were kept.
    pub idempotency_key: Option<String>,
    pub correlation_id: String,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl Payout {
    pub fn is_open(&self) -> bool {
        self.status == PaymentStatus::Pending
    }

    pub fn awaits_release(&self) -> bool {
        self.is_open() && self.released_at_us.is_none()
    }
}

/// What the worker has to do with a payout now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: final, not released, stopped, or its time has not come.
    Wait,
    /// (Again) order it with its bank request id.
    Order,
    /// Ask what became of the transfer.
    Poll,
}

pub fn next(payout: &Payout, now_us: i64) -> Next {
    if !payout.is_open() || payout.released_at_us.is_none() || payout.next_attempt_at_us > now_us {
        return Next::Wait;
    }
    if !payout.bank_transfer_id.is_empty() {
        return Next::Poll;
    }
    // A stop holds back the first order only: what may be at the bank already has to be followed up.
    if payout.stopped.is_some() && payout.ordered_at_us.is_none() {
        return Next::Wait;
    }
    Next::Order
}

/// What the bank said of a transfer, by answer, webhook or poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BankWord {
    /// Taken; the end is open.
    Accepted {
        transfer_id: String,
    },
    Executed {
        transfer_id: String,
    },
    /// Refused, with the first entry of the error register.
    Refused {
        transfer_id: String,
        code: String,
        message: String,
    },
}

/// What follows from the bank's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Unchanged,
    /// Remember the transfer id and keep asking.
    Accepted,
    /// SUCCESS and PayoutConfirmed.
    Confirmed,
    /// FAILED and PayoutFailed.
    Failed,
}

pub fn on_bank_word(payout: &Payout, word: &BankWord) -> Outcome {
    if !payout.is_open() {
        return Outcome::Unchanged;
    }
    match word {
        BankWord::Accepted { .. } if payout.bank_transfer_id.is_empty() => Outcome::Accepted,
        BankWord::Accepted { .. } => Outcome::Unchanged,
        BankWord::Executed { .. } => Outcome::Confirmed,
        BankWord::Refused { .. } => Outcome::Failed,
    }
}

/// Answer to a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// FAILED with the code given. `event`: publish PayoutFailed.
    Fail { event: bool },
    /// It has ended already: the stored payout is the answer.
    AlreadyFinal,
    /// The order may be at the bank: refused.
    AtTheBank,
}

pub fn on_cancel(payout: &Payout, failure_code: &str) -> Cancel {
    if !payout.is_open() {
        return Cancel::AlreadyFinal;
    }
    if payout.ordered_at_us.is_some() {
        return Cancel::AtTheBank;
    }
    Cancel::Fail {
        event: failure_code != BURN_REVERTED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payout() -> Payout {
        Payout {
            payout_id: "p1".into(),
            user_id: "u1".into(),
            amount: Rub::from_kopecks(100),
            bank_account: "40817810".into(),
            refunds: None,
            status: PaymentStatus::Pending,
            released_at_us: None,
            ordered_at_us: None,
            stopped: None,
            bank_transfer_id: String::new(),
            failure_code: String::new(),
            failure_message: String::new(),
            attempts: 0,
            next_attempt_at_us: 0,
            idempotency_key: None,
            correlation_id: "c1".into(),
            created_at_us: 1,
            updated_at_us: 1,
        }
    }

    // rows: R123
    #[test]
    fn r123_nothing_is_ordered_before_the_release() {
        let mut p = payout();
        assert_eq!(next(&p, 10), Next::Wait);
        p.released_at_us = Some(2);
        assert_eq!(next(&p, 10), Next::Order);
        p.next_attempt_at_us = 11;
        assert_eq!(next(&p, 10), Next::Wait);
        p.next_attempt_at_us = 0;
        p.stopped = Some("user is blocked".into());
        assert_eq!(next(&p, 10), Next::Wait);
        p.ordered_at_us = Some(3);
        assert_eq!(
            next(&p, 10),
            Next::Order,
            "an order that may be out is followed up"
        );
        p.bank_transfer_id = "t1".into();
        assert_eq!(next(&p, 10), Next::Poll);
        p.status = PaymentStatus::Success;
        assert_eq!(next(&p, 10), Next::Wait);
    }

    // rows: R321
    #[test]
    fn r321_a_cancel_ends_only_what_was_not_ordered() {
        let mut p = payout();
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::Fail { event: false });
        assert_eq!(on_cancel(&p, "USER_BLOCKED"), Cancel::Fail { event: true });
        p.ordered_at_us = Some(2);
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::AtTheBank);
        p.status = PaymentStatus::Failed;
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::AlreadyFinal);
    }

    // rows: R125
    #[test]
    fn r125_a_final_payout_ignores_every_later_word() {
        let words = [
            BankWord::Accepted {
                transfer_id: "t".into(),
            },
            BankWord::Executed {
                transfer_id: "t".into(),
            },
            BankWord::Refused {
                transfer_id: "t".into(),
                code: "X".into(),
                message: String::new(),
            },
        ];
        for (status, expected) in [
            (
                PaymentStatus::Pending,
                [Outcome::Accepted, Outcome::Confirmed, Outcome::Failed],
            ),
            (
                PaymentStatus::Success,
                [Outcome::Unchanged, Outcome::Unchanged, Outcome::Unchanged],
            ),
            (
                PaymentStatus::Failed,
                [Outcome::Unchanged, Outcome::Unchanged, Outcome::Unchanged],
            ),
        ] {
            let p = Payout { status, ..payout() };
            for (word, outcome) in words.iter().zip(expected) {
                assert_eq!(on_bank_word(&p, word), outcome);
            }
        }
    }
}
