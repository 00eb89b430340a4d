//! The book of one instrument: state, dispatch of commands, linking of resting orders.

use alloc::sync::Arc;
use alloc::vec::Vec;

use types::command::{Cancel, Command, MassScope, SetInstrument};
use types::event::{CancelRejected, Cancelled, Event, PhaseChanged};
use types::{
    CancelReason, Envelope, Handle, InstrumentIx, InstrumentSpec, Phase, PhaseCause, Quote,
    RejectReason, Sequence, Side, Ticks,
};

use crate::dates::Dates;
use crate::ladder::{LEVELS_DEFAULT, Ladder};
use crate::sink::{Emitter, EventSink};
use crate::slab::{NEVER, Order, Slab};
use crate::velocity::Velocity;
use crate::window::WindowSource;

/// Capacity of a book at the start. Changes speed, never results.
#[derive(Clone, Copy, Debug)]
pub struct BookConfig {
    /// Slots allocated up front: admission's limit of open orders.
    pub orders: u32,
    /// Maximum width, in ticks, of the fast window of price levels.
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

/// Prices at which a limit order may enter in the current phase, as one comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainPrices {
    low: i64,
    count: u64,
}

impl PlainPrices {
    pub fn of(spec: &InstrumentSpec) -> Self {
        let low = spec.band_low.0.max(1);
        let high = spec.band_high.min(Ticks::ORDER_MAX).0;
        let count = if spec.phase == Phase::Open && low <= high {
            high.abs_diff(low) + 1
        } else {
            0
        };
        Self { low, count }
    }

    #[inline(always)]
    pub fn contains(self, price: Ticks) -> bool {
        (price.0.wrapping_sub(self.low) as u64) < self.count
    }
}

/// Order book and matching of one instrument. See the crate documentation for the rules.
#[derive(Clone, Debug)]
pub struct Book {
    pub(crate) spec: InstrumentSpec,
    /// Prices allowed for the fast path; derived from `spec`.
    pub(crate) plain: PlainPrices,
    pub(crate) slab: Slab,
    pub(crate) ladder: Ladder,
    pub(crate) event_number: u64,
    pub(crate) trade_number: u64,
    /// Last command applied.
    pub(crate) sequence: Sequence,
    /// Resting orders with an expiry.
    pub(crate) dates: Dates,
    /// Earliest expiry time; `NEVER` when no order has one.
    pub(crate) next_expiry_ns: u64,
    pub(crate) velocity: Velocity,
    /// Levels and orders visited for unfillable fill-or-kill orders since the last
    /// [`Book::take_fok_visits`]. Not part of the state.
    pub(crate) fok_visits: u32,
    /// Buffer for the links of all resting orders, allocated by the first command that needs it.
    pub(crate) links: Vec<u32>,
}

impl Book {
    pub fn new(spec: InstrumentSpec, config: BookConfig) -> Self {
        Self {
            spec,
            plain: PlainPrices::of(&spec),
            slab: Slab::new(config.orders),
            ladder: Ladder::new(&spec, config.levels),
            event_number: 0,
            trade_number: 0,
            sequence: Sequence::ZERO,
            dates: Dates::new(config.orders),
            next_expiry_ns: NEVER,
            velocity: Velocity::new(spec.velocity),
            fok_visits: 0,
            links: Vec::new(),
        }
    }

    /// Sets the source of wider windows. Without one the book maps them itself.
    pub fn set_window_source(&mut self, source: Arc<dyn WindowSource>) {
        self.ladder.set_source(source);
    }

    /// Releases memory that orders have used and need no more. The caller is idle: the next orders
    /// there cause page faults. Changes speed, never results.
    pub fn release_unused(&mut self) {
        self.ladder.release_unused();
    }

    /// Applies one sequenced command and emits its events; returns their number.
    ///
    /// Commands for other instruments, and those for admission only, change nothing. Panics when
    /// the sequence does not increase or a handle names a slot that another order occupies. Both
    /// are bugs of the caller, which no client can cause.
    #[inline(always)]
    pub fn apply<S: EventSink>(&mut self, envelope: &Envelope, sink: &mut S) -> u32 {
        self.begin(envelope);
        let ix = self.spec.ix;
        // Each function makes its own emitter, so that the emitter stays in registers.
        let count = match &envelope.command {
            Command::New(c) if c.instrument == ix => self.new_order(envelope, c, sink),
            Command::Cancel(c) if c.instrument == ix => self.cancel(envelope, c, sink),
            Command::Amend(c) if c.instrument == ix => self.amend(envelope, c, sink),
            _ => self.control(envelope, sink),
        };
        self.finish(count, sink)
    }

    #[inline(always)]
    pub(crate) fn begin(&mut self, envelope: &Envelope) {
        assert!(
            envelope.sequence > self.sequence,
            "commands must have increasing sequences"
        );
        self.sequence = envelope.sequence;
    }

    /// Counts the events of a command and publishes changed best prices.
    #[inline(always)]
    pub(crate) fn finish<S: EventSink>(&mut self, count: u32, sink: &mut S) -> u32 {
        // Cannot overflow: an instrument has fewer than 2^64 events.
        self.event_number = self.event_number.wrapping_add(u64::from(count));
        if self.ladder.has_new_best() {
            assert!(self.ladder.is_sound(), "book is crossed after a command");
            sink.quote(self.spec.ix, self.quote());
        }
        count
    }

    #[inline(always)]
    pub(crate) fn emitter<'a, S: EventSink>(
        &self,
        envelope: &'a Envelope,
        sink: &'a mut S,
    ) -> Emitter<'a, S> {
        Emitter::new(sink, envelope, self.spec.ix, self.event_number)
    }

    /// Commands outside the order flow.
    #[cold]
    #[inline(never)]
    fn control<S: EventSink>(&mut self, envelope: &Envelope, sink: &mut S) -> u32 {
        let mut out = self.emitter(envelope, sink);
        let ix = self.spec.ix;
        let is_named = |named: InstrumentIx| named.is_none() || named == ix;
        match &envelope.command {
            Command::MassCancel(c) if c.scope == MassScope::All && is_named(c.instrument) => {
                self.cancel_all(c.reason, c.side, &mut out);
            }
            Command::ExpireOrders(c) if is_named(c.instrument) => {
                let orders_max = if c.orders_max == 0 {
                    u32::MAX
                } else {
                    c.orders_max
                };
                self.expire(orders_max, &mut out);
            }
            Command::SetPhase(c) if c.instrument == ix => {
                self.set_phase(c.phase, c.cancel_orders, &mut out);
            }
            Command::SetKillSwitch(c) if c.is_engaged && c.user.is_none() => {
                self.cancel_all(CancelReason::KillSwitch, None, &mut out);
            }
            Command::SetInstrument(c) if c.spec.ix == ix => self.set_instrument(c, &mut out),
            _ => {}
        }
        out.count()
    }

    #[inline(always)]
    fn cancel<S: EventSink>(&mut self, envelope: &Envelope, c: &Cancel, sink: &mut S) -> u32 {
        let mut out = self.emitter(envelope, sink);
        let Some(order) = self.slab.find_mut(c.handle) else {
            out.emit(Event::CancelRejected(CancelRejected {
                handle: c.handle,
                reason: RejectReason::OrderNotOpen,
            }));
            return out.count();
        };
        // Emitted before the unlinking, while the order's data is in cache.
        out.emit(Event::Cancelled(Cancelled {
            handle: c.handle,
            reason: c.reason,
            quantity: order.open,
        }));
        let order = order.end();
        self.unlink(c.handle.slot.wrapping_add(1), &order);
        out.count()
    }

    /// Unlinks a resting order and emits its cancellation.
    pub(crate) fn cancel_resting<S: EventSink>(
        &mut self,
        link: u32,
        handle: Handle,
        reason: CancelReason,
        out: &mut Emitter<S>,
    ) {
        let order = self.slab.at_mut(link).end();
        out.emit(Event::Cancelled(Cancelled {
            handle,
            reason,
            quantity: order.open,
        }));
        self.unlink(link, &order);
    }

    fn set_instrument<S: EventSink>(&mut self, c: &SetInstrument, out: &mut Emitter<S>) {
        assert!(
            self.slab.live() == 0 || self.spec.same_steps(&c.spec),
            "tick or lot size changed with open orders"
        );
        let phase = self.spec.phase;
        self.spec = c.spec;
        self.spec.phase = phase;
        self.plain = PlainPrices::of(&self.spec);
        self.ladder.set_band(&c.spec);
        self.velocity.set_rule(c.spec.velocity);
        if c.spec.phase != phase {
            // The command was admitted before the last phase change was known. The phase stays and
            // is published again.
            out.emit(Event::PhaseChanged(PhaseChanged {
                phase,
                cause: PhaseCause::Command,
            }));
        }
    }

    /// Rests an order at the tail of its price.
    #[inline(always)]
    pub(crate) fn link(&mut self, link: u32, order: Order) {
        let prev = self.ladder.push(order.side, order.price, link, order.open);
        self.slab.open(link, Order { prev, ..order });
        if order.expire_at_ns != NEVER {
            self.date_begins(order.expire_at_ns, link);
        }
    }

    /// Unlinks a closed order from its price.
    #[inline(always)]
    pub(crate) fn unlink(&mut self, link: u32, order: &Order) {
        self.slab.unlink(order);
        self.ladder
            .unlink(order.side, order.price, order.prev, order.next, order.open);
        if order.expire_at_ns != NEVER {
            self.date_ends(link);
        }
    }

    #[cold]
    #[inline(never)]
    fn date_begins(&mut self, at_ns: u64, link: u32) {
        self.dates.insert(at_ns, link);
        self.next_expiry_ns = self.dates.next_ns();
    }

    /// Removes the expiry of an order that no longer rests.
    #[cold]
    #[inline(never)]
    pub(crate) fn date_ends(&mut self, link: u32) {
        self.dates.remove(link);
        self.next_expiry_ns = self.dates.next_ns();
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

    /// Earliest expiry time of a resting order.
    pub fn next_expiry_ns(&self) -> Option<u64> {
        (self.next_expiry_ns != NEVER).then_some(self.next_expiry_ns)
    }

    /// Returns and clears the number of levels and orders visited for unfillable fill-or-kill
    /// orders.
    #[inline]
    pub fn take_fok_visits(&mut self) -> u32 {
        core::mem::take(&mut self.fok_visits)
    }

    /// True while the order rests.
    pub fn is_resting(&self, handle: Handle) -> bool {
        self.slab.find(handle).is_some()
    }
}
