//! In-process development chain: real EVM, real bytecode, real blocks, stored on disk.
//!
//! `DevChain` accepts signed transactions and seals a block when transactions are ready, at most
//! one block per `seal_interval`. It serves JSON-RPC in process (`transport`) and over HTTP
//! (`http`), so the connector uses the same code as for a remote node.
//!
//! Invariants:
//!
//! - A block is durable before it is visible.
//! - A reader never sees a state between two blocks.
//! - A pooled transaction is only in memory, as on any node. The connector stores and resends its
//!   own transactions.
//!
//! Resources of external users are bounded: gas per transaction and block ([`BLOCK_GAS_LIMIT`]);
//! gas per call, blocks and logs per query (`rpc`); transactions in the pool (`pool`); requests,
//! bodies, responses and connections (`http`). Estimates over gRPC are not bounded yet; only staff
//! may request them.
//!
//! Limits: one node, no reorganisations, no state older than the head, no `eth_subscribe`. A
//! contract that executes `SELFDESTRUCT` stops this chain.

pub mod bare;
pub mod http;
mod pool;
mod receipts;
mod repo;
mod rpc;
pub mod state;
mod transport;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use alloy::consensus::transaction::{Recovered, SignerRecoverable};
use alloy::consensus::{Transaction as _, TxEnvelope, Typed2718};
use alloy::eips::{Decodable2718, Encodable2718};
use alloy::primitives::{Address, B256, Bytes, U256};
use alloy::rpc::types::{Log as RpcLog, TransactionReceipt};
use revm::context_interface::cfg::gas::calculate_initial_tx_gas;
use revm::primitives::eip3860::MAX_INITCODE_SIZE;
use service_kit::{backoff::doubled, clock};
use tokio::sync::{Notify, RwLock, Semaphore, watch};
use tokio_util::sync::CancellationToken;

use pool::{Pool, Ready};
pub use repo::StoreError;
use repo::{Store, StoredTransaction};
pub use rpc::RpcFailure;
use state::{Block, SPEC, State};

/// Gas limit of a block: far above the need of a settlement batch, and it ends an endless loop.
const BLOCK_GAS_LIMIT: u64 = 500_000_000;

/// File of the chain in its data folder.
const DATABASE: &str = "chain.sqlite";

/// Pauses between attempts to store a block, for example on a full disk.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct DevChainConfig {
    /// Folder of the chain's database.
    pub data_dir: PathBuf,
    pub chain_id: u64,
    pub seal_interval: Duration,
    /// Accounts that have coins from block 0. All others are external: they pay for gas and have
    /// lower limits in the pool.
    pub funded: Vec<Address>,
}

/// Times of these blocks of the development chain in this folder, in seconds, by number. A block
/// that it does not have is missing. Read-only, with or without a running chain.
///
/// # Errors
/// [`StoreError`]: the chain's file cannot be read.
pub async fn block_times(
    data_dir: &Path,
    numbers: &[u64],
) -> Result<HashMap<u64, u64>, StoreError> {
    repo::block_times(&data_dir.join(DATABASE), numbers).await
}

#[derive(Clone)]
pub struct DevChain {
    inner: Arc<Inner>,
}

struct Inner {
    chain_id: u64,
    seal_interval: Duration,
    store: Store,
    state: Arc<RwLock<State>>,
    pool: Mutex<Pool>,
    /// Permits for concurrent calls of the JSON-RPC port.
    port_calls: Arc<Semaphore>,
    work: Notify,
    head: watch::Sender<u64>,
    /// Set while a block cannot be stored, permanently if the error is not transient. The state in
    /// memory is then ahead of the disk and must not be visible.
    halted: AtomicBool,
}

impl DevChain {
    /// Opens the chain in the folder, or creates one at block 0. Returns it with its sealer task,
    /// which runs until `shutdown`.
    pub async fn start(
        config: DevChainConfig,
        shutdown: CancellationToken,
    ) -> Result<(Self, tokio::task::JoinHandle<()>), StoreError> {
        let store = Store::open(&config.data_dir.join(DATABASE)).await?;
        let state = match store.load(config.chain_id).await? {
            Some((header, db)) => State::new(config.chain_id, BLOCK_GAS_LIMIT, db, header),
            None => {
                let (state, diff) = State::genesis(
                    config.chain_id,
                    BLOCK_GAS_LIMIT,
                    &config.funded,
                    clock::now_s() as u64,
                );
                store
                    .append(config.chain_id, &state.head, state.head_hash, &[], &diff)
                    .await?;
                state
            }
        };
        let (head, _) = watch::channel(state.head.number);
        let inner = Inner {
            chain_id: config.chain_id,
            seal_interval: config.seal_interval,
            store,
            state: Arc::new(RwLock::new(state)),
            pool: Mutex::new(Pool::new(config.funded)),
            port_calls: Arc::new(Semaphore::new(rpc::PORT_CALLS_MAX)),
            work: Notify::new(),
            head,
            halted: AtomicBool::new(false),
        };
        let chain = Self {
            inner: Arc::new(inner),
        };
        let sealer = tokio::spawn(chain.clone().seal_on_demand(shutdown));
        Ok((chain, sealer))
    }

    /// Number of the last visible block.
    pub fn head(&self) -> watch::Receiver<u64> {
        self.inner.head.subscribe()
    }

    /// False while a block cannot be stored.
    pub fn is_healthy(&self) -> bool {
        !self.inner.halted.load(Ordering::Acquire)
    }

    async fn seal_on_demand(self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.inner.work.notified() => {}
            }
            let sealed_at = tokio::time::Instant::now();
            if let Err(error) = self.seal(&shutdown).await {
                self.inner.halted.store(true, Ordering::Release);
                tracing::error!(
                    %error,
                    "development chain stopped: block not stored; free or repair the disk, then restart"
                );
                break;
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep_until(sealed_at + self.inner.seal_interval) => {}
            }
        }
        self.inner.store.close().await;
    }

    /// Seals one block of the ready transactions that fit, or none if no transaction is ready.
    async fn seal(&self, shutdown: &CancellationToken) -> Result<(), StoreError> {
        let mut state = self.inner.state.clone().write_owned().await;
        let Ready {
            transactions: ready,
            has_more,
        } = self
            .pool()
            .take_ready(BLOCK_GAS_LIMIT, |sender| state.account(sender).nonce);
        if ready.is_empty() {
            return Ok(());
        }
        // The write lock is held until the block is on disk, so readers see only stored blocks.
        let (state, block) = tokio::task::spawn_blocking(move || {
            let block = state.execute_block(ready, clock::now_s() as u64);
            (state, block)
        })
        .await
        .map_err(|error| StoreError::Corrupt(format!("execution stopped: {error}")))?;
        for (tx_hash, reason) in &block.dropped {
            tracing::warn!(%tx_hash, reason, "transaction dropped");
        }
        let (transactions, diff) = (stored_transactions(&block), &block.diff);
        let (header, hash) = (&block.header, block.hash);
        for failures in 0.. {
            let chain_id = self.inner.chain_id;
            let store = &self.inner.store;
            let Err(error) = store
                .append(chain_id, header, hash, &transactions, diff)
                .await
            else {
                break;
            };
            if !error.is_transient() {
                return Err(error);
            }
            self.inner.halted.store(true, Ordering::Release);
            tracing::error!(%error, block = header.number, "block cannot be stored, retrying");
            tokio::select! {
                () = shutdown.cancelled() => return Err(error),
                () = tokio::time::sleep(doubled(RETRY_FIRST, failures, RETRY_MAX)) => {}
            }
        }
        self.inner.halted.store(false, Ordering::Release);
        drop(state);
        self.inner.head.send_replace(block.header.number);
        if has_more {
            self.inner.work.notify_one();
        }
        Ok(())
    }

    /// Adds a signed transaction to the pool.
    async fn submit_raw(&self, raw: &Bytes) -> Result<B256, RpcFailure> {
        let envelope = TxEnvelope::decode_2718_exact(raw.as_ref())
            .map_err(|error| RpcFailure::invalid_params(format!("transaction: {error}")))?;
        if envelope.ty() > 2 {
            return Err(RpcFailure::rejected("transaction type not supported"));
        }
        // Without a chain id a transaction could be replayed from another chain (EIP-155).
        if envelope.chain_id() != Some(self.inner.chain_id) {
            return Err(RpcFailure::rejected("invalid chain id for signer"));
        }
        let signer = envelope
            .recover_signer()
            .map_err(|_| RpcFailure::rejected("invalid sender"))?;
        let tx_hash = *envelope.tx_hash();
        let transaction = Recovered::new_unchecked(envelope, signer);
        let state = self.inner.state.read().await;
        self.validate(&state, &transaction)?;
        self.pool().insert(transaction, Instant::now())?;
        drop(state);
        self.inner.work.notify_one();
        Ok(tx_hash)
    }

    /// Checks a transaction before it enters the pool.
    fn validate(
        &self,
        state: &State,
        transaction: &Recovered<TxEnvelope>,
    ) -> Result<(), RpcFailure> {
        let tx = transaction.inner();
        let account = state.account(transaction.signer());
        if tx.nonce() < account.nonce {
            return Err(RpcFailure::rejected(format!(
                "nonce too low: next nonce {}, tx nonce {}",
                account.nonce,
                tx.nonce()
            )));
        }
        // Execution would refuse such a transaction without a fee, so a sender could repeat it
        // forever at no cost.
        if tx
            .max_priority_fee_per_gas()
            .is_some_and(|tip| tip > tx.max_fee_per_gas())
        {
            return Err(RpcFailure::rejected(
                "max priority fee per gas higher than max fee per gas",
            ));
        }
        if tx.is_create() && tx.input().len() > MAX_INITCODE_SIZE {
            return Err(RpcFailure::rejected("max initcode size exceeded"));
        }
        // The base fee is zero, so the fee is the tip.
        let fee = tx.effective_tip_per_gas(0).unwrap_or_default();
        if fee == 0 && !self.pool().is_own(&transaction.signer()) {
            return Err(RpcFailure::rejected(
                "transaction underpriced: the fee must be at least 1 wei per gas",
            ));
        }
        if tx.gas_limit() > BLOCK_GAS_LIMIT {
            return Err(RpcFailure::rejected("exceeds block gas limit"));
        }
        let intrinsic = calculate_initial_tx_gas(SPEC, tx.input(), tx.is_create(), 0, 0, 0, None)
            .initial_total_gas();
        if tx.gas_limit() < intrinsic {
            return Err(RpcFailure::rejected(format!(
                "intrinsic gas too low: gas {}, minimum needed {intrinsic}",
                tx.gas_limit()
            )));
        }
        let cost = U256::from(tx.gas_limit())
            .saturating_mul(U256::from(tx.max_fee_per_gas()))
            .saturating_add(tx.value());
        if account.balance < cost {
            return Err(RpcFailure::rejected(
                "insufficient funds for gas * price + value",
            ));
        }
        Ok(())
    }

    fn pool(&self) -> std::sync::MutexGuard<'_, Pool> {
        // The pool's methods keep it consistent even if they panic.
        self.inner
            .pool
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn stored_transactions(block: &Block) -> Vec<Arc<StoredTransaction>> {
    let mut log_index = 0u64;
    let mut stored = Vec::with_capacity(block.transactions.len());
    for (position, included) in block.transactions.iter().enumerate() {
        let tx = included.transaction.inner();
        let logs = included
            .logs
            .iter()
            .map(|log| {
                let log = RpcLog {
                    inner: log.clone(),
                    block_hash: Some(block.hash),
                    block_number: Some(block.header.number),
                    block_timestamp: Some(block.header.timestamp),
                    transaction_hash: Some(*tx.tx_hash()),
                    transaction_index: Some(position as u64),
                    log_index: Some(log_index),
                    removed: false,
                };
                log_index += 1;
                log
            })
            .collect();
        let receipt = TransactionReceipt {
            inner: included.envelope(logs),
            transaction_hash: *tx.tx_hash(),
            transaction_index: Some(position as u64),
            block_hash: Some(block.hash),
            block_number: Some(block.header.number),
            gas_used: included.gas_used,
            effective_gas_price: tx.effective_gas_price(Some(0)),
            blob_gas_used: None,
            blob_gas_price: None,
            from: included.transaction.signer(),
            to: tx.to(),
            contract_address: included.contract_address,
        };
        stored.push(Arc::new(StoredTransaction {
            raw: Bytes::from(tx.encoded_2718()),
            receipt,
        }));
    }
    stored
}
