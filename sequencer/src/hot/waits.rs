//! Requests that depend on in-flight commands: the hot thread lets those complete first.
//!
//! Each wait is bounded by [`ROOM_WAIT`], with reports drained meanwhile.

use std::time::Instant;

use admission::{OrderRef, Request};
use types::{Command, HoldKind, UserIx};

use super::{Hot, ROOM_WAIT, Source};
use crate::port::SubmitError;

impl Hot {
    /// Waits for in-flight commands that affect the request.
    #[inline]
    pub(super) fn await_earlier(&mut self, source: Source) -> Result<(), SubmitError> {
        if self.in_flight.first() <= self.renaming.0 {
            self.await_new_id(source)?;
        }
        if !self.in_flight.is_empty() && self.changes_reported_state(source) {
            self.await_in_flight()?;
        }
        Ok(())
    }

    /// Waits for the amend that changes a client order id, if the request depends on the ids of its
    /// user's orders. Requests of other users wait only if they are amends that change an id.
    #[cold]
    fn await_new_id(&mut self, source: Source) -> Result<(), SubmitError> {
        let depends = |user: UserIx| user == self.renaming.1;
        let has_to_wait = match self.request(source) {
            Request::New(r) => depends(r.user) && r.client_order_id != 0,
            Request::Amend(r) => depends(r.user) || r.new_client_order_id != 0,
            Request::Cancel(r) => depends(r.user) && matches!(r.order, OrderRef::Client(_)),
            _ => false,
        };
        let since = Instant::now();
        while has_to_wait && self.in_flight.first() <= self.renaming.0 {
            self.pump_or_yield();
            if since.elapsed() > ROOM_WAIT {
                return Err(SubmitError::Busy);
            }
        }
        Ok(())
    }

    /// True when the request changes state that messages of commands in flight are built from: a
    /// trading hold, whose balance is reported to sessions, or the band of an instrument.
    #[inline]
    fn changes_reported_state(&self, source: Source) -> bool {
        match self.request(source) {
            Request::SetInstrument(_) => true,
            Request::Fund(r) => r.kind == HoldKind::Trading,
            Request::Defund { hold, .. } | Request::CloseHold { hold, .. } => {
                let balance = self.core.admission().hold(*hold);
                balance.is_some_and(|balance| balance.kind == HoldKind::Trading)
            }
            _ => false,
        }
    }

    /// Waits until every command in flight has completed, up to [`ROOM_WAIT`].
    ///
    /// So the amounts that a `Fund`, `Defund` or `CloseHold` reports follow from the journal before
    /// it, and a refusal of an order reports the band that refused it. After a timeout further
    /// requests of the kind are `BUSY` at once, until the first of the commands in flight
    /// completes.
    #[cold]
    fn await_in_flight(&mut self) -> Result<(), SubmitError> {
        let since = Instant::now();
        while !self.in_flight.is_empty() {
            let first = self.in_flight.first();
            if first == self.timed_out {
                return Err(SubmitError::Busy);
            }
            if since.elapsed() > ROOM_WAIT {
                self.timed_out = first;
                return Err(SubmitError::Busy);
            }
            self.pump_or_yield();
        }
        Ok(())
    }

    /// Completes a change of a hold before another command changes the amounts that it reports.
    pub(super) fn complete_funding(&mut self, command: &Command) {
        if matches!(
            command,
            Command::Fund(_) | Command::Defund(_) | Command::CloseHold(_)
        ) {
            while self.complete_next() {}
        }
    }
}
