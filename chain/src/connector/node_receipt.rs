//! A node's receipt, without the fields that the connector does not use.
//!
//! alloy's type is nested and flattened: while it decodes, each log is copied into a tree of values
//! once per level. A batch of trades has a thousand logs.

use alloy::primitives::{Address, B256, Bytes, Log, U64};
use serde::Deserialize;

/// An answer of `eth_getTransactionReceipt`, or an item of `eth_getBlockReceipts`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReceipt {
    pub transaction_hash: B256,
    pub block_hash: Option<B256>,
    pub block_number: Option<U64>,
    /// 0: the transaction reverted.
    pub status: U64,
    pub gas_used: U64,
    pub from: Address,
    pub to: Option<Address>,
    pub contract_address: Option<Address>,
    pub logs: Vec<NodeLog>,
}

/// A log of a receipt.
#[derive(Debug, Deserialize)]
#[serde(from = "Fields")]
pub struct NodeLog(pub Log);

#[derive(Deserialize)]
struct Fields {
    address: Address,
    topics: Vec<B256>,
    data: Bytes,
}

impl From<Fields> for NodeLog {
    fn from(fields: Fields) -> Self {
        let Fields {
            address,
            topics,
            data,
        } = fields;
        NodeLog(Log::new_unchecked(address, topics, data))
    }
}

#[cfg(test)]
mod tests {
    use alloy::consensus::{Eip658Value, Receipt, ReceiptEnvelope, ReceiptWithBloom};
    use alloy::primitives::Bloom;
    use alloy::rpc::types::{Log as RpcLog, TransactionReceipt};

    use super::*;

    #[test]
    fn the_receipt_that_alloy_writes_is_read() {
        let topics = vec![B256::repeat_byte(1), B256::repeat_byte(2)];
        let log = Log::new_unchecked(Address::repeat_byte(3), topics, Bytes::from(vec![4; 32]));
        for (success, to) in [(true, Some(Address::repeat_byte(5))), (false, None)] {
            let receipt = ReceiptWithBloom {
                receipt: Receipt {
                    status: Eip658Value::Eip658(success),
                    cumulative_gas_used: 70_000,
                    logs: vec![RpcLog {
                        inner: log.clone(),
                        block_number: Some(7),
                        ..RpcLog::default()
                    }],
                },
                logs_bloom: Bloom::ZERO,
            };
            let written = TransactionReceipt {
                inner: ReceiptEnvelope::Eip1559(receipt),
                transaction_hash: B256::repeat_byte(6),
                transaction_index: Some(0),
                block_hash: Some(B256::repeat_byte(8)),
                block_number: Some(7),
                gas_used: 50_000,
                effective_gas_price: 1,
                blob_gas_used: None,
                blob_gas_price: None,
                from: Address::repeat_byte(9),
                to,
                contract_address: None,
            };
            let text = serde_json::to_string(&written).expect("JSON");
            let read: NodeReceipt = serde_json::from_str(&text).expect("a receipt");
            assert_eq!(read.transaction_hash, written.transaction_hash);
            assert_eq!(read.block_hash, written.block_hash);
            assert_eq!(read.block_number, Some(U64::from(7)));
            assert_eq!(read.status, U64::from(u64::from(success)));
            assert_eq!(read.gas_used, U64::from(50_000));
            assert_eq!((read.from, read.to), (written.from, to));
            assert_eq!(read.contract_address, None);
            assert_eq!(read.logs.len(), 1);
            assert_eq!(read.logs[0].0, log);
        }
    }
}
