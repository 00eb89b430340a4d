//! Moments at which the hot thread speaks up by itself: the grace of ended sessions. What it then does is a journalled command like any other.

use types::SessionIx;

/// Sessions that ended and will have their orders cancelled.
#[derive(Default)]
pub(crate) struct Timers {
    /// Few at any time: a scan is cheaper than an index.
    due: Vec<(u64, SessionIx)>,
}

impl Timers {
    pub fn session_ended(&mut self, session: SessionIx, at_ns: u64) {
        self.session_back(session);
        self.due.push((at_ns, session));
    }

    pub fn session_back(&mut self, session: SessionIx) {
        self.due.retain(|(_, other)| *other != session);
    }

    pub fn next_ns(&self) -> Option<u64> {
        self.due.iter().map(|(at_ns, _)| *at_ns).min()
    }

    /// Takes one session whose time has come.
    pub fn take_due(&mut self, now_ns: u64) -> Option<SessionIx> {
        let at = self.due.iter().position(|(at_ns, _)| *at_ns <= now_ns)?;
        Some(self.due.swap_remove(at).1)
    }
}
