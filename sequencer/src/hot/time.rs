//! Timer commands: expiry of orders, cancel-on-disconnect after the grace period, dead man's
//! switches.
//!
//! Each is a journalled command like any other.

use admission::{MassCancelRequest, Request};
use types::command::MassScope;
use types::{CancelReason, Command, Envelope, Id128, InstrumentIx, SessionIx, UserIx};

use super::Hot;
use crate::port::SubmitError;
use crate::timers::Timer;

/// Time until an expiry that found no room is tried again.
const RETRY_NS: u64 = 1_000_000;

impl Hot {
    /// Closes all open sessions, since none is connected, and restarts the grace periods of closed
    /// ones. Called at the start.
    pub(super) fn disconnect_all(&mut self) {
        let (now_ns, lead_ns) = (self.config.clock.now_ns(), self.lead_ns());
        let admission = self.core.admission();
        let open = admission.open_sessions();
        self.disconnected
            .extend(open.map(|(session, row)| (session, row.epoch)));
        let in_grace: Vec<SessionIx> = admission
            .orders()
            .map(|order| order.session)
            .filter(|ix| {
                let session = admission.session(*ix);
                session.is_some_and(|session| !session.open && session.cancel_on_disconnect)
            })
            .collect();
        let switches: Vec<(SessionIx, u64)> = admission
            .sessions()
            .filter(|(_, row)| row.cancel_all_at_ns > 0)
            .map(|(ix, row)| (ix, row.cancel_all_at_ns.saturating_sub(lead_ns)))
            .collect();
        for session in in_grace {
            let at_ns = now_ns + self.grace_ns();
            self.timers.set(session, Timer::Grace, at_ns);
        }
        for (session, at_ns) in switches {
            self.timers.set(session, Timer::CancelAllAfter, at_ns);
        }
        self.close_disconnected();
    }

    /// Nanoseconds by which journalled time is ahead of the clock.
    ///
    /// Journalled time stays until the clock has caught up. Timers must not wait for that.
    fn lead_ns(&self) -> u64 {
        let clock_ns = self.config.clock.now_ns();
        self.core.time_ns().saturating_sub(clock_ns)
    }

    pub(super) fn grace_ns(&self) -> u64 {
        self.config.grace_ms * 1_000_000
    }

    pub(super) fn next_ns(&self) -> Option<u64> {
        let expiry_ns = self.expiries.next_ns();
        let expiry_ns = expiry_ns.filter(|_| !self.is_clock_suspect);
        match (expiry_ns, self.timers.next_ns()) {
            (Some(expiry_ns), Some(timer_ns)) => Some(expiry_ns.min(timer_ns)),
            (expiry_ns, timer_ns) => expiry_ns.or(timer_ns),
        }
    }

    /// Submits the timer commands that are due. One that is refused as `BUSY` stays due.
    pub(super) fn submit_due_timers(&mut self) -> bool {
        let Some(next_ns) = self.next_ns() else {
            return false;
        };
        let now_ns = self.config.clock.now_ns();
        if next_ns > now_ns || self.keep.is_failed() {
            return false;
        }
        let mut did_work = !self.is_clock_suspect && self.expire_due(now_ns);
        while let Some((session, timer)) = self.timers.due(now_ns) {
            let request = Request::MassCancel(MassCancelRequest {
                scope: MassScope::Session(session),
                instrument: InstrumentIx::NONE,
                side: None,
                reason: match timer {
                    Timer::Grace => CancelReason::CancelOnDisconnect,
                    Timer::CancelAllAfter => CancelReason::CancelAllAfter,
                },
                user: UserIx::NONE,
                session: SessionIx::NONE,
                client_seq: 0,
                key_hash: Id128::NONE,
            });
            match self.own_request(&request) {
                Err(SubmitError::Busy) => break,
                outcome => did_work |= outcome.is_ok(),
            }
            self.timers.clear(session, timer);
            self.pump();
        }
        did_work
    }

    /// Submits the next expiry command that is due, one per iteration; true when there was one.
    ///
    /// It is of one book: the dates of its orders cost no other book. It cancels a bounded number
    /// of orders, so that those of one member do not delay the requests of others. Until it
    /// arrives, a book ends expired orders itself before it matches.
    fn expire_due(&mut self, now_ns: u64) -> bool {
        let Some((book, _)) = self.expiries.next_book().filter(|due| due.1 <= now_ns) else {
            return false;
        };
        let request = Request::ExpireOrders(InstrumentIx(book as u32));
        match self.own_request(&request) {
            Ok(()) => {}
            // Tried again later. The other books have their turns before it.
            Err(SubmitError::Busy) => {
                self.expiries.set(book, now_ns + RETRY_NS);
                return false;
            }
            Err(_) => return false,
        }
        if let Some(engine_ring) = self.engine_rings.get_mut(book) {
            engine_ring.expire(self.core.sequence());
            self.expiries.set(book, engine_ring.next_expiry_ns);
        }
        self.pump();
        true
    }

    pub(super) fn watch_sessions(&mut self, envelope: &Envelope) {
        match envelope.command {
            Command::OpenSession(open) => self.timers.clear(open.session, Timer::Grace),
            Command::CancelAllAfter(c) => {
                let row = self.core.admission().session(c.session);
                match row.map_or(0, |row| row.cancel_all_at_ns) {
                    0 => self.timers.clear(c.session, Timer::CancelAllAfter),
                    at_ns => {
                        let at_ns = at_ns.saturating_sub(self.lead_ns());
                        self.timers.set(c.session, Timer::CancelAllAfter, at_ns);
                    }
                }
            }
            Command::CloseSession(close) => {
                let session = self.core.admission().session(close.session);
                if session.is_some_and(|session| session.cancel_on_disconnect) {
                    let at_ns = envelope.time_ns.saturating_sub(self.lead_ns()) + self.grace_ns();
                    self.timers.set(close.session, Timer::Grace, at_ns);
                }
            }
            _ => {}
        }
    }
}
