//! The book of one instrument: state, dispatch of commands, linking and unlinking of resting orders.

use types::command::{Cancel, Command, SetInstrument};
use types::event::{CancelRejected, Cancelled, Event};
use types::{
    Envelope, Handle, InstrumentIx, InstrumentSpec, Phase, Quote, RejectReason, Sequence, Side,
    Ticks,
};

use crate::ladder::{LEVELS_DEFAULT, Ladder};
use crate::sink::{Emitter, EventSink};
use crate::slab::{NEVER, NIL, Order, Slab};

/// How much room a book gets at the start. It changes speed, never results.
#[derive(Clone, Copy, Debug)]
pub struct BookConfig {
    /// Slots allocated at once: admission's number of open orders.
    pub orders: u32,
    /// Ticks that the fast window of price levels may span.
    pub levels: u32,
}

impl Default for BookConfig {
    fn default() -> Self {
        Self {
            orders: 1 << 16,
            levels: LEVELS_DEFAULT,
        }
    }
}

/// Order book and matching of one instrument. See the crate's front page for the rules.
#[derive(Clone, Debug)]
pub struct Book {
    pub(crate) spec: InstrumentSpec,
    pub(crate) slab: Slab,
    pub(crate) ladder: Ladder,
    pub(crate) event_number: u64,
    pub(crate) trade_number: u64,
    /// Last command applied.
    pub(crate) sequence: Sequence,
    /// No resting order expires before this time; `NEVER` when none has a date. A lower bound, exact after each expiry walk.
    pub(crate) next_expiry_ns: u64,
}

impl Book {
    pub fn new(spec: InstrumentSpec, config: BookConfig) -> Self {
        Self {
            spec,
            slab: Slab::new(config.orders),
            ladder: Ladder::new(&spec, config.levels),
            event_number: 0,
            trade_number: 0,
            sequence: Sequence::ZERO,
            next_expiry_ns: NEVER,
        }
    }

    /// Applies one sequenced command and reports what happened; returns the number of events.
    ///
    /// Commands for other instruments and for admission alone change nothing. Panics when sequences go backwards or a handle names a slot
    /// that another order holds: both are bugs in front of the book, never a client's doing.
    pub fn apply<S: EventSink>(&mut self, envelope: &Envelope, sink: &mut S) -> u32 {
        assert!(
            envelope.sequence > self.sequence,
            "commands come in sequence"
        );
        self.sequence = envelope.sequence;
        let before = self.ladder.best;
        let mut out = Emitter::new(sink, envelope, self.spec.ix, self.event_number);
        match &envelope.command {
            Command::New(c) if c.instrument == self.spec.ix => self.new_order(c, &mut out),
            Command::Cancel(c) if c.instrument == self.spec.ix => self.cancel(c, &mut out),
            Command::Amend(c) if c.instrument == self.spec.ix => self.amend(c, &mut out),
            Command::MassCancel(c) if self.is_named(c.instrument) => self.mass_cancel(c, &mut out),
            Command::ExpireOrders(c) if self.is_named(c.instrument) => self.expire(&mut out),
            Command::SetPhase(c) if c.instrument == self.spec.ix => {
                self.set_phase(c.phase, c.cancel_orders, &mut out);
            }
            Command::SetInstrument(c) if c.spec.ix == self.spec.ix => {
                self.set_instrument(c, &mut out);
            }
            _ => {}
        }
        if self.ladder.best != before {
            out.quote(self.quote());
        }
        let count = out.count();
        self.event_number += u64::from(count);
        assert!(
            self.ladder.best[0] < self.ladder.best[1],
            "book is crossed after a command"
        );
        count
    }

    fn is_named(&self, instrument: InstrumentIx) -> bool {
        instrument.is_none() || instrument == self.spec.ix
    }

    fn cancel<S: EventSink>(&mut self, c: &Cancel, out: &mut Emitter<S>) {
        if self.slab.get(c.handle).is_none() {
            out.emit(Event::CancelRejected(CancelRejected {
                handle: c.handle,
                reason: RejectReason::OrderNotOpen,
            }));
            return;
        }
        self.cancel_resting(c.handle.slot, c.reason, out);
    }

    /// Takes a resting order out and says so.
    pub(crate) fn cancel_resting<S: EventSink>(
        &mut self,
        slot: u32,
        reason: types::CancelReason,
        out: &mut Emitter<S>,
    ) {
        let handle = self.slab.handle(slot);
        let quantity = self.slab.at(slot).open;
        self.unlink(slot);
        out.emit(Event::Cancelled(Cancelled {
            handle,
            reason,
            quantity,
        }));
    }

    fn set_instrument<S: EventSink>(&mut self, c: &SetInstrument, out: &mut Emitter<S>) {
        assert!(
            self.slab.live() == 0 || self.spec.same_steps(&c.spec),
            "tick and lot never change under open orders"
        );
        let phase = self.spec.phase;
        self.spec = c.spec;
        self.spec.phase = phase;
        if c.spec.phase != phase {
            self.set_phase(c.spec.phase, false, out);
        }
    }

    /// Rests an order at the tail of its price.
    #[inline]
    pub(crate) fn link(&mut self, slot: u32, mut order: Order) {
        if order.expire_at_ns < self.next_expiry_ns {
            self.next_expiry_ns = order.expire_at_ns;
        }
        let level = self.ladder.level_for_rest(order.side, order.price);
        let tail = level.tail;
        level.tail = slot;
        level.open += order.open;
        if tail == NIL {
            level.head = slot;
        } else {
            self.slab.at_mut(tail).next = slot;
        }
        order.prev = tail;
        order.next = NIL;
        self.slab.put(slot, order);
    }

    /// Takes a resting order out of its price and closes its slot.
    #[inline]
    pub(crate) fn unlink(&mut self, slot: u32) {
        let order = *self.slab.at(slot);
        self.slab.close(slot);
        if order.prev == NIL && order.next == NIL {
            self.ladder.remove(order.side, order.price);
            return;
        }
        let level = self.ladder.level_mut(order.side, order.price);
        level.open -= order.open;
        if order.prev == NIL {
            level.head = order.next;
        } else {
            self.slab.at_mut(order.prev).next = order.next;
        }
        if order.next == NIL {
            level.tail = order.prev;
        } else {
            self.slab.at_mut(order.next).prev = order.prev;
        }
    }

    pub fn spec(&self) -> &InstrumentSpec {
        &self.spec
    }

    pub fn phase(&self) -> Phase {
        self.spec.phase
    }

    /// Best price of a side.
    pub fn best(&self, side: Side) -> Option<Ticks> {
        self.ladder.best(side)
    }

    pub fn quote(&self) -> Quote {
        Quote {
            bid: self.best(Side::Buy),
            ask: self.best(Side::Sell),
        }
    }

    /// Number of resting orders.
    pub fn resting(&self) -> u32 {
        self.slab.live()
    }

    /// Number of the last event.
    pub fn event_number(&self) -> u64 {
        self.event_number
    }

    /// Number of the last trade.
    pub fn trade_number(&self) -> u64 {
        self.trade_number
    }

    /// Last command applied.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// Earliest moment at which an order with a date may be due.
    pub fn next_expiry_ns(&self) -> Option<u64> {
        (self.next_expiry_ns != NEVER).then_some(self.next_expiry_ns)
    }

    /// True while the order rests.
    pub fn is_resting(&self, handle: Handle) -> bool {
        self.slab.get(handle).is_some()
    }
}
