//! The answer to PlaceOrder: the order as its record left it, whether the history has it or not.

use sequencer::Record;
use types::command::{Command, New};
use types::event::Event;
use types::{InstrumentSpec, Lots, Minor, OrderStatus, order_uuid};

use crate::market::Market;
use crate::projection::batch::limit;
use crate::projection::micros;
use crate::projection::rows::OrderRow;

/// The order that a record entered, as the history will have it after this record.
pub fn entered(
    market: &Market,
    spec: &InstrumentSpec,
    user_id: &str,
    client_order_id: &str,
    record: &Record,
) -> OrderRow {
    let envelope = &record.command;
    let Command::New(c) = &envelope.command else {
        unreachable!("the record of a new order is a New command");
    };
    let state = State::after(spec, c, record);
    let created_at_us = micros(envelope.time_ns);
    OrderRow {
        order_id: order_uuid(envelope.time_ns, market.node, envelope.sequence).to_string(),
        user_id: user_id.to_owned(),
        instrument_id: spec.id.as_str().to_owned(),
        side: c.side,
        order_type: c.order_type,
        time_in_force: c.time_in_force,
        post_only: c.post_only,
        stp: c.stp,
        expires_at_us: micros(c.expire_at_ns),
        price: limit(c.order_type, c.price).map(|price| spec.price(price)),
        quantity: spec.quantity(state.quantity),
        filled: spec.quantity(state.filled),
        value_minor: state.value.0,
        status: state.status,
        cancel_reason: state.reason.to_owned(),
        client_order_id: client_order_id.to_owned(),
        engine_order_id: c.handle.engine_id(),
        sequence: envelope.sequence.get(),
        created_at_us,
        updated_at_us: created_at_us,
    }
}

struct State {
    quantity: Lots,
    filled: Lots,
    value: Minor,
    status: OrderStatus,
    reason: &'static str,
}

impl State {
    fn after(spec: &InstrumentSpec, c: &New, record: &Record) -> Self {
        let mut state = Self {
            quantity: c.quantity,
            filled: Lots::ZERO,
            value: Minor::ZERO,
            status: OrderStatus::Open,
            reason: "",
        };
        for event in &record.events {
            match &event.event {
                Event::Trade(e) if e.taker == c.handle => {
                    let value = spec.terms.value(e.price, e.quantity);
                    state.value += value.expect("a trade's value was reserved");
                    state.filled += e.quantity;
                    state.status = match e.taker_open.is_zero() {
                        true => OrderStatus::Filled,
                        false => OrderStatus::PartiallyFilled,
                    };
                }
                Event::Reduced(e) if e.handle == c.handle => {
                    state.quantity -= e.quantity;
                }
                Event::Cancelled(e) if e.handle == c.handle => {
                    (state.status, state.reason) = (OrderStatus::Cancelled, e.reason.as_str());
                }
                Event::Rejected(e) if e.handle == c.handle => {
                    (state.status, state.reason) = (OrderStatus::Rejected, e.reason.as_str());
                }
                _ => {}
            }
        }
        state
    }
}
