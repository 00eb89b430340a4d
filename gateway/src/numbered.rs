//! Which messages the facts of a record become, and for whom: the numbered stream of a session is this function over the journal.
//!
//! Reports of an order go to the session that entered it. A cancel or amend asked for by another session of the same user is told to that session
//! too, with its own client sequence. Orders without session (RPC) have no stream.

use types::command::RequestKind;
use types::{Handle, Lots, Minor, RejectReason, SessionIx, Side};
use wire::{Amended, Cancelled, Fill, MassCancelled, OrderAck, Reduced, Rejected, ServerMessage};

use crate::fold::{Cause, Fact, Order, Trade};

/// Gives every message of a fact to `emit`, in order.
pub fn messages(cause: &Cause, fact: &Fact, mut emit: impl FnMut(SessionIx, ServerMessage)) {
    let mut tell = |session: SessionIx, message: ServerMessage| {
        if !session.is_none() {
            emit(session, message);
        }
    };
    match fact {
        Fact::Entered(order) => tell(order.session, ack(cause, order).into()),
        Fact::Refused(order, reason) => {
            let message = rejected(
                cause,
                order.handle,
                order.client_order_id,
                RequestKind::New,
                *reason,
            );
            tell(order.session, message.into());
        }
        Fact::Traded(trade) => {
            for (order, other) in [(&trade.maker, &trade.taker), (&trade.taker, &trade.maker)] {
                tell(order.session, fill(cause, trade, order, other).into());
            }
        }
        Fact::Amended {
            order,
            kept_priority,
        } => both(cause, order, RequestKind::Amend, |session, client_seq| {
            let message = amended(cause, order, *kept_priority, client_seq);
            tell(session, message.into());
        }),
        Fact::Cancelled {
            order,
            quantity,
            reason,
        } => both(cause, order, RequestKind::Cancel, |session, client_seq| {
            let message = Cancelled {
                client_seq,
                client_order_id: order.client_order_id,
                engine_order_id: order.handle.engine_id(),
                instrument: order.instrument.get(),
                reason: *reason,
                quantity_lots: quantity.0,
                node_sequence: cause.sequence.0,
                time_ns: cause.time_ns,
            };
            tell(session, message.into());
        }),
        Fact::Reduced {
            order,
            quantity,
            reason,
        } => {
            let message = Reduced {
                client_order_id: order.client_order_id,
                engine_order_id: order.handle.engine_id(),
                instrument: order.instrument.get(),
                reason: *reason,
                quantity_lots: quantity.0,
                open_lots: order.open.0,
                node_sequence: cause.sequence.0,
                time_ns: cause.time_ns,
            };
            tell(order.session, message.into());
        }
        Fact::RequestRefused {
            request,
            handle,
            client_order_id,
            reason,
        } => {
            let message = rejected(cause, *handle, *client_order_id, *request, *reason);
            tell(cause.session, message.into());
        }
        Fact::MassCancelled { instrument, count } => {
            let message = MassCancelled {
                client_seq: cause.client_seq,
                instrument: instrument.get(),
                count: *count,
                node_sequence: cause.sequence.0,
                time_ns: cause.time_ns,
            };
            tell(cause.session, message.into());
        }
        Fact::User(..)
        | Fact::Instrument(_)
        | Fact::Session(_)
        | Fact::Pool(_)
        | Fact::PoolIdle(_)
        | Fact::Rested(_) => {}
    }
}

/// The order's session, and the session that asked when it is another one. The client sequence names a request of the session that is told.
fn both(cause: &Cause, order: &Order, request: RequestKind, mut tell: impl FnMut(SessionIx, u64)) {
    let asked = cause.request == request;
    if asked && cause.session == order.session {
        tell(order.session, cause.client_seq);
        return;
    }
    tell(order.session, 0);
    if asked {
        tell(cause.session, cause.client_seq);
    }
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
