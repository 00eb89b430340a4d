//! Commands that end many orders, always in one order, so that a replay ends them alike: mass cancel, kill
//! switch and phases go by slot; expiry goes by date, then slot, and touches the orders that are due alone.

use alloc::vec::Vec;

use types::command::{MassCancel, MassScope, SetKillSwitch};
use types::event::{Event, MassCancelled, PhaseChanged};
use types::{CancelReason, Phase, PhaseCause, Side};

use crate::book::{Book, PlainPrices};
use crate::sink::{Emitter, EventSink};
use crate::slab::{NIL, Order};

/// Prices are walked instead of slots when fewer than one slot in so many rests: orders found by price have to
/// be sorted.
const SPARSE: usize = 8;

impl Book {
    pub(crate) fn mass_cancel<S: EventSink>(&mut self, c: &MassCancel, out: &mut Emitter<S>) {
        let count = self.cancel_where(c.reason, out, |order| {
            let in_scope = match c.scope {
                MassScope::All => true,
                MassScope::User(user) => order.user == user,
                MassScope::Session(session) => order.session == session,
                MassScope::Group(group) => order.group == group,
            };
            in_scope && c.side.is_none_or(|side| order.side == side)
        });
        out.emit(Event::MassCancelled(MassCancelled { count }));
    }

    /// Engaged, it ends every order of the user, or of everybody. Lifting it is admission's alone.
    pub(crate) fn kill_switch<S: EventSink>(&mut self, c: &SetKillSwitch, out: &mut Emitter<S>) {
        let count = self.cancel_where(CancelReason::KillSwitch, out, |order| {
            c.user.is_none() || order.user == c.user
        });
        out.emit(Event::MassCancelled(MassCancelled { count }));
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
            self.cancel_where(CancelReason::InstrumentMatured, out, |_| true);
        } else if cancel_orders {
            self.cancel_where(CancelReason::InstrumentHalted, out, |_| true);
        }
    }

    /// Trading would have moved the price too far (F08): nothing trades until a command opens the market again.
    /// Resting orders stay.
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

    /// Expires what is due before an order may meet it: a date holds by the journalled time, however late the
    /// timer's command comes.
    #[inline(always)]
    pub(crate) fn expire_due<S: EventSink>(&mut self, out: &mut Emitter<S>) {
        if out.time_ns() >= self.next_expiry_ns {
            self.expire(out);
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn expire<S: EventSink>(&mut self, out: &mut Emitter<S>) {
        let now_ns = out.time_ns();
        while let Some((at_ns, link)) = self.dates.first()
            && at_ns <= now_ns
        {
            let handle = self.slab.handle(link);
            self.cancel_resting(link, handle, CancelReason::Expired, out);
        }
    }

    fn cancel_where<S: EventSink>(
        &mut self,
        reason: CancelReason,
        out: &mut Emitter<S>,
        chosen: impl Fn(&Order) -> bool,
    ) -> u32 {
        let mut count = 0;
        let links = self.take_resting_links();
        for link in links.iter().copied() {
            if chosen(self.slab.at(link)) {
                let handle = self.slab.handle(link);
                self.cancel_resting(link, handle, reason, out);
                count += 1;
            }
        }
        self.links = links;
        self.links.clear();
        count
    }

    /// The links of all resting orders in slot order, in the room that is kept for them. Slots are the whole
    /// node's: where few of them rest here their prices are walked instead.
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
        assert_eq!(links.len(), live, "every live slot rests at a price");
        links
    }
}
