//! How a book's events change the state: money spent, money returned to the pool, slots freed.
//!
//! A return is always before - after - spent, with `after` from `reserve` and the open quantity in
//! the event (`design.md` 3). While amends of the order are in flight nothing is returned: the
//! reserve covers the worst of their outcomes. The last outcome settles it, so the state at a
//! sequence with all its events applied is the same, however they interleaved with later commands.

use types::command::Cause;
use types::event::{Event, Trade};
use types::{EventEnvelope, Handle, Lots, Minor, Reserve, Side, Terms, Ticks, reserve};

use crate::admission::Admission;
use crate::report::{Brief, ReportSink, Touched};
use crate::state::{HoldBalance, OpenOrder};

/// Effect of one event on one order's money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The order after the event.
    pub order: OpenOrder,
    /// Paid out of its reserve by this trade: main and fee.
    pub spent: Reserve,
    /// Returned to the pool, part by part; negative when the event needed more (an amend up that
    /// was applied late).
    pub returned: Reserve,
    /// The order has ended and its slot is free.
    pub closed: bool,
}

/// Effects of one event: on the order it names, or on maker and taker of a trade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    pub order: Option<Effect>,
    pub taker: Option<Effect>,
}

impl Effects {
    pub fn iter(&self) -> impl Iterator<Item = &Effect> {
        self.order.iter().chain(self.taker.iter())
    }
}

/// Observer of an event's effect on an order; of a trade, the maker comes first.
trait Hear {
    fn hear(&mut self, order: &OpenOrder, spent: Reserve, returned: Reserve, closed: bool);
}

impl Hear for Effects {
    fn hear(&mut self, order: &OpenOrder, spent: Reserve, returned: Reserve, closed: bool) {
        let place = if self.order.is_none() {
            &mut self.order
        } else {
            &mut self.taker
        };
        *place = Some(Effect {
            order: *order,
            spent,
            returned,
            closed,
        });
    }
}

/// Only what reports need.
impl Hear for Touched {
    #[inline(always)]
    fn hear(&mut self, order: &OpenOrder, spent: Reserve, _: Reserve, _: bool) {
        let brief = Some(Brief::of(order, spent));
        match self.order {
            None => self.order = brief,
            Some(_) => self.taker = brief,
        }
    }
}

impl Admission {
    /// Applies the next event of its instrument, numbers its messages, and returns its effects on
    /// orders and money. `cause` is its command.
    ///
    /// # Panics
    /// A gap in the instrument's event numbers, or an event of a command that was not applied.
    pub fn apply_event(
        &mut self,
        envelope: &EventEnvelope,
        cause: &Cause,
        to: &mut impl ReportSink,
    ) -> Effects {
        let mut effects = Effects::default();
        self.fold(envelope, cause, &mut effects);
        let brief = |effect: &Effect| Brief::of(&effect.order, effect.spent);
        let touched = Touched {
            order: effects.order.as_ref().map(brief),
            taker: effects.taker.as_ref().map(brief),
        };
        self.report_event(envelope, cause, &touched, to);
        effects
    }

    /// As [`Admission::apply_event`], without copies of the effects.
    #[inline]
    pub fn apply_event_brief(
        &mut self,
        envelope: &EventEnvelope,
        cause: &Cause,
        to: &mut impl ReportSink,
    ) {
        let mut touched = Touched::default();
        self.fold(envelope, cause, &mut touched);
        self.report_event(envelope, cause, &touched, to);
    }

    #[inline]
    fn fold(&mut self, envelope: &EventEnvelope, cause: &Cause, heard: &mut impl Hear) {
        assert!(
            envelope.sequence <= self.tables.sequence,
            "events follow their command"
        );
        let instrument = &mut self.tables.instruments[envelope.instrument.index()];
        assert_eq!(
            envelope.number,
            instrument.event_number + 1,
            "events of an instrument come without gap"
        );
        instrument.event_number = envelope.number;
        let terms = instrument.spec.terms;
        match &envelope.event {
            Event::Trade(e) => self.trade(&terms, e, heard),
            Event::Rejected(e) => self.close(e.handle, Reserve::ZERO, heard),
            Event::Cancelled(e) => self.close(e.handle, Reserve::ZERO, heard),
            Event::Reduced(e) => {
                let order = self.order_mut(e.handle);
                order.open = e.open;
                order.quantity -= e.quantity;
                if order.amends_pending == 0 {
                    order.quantity_worst = order.quantity;
                }
                self.settle(e.handle, &terms, Reserve::ZERO, heard);
            }
            Event::Amended(e) => {
                let order = self.order_mut(e.handle);
                order.price = e.price;
                order.quantity = e.quantity;
                order.open = e.open;
                if cause.new_client_order_id != 0 {
                    self.rename(e.handle, cause.new_client_order_id);
                }
                self.amend_done(e.handle, &terms, heard);
            }
            // The order may have ended before its amend arrived: everything has been returned
            // already.
            Event::AmendRejected(e) if self.order(e.handle).is_none() => {}
            Event::AmendRejected(e) => self.amend_done(e.handle, &terms, heard),
            // A book may halt by itself (F08). A phase set by a command comes back unchanged.
            Event::PhaseChanged(e) => {
                let row = &mut self.tables.instruments[envelope.instrument.index()];
                row.spec.phase = e.phase;
            }
            Event::Accepted(_) | Event::Rested(_) | Event::CancelRejected(_) => {}
        }
    }

    fn trade(&mut self, terms: &Terms, e: &Trade, heard: &mut impl Hear) {
        let maker = self.fill(terms, e.maker, e.price, e.quantity, e.maker_open, heard);
        let taker = self.fill(terms, e.taker, e.price, e.quantity, e.taker_open, heard);
        assert_ne!(maker, taker, "a trade has two sides");
    }

    /// Applies a trade to one order; returns its side.
    fn fill(
        &mut self,
        terms: &Terms,
        handle: Handle,
        price: Ticks,
        quantity: Lots,
        open_after: Lots,
        heard: &mut impl Hear,
    ) -> Side {
        let order = self.order_mut(handle);
        let value = terms
            .value(price, quantity)
            .expect("a trade's value is below what was reserved for it");
        let done = order.done.after_trade(order.side, value, order.fee_rate);
        let spent = match order.side {
            Side::Buy => Reserve {
                main: value,
                fee: done.fee_minor - order.done.fee_minor,
            },
            Side::Sell => Reserve {
                main: terms
                    .units(quantity)
                    .expect("units of a trade are below what was reserved for it"),
                fee: Minor::ZERO,
            },
        };
        assert_eq!(
            order.open - quantity,
            open_after,
            "the event carries the open quantity after it"
        );
        order.done = done;
        order.open = open_after;
        let side = order.side;
        if open_after.is_zero() {
            self.close(handle, spent, heard);
        } else {
            self.settle(handle, terms, spent, heard);
        }
        side
    }

    /// Changes an order's client order id. The id was free when the amend was admitted, and no
    /// order or amend was admitted since.
    #[cold]
    fn rename(&mut self, handle: Handle, id: u64) {
        let order = self.order_mut(handle);
        let (user, before) = (
            order.user,
            core::mem::replace(&mut order.client_order_id, id),
        );
        if before != 0 {
            self.client_ids.remove(user, before, handle.slot);
        }
        self.client_ids.insert(user, id, handle.slot);
    }

    /// An amend was executed or refused.
    fn amend_done(&mut self, handle: Handle, terms: &Terms, heard: &mut impl Hear) {
        let order = self.order_mut(handle);
        order.amends_pending = order
            .amends_pending
            .checked_sub(1)
            .expect("an amend's outcome follows its command");
        if order.amends_pending == 0 {
            order.price_worst = order.price;
            order.quantity_worst = order.quantity;
        }
        self.settle(handle, terms, Reserve::ZERO, heard);
    }

    /// Sets the reserve of an order that stays open and returns the rest to its pool.
    fn settle(&mut self, handle: Handle, terms: &Terms, spent: Reserve, heard: &mut impl Hear) {
        let order = self.order_mut(handle);
        let before = order.reserved;
        let formula = reserve(
            terms,
            order.side,
            order.price,
            order.open,
            order.done,
            order.fee_rate,
        )
        .expect("admission computed a reserve at least as large");
        let after = if order.amends_pending == 0 {
            formula
        } else {
            // Keeps what covers the worst outcome; events that came early may have returned some of
            // it.
            Reserve {
                main: (before.main - spent.main).max(formula.main),
                fee: (before.fee - spent.fee).max(formula.fee),
            }
        };
        let returned = less(before, after, spent);
        order.reserved = after;
        heard.hear(order, spent, returned, false);
        let pool = order.pool;
        move_money(self.pool_mut(pool), spent, returned);
    }

    /// Ends an order: returns all that it still reserves and frees its slot.
    fn close(&mut self, handle: Handle, spent: Reserve, heard: &mut impl Hear) {
        let order = self.order_mut(handle);
        let returned = less(order.reserved, Reserve::ZERO, spent);
        order.reserved = Reserve::ZERO;
        order.amends_pending = 0;
        assert!(
            !returned.main.is_negative() && !returned.fee.is_negative(),
            "an order never spends more than it reserved"
        );
        heard.hear(order, spent, returned, true);
        let (pool, instrument) = (order.pool, order.instrument);
        let (user, client_order_id) = (order.user, order.client_order_id);
        let session = order.session;
        self.tables.slots[handle.slot as usize].order = None;
        let pool = self.pool_mut(pool);
        move_money(pool, spent, returned);
        pool.open_orders -= 1;
        self.tables.instruments[instrument.index()].open_orders -= 1;
        self.tables.users[user.index()].open_orders -= 1;
        self.linked.remove(user, session, handle.slot);
        self.counts.take_away(user, instrument);
        if let Some(row) = self.tables.sessions.get_mut(session.index()) {
            row.open_orders -= 1;
        }
        if handle.generation < u32::MAX {
            // A slot whose generations are used up is retired.
            self.slots.free(handle.slot);
        }
        if client_order_id != 0 {
            self.client_ids.remove(user, client_order_id, handle.slot);
        }
    }

    fn order_mut(&mut self, handle: Handle) -> &mut OpenOrder {
        self.tables.slots[handle.slot as usize]
            .order
            .as_mut()
            .filter(|order| order.handle == handle)
            .expect("an order's events end with its closing event")
    }
}

#[inline]
fn move_money(pool: &mut HoldBalance, spent: Reserve, returned: Reserve) {
    pool.reserved -= spent.total() + returned.total();
    pool.free += returned.total();
    assert!(
        !pool.free.is_negative() && !pool.reserved.is_negative(),
        "a pool's money covers what leaves it"
    );
}

#[inline]
fn less(before: Reserve, after: Reserve, spent: Reserve) -> Reserve {
    Reserve {
        main: before.main - after.main - spent.main,
        fee: before.fee - after.fee - spent.fee,
    }
}
