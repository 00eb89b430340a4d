//! Commands that end a list of orders: sent only to the engines of those orders, in slices.
//!
//! Other members' requests run between two slices.

use admission::{Request, SliceBound};
use types::command::{CancelSlice, Listed};
use types::{Command, Envelope, EventEnvelope, Sequence, UserIx};

use super::{Hot, Source};
use crate::engine_ring::EngineRing;
use crate::in_flight::ReplyTo;
use crate::port::{Reply, SubmitError};

const SLICE: SliceBound = SliceBound {
    orders: 256,
    inspected: 4_096,
};
const EMPTY: SliceBound = SliceBound { orders: 0, ..SLICE };
/// Mass cancels of one member in progress in slices. The first slice of a further one is empty: it
/// takes its turn like the others.
const SWEEPS_OF_USER: usize = 4;
/// Past this a further one with a filter is `BUSY`: it inspects the orders that its filter leaves.
const FILTERED_SWEEPS_OF_USER_MAX: usize = 32;
/// Past these a further one of a member is `BUSY`: each keeps a row in memory until its turn comes.
const SWEEPS_OF_USER_MAX: usize = 256;
const SWEEPS_MAX: usize = 4_096;

/// A call that is answered after the last slice of its command.
pub(super) struct Sweeping {
    /// Sequence of its command.
    of: Sequence,
    owed: ReplyTo,
    /// Events of the slices so far.
    events: Vec<EventEnvelope>,
}

impl Hot {
    /// Lists the orders that the command being admitted ends, at most one slice of them.
    /// `filtered`: user of a mass cancel that may leave some of the owner's orders. Returns the
    /// user to charge for orders inspected in vain, and their number.
    ///
    /// # Errors
    /// `THROTTLE`, with the wait in microseconds: the user has inspected too many orders in vain.
    /// `BUSY`: too many mass cancels of the user, or of all members, are in progress.
    #[cold]
    pub(super) fn list(
        &mut self,
        filtered: Option<UserIx>,
        now_ns: u64,
    ) -> Result<(UserIx, u64), SubmitError> {
        let refused = filtered.and_then(|user| self.scan_limiter.refuses(user, now_ns));
        if let Some(reject) = refused {
            return Err(SubmitError::Refused(reject));
        }
        let admission = self.core.admission();
        let command = &mut self.flights.vacant().command;
        let user = command.member();
        let under_way = match command {
            Command::MassCancel(_) if !user.is_none() => admission.sweeps_of(user),
            _ => 0,
        };
        let most = match filtered {
            Some(_) => FILTERED_SWEEPS_OF_USER_MAX,
            None => SWEEPS_OF_USER_MAX,
        };
        let bound = match under_way {
            0..SWEEPS_OF_USER => SLICE,
            _ if under_way < most && admission.sweeps() < SWEEPS_MAX => EMPTY,
            _ => return Err(SubmitError::Busy),
        };
        let left = admission.slice(command, bound, &mut self.listed);
        Ok((user, left))
    }

    /// Issues the next slice of a command in progress, one per iteration; true when there was one.
    pub(super) fn sweep_on(&mut self) -> bool {
        let Some((owner, of)) = self.core.admission().next_sweep(self.swept) else {
            return false;
        };
        // Also if there is no room now: the next iteration serves another member.
        self.swept = owner;
        let request = Request::CancelSlice(of);
        let clock_ns = self.config.clock.now_ns();
        match self.admit(Source::Given(&request), clock_ns) {
            Ok(()) => {}
            Err(SubmitError::JournalFailed) => {
                self.give_up_sweeps();
                return false;
            }
            // Without room: retried in the next iteration.
            Err(_) => return false,
        }
        self.launch(ReplyTo::Reply(Reply::None));
        self.pump();
        true
    }

    /// The journal has failed and no last slice will come: answers the calls that wait for one.
    #[cold]
    fn give_up_sweeps(&mut self) {
        for waiting in self.sweeping.drain(..) {
            if let ReplyTo::Reply(reply) = waiting.owed {
                reply.send(Err(SubmitError::JournalFailed));
            }
        }
    }

    /// The answer that is due when the command to be launched completes: a call is answered after
    /// the last slice, a session at the first.
    fn owed_now(&mut self, owed: ReplyTo) -> ReplyTo {
        let place = self.flights.vacant();
        let has_more_slices = place.command.next_slice_after().is_some();
        if let Command::CancelSlice(CancelSlice { of, .. }) = place.command {
            let mut waiting = self.sweeping.iter_mut();
            let waiting = waiting.find(|waiting| waiting.of == of && !has_more_slices);
            let take = |waiting: &mut Sweeping| {
                std::mem::replace(&mut waiting.owed, ReplyTo::Reply(Reply::None))
            };
            return waiting.map_or(owed, take);
        }
        match owed {
            ReplyTo::Reply(Reply::None) | ReplyTo::Ring { .. } => owed,
            ReplyTo::Reply(_) if !has_more_slices => owed,
            ReplyTo::Reply(_) => {
                let (of, events) = (place.sequence, Vec::new());
                self.sweeping.push(Sweeping { of, owed, events });
                ReplyTo::Reply(Reply::None)
            }
        }
    }

    /// The engine_rings of the instruments in the list.
    pub(super) fn listed_rings(&self) -> impl Iterator<Item = &EngineRing> {
        Listed::by_instrument(&self.listed).map(|list| &self.engine_rings[ring_index_of(list)])
    }

    /// As `launch`, for a command that ends a list of orders: each engine also gets its part of it.
    #[cold]
    pub(super) fn launch_listed(&mut self, owed: ReplyTo) {
        let owed = self.owed_now(owed);
        let listed = std::mem::take(&mut self.listed);
        self.start(Listed::by_instrument(&listed).count(), owed);
        for list in Listed::by_instrument(&listed) {
            let at = ring_index_of(list);
            self.push_blocking(at, |engine_ring, last| {
                engine_ring.push_sweep(last, list.len())
            });
            if self.engine_rings[at].is_first() {
                self.busy.push(at);
            }
            for order in list {
                self.push_blocking(at, |engine_ring, _| engine_ring.push_listed(*order));
            }
            self.engine_pool.ring(at);
        }
        self.listed = listed;
    }

    /// Retries until there is a free slot, while the engine works. A list longer than the ring
    /// waits for the engine without a time limit; a panicked engine thread ends the hot thread.
    #[inline]
    pub(super) fn push_blocking(
        &mut self,
        at: usize,
        push: impl Fn(&mut EngineRing, &Envelope) -> bool,
    ) {
        loop {
            let last = self.flights.last().expect("the command is in flight");
            if push(&mut self.engine_rings[at], last) {
                return;
            }
            self.wait_for(at);
        }
    }

    #[cold]
    fn wait_for(&mut self, at: usize) {
        self.engine_pool.ring(at);
        self.pump();
        self.check_engine_pool();
    }
}

/// Keeps the events of a slice for the call that waits for the last one; returns all with the last.
#[inline]
pub(super) fn gather(
    sweeping: &mut Vec<Sweeping>,
    command: &Envelope,
    events: &[EventEnvelope],
) -> Option<Vec<EventEnvelope>> {
    let is_sliced = matches!(
        command.command,
        Command::MassCancel(_) | Command::SetKillSwitch(_) | Command::CancelSlice(_)
    );
    match is_sliced && !sweeping.is_empty() {
        true => gather_slice(sweeping, command, events),
        false => None,
    }
}

#[cold]
fn gather_slice(
    sweeping: &mut Vec<Sweeping>,
    command: &Envelope,
    events: &[EventEnvelope],
) -> Option<Vec<EventEnvelope>> {
    let of = match &command.command {
        Command::CancelSlice(c) => c.of,
        _ => command.sequence,
    };
    let at = sweeping.iter().position(|waiting| waiting.of == of)?;
    sweeping[at].events.extend_from_slice(events);
    let is_last = command.command.next_slice_after().is_none();
    is_last.then(|| sweeping.swap_remove(at).events)
}

/// The engine_ring of one instrument's part of the list.
fn ring_index_of(list: &[Listed]) -> usize {
    list[0].instrument.index()
}
