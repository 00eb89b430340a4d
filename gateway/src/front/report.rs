//! Reports as messages of the protocol. The live path and resends from the journal use this function
//! alone, so a message has the same bytes wherever it is made.

use admission::{Report, ReportBody};
use sequencer::Stamp;
use types::{Handle, InstrumentIx, NodeId, order_uuid, trade_uuid};
use wire::{Amended, Cancelled, Fill, MassCancelled, OrderAck, Reduced, Rejected, ServerMessage};

/// The numbered message of a report.
pub fn message(node: NodeId, stamp: &Stamp, report: &Report) -> ServerMessage {
    let Stamp {
        sequence,
        time_ns,
        received_ns,
    } = *stamp;
    let node_sequence = sequence.0;
    let (client_seq, client_order_id) = (report.client_seq, report.client_order_id);
    let engine_order_id = engine_id(report.handle);
    let InstrumentIx(instrument) = report.instrument;
    match report.body {
        ReportBody::Acknowledged { side, price, open } => OrderAck {
            client_seq,
            client_order_id,
            engine_order_id,
            order_id: order_uuid(time_ns, node, sequence),
            instrument,
            side,
            price_ticks: price.0,
            open_lots: open.0,
            node_sequence,
            time_ns,
            received_ns,
        }
        .into(),
        ReportBody::Rejected { request, reason } => Rejected {
            client_seq,
            client_order_id,
            engine_order_id,
            request,
            reason,
            node_sequence,
            time_ns,
            received_ns,
        }
        .into(),
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
            client_order_id,
            engine_order_id,
            instrument,
            trade_id: trade_uuid(time_ns, node, sequence, index),
            trade_number,
            side,
            aggressor: u8::from(is_taker),
            price_ticks: price.0,
            quantity_lots: quantity.0,
            open_lots: open.0,
            fee_minor: fee.0,
            counter_order_id: engine_id(counter),
            node_sequence,
            time_ns,
        }
        .into(),
        ReportBody::Cancelled { reason, quantity } => Cancelled {
            client_seq,
            client_order_id,
            engine_order_id,
            instrument,
            reason,
            quantity_lots: quantity.0,
            node_sequence,
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
            client_seq,
            client_order_id,
            engine_order_id,
            instrument,
            price_ticks: price.0,
            quantity_lots: quantity.0,
            open_lots: open.0,
            kept_priority: u8::from(kept_priority),
            node_sequence,
            time_ns,
            received_ns,
        }
        .into(),
        ReportBody::Reduced {
            reason,
            quantity,
            open,
        } => Reduced {
            client_order_id,
            engine_order_id,
            instrument,
            reason,
            quantity_lots: quantity.0,
            open_lots: open.0,
            node_sequence,
            time_ns,
        }
        .into(),
        ReportBody::MassCancelled { count } => MassCancelled {
            client_seq,
            instrument,
            count,
            node_sequence,
            time_ns,
        }
        .into(),
    }
}

/// The order's number on the wire, 0 for none.
fn engine_id(handle: Handle) -> u64 {
    match handle.is_none() {
        true => 0,
        false => handle.engine_id(),
    }
}
