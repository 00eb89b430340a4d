//! Life cycle of a payout (T06, T07, D16); pure.
//!
//! ```text
//! recorded --release--> released --order--> ordered --bank--> SUCCESS | FAILED
//!     |                    |
//!     +------cancel--------+--> FAILED, nothing was sent
//! ```
//!
//! Money leaves only after the release, which needs a reason: a successful burn of the same user
//! and amount, a refused deposit to refund, or the approved refund of an unmatched receipt.
//! `ordered_at_us` is set *before* the order is sent. From then on the payout cannot be cancelled.
//! Every attempt repeats the same bank request id, for which the bank returns the same transfer. A
//! stopped payout (its user is blocked or on a sanctions list, T48) waits.

use rail::Rub;
use types::PaymentStatus;

/// The burn was reverted: no event, because no token is missing (T07).
pub const BURN_REVERTED: &str = "BURN_REVERTED";

/// Id prefix of a payout that may refund a suspended deposit. The payment id follows (T24), then
/// `:<n>` after a failed refund.
const REFUND_PREFIX: &str = "refund-";

/// Payment id of the deposit that a payout with this id would refund.
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
    /// Payment id of the suspended deposit that this payout refunds. Decided when the payout is
    /// recorded, because its id alone proves nothing.
    pub refunds: Option<String>,
    /// Unmatched receipt that this payout refunds by an approval; released when it is recorded.
    pub refunds_receipt: Option<String>,
    pub status: PaymentStatus,
    /// Time since which the money may leave: the burn is final, or the refund is justified.
    pub released_at_us: Option<i64>,
    /// Time since which the bank may have an order.
    pub ordered_at_us: Option<i64>,
    /// Reason why the payout is stopped, if it is.
    pub stopped: Option<String>,
    /// Empty until the bank accepts the order.
    pub bank_transfer_id: String,
    pub failure_code: String,
    pub failure_message: String,
    pub attempts: u32,
    pub next_attempt_at_us: i64,
    /// Key of the call that recorded it; `None` for payouts from before keys were stored.
    pub idempotency_key: Option<String>,
    pub correlation_id: String,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl Payout {
    /// Not final.
    pub fn is_open(&self) -> bool {
        self.status == PaymentStatus::Pending
    }

    /// Returns received money; no tokens are burned for it.
    pub fn is_refund(&self) -> bool {
        self.refunds.is_some() || self.refunds_receipt.is_some()
    }

    pub fn awaits_release(&self) -> bool {
        self.is_open() && self.released_at_us.is_none()
    }

    /// A violated invariant of the row: asserted before a write, an error after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_ordered = self.ordered_at_us.is_some();
        if self.amount.kopecks() <= 0 {
            Some("payout amount is not positive")
        } else if is_ordered && self.released_at_us.is_none() {
            Some("payout is ordered before its release")
        } else if self.refunds.is_some() && self.refunds_receipt.is_some() {
            Some("payout refunds two receipts")
        } else {
            None
        }
    }
}

/// The worker's next action for a payout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Final, not released, stopped, or not due.
    Wait,
    /// Send the order, or repeat it, with its bank request id.
    Order,
    /// Poll the transfer's status.
    Poll,
}

/// The action that is due for a payout at `now_us`.
pub fn next_action(payout: &Payout, now_us: i64) -> Next {
    if !payout.is_open() || payout.released_at_us.is_none() || payout.next_attempt_at_us > now_us {
        return Next::Wait;
    }
    if !payout.bank_transfer_id.is_empty() {
        return Next::Poll;
    }
    // A stop delays only the first order: a transfer that may be at the bank is followed up.
    if payout.stopped.is_some() && payout.ordered_at_us.is_none() {
        return Next::Wait;
    }
    Next::Order
}

/// The bank's report of a transfer: a response, a webhook or a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferOutcome {
    /// Accepted, not executed yet.
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

/// Effect of a bank report on a payout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Unchanged,
    /// Store the transfer id and keep polling.
    Accepted,
    /// SUCCESS and PayoutConfirmed.
    Confirmed,
    /// FAILED and PayoutFailed.
    Failed,
}

/// The transition rule for reports of a transfer.
pub fn on_transfer_report(payout: &Payout, report: &TransferOutcome) -> Outcome {
    if !payout.is_open() {
        return Outcome::Unchanged;
    }
    match report {
        TransferOutcome::Accepted { .. } if payout.bank_transfer_id.is_empty() => Outcome::Accepted,
        TransferOutcome::Accepted { .. } => Outcome::Unchanged,
        TransferOutcome::Executed { .. } => Outcome::Confirmed,
        TransferOutcome::Refused { .. } => Outcome::Failed,
    }
}

/// Effect of a cancel on a payout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// FAILED with the caller's code. `event`: publish PayoutFailed.
    Fail { event: bool },
    /// Already final: the stored payout is returned.
    AlreadyFinal,
    /// Refused: the bank may have the order.
    AlreadySent,
}

/// The transition rule for a cancel.
pub fn on_cancel(payout: &Payout, failure_code: &str) -> Cancel {
    if !payout.is_open() {
        return Cancel::AlreadyFinal;
    }
    if payout.ordered_at_us.is_some() {
        return Cancel::AlreadySent;
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
            refunds_receipt: None,
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
        assert_eq!(next_action(&p, 10), Next::Wait);
        p.released_at_us = Some(2);
        assert_eq!(next_action(&p, 10), Next::Order);
        p.next_attempt_at_us = 11;
        assert_eq!(next_action(&p, 10), Next::Wait);
        p.next_attempt_at_us = 0;
        p.stopped = Some("user is blocked".into());
        assert_eq!(next_action(&p, 10), Next::Wait);
        p.ordered_at_us = Some(3);
        assert_eq!(
            next_action(&p, 10),
            Next::Order,
            "an order that may be at the bank is followed up"
        );
        p.bank_transfer_id = "t1".into();
        assert_eq!(next_action(&p, 10), Next::Poll);
        p.status = PaymentStatus::Success;
        assert_eq!(next_action(&p, 10), Next::Wait);
    }

    // rows: R123
    #[test]
    fn r123_an_order_before_the_release_is_a_contradiction() {
        let mut p = payout();
        assert_eq!(p.contradiction(), None);
        p.ordered_at_us = Some(3);
        assert_eq!(
            p.contradiction(),
            Some("payout is ordered before its release")
        );
        p.released_at_us = Some(2);
        assert_eq!(p.contradiction(), None);
        p.amount = Rub::from_kopecks(0);
        assert_eq!(p.contradiction(), Some("payout amount is not positive"));
    }

    // rows: R321
    #[test]
    fn r321_a_cancel_ends_only_what_was_not_ordered() {
        let mut p = payout();
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::Fail { event: false });
        assert_eq!(on_cancel(&p, "USER_BLOCKED"), Cancel::Fail { event: true });
        p.ordered_at_us = Some(2);
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::AlreadySent);
        p.status = PaymentStatus::Failed;
        assert_eq!(on_cancel(&p, BURN_REVERTED), Cancel::AlreadyFinal);
    }

    // rows: R125
    #[test]
    fn r125_a_final_payout_ignores_later_reports() {
        let reports = [
            TransferOutcome::Accepted {
                transfer_id: "t".into(),
            },
            TransferOutcome::Executed {
                transfer_id: "t".into(),
            },
            TransferOutcome::Refused {
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
            for (report, outcome) in reports.iter().zip(expected) {
                assert_eq!(on_transfer_report(&p, report), outcome);
            }
        }
    }
}
