//! Closing of sessions without a front: those of the last run, and those of a front that panicked.
//!
//! A front that stops closes its sessions itself. The rings of a front that panics are dropped with
//! its sessions open. Cancel-on-disconnect runs for these as after a lost connection.

use admission::Request;
use types::SessionIx;

use super::Hot;
use crate::port::SubmitError;

impl Hot {
    /// Disconnects the open sessions of a front that has dropped its rings. True when it did work.
    ///
    /// Waits without a time limit for engines: a login in flight has no route yet.
    #[cold]
    pub(super) fn disconnect_front(&mut self, port: usize) -> bool {
        while !self.in_flight.is_empty() {
            self.pump_or_yield();
        }
        let admission = self.core.admission();
        let of_front = (0..)
            .map(SessionIx)
            .zip(&self.routes)
            .filter(|(_, to)| usize::from(**to) == port);
        let open = of_front.filter_map(|(session, _)| {
            let row = admission.session(session)?;
            row.open.then_some((session, row.epoch))
        });
        let before = self.disconnected.len();
        self.disconnected.extend(open);
        let sessions = self.disconnected.len() - before;
        if sessions > 0 {
            tracing::error!(
                sessions,
                "a front ended with open sessions; they are closed"
            );
        }
        self.close_disconnected()
    }

    /// Closes the disconnected sessions as far as the journal has room. The others follow in later
    /// iterations: the hot thread does not wait for the disk. True when it did work.
    #[cold]
    pub(super) fn close_disconnected(&mut self) -> bool {
        let mut did_work = false;
        while let Some((session, epoch)) = self.disconnected.front().copied() {
            let close = Request::CloseSession {
                session,
                epoch: Some(epoch),
                keep_orders: false,
            };
            match self.own_request(&close) {
                Err(SubmitError::Busy) => break,
                // Refused: a later login has the session. A failed journal accepts nothing more.
                outcome => did_work |= outcome.is_ok(),
            }
            self.disconnected.pop_front();
            self.pump();
        }
        did_work
    }
}
