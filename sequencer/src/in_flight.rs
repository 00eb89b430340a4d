//! In-flight commands: sequenced, sent to their engines, not yet complete.
//!
//! They leave in sequence, each with all its events, so that the journal's units are in order
//! whatever order the engines answer in.
//!
//! A ring of slots that are filled and read in place. Whenever no command is in flight the first
//! slot is the next one, so that a path without a backlog stays in the cache.

use types::{Envelope, EventEnvelope, Sequence, UserIx};

use crate::port::Reply;

/// Capacity of a list of events: most commands cause fewer.
const EVENTS_ROOM: usize = 16;
/// Capacity of the lists for commands that cause more, and how many such lists are kept.
const MANY_EVENTS_ROOM: usize = 1_024;
const MANY_KEPT: usize = 64;

/// Where the outcome of a command goes.
pub(crate) enum ReplyTo {
    Reply(Reply),
    /// A front with rings of its own.
    Ring {
        port: usize,
        tag: u64,
    },
}

pub(crate) struct InFlight {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
    /// Engines that have not finished.
    waiting: usize,
    /// More than one engine has the command: their events arrive in any order.
    is_mixed: bool,
    pub owed: ReplyTo,
}

impl InFlight {
    /// Takes the events out. A list with more than the usual capacity is copied and stays.
    pub fn take_events(&mut self) -> Vec<EventEnvelope> {
        if self.events.capacity() > EVENTS_ROOM {
            return self.events.drain(..).collect();
        }
        std::mem::replace(&mut self.events, Vec::with_capacity(EVENTS_ROOM))
    }
}

pub(crate) struct InFlights {
    places: Box<[InFlight]>,
    lists: Lists,
    /// Slot of the first command.
    head: usize,
    count: usize,
}

impl InFlights {
    /// Room for `count` commands in flight, a power of two. `nothing` fills unused slots. One
    /// command at a time may cause `events_max` events without an allocation.
    pub fn new(count: usize, nothing: Envelope, events_max: usize) -> Self {
        assert!(count.is_power_of_two());
        let place = |_| InFlight {
            command: nothing,
            // All of them now: the number in flight must not decide whether memory is allocated.
            events: Vec::with_capacity(EVENTS_ROOM),
            waiting: 0,
            is_mixed: false,
            owed: ReplyTo::Reply(Reply::None),
        };
        Self {
            places: (0..count).map(place).collect(),
            lists: Lists::new(events_max),
            head: 0,
            count: 0,
        }
    }

    pub fn room(&self) -> usize {
        self.places.len() - self.count
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Sequence of the first command in flight; `u64::MAX` when there is none.
    pub fn first(&self) -> Sequence {
        if self.count == 0 {
            return Sequence(u64::MAX);
        }
        self.places[self.head].command.sequence
    }

    /// The last command in flight.
    pub fn last(&self) -> Option<&Envelope> {
        let behind = self.count.checked_sub(1)?;
        Some(&self.places[self.place(behind)].command)
    }

    /// Where the next command is built, before it is in flight. Panics without room.
    #[inline]
    pub fn vacant(&mut self) -> &mut Envelope {
        assert!(self.count < self.places.len(), "the caller checks for room");
        let place = self.place(self.count);
        &mut self.places[place].command
    }

    /// The command that was built in [`InFlights::vacant`] is in flight at `engines` engines.
    #[inline]
    pub fn start(&mut self, engines: usize, owed: ReplyTo) {
        let place = self.place(self.count);
        self.count += 1;
        let flight = &mut self.places[place];
        flight.waiting = engines;
        flight.is_mixed = engines > 1;
        flight.owed = owed;
    }

    #[inline]
    pub fn event(&mut self, event: &EventEnvelope) {
        let place = self.place_of(event.sequence);
        let events = &mut self.places[place].events;
        if events.len() == events.capacity() {
            self.lists.widen(events);
        }
        events.push(*event);
    }

    /// The member that issued a command in flight.
    #[cold]
    pub fn member(&self, sequence: Sequence) -> UserIx {
        self.places[self.place_of(sequence)]
            .command
            .command
            .member()
    }

    /// One engine has finished with a command.
    #[inline]
    pub fn done(&mut self, sequence: Sequence) {
        let place = self.place_of(sequence);
        let flight = &mut self.places[place];
        flight.waiting -= 1;
        if flight.waiting == 0 && flight.is_mixed {
            flight
                .events
                .sort_unstable_by_key(|event| (event.instrument, event.index));
        }
    }

    /// The next command in sequence, if it is complete. The caller owes [`InFlights::leave`] for
    /// it.
    #[inline]
    pub fn complete(&mut self) -> Option<&mut InFlight> {
        let flight = &mut self.places[self.head];
        (self.count > 0 && flight.waiting == 0).then_some(flight)
    }

    /// Removes the first command and frees its slot.
    #[inline]
    pub fn leave(&mut self) {
        let events = &mut self.places[self.head].events;
        events.clear();
        if events.capacity() > EVENTS_ROOM {
            self.lists.narrow(events);
        }
        self.count -= 1;
        self.head = if self.count == 0 { 0 } else { self.place(1) };
    }

    #[inline]
    fn place_of(&self, sequence: Sequence) -> usize {
        let first = self.places[self.head].command.sequence.get();
        let behind =
            usize::try_from(sequence.get() - first).expect("commands in flight fit memory");
        assert!(behind < self.count, "only commands in flight are reported");
        self.place(behind)
    }

    #[inline]
    fn place(&self, behind: usize) -> usize {
        (self.head + behind) & (self.places.len() - 1)
    }
}

/// Preallocated longer lists of events, so that a sweep or a mass cancel allocates nothing: some
/// for a thousand events, one for the most that one command can cause. Untouched memory costs
/// address space alone.
struct Lists {
    /// Short lists of slots that have a longer one for now.
    short: Vec<Vec<EventEnvelope>>,
    many: Vec<Vec<EventEnvelope>>,
    /// Capacity `events_max`; `None` while a command uses it.
    longest: Option<Vec<EventEnvelope>>,
    events_max: usize,
}

impl Lists {
    fn new(events_max: usize) -> Self {
        let many = || Vec::with_capacity(MANY_EVENTS_ROOM);
        Self {
            short: Vec::with_capacity(2 * MANY_KEPT),
            many: std::iter::repeat_with(many).take(MANY_KEPT).collect(),
            longest: Some(Vec::with_capacity(events_max)),
            events_max,
        }
    }

    /// Moves a full list into a longer one.
    #[cold]
    #[inline(never)]
    fn widen(&mut self, events: &mut Vec<EventEnvelope>) {
        let room = events.capacity();
        let longer = if room < MANY_EVENTS_ROOM {
            self.many.pop()
        } else {
            self.longest.take_if(|longest| longest.capacity() > room)
        };
        // Allocates only when more such commands are in flight than lists are kept.
        let mut longer =
            longer.unwrap_or_else(|| Vec::with_capacity(MANY_EVENTS_ROOM.max(2 * room)));
        longer.append(events);
        self.keep(std::mem::replace(events, longer));
    }

    /// Puts a short list in place of a long one that is empty, and keeps the long one.
    #[cold]
    #[inline(never)]
    fn narrow(&mut self, events: &mut Vec<EventEnvelope>) {
        let short = self.short.pop();
        let short = short.unwrap_or_else(|| Vec::with_capacity(EVENTS_ROOM));
        self.keep(std::mem::replace(events, short));
    }

    fn keep(&mut self, events: Vec<EventEnvelope>) {
        let room = events.capacity();
        if room < MANY_EVENTS_ROOM {
            if self.short.len() < self.short.capacity() {
                self.short.push(events);
            }
        } else if room >= self.events_max.max(2 * MANY_EVENTS_ROOM) {
            self.longest.get_or_insert(events);
        } else if self.many.len() < MANY_KEPT {
            self.many.push(events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::command::ExpireOrders;
    use types::event::{Cancelled, Event};
    use types::{Command, InstrumentIx};

    fn nothing() -> Envelope {
        Envelope {
            sequence: Sequence::ZERO,
            time_ns: 0,
            received_ns: 0,
            command: Command::ExpireOrders(ExpireOrders {
                instrument: InstrumentIx::NONE,
            }),
        }
    }

    fn play(flights: &mut InFlights, sequence: u64, events: u32) {
        flights.vacant().sequence = Sequence(sequence);
        flights.start(1, ReplyTo::Reply(Reply::None));
        for index in 0..events {
            flights.event(&EventEnvelope {
                sequence: Sequence(sequence),
                time_ns: 0,
                number: 0,
                instrument: InstrumentIx(0),
                index,
                event: Event::Cancelled(Cancelled {
                    handle: types::Handle::NONE,
                    reason: types::CancelReason::MassCancel,
                    quantity: types::Lots(u64::from(index)),
                }),
            });
        }
        flights.done(Sequence(sequence));
    }

    #[test]
    fn event_lists_grow_as_needed_and_are_reused() {
        let mut flights = InFlights::new(4, nothing(), 5_000);
        for round in 0..300u64 {
            let first = 1 + round * 4;
            // Two outgrow all but the longest list at once, of which there is one.
            let sizes = [3_000, 5, 700, 4_000];
            for (at, events) in (0..).zip(sizes) {
                play(&mut flights, first + at, events);
            }
            for events in sizes {
                let flight = flights.complete().expect("complete");
                let taken = flight.take_events();
                assert_eq!(taken.len(), events as usize);
                assert!(taken.iter().zip(0..).all(|(event, at)| event.index == at));
                flights.leave();
            }
            let lists = &flights.lists;
            assert_eq!(lists.many.len(), MANY_KEPT, "round {round}");
            let longest = lists.longest.as_ref().map(Vec::capacity);
            assert!(
                longest.is_some_and(|room| room >= 5_000),
                "round {round}: {longest:?}"
            );
        }
        let mut rooms = flights.places.iter().map(|place| place.events.capacity());
        assert!(rooms.all(|room| room <= EVENTS_ROOM));
    }
}
