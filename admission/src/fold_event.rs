//! How a book's events change the state: money spent, money returned to the hold, slots freed.
//!
//! The amount returned is always `before - after - spent`, with `after` from `reserve` and the open
//! quantity in the event (`design.md` 3). While amends of the order are in flight, the reserve
//! covers the worst of their outcomes. The last outcome returns the rest. So the state at a
//! sequence with all its events applied does not depend on how they interleaved with later
//! commands.

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
    /// Paid out of the order's reserve by this trade: main and fee.
    pub spent: Reserve,
    /// Returned to the hold: main and fee. Negative when the event needed more (an increasing amend
    /// that was applied late).
    pub returned: Reserve,
    /// True if the order has ended and its slot is free.
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

/// Receives an event's effects on orders; for a trade, the maker's first.
trait OrderObserver {
    fn on_order(&mut self, order: &OpenOrder, spent: Reserve, returned: Reserve, closed: bool);
}

impl OrderObserver for Effects {
    fn on_order(&mut self, order: &OpenOrder, spent: Reserve, returned: Reserve, closed: bool) {
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

/// Keeps only what reports need.
impl OrderObserver for Touched {
    #[inline(always)]
    fn on_order(&mut self, order: &OpenOrder, spent: Reserve, _: Reserve, _: bool) {
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
    fn fold(&mut self, envelope: &EventEnvelope, cause: &Cause, observer: &mut impl OrderObserver) {
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
        match &envelope.event {
            Event::Trade(e) => {
                let terms = instrument.spec.terms;
                self.trade(&terms, e, observer);
            }
            Event::Rejected(e) => self.close(e.handle, Reserve::ZERO, observer),
            Event::Cancelled(e) => self.close(e.handle, Reserve::ZERO, observer),
            Event::Reduced(e) => {
                let terms = instrument.spec.terms;
                let order = self.order_mut(e.handle);
                order.open = e.open;
                order.quantity -= e.quantity;
                if order.amends_pending == 0 {
                    order.quantity_worst = order.quantity;
                }
                self.settle(e.handle, &terms, Reserve::ZERO, observer);
            }
            Event::Amended(e) => {
                let terms = instrument.spec.terms;
                let order = self.order_mut(e.handle);
                order.price = e.price;
                order.quantity = e.quantity;
                order.open = e.open;
                if cause.new_client_order_id != 0 {
                    self.rename(e.handle, cause.new_client_order_id);
                }
                self.amend_done(e.handle, &terms, observer);
            }
            // The order may have ended before its amend arrived. Its reserve has been returned
            // already.
            Event::AmendRejected(e) if self.order(e.handle).is_none() => {}
            Event::AmendRejected(e) => {
                let terms = self.tables.instruments[envelope.instrument.index()]
                    .spec
                    .terms;
                self.amend_done(e.handle, &terms, observer);
            }
            // A book may halt by itself (F08). For a phase set by a command the event repeats that
            // phase.
            Event::PhaseChanged(e) => {
                let row = &mut self.tables.instruments[envelope.instrument.index()];
                row.spec.phase = e.phase;
            }
            Event::Accepted(_) | Event::Rested(_) | Event::CancelRejected(_) => {}
        }
    }

    fn trade(&mut self, terms: &Terms, e: &Trade, observer: &mut impl OrderObserver) {
        let maker = self.fill(terms, e.maker, e.price, e.quantity, e.maker_open, observer);
        let taker = self.fill(terms, e.taker, e.price, e.quantity, e.taker_open, observer);
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
        observer: &mut impl OrderObserver,
    ) -> Side {
        let order = self.order_mut(handle);
        let value = terms
            .value(price, quantity)
            .expect("a trade's value is below what was reserved for it");
        let fill_totals = order
            .fill_totals
            .after_trade(order.side, value, order.fee_rate);
        let spent = match order.side {
            Side::Buy => Reserve {
                main: value,
                fee: fill_totals.fee_minor - order.fill_totals.fee_minor,
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
        order.fill_totals = fill_totals;
        order.open = open_after;
        let side = order.side;
        if open_after.is_zero() {
            self.close(handle, spent, observer);
        } else {
            self.settle(handle, terms, spent, observer);
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

    /// Applies the outcome of an amend, executed or refused.
    fn amend_done(&mut self, handle: Handle, terms: &Terms, observer: &mut impl OrderObserver) {
        let order = self.order_mut(handle);
        order.amends_pending = order
            .amends_pending
            .checked_sub(1)
            .expect("an amend's outcome follows its command");
        if order.amends_pending == 0 {
            order.price_worst = order.price;
            order.quantity_worst = order.quantity;
        }
        self.settle(handle, terms, Reserve::ZERO, observer);
    }

    /// Sets the reserve of an order that stays open and returns the rest to its hold.
    fn settle(
        &mut self,
        handle: Handle,
        terms: &Terms,
        spent: Reserve,
        observer: &mut impl OrderObserver,
    ) {
        let order = self.order_mut(handle);
        let before = order.reserved;
        let formula = reserve(
            terms,
            order.side,
            order.price,
            order.open,
            order.fill_totals,
            order.fee_rate,
        )
        .expect("admission computed a reserve at least as large");
        let after = if order.amends_pending == 0 {
            formula
        } else {
            // Keeps what covers the worst outcome. Events that came early may have returned some of
            // it.
            Reserve {
                main: (before.main - spent.main).max(formula.main),
                fee: (before.fee - spent.fee).max(formula.fee),
            }
        };
        let returned = subtract(before, after, spent);
        order.reserved = after;
        observer.on_order(order, spent, returned, false);
        let hold = order.hold;
        move_money(self.hold_mut(hold), spent, returned);
    }

    /// Ends an order: returns all that it still reserves and frees its slot.
    fn close(&mut self, handle: Handle, spent: Reserve, observer: &mut impl OrderObserver) {
        let order = self.order_mut(handle);
        let returned = subtract(order.reserved, Reserve::ZERO, spent);
        order.reserved = Reserve::ZERO;
        order.amends_pending = 0;
        assert!(
            !returned.main.is_negative() && !returned.fee.is_negative(),
            "an order never spends more than it reserved"
        );
        observer.on_order(order, spent, returned, true);
        let (hold, instrument) = (order.hold, order.instrument);
        let (user, client_order_id) = (order.user, order.client_order_id);
        let (session, group) = (order.session, order.stp_group);
        let (budget, traded) = (order.budget, order.fill_totals.value_minor);
        self.tables.slots[handle.slot as usize].order = None;
        self.settle_budget(user, budget, traded);
        let balance = self.hold_mut(hold);
        move_money(balance, spent, returned);
        balance.open_orders -= 1;
        self.tables.instruments[instrument.index()].open_orders -= 1;
        self.tables.users[user.index()].open_orders -= 1;
        self.order_lists.remove(user, session, handle.slot);
        self.counts.remove(user, instrument);
        self.release_group(group);
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

    #[inline(always)]
    fn order_mut(&mut self, handle: Handle) -> &mut OpenOrder {
        self.tables.slots[handle.slot as usize]
            .order
            .as_mut()
            .filter(|order| order.handle == handle)
            .expect("an order's events end with its closing event")
    }
}

#[inline]
fn move_money(balance: &mut HoldBalance, spent: Reserve, returned: Reserve) {
    balance.reserved -= spent.total() + returned.total();
    balance.undrawn += returned.total();
    assert!(
        !balance.undrawn.is_negative() && !balance.reserved.is_negative(),
        "a hold's money covers what leaves it"
    );
}

#[inline]
fn subtract(before: Reserve, after: Reserve, spent: Reserve) -> Reserve {
    Reserve {
        main: before.main - after.main - spent.main,
        fee: before.fee - after.fee - spent.fee,
    }
}
