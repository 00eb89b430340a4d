//! Bare execution of a stored chain's transactions, the floor of a benchmark: revm on a database in
//! memory, without signatures, receipts, roots and a store.

use std::path::Path;

use alloy::consensus::TxEnvelope;
use alloy::consensus::transaction::{Recovered, SignerRecoverable};
use alloy::eips::Decodable2718;
use futures::TryStreamExt;

use super::BLOCK_GAS_LIMIT;
use super::repo::{Store, StoreError};
use super::state::State;

/// A transaction that can be executed.
pub struct BareTransaction(Recovered<TxEnvelope>);

/// State of a development chain, apart from its store.
pub struct BareChain {
    state: State,
    chain_id: u64,
    /// Last block whose transactions were read.
    through: u64,
}

/// The chain's database in its data folder.
async fn open(data_dir: &Path) -> Result<Store, StoreError> {
    Store::open(&data_dir.join(super::DATABASE)).await
}

impl BareChain {
    /// Copies the state after the last block of a chain that does not run.
    ///
    /// # Errors
    /// The folder has no chain, or its store cannot be read.
    pub async fn open(data_dir: &Path) -> Result<Self, StoreError> {
        let store = open(data_dir).await?;
        let chain_id = store.chain_id().await?;
        let loaded = store.load(chain_id).await?;
        store.close().await;
        let (head, db) = loaded.ok_or_else(|| StoreError::Corrupt("it has no block".into()))?;
        let through = head.number;
        Ok(Self {
            state: State::new(chain_id, BLOCK_GAS_LIMIT, db, head),
            chain_id,
            through,
        })
    }

    /// Transactions of the blocks after those read before, from a copy of the chain that has gone
    /// on and may run.
    ///
    /// # Errors
    /// The store cannot be read, or has another chain.
    pub async fn read_new(&mut self, data_dir: &Path) -> Result<Vec<BareTransaction>, StoreError> {
        let store = open(data_dir).await?;
        let stored_id = store.chain_id().await?;
        if stored_id != self.chain_id {
            return Err(StoreError::OtherChain {
                stored: stored_id,
                configured: self.chain_id,
            });
        }
        let from = self.through + 1;
        let stored: Vec<_> = store.transactions(from, u64::MAX).try_collect().await?;
        store.close().await;
        let mut read = Vec::with_capacity(stored.len());
        for stored in stored {
            let corrupt = |error: String| StoreError::Corrupt(error);
            let envelope = TxEnvelope::decode_2718_exact(stored.raw.as_ref())
                .map_err(|error| corrupt(error.to_string()))?;
            let signer = envelope
                .recover_signer()
                .map_err(|error| corrupt(error.to_string()))?;
            let block = stored.receipt.block_number.unwrap_or_default();
            self.through = self.through.max(block);
            read.push(BareTransaction(Recovered::new_unchecked(envelope, signer)));
        }
        Ok(read)
    }

    /// Executes transactions in order and keeps their changes.
    ///
    /// # Errors
    /// A transaction is invalid or reverts: the chain was another one.
    pub fn execute(&mut self, transactions: &[BareTransaction]) -> Result<(), StoreError> {
        for BareTransaction(transaction) in transactions {
            let executed = self.state.execute_bare(transaction);
            let succeeded = executed.map_err(|error| StoreError::Corrupt(error.to_string()))?;
            if !succeeded {
                let hash = transaction.inner().tx_hash();
                return Err(StoreError::Corrupt(format!("{hash} reverted")));
            }
        }
        Ok(())
    }
}
