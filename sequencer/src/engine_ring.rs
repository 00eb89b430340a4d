//! The rings of one engine: commands in, reports out.
//!
//! The layout decides which thread polls the engine ([`crate::engine_pool`]); in layout `fused`
//! there are no engines.
//!
//! An engine never waits and never refuses. Reports that do not fit their ring go to a spill queue.
//! While the spill is not empty, the engine takes no further command. So one taker may meet any
//! number of makers with rings of any size, and the two sides cannot deadlock. The reports of
//! [`BATCH`] commands bound the spill, and no command closes more orders than are open.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use engine::{Book, EventSink};
use types::command::Listed;
use types::{Envelope, EventEnvelope, InstrumentIx, Quote, Sequence};

/// Maximum number of commands that an engine applies per poll.
const BATCH: usize = 64;
/// Part of a ring's slots that orders and amends leave free, for what reduces risk: an eighth.
const RESERVED_PART: usize = 8;
/// Preallocated capacity of the spill: an order that takes 65,000 makers. Untouched memory costs
/// only address space.
const SPILL_ROOM: usize = 1 << 16;

/// Task for an engine.
#[derive(Clone, Copy)]
enum EngineTask {
    Nothing,
    Apply(Envelope),
    /// A command that ends a number of orders. The orders follow.
    Sweep(Envelope, usize),
    Listed(Listed),
    /// Lend the book to the hot thread and wait until it is back.
    Lend,
}

/// Ring slot of a task, aligned to cache lines. The first line has the fields that the engine reads
/// of most commands.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Slot(EngineTask);

impl Slot {
    fn envelope(&self) -> Option<&Envelope> {
        match &self.0 {
            EngineTask::Apply(envelope) => Some(envelope),
            EngineTask::Nothing
            | EngineTask::Lend
            | EngineTask::Sweep(..)
            | EngineTask::Listed(_) => None,
        }
    }
}

/// Fills the unused places of a batch.
static NOTHING: Slot = Slot(EngineTask::Nothing);

/// Report of an engine.
#[derive(Clone, Copy)]
pub(crate) enum Report {
    Nothing,
    Event(EventEnvelope),
    Quote(InstrumentIx, Quote),
    /// The command is complete: no further report is about it.
    Done {
        sequence: Sequence,
        /// Earliest expiry in the book; `u64::MAX` if there is none. One word instead of an
        /// option, since it is read soon after it is written.
        next_expiry_ns: u64,
        /// Number of ring slots of the command and its list.
        slots: u32,
        /// Levels and orders visited for a fill-or-kill order that cannot be filled
        /// ([`Book::take_fok_visits`]).
        fok_visits: u32,
    },
}

type In = (
    SingleProducer<Slot, SingleConsumerBarrier>,
    EventPoller<Slot, SingleProducerBarrier>,
);
type Out = (
    SingleProducer<Report, SingleConsumerBarrier>,
    EventPoller<Report, SingleProducerBarrier>,
);

/// A book that its engine lends to the hot thread.
#[derive(Default)]
enum Loan {
    #[default]
    None,
    Lent(Box<Book>),
    Returned(Box<Book>),
}

type SharedLoan = Arc<Mutex<Loan>>;

fn loan(shared: &SharedLoan) -> MutexGuard<'_, Loan> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The hot thread's end of the rings.
pub(crate) struct EngineRing {
    orders: SingleProducer<Slot, SingleConsumerBarrier>,
    reports: EventPoller<Report, SingleProducerBarrier>,
    loan: SharedLoan,
    /// Number of commands pushed and not `Done`.
    in_flight: usize,
    /// Number of slots of these commands and their lists.
    slots_taken: usize,
    capacity: usize,
    /// Slots that orders and amends may take.
    slots_for_orders: usize,
    /// A wait for the engine timed out, and the engine has reported nothing since. Requests do not
    /// wait for it again.
    pub has_timed_out: bool,
    /// Earliest expiry in the book, as of the last `Done`; `u64::MAX` if there is none, or while an
    /// expiry command is in flight.
    pub next_expiry_ns: u64,
    /// The last expiry command. A `Done` before its own is stale: the command ends those orders.
    expiring: Sequence,
}

/// The engine's end of the rings, with the book.
pub(crate) struct Engine {
    orders: EventPoller<Slot, SingleProducerBarrier>,
    reports: SingleProducer<Report, SingleConsumerBarrier>,
    /// `None` while it is lent.
    book: Option<Box<Book>>,
    spill: VecDeque<Report>,
    loan: SharedLoan,
    sweep: Sweep,
}

/// A command whose list of orders is incomplete.
struct Sweep {
    command: Envelope,
    count: usize,
    listed: Vec<Listed>,
}

/// Connects a book to a pair of rings. `capacity` is a power of two.
pub(crate) fn connect(book: Box<Book>, capacity: usize) -> (EngineRing, Engine) {
    let (orders_poller, builder) =
        build_single_producer(capacity, || NOTHING, BusySpin).new_event_poller();
    let (orders, orders_poller): In = (builder.build(), orders_poller);
    let (reports_poller, builder) =
        build_single_producer(capacity, || Report::Nothing, BusySpin).new_event_poller();
    let (reports, reports_poller): Out = (builder.build(), reports_poller);
    let loan = SharedLoan::default();
    let engine_ring = EngineRing {
        orders,
        reports: reports_poller,
        loan: loan.clone(),
        in_flight: 0,
        slots_taken: 0,
        capacity,
        slots_for_orders: capacity - capacity / RESERVED_PART,
        has_timed_out: false,
        expiring: Sequence::ZERO,
        next_expiry_ns: book.next_expiry_ns().unwrap_or(u64::MAX),
    };
    let engine = Engine {
        orders: orders_poller,
        reports,
        book: Some(book),
        spill: VecDeque::with_capacity(SPILL_ROOM),
        loan,
        sweep: Sweep {
            command: crate::hot::nothing(),
            count: 0,
            listed: Vec::with_capacity(SPILL_ROOM),
        },
    };
    (engine_ring, engine)
}

impl EngineRing {
    /// False when the commands in flight and their lists take all slots of the ring that a command
    /// may take. Orders and amends leave a reserve.
    #[inline]
    pub fn has_room(&self, is_order: bool) -> bool {
        let slots = match is_order {
            true => self.slots_for_orders,
            false => self.capacity,
        };
        self.slots_taken < slots
    }

    /// True when nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// True when the last command pushed is the only one in flight.
    pub fn is_first(&self) -> bool {
        self.in_flight == 1
    }

    /// Pushes a command; false while the slot is not free.
    #[must_use]
    #[inline]
    pub fn push(&mut self, envelope: &Envelope) -> bool {
        // Copied per field, which avoids a call to memcpy.
        let publish = |slot: &mut Slot| {
            slot.0 = EngineTask::Apply(Envelope {
                sequence: envelope.sequence,
                time_ns: envelope.time_ns,
                received_ns: envelope.received_ns,
                command: envelope.command,
            });
        };
        let is_pushed = self.orders.try_publish(publish).is_ok();
        self.in_flight += usize::from(is_pushed);
        self.slots_taken += usize::from(is_pushed);
        is_pushed
    }

    /// Pushes a command that ends `count` orders; false while the slot is not free.
    ///
    /// The caller must then call [`EngineRing::push_listed`] for each of the orders.
    #[must_use]
    pub fn push_sweep(&mut self, envelope: &Envelope, count: usize) -> bool {
        let publish = |slot: &mut Slot| slot.0 = EngineTask::Sweep(*envelope, count);
        let is_pushed = self.orders.try_publish(publish).is_ok();
        if is_pushed {
            self.in_flight += 1;
            self.slots_taken += 1 + count;
        }
        is_pushed
    }

    /// Pushes the next order of the last command pushed; false while the slot is not free.
    #[must_use]
    pub fn push_listed(&mut self, order: Listed) -> bool {
        let publish = |slot: &mut Slot| slot.0 = EngineTask::Listed(order);
        self.orders.try_publish(publish).is_ok()
    }

    /// Records that an expiry command was pushed: the earliest expiry is unknown until its `Done`.
    pub fn expire(&mut self, sequence: Sequence) {
        (self.expiring, self.next_expiry_ns) = (sequence, u64::MAX);
    }

    /// Drains the reports; true when there were any.
    pub fn drain(&mut self, mut each: impl FnMut(&Report)) -> bool {
        match self.reports.poll() {
            Ok(mut reports) => {
                self.has_timed_out = false;
                for report in &mut reports {
                    if let Report::Done {
                        sequence,
                        next_expiry_ns,
                        slots,
                        ..
                    } = report
                    {
                        self.in_flight -= 1;
                        self.slots_taken -= *slots as usize;
                        if *sequence >= self.expiring {
                            self.next_expiry_ns = *next_expiry_ns;
                        }
                    }
                    each(report);
                }
                true
            }
            Err(Polling::NoEvents | Polling::Shutdown) => false,
        }
    }

    /// Requests the book while no command is in flight; false while the slot is not free.
    #[must_use]
    pub fn request_book(&mut self) -> bool {
        assert_eq!(
            self.in_flight, 0,
            "a book is lent only while no command is in flight"
        );
        self.orders
            .try_publish(|slot| slot.0 = EngineTask::Lend)
            .is_ok()
    }

    /// The book, once the engine has lent it.
    pub fn borrow_book(&mut self) -> Option<Box<Book>> {
        let mut loan = loan(&self.loan);
        match std::mem::take(&mut *loan) {
            Loan::Lent(book) => Some(book),
            other => {
                *loan = other;
                None
            }
        }
    }

    pub fn return_book(&mut self, book: Box<Book>) {
        *loan(&self.loan) = Loan::Returned(book);
    }
}

impl Engine {
    /// Releases unused memory of the book, unless it is lent. The thread is idle.
    pub fn release_unused(&mut self) {
        if let Some(book) = &mut self.book {
            book.release_unused();
        }
    }

    /// Applies up to [`BATCH`] commands to the book; true when it did work.
    pub fn step(&mut self) -> bool {
        let has_flushed = self.flush();
        if !self.spill.is_empty() {
            return has_flushed;
        }
        let Some(book) = self.book.as_mut() else {
            return self.take_back();
        };
        let mut is_lending = false;
        let did_work = match self.orders.take(BATCH as u64) {
            Ok(mut orders) => {
                let (reports, spill) = (&mut self.reports, &mut self.spill);
                let sweep = &mut self.sweep;
                let mut each = |book: &mut Book, slot: &Slot| {
                    assert!(!is_lending, "no task may follow a loan request");
                    match &slot.0 {
                        EngineTask::Apply(envelope) => apply(book, envelope, None, reports, spill),
                        EngineTask::Sweep(envelope, count) => {
                            (sweep.command, sweep.count) = (*envelope, *count);
                            sweep.listed.clear();
                        }
                        EngineTask::Listed(order) => {
                            sweep.listed.push(*order);
                            if sweep.listed.len() == sweep.count {
                                apply(book, &sweep.command, Some(&sweep.listed), reports, spill);
                            }
                        }
                        EngineTask::Lend => is_lending = true,
                        EngineTask::Nothing => {}
                    }
                };
                let mut orders = &mut orders;
                if orders.len() == 1 {
                    // No lookahead for a single command.
                    if let Some(slot) = orders.next() {
                        each(book, slot);
                    }
                } else {
                    // References into the ring, for the book's lookahead.
                    let mut batch = [&NOTHING; BATCH];
                    let mut count = 0;
                    for (place, slot) in batch.iter_mut().zip(orders) {
                        *place = slot;
                        count += 1;
                    }
                    book.each_of_batch(&batch[..count], Slot::envelope, each);
                }
                true
            }
            Err(Polling::NoEvents | Polling::Shutdown) => false,
        };
        if is_lending && let Some(book) = self.book.take() {
            *loan(&self.loan) = Loan::Lent(book);
        }
        did_work || has_flushed
    }

    /// True when the engine has something to do, or waits for its book.
    pub fn has_work(&self) -> bool {
        !self.spill.is_empty() || self.book.is_none() || self.orders.has_available()
    }

    /// Takes the book back; false while the hot thread has it.
    fn take_back(&mut self) -> bool {
        let mut loan = loan(&self.loan);
        match std::mem::take(&mut *loan) {
            Loan::Returned(book) => {
                self.book = Some(book);
                true
            }
            other => {
                *loan = other;
                false
            }
        }
    }

    /// Moves the spill into the ring as far as there is room; true when it moved a report.
    fn flush(&mut self) -> bool {
        let mut did_work = false;
        while let Some(report) = self.spill.front().copied() {
            if self.reports.try_publish(|slot| *slot = report).is_err() {
                break;
            }
            self.spill.pop_front();
            did_work = true;
        }
        if did_work && self.spill.is_empty() {
            // Resets the head of the deque, so that the next spill reuses resident pages.
            self.spill.clear();
        }
        did_work
    }
}

/// Applies one command to the book and reports that it is complete.
#[inline]
fn apply(
    book: &mut Book,
    envelope: &Envelope,
    listed: Option<&[Listed]>,
    reports: &mut SingleProducer<Report, SingleConsumerBarrier>,
    spill: &mut VecDeque<Report>,
) {
    let mut out = Outlet { reports, spill };
    match listed {
        None => book.apply(envelope, &mut out),
        Some(listed) => book.apply_listed(envelope, listed, &mut out),
    };
    let next_expiry_ns = book.next_expiry_ns().unwrap_or(u64::MAX);
    let fok_visits = book.take_fok_visits();
    let slots = 1 + listed.map_or(0, |listed| listed.len() as u32);
    out.put(|| Report::Done {
        sequence: envelope.sequence,
        next_expiry_ns,
        slots,
        fok_visits,
    });
}

/// Sink for a book's events.
struct Outlet<'a> {
    reports: &'a mut SingleProducer<Report, SingleConsumerBarrier>,
    spill: &'a mut VecDeque<Report>,
}

impl Outlet<'_> {
    /// Constructs the report in place: in the ring, or in the spill while the ring is full.
    #[inline(always)]
    fn put(&mut self, report: impl Fn() -> Report) {
        let is_put =
            self.spill.is_empty() && self.reports.try_publish(|slot| *slot = report()).is_ok();
        if !is_put {
            self.spill.push_back(report());
        }
    }
}

impl EventSink for Outlet<'_> {
    #[inline]
    fn event(&mut self, event: &EventEnvelope) {
        self.put(|| Report::Event(*event));
    }

    fn quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        self.put(|| Report::Quote(instrument, quote));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::BookConfig;
    use types::command::{ExpireOrders, New};
    use types::{
        Command, Handle, InstrumentId, InstrumentParams, InstrumentSpec, Lots, Side, Ticks,
        TimeInForce, UserIx,
    };

    /// An engine whose rings have four slots, with an empty book.
    fn engine() -> (EngineRing, Engine) {
        let spec = InstrumentSpec::new(&InstrumentParams {
            ix: InstrumentIx(0),
            tick_size: "1".parse().expect("a number"),
            band_high: Ticks(100),
            ..InstrumentParams::new(InstrumentId::new("TEST-1").expect("an id"))
        })
        .expect("consistent");
        let book = Box::new(Book::new(
            spec,
            BookConfig {
                orders: 16,
                levels: 128,
            },
        ));
        connect(book, 4)
    }

    fn envelope(sequence: u64, time_ns: u64, command: Command) -> Envelope {
        Envelope {
            sequence: Sequence(sequence),
            time_ns,
            received_ns: 0,
            command,
        }
    }

    fn expire_orders() -> Command {
        Command::ExpireOrders(ExpireOrders {
            instrument: InstrumentIx(0),
            orders_max: 0,
        })
    }

    #[test]
    fn an_engine_ring_that_timed_out_is_used_again_when_its_engine_reports() {
        let (mut engine_ring, mut engine) = engine();
        for sequence in 1..=4 {
            assert!(engine_ring.has_room(false));
            assert!(engine_ring.push(&envelope(sequence, 0, expire_orders())));
        }
        assert!(!engine_ring.has_room(false));
        engine_ring.has_timed_out = true;
        assert!(!engine_ring.drain(|_| {}), "the engine has not run");
        assert!(engine_ring.has_timed_out && !engine_ring.has_room(false));
        assert!(engine.step() && engine_ring.drain(|_| {}));
        assert!(!engine_ring.has_timed_out && engine_ring.has_room(false));
    }

    /// Commands before an expiry command report dates that it ends: they cause no further one.
    #[test]
    fn the_next_expiry_is_unknown_until_an_expiry_command_has_reported() {
        let (mut engine_ring, mut engine) = engine();
        let dated = |slot: u32, expire_at_ns| {
            let generation = 1;
            let handle = Handle { slot, generation };
            let (ix, price) = (InstrumentIx(0), Ticks(50));
            let new = New::limit(ix, handle, UserIx(0), Side::Buy, price, Lots(1));
            Command::New(New {
                time_in_force: TimeInForce::Gtd,
                expire_at_ns,
                ..new
            })
        };
        assert!(engine_ring.push(&envelope(1, 1, dated(0, 30))));
        assert!(engine.step() && engine_ring.drain(|_| {}));
        assert_eq!(engine_ring.next_expiry_ns, 30);
        assert!(engine_ring.push(&envelope(2, 2, dated(1, 20))));
        assert!(engine_ring.push(&envelope(3, 25, expire_orders())));
        engine_ring.expire(Sequence(3));
        assert_eq!(engine_ring.next_expiry_ns, u64::MAX);
        let mut next_ns = Vec::new();
        while engine_ring.in_flight > 0 {
            engine.step();
            assert!(engine_ring.drain(|report| {
                if let Report::Done { next_expiry_ns, .. } = report {
                    next_ns.push(*next_expiry_ns);
                }
            }));
        }
        assert_eq!(next_ns, [20, 30], "both are reported");
        assert_eq!(engine_ring.next_expiry_ns, 30);
    }
}
