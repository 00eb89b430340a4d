//! Rows of the history that a batch of records changes. Borrows from the records: copies no order
//! and no text.

use replica::{Applied, Batch, Cause, Effect, Names, Order, Trade};
use types::command::RequestKind;
use types::{Handle, Id128, OrderStatus, OrderType, RejectReason, Sequence, Ticks};

use super::micros;
use super::rows::OrderRow;

/// An order after the last record of a batch.
#[derive(Clone, Copy)]
pub struct OrderChange<'a> {
    /// Sequence of the command that entered it.
    pub sequence: Sequence,
    /// The order entered in this batch, so that it has no row yet.
    pub is_new: bool,
    pub order: &'a Order,
    pub updated_ns: u64,
    /// Reason of the cancel or the refusal, else empty.
    pub reason: &'static str,
}

/// A trade and its command.
#[derive(Clone, Copy)]
pub struct NewTrade<'a> {
    pub sequence: Sequence,
    pub executed_ns: u64,
    pub trade: &'a Trade,
}

/// The answer to a call with an idempotency key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub key_hash: Id128,
    /// Sequence of its command; zero if it had none.
    pub sequence: Sequence,
    /// Sequence of the order that the call concerns; zero for none.
    pub order: Sequence,
    /// Number of orders that it cancelled.
    pub cancelled: u32,
    /// Why the book refused the requested change.
    pub refusal: Option<RejectReason>,
}

/// Rows that a batch writes.
#[derive(Default)]
pub struct Rows<'a> {
    /// One per order, by sequence.
    pub orders: Vec<OrderChange<'a>>,
    /// By command and event index.
    pub trades: Vec<NewTrade<'a>>,
    pub answers: Vec<Answer>,
}

impl<'a> Rows<'a> {
    pub fn of(batches: &'a [Batch]) -> Self {
        let mut rows = Self::default();
        for applied in batches.iter().flat_map(|batch| batch.iter()) {
            rows.add(applied);
        }
        // Stable: the last change of an order stays last.
        rows.orders.sort_by_key(|change| change.sequence);
        rows.orders.dedup_by(|later, earlier| {
            let is_same = later.sequence == earlier.sequence;
            if is_same {
                later.is_new |= earlier.is_new;
                *earlier = *later;
            }
            is_same
        });
        rows
    }

    fn add(&mut self, applied: &'a Applied) {
        let cause = &applied.cause;
        let mut answer = Answer {
            key_hash: cause.key_hash,
            sequence: cause.sequence,
            order: Sequence::ZERO,
            cancelled: 0,
            refusal: None,
        };
        for effect in &applied.effects {
            match effect {
                Effect::Accepted(order) => {
                    self.order(cause, order, true, "");
                    if cause.sequence == order.sequence {
                        answer.order = order.sequence;
                    }
                }
                Effect::Refused(order, _, reason) => {
                    self.order(cause, order, true, reason.as_str());
                    answer.order = order.sequence;
                }
                Effect::Rested(order) => self.order(cause, order, false, ""),
                Effect::Traded(trade) => {
                    self.order(cause, &trade.maker, false, "");
                    self.order(cause, &trade.taker, false, "");
                    self.trades.push(NewTrade {
                        sequence: cause.sequence,
                        executed_ns: cause.time_ns,
                        trade,
                    });
                }
                Effect::Amended { order, .. } | Effect::Reduced { order, .. } => {
                    self.order(cause, order, false, "");
                    answer.set_order(order);
                }
                Effect::Cancelled { order, reason, .. } => {
                    self.order(cause, order, false, reason.as_str());
                    answer.set_order(order);
                    answer.cancelled += 1;
                }
                Effect::ChangeRefused(reason) => answer.refusal = Some(*reason),
                Effect::User(..)
                | Effect::Instrument(_)
                | Effect::Session(_)
                | Effect::Hold(_)
                | Effect::Entered(_)
                | Effect::Settled { .. }
                | Effect::Bust(_) => {}
            }
        }
        // The answer to a call that may end many orders names none of them.
        if matches!(cause.request, RequestKind::MassCancel | RequestKind::Other) {
            answer.order = Sequence::ZERO;
        }
        if !cause.key_hash.is_none() {
            self.answers.push(answer);
        }
    }

    fn order(&mut self, cause: &Cause, order: &'a Order, is_new: bool, reason: &'static str) {
        self.orders.push(OrderChange {
            sequence: order.sequence,
            is_new,
            order,
            updated_ns: cause.time_ns,
            reason,
        });
    }
}

impl Answer {
    /// Names the order if the answer names none yet.
    fn set_order(&mut self, order: &Order) {
        if self.order == Sequence::ZERO {
            self.order = order.sequence;
        }
    }
}

impl<'a> OrderChange<'a> {
    /// The order as a record left it, if the record changed it.
    pub fn last(applied: &'a Applied, handle: Handle) -> Option<Self> {
        let mut rows = Rows::default();
        rows.add(applied);
        let mut changes = rows.orders.into_iter();
        changes.rfind(|change| change.order.handle == handle)
    }

    /// The order's row after the change. `client_order_id`: as in [`OrderRow`].
    pub fn row(&self, names: &Names, client_order_id: String) -> OrderRow {
        let order = self.order;
        let (spec, terms) = (names.instrument(order.instrument), &order.terms);
        OrderRow {
            order_id: order.id.to_string(),
            user_id: names.user(order.user).to_string(),
            instrument_id: spec.id.to_string(),
            side: order.side,
            order_type: terms.order_type,
            time_in_force: terms.time_in_force,
            post_only: terms.post_only,
            stp: terms.stp,
            expires_at_us: micros(terms.expire_at_ns),
            price: limit_price(terms.order_type, order.price).map(|price| spec.price(price)),
            quantity: spec.quantity(order.quantity),
            filled: spec.quantity(order.filled),
            value_minor: order.fill_totals.value_minor.0,
            status: self.status(),
            cancel_reason: self.reason.to_owned(),
            client_order_id,
            engine_order_id: order.handle.engine_id(),
            sequence: order.sequence.get(),
            created_at_us: micros(order.created_ns),
            updated_at_us: micros(self.updated_ns),
        }
    }

    pub fn status(&self) -> OrderStatus {
        match self.order.status {
            OrderStatus::Open if !self.order.filled.is_zero() => OrderStatus::PartiallyFilled,
            status => status,
        }
    }
}

/// The order's limit or protection price; `None` for a market order without one.
pub fn limit_price(order_type: OrderType, price: Ticks) -> Option<Ticks> {
    match order_type {
        OrderType::Market if price == Ticks::ZERO || price == Ticks::MAX => None,
        _ => Some(price),
    }
}
