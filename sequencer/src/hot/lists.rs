//! Commands that end a list of orders: applied only to the books of those orders, in slices.
//!
//! Other members' requests run between two slices.

use admission::{Reject, Request, SliceBound};
use types::command::{CancelSlice, Listed, SweepPosition};
use types::{Command, Envelope, EventEnvelope, Sequence, UserIx};

use super::{Hot, Source, not_admitted};
use crate::engine_ring::EngineRing;
use crate::in_flight::ReplyTo;
use crate::port::{Reply, SubmitError};

const SLICE: SliceBound = SliceBound {
    orders: 256,
    inspected: 4_096,
};
const EMPTY: SliceBound = SliceBound { orders: 0, ..SLICE };
/// Sweeps of one member that may be in progress. The first slice of a further one is empty, and its
/// next slices are scheduled as those of the others.
const SWEEPS_OF_USER: usize = 4;
/// Limit for sweeps with a filter, which inspect also the orders that they leave: more are `BUSY`.
const FILTERED_SWEEPS_OF_USER_MAX: usize = 32;
/// Limit of sweeps per member, each of which has a row in memory: more are `BUSY`.
const SWEEPS_OF_USER_MAX: usize = 256;
/// Limit of sweeps of all members.
const SWEEPS_MAX: usize = 4_096;

/// A call that is answered after the last slice of its command.
pub(super) struct Sweeping {
    /// Sequence of the command.
    of: Sequence,
    reply_to: ReplyTo,
    /// Events of the slices so far.
    events: Vec<EventEnvelope>,
}

impl Hot {
    /// Lists the orders that the command being admitted ends, at most one slice of them.
    ///
    /// `filtered` is the user of a mass cancel that may leave some of the owner's orders. `useless`
    /// is why the command must end an order at once. What is inspected in vain is charged even if
    /// the command does not run.
    ///
    /// # Errors
    /// `THROTTLE`, with the wait in microseconds: the user has inspected too many orders in vain.
    /// `BUSY`: too many mass cancels of the user, or of all members, are in progress. `useless`:
    /// this one ends no order at once.
    #[cold]
    pub(super) fn list(
        &mut self,
        filtered: Option<UserIx>,
        now_ns: u64,
        useless: Option<Reject>,
    ) -> Result<(), SubmitError> {
        let refused = filtered.and_then(|user| self.scan_limiter.refuses(user, now_ns));
        if let Some(reject) = refused {
            return Err(SubmitError::Refused(reject));
        }
        let admission = self.core.admission();
        let command = &mut self.in_flight.vacant().command;
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
        // With a filter the orders that are left may all be of others.
        let may_end_later = filtered.is_none()
            && matches!(command, Command::MassCancel(c) if c.through != SweepPosition::END);
        self.scan_limiter.charge(user, now_ns, left);
        match useless {
            Some(reject) if self.listed.is_empty() && !may_end_later => Err(not_admitted(reject)),
            _ => Ok(()),
        }
    }

    /// Issues the next slice of a command in progress, one per iteration; true when there was one.
    pub(super) fn sweep_on(&mut self) -> bool {
        let Some((owner, of)) = self.core.admission().next_sweep(self.swept) else {
            return false;
        };
        // Set also if there is no room now, so that the next iteration serves another member.
        self.swept = owner;
        let request = Request::CancelSlice(of);
        let clock_ns = self.config.clock.now_ns();
        match self.admit(Source::Given(&request), clock_ns) {
            Ok(()) => {}
            Err(SubmitError::JournalFailed) => {
                self.fail_sweeps();
                return false;
            }
            // Without room: retried in the next iteration.
            Err(_) => return false,
        }
        self.launch(ReplyTo::Reply(Reply::None));
        self.pump();
        true
    }

    /// Answers the calls that wait for a last slice, after the journal has failed.
    #[cold]
    fn fail_sweeps(&mut self) {
        for waiting in self.sweeping.drain(..) {
            if let ReplyTo::Reply(reply) = waiting.reply_to {
                reply.send(Err(SubmitError::JournalFailed));
            }
        }
    }

    /// Where the outcome of the command to be launched goes when it completes.
    ///
    /// A call is answered after the last slice, a session after the first.
    fn reply_now(&mut self, reply_to: ReplyTo) -> ReplyTo {
        let place = self.in_flight.vacant();
        let has_more_slices = place.command.next_slice_after().is_some();
        if let Command::CancelSlice(CancelSlice { of, .. }) = place.command {
            let mut waiting = self.sweeping.iter_mut();
            let waiting = waiting.find(|waiting| waiting.of == of && !has_more_slices);
            let take = |waiting: &mut Sweeping| {
                std::mem::replace(&mut waiting.reply_to, ReplyTo::Reply(Reply::None))
            };
            return waiting.map_or(reply_to, take);
        }
        match reply_to {
            ReplyTo::Reply(Reply::None) | ReplyTo::Ring { .. } => reply_to,
            ReplyTo::Reply(_) if !has_more_slices => reply_to,
            ReplyTo::Reply(_) => {
                let (of, events) = (place.sequence, Vec::new());
                self.sweeping.push(Sweeping {
                    of,
                    reply_to,
                    events,
                });
                ReplyTo::Reply(Reply::None)
            }
        }
    }

    /// The engine rings of the instruments in the list.
    pub(super) fn listed_rings(&self) -> impl Iterator<Item = &EngineRing> {
        Listed::by_instrument(&self.listed).map(|list| &self.engine_rings[book_index_of(list)])
    }

    /// As [`Hot::launch`], for a command that ends a list of orders. Each book gets its orders.
    #[cold]
    pub(super) fn launch_listed(&mut self, reply_to: ReplyTo) {
        let reply_to = self.reply_now(reply_to);
        let listed = std::mem::take(&mut self.listed);
        let member = self.in_flight.vacant().command.member();
        self.start(Listed::by_instrument(&listed).count(), member, reply_to);
        for list in Listed::by_instrument(&listed) {
            let at = book_index_of(list);
            if self.is_fused {
                self.match_last(at, Some(list));
                continue;
            }
            self.push_blocking(at, |engine_ring, last| {
                engine_ring.push_sweep(last, list.len())
            });
            if self.engine_rings[at].is_first() {
                self.busy.push(at);
            }
            for order in list {
                self.push_blocking(at, |engine_ring, _| engine_ring.push_listed(*order));
            }
            self.engine_pool.unpark(at);
        }
        self.listed = listed;
    }

    /// Retries until there is a free slot.
    ///
    /// A list longer than the ring waits for the engine without a time limit. A panic of an engine
    /// thread ends the hot thread.
    #[inline]
    pub(super) fn push_blocking(
        &mut self,
        at: usize,
        push: impl Fn(&mut EngineRing, &Envelope) -> bool,
    ) {
        loop {
            let last = self.in_flight.last().expect("the command is in flight");
            if push(&mut self.engine_rings[at], last) {
                return;
            }
            self.wait_for(at);
        }
    }

    #[cold]
    fn wait_for(&mut self, at: usize) {
        self.engine_pool.unpark(at);
        self.pump_or_yield();
        self.check_engine_pool();
    }
}

/// Adds the events of a slice to the call that waits. Returns all events at the last slice.
#[inline]
pub(super) fn gather(
    sweeping: &mut Vec<Sweeping>,
    command: &Envelope,
    events: &[EventEnvelope],
) -> Option<Vec<EventEnvelope>> {
    match sweeping.is_empty() {
        true => None,
        false => gather_slice(sweeping, command, events),
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
        Command::MassCancel(_) | Command::SetKillSwitch(_) => command.sequence,
        _ => return None,
    };
    let at = sweeping.iter().position(|waiting| waiting.of == of)?;
    sweeping[at].events.extend_from_slice(events);
    let is_last = command.command.next_slice_after().is_none();
    is_last.then(|| sweeping.swap_remove(at).events)
}

/// Index of the book, and of its engine's ring, for one instrument's orders of the list.
fn book_index_of(list: &[Listed]) -> usize {
    list[0].instrument.index()
}
