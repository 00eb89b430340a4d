//! Admission and books as one machine: sequenced commands in, events out. No clock, no disk, no thread: the same commands give the same state
//! and the same events wherever they run (R180).

use admission::{Admission, AdmissionConfig};
use engine::{Book, EventSink};
use types::command::Route;
use types::{Command, Envelope, EventEnvelope, InstrumentIx, Quote, Sequence, StateHash};

use crate::lane::Lane;

/// The state of an engine node.
pub struct Core {
    admission: Admission,
    /// By instrument index.
    lanes: Vec<Lane>,
    outbox: Outbox,
    ring_capacity: usize,
    sequence: Sequence,
    time_ns: u64,
    trades: u64,
}

/// What the engines said during one command.
#[derive(Default)]
struct Outbox {
    events: Vec<EventEnvelope>,
    quotes: Vec<(InstrumentIx, Quote)>,
}

impl EventSink for Outbox {
    fn event(&mut self, event: &EventEnvelope) {
        self.events.push(*event);
    }

    fn quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        self.quotes.push((instrument, quote));
    }
}

impl Core {
    pub fn new(config: AdmissionConfig, ring_capacity: usize) -> Self {
        Self {
            admission: Admission::new(config),
            lanes: Vec::new(),
            outbox: Outbox::default(),
            ring_capacity,
            sequence: Sequence(0),
            time_ns: 0,
            trades: 0,
        }
    }

    /// How far settlement is behind; a cache of admission's checks, no part of the state.
    pub fn set_backlog(&mut self, trades: u64, bytes: u64) {
        self.admission.set_backlog(trades, bytes);
    }

    /// Carries out a sequenced command and gives its events, in order.
    pub fn apply(&mut self, envelope: &Envelope) -> &[EventEnvelope] {
        assert_eq!(
            envelope.sequence,
            self.sequence.next(),
            "commands are gapless"
        );
        assert!(
            envelope.time_ns >= self.time_ns,
            "journalled time only grows"
        );
        self.sequence = envelope.sequence;
        self.time_ns = envelope.time_ns;
        self.outbox.events.clear();
        self.outbox.quotes.clear();

        self.admission.apply_command(envelope);
        match envelope.command.route() {
            Route::Admission => {}
            Route::Instrument(instrument) => {
                self.open_lane(&envelope.command);
                self.run(instrument.index(), envelope);
            }
            Route::AllInstruments => (0..self.lanes.len()).for_each(|at| self.run(at, envelope)),
        }
        for event in &self.outbox.events {
            if matches!(event.event, types::Event::Trade(_)) {
                self.trades += 1;
            }
            self.admission.apply_event(event);
        }
        for (instrument, quote) in &self.outbox.quotes {
            self.admission.set_quote(*instrument, *quote);
        }
        &self.outbox.events
    }

    /// The first word about an instrument makes its book.
    fn open_lane(&mut self, command: &Command) {
        if let Command::SetInstrument(set) = command
            && set.spec.ix.index() == self.lanes.len()
        {
            self.lanes.push(Lane::new(set.spec, self.ring_capacity));
        }
    }

    fn run(&mut self, at: usize, envelope: &Envelope) {
        let lane = &mut self.lanes[at];
        while !lane.push(envelope) {
            // Cannot happen while this thread also drains; kept right for layouts in which it does not.
            lane.drain(&mut self.outbox);
        }
        lane.drain(&mut self.outbox);
    }

    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    pub fn book(&self, instrument: InstrumentIx) -> Option<&Book> {
        self.lanes.get(instrument.index()).map(Lane::book)
    }

    pub fn books(&self) -> impl Iterator<Item = &Book> {
        self.lanes.iter().map(Lane::book)
    }

    pub fn instruments(&self) -> impl Iterator<Item = InstrumentIx> + '_ {
        self.lanes.iter().map(Lane::instrument)
    }

    /// Last command applied.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// Time of the last command.
    pub fn time_ns(&self) -> u64 {
        self.time_ns
    }

    /// Trades since the beginning of the journal.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    /// One number for everything that the journal determines.
    pub fn state_hash(&self) -> u64 {
        let mut hash = StateHash::new();
        hash.word(self.sequence.get());
        hash.word(self.admission.state_hash());
        for lane in &self.lanes {
            hash.word(lane.book().state_hash());
        }
        hash.finish()
    }

    /// Earliest good-till-date of any resting order.
    pub fn next_expiry_ns(&self) -> Option<u64> {
        self.books().filter_map(Book::next_expiry_ns).min()
    }
}
