//! Commands that end many orders, in a fixed sequence, so that a replay is identical.
//!
//! Mass cancel, kill switch and phase changes run in slot order. Expiry runs by date, then slot,
//! and touches only due orders.

use alloc::vec::Vec;

use types::command::{Command, Listed};
use types::event::{Event, PhaseChanged};
use types::{CancelReason, Envelope, Phase, PhaseCause, Side};

use crate::book::{Book, PlainPrices};
use crate::sink::{Emitter, EventSink};
use crate::slab::NIL;

/// Orders are found by price instead of by slot when fewer than one slot in `SPARSE` rests. They
/// have to be sorted then.
const SPARSE: usize = 8;

impl Book {
    /// Cancels the orders that admission lists for a command of [`types::Route::Listed`].
    ///
    /// Follows the list's order and skips orders that no longer rest. Returns the number of events.
    /// Cost: the length of the list.
    ///
    /// # Panics
    /// As [`Book::apply`], and for a command that lists no orders.
    pub fn apply_listed<S: EventSink>(
        &mut self,
        envelope: &Envelope,
        listed: &[Listed],
        sink: &mut S,
    ) -> u32 {
        self.begin(envelope);
        let reason = match &envelope.command {
            Command::MassCancel(c) => c.reason,
            Command::CancelSlice(c) => c.reason,
            Command::SetKillSwitch(_) => CancelReason::KillSwitch,
            other => panic!("{other:?} lists no orders"),
        };
        let mut out = self.emitter(envelope, sink);
        for order in listed {
            if let Some(link) = self.slab.find(order.handle) {
                self.cancel_resting(link, order.handle, reason, &mut out);
            }
        }
        let count = out.count();
        self.finish(count, sink)
    }

    pub(crate) fn set_phase<S: EventSink>(
        &mut self,
        phase: Phase,
        cancel_orders: bool,
        out: &mut Emitter<S>,
    ) {
        self.change_phase(phase, PhaseCause::Command, out);
        if phase == Phase::Open {
            self.velocity.reset();
        }
        if phase == Phase::Matured {
            self.cancel_all(CancelReason::InstrumentMatured, None, out);
        } else if cancel_orders {
            self.cancel_all(CancelReason::InstrumentHalted, None, out);
        }
    }

    /// Halts the market: the next trade would move the price too far (F08).
    ///
    /// Nothing trades until a command opens the market again. Resting orders stay.
    #[cold]
    #[inline(never)]
    pub(crate) fn halt<S: EventSink>(&mut self, out: &mut Emitter<S>) {
        self.change_phase(Phase::Halt, PhaseCause::Velocity, out);
    }

    fn change_phase<S: EventSink>(
        &mut self,
        phase: Phase,
        cause: PhaseCause,
        out: &mut Emitter<S>,
    ) {
        self.spec.phase = phase;
        self.plain = PlainPrices::of(&self.spec);
        out.emit(Event::PhaseChanged(PhaseChanged { phase, cause }));
    }

    /// Expires due orders before an incoming order may match them.
    ///
    /// Expiry follows the journalled time, however late the timer command arrives. Cost: the due
    /// orders of this book, of one member at most its bound of open orders per instrument.
    #[inline(always)]
    pub(crate) fn expire_due<S: EventSink>(&mut self, out: &mut Emitter<S>) {
        if out.time_ns() >= self.next_expiry_ns {
            self.expire(u32::MAX, out);
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn expire<S: EventSink>(&mut self, orders_max: u32, out: &mut Emitter<S>) {
        let now_ns = out.time_ns();
        for _ in 0..orders_max {
            let Some((_, link)) = self.dates.first().filter(|first| first.0 <= now_ns) else {
                return;
            };
            let handle = self.slab.handle(link);
            self.cancel_resting(link, handle, CancelReason::Expired, out);
        }
    }

    /// Cancels every order, or those of one side.
    pub(crate) fn cancel_all<S: EventSink>(
        &mut self,
        reason: CancelReason,
        side: Option<Side>,
        out: &mut Emitter<S>,
    ) {
        let links = self.take_resting_links();
        for link in links.iter().copied() {
            if side.is_none_or(|side| self.slab.at(link).side == side) {
                let handle = self.slab.handle(link);
                self.cancel_resting(link, handle, reason, out);
            }
        }
        self.links = links;
        self.links.clear();
    }

    /// Returns the links of all resting orders in slot order, in a reused buffer.
    ///
    /// All books of a node share the slots: if few orders rest here, they are found by price.
    fn take_resting_links(&mut self) -> Vec<u32> {
        let mut links = core::mem::take(&mut self.links);
        if links.capacity() == 0 {
            links.reserve_exact(self.slab.room());
        }
        let (live, slots) = (self.slab.live() as usize, self.slab.links().len());
        if live < slots / SPARSE {
            for side in [Side::Buy, Side::Sell] {
                for price in self.ladder.prices(side) {
                    let mut link = self.ladder.level(side, price).head;
                    while link != NIL {
                        links.push(link);
                        link = self.slab.at(link).next;
                    }
                }
            }
            links.sort_unstable();
        } else {
            let resting = self.slab.links().filter(|link| self.slab.at(*link).live);
            links.extend(resting.take(live));
        }
        assert_eq!(links.len(), live, "live slots differ from resting orders");
        links
    }
}
