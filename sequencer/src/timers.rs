//! Timers of sessions: cancel-on-disconnect after the grace period, and dead man's switches.
//!
//! A timer submits a journalled command like any other.

use std::collections::BTreeSet;

use types::SessionIx;

/// Kind of a session's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// Grace period of a session that has lost its connection.
    Grace,
    /// Dead man's switch that the session has not renewed.
    CancelAllAfter,
}

/// At most one timer of each kind per session. Setting and clearing a timer is logarithmic in their
/// number.
#[derive(Default)]
pub(crate) struct Timers {
    due: BTreeSet<(u64, SessionIx, Timer)>,
    /// By session and kind; 0 = not set.
    at_ns: Vec<[u64; 2]>,
}

impl Timers {
    /// Sets or moves the timer.
    pub fn set(&mut self, session: SessionIx, timer: Timer, at_ns: u64) {
        self.clear(session, timer);
        if self.at_ns.len() <= session.index() {
            self.at_ns.resize(session.index() + 1, [0; 2]);
        }
        self.at_ns[session.index()][timer as usize] = at_ns;
        self.due.insert((at_ns, session, timer));
    }

    pub fn clear(&mut self, session: SessionIx, timer: Timer) {
        if let Some(row) = self.at_ns.get_mut(session.index()) {
            let at_ns = std::mem::take(&mut row[timer as usize]);
            self.due.remove(&(at_ns, session, timer));
        }
    }

    /// Moves every timer by `by_ns`, after the clock was set by as much.
    pub fn shift(&mut self, by_ns: i64) {
        let due = std::mem::take(&mut self.due);
        for (at_ns, session, timer) in due {
            self.set(session, timer, at_ns.saturating_add_signed(by_ns));
        }
    }

    /// Time of the next timer.
    pub fn next_ns(&self) -> Option<u64> {
        self.due.first().map(|(at_ns, _, _)| *at_ns)
    }

    /// A timer that is due. It stays due until it is cleared, so that a `BUSY` does not lose it.
    pub fn due(&self, now_ns: u64) -> Option<(SessionIx, Timer)> {
        let (at_ns, session, timer) = *self.due.first()?;
        (at_ns <= now_ns).then_some((session, timer))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Far above what the calls take; a scan of all timers in each of them would take longer.
    const HANG: Duration = Duration::from_secs(15);

    #[test]
    fn a_timer_that_is_moved_fires_once_and_another_kind_stays() {
        let mut timers = Timers::default();
        let (one, two) = (SessionIx(1), SessionIx(70_000));
        timers.set(one, Timer::CancelAllAfter, 50);
        timers.set(two, Timer::Grace, 40);
        timers.set(one, Timer::Grace, 60);
        timers.set(one, Timer::CancelAllAfter, 30);
        assert_eq!(timers.next_ns(), Some(30));
        assert_eq!(timers.due(29), None);
        assert_eq!(timers.due(30), Some((one, Timer::CancelAllAfter)));
        timers.clear(one, Timer::CancelAllAfter);
        timers.clear(one, Timer::CancelAllAfter);
        assert_eq!(timers.due(99), Some((two, Timer::Grace)));
        timers.clear(two, Timer::Grace);
        assert_eq!(timers.due(99), Some((one, Timer::Grace)));
        timers.clear(one, Timer::Grace);
        assert_eq!((timers.due(99), timers.next_ns()), (None, None));
    }

    #[test]
    fn timers_are_as_far_away_after_the_clock_was_set() {
        let mut timers = Timers::default();
        let one = SessionIx(1);
        timers.set(one, Timer::Grace, 50);
        timers.set(one, Timer::CancelAllAfter, 70);
        timers.shift(-40);
        assert_eq!(timers.next_ns(), Some(10));
        timers.clear(one, Timer::Grace);
        assert_eq!(timers.due(30), Some((one, Timer::CancelAllAfter)));
    }

    #[test]
    fn no_call_scans_the_timers() {
        const SESSIONS: u32 = 200_000;
        let (mut timers, since) = (Timers::default(), Instant::now());
        for session in 0..SESSIONS {
            let at_ns = 1_000_000 + u64::from(session);
            timers.set(SessionIx(session), Timer::Grace, at_ns);
        }
        for call in 0..200_000 {
            // Each renews the switch of one of a thousand sessions.
            let at_ns = 2_000_000 + u64::from(call);
            timers.set(SessionIx(call % 1_000), Timer::CancelAllAfter, at_ns);
            assert_eq!(timers.next_ns(), Some(1_000_000));
            assert_eq!(timers.due(999_999), None);
        }
        let mut fired = Vec::new();
        while let Some((session, timer)) = timers.due(u64::MAX) {
            timers.clear(session, timer);
            fired.push((session, timer));
        }
        let graces = (0..SESSIONS).map(|at| (SessionIx(at), Timer::Grace));
        let switches = (0..1_000).map(|at| (SessionIx(at), Timer::CancelAllAfter));
        assert!(fired.into_iter().eq(graces.chain(switches)), "by time");
        assert!(since.elapsed() < HANG, "{:?}", since.elapsed());
    }
}
