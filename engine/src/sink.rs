//! Event output of a book: a ring, the journal comparison of a replay, or a test's vector.

use types::event::Event;
use types::{Envelope, EventEnvelope, InstrumentIx, Quote};

/// Receives the events of one book, in order.
pub trait EventSink {
    /// Receives the next event. Cannot refuse it: the caller of `apply` reserves space or buffers.
    ///
    /// Implementations that copy the event straight to its destination should be `#[inline]`: the
    /// event is then written there field by field.
    fn event(&mut self, event: &EventEnvelope);

    /// Called once after the last event of a command that changed the best prices.
    fn quote(&mut self, instrument: InstrumentIx, quote: Quote);
}

/// Numbers the events of one command and passes them to the sink.
pub(crate) struct Emitter<'a, S> {
    sink: &'a mut S,
    /// Read again for each event, so that no register holds its sequence and time in between.
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
        // Neither wraps: a command has fewer events than slots, an instrument fewer than 2^64.
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
