//! Converts reports to messages of the protocol. The live path and resends from the journal share
//! [`message`], so that a message has the same bytes on both paths.

use admission::{Report, ReportBody};
use sequencer::Stamp;
use types::{Handle, NodeId, order_uuid, trade_uuid};
use wire::{
    Amended, CancelAllAfterSet, Cancelled, Fill, MassCancelled, OrderAck, Reduced, Rejected,
    ServerMessage, SettlementProgress, TradeBusted, TradingHoldChanged,
};

/// Fields that are common to the messages.
struct Head {
    node: NodeId,
    stamp: Stamp,
    client_seq: u64,
    client_order_id: u64,
    engine_order_id: u64,
    instrument: u32,
}

/// The numbered message of a report.
pub fn message(node: NodeId, stamp: &Stamp, report: &Report) -> ServerMessage {
    let head = Head {
        node,
        stamp: *stamp,
        client_seq: report.client_seq,
        client_order_id: report.client_order_id,
        engine_order_id: engine_id(report.handle),
        instrument: report.instrument.0,
    };
    match &report.body {
        body @ (ReportBody::Acknowledged { .. } | ReportBody::Rejected { .. }) => head.answer(body),
        body @ (ReportBody::Filled { .. } | ReportBody::Reduced { .. }) => head.change(body),
        body @ (ReportBody::HoldChanged { .. }
        | ReportBody::Settled { .. }
        | ReportBody::Busted { .. }) => head.money(body),
        body => head.end(body),
    }
}

impl Head {
    /// The outcome of a request.
    fn answer(&self, body: &ReportBody) -> ServerMessage {
        let Stamp {
            sequence,
            time_ns,
            received_ns,
        } = self.stamp;
        match *body {
            ReportBody::Acknowledged { side, price, open } => OrderAck {
                client_seq: self.client_seq,
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                order_id: order_uuid(time_ns, self.node, sequence),
                instrument: self.instrument,
                side,
                price_ticks: price.0,
                open_lots: open.0,
                node_sequence: sequence.0,
                time_ns,
                received_ns,
            }
            .into(),
            ReportBody::Rejected {
                request,
                reason,
                limit,
            } => Rejected {
                client_seq: self.client_seq,
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                request,
                reason,
                limit,
                node_sequence: sequence.0,
                time_ns,
                received_ns,
            }
            .into(),
            _ => unreachable!("the caller matched the kind"),
        }
    }

    /// The effect of other orders on an order.
    fn change(&self, body: &ReportBody) -> ServerMessage {
        let Stamp {
            sequence, time_ns, ..
        } = self.stamp;
        match *body {
            ReportBody::Filled {
                side,
                is_taker,
                index,
                trade_number,
                price,
                quantity,
                open,
                fee,
                counter,
            } => Fill {
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                instrument: self.instrument,
                trade_id: trade_uuid(time_ns, self.node, sequence, index),
                trade_number,
                side,
                aggressor: u8::from(is_taker),
                price_ticks: price.0,
                quantity_lots: quantity.0,
                open_lots: open.0,
                fee_minor: fee.0,
                counter_order_id: engine_id(counter),
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            ReportBody::Reduced {
                reason,
                quantity,
                open,
            } => Reduced {
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                instrument: self.instrument,
                reason,
                quantity_lots: quantity.0,
                open_lots: open.0,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            _ => unreachable!("the caller matched the kind"),
        }
    }

    /// The effect of funding and settlement.
    fn money(&self, body: &ReportBody) -> ServerMessage {
        let Stamp {
            sequence, time_ns, ..
        } = self.stamp;
        match *body {
            ReportBody::HoldChanged {
                asset,
                hold_id,
                undrawn,
                drawn,
                cause,
            } => TradingHoldChanged {
                asset: asset.get(),
                hold_id,
                undrawn_minor: undrawn.0,
                drawn_minor: drawn.0,
                cause,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            ReportBody::Settled {
                posted,
                finalized,
                trades_final,
            } => SettlementProgress {
                posted_sequence: posted.0,
                finalized_sequence: finalized.0,
                trades_final,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            ReportBody::Busted {
                trade,
                trade_number,
                side,
            } => TradeBusted {
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                instrument: self.instrument,
                trade_id: trade,
                trade_number,
                side,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            _ => unreachable!("the caller matched the kind"),
        }
    }

    /// The change or end of an order on request.
    fn end(&self, body: &ReportBody) -> ServerMessage {
        let Stamp {
            sequence,
            time_ns,
            received_ns,
        } = self.stamp;
        match *body {
            ReportBody::Cancelled { reason, quantity } => Cancelled {
                client_seq: self.client_seq,
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                instrument: self.instrument,
                reason,
                quantity_lots: quantity.0,
                node_sequence: sequence.0,
                time_ns,
                received_ns,
            }
            .into(),
            ReportBody::Amended {
                kept_priority,
                price,
                quantity,
                open,
            } => Amended {
                client_seq: self.client_seq,
                client_order_id: self.client_order_id,
                engine_order_id: self.engine_order_id,
                instrument: self.instrument,
                price_ticks: price.0,
                quantity_lots: quantity.0,
                open_lots: open.0,
                kept_priority: u8::from(kept_priority),
                node_sequence: sequence.0,
                time_ns,
                received_ns,
            }
            .into(),
            ReportBody::MassCancelled { count, remaining } => MassCancelled {
                client_seq: self.client_seq,
                instrument: self.instrument,
                count,
                remaining,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            ReportBody::CancelAllAfter { at_ns } => CancelAllAfterSet {
                client_seq: self.client_seq,
                cancel_all_at_ns: at_ns,
                node_sequence: sequence.0,
                time_ns,
            }
            .into(),
            _ => unreachable!("the caller matched the kind"),
        }
    }
}

/// The order's id on the wire, 0 for none.
fn engine_id(handle: Handle) -> u64 {
    match handle.is_none() {
        true => 0,
        false => handle.engine_id(),
    }
}
