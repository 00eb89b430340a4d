//! The next step of an operation, as a pure function of its progress: no clock, no I/O.
//!
//! `service::drive` executes the step, stores the resulting progress and calls `next` again. Every
//! step is idempotent (ids derive from the operation), so recovery after a crash is a call of
//! `next`.
//!
//! Order of the steps: the ledger gate (money is held, or posted as unsettled), the reservation of
//! the day limit, the chain, the ledger's finality. A refused limit or a reverted chain transaction
//! undoes the gate.
//!
//! Redemption of CFA-RUB adds a payout. It is recorded after the burn is submitted and released to
//! the bank only when the burn is final (T06). A mint-back undoes only a final burn (T07, T09).
//! Compliance may block the redemption before the bank has the payout, and refund it: its completed
//! steps are undone (R089).

use types::code_enum;

use crate::model::Flow;

code_enum! {
    /// State of the chain transaction.
    #[derive(Default)]
    Chain: i32 {
        #[default]
        Unsent = 0 "UNSENT",
        Sent = 1 "SENT",
        Succeeded = 2 "SUCCEEDED",
        Reverted = 3 "REVERTED",
        /// Not on the chain, and never will be: the submission was refused, or a refund found none.
        Refused = 4 "REFUSED",
    }
}

code_enum! {
    /// The payout of a redemption.
    #[derive(Default)]
    Payout: i32 {
        #[default]
        None = 0 "NONE",
        /// Recorded by payments, not sent to the bank.
        Started = 1 "STARTED",
        /// The bank may have it.
        Released = 2 "RELEASED",
        Succeeded = 3 "SUCCEEDED",
        Failed = 4 "FAILED",
        Cancelled = 5 "CANCELLED",
    }
}

code_enum! {
    /// The reservation of the user's day limit at identity (T24).
    #[derive(Default)]
    LimitReservation: i32 {
        /// Not requested yet, or the flow uses no limit.
        #[default]
        Unasked = 0 "UNASKED",
        Reserved = 1 "RESERVED",
        Refused = 2 "REFUSED",
        /// The operation has ended and the reservation was confirmed or cancelled.
        Ended = 3 "ENDED",
    }
}

/// Input of `next`; stored with the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SagaProgress {
    /// Hold created, or ledger operation posted.
    pub gated: bool,
    pub limit: LimitReservation,
    pub chain: Chain,
    pub payout: Payout,
    /// Hold consumed, or ledger operation final.
    pub settled: bool,
    /// Burned tokens are minted back.
    pub minted_back: bool,
    /// Hold released, or ledger operation reversed.
    pub undone: bool,
    /// Blocked by compliance.
    pub blocked: bool,
    /// Compliance refunds the blocked redemption: its completed steps are undone.
    pub refunding: bool,
}

impl SagaProgress {
    /// Whether an operation that uses a limit still has to reserve it.
    pub fn waits_for_limit(&self) -> bool {
        self.limit == LimitReservation::Unasked && self.chain == Chain::Unsent && !self.refunding
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Finalized,
    /// The day limit does not allow the operation.
    LimitRefused,
    /// The chain reverted the transaction.
    Reverted,
    /// The chain will never accept the transaction.
    Refused,
    PayoutFailed,
    /// Compliance ended a blocked redemption.
    Refunded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Create the hold, or post the ledger operation.
    Gate,
    /// Reserve the amount in the user's day limit.
    ReserveLimit,
    SendChain,
    StartPayout,
    ReleasePayout,
    CancelPayout,
    /// Consume the hold, or finalize the ledger operation.
    Settle,
    MintBack,
    /// Look up whether a burn was submitted without its record.
    FindBurn,
    /// Continue the redemption instead of refunding it: the bank has the payout.
    AbandonRefund,
    /// Release the hold, or reverse the ledger operation.
    Undo,
    /// Wait for an event: a receipt, the bank, compliance.
    Wait,
    End(End),
}

/// Whether this service holds or posts in the ledger before the chain step. In the other flows an
/// event or settlement causes the posting.
fn is_gated(flow: Flow) -> bool {
    matches!(
        flow,
        Flow::RedeemRub | Flow::IssueInvestment | Flow::RedeemInvestment | Flow::ForceTransfer
    )
}

/// Whether the operation reserves a day limit. Trades are counted from their events. Units that an
/// issuer redeems use no limit: they leave by the holder's offer or the terms of the issue. A
/// placement's limits are reserved by Subscribe.
pub(crate) fn is_limited(flow: Flow, plain_transfer: bool) -> bool {
    match flow {
        Flow::IssueRub | Flow::RedeemRub | Flow::IssueInvestment => true,
        Flow::Transfer => plain_transfer,
        // Enforcement acts do not depend on the holder's limits.
        Flow::RedeemInvestment
        | Flow::Trade
        | Flow::Maturity
        | Flow::Placement
        | Flow::ForceTransfer
        | Flow::Coupon => false,
    }
}

/// The next step. `plain_transfer`: the operation belongs to no trade.
pub fn next(flow: Flow, plain_transfer: bool, progress: &SagaProgress) -> Step {
    let gated = is_gated(flow) || (flow == Flow::Transfer && plain_transfer);
    if gated && !progress.gated {
        return Step::Gate;
    }
    if progress.refunding {
        return refund(progress);
    }
    if progress.blocked {
        return Step::Wait;
    }
    match progress.chain {
        Chain::Unsent if progress.limit == LimitReservation::Refused => {
            if gated && !progress.undone {
                return Step::Undo;
            }
            Step::End(End::LimitRefused)
        }
        Chain::Unsent
            if progress.limit == LimitReservation::Unasked && is_limited(flow, plain_transfer) =>
        {
            Step::ReserveLimit
        }
        Chain::Unsent => Step::SendChain,
        Chain::Sent if flow == Flow::RedeemRub && progress.payout == Payout::None => {
            Step::StartPayout
        }
        Chain::Sent => Step::Wait,
        Chain::Reverted | Chain::Refused => {
            if matches!(progress.payout, Payout::Started | Payout::Released) {
                return Step::CancelPayout;
            }
            if gated && !progress.undone {
                return Step::Undo;
            }
            Step::End(if progress.chain == Chain::Reverted {
                End::Reverted
            } else {
                End::Refused
            })
        }
        Chain::Succeeded if flow == Flow::RedeemRub => after_burn(progress),
        Chain::Succeeded if gated && !progress.settled => Step::Settle,
        Chain::Succeeded => Step::End(End::Finalized),
    }
}

/// The next step of a refund. The chain may have the burn, and payments the payout, without its
/// record here.
fn refund(progress: &SagaProgress) -> Step {
    match (progress.chain, progress.payout) {
        (Chain::Unsent, _) => Step::FindBurn,
        // The burn may still succeed.
        (Chain::Sent, _) => Step::Wait,
        (_, Payout::Released | Payout::Succeeded) => Step::AbandonRefund,
        // Payments may have the payout without its record here. Its id may also be another
        // payout's.
        (Chain::Succeeded | Chain::Reverted, Payout::None) => Step::StartPayout,
        (Chain::Succeeded | Chain::Reverted, Payout::Started) => Step::CancelPayout,
        (Chain::Succeeded, _) if !progress.minted_back => Step::MintBack,
        _ if !progress.undone => Step::Undo,
        _ => Step::End(End::Refunded),
    }
}

fn after_burn(progress: &SagaProgress) -> Step {
    match progress.payout {
        Payout::None => Step::StartPayout,
        Payout::Started => Step::ReleasePayout,
        Payout::Released => Step::Wait,
        Payout::Succeeded if !progress.settled => Step::Settle,
        Payout::Succeeded => Step::End(End::Finalized),
        Payout::Failed | Payout::Cancelled if !progress.minted_back => Step::MintBack,
        Payout::Failed | Payout::Cancelled if !progress.undone => Step::Undo,
        Payout::Failed | Payout::Cancelled => Step::End(End::PayoutFailed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies steps to the progress, with `burn` and `pay` as results. Returns the steps and the
    /// final progress.
    fn run(flow: Flow, plain: bool, burn: Chain, pay: Payout) -> (Vec<Step>, SagaProgress) {
        run_limited(flow, plain, LimitReservation::Reserved, burn, pay)
    }

    fn run_limited(
        flow: Flow,
        plain: bool,
        limit: LimitReservation,
        burn: Chain,
        pay: Payout,
    ) -> (Vec<Step>, SagaProgress) {
        let mut progress = SagaProgress::default();
        let mut trail = Vec::new();
        for _ in 0..20 {
            let step = next(flow, plain, &progress);
            trail.push(step);
            match step {
                Step::Gate => progress.gated = true,
                Step::ReserveLimit => progress.limit = limit,
                Step::SendChain => {
                    progress.chain = if burn == Chain::Refused {
                        burn
                    } else {
                        Chain::Sent
                    }
                }
                Step::StartPayout => progress.payout = Payout::Started,
                Step::ReleasePayout => progress.payout = Payout::Released,
                Step::CancelPayout => progress.payout = Payout::Cancelled,
                Step::Settle => progress.settled = true,
                Step::MintBack => progress.minted_back = true,
                Step::Undo => progress.undone = true,
                Step::Wait if progress.chain == Chain::Sent => progress.chain = burn,
                Step::Wait => progress.payout = pay,
                Step::FindBurn | Step::AbandonRefund => {
                    unreachable!("the operation is not refunded")
                }
                Step::End(_) => return (trail, progress),
            }
        }
        panic!("no end: {trail:?}");
    }

    // rows: R074 R075 R076 R082 R084
    #[test]
    fn r076_redemption_pays_after_the_burn_is_final() {
        let (trail, _) = run(Flow::RedeemRub, false, Chain::Succeeded, Payout::Succeeded);
        use Step::{
            End as Ends, Gate, ReleasePayout, ReserveLimit, SendChain, Settle, StartPayout, Wait,
        };
        assert_eq!(
            trail,
            [
                Gate,
                ReserveLimit,
                SendChain,
                StartPayout,
                Wait,
                ReleasePayout,
                Wait,
                Settle,
                Ends(End::Finalized)
            ]
        );
    }

    // rows: R079 R080 R087 R088
    #[test]
    fn r080_failed_payout_mints_back_and_frees_the_hold() {
        let (trail, progress) = run(Flow::RedeemRub, false, Chain::Succeeded, Payout::Failed);
        assert_eq!(
            trail[trail.len() - 3..],
            [Step::MintBack, Step::Undo, Step::End(End::PayoutFailed)]
        );
        assert!(!progress.settled);
    }

    #[test]
    fn t07_reverted_burn_cancels_the_payout_and_mints_nothing() {
        let (trail, progress) = run(Flow::RedeemRub, false, Chain::Reverted, Payout::Succeeded);
        assert_eq!(
            trail[trail.len() - 3..],
            [Step::CancelPayout, Step::Undo, Step::End(End::Reverted)]
        );
        assert!(
            !progress.minted_back && !progress.settled && !trail.contains(&Step::ReleasePayout)
        );
    }

    // rows: R091
    #[test]
    fn r091_every_flow_ends_with_ledger_and_chain_consistent() {
        for flow in Flow::ALL
            .iter()
            .copied()
            .filter(|flow| !matches!(flow, Flow::Maturity | Flow::Coupon))
        {
            for plain in [false, true] {
                for burn in [Chain::Succeeded, Chain::Reverted, Chain::Refused] {
                    for pay in [Payout::Succeeded, Payout::Failed] {
                        let (trail, progress) = run(flow, plain, burn, pay);
                        let tokens_moved =
                            progress.chain == Chain::Succeeded && !progress.minted_back;
                        if progress.gated {
                            assert_eq!(progress.settled, tokens_moved, "{flow:?} {trail:?}");
                            assert_ne!(progress.settled, progress.undone, "{flow:?} {trail:?}");
                        }
                        assert_eq!(
                            trail.last() == Some(&Step::End(End::Finalized)),
                            tokens_moved
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn t24_a_refused_limit_undoes_the_gate_and_sends_nothing() {
        for (flow, expected) in [
            (Flow::IssueRub, vec![Step::ReserveLimit]),
            (
                Flow::RedeemRub,
                vec![Step::Gate, Step::ReserveLimit, Step::Undo],
            ),
            (
                Flow::Transfer,
                vec![Step::Gate, Step::ReserveLimit, Step::Undo],
            ),
            (
                Flow::IssueInvestment,
                vec![Step::Gate, Step::ReserveLimit, Step::Undo],
            ),
        ] {
            let refused = LimitReservation::Refused;
            let (mut trail, _) =
                run_limited(flow, true, refused, Chain::Succeeded, Payout::Succeeded);
            assert_eq!(trail.pop(), Some(Step::End(End::LimitRefused)), "{flow:?}");
            assert_eq!(trail, expected, "{flow:?}");
        }
    }

    #[test]
    fn an_operation_from_before_reservations_is_sent_without_one() {
        let progress = SagaProgress {
            gated: true,
            limit: LimitReservation::Ended,
            ..SagaProgress::default()
        };
        assert_eq!(next(Flow::RedeemRub, false, &progress), Step::SendChain);
    }

    // rows: R089
    #[test]
    fn r089_a_refund_undoes_what_a_blocked_redemption_has_done() {
        use Payout::{Cancelled, Failed, Released, Succeeded};
        use Step::{AbandonRefund, CancelPayout, FindBurn, MintBack, StartPayout, Undo, Wait};
        let ends = Step::End(End::Refunded);
        // Recorded chain and payout states, states of the burn on the chain, state of the payout at
        // payments, expected steps.
        for (chain, payout, burn, at_payments, expected) in [
            (
                Chain::Unsent,
                Payout::None,
                vec![Chain::Refused],
                Cancelled,
                vec![FindBurn, Undo, ends],
            ),
            (
                Chain::Unsent,
                Payout::None,
                vec![Chain::Sent, Chain::Succeeded],
                Cancelled,
                vec![
                    FindBurn,
                    Wait,
                    StartPayout,
                    CancelPayout,
                    MintBack,
                    Undo,
                    ends,
                ],
            ),
            (
                Chain::Sent,
                Payout::Started,
                vec![Chain::Reverted],
                Cancelled,
                vec![Wait, CancelPayout, Undo, ends],
            ),
            (
                Chain::Succeeded,
                Payout::Started,
                vec![],
                Cancelled,
                vec![CancelPayout, MintBack, Undo, ends],
            ),
            (
                Chain::Succeeded,
                Failed,
                vec![],
                Cancelled,
                vec![MintBack, Undo, ends],
            ),
            // The bank has paid, or may pay: nothing is undone.
            (
                Chain::Succeeded,
                Payout::Started,
                vec![],
                Released,
                vec![CancelPayout, AbandonRefund],
            ),
            (
                Chain::Succeeded,
                Succeeded,
                vec![],
                Succeeded,
                vec![AbandonRefund],
            ),
        ] {
            let mut progress = SagaProgress {
                gated: true,
                limit: LimitReservation::Reserved,
                chain,
                payout,
                blocked: true,
                refunding: true,
                ..SagaProgress::default()
            };
            let mut burn = burn.into_iter();
            let mut trail = Vec::new();
            while !matches!(trail.last(), Some(Step::End(_) | AbandonRefund)) {
                let step = next(Flow::RedeemRub, false, &progress);
                trail.push(step);
                match step {
                    FindBurn | Wait => progress.chain = burn.next().expect("a burn"),
                    StartPayout => progress.payout = Payout::Started,
                    CancelPayout => progress.payout = at_payments,
                    MintBack => progress.minted_back = true,
                    Undo => progress.undone = true,
                    _ => {}
                }
            }
            assert_eq!(trail, expected, "{chain:?} {payout:?}");
        }
    }

    #[test]
    fn a_blocked_redemption_waits_before_the_bank() {
        let progress = SagaProgress {
            gated: true,
            chain: Chain::Succeeded,
            payout: Payout::Started,
            blocked: true,
            ..SagaProgress::default()
        };
        assert_eq!(next(Flow::RedeemRub, false, &progress), Step::Wait);
        assert_eq!(
            next(
                Flow::RedeemRub,
                false,
                &SagaProgress {
                    blocked: false,
                    ..progress
                }
            ),
            Step::ReleasePayout
        );
    }
}
