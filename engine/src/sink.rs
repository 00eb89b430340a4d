//! Where a book's events go: a ring, a journal's comparison, a test's vector.

use types::event::Event;
use types::{Envelope, EventEnvelope, InstrumentIx, Quote};

/// Takes the events of one book, in order.
pub trait EventSink {
    /// The next event. Never refused: who calls `apply` has made room, or buffers.
    ///
    /// Implementations that copy it straight to its place should be `#[inline]`: the event is then written
    /// there field by field.
    fn event(&mut self, event: &EventEnvelope);

    /// The best prices have changed; told once, behind the last event of a command.
    fn quote(&mut self, instrument: InstrumentIx, quote: Quote);
}

/// Numbers the events of one command on their way to the sink.
pub(crate) struct Emitter<'a, S> {
    sink: &'a mut S,
    /// Read again for each event: its sequence and time are kept in no register in between.
    envelope: &'a Envelope,
    instrument: InstrumentIx,
    /// Number of the last event before this command.
    before: u64,
    count: u32,
}

impl<'a, S: EventSink> Emitter<'a, S> {
    /// `number` is the number of the last event of this instrument.
    #[inline(always)]
    pub fn new(
        sink: &'a mut S,
        envelope: &'a Envelope,
        instrument: InstrumentIx,
        number: u64,
    ) -> Self {
        Self {
            sink,
            envelope,
            instrument,
            before: number,
            count: 0,
        }
    }

    #[inline(always)]
    pub fn emit(&mut self, event: Event) {
        let index = self.count;
        // Neither wraps: a command has less events than there are slots, an instrument less than 2^64.
        self.count = index.wrapping_add(1);
        self.sink.event(&EventEnvelope {
            sequence: self.envelope.sequence,
            time_ns: self.envelope.time_ns,
            number: self.before.wrapping_add(u64::from(self.count)),
            instrument: self.instrument,
            index,
            event,
        });
    }

    #[inline(always)]
    pub fn time_ns(&self) -> u64 {
        self.envelope.time_ns
    }

    /// Events emitted for this command so far.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.count
    }
}
