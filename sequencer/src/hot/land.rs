//! What comes back: events and best prices out of the rings, and commands that are complete. Who asked hears first; state and journal follow.

use std::sync::atomic::Ordering;

use super::Hot;
use crate::flight::Owed;
use crate::lane::Report;
use crate::port::Reply;
use crate::record::Record;

impl Hot {
    /// Lets the hot thread's own engines work, takes all reports, lets complete commands land. True when there was anything.
    pub(super) fn pump(&mut self) -> bool {
        let mut did_work = false;
        let mut is_expiry_new = false;
        let mut at = 0;
        while at < self.busy.len() {
            let place = self.busy[at];
            did_work |= self.crew.step(place);
            let (core, flights) = (&mut self.core, &mut self.flights);
            let lane = &mut self.lanes[place];
            let expiry_ns = lane.next_expiry_ns;
            did_work |= lane.drain(|report| match report {
                // Folded when its command lands.
                Report::Event(event) => flights.event(event),
                Report::Quote(instrument, quote) => core.quote(*instrument, *quote),
                Report::Done { sequence, .. } => flights.done(*sequence),
                Report::Nothing => {}
            });
            is_expiry_new |= expiry_ns != lane.next_expiry_ns;
            if lane.is_idle() {
                self.busy.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if is_expiry_new {
            self.find_next_expiry();
        }
        while self.land() {
            did_work = true;
        }
        if !did_work && !self.flights.is_empty() {
            self.check_crew();
        }
        did_work
    }

    /// If the next command is complete, it goes to who asked, *accepted*, then into admission's state and the journal's buffer: whoever polls has
    /// the answer while the rest is done. Nothing is taken in between, so nobody can ask about a state without it.
    fn land(&mut self) -> bool {
        let is_last = self.flights.len() == 1;
        let Some(flight) = self.flights.complete() else {
            return false;
        };
        let command = &flight.command;
        self.tally.events += flight.events.len() as u64;
        if let Owed::Ring { port, tag } = flight.owed {
            self.rings[port].taken(tag, command, &flight.events);
        }
        if is_last && std::mem::take(&mut self.is_last_owed) {
            let book = self.core.begin(command);
            assert!(book.is_none(), "an order makes no book");
        }
        for event in &flight.events {
            self.core.event(event);
        }
        self.keep.append(command, &flight.events);
        let owed = std::mem::replace(&mut flight.owed, Owed::Reply(Reply::None));
        if let Owed::Reply(reply) = owed
            && !matches!(reply, Reply::None)
        {
            // Who is answered may read at once: what is read then is not older than the answer.
            let sequence = &self.stats.sequence;
            sequence.store(self.core.sequence().get(), Ordering::Release);
            let command = flight.command;
            let events = flight.take_events();
            reply.send(Ok(Record { command, events }));
        }
        self.flights.leave();
        true
    }

    /// Takes the last command into admission's state, if that is still owed.
    #[inline]
    pub(super) fn begin_last(&mut self) {
        if std::mem::take(&mut self.is_last_owed) {
            let last = self.flights.last().expect("what is owed is under way");
            let book = self.core.begin(last);
            assert!(book.is_none(), "an order makes no book");
        }
    }
}
