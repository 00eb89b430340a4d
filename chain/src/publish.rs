//! Builds the events of the topic `platform.chain.events.v1`.
//!
//! A block gives one `TransactionReceiptReady` per transaction of this connector, then one
//! `BlockRead` with the hashes of these transactions.

use prost::Message;
use proto::chain::v1 as pb;

use crate::{BlockInfo, Receipt, ReceiptStatus, TxHash};

pub fn receipt_ready(block: &BlockInfo, receipt: &Receipt) -> events::Event {
    let status = match receipt.status {
        ReceiptStatus::Success => pb::ReceiptStatus::Success,
        ReceiptStatus::Reverted => pb::ReceiptStatus::Reverted,
    };
    let tx_hash = receipt.tx_hash.to_string();
    let event = pb::TransactionReceiptReadyEvent {
        context: context(),
        tx_hash: tx_hash.clone(),
        block_number: block.number,
        status: status.into(),
        gas_used: receipt.gas_used,
        at: Some(block_time(block)),
    };
    event_of(
        &tx_hash,
        "dfa.chain.v1.TransactionReceiptReadyEvent",
        event.encode_to_vec(),
    )
}

/// `ours`: the block's transactions that this connector submitted.
pub fn block_read(block: &BlockInfo, ours: &[TxHash]) -> events::Event {
    let event = pb::BlockReadEvent {
        context: context(),
        number: block.number,
        hash: block.hash.to_string(),
        parent_hash: block.parent_hash.to_string(),
        tx_hashes: ours.iter().map(TxHash::to_string).collect(),
        at: Some(block_time(block)),
    };
    event_of(
        &block.number.to_string(),
        "dfa.chain.v1.BlockReadEvent",
        event.encode_to_vec(),
    )
}

fn block_time(block: &BlockInfo) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: block.time_s as i64,
        nanos: 0,
    }
}

/// Builds an event. Its id derives from type and key, so a reread block has the same event ids.
fn event_of(key: &str, type_name: &str, payload: Vec<u8>) -> events::Event {
    let id = uuid::Uuid::new_v5(
        &uuid::Uuid::NAMESPACE_OID,
        format!("{type_name}:{key}").as_bytes(),
    );
    events::Event {
        id,
        topic: events::topics::CHAIN.into(),
        key: key.into(),
        type_name: type_name.into(),
        subject: key.into(),
        source: "chain".into(),
        correlation_id: id.to_string(),
        occurred_at_us: service_kit::clock::now_us(),
        payload,
    }
}

fn context() -> Option<proto::common::v1::RequestContext> {
    Some(rpc::Context::new("chain").to_proto())
}
