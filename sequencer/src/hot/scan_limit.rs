//! Bound on orders inspected in vain for a member (`design.md` 7).
//!
//! A mass cancel inspects its owner's open orders, including those that its filter leaves. A
//! fill-or-kill order that cannot be filled has inspected levels and orders. The number of entered
//! orders bounds those ended or traded. This module bounds the rest.

use admission::{Reject, RejectDetails};
use types::{RejectReason, UserIx};

/// Orders and levels inspected in vain per second and user, with a burst of one second. At 50 ns
/// each that is about 50 ms of the hot thread per second.
const SCANNED_PER_S: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;
const ORDER_NS: u64 = SECOND_NS / SCANNED_PER_S;

/// Token bucket per user, as the time at which its scans would have ended at the constant rate
/// (GCRA). Not part of the state: a refused request is not journalled.
#[derive(Default)]
pub(super) struct ScanLimiter {
    even_ns: Vec<u64>,
}

impl ScanLimiter {
    /// Nanoseconds until the user may scan again; 0 = now.
    fn wait_ns(&self, user: UserIx, now_ns: u64) -> u64 {
        let even_ns = self.even_ns.get(user.index()).copied().unwrap_or(0);
        match even_ns.saturating_sub(now_ns) {
            // A charge gets no further ahead than this: the clock was set back.
            ahead_ns if ahead_ns > 2 * SECOND_NS => 0,
            ahead_ns => ahead_ns.saturating_sub(SECOND_NS),
        }
    }

    /// Why the user may not scan now, if so: `THROTTLE` with the wait in microseconds.
    pub fn refuses(&self, user: UserIx, now_ns: u64) -> Option<Reject> {
        let wait_us = self.wait_ns(user, now_ns).div_ceil(1_000);
        let (reason, details) = (RejectReason::Throttle, RejectDetails::Max(wait_us));
        (wait_us > 0).then_some(Reject { reason, details })
    }

    /// Charges the user for orders that were inspected and left.
    #[inline]
    pub fn charge(&mut self, user: UserIx, now_ns: u64, orders: u64) {
        if orders > 0 && !user.is_none() {
            self.charge_some(user, now_ns, orders);
        }
    }

    #[cold]
    fn charge_some(&mut self, user: UserIx, now_ns: u64, orders: u64) {
        if self.even_ns.len() <= user.index() {
            self.even_ns.resize(user.index() + 1, 0);
        }
        let even_ns = &mut self.even_ns[user.index()];
        if *even_ns < now_ns || *even_ns > now_ns + 2 * SECOND_NS {
            *even_ns = now_ns;
        }
        // Limited: the sum of scans in flight must not look like a clock that was set back.
        *even_ns = (*even_ns + orders * ORDER_NS).min(now_ns + 2 * SECOND_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_scans_a_burst_and_then_waits_while_another_does_not() {
        let (mut limiter, start) = (ScanLimiter::default(), 5 * SECOND_NS);
        let user = UserIx(3);
        for _ in 0..17 {
            assert_eq!(limiter.wait_ns(user, start), 0);
            limiter.charge(user, start, 60_000);
        }
        assert_eq!(limiter.wait_ns(user, start), 20_000_000);
        assert_eq!(limiter.wait_ns(UserIx(4), start), 0);
        assert_eq!(limiter.wait_ns(user, start + 20_000_000), 0);
        assert_eq!(limiter.wait_ns(user, 1), 0, "the clock was set back");
        limiter.charge(user, start, 90_000_000);
        assert_eq!(limiter.wait_ns(user, start), SECOND_NS, "a second at most");
        limiter.charge(UserIx(9), start, 0);
        assert_eq!(limiter.even_ns.len(), 4, "no row for a user without scans");
    }
}
