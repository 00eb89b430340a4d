//! Stored form of a receipt. A batch of trades has a thousand logs, whose words repeat and are
//! mostly zeros: 25 times shorter than JSON.
//!
//! One byte [`VERSION`], then numbers as LEB128: length of the receipt without logs as JSON, and
//! the JSON; index of the first log in the block, time of the block in seconds; the number of
//! different words and the words; the number of logs and the logs. A word is its length without
//! leading zeros and these bytes. A log is address and topics as numbers of words, and its data as
//! words, the last one maybe shorter. An older release stored the whole receipt as JSON, which
//! begins with `{`.

use std::collections::HashMap;

use alloy::consensus::{Receipt, ReceiptEnvelope, ReceiptWithBloom};
use alloy::primitives::{Address, B256, Bytes, Log, LogData};
use alloy::rpc::types::{Log as RpcLog, TransactionReceipt};

const VERSION: u8 = 1;
const WORD: usize = 32;

type Envelope = ReceiptEnvelope<RpcLog>;
type WithBloom = ReceiptWithBloom<Receipt<RpcLog>>;

/// # Errors
/// The receipt has a type that this chain does not execute.
pub fn encode(receipt: &TransactionReceipt) -> Result<Vec<u8>, String> {
    let header = serde_json::to_vec(&without_logs(receipt)?).map_err(|error| error.to_string())?;
    let logs = receipt.logs();
    let mut out = vec![VERSION];
    put_number(&mut out, header.len() as u64);
    out.extend(header);
    let first = logs.first();
    put_number(&mut out, first.and_then(|log| log.log_index).unwrap_or(0));
    let time_s = first.and_then(|log| log.block_timestamp);
    put_number(&mut out, time_s.unwrap_or(0));
    let mut words = Words::default();
    let mut body = Vec::new();
    put_number(&mut body, logs.len() as u64);
    for log in logs {
        words.put(&mut body, log.inner.address.into_word());
        put_number(&mut body, log.inner.topics().len() as u64);
        for topic in log.inner.topics() {
            words.put(&mut body, *topic);
        }
        let data = &log.inner.data.data;
        put_number(&mut body, data.len() as u64);
        for chunk in data.chunks(WORD) {
            put_word(&mut body, chunk);
        }
    }
    put_number(&mut out, words.list.len() as u64);
    for word in &words.list {
        put_word(&mut out, word.as_slice());
    }
    out.extend(body);
    Ok(out)
}

/// `None`: the bytes are damaged.
pub fn decode(bytes: &[u8]) -> Option<TransactionReceipt> {
    if bytes.first() == Some(&b'{') {
        return serde_json::from_slice(bytes).ok();
    }
    let (version, mut bytes) = bytes.split_first()?;
    if *version != VERSION {
        return None;
    }
    let from = &mut bytes;
    let length = read_length(from)?;
    let mut receipt: TransactionReceipt = serde_json::from_slice(take(from, length)?).ok()?;
    let (first, time_s) = (read_number(from)?, read_number(from)?);
    let mut words = Vec::new();
    for _ in 0..read_length(from)? {
        words.push(B256::from_slice(&read_word(from, WORD)?));
    }
    let word = |from: &mut &[u8]| words.get(read_length(from)?).copied();
    let count = read_length(from)?;
    let mut logs = Vec::new();
    for index in 0..count {
        let address = Address::from_word(word(from)?);
        let topics = (0..read_length(from)?).map(|_| word(from));
        let topics = topics.collect::<Option<Vec<B256>>>()?;
        let mut left = read_length(from)?;
        let mut data = Vec::new();
        while left > 0 {
            let chunk = left.min(WORD);
            data.extend(read_word(from, chunk)?);
            left -= chunk;
        }
        logs.push(RpcLog {
            inner: Log {
                address,
                data: LogData::new(topics, Bytes::from(data))?,
            },
            block_hash: receipt.block_hash,
            block_number: receipt.block_number,
            block_timestamp: Some(time_s),
            transaction_hash: Some(receipt.transaction_hash),
            transaction_index: receipt.transaction_index,
            log_index: Some(first + index as u64),
            removed: false,
        });
    }
    if !from.is_empty() {
        return None;
    }
    match &mut receipt.inner {
        Envelope::Legacy(of) | Envelope::Eip2930(of) | Envelope::Eip1559(of) => {
            of.receipt.logs = logs;
        }
        _ => return None,
    }
    Some(receipt)
}

fn without_logs(of: &TransactionReceipt) -> Result<TransactionReceipt, String> {
    let bare = |of: &WithBloom| WithBloom {
        receipt: Receipt {
            status: of.receipt.status,
            cumulative_gas_used: of.receipt.cumulative_gas_used,
            logs: Vec::new(),
        },
        logs_bloom: of.logs_bloom,
    };
    let inner = match &of.inner {
        Envelope::Legacy(receipt) => Envelope::Legacy(bare(receipt)),
        Envelope::Eip2930(receipt) => Envelope::Eip2930(bare(receipt)),
        Envelope::Eip1559(receipt) => Envelope::Eip1559(bare(receipt)),
        _ => return Err(format!("type of receipt {}", of.transaction_hash)),
    };
    Ok(TransactionReceipt {
        inner,
        transaction_hash: of.transaction_hash,
        transaction_index: of.transaction_index,
        block_hash: of.block_hash,
        block_number: of.block_number,
        gas_used: of.gas_used,
        effective_gas_price: of.effective_gas_price,
        blob_gas_used: of.blob_gas_used,
        blob_gas_price: of.blob_gas_price,
        from: of.from,
        to: of.to,
        contract_address: of.contract_address,
    })
}

/// The different words of a receipt, in order of their first use.
#[derive(Default)]
struct Words {
    numbers: HashMap<B256, u64>,
    list: Vec<B256>,
}

impl Words {
    /// Appends the number of a word.
    fn put(&mut self, out: &mut Vec<u8>, word: B256) {
        let next = self.list.len() as u64;
        let number = *self.numbers.entry(word).or_insert(next);
        if number == next {
            self.list.push(word);
        }
        put_number(out, number);
    }
}

/// At most [`WORD`] bytes.
fn put_word(out: &mut Vec<u8>, word: &[u8]) {
    let zeros = word.iter().take_while(|byte| **byte == 0).count();
    put_number(out, (word.len() - zeros) as u64);
    out.extend(&word[zeros..]);
}

/// A word of `length` bytes, with its leading zeros.
fn read_word(from: &mut &[u8], length: usize) -> Option<Vec<u8>> {
    let significant = read_length(from)?;
    let mut word = vec![0; length.checked_sub(significant)?];
    word.extend(take(from, significant)?);
    Some(word)
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn read_number(from: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        let part = u64::from(byte & 0x7f);
        number |= part << shift;
        if byte & 0x80 == 0 {
            return (part << shift >> shift == part).then_some(number);
        }
    }
    None
}

/// A number of bytes or items. Each takes at least a byte, so a larger one is damaged.
fn read_length(from: &mut &[u8]) -> Option<usize> {
    usize::try_from(read_number(from)?).ok()
}

fn take<'a>(from: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(length)?;
    *from = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use alloy::consensus::Eip658Value;
    use alloy::primitives::{Bloom, U256};

    use super::*;

    fn receipt(logs: usize) -> TransactionReceipt {
        let hash = B256::repeat_byte(7);
        let log = |index: usize| {
            let member = |number: usize| Address::with_last_byte(number as u8).into_word();
            let topics = vec![B256::repeat_byte(9), member(index % 16), member(index % 5)];
            let mut data = U256::from(index).to_be_bytes::<32>().to_vec();
            // Data that is no multiple of a word, and none at all.
            data.truncate(if index.is_multiple_of(3) { 0 } else { 32 });
            data.extend(vec![0xab; index % 4]);
            RpcLog {
                inner: Log {
                    address: Address::repeat_byte(3),
                    data: LogData::new(topics, data.into()).expect("three topics"),
                },
                block_hash: Some(hash),
                block_number: Some(5),
                block_timestamp: Some(1_700_000_000),
                transaction_hash: Some(hash),
                transaction_index: Some(1),
                log_index: Some(40 + index as u64),
                removed: false,
            }
        };
        let receipt = ReceiptWithBloom {
            receipt: Receipt {
                status: Eip658Value::Eip658(true),
                cumulative_gas_used: 90_000,
                logs: (0..logs).map(log).collect(),
            },
            logs_bloom: Bloom::repeat_byte(1),
        };
        TransactionReceipt {
            inner: Envelope::Eip1559(receipt),
            transaction_hash: hash,
            transaction_index: Some(1),
            block_hash: Some(hash),
            block_number: Some(5),
            gas_used: 50_000,
            effective_gas_price: 1,
            blob_gas_used: None,
            blob_gas_price: None,
            from: Address::repeat_byte(1),
            to: Some(Address::repeat_byte(2)),
            contract_address: None,
        }
    }

    #[test]
    fn receipts_round_trip_and_those_of_an_older_release_are_read() {
        for logs in [0, 1, 2, 300] {
            let receipt = receipt(logs);
            let bytes = encode(&receipt).expect("encoded");
            assert_eq!(decode(&bytes), Some(receipt.clone()), "{logs} logs");
            let json = serde_json::to_vec(&receipt).expect("JSON");
            assert_eq!(decode(&json), Some(receipt), "{logs} logs");
        }
        let (short, json) = (encode(&receipt(300)), serde_json::to_vec(&receipt(300)));
        let (short, json) = (short.expect("encoded").len(), json.expect("JSON").len());
        assert!(short * 10 < json, "{short} and {json} bytes");
    }

    #[test]
    fn damaged_receipts_are_refused() {
        let bytes = encode(&receipt(20)).expect("encoded");
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length]), None, "{length} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(decode(&longer), None);
        let mut other = bytes;
        other[0] = VERSION + 1;
        assert_eq!(decode(&other), None);
        // A count far above the length.
        assert_eq!(decode(&[VERSION, 0xff, 0xff, 0xff, 0xff, 0x7f]), None);
    }
}
