//! New orders and amends: what the book refuses, what enters, what loses its place.

use types::command::{Amend, New};
use types::event::{Accepted, AmendRejected, Amended, Cancelled, Event, Rejected, Rested};
use types::{CancelReason, Handle, Lots, OrderType, Phase, RejectReason, Side, Ticks, TimeInForce};

use crate::book::Book;
use crate::matching::{Stop, Taker};
use crate::sink::{Emitter, EventSink};
use crate::slab::{NEVER, Order};

impl Book {
    pub(crate) fn new_order<S: EventSink>(&mut self, c: &New, out: &mut Emitter<S>) {
        assert!(
            self.slab.is_free(c.handle.slot) && !c.handle.is_none(),
            "admission gave away a taken slot"
        );
        self.expire_due(out);
        if let Some(reason) = self.refusal(c, out.time_ns()) {
            out.emit(Event::Rejected(Rejected {
                handle: c.handle,
                reason,
            }));
            return;
        }
        out.emit(Event::Accepted(Accepted {
            handle: c.handle,
            side: c.side,
            price: c.price,
            open: c.quantity,
        }));
        let mut taker = Taker {
            handle: c.handle,
            side: c.side,
            limit: c.price,
            open: c.quantity,
            quantity: c.quantity,
            group: c.stp_group,
            stp: c.stp,
        };
        if c.time_in_force == TimeInForce::Fok && !self.can_fill(&taker) {
            let empty = self.best(c.side.opposite()).is_none();
            let reason = if c.order_type == OrderType::Market && empty {
                CancelReason::NoLiquidity
            } else {
                CancelReason::FokNotFillable
            };
            return cancel_taker(c.handle, reason, c.quantity, out);
        }
        let stop = self.take(&mut taker, out);
        if taker.open.is_zero() {
            return;
        }
        let reason = match stop {
            Stop::SelfTrade => CancelReason::SelfTrade,
            Stop::Limit if c.time_in_force.rests() => {
                let expire_at_ns = if c.time_in_force == TimeInForce::Gtd {
                    c.expire_at_ns
                } else {
                    NEVER
                };
                let order = Order {
                    price: c.price,
                    open: taker.open,
                    quantity: taker.quantity,
                    expire_at_ns,
                    next: 0,
                    prev: 0,
                    generation: c.handle.generation,
                    user: c.user,
                    session: c.session,
                    group: c.stp_group,
                    side: c.side,
                    stp: c.stp,
                    post_only: c.post_only,
                    live: true,
                };
                return self.rest(c.handle.slot, order, out);
            }
            // T19: a market order that met nobody says so.
            Stop::Limit if c.order_type == OrderType::Market && taker.open == c.quantity => {
                CancelReason::NoLiquidity
            }
            Stop::Limit => CancelReason::IocRemainder,
        };
        cancel_taker(c.handle, reason, taker.open, out);
    }

    /// Why a new order may not enter, checked before anything happens.
    fn refusal(&self, c: &New, time_ns: u64) -> Option<RejectReason> {
        let crosses = self.crosses(c.side, c.price);
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
            OrderType::Limit | OrderType::Market => {}
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

    /// Why the phase keeps an order out; `trades` = it would not simply rest.
    fn phase_refusal(&self, trades: bool) -> Option<RejectReason> {
        match self.spec.phase {
            Phase::Open => None,
            Phase::PreOpen if trades => Some(RejectReason::InstrumentPreOpen),
            Phase::PreOpen => None,
            Phase::Halt | Phase::Closed => Some(RejectReason::InstrumentHalted),
            Phase::Matured => Some(RejectReason::InstrumentMatured),
        }
    }

    pub(crate) fn amend<S: EventSink>(&mut self, c: &Amend, out: &mut Emitter<S>) {
        self.expire_due(out);
        let Some(order) = self.slab.get(c.handle).copied() else {
            out.emit(Event::AmendRejected(AmendRejected {
                handle: c.handle,
                reason: RejectReason::OrderNotOpen,
                open: Lots::ZERO,
            }));
            return;
        };
        let price = c.price.unwrap_or(order.price);
        let quantity = c.quantity.unwrap_or(order.quantity);
        let keeps_priority = price == order.price && quantity <= order.quantity;
        if let Some(reason) = self.amend_refusal(&order, price, quantity, keeps_priority) {
            out.emit(Event::AmendRejected(AmendRejected {
                handle: c.handle,
                reason,
                open: order.open,
            }));
            return;
        }
        let filled = order.quantity - order.open;
        let open = quantity - filled;
        out.emit(Event::Amended(Amended {
            handle: c.handle,
            side: order.side,
            kept_priority: keeps_priority,
            price,
            quantity,
            open,
        }));
        if keeps_priority {
            let level = self.ladder.level_mut(order.side, order.price);
            level.open -= order.open - open;
            let order = self.slab.at_mut(c.handle.slot);
            order.open = open;
            order.quantity = quantity;
            return;
        }
        self.unlink(c.handle.slot);
        let mut taker = Taker {
            handle: c.handle,
            side: order.side,
            limit: price,
            open,
            quantity,
            group: order.group,
            stp: order.stp,
        };
        let stop = self.take(&mut taker, out);
        if taker.open.is_zero() {
            return;
        }
        match stop {
            Stop::SelfTrade => cancel_taker(c.handle, CancelReason::SelfTrade, taker.open, out),
            Stop::Limit => {
                let order = Order {
                    price,
                    open: taker.open,
                    quantity: taker.quantity,
                    ..order
                };
                self.rest(c.handle.slot, order, out);
            }
        }
    }

    fn amend_refusal(
        &self,
        order: &Order,
        price: Ticks,
        quantity: Lots,
        keeps_priority: bool,
    ) -> Option<RejectReason> {
        let crosses = !keeps_priority && self.crosses(order.side, price);
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
        if price != order.price {
            if !(1..=Ticks::ORDER_MAX.0).contains(&price.0) {
                return Some(RejectReason::PriceTick);
            }
            if !self.spec.in_band(price) {
                return Some(RejectReason::PriceBand);
            }
        }
        (order.post_only && crosses).then_some(RejectReason::PostOnly)
    }

    fn rest<S: EventSink>(&mut self, slot: u32, order: Order, out: &mut Emitter<S>) {
        self.link(
            slot,
            Order {
                live: false,
                ..order
            },
        );
        out.emit(Event::Rested(Rested {
            handle: Handle {
                slot,
                generation: order.generation,
            },
            side: order.side,
            price: order.price,
            open: order.open,
        }));
    }

    /// True when an order of this side and limit would meet the other side.
    #[inline]
    pub(crate) fn crosses(&self, side: Side, limit: Ticks) -> bool {
        match side {
            Side::Buy => self.ladder.best[1] <= limit && self.ladder.best[1].0 != i64::MAX,
            Side::Sell => self.ladder.best[0] >= limit && self.ladder.best[0].0 != i64::MIN,
        }
    }
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
