//! Commands under way: sequenced, given to their engines, not yet complete. They leave in sequence, each with all its events, so that the
//! journal's units stand in order whatever order the engines answer in.

use std::collections::VecDeque;

use types::{Envelope, EventEnvelope, Sequence};

use crate::port::Reply;
use crate::record::Record;

struct Flight {
    record: Record,
    /// Engines that have not finished.
    waiting: usize,
    /// Asked more than one engine: the events come in any order of instruments.
    is_mixed: bool,
    reply: Reply,
}

#[derive(Default)]
pub(crate) struct Flights(VecDeque<Flight>);

impl Flights {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A command on its way to `engines` engines.
    pub fn start(&mut self, command: Envelope, engines: usize, reply: Reply) {
        self.0.push_back(Flight {
            record: Record {
                command,
                events: Vec::new(),
            },
            waiting: engines,
            is_mixed: engines > 1,
            reply,
        });
    }

    pub fn event(&mut self, event: &EventEnvelope) {
        self.at(event.sequence).record.events.push(*event);
    }

    /// One engine has finished with a command.
    pub fn done(&mut self, sequence: Sequence) {
        let flight = self.at(sequence);
        flight.waiting -= 1;
        if flight.waiting == 0 && flight.is_mixed {
            flight
                .record
                .events
                .sort_unstable_by_key(|event| (event.instrument, event.index));
        }
    }

    /// The next command in sequence, when it is complete.
    pub fn land(&mut self) -> Option<(Record, Reply)> {
        if self.0.front()?.waiting > 0 {
            return None;
        }
        self.0
            .pop_front()
            .map(|flight| (flight.record, flight.reply))
    }

    fn at(&mut self, sequence: Sequence) -> &mut Flight {
        let first = self
            .0
            .front()
            .map_or(0, |flight| flight.record.command.sequence.get());
        let at = usize::try_from(sequence.get() - first).expect("commands under way fit memory");
        &mut self.0[at]
    }
}
