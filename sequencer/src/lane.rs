//! The ring in front of one engine. Who polls it decides the layout: here the hot thread polls every ring in turn (`fused`).

use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use engine::{Book, BookConfig, EventSink};
use types::command::SetInstrument;
use types::{Command, Envelope, InstrumentIx, InstrumentSpec, Sequence};

/// One instrument: ring and book.
pub(crate) struct Lane {
    producer: SingleProducer<Envelope, SingleConsumerBarrier>,
    poller: EventPoller<Envelope, SingleProducerBarrier>,
    book: Book,
}

impl Lane {
    pub fn new(spec: InstrumentSpec, ring_capacity: usize) -> Self {
        let empty = move || Envelope {
            sequence: Sequence(0),
            time_ns: 0,
            command: Command::SetInstrument(SetInstrument { spec }),
        };
        let (poller, builder) =
            build_single_producer(ring_capacity, empty, BusySpin).new_event_poller();
        Self {
            producer: builder.build(),
            poller,
            book: Book::new(spec, BookConfig::default()),
        }
    }

    pub fn book(&self) -> &Book {
        &self.book
    }

    pub fn instrument(&self) -> InstrumentIx {
        self.book.spec().ix
    }

    /// Puts a command into the ring; false when it is full.
    #[must_use]
    pub fn push(&mut self, envelope: &Envelope) -> bool {
        self.producer.try_publish(|slot| *slot = *envelope).is_ok()
    }

    /// Takes what is in the ring through the book.
    pub fn drain(&mut self, sink: &mut impl EventSink) {
        loop {
            match self.poller.poll() {
                Ok(mut envelopes) => {
                    for envelope in &mut envelopes {
                        self.book.apply(envelope, sink);
                    }
                }
                Err(Polling::NoEvents | Polling::Shutdown) => return,
            }
        }
    }
}
