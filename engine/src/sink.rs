//! Where a book's events go: a ring, a journal's comparison, a test's vector.

use types::event::Event;
use types::{Envelope, EventEnvelope, InstrumentIx, Quote};

/// Takes the events of one book, in order.
pub trait EventSink {
    /// The next event. Never refused: who calls `apply` has made room, or buffers.
    fn event(&mut self, event: &EventEnvelope);

    /// The best prices have changed; told once, behind the last event of a command.
    fn quote(&mut self, instrument: InstrumentIx, quote: Quote);
}

/// Numbers the events of one command on their way to the sink.
pub(crate) struct Emitter<'a, S> {
    sink: &'a mut S,
    next: EventEnvelope,
}

impl<'a, S: EventSink> Emitter<'a, S> {
    /// `number` is the number of the last event of this instrument.
    pub fn new(
        sink: &'a mut S,
        envelope: &Envelope,
        instrument: InstrumentIx,
        number: u64,
    ) -> Self {
        Self {
            sink,
            next: EventEnvelope {
                sequence: envelope.sequence,
                time_ns: envelope.time_ns,
                number: number + 1,
                instrument,
                index: 0,
                event: Event::MassCancelled(types::event::MassCancelled { count: 0 }),
            },
        }
    }

    #[inline]
    pub fn emit(&mut self, event: Event) {
        self.next.event = event;
        self.sink.event(&self.next);
        self.next.number += 1;
        self.next.index += 1;
    }

    #[inline]
    pub fn time_ns(&self) -> u64 {
        self.next.time_ns
    }

    /// Events emitted for this command so far.
    pub fn count(&self) -> u32 {
        self.next.index
    }

    pub fn quote(&mut self, quote: Quote) {
        self.sink.quote(self.next.instrument, quote);
    }
}
