//! Transactions that wait for a block, by sender and nonce. In memory only; bounded.

use std::collections::{BTreeMap, HashMap};

use alloy::consensus::transaction::Recovered;
use alloy::consensus::{Transaction as _, TxEnvelope};
use alloy::primitives::{Address, B256};

use super::rpc::RpcFailure;

/// Transactions that may wait at once.
pub const POOL_LIMIT: usize = 4096;

#[derive(Debug, Default)]
pub struct Pool {
    waiting: HashMap<Address, BTreeMap<u64, Recovered<TxEnvelope>>>,
    count: usize,
}

impl Pool {
    /// The nonce must not be below the sender's; the caller has checked that.
    pub fn insert(&mut self, transaction: Recovered<TxEnvelope>) -> Result<(), RpcFailure> {
        let nonce = transaction.inner().nonce();
        let by_nonce = self.waiting.entry(transaction.signer()).or_default();
        if let Some(waiting) = by_nonce.get(&nonce) {
            if waiting.inner().tx_hash() == transaction.inner().tx_hash() {
                return Err(RpcFailure::rejected("already known"));
            }
            let floor = waiting
                .inner()
                .max_fee_per_gas()
                .saturating_add(waiting.inner().max_fee_per_gas() / 10);
            if transaction.inner().max_fee_per_gas() <= floor {
                return Err(RpcFailure::rejected("replacement transaction underpriced"));
            }
        } else {
            if self.count >= POOL_LIMIT {
                return Err(RpcFailure::rejected("txpool is full"));
            }
            self.count += 1;
        }
        by_nonce.insert(nonce, transaction);
        Ok(())
    }

    pub fn get(&self, tx_hash: B256) -> Option<&Recovered<TxEnvelope>> {
        self.waiting
            .values()
            .flat_map(BTreeMap::values)
            .find(|waiting| *waiting.inner().tx_hash() == tx_hash)
    }

    /// The nonce after the last one of an unbroken row that starts at `next`.
    pub fn next_nonce(&self, sender: Address, next: u64) -> u64 {
        let Some(by_nonce) = self.waiting.get(&sender) else {
            return next;
        };
        (next..)
            .find(|nonce| !by_nonce.contains_key(nonce))
            .unwrap_or(next)
    }

    /// Removes and returns what can be executed now: per sender, nonces without a gap.
    pub fn take_ready(
        &mut self,
        next_nonce: impl Fn(Address) -> u64,
    ) -> Vec<Recovered<TxEnvelope>> {
        let mut senders: Vec<Address> = self.waiting.keys().copied().collect();
        senders.sort_unstable();
        let mut ready = Vec::new();
        for sender in senders {
            let by_nonce = self
                .waiting
                .get_mut(&sender)
                .expect("the key was just listed");
            let mut next = next_nonce(sender);
            while let Some(transaction) = by_nonce.remove(&next) {
                ready.push(transaction);
                next += 1;
            }
            // below the sender's nonce: another transaction took the number
            by_nonce.retain(|nonce, _| *nonce > next);
            if by_nonce.is_empty() {
                self.waiting.remove(&sender);
            }
        }
        self.count = self.waiting.values().map(BTreeMap::len).sum();
        ready
    }
}
