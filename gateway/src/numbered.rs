//! Which messages the effects of a record become: the numbered stream of a session is this function over the journal. Who is told, and under which number, the
//! replica says.

use replica::{Cause, Effect, Order, Recipient, Told, Trade};
use types::command::RequestKind;
use types::{Handle, Lots, Minor, RejectReason, Side};
use wire::{Amended, Cancelled, Fill, MassCancelled, OrderAck, Reduced, Rejected, ServerMessage};

/// Gives every message of an effect to `emit`, in order.
pub fn messages(cause: &Cause, told: &Told, mut emit: impl FnMut(Recipient, ServerMessage)) {
    for (at, to) in told.to.iter().enumerate() {
        if let Some(to) = to
            && let Some(message) = message(cause, &told.effect, at, to.client_seq)
        {
            emit(*to, message);
        }
    }
}

/// What the recipient at this place is told.
fn message(cause: &Cause, effect: &Effect, at: usize, client_seq: u64) -> Option<ServerMessage> {
    Some(match effect {
        Effect::Accepted(order) => ack(cause, order).into(),
        Effect::Refused(o, _, reason) => refused(cause, o, *reason).into(),
        Effect::Traded(trade) => {
            let (order, other) = match at {
                0 => (&trade.maker, &trade.taker),
                _ => (&trade.taker, &trade.maker),
            };
            fill(cause, trade, order, other).into()
        }
        Effect::Amended {
            order,
            kept_priority,
            ..
        } => amended(cause, order, *kept_priority, client_seq).into(),
        Effect::Cancelled {
            order,
            quantity,
            reason,
            ..
        } => Cancelled {
            client_seq,
            client_order_id: order.client_order_id,
            engine_order_id: order.handle.engine_id(),
            instrument: order.instrument.get(),
            reason: *reason,
            quantity_lots: quantity.0,
            node_sequence: cause.sequence.0,
            time_ns: cause.time_ns,
        }
        .into(),
        Effect::Reduced {
            order,
            quantity,
            reason,
            ..
        } => Reduced {
            client_order_id: order.client_order_id,
            engine_order_id: order.handle.engine_id(),
            instrument: order.instrument.get(),
            reason: *reason,
            quantity_lots: quantity.0,
            open_lots: order.open.0,
            node_sequence: cause.sequence.0,
            time_ns: cause.time_ns,
        }
        .into(),
        Effect::RequestRefused {
            request,
            handle,
            client_order_id,
            reason,
        } => rejected(cause, *handle, *client_order_id, *request, *reason).into(),
        Effect::MassCancelled { instrument, count } => MassCancelled {
            client_seq: cause.client_seq,
            instrument: instrument.get(),
            count: *count,
            node_sequence: cause.sequence.0,
            time_ns: cause.time_ns,
        }
        .into(),
        Effect::User(..)
        | Effect::Instrument(_)
        | Effect::Session(_)
        | Effect::Hold(_)
        | Effect::Entered(_)
        | Effect::Rested(_)
        | Effect::Settled { .. }
        | Effect::Bust(_) => return None,
    })
}

fn ack(cause: &Cause, order: &Order) -> OrderAck {
    OrderAck {
        client_seq: cause.client_seq,
        client_order_id: order.client_order_id,
        engine_order_id: order.handle.engine_id(),
        order_id: order.id,
        instrument: order.instrument.get(),
        side: order.side,
        price_ticks: order.price.0,
        open_lots: order.open.0,
        node_sequence: cause.sequence.0,
        time_ns: cause.time_ns,
    }
}

fn refused(cause: &Cause, order: &Order, reason: RejectReason) -> Rejected {
    let (handle, id) = (order.handle, order.client_order_id);
    rejected(cause, handle, id, RequestKind::New, reason)
}

fn fill(cause: &Cause, trade: &Trade, order: &Order, other: &Order) -> Fill {
    let fee = match order.side {
        Side::Buy => trade.fee_minor,
        Side::Sell => Minor::ZERO,
    };
    Fill {
        client_order_id: order.client_order_id,
        engine_order_id: order.handle.engine_id(),
        instrument: trade.instrument.get(),
        trade_id: trade.id,
        trade_number: trade.number,
        side: order.side,
        aggressor: u8::from(order.handle == trade.taker.handle),
        price_ticks: trade.price.0,
        quantity_lots: trade.quantity.0,
        open_lots: order.open.0,
        fee_minor: fee.0,
        counter_order_id: other.handle.engine_id(),
        node_sequence: cause.sequence.0,
        time_ns: cause.time_ns,
    }
}

fn amended(cause: &Cause, order: &Order, kept_priority: bool, client_seq: u64) -> Amended {
    let Lots(quantity_lots) = order.quantity;
    Amended {
        client_seq,
        client_order_id: order.client_order_id,
        engine_order_id: order.handle.engine_id(),
        instrument: order.instrument.get(),
        price_ticks: order.price.0,
        quantity_lots,
        open_lots: order.open.0,
        kept_priority: u8::from(kept_priority),
        node_sequence: cause.sequence.0,
        time_ns: cause.time_ns,
    }
}

fn rejected(
    cause: &Cause,
    handle: Handle,
    client_order_id: u64,
    request: RequestKind,
    reason: RejectReason,
) -> Rejected {
    Rejected {
        client_seq: cause.client_seq,
        client_order_id,
        engine_order_id: if handle.is_none() {
            0
        } else {
            handle.engine_id()
        },
        request,
        reason,
        node_sequence: cause.sequence.0,
        time_ns: cause.time_ns,
    }
}
