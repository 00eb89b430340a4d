//! Moments at which the hot thread speaks up by itself: the grace of ended sessions. What it then does is a
//! journalled command like any other.

use types::SessionIx;

/// Sessions that ended and will have their orders cancelled.
#[derive(Default)]
pub(crate) struct Timers {
    /// Few at any time: a scan is cheaper than an index.
    due: Vec<(u64, SessionIx)>,
}

impl Timers {
    pub fn session_ended(&mut self, session: SessionIx, at_ns: u64) {
        self.forget(session);
        self.due.push((at_ns, session));
    }

    /// The session is back, or what was owed has been done.
    pub fn forget(&mut self, session: SessionIx) {
        self.due.retain(|(_, other)| *other != session);
    }

    pub fn next_ns(&self) -> Option<u64> {
        self.due.iter().map(|(at_ns, _)| *at_ns).min()
    }

    /// A session whose time has come. It stays due until it is forgotten: a busy moment must not lose its cancel.
    pub fn due(&self, now_ns: u64) -> Option<SessionIx> {
        self.due
            .iter()
            .find(|(at_ns, _)| *at_ns <= now_ns)
            .map(|(_, session)| *session)
    }
}
