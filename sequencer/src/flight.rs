//! Commands under way: sequenced, given to their engines, not yet complete. They leave in sequence, each with all its events, so that the
//! journal's units stand in order whatever order the engines answer in.

use std::collections::VecDeque;

use types::{Envelope, EventEnvelope, Sequence};

use crate::port::Reply;

/// Lists of events kept for reuse; longer ones than this are given back to the allocator.
const SPARE_EVENTS_MAX: usize = 1_024;
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

pub(crate) struct Flights {
    queue: VecDeque<Flight>,
    /// Empty lists that had a flight before.
    spare: Vec<Vec<EventEnvelope>>,
}

impl Flights {
    /// Room for `count` commands under way.
    pub fn new(count: usize) -> Self {
        Self {
            queue: VecDeque::with_capacity(count),
            // All of them at once: how many are under way must not decide whether memory is asked for.
            spare: (0..count)
                .map(|_| Vec::with_capacity(EVENTS_ROOM))
                .collect(),
        }
    }

    pub fn len(&self) -> usize {
        self.queue.len()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The first command under way; behind all that ever were when none is.
    pub fn first(&self) -> Sequence {
        self.queue
            .front()
            .map_or(Sequence(u64::MAX), |flight| flight.command.sequence)
    }

    /// A command on its way to `engines` engines.
    pub fn start(&mut self, command: &Envelope, engines: usize, owed: Owed) {
        let events = self.spare.pop();
        self.queue.push_back(Flight {
            command: *command,
            events: events.unwrap_or_else(|| Vec::with_capacity(EVENTS_ROOM)),
            waiting: engines,
            is_mixed: engines > 1,
            owed,
        });
    }

    pub fn event(&mut self, event: &EventEnvelope) {
        self.at(event.sequence).events.push(*event);
    }

    /// One engine has finished with a command.
    pub fn done(&mut self, sequence: Sequence) {
        let flight = self.at(sequence);
        flight.waiting -= 1;
        if flight.waiting == 0 && flight.is_mixed {
            flight
                .events
                .sort_unstable_by_key(|event| (event.instrument, event.index));
        }
    }

    /// The next command in sequence, when it is complete.
    pub fn land(&mut self) -> Option<Flight> {
        if self.queue.front()?.waiting > 0 {
            return None;
        }
        self.queue.pop_front()
    }

    /// Keeps a list of events for a later flight.
    pub fn reuse(&mut self, mut events: Vec<EventEnvelope>) {
        if events.capacity() <= SPARE_EVENTS_MAX && self.spare.len() < self.spare.capacity() {
            events.clear();
            self.spare.push(events);
        }
    }

    fn at(&mut self, sequence: Sequence) -> &mut Flight {
        let first = self
            .queue
            .front()
            .map_or(0, |flight| flight.command.sequence.get());
        let at = usize::try_from(sequence.get() - first).expect("commands under way fit memory");
        &mut self.queue[at]
    }
}
