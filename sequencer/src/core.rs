//! Admission and books as one state machine: sequenced commands in, events out.
//!
//! It has no clock, disk or thread: the same commands produce the same state and the same events
//! everywhere (R180).
//!
//! Recovery and replay call [`Core::apply`]. The hot thread applies the parts of a command one by
//! one: its book first, admission when the command completes or before the next request. With
//! engine threads it lends the books to its engines and applies their reports. The result does not
//! depend on the interleaving of reports of different instruments, so all paths end in the same
//! state.

use std::sync::Arc;

use admission::{Admission, AdmissionConfig, Effects, Report, ReportSink};
use engine::{Book, BookConfig, EventSink, WindowSource};
use types::command::{Cause, Listed, Route};
use types::{
    Command, Envelope, Event, EventEnvelope, InstrumentIx, Quote, RejectReason, Sequence,
    StateHasher,
};

/// The state of an engine node.
pub struct Core {
    admission: Admission,
    /// By instrument index. `None` while an engine has the book. An inspection sees all of them.
    books: Vec<Option<Box<Book>>>,
    /// Wider price windows for the books; without it they map memory themselves.
    windows: Option<Arc<dyn WindowSource>>,
    outbox: Outbox,
    trades: u64,
}

/// Observer of a command, its events and the numbered messages that they cause.
///
/// Called right after the command and after each event is applied to admission.
pub trait CoreObserver: ReportSink {
    fn on_command(&mut self, envelope: &Envelope, admission: &Admission);

    fn on_event(&mut self, event: &EventEnvelope, effects: &Effects, admission: &Admission);
}

/// Type of an absent observer.
enum NoSink {}

impl ReportSink for NoSink {
    fn report(&mut self, _: &Report) {}
}

impl CoreObserver for NoSink {
    fn on_command(&mut self, _: &Envelope, _: &Admission) {}

    fn on_event(&mut self, _: &EventEnvelope, _: &Effects, _: &Admission) {}
}

/// Events and quotes of the books during one command.
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

/// Outcome of [`Core::match_command`], apart from its events.
pub(crate) struct Matched {
    /// Earliest expiry in the book before and after.
    pub expiry_before_ns: Option<u64>,
    pub expiry_ns: Option<u64>,
    /// See [`Book::take_fok_visits`].
    pub fok_visits: u32,
}

/// Sink of [`Core::match_command`].
struct Matching<'a, F> {
    each: F,
    admission: &'a mut Admission,
}

impl<F: FnMut(&EventEnvelope)> EventSink for Matching<'_, F> {
    #[inline]
    fn event(&mut self, event: &EventEnvelope) {
        (self.each)(event);
    }

    #[inline]
    fn quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        self.admission.set_quote(instrument, quote);
    }
}

/// Capacity of each book for all orders that admission allows, so that no book reallocates while it
/// trades. Untouched memory costs only address space.
pub(crate) fn book_config(orders_max: u32) -> BookConfig {
    BookConfig {
        orders: orders_max,
        ..BookConfig::default()
    }
}

impl Core {
    pub fn new(config: AdmissionConfig) -> Self {
        Self {
            admission: Admission::new(config),
            books: Vec::new(),
            windows: None,
            outbox: Outbox::default(),
            trades: 0,
        }
    }

    /// A core of restored parts, all at one sequence. Best prices come from the books.
    pub(crate) fn from_parts(admission: Admission, books: Vec<Book>, trades: u64) -> Self {
        let mut core = Self {
            admission,
            books: Vec::new(),
            windows: None,
            outbox: Outbox::default(),
            trades,
        };
        for book in books {
            core.admission.set_quote(book.spec().ix, book.quote());
            core.books.push(Some(Box::new(book)));
        }
        core
    }

    /// Sets the source of wider price windows for all books, present and future.
    pub(crate) fn set_window_source(&mut self, windows: &Arc<dyn WindowSource>) {
        for book in self.books.iter_mut().flatten() {
            book.set_window_source(windows.clone());
        }
        self.windows = Some(windows.clone());
    }

    /// Releases unused memory of one book, of which an idle thread takes the next one each time.
    pub fn release_unused(&mut self, turn: usize) {
        let count = self.books.len().max(1);
        if let Some(Some(book)) = self.books.get_mut(turn % count) {
            book.release_unused();
        }
    }

    /// Sets the reason for refusing new orders at the moment; `None` accepts them.
    ///
    /// It is an input of admission's checks, not part of the state.
    pub fn refuse_orders(&mut self, reason: Option<RejectReason>) {
        self.admission.refuse_orders(reason);
    }

    /// Applies a sequenced command. Returns its events, ordered by instrument.
    pub fn apply(&mut self, envelope: &Envelope) -> &[EventEnvelope] {
        self.run(envelope, None::<&mut NoSink>)
    }

    /// As [`Core::apply`], with an observer.
    pub fn apply_observed(
        &mut self,
        envelope: &Envelope,
        observer: &mut impl CoreObserver,
    ) -> &[EventEnvelope] {
        self.run(envelope, Some(observer))
    }

    #[inline]
    fn run(
        &mut self,
        envelope: &Envelope,
        mut observer: Option<&mut impl CoreObserver>,
    ) -> &[EventEnvelope] {
        self.outbox.events.clear();
        self.outbox.quotes.clear();
        // Before admission applies the command: the list depends on where the last slice ended.
        let listed = match envelope.command.route() {
            Route::Listed => self.listed(&envelope.command),
            _ => Vec::new(),
        };
        let cause = Cause::of(envelope);
        if let Some(book) = self.begin(envelope, &cause) {
            self.books.push(Some(book));
        }
        match &mut observer {
            None => self.report(&cause, &envelope.command, &mut ()),
            Some(observer) => {
                observer.on_command(envelope, &self.admission);
                self.report(&cause, &envelope.command, *observer);
            }
        }
        self.apply_to_books(envelope, &listed);
        let outbox = std::mem::take(&mut self.outbox);
        for event in &outbox.events {
            match &mut observer {
                None => self.event(event, &cause, &mut ()),
                Some(observer) => {
                    self.trades += u64::from(matches!(event.event, Event::Trade(_)));
                    let effects = self.admission.apply_event(event, &cause, *observer);
                    observer.on_event(event, &effects, &self.admission);
                }
            }
        }
        let events = outbox.events.len();
        match observer {
            None => self.end(&cause, &envelope.command, events, &mut ()),
            Some(observer) => self.end(&cause, &envelope.command, events, observer),
        }
        for (instrument, quote) in &outbox.quotes {
            self.quote(*instrument, *quote);
        }
        self.outbox = outbox;
        &self.outbox.events
    }

    fn apply_to_books(&mut self, envelope: &Envelope, listed: &[Listed]) {
        let named = match envelope.command.route() {
            Route::Admission => 0..0,
            Route::Instrument(instrument) => instrument.index()..instrument.index() + 1,
            Route::AllInstruments => 0..self.books.len(),
            Route::Listed => return self.apply_listed(envelope, listed),
        };
        for book in &mut self.books[named] {
            let book = book.as_mut().expect("books are at hand during recovery");
            book.apply(envelope, &mut self.outbox);
        }
    }

    #[cold]
    fn listed(&self, command: &Command) -> Vec<Listed> {
        let mut listed = Vec::new();
        self.admission.list(command, &mut listed);
        listed
    }

    #[cold]
    fn apply_listed(&mut self, envelope: &Envelope, listed: &[Listed]) {
        for of_book in Listed::by_instrument(listed) {
            let book = self.books[of_book[0].instrument.index()].as_mut();
            let book = book.expect("books are at hand during recovery");
            book.apply_listed(envelope, of_book, &mut self.outbox);
        }
    }

    /// Applies a command to admission, which has the sequence and the time.
    ///
    /// Returns the new book of an instrument's first command. The book must apply the command too.
    #[inline]
    pub(crate) fn begin(&mut self, envelope: &Envelope, cause: &Cause) -> Option<Box<Book>> {
        self.admission.apply_command(envelope, cause);
        match &envelope.command {
            Command::SetInstrument(set) if set.spec.ix.index() == self.books.len() => {
                let config = book_config(self.admission.orders_max());
                let mut book = Box::new(Book::new(set.spec, config));
                if let Some(windows) = &self.windows {
                    book.set_window_source(windows.clone());
                }
                Some(book)
            }
            _ => None,
        }
    }

    /// Applies a started command to one book, of which it ends the orders in `listed`, if that is
    /// given. Passes its events to `each`, and the new best prices to admission.
    #[inline]
    pub(crate) fn match_command(
        &mut self,
        book: usize,
        envelope: &Envelope,
        listed: Option<&[Listed]>,
        each: impl FnMut(&EventEnvelope),
    ) -> Matched {
        let book = self.books[book].as_mut();
        let book = book.expect("no engine has the book");
        let expiry_before_ns = book.next_expiry_ns();
        let mut sink = Matching {
            each,
            admission: &mut self.admission,
        };
        match listed {
            None => book.apply(envelope, &mut sink),
            Some(listed) => book.apply_listed(envelope, listed, &mut sink),
        };
        Matched {
            expiry_before_ns,
            expiry_ns: book.next_expiry_ns(),
            fok_visits: book.take_fok_visits(),
        }
    }

    /// Numbers the message of the command itself. Called before its events are applied, and after
    /// the messages of all earlier commands.
    #[inline]
    pub(crate) fn report(&mut self, cause: &Cause, command: &Command, to: &mut impl ReportSink) {
        self.admission.report_command(cause, command, to);
    }

    /// Numbers the message that ends a command. Called after its events are applied.
    #[inline]
    pub(crate) fn end(
        &mut self,
        cause: &Cause,
        command: &Command,
        events: usize,
        to: &mut impl ReportSink,
    ) {
        self.admission.report_end(cause, command, events, to);
    }

    /// Applies an event of a book to admission.
    #[inline]
    pub(crate) fn event(&mut self, event: &EventEnvelope, cause: &Cause, to: &mut impl ReportSink) {
        self.trades += u64::from(matches!(event.event, Event::Trade(_)));
        self.admission.apply_event_brief(event, cause, to);
    }

    pub(crate) fn quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        self.admission.set_quote(instrument, quote);
    }

    /// Slots of the books. With engine threads the hot thread lends the books to engines, and
    /// returns them for an inspection.
    pub(crate) fn places(&mut self) -> &mut Vec<Option<Box<Book>>> {
        &mut self.books
    }

    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    pub fn book(&self, instrument: InstrumentIx) -> Option<&Book> {
        self.books.get(instrument.index())?.as_deref()
    }

    /// Every book, by instrument index.
    pub fn books(&self) -> impl Iterator<Item = &Book> {
        self.books.iter().filter_map(Option::as_deref)
    }

    pub fn instruments(&self) -> impl Iterator<Item = InstrumentIx> + '_ {
        self.admission.instruments().map(|spec| spec.ix)
    }

    /// Last command applied.
    pub fn sequence(&self) -> Sequence {
        self.admission.sequence()
    }

    /// Time of the last command.
    pub fn time_ns(&self) -> u64 {
        self.admission.time_ns()
    }

    /// Trades since the beginning of the journal.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    /// Hash of all state that the journal determines.
    pub fn state_hash(&self) -> u64 {
        let mut hash = StateHasher::new();
        hash.write_u64(self.sequence().get());
        hash.write_u64(self.admission.state_hash());
        for book in self.books() {
            hash.write_u64(book.state_hash());
        }
        hash.finish()
    }

    /// Number of table rows and resting orders that [`Core::state_hash`] visits.
    pub fn hashed_rows(&self) -> usize {
        let resting = self.books().map(|book| book.resting() as usize);
        self.admission.hashed_rows() + resting.sum::<usize>()
    }

    /// Earliest expiry of any resting order.
    pub fn next_expiry_ns(&self) -> Option<u64> {
        self.books().filter_map(Book::next_expiry_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::Window;
    use std::sync::atomic::{AtomicU32, Ordering};
    use types::command::{New, SetInstrument};
    use types::{
        Handle, InstrumentId, InstrumentParams, InstrumentSpec, Lots, Phase, Side, Ticks, UserIx,
    };

    /// Counts the windows that books ask for.
    #[derive(Debug, Default)]
    struct Counted(AtomicU32);

    impl WindowSource for Counted {
        fn take(&self, ticks: u32) -> Option<Window> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Some(Window::new(ticks))
        }

        fn free(&self, _: Window) {}
    }

    #[test]
    fn every_book_takes_its_wider_windows_from_the_source() {
        let counted = Arc::new(Counted::default());
        let source: Arc<dyn WindowSource> = counted.clone();
        let mut core = Core::new(crate::limits());
        let mut sequence = Sequence::ZERO;
        let mut envelope = move |command| {
            sequence = sequence.next();
            Envelope {
                sequence,
                time_ns: 1,
                received_ns: 0,
                command,
            }
        };
        for (ix, name) in ["EARLY", "LATE"].into_iter().enumerate() {
            let ix = InstrumentIx(ix as u32);
            let spec = InstrumentSpec::new(&InstrumentParams {
                ix,
                band_low: Ticks(1),
                band_high: Ticks::ORDER_MAX,
                phase: Phase::Open,
                ..InstrumentParams::new(InstrumentId::new(name).unwrap())
            });
            let set = Command::SetInstrument(SetInstrument {
                spec: spec.unwrap(),
            });
            let set = envelope(set);
            let mut book = core.begin(&set, &Cause::of(&set)).expect("a new book");
            book.apply(&set, &mut Outbox::default());
            core.places().push(Some(book));
            // The first book is there before the source, as after a recovery.
            if name == "EARLY" {
                core.set_window_source(&source);
            }
        }
        for book in 0..2 {
            for (slot, price) in [(0, 500_000), (1, 503_000)] {
                let ix = InstrumentIx(book as u32);
                let handle = Handle {
                    slot: 2 * book as u32 + slot,
                    generation: 1,
                };
                let side = [Side::Buy, Side::Sell][slot as usize];
                let new = New::limit(ix, handle, UserIx(slot), side, Ticks(price), Lots(1));
                core.match_command(book, &envelope(Command::New(new)), None, |_| {});
            }
            let asked = counted.0.load(Ordering::Relaxed);
            assert_eq!(asked, book as u32 + 1, "windows after book {book}");
        }
    }
}
