//! The rings around one engine: commands in, reports out. Who polls the engine decides the layout
//! ([`crate::crew`]); the code is the same.
//!
//! An engine never waits and never refuses: what does not fit the ring of reports waits in a spill of its own,
//! and while there is a spill the engine takes no further command. So one taker may meet any number of makers
//! behind rings of any size, and neither side can lock the other up. The spill is bounded by the reports of
//! [`BATCH`] commands, of which none closes more orders than are open.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use engine::{Book, EventSink};
use types::command::Listed;
use types::{Envelope, EventEnvelope, InstrumentIx, Quote, Sequence};

/// Commands an engine takes before it lets others have a turn.
const BATCH: usize = 64;
/// Reports put aside without memory being asked for: a sweep of 65,000 makers. What is not touched costs
/// address space alone.
const SPILL_ROOM: usize = 1 << 16;

/// What goes to an engine.
#[derive(Clone, Copy)]
enum Order {
    Nothing,
    Apply(Envelope),
    /// A command that ends so many orders, which follow.
    Sweep(Envelope, usize),
    Listed(Listed),
    /// Put the book into the loan and wait until it is back.
    Lend,
}

/// An order in the ring, in cache lines of its own: what the engine reads of most commands is in the first of them.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Slot(Order);

impl Slot {
    fn envelope(&self) -> Option<&Envelope> {
        match &self.0 {
            Order::Apply(envelope) => Some(envelope),
            Order::Nothing | Order::Lend | Order::Sweep(..) | Order::Listed(_) => None,
        }
    }
}

/// Stands where a batch is not full.
static NOTHING: Slot = Slot(Order::Nothing);

/// What an engine reports.
#[derive(Clone, Copy)]
pub(crate) enum Report {
    Nothing,
    Event(EventEnvelope),
    Quote(InstrumentIx, Quote),
    /// Everything about that command has been said.
    Done {
        sequence: Sequence,
        /// `u64::MAX` when no order in the book has a date: one word, which is read back at once.
        next_expiry_ns: u64,
        /// Of the ring, that the command and its list have taken.
        slots: u32,
        /// Levels and orders looked at for an order that could not be filled ([`Book::take_looks`]).
        looks: u32,
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

/// A book on its way between the engine that owns it and the hot thread that looks at it.
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
pub(crate) struct Lane {
    orders: SingleProducer<Slot, SingleConsumerBarrier>,
    reports: EventPoller<Report, SingleProducerBarrier>,
    loan: SharedLoan,
    /// Commands pushed whose `Done` has not come back, and the slots that they and their lists have taken.
    in_flight: usize,
    slots_taken: usize,
    capacity: usize,
    /// Its engine was waited for in vain, and has reported nothing since: nobody waits for it again.
    pub is_given_up: bool,
    /// Earliest good-till-date in the book, as of the last `Done`; `u64::MAX` without.
    pub next_expiry_ns: u64,
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

/// A command that waits for the rest of its list.
struct Sweep {
    command: Envelope,
    count: usize,
    listed: Vec<Listed>,
}

/// Makes the rings around a book. `capacity` is a power of two.
pub(crate) fn connect(book: Box<Book>, capacity: usize) -> (Lane, Engine) {
    let (orders_poller, builder) =
        build_single_producer(capacity, || NOTHING, BusySpin).new_event_poller();
    let (orders, orders_poller): In = (builder.build(), orders_poller);
    let (reports_poller, builder) =
        build_single_producer(capacity, || Report::Nothing, BusySpin).new_event_poller();
    let (reports, reports_poller): Out = (builder.build(), reports_poller);
    let loan = SharedLoan::default();
    let lane = Lane {
        orders,
        reports: reports_poller,
        loan: loan.clone(),
        in_flight: 0,
        slots_taken: 0,
        capacity,
        is_given_up: false,
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
    (lane, engine)
}

impl Lane {
    /// False when the commands under way and their lists take as many slots as the ring has.
    pub fn has_room(&self) -> bool {
        self.slots_taken < self.capacity
    }

    /// True when nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// True when the command pushed last is the only one under way.
    pub fn is_first(&self) -> bool {
        self.in_flight == 1
    }

    /// Puts a command into the ring; false when its slot is not free yet.
    #[must_use]
    #[inline]
    pub fn push(&mut self, envelope: &Envelope) -> bool {
        // By its parts: as a whole it is just too long for the compiler to copy without a call.
        let publish = |slot: &mut Slot| {
            slot.0 = Order::Apply(Envelope {
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

    /// Puts a command that ends `count` orders into the ring; [`Lane::push_listed`] is owed for each of
    /// them. False when its slot is not free yet.
    #[must_use]
    pub fn push_sweep(&mut self, envelope: &Envelope, count: usize) -> bool {
        let publish = |slot: &mut Slot| slot.0 = Order::Sweep(*envelope, count);
        let is_pushed = self.orders.try_publish(publish).is_ok();
        if is_pushed {
            self.in_flight += 1;
            self.slots_taken += 1 + count;
        }
        is_pushed
    }

    /// The next order of the command that was pushed last; false when its slot is not free yet.
    #[must_use]
    pub fn push_listed(&mut self, order: Listed) -> bool {
        let publish = |slot: &mut Slot| slot.0 = Order::Listed(order);
        self.orders.try_publish(publish).is_ok()
    }

    /// Takes the reports that are there; true when there were any.
    pub fn drain(&mut self, mut each: impl FnMut(&Report)) -> bool {
        match self.reports.poll() {
            Ok(mut reports) => {
                self.is_given_up = false;
                for report in &mut reports {
                    if let Report::Done {
                        next_expiry_ns,
                        slots,
                        ..
                    } = report
                    {
                        self.in_flight -= 1;
                        self.slots_taken -= *slots as usize;
                        self.next_expiry_ns = *next_expiry_ns;
                    }
                    each(report);
                }
                true
            }
            Err(Polling::NoEvents | Polling::Shutdown) => false,
        }
    }

    /// Asks for the book; nothing is under way then. False when the slot is not free yet.
    #[must_use]
    pub fn ask_for_book(&mut self) -> bool {
        assert_eq!(self.in_flight, 0, "a book is lent between two commands");
        self.orders.try_publish(|slot| slot.0 = Order::Lend).is_ok()
    }

    /// The book, once the engine has put it down.
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
    /// Takes some commands through the book; true when there was anything to do.
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
                    assert!(!is_lending, "nothing is sent behind a loan");
                    match &slot.0 {
                        Order::Apply(envelope) => apply(book, envelope, None, reports, spill),
                        Order::Sweep(envelope, count) => {
                            (sweep.command, sweep.count) = (*envelope, *count);
                            sweep.listed.clear();
                        }
                        Order::Listed(order) => {
                            sweep.listed.push(*order);
                            if sweep.listed.len() == sweep.count {
                                apply(book, &sweep.command, Some(&sweep.listed), reports, spill);
                            }
                        }
                        Order::Lend => is_lending = true,
                        Order::Nothing => {}
                    }
                };
                let mut orders = &mut orders;
                if orders.len() == 1 {
                    // Nothing to look ahead to.
                    if let Some(slot) = orders.next() {
                        each(book, slot);
                    }
                } else {
                    // References into the ring, so that the book can look at what comes before its turn.
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
            // Begin where the memory is that was used already.
            self.spill.clear();
        }
        did_work
    }
}

/// One command through the book, and the word that it is complete.
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
    let looks = book.take_looks();
    let slots = 1 + listed.map_or(0, |listed| listed.len() as u32);
    out.put(|| Report::Done {
        sequence: envelope.sequence,
        next_expiry_ns,
        slots,
        looks,
    });
}

/// Where a book's events go.
struct Outlet<'a> {
    reports: &'a mut SingleProducer<Report, SingleConsumerBarrier>,
    spill: &'a mut VecDeque<Report>,
}

impl Outlet<'_> {
    /// Made where it is kept: in the ring, or in the spill while the ring is full.
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
    use types::command::ExpireOrders;
    use types::{
        Command, FeeRate, InstrumentId, InstrumentParams, InstrumentSpec, Phase, Ticks,
        VelocityRule,
    };

    #[test]
    fn a_lane_that_was_given_up_is_one_again_when_its_engine_reports() {
        let spec = InstrumentSpec::new(&InstrumentParams {
            ix: InstrumentIx(0),
            id: InstrumentId::new("TEST-1").expect("an id"),
            decimals: 0,
            tick_size: "1".parse().expect("a number"),
            lot_size: "1".parse().expect("a number"),
            fee_rate: FeeRate::TRADING,
            band_low: Ticks(1),
            band_high: Ticks(100),
            collar_ppm: 50_000,
            velocity: VelocityRule::OFF,
            phase: Phase::Open,
        })
        .expect("consistent");
        let book = Box::new(Book::new(
            spec,
            BookConfig {
                orders: 16,
                levels: 128,
            },
        ));
        let (mut lane, mut engine) = connect(book, 4);
        for sequence in 1..=4 {
            assert!(lane.has_room());
            assert!(lane.push(&Envelope {
                sequence: Sequence(sequence),
                time_ns: 0,
                received_ns: 0,
                command: Command::ExpireOrders(ExpireOrders {
                    instrument: InstrumentIx::NONE,
                }),
            }));
        }
        assert!(!lane.has_room());
        lane.is_given_up = true;
        assert!(!lane.drain(|_| {}), "the engine has not come");
        assert!(lane.is_given_up && !lane.has_room());
        assert!(engine.step() && lane.drain(|_| {}));
        assert!(!lane.is_given_up && lane.has_room());
    }
}
