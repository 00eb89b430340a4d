//! Quotas per member (`design.md` 7): journal bytes per minute, order messages per trade and day.
//!
//! Both bounds are journalled. The counts are not: they are zero at the start of the node.

use admission::{Reject, RejectDetails};
use types::command::OrderBounds;
use types::event::Trade;
use types::{RejectReason, UserIx};

use super::outline::{Message, Outline};
use super::{Hot, Source};
use crate::core::Core;
use crate::ring_port::{OrderToTrade, Report, Submission};

const MINUTE_NS: u64 = 60_000_000_000;
/// Order messages per day that need no trade.
const FREE_MESSAGES: u64 = 100_000;
/// Minimum gap between new orders or amends of a member above the ratio: ten pass per second.
const SLOW_NS: u64 = 100_000_000;
/// Percentage of the ratio at which the member is warned, once a day.
const WARNED_PERCENT: u64 = 80;

/// Counts of one member, in a cache line of their own.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Meter {
    /// Minute of the count of bytes.
    minute: u64,
    /// Day of the counts of messages and trades.
    day: u32,
    bytes: u64,
    messages: u64,
    trades: u64,
    /// Only requests that reduce risk pass for the rest of this minute.
    is_full: bool,
    /// The member is above the ratio.
    is_slow: bool,
    is_warned: bool,
    /// Earliest time of the next order while above the ratio.
    next_order_ns: u64,
}

/// Meters by user.
#[derive(Default)]
pub(super) struct Meters {
    rows: Vec<Meter>,
    minute: u64,
    /// Moscow day.
    day: u32,
}

impl Meters {
    /// Sets the time of the next counts and checks. A clock step starts another minute.
    #[inline]
    pub fn set_time(&mut self, now_ns: u64) {
        let minute = now_ns / MINUTE_NS;
        if minute != self.minute {
            self.minute = minute;
            self.day = admission::moscow_day(now_ns);
        }
    }

    /// Why a request of the member is refused unless it reduces risk; the wait is in microseconds.
    #[inline]
    pub fn refuses(&self, member: UserIx, is_order: bool, now_ns: u64) -> Option<Reject> {
        let row = self.rows.get(member.index())?;
        match row.is_full || row.is_slow {
            true => self.refuses_row(row, is_order, now_ns),
            false => None,
        }
    }

    #[cold]
    fn refuses_row(&self, row: &Meter, is_order: bool, now_ns: u64) -> Option<Reject> {
        let (reason, wait_ns) = if row.is_full && row.minute == self.minute {
            let wait_ns = (self.minute + 1) * MINUTE_NS - now_ns;
            (RejectReason::JournalQuota, wait_ns)
        } else if is_order && row.is_slow && row.day == self.day {
            // At most one gap, even when the clock was set back.
            let wait_ns = row.next_order_ns.saturating_sub(now_ns).min(SLOW_NS);
            (RejectReason::OrderToTrade, wait_ns)
        } else {
            return None;
        };
        let details = RejectDetails::Max(wait_ns.div_ceil(1_000));
        (wait_ns > 0).then_some(Reject { reason, details })
    }

    /// Counts an admitted order message; returns a warning if one is due.
    ///
    /// `order_ns` is its time, if it is an order or amend. `bounds` are those of the member.
    #[inline(always)]
    pub fn message<'a>(
        &mut self,
        member: UserIx,
        bounds: impl FnOnce() -> &'a OrderBounds,
        order_ns: Option<u64>,
    ) -> Option<OrderToTrade> {
        let row = self.row(member)?;
        row.messages += 1;
        if row.messages <= FREE_MESSAGES / 100 * WARNED_PERCENT {
            return None;
        }
        row.weigh(bounds(), order_ns)
    }

    /// Counts the journal bytes of a member's command.
    #[inline]
    pub fn bytes(&mut self, member: UserIx, bounds: &OrderBounds, bytes: usize) {
        if let Some(row) = self.row(member) {
            row.bytes += bytes as u64;
            row.is_full = row.bytes >= bounds.journal_bytes_per_minute;
        }
    }

    /// Counts a trade of the member.
    #[inline]
    pub fn trade(&mut self, member: UserIx) {
        if let Some(row) = self.row(member) {
            row.trades += 1;
        }
    }

    #[inline(always)]
    fn row(&mut self, member: UserIx) -> Option<&mut Meter> {
        if member.is_none() {
            return None;
        }
        let is_current = |row: &Meter| row.minute == self.minute;
        if !self.rows.get(member.index()).is_some_and(is_current) {
            self.begin_minute(member);
        }
        self.rows.get_mut(member.index())
    }

    /// Sets the member's row to the minute and day of the next counts.
    #[cold]
    fn begin_minute(&mut self, member: UserIx) {
        if self.rows.len() <= member.index() {
            self.rows.resize(member.index() + 1, Meter::default());
        }
        let row = &mut self.rows[member.index()];
        (row.minute, row.bytes, row.is_full) = (self.minute, 0, false);
        if row.day != self.day {
            *row = Meter {
                minute: self.minute,
                day: self.day,
                ..Meter::default()
            };
        }
    }
}

impl Meter {
    fn weigh(&mut self, bounds: &OrderBounds, order_ns: Option<u64>) -> Option<OrderToTrade> {
        let for_trades = self
            .trades
            .saturating_mul(u64::from(bounds.messages_per_trade));
        let allowed = match bounds.messages_per_trade {
            u32::MAX => u64::MAX,
            _ => FREE_MESSAGES.saturating_add(for_trades),
        };
        self.is_slow = self.messages > allowed;
        // Cancels count, but delay no order.
        if let Some(order_ns) = order_ns {
            self.next_order_ns = order_ns + SLOW_NS;
        }
        let is_near = self.messages > allowed / 100 * WARNED_PERCENT;
        if !is_near || std::mem::replace(&mut self.is_warned, true) {
            return None;
        }
        Some(OrderToTrade {
            messages: self.messages,
            allowed,
        })
    }
}

impl Hot {
    /// Why only requests that reduce risk pass, if so: a rate or quota of the session or member.
    #[inline]
    pub(super) fn over_rate(
        &mut self,
        asked: &Submission,
        outline: &Outline,
        now_ns: u64,
    ) -> Option<Reject> {
        self.meters.set_time(now_ns);
        if asked.is_over_rate {
            return Some(RejectReason::Throttle.into());
        }
        let Outline {
            member,
            is_order,
            is_fok,
        } = *outline;
        if is_fok && let Some(reject) = self.scan_limiter.refuses_fok(member, now_ns) {
            return Some(reject);
        }
        self.meters.refuses(member, is_order, now_ns)
    }

    /// Counts the admitted command, and warns its session if that is due.
    #[inline(always)]
    pub(super) fn count_message(
        &mut self,
        source: Source,
        member: UserIx,
        message: Message,
        now_ns: u64,
    ) {
        let is_order = message == Message::Order;
        if is_order {
            self.intake.entered(now_ns);
        }
        let order_ns = is_order.then_some(now_ns);
        let admission = self.core.admission();
        let bounds = || {
            let user = admission.user(member);
            user.map_or(&OrderBounds::NONE, |user| admission.bounds(user))
        };
        if let Some(warning) = self.meters.message(member, bounds, order_ns) {
            self.warn(source, warning);
        }
    }

    #[cold]
    fn warn(&mut self, source: Source, warning: OrderToTrade) {
        metrics::counter!("trading_order_to_trade_warnings_total").increment(1);
        let Source::Ring { port, at } = source else {
            return;
        };
        let Some((session, _)) = self.rings[port].request(at).client() else {
            return;
        };
        self.rings[port].put(|| Report::OrderToTrade(session, warning));
    }

    /// Counts a trade for the users of both orders, which are still open before it is applied.
    #[inline]
    pub(super) fn count_trade(meters: &mut Meters, core: &Core, trade: &Trade) {
        for order in [trade.maker, trade.taker] {
            let order = core.admission().order(order);
            meters.trade(order.expect("a trade is between open orders").user);
        }
    }

    /// Counts the journal bytes of a complete command.
    #[inline]
    pub(super) fn count_bytes(&mut self, member: UserIx, bytes: usize) {
        let admission = self.core.admission();
        if let Some(user) = admission.user(member) {
            self.meters.bytes(member, admission.bounds(user), bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBER: UserIx = UserIx(3);
    const START_NS: u64 = 1_000 * MINUTE_NS;

    fn bounds(journal_bytes_per_minute: u64, messages_per_trade: u32) -> OrderBounds {
        OrderBounds {
            journal_bytes_per_minute,
            messages_per_trade,
            ..OrderBounds::NONE
        }
    }

    #[test]
    fn a_member_uses_up_its_own_quota_of_a_minute_alone() {
        let (mut meters, bounds) = (Meters::default(), bounds(1_000, u32::MAX));
        meters.set_time(START_NS + 1_000);
        for _ in 0..10 {
            assert_eq!(meters.refuses(MEMBER, true, START_NS + 1_000), None);
            meters.bytes(MEMBER, &bounds, 100);
        }
        let refused = meters.refuses(MEMBER, false, START_NS + 1_000);
        let refused = refused.expect("the quota is used up");
        let expected = (RejectReason::JournalQuota, 59_999_999);
        assert_eq!((refused.reason, refused.limit()), expected);
        assert_eq!(meters.refuses(UserIx(2), true, START_NS), None);
        meters.bytes(UserIx::NONE, &bounds, 5_000);
        meters.set_time(START_NS + MINUTE_NS);
        assert_eq!(meters.refuses(MEMBER, true, START_NS + MINUTE_NS), None);
        // The clock was set back: another minute, not the rest of the old one.
        meters.bytes(MEMBER, &bounds, 1_000);
        meters.set_time(START_NS - MINUTE_NS);
        assert_eq!(meters.refuses(MEMBER, true, START_NS - MINUTE_NS), None);
        assert_eq!(meters.rows.len(), 4, "no row for the platform itself");
    }

    #[test]
    fn otr_warns_then_throttles_member_without_trades() {
        let (mut meters, bounds) = (Meters::default(), bounds(u64::MAX, 10));
        meters.set_time(START_NS);
        let send = |meters: &mut Meters, count| {
            let message = |_| meters.message(MEMBER, || &bounds, Some(START_NS));
            (0..count).filter_map(message).collect::<Vec<_>>()
        };
        (0..10_000).for_each(|_| meters.trade(MEMBER));
        let allowed = FREE_MESSAGES + 100_000;
        let warned = send(&mut meters, allowed);
        let messages = allowed / 100 * WARNED_PERCENT + 1;
        assert_eq!(warned, [OrderToTrade { messages, allowed }], "once");
        assert_eq!(meters.refuses(MEMBER, true, START_NS), None);
        assert_eq!(send(&mut meters, 1), []);
        let slow = meters.refuses(MEMBER, true, START_NS).expect("too many");
        let expected = (RejectReason::OrderToTrade, 100_000);
        assert_eq!((slow.reason, slow.limit()), expected);
        assert_eq!(
            meters.refuses(MEMBER, false, START_NS),
            None,
            "cancels pass"
        );
        let later_ns = START_NS + SLOW_NS;
        meters.message(MEMBER, || &bounds, None);
        assert_eq!(
            meters.refuses(MEMBER, true, later_ns),
            None,
            "cancels delay no order"
        );
        // A trade pays for ten messages.
        meters.trade(MEMBER);
        meters.message(MEMBER, || &bounds, Some(later_ns));
        assert_eq!(meters.refuses(MEMBER, true, later_ns), None);
        // The next day starts at zero.
        send(&mut meters, 20);
        assert!(meters.refuses(MEMBER, true, START_NS).is_some());
        let tomorrow_ns = START_NS + 24 * 60 * MINUTE_NS;
        meters.set_time(tomorrow_ns);
        assert_eq!(meters.refuses(MEMBER, true, tomorrow_ns), None);
        assert_eq!(meters.message(MEMBER, || &bounds, Some(tomorrow_ns)), None);
        assert_eq!(meters.rows[MEMBER.index()].messages, 1);
    }
}
