//! New orders and amends: rejects, accepts, matches and rests.

use types::command::{Amend, New};
use types::event::{Accepted, AmendRejected, Amended, Cancelled, Event, Rejected, Rested};
use types::{
    CancelReason, Envelope, Handle, InstrumentSpec, Lots, OrderType, Phase, RejectReason, Side,
    Ticks, TimeInForce,
};

use crate::book::Book;
use crate::matching::{Stop, Taker};
use crate::sink::{Emitter, EventSink};
use crate::slab::{NEVER, NIL, Order};

impl Book {
    /// Applies a new order. An order that simply rests, as most do, takes a fast path.
    #[inline(always)]
    pub(crate) fn new_order<S: EventSink>(
        &mut self,
        envelope: &Envelope,
        c: &New,
        sink: &mut S,
    ) -> u32 {
        let link = self.slab.vacate(c.handle);
        if !self.is_plain(c, envelope.time_ns) || self.ladder.meets(c.side, c.price) {
            return self.new_order_in_full(envelope, c, link, sink);
        }
        let mut out = self.emitter(envelope, sink);
        accept(c, true, &mut out);
        self.link(link, resting(c, c.quantity, c.quantity, NEVER));
        out.count()
    }

    /// True for a good-till-cancelled limit order that only a crossing price can keep from resting.
    ///
    /// An optimisation: [`Book::refusal`] would pass every order that this check passes.
    #[inline(always)]
    fn is_plain(&self, c: &New, time_ns: u64) -> bool {
        (c.time_in_force == TimeInForce::Gtc)
            & (c.order_type == OrderType::Limit)
            & !c.post_only
            & (c.quantity.0.wrapping_sub(1) < Lots::ORDER_MAX.0)
            & self.plain.contains(c.price)
            & (time_ns < self.next_expiry_ns)
    }

    #[inline(never)]
    fn new_order_in_full<S: EventSink>(
        &mut self,
        envelope: &Envelope,
        c: &New,
        link: u32,
        sink: &mut S,
    ) -> u32 {
        let mut out = self.emitter(envelope, sink);
        self.expire_due(&mut out);
        let crosses = self.ladder.crosses(c.side, c.price);
        if let Some(reason) = self.refusal(c, crosses, out.time_ns()) {
            out.emit(Event::Rejected(Rejected {
                handle: c.handle,
                reason,
            }));
            return out.count();
        }
        let rests = !crosses && c.time_in_force.rests();
        accept(c, rests, &mut out);
        if rests {
            self.link(link, resting(c, c.quantity, c.quantity, expiry_of(c)));
        } else if let Some((open, quantity)) = self.execute(c, &mut out) {
            let expire_at_ns = expiry_of(c);
            self.rest(
                link,
                c.handle,
                resting(c, open, quantity, expire_at_ns),
                &mut out,
            );
        }
        out.count()
    }

    /// Matches a new order. Returns open and total quantity of a remainder that must rest.
    #[inline(always)]
    fn execute<S: EventSink>(&mut self, c: &New, out: &mut Emitter<S>) -> Option<(Lots, Lots)> {
        let mut taker = Taker {
            handle: c.handle,
            side: c.side,
            limit: c.price,
            open: c.quantity,
            quantity: c.quantity,
            group: c.stp_group,
            stp: c.stp,
        };
        if c.time_in_force == TimeInForce::Fok && !self.can_fill(&taker, out.time_ns()) {
            let empty = self.best(c.side.opposite()).is_none();
            let reason = if c.order_type == OrderType::Market && empty {
                CancelReason::NoLiquidity
            } else {
                CancelReason::FokNotFillable
            };
            cancel_taker(c.handle, reason, c.quantity, out);
            return None;
        }
        let stop = self.take(&mut taker, out);
        if taker.open.is_zero() {
            return None;
        }
        let reason = match stop {
            Stop::SelfTrade => CancelReason::SelfTrade,
            Stop::Velocity => CancelReason::InstrumentHalted,
            Stop::Limit if c.time_in_force.rests() => return Some((taker.open, taker.quantity)),
            // T19: a market order without any fill is cancelled with its own reason.
            Stop::Limit if c.order_type == OrderType::Market && taker.open == c.quantity => {
                CancelReason::NoLiquidity
            }
            Stop::Limit => CancelReason::IocRemainder,
        };
        cancel_taker(c.handle, reason, taker.open, out);
        if stop == Stop::Velocity {
            self.halt(out);
        }
        None
    }

    /// Reason to reject a new order, checked before any effect.
    #[inline(always)]
    fn refusal(&self, c: &New, crosses: bool, time_ns: u64) -> Option<RejectReason> {
        if let Some(reason) = self.phase_refusal(crosses || !c.time_in_force.rests()) {
            return Some(reason);
        }
        if c.quantity.is_zero() || c.quantity > Lots::ORDER_MAX {
            return Some(RejectReason::QuantityLot);
        }
        match c.order_type {
            OrderType::Limit if !(1..=Ticks::ORDER_MAX.0).contains(&c.price.0) => {
                return Some(RejectReason::PriceTick);
            }
            OrderType::Limit if !self.spec.in_band(c.price) => {
                return Some(RejectReason::PriceBand);
            }
            OrderType::Market if c.time_in_force.rests() => {
                return Some(RejectReason::InvalidCombination);
            }
            OrderType::Market => assert!(
                is_protected(&self.spec, c),
                "admission caps a market order's protection price by the band's far limit"
            ),
            OrderType::Limit => {}
        }
        if c.post_only && !c.time_in_force.rests() {
            return Some(RejectReason::InvalidCombination);
        }
        if c.post_only && crosses {
            return Some(RejectReason::PostOnly);
        }
        if c.time_in_force == TimeInForce::Gtd && c.expire_at_ns <= time_ns {
            return Some(RejectReason::Expired);
        }
        None
    }

    /// Reason why the phase rejects an order; `trades` = the order would not simply rest.
    #[inline(always)]
    fn phase_refusal(&self, trades: bool) -> Option<RejectReason> {
        match self.spec.phase {
            Phase::Open => None,
            Phase::PreOpen if trades => Some(RejectReason::InstrumentPreOpen),
            Phase::PreOpen => None,
            Phase::Halt => Some(RejectReason::InstrumentHalted),
            Phase::Closed => Some(RejectReason::InstrumentClosed),
            Phase::Matured => Some(RejectReason::InstrumentMatured),
        }
    }

    /// Amends a resting order.
    #[inline(never)]
    pub(crate) fn amend<S: EventSink>(
        &mut self,
        envelope: &Envelope,
        c: &Amend,
        sink: &mut S,
    ) -> u32 {
        let mut out = self.emitter(envelope, sink);
        self.expire_due(&mut out);
        let Some(link) = self.slab.find(c.handle) else {
            out.emit(Event::AmendRejected(AmendRejected {
                handle: c.handle,
                reason: RejectReason::OrderNotOpen,
                open: Lots::ZERO,
            }));
            return out.count();
        };
        let order = *self.slab.at(link);
        let side = order.side;
        let price = c.price.unwrap_or(order.price);
        let quantity = c.quantity.unwrap_or(order.quantity);
        let keeps_priority = price == order.price && quantity <= order.quantity;
        let crosses = !keeps_priority && self.ladder.crosses(side, price);
        if let Some(reason) = self.amend_refusal(&order, price, quantity, crosses) {
            out.emit(Event::AmendRejected(AmendRejected {
                handle: c.handle,
                reason,
                open: order.open,
            }));
            return out.count();
        }
        let filled = order.quantity - order.open;
        let mut amended = Order {
            price,
            open: quantity - filled,
            quantity,
            next: NIL,
            ..order
        };
        out.emit(Event::Amended(Amended {
            handle: c.handle,
            side,
            kept_priority: keeps_priority,
            price,
            quantity,
            open: amended.open,
        }));
        if keeps_priority {
            self.ladder.shrink(side, price, order.open - amended.open);
            let order = self.slab.at_mut(link);
            order.open = amended.open;
            order.quantity = quantity;
            return out.count();
        }
        self.slab.at_mut(link).end();
        self.unlink(link, &order);
        if crosses && !self.execute_amended(c.handle, &mut amended, &mut out) {
            return out.count();
        }
        self.rest(link, c.handle, amended, &mut out);
        out.count()
    }

    /// Matches an order that crosses at its new price. True when a remainder must rest.
    #[inline(never)]
    fn execute_amended<S: EventSink>(
        &mut self,
        handle: Handle,
        order: &mut Order,
        out: &mut Emitter<S>,
    ) -> bool {
        let mut taker = Taker {
            handle,
            side: order.side,
            limit: order.price,
            open: order.open,
            quantity: order.quantity,
            group: order.group,
            stp: order.stp,
        };
        let stop = self.take(&mut taker, out);
        (order.open, order.quantity) = (taker.open, taker.quantity);
        if taker.open.is_zero() {
            return false;
        }
        match stop {
            Stop::Limit => return true,
            Stop::SelfTrade => cancel_taker(handle, CancelReason::SelfTrade, taker.open, out),
            Stop::Velocity => {
                cancel_taker(handle, CancelReason::InstrumentHalted, taker.open, out);
                self.halt(out);
            }
        }
        false
    }

    #[inline(always)]
    fn amend_refusal(
        &self,
        order: &Order,
        price: Ticks,
        quantity: Lots,
        crosses: bool,
    ) -> Option<RejectReason> {
        if let Some(reason) = self.phase_refusal(crosses) {
            return Some(reason);
        }
        let filled = order.quantity - order.open;
        if quantity <= filled {
            return Some(RejectReason::InvalidAmend);
        }
        if quantity > Lots::ORDER_MAX {
            return Some(RejectReason::QuantityLot);
        }
        if price != order.price && !(1..=Ticks::ORDER_MAX.0).contains(&price.0) {
            return Some(RejectReason::PriceTick);
        }
        // An order outside a band that has moved may only shrink: growth counts as a new order.
        let only_shrinks = price == order.price && quantity <= order.quantity;
        if !only_shrinks && !self.spec.in_band(price) {
            return Some(RejectReason::PriceBand);
        }
        (order.post_only && crosses).then_some(RejectReason::PostOnly)
    }

    #[inline(always)]
    fn rest<S: EventSink>(
        &mut self,
        link: u32,
        handle: Handle,
        order: Order,
        out: &mut Emitter<S>,
    ) {
        self.link(link, order);
        out.emit(Event::Rested(Rested {
            handle,
            side: order.side,
            price: order.price,
            open: order.open,
        }));
    }
}

/// True when a market order's price limit does not exceed the band's far limit (T19).
///
/// The limit may be closer: the order's own price, or a price without matches if there is no
/// reference.
fn is_protected(spec: &InstrumentSpec, c: &New) -> bool {
    match c.side {
        Side::Buy => c.price <= spec.band_high,
        Side::Sell => c.price >= spec.band_low,
    }
}

/// Expiry time of an order; `NEVER` without one.
#[inline(always)]
fn expiry_of(c: &New) -> u64 {
    match c.time_in_force {
        TimeInForce::Gtd => c.expire_at_ns,
        TimeInForce::Gtc | TimeInForce::Ioc | TimeInForce::Fok => NEVER,
    }
}

/// The record of a new order to rest.
#[inline(always)]
fn resting(c: &New, open: Lots, quantity: Lots, expire_at_ns: u64) -> Order {
    Order {
        price: c.price,
        open,
        quantity,
        expire_at_ns,
        next: NIL,
        prev: NIL,
        generation: c.handle.generation,
        user: c.user,
        session: c.session,
        group: c.stp_group,
        side: c.side,
        stp: c.stp,
        post_only: c.post_only,
        live: false,
    }
}

#[inline(always)]
fn accept<S: EventSink>(c: &New, rests: bool, out: &mut Emitter<S>) {
    out.emit(Event::Accepted(Accepted {
        handle: c.handle,
        side: c.side,
        rests,
        price: c.price,
        open: c.quantity,
    }));
}

fn cancel_taker<S: EventSink>(
    handle: Handle,
    reason: CancelReason,
    quantity: Lots,
    out: &mut Emitter<S>,
) {
    out.emit(Event::Cancelled(Cancelled {
        handle,
        reason,
        quantity,
    }));
}
