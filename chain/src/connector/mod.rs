//! Access to the chain: the same code for the embedded chain and a remote node.
//!
//! The connector uses alloy's `Provider` over the transport passed to `connect`. The caller
//! supplies an idempotency key per submission. The signed transaction and its nonce are stored
//! under the key before they are sent, so a repeat with the key after a crash sends the same bytes
//! (T13).
//!
//! | file | content |
//! |---|---|
//! | `submit` | nonces, signatures, the first send |
//! | `upkeep` | transactions that are in no block: resend, higher fee, cancellation, gaps |
//! | `watcher` | reads blocks: inclusion, reorganisations, finality |
//! | `tokens` | reads of a token: code, rights, terms, freezes |
//! | `block_hash` | header of a block as its hash covers it |
//! | `node_error` | meaning of a node's error text |
//! | `node_receipt` | a node's receipt |
//! | `recent` | contents of the last final blocks |
//! | `fees`, `signer`, `repo` | fees, the signing account, the store |
//!
//! A submission is *submitted* (its attempts have been sent), *included* (an unconfirmed block
//! contains one of them) and *final* (this block has its confirmations). A reorganisation moves it
//! from included to submitted. Receipts, events and all effects need the final state.
//!
//! An error determines what the caller does. After `Unavailable` the caller retries with the same
//! key. After `Refused` an unchanged retry fails until the cause is removed.
//!
//! A block is identified by the hash that the node states. [`Connector::verify_block_hash`] also
//! computes it from the header.

mod block_hash;
mod fees;
mod node_error;
mod node_receipt;
mod recent;
mod repo;
mod signer;
mod submit;
mod tokens;
mod upkeep;
mod watcher;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use alloy::consensus::Transaction as _;
use alloy::eips::{BlockId, BlockNumberOrTag};
use alloy::network::TransactionBuilder;
use alloy::primitives::{TxKind, U256};
use alloy::providers::{DynProvider, Provider, ProviderBuilder};
use alloy::rpc::client::RpcClient;
use alloy::rpc::types::{Filter, TransactionRequest};
use alloy::sol_types::{SolCall, SolEvent};
use alloy::transports::{RpcError, TransportError};
use async_recursion::async_recursion as boxed;
use service_kit::KeyedMutex;
use tokio::sync::watch;

use crate::contracts::{Call, CfaToken, IdentityRegistry, Settlement, TokenV1};
use crate::nodes::{ChainIdentity, Nodes};
use crate::{Address, TxHash};
use node_error::{Meaning, meaning};
use node_receipt::NodeReceipt;
use recent::RecentBlocks;
pub use repo::known_transactions;
use repo::{Identity, Repo};
pub(crate) use signer::Signer;
pub use tokens::{HolderState, TokenCode, TokenRights};
pub(crate) use upkeep::Upkeep;
pub use watcher::Watcher;

#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// The outcome is unknown: the transport failed, or the node may have accepted the transaction.
    /// Retry with the same key.
    #[error("chain unavailable: {0}")]
    Unavailable(String),
    /// The node refused, and refuses an unchanged retry until the cause is removed.
    #[error("node rejected the transaction or call: {0}")]
    Refused(String),
    #[error("the node is on chain {node}, but chain.chain_id is {configured}")]
    WrongChain { node: u64, configured: u64 },
    #[error(
        "the node is on chain {chain_id} with genesis block {node}, but this store belongs to chain \
         {stored_id} with genesis block {stored}: connect a node of that chain"
    )]
    OtherChain {
        node: String,
        chain_id: u64,
        stored: String,
        stored_id: u64,
    },
    #[error(
        "the signing account is {configured}, but the transactions of this store are signed by \
         {stored}: restore the key of that account"
    )]
    OtherOperator { configured: String, stored: String },
    /// Effects of a block that is not on the chain any more are in other stores.
    #[error(
        "the chain has replaced final block {number}: {stored} was read, the node has {node}; \
         nothing is submitted and finalized until the node has the block again"
    )]
    Reorganised {
        number: u64,
        stored: TxHash,
        node: TxHash,
    },
    #[error("connector store: {0}")]
    Store(#[from] events::Error),
    #[error("connector store: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("connector store: {0}")]
    Corrupt(String),
    #[error("invalid response from the node: {0}")]
    Malformed(String),
    #[error("signing the transaction failed: {0}")]
    Signature(String),
}

impl From<TransportError> for ChainError {
    fn from(error: TransportError) -> Self {
        match error {
            RpcError::ErrorResp(payload) if meaning(&payload.message) != Meaning::Unknown => {
                Self::Refused(payload.message.into_owned())
            }
            RpcError::ErrorResp(payload) => Self::Unavailable(payload.message.into_owned()),
            other => Self::Unavailable(other.to_string()),
        }
    }
}

/// Limit of addresses per log query: nodes refuse long lists.
const FILTER_ADDRESSES: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiptStatus {
    Success,
    Reverted,
}

/// A trade that the settlement contract left out of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedTrade {
    pub token: Address,
    /// Number of the trade within its token; 0: a paid transfer without a trade.
    pub number: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// Hash of the submission, or of a transaction of another program.
    pub tx_hash: TxHash,
    /// Hash in the block. It differs from `tx_hash` if the fee was raised or the nonce renewed.
    pub included_tx_hash: TxHash,
    pub block_number: u64,
    pub block_hash: TxHash,
    pub status: ReceiptStatus,
    pub gas_used: u64,
    pub from: Address,
    pub to: Option<Address>,
    pub contract_address: Option<Address>,
    pub failed_trades: Vec<FailedTrade>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockInfo {
    pub number: u64,
    /// As the node states it.
    pub hash: TxHash,
    pub parent_hash: TxHash,
    pub tx_hashes: Vec<TxHash>,
    pub time_s: u64,
    pub gas_limit: u64,
    /// Canonical (RLP) bytes of the header as the hash covers it: on a QBFT or IBFT 2.0 chain
    /// without round and seals. The whole header if `hash` does not belong to it.
    pub header: Vec<u8>,
}

impl BlockInfo {
    /// The block hash, computed from the header (T33). It differs from `hash` if the header and the
    /// hash that the node states do not belong together.
    pub fn computed_hash(&self) -> TxHash {
        TxHash::from(alloy::primitives::keccak256(&self.header))
    }
}

/// A transaction sent under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// Hash of the first signed transaction. It identifies the submission, whichever of its
    /// transactions enters a block.
    pub tx_hash: TxHash,
    /// 0 while it has none: its former nonce was used up by another transaction.
    pub nonce: u64,
    /// Address of the contract, if the call deploys one. It changes with the nonce.
    pub contract: Option<Address>,
}

/// Units transferred from one address to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenTransfer {
    pub token: Address,
    /// `None`: a mint.
    pub from: Option<Address>,
    /// `None`: a burn.
    pub to: Option<Address>,
    pub units: u128,
    pub block_number: u64,
}

/// Metadata of a token contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMetadata {
    pub symbol: String,
    pub decimals: u8,
}

#[derive(Clone)]
pub struct Connector {
    inner: Arc<Inner>,
}

/// Settings of the connector.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// Read blocks without a transaction after which its fee is raised. 0: never.
    pub replace_after_blocks: u64,
    /// Limit of the fee in wei per gas.
    pub max_fee_per_gas: u128,
    /// Owner of the contracts that are deployed from now on. `None`: the operator.
    pub owner: Option<Address>,
}

struct Inner {
    provider: DynProvider,
    chain_id: u64,
    signer: Signer,
    repo: Repo,
    settings: Settings,
    /// Held from the first step of a submission to its answer.
    keys: KeyedMutex<String>,
    next_nonce: tokio::sync::Mutex<u64>,
    marks: submit::Marks,
    /// Head of the node when it was last asked.
    head: AtomicU64,
    /// Number of the last read block, which may be unconfirmed.
    read_tip: AtomicU64,
    /// Gas limit of the last read block; 0: none was read since the start.
    block_gas_limit: AtomicU64,
    /// Gas limit of a transaction on this chain; `u64::MAX` until a node refuses more.
    transaction_gas_limit: AtomicU64,
    /// Number of the last final block whose receipts were read.
    last_read_block: watch::Sender<u64>,
    recent: Mutex<RecentBlocks>,
    /// Why nothing may be submitted or finalized: a reorganisation below the last final block.
    broken: Mutex<Option<String>>,
}

impl Connector {
    /// Checks chain id, genesis block and account against node and store. Loads the next nonce and
    /// the last read block. `nodes`: the client's remote nodes, which must have this chain too.
    pub(super) async fn connect(
        client: RpcClient,
        nodes: Option<&Nodes>,
        chain_id: u64,
        signer: Signer,
        settings: Settings,
        db: events::sqlite::Sqlite,
    ) -> Result<Self, ChainError> {
        let provider = provider(client);
        let repo = Repo::new(db);
        let operator = Address::from(signer.address());
        let chain = check_identity(&provider, &repo, chain_id, operator).await?;
        if let Some(nodes) = nodes {
            nodes.expect(chain);
        }
        let on_chain = provider.get_transaction_count(signer.address()).await?;
        let next_nonce = repo.next_nonce().await?.max(on_chain);
        let cursor = repo.cursor().await?.map(|(number, _)| number);
        let cursor = cursor.unwrap_or_default();
        let head = provider.get_block_number().await.unwrap_or(cursor);
        let (last_read_block, _) = watch::channel(cursor);
        let inner = Inner {
            provider,
            chain_id,
            signer,
            repo,
            settings,
            keys: KeyedMutex::default(),
            next_nonce: tokio::sync::Mutex::new(next_nonce),
            marks: submit::Marks::default(),
            head: AtomicU64::new(head),
            read_tip: AtomicU64::new(cursor),
            block_gas_limit: AtomicU64::new(0),
            transaction_gas_limit: AtomicU64::new(u64::MAX),
            last_read_block,
            recent: Mutex::default(),
            broken: Mutex::new(None),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Checks chain id and genesis block of one of several nodes, unless it is away.
    ///
    /// # Errors
    /// `WrongChain`, `OtherChain`: requests to this node would be answered from another chain.
    pub(super) async fn check_node(&self, client: RpcClient) -> Result<(), ChainError> {
        let (inner, operator) = (&self.inner, self.operator());
        let provider = provider(client);
        match check_identity(&provider, &inner.repo, inner.chain_id, operator).await {
            Err(error @ (ChainError::WrongChain { .. } | ChainError::OtherChain { .. })) => {
                Err(error)
            }
            Err(error) => {
                tracing::warn!(%error, "a node is away and will be checked before its first use");
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Logs chain, account and balance, and warns if the account cannot pay. `key`: where its key
    /// is. Never fails: the node may answer later.
    pub(super) async fn preflight(&self, key: &str) {
        let provider = &self.inner.provider;
        let chain_id = self.inner.chain_id;
        let operator = self.operator();
        let balance = provider.get_balance(operator.raw()).await;
        let price = provider.get_gas_price().await;
        match (balance, price) {
            (Ok(balance), Ok(price)) if balance.is_zero() && price > 0 => tracing::warn!(
                chain_id, %operator, key,
                "the signing account has no coins and the chain's gas price is not zero: send coins to it"
            ),
            (Ok(balance), Ok(_)) => {
                tracing::info!(chain_id, %operator, key, balance_wei = %balance, "signing account");
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(chain_id, %operator, key, %error, "balance of the signing account is unknown");
            }
        }
    }

    pub fn chain_id(&self) -> u64 {
        self.inner.chain_id
    }

    /// The account that signs all transactions.
    pub fn operator(&self) -> Address {
        Address::from(self.inner.signer.address())
    }

    /// The account that owns the contracts that are deployed from now on, and sets their roles.
    pub fn owner(&self) -> Address {
        self.inner.settings.owner.unwrap_or_else(|| self.operator())
    }

    /// Number of the last block whose receipts were read and published.
    pub fn last_read_block(&self) -> watch::Receiver<u64> {
        self.inner.last_read_block.subscribe()
    }

    /// Signs and sends a transaction. A repeat of a key returns the first one and ignores `call`.
    ///
    /// Cancel safe: a started submission completes even if the caller drops the future. If it were
    /// cancelled after the row is stored and before the nonce advances, the next submission would
    /// use the same nonce.
    ///
    /// # Errors
    /// `Refused`: no transaction of the key is or will be on the chain, until the key is submitted
    /// again. `Unavailable`: unknown; retry with the same key.
    #[boxed]
    pub async fn submit(&self, key: &str, call: &Call) -> Result<Submission, ChainError> {
        let (submission, _) = self.submit_once(key, call).await?;
        Ok(submission)
    }

    /// As [`Self::submit`]; true: the key was used before.
    pub(crate) async fn submit_once(
        &self,
        key: &str,
        call: &Call,
    ) -> Result<(Submission, bool), ChainError> {
        let held = self.inner.keys.lock(key).await;
        let (connector, key, call) = (self.clone(), key.to_owned(), call.clone());
        let submission = async move {
            let _held = held;
            connector.submit_held(&key, &call).await
        };
        tokio::spawn(submission)
            .await
            .map_err(|error| ChainError::Unavailable(format!("submission: {error}")))?
    }

    /// The transaction submitted under a key, if there is one.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn submission(&self, key: &str) -> Result<Option<Submission>, ChainError> {
        // Waits for a submission in progress.
        let _held = self.inner.keys.lock(key).await;
        let known = self.inner.repo.by_key(key).await?;
        Ok(known.map(|known| known.submission))
    }

    /// Refuses while the chain has replaced a final block.
    fn check_unbroken(&self) -> Result<(), ChainError> {
        let broken = self.inner.broken.lock();
        match &*broken.unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => Err(ChainError::Unavailable(reason.clone())),
            None => Ok(()),
        }
    }

    fn recent(&self) -> MutexGuard<'_, RecentBlocks> {
        let recent = self.inner.recent.lock();
        recent.unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the last read block, which may be unconfirmed.
    fn read_tip(&self) -> u64 {
        self.inner.read_tip.load(Ordering::Relaxed)
    }

    /// The receipt, or `None` until the watcher has read the transaction's block. A read block has
    /// the required confirmations. `tx_hash`: a submission's hash, or one of another program.
    ///
    /// # Errors
    /// `Unavailable` also if the node has the transaction in another block than the one read.
    #[boxed]
    pub async fn receipt(&self, tx_hash: &TxHash) -> Result<Option<Receipt>, ChainError> {
        self.check_unbroken()?;
        let recent = self.recent().receipt(tx_hash).cloned();
        if recent.is_some() {
            return Ok(recent);
        }
        let Some(stored) = self.inner.repo.by_hash(tx_hash).await? else {
            return match self.unconfirmed_receipt(tx_hash).await? {
                Some(receipt) if self.is_read(receipt.block_number).await? => Ok(Some(receipt)),
                _ => Ok(None),
            };
        };
        let Some(included) = stored.included.filter(|_| stored.is_final) else {
            return Ok(None);
        };
        let receipt = self.unconfirmed_receipt(&included).await?;
        let is_in_read_block = |receipt: &Receipt| {
            stored
                .block_hash
                .is_none_or(|hash| hash == receipt.block_hash)
        };
        match receipt {
            Some(receipt) if is_in_read_block(&receipt) => Ok(Some(Receipt {
                tx_hash: stored.submission.tx_hash,
                ..receipt
            })),
            _ => Err(ChainError::Unavailable(format!(
                "the node does not have transaction {included} in the block that was read"
            ))),
        }
    }

    /// Call data of a final transaction, read from the node; `None`: it is not final.
    /// `tx_hash`: a submission's hash.
    #[boxed]
    pub async fn call_data(&self, tx_hash: &TxHash) -> Result<Option<Vec<u8>>, ChainError> {
        self.check_unbroken()?;
        let stored = self.inner.repo.by_hash(tx_hash).await?;
        let included = stored.filter(|stored| stored.is_final);
        let Some(included) = included.and_then(|stored| stored.included) else {
            return Ok(None);
        };
        let found = self
            .inner
            .provider
            .get_transaction_by_hash(included.raw())
            .await?;
        Ok(found.map(|transaction| transaction.input().to_vec()))
    }

    async fn is_read(&self, number: u64) -> Result<bool, ChainError> {
        // The store is updated before the watch channel: a consumer may already have the block's
        // events while the channel has the previous block.
        Ok(number <= *self.inner.last_read_block.borrow()
            || number <= self.stored_last_read_block().await?)
    }

    /// Number of the last final block whose receipts were read, as stored.
    #[boxed]
    pub async fn stored_last_read_block(&self) -> Result<u64, ChainError> {
        let cursor = self.inner.repo.cursor().await?;
        Ok(cursor.map_or(0, |(number, _)| number))
    }

    /// The node's receipt; its block may be unconfirmed.
    async fn unconfirmed_receipt(&self, tx_hash: &TxHash) -> Result<Option<Receipt>, ChainError> {
        let provider = &self.inner.provider;
        let receipt: Option<NodeReceipt> = provider
            .raw_request("eth_getTransactionReceipt".into(), (tx_hash.raw(),))
            .await?;
        Ok(receipt.as_ref().map(to_receipt))
    }

    /// Waits until the transaction's block is read. `None` after `timeout`.
    #[boxed]
    pub async fn wait_receipt(
        &self,
        tx_hash: &TxHash,
        timeout: Duration,
    ) -> Result<Option<Receipt>, ChainError> {
        let mut last_read_block = self.last_read_block();
        let deadline = tokio::time::Instant::now() + timeout;
        loop {
            last_read_block.borrow_and_update();
            if let Some(receipt) = self.receipt(tx_hash).await? {
                return Ok(Some(receipt));
            }
            match tokio::time::timeout_at(deadline, last_read_block.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Ok(None),
            }
        }
    }

    /// A block by number; `None` means the latest.
    #[boxed]
    pub async fn block(&self, number: Option<u64>) -> Result<Option<BlockInfo>, ChainError> {
        let tag = number.map_or(BlockNumberOrTag::Latest, BlockNumberOrTag::Number);
        let Some(block) = self.inner.provider.get_block(BlockId::Number(tag)).await? else {
            return Ok(None);
        };
        Ok(Some(BlockInfo {
            number: block.header.number,
            hash: TxHash::from(block.header.hash),
            parent_hash: TxHash::from(block.header.parent_hash),
            tx_hashes: block.transactions.hashes().map(TxHash::from).collect(),
            time_s: block.header.timestamp,
            gas_limit: block.header.gas_limit,
            header: block_hash::hashed_header(&block.header.inner, block.header.hash),
        }))
    }

    #[boxed]
    pub async fn block_number(&self) -> Result<u64, ChainError> {
        Ok(self.inner.provider.get_block_number().await?)
    }

    /// Whether the block with this number exists and has this hash, as the node states it and as
    /// computed from the header.
    #[boxed]
    pub async fn verify_block_hash(&self, number: u64, hash: &TxHash) -> Result<bool, ChainError> {
        let block = self.block(Some(number)).await?;
        let has_hash = |block: BlockInfo| block.hash == *hash && block.computed_hash() == *hash;
        Ok(block.is_some_and(has_hash))
    }

    #[boxed]
    pub async fn estimate_gas(&self, to: Option<&Address>, data: &[u8]) -> Result<u64, ChainError> {
        let mut request = TransactionRequest::default()
            .with_from(self.inner.signer.address())
            .with_input(data.to_vec());
        request.to = Some(to.map_or(TxKind::Create, |to| TxKind::Call(to.raw())));
        Ok(self.inner.provider.estimate_gas(request).await?)
    }

    /// Calls a view function of a contract.
    async fn call_view<C: SolCall>(
        &self,
        contract: &Address,
        call: C,
    ) -> Result<C::Return, ChainError> {
        let request = TransactionRequest::default()
            .with_to(contract.raw())
            .with_input(call.abi_encode());
        let output = self.inner.provider.call(request).await?;
        C::abi_decode_returns(&output).map_err(|error| ChainError::Malformed(error.to_string()))
    }

    #[boxed]
    pub async fn has_code(&self, address: &Address) -> Result<bool, ChainError> {
        Ok(!self
            .inner
            .provider
            .get_code_at(address.raw())
            .await?
            .is_empty())
    }

    /// An address's balance in smallest units of the token.
    #[boxed]
    pub async fn balance_of(&self, token: &Address, holder: &Address) -> Result<u128, ChainError> {
        to_units(
            self.call_view(
                token,
                CfaToken::balanceOfCall {
                    account: holder.raw(),
                },
            )
            .await?,
        )
    }

    /// Supply in smallest units, and the chain head before the read. The supply is that of this
    /// block or a later one.
    #[boxed]
    pub async fn total_supply(&self, token: &Address) -> Result<(u128, u64), ChainError> {
        let block = self.block_number().await?;
        Ok((
            to_units(self.call_view(token, CfaToken::totalSupplyCall {}).await?)?,
            block,
        ))
    }

    #[boxed]
    pub async fn token_metadata(&self, token: &Address) -> Result<TokenMetadata, ChainError> {
        Ok(TokenMetadata {
            symbol: self.call_view(token, CfaToken::symbolCall {}).await?,
            decimals: self.call_view(token, CfaToken::decimalsCall {}).await?,
        })
    }

    /// All transfers of these tokens in the blocks from..=to, in chain order. Events of other
    /// contracts are not queried.
    ///
    /// # Errors
    /// `Unavailable` also while the chain has replaced a final block.
    #[boxed]
    pub async fn transfers(
        &self,
        tokens: &[Address],
        from: u64,
        to: u64,
    ) -> Result<Vec<TokenTransfer>, ChainError> {
        self.check_unbroken()?;
        let mut transfers = Vec::new();
        let mut next = from;
        while next <= to && !tokens.is_empty() {
            let recent = |number| self.recent().transfers(tokens, number);
            if let Some(recent) = recent(next) {
                transfers.extend(recent);
                next += 1;
                continue;
            }
            let end = (next + 1..=to).find(|number| recent(*number).is_some());
            let end = end.unwrap_or(to + 1);
            transfers.extend(self.node_transfers(tokens, next, end - 1).await?);
            next = end;
        }
        Ok(transfers)
    }

    /// The same from the node.
    async fn node_transfers(
        &self,
        tokens: &[Address],
        from: u64,
        to: u64,
    ) -> Result<Vec<TokenTransfer>, ChainError> {
        let mut logs = Vec::new();
        for tokens in tokens.chunks(FILTER_ADDRESSES) {
            let tokens: Vec<_> = tokens.iter().map(Address::raw).collect();
            let filter = Filter::new()
                .address(tokens)
                .from_block(from)
                .to_block(to)
                .event_signature(CfaToken::Transfer::SIGNATURE_HASH);
            logs.extend(self.inner.provider.get_logs(&filter).await?);
        }
        self.check_has_cursor().await?;
        logs.sort_by_key(|log| (log.block_number, log.log_index));
        let transfers = logs
            .iter()
            .filter_map(|log| to_transfer(&log.inner, log.block_number.unwrap_or_default()));
        Ok(transfers.collect())
    }

    /// Refuses the answers of a node without the last final block: it is behind or on another
    /// branch, and states no logs of blocks that it does not have.
    async fn check_has_cursor(&self) -> Result<(), ChainError> {
        let Some((number, hash)) = self.inner.repo.cursor().await? else {
            return Ok(());
        };
        match self.block(Some(number)).await? {
            Some(block) if block.hash == hash => Ok(()),
            _ => Err(ChainError::Unavailable(format!(
                "the node does not have final block {number}: it is behind or on another branch"
            ))),
        }
    }

    #[boxed]
    pub async fn is_verified(
        &self,
        registry: &Address,
        account: &Address,
    ) -> Result<bool, ChainError> {
        self.call_view(
            registry,
            IdentityRegistry::isVerifiedCall {
                account: account.raw(),
            },
        )
        .await
    }

    /// Whether a transfer by the operator would pass now.
    #[boxed]
    pub async fn can_transfer(
        &self,
        token: &Address,
        from: &Address,
        to: &Address,
        units: u128,
    ) -> Result<bool, ChainError> {
        self.call_view(
            token,
            CfaToken::canTransferCall {
                from: from.raw(),
                to: to.raw(),
                amount: U256::from(units),
            },
        )
        .await
    }

    /// Whether an account is an agent of a contract of version 1.
    #[boxed]
    pub async fn is_agent(
        &self,
        contract: &Address,
        account: &Address,
    ) -> Result<bool, ChainError> {
        self.call_view(
            contract,
            TokenV1::isAgentCall {
                account: account.raw(),
            },
        )
        .await
    }
}

pub(crate) fn provider(client: RpcClient) -> DynProvider {
    ProviderBuilder::new()
        .disable_recommended_fillers()
        .connect_client(client)
        .erased()
}

/// Compares the store's chain and account with the node's and the signer's. The first start stores
/// them. Returns the chain.
async fn check_identity(
    provider: &DynProvider,
    repo: &Repo,
    chain_id: u64,
    operator: Address,
) -> Result<ChainIdentity, ChainError> {
    let chain = ChainIdentity::of(provider).await?;
    if chain.chain_id != chain_id {
        return Err(ChainError::WrongChain {
            node: chain.chain_id,
            configured: chain_id,
        });
    }
    let node = Identity {
        chain_id,
        genesis_hash: chain.genesis.to_string(),
        operator: operator.to_string(),
    };
    match repo.identity().await? {
        None => repo.set_identity(&node).await?,
        Some(stored)
            if (stored.chain_id, &stored.genesis_hash) != (chain_id, &node.genesis_hash) =>
        {
            return Err(ChainError::OtherChain {
                node: node.genesis_hash,
                chain_id,
                stored: stored.genesis_hash,
                stored_id: stored.chain_id,
            });
        }
        Some(stored) if stored.operator != node.operator => {
            return Err(ChainError::OtherOperator {
                configured: node.operator,
                stored: stored.operator,
            });
        }
        Some(_) => {}
    }
    Ok(chain)
}

fn to_units(value: U256) -> Result<u128, ChainError> {
    u128::try_from(value).map_err(|_| ChainError::Malformed("amount exceeds 128 bits".into()))
}

/// The transfer that a log reports; `None` for another event.
fn to_transfer(log: &alloy::primitives::Log, block_number: u64) -> Option<TokenTransfer> {
    // A token contract that the platform did not deploy may declare `Transfer` with other indexed
    // fields.
    let event = CfaToken::Transfer::decode_log(log).ok()?;
    let party = |raw: alloy::primitives::Address| (!raw.is_zero()).then(|| Address::from(raw));
    Some(TokenTransfer {
        token: Address::from(event.address),
        from: party(event.from),
        to: party(event.to),
        // `u128::MAX` units are impossible too, so capping hides no impossible transfer.
        units: u128::try_from(event.value).unwrap_or(u128::MAX),
        block_number,
    })
}

/// The trades that the called settlement contract left out. The logs of other contracts are not
/// read: a token of the batch could name a settled trade in an event of its own.
fn failed_trades<'a>(
    settlement: alloy::primitives::Address,
    logs: impl Iterator<Item = &'a alloy::primitives::Log>,
) -> Vec<FailedTrade> {
    logs.filter(|log| log.address == settlement)
        .filter_map(|log| Settlement::TradeFailed::decode_log(log).ok())
        .map(|failed| FailedTrade {
            token: Address::from(failed.token),
            number: failed.tradeNumber.saturating_to(),
        })
        .collect()
}

fn to_receipt(receipt: &NodeReceipt) -> Receipt {
    let logs = receipt.logs.iter().map(|log| &log.0);
    let failed_trades = receipt
        .to
        .map_or_else(Vec::new, |to| failed_trades(to, logs));
    Receipt {
        tx_hash: TxHash::from(receipt.transaction_hash),
        included_tx_hash: TxHash::from(receipt.transaction_hash),
        block_number: receipt.block_number.unwrap_or_default().to::<u64>(),
        block_hash: TxHash::from(receipt.block_hash.unwrap_or_default()),
        status: if receipt.status.is_zero() {
            ReceiptStatus::Reverted
        } else {
            ReceiptStatus::Success
        },
        gas_used: receipt.gas_used.to::<u64>(),
        from: Address::from(receipt.from),
        to: receipt.to.map(Address::from),
        contract_address: receipt.contract_address.map(Address::from),
        failed_trades,
    }
}

#[cfg(test)]
mod tests {
    use alloy::primitives::Log;

    use super::*;

    #[test]
    fn failed_trades_are_those_that_the_called_contract_names() {
        let (settlement, token) = (Address::of_user("settlement"), Address::of_user("token"));
        let log = |emitter: Address, number: u64| {
            let failed = Settlement::TradeFailed {
                batchId: Default::default(),
                token: token.raw(),
                tradeNumber: U256::from(number),
                reason: Default::default(),
            };
            Log {
                address: emitter.raw(),
                data: failed.encode_log_data(),
            }
        };
        let logs = [log(settlement, 1), log(token, 2)];
        let failed = FailedTrade { token, number: 1 };
        assert_eq!(failed_trades(settlement.raw(), logs.iter()), [failed]);
    }
}
