//! Bound on orders inspected in vain for a member (`design.md` 7).
//!
//! A mass cancel inspects its owner's open orders, including those that its filter leaves, and the
//! owner's sessions without an order. A fill-or-kill order that cannot be filled has inspected
//! levels and orders. The number of entered orders bounds those ended or traded. This module bounds
//! the rest.
//!
//! An engine reports what it has inspected after the fact. Until then a fill-or-kill order counts
//! as the most that it can inspect, so that a member cannot fill a ring with them.

use admission::{Reject, RejectDetails};
use types::command::Route;
use types::{RejectReason, UserIx};

use super::Hot;
use super::outline::Dispatch;

/// Orders and levels inspected in vain per second and user, with a burst of one second. At 50 ns
/// each that is about 50 ms of the hot thread per second.
const SCANNED_PER_S: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;
const ORDER_NS: u64 = SECOND_NS / SCANNED_PER_S;

/// Token bucket per user. Not part of the state: a refused request is not journalled.
#[derive(Default)]
pub(super) struct ScanLimiter {
    rows: Vec<Row>,
}

/// Scans of one user.
#[derive(Clone, Copy, Default)]
struct Row {
    /// Time at which the charged scans would have ended at the constant rate (GCRA).
    even_ns: u64,
    /// Most orders and levels that the fill-or-kill orders in flight can inspect.
    in_flight: u64,
}

impl ScanLimiter {
    /// Nanoseconds until the user may scan again; 0 = now.
    fn wait_ns(&self, user: UserIx, now_ns: u64) -> u64 {
        self.ahead_ns(user, now_ns).saturating_sub(SECOND_NS)
    }

    /// Nanoseconds by which the user's scans are ahead of the constant rate.
    fn ahead_ns(&self, user: UserIx, now_ns: u64) -> u64 {
        let row = self.rows.get(user.index());
        match row.map_or(0, |row| row.even_ns.saturating_sub(now_ns)) {
            // A charge gets no further ahead than this: the clock was set back.
            ahead_ns if ahead_ns > 2 * SECOND_NS => 0,
            ahead_ns => ahead_ns,
        }
    }

    /// Why the user may not scan now, if so: `THROTTLE` with the wait in microseconds.
    pub fn refuses(&self, user: UserIx, now_ns: u64) -> Option<Reject> {
        let wait_us = self.wait_ns(user, now_ns).div_ceil(1_000);
        let (reason, details) = (RejectReason::Throttle, RejectDetails::Max(wait_us));
        (wait_us > 0).then_some(Reject { reason, details })
    }

    /// Why the user may enter no fill-or-kill order now, if so. `BUSY`: those in flight may inspect
    /// as much as is allowed, and it is not known yet how much they do.
    pub fn refuses_fok(&self, user: UserIx, now_ns: u64) -> Option<Reject> {
        let throttled = self.refuses(user, now_ns);
        let in_flight = self.rows.get(user.index()).map_or(0, |row| row.in_flight);
        let may_be_over =
            in_flight > 0 && self.ahead_ns(user, now_ns) + in_flight * ORDER_NS > SECOND_NS;
        throttled.or_else(|| may_be_over.then(|| RejectReason::Busy.into()))
    }

    /// Charges the user for orders that were inspected and left.
    #[inline]
    pub fn charge(&mut self, user: UserIx, now_ns: u64, orders: u64) {
        if orders > 0 && !user.is_none() {
            self.charge_some(user, now_ns, orders);
        }
    }

    /// Counts `orders` for the user until [`ScanLimiter::release`].
    pub fn reserve(&mut self, user: UserIx, orders: u32) {
        if !user.is_none() {
            self.row(user).in_flight += u64::from(orders);
        }
    }

    /// Ends a count of [`ScanLimiter::reserve`].
    #[cold]
    pub fn release(&mut self, user: UserIx, orders: u32) {
        if !user.is_none() {
            self.row(user).in_flight -= u64::from(orders);
        }
    }

    fn row(&mut self, user: UserIx) -> &mut Row {
        if self.rows.len() <= user.index() {
            self.rows.resize(user.index() + 1, Row::default());
        }
        &mut self.rows[user.index()]
    }

    #[cold]
    fn charge_some(&mut self, user: UserIx, now_ns: u64, orders: u64) {
        let even_ns = &mut self.row(user).even_ns;
        if *even_ns < now_ns || *even_ns > now_ns + 2 * SECOND_NS {
            *even_ns = now_ns;
        }
        // Limited: the sum of scans in flight must not look like a clock that was set back.
        *even_ns = (*even_ns + orders * ORDER_NS).min(now_ns + 2 * SECOND_NS);
    }
}

impl Hot {
    /// Counts an admitted fill-or-kill order as the most that it can inspect, until its engine
    /// reports.
    #[cold]
    pub(super) fn reserve_visits(&mut self, order: &Dispatch) {
        // A refusal reaches no book.
        let Route::Instrument(instrument) = order.route else {
            return;
        };
        // Each open order is inspected at most twice: in the sum of its level, and by itself.
        let open_orders = self.core.admission().open_orders_of(instrument);
        let visits_max = open_orders.saturating_mul(2);
        self.scan_limiter.reserve(order.member, visits_max);
        self.in_flight.set_visits_max(visits_max);
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
        assert_eq!(limiter.rows.len(), 4, "no row for a user without scans");
    }

    #[test]
    fn what_orders_in_flight_can_inspect_counts_until_they_report() {
        let (mut limiter, start) = (ScanLimiter::default(), 5 * SECOND_NS);
        let user = UserIx(3);
        let is_busy = |limiter: &ScanLimiter, user| {
            let refusal = limiter.refuses_fok(user, start);
            refusal.is_some_and(|reject| reject.reason == RejectReason::Busy)
        };
        limiter.reserve(user, 1_000_000);
        assert!(!is_busy(&limiter, user));
        limiter.reserve(user, 20_000);
        assert!(is_busy(&limiter, user));
        assert!(limiter.refuses(user, start).is_none(), "cancels go on");
        assert!(limiter.refuses_fok(UserIx(4), start).is_none());
        limiter.release(user, 20_000);
        limiter.charge(user, start, 30_000);
        assert!(is_busy(&limiter, user));
        limiter.release(user, 1_000_000);
        assert!(limiter.refuses_fok(user, start).is_none());
    }
}
