//! Commands under way: sequenced, given to their engines, not yet complete. They leave in sequence, each with all its events, so that the
//! journal's units stand in order whatever order the engines answer in.
//!
//! A ring of places that are filled and read where they lie: nothing of a flight is moved. Whenever none is under way the first place is the next one, so
//! that a path without a backlog stays in the cache.

use types::{Envelope, EventEnvelope, Sequence};

use crate::port::Reply;

/// A list of events longer than this is given back to the allocator.
const EVENTS_KEPT_MAX: usize = 1_024;
/// Room of a new list: most commands cause fewer events.
const EVENTS_ROOM: usize = 16;

/// Who is told of a command.
pub(crate) enum Owed {
    Reply(Reply),
    /// A front with rings of its own.
    Ring {
        port: usize,
        tag: u64,
    },
}

pub(crate) struct Flight {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
    /// Engines that have not finished.
    waiting: usize,
    /// Asked more than one engine: the events come in any order of instruments.
    is_mixed: bool,
    pub owed: Owed,
}

impl Flight {
    /// The events, to be kept elsewhere.
    pub fn take_events(&mut self) -> Vec<EventEnvelope> {
        std::mem::replace(&mut self.events, Vec::with_capacity(EVENTS_ROOM))
    }
}

pub(crate) struct Flights {
    places: Box<[Flight]>,
    /// Place of the first.
    head: usize,
    count: usize,
}

impl Flights {
    /// Room for `count` commands under way, a power of two. `nothing` fills what has not been used.
    pub fn new(count: usize, nothing: Envelope) -> Self {
        assert!(count.is_power_of_two());
        let place = |_| Flight {
            command: nothing,
            // All of them at once: how many are under way must not decide whether memory is asked for.
            events: Vec::with_capacity(EVENTS_ROOM),
            waiting: 0,
            is_mixed: false,
            owed: Owed::Reply(Reply::None),
        };
        Self {
            places: (0..count).map(place).collect(),
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

    /// The first command under way; behind all that ever were when none is.
    pub fn first(&self) -> Sequence {
        if self.count == 0 {
            return Sequence(u64::MAX);
        }
        self.places[self.head].command.sequence
    }

    /// The last command under way.
    pub fn last(&self) -> Option<&Envelope> {
        let behind = self.count.checked_sub(1)?;
        Some(&self.places[self.place(behind)].command)
    }

    /// Where the next command is made, before it is under way. Panics without room.
    #[inline]
    pub fn vacant(&mut self) -> &mut Envelope {
        assert!(self.count < self.places.len(), "room was looked at before");
        let place = self.place(self.count);
        &mut self.places[place].command
    }

    /// The command that was made in [`Flights::vacant`] is on its way to `engines` engines.
    #[inline]
    pub fn start(&mut self, engines: usize, owed: Owed) {
        let place = self.place(self.count);
        self.count += 1;
        let flight = &mut self.places[place];
        flight.waiting = engines;
        flight.is_mixed = engines > 1;
        flight.owed = owed;
    }

    #[inline]
    pub fn event(&mut self, event: &EventEnvelope) {
        self.at(event.sequence).events.push(*event);
    }

    /// One engine has finished with a command.
    #[inline]
    pub fn done(&mut self, sequence: Sequence) {
        let flight = self.at(sequence);
        flight.waiting -= 1;
        if flight.waiting == 0 && flight.is_mixed {
            flight
                .events
                .sort_unstable_by_key(|event| (event.instrument, event.index));
        }
    }

    /// The next command in sequence, when it is complete; [`Flights::leave`] is owed for it.
    #[inline]
    pub fn complete(&mut self) -> Option<&mut Flight> {
        let flight = &mut self.places[self.head];
        (self.count > 0 && flight.waiting == 0).then_some(flight)
    }

    /// The first command is dealt with; its place is free.
    #[inline]
    pub fn leave(&mut self) {
        let events = &mut self.places[self.head].events;
        if events.capacity() > EVENTS_KEPT_MAX {
            *events = Vec::with_capacity(EVENTS_ROOM);
        }
        events.clear();
        self.count -= 1;
        self.head = if self.count == 0 { 0 } else { self.place(1) };
    }

    #[inline]
    fn at(&mut self, sequence: Sequence) -> &mut Flight {
        let first = self.places[self.head].command.sequence.get();
        let behind =
            usize::try_from(sequence.get() - first).expect("commands under way fit memory");
        assert!(behind < self.count, "only commands under way are reported");
        let place = self.place(behind);
        &mut self.places[place]
    }

    #[inline]
    fn place(&self, behind: usize) -> usize {
        (self.head + behind) & (self.places.len() - 1)
    }
}
