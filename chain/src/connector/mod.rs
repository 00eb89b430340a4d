//! Access to the chain: the same code for the embedded chain and a remote node.
//!
//! The connector uses alloy's `Provider` over the transport passed to `connect`. One lock
//! serializes submissions in arrival order. The caller supplies an idempotency key per submission.
//! The signed transaction and its nonce are stored under the key before they are sent, so a repeat
//! with the key after a crash sends the same bytes (T13). Nonces are assigned in the order of
//! submission, without gaps. The nonce of a refused transaction is reused.
//!
//! An error determines what the caller does. After `Unavailable` the caller retries with the same
//! key. After `Refused` an unchanged retry fails until the cause is removed.

mod repo;
mod watcher;

use std::sync::Arc;
use std::time::Duration;

use alloy::consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy::eips::{BlockId, BlockNumberOrTag, Encodable2718};
use alloy::network::TransactionBuilder;
use alloy::primitives::{Bytes, TxKind, U256};
use alloy::providers::{DynProvider, Provider, ProviderBuilder};
use alloy::rpc::client::RpcClient;
use alloy::rpc::types::{Filter, TransactionRequest};
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use alloy::sol_types::{SolCall, SolEvent};
use alloy::transports::{RpcError, TransportError};
use async_recursion::async_recursion as boxed;
use tokio::sync::{Mutex, watch};

use crate::contracts::{Call, CfaToken, IdentityRegistry, Settlement};
use crate::{Address, TxHash};
use repo::{Repo, StoredTransaction};
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
            RpcError::ErrorResp(payload) if is_permanent_error(&payload.message) => {
                Self::Refused(payload.message.into_owned())
            }
            RpcError::ErrorResp(payload) => Self::Unavailable(payload.message.into_owned()),
            other => Self::Unavailable(other.to_string()),
        }
    }
}

/// Limit of addresses per log query: nodes refuse long lists.
const FILTER_ADDRESSES: usize = 200;

/// Substrings of final node errors: the node rejected the transaction or call, or has the
/// transaction already. After any other error the node may have accepted the transaction, so its
/// nonce must not be reused.
const PERMANENT_ERRORS: [&str; 12] = [
    "nonce too low",
    "already known",
    "known transaction",
    "intrinsic gas too low",
    "insufficient funds",
    "exceeds block gas limit",
    "underpriced",
    "invalid sender",
    "invalid chain id",
    "transaction type not supported",
    "execution reverted",
    "execution halted",
];

fn is_permanent_error(message: &str) -> bool {
    PERMANENT_ERRORS
        .iter()
        .any(|error| contains(message, error))
}

fn is_nonce_too_low(message: &str) -> bool {
    contains(message, "nonce too low")
}

fn is_already_known(message: &str) -> bool {
    contains(message, "already known") || contains(message, "known transaction")
}

/// Nodes differ in the case of the same text: geth writes `nonce too low`, Besu `Nonce too low`.
fn contains(message: &str, lowercase: &str) -> bool {
    message.to_lowercase().contains(lowercase)
}

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
    pub tx_hash: TxHash,
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
    pub hash: TxHash,
    pub parent_hash: TxHash,
    pub tx_hashes: Vec<TxHash>,
    pub time_s: u64,
    /// Canonical (RLP) bytes of the header.
    pub header: Vec<u8>,
}

/// A transaction sent under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    pub tx_hash: TxHash,
    pub nonce: u64,
    /// Address of the contract, if the call deploys one.
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

struct Inner {
    provider: DynProvider,
    chain_id: u64,
    signer: PrivateKeySigner,
    repo: Repo,
    /// The lock serializes submissions.
    next_nonce: Mutex<u64>,
    /// Number of the last block whose receipts were read.
    last_read_block: watch::Sender<u64>,
}

impl Connector {
    /// Checks the node's chain id and loads the next nonce and the last read block.
    pub(super) async fn connect(
        client: RpcClient,
        chain_id: u64,
        signer: PrivateKeySigner,
        db: events::sqlite::Sqlite,
    ) -> Result<Self, ChainError> {
        let provider = ProviderBuilder::new()
            .disable_recommended_fillers()
            .connect_client(client)
            .erased();
        let node = provider.get_chain_id().await?;
        if node != chain_id {
            return Err(ChainError::WrongChain {
                node,
                configured: chain_id,
            });
        }
        let repo = Repo::new(db);
        let on_chain = provider.get_transaction_count(signer.address()).await?;
        let next_nonce = repo.next_nonce().await?.max(on_chain);
        let (last_read_block, _) = watch::channel(
            repo.cursor()
                .await?
                .map(|(number, _)| number)
                .unwrap_or_default(),
        );
        let inner = Inner {
            provider,
            chain_id,
            signer,
            repo,
            next_nonce: Mutex::new(next_nonce),
            last_read_block,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    pub fn chain_id(&self) -> u64 {
        self.inner.chain_id
    }

    /// The account that signs all transactions.
    pub fn operator(&self) -> Address {
        Address::from(self.inner.signer.address())
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
    #[boxed]
    pub async fn submit(&self, key: &str, call: &Call) -> Result<Submission, ChainError> {
        let (connector, key, call) = (self.clone(), key.to_owned(), call.clone());
        tokio::spawn(async move { connector.submit_locked(&key, &call).await })
            .await
            .map_err(|error| ChainError::Unavailable(format!("submission: {error}")))?
    }

    /// The transaction submitted under a key, if there is one.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn submission(&self, key: &str) -> Result<Option<Submission>, ChainError> {
        // Waits for a submission in progress.
        let _next_nonce = self.inner.next_nonce.lock().await;
        let known = self.inner.repo.by_key(key).await?;
        Ok(known.map(|known| known.submission))
    }

    async fn submit_locked(&self, key: &str, call: &Call) -> Result<Submission, ChainError> {
        let mut next_nonce = self.inner.next_nonce.lock().await;
        if let Some(known) = self.inner.repo.by_key(key).await? {
            if !known.included {
                self.send(&known).await.map_err(|error| match error {
                    // The stored transaction is resent and can still enter a block: the refusal
                    // is not final.
                    ChainError::Refused(reason) => ChainError::Unavailable(reason),
                    other => other,
                })?;
            }
            return Ok(known.submission);
        }
        let gas_limit = match call.gas_limit {
            Some(gas_limit) => gas_limit,
            None => self.estimate_gas(call.to.as_ref(), &call.data).await?,
        };
        let fees = self.inner.provider.estimate_eip1559_fees().await?;
        // The second attempt takes the nonce from the node, in case another program sent
        // transactions from the signing account.
        for attempt in 0..2 {
            let stored = self.sign(
                *next_nonce,
                call,
                gas_limit,
                fees.max_fee_per_gas,
                fees.max_priority_fee_per_gas,
            )?;
            self.inner.repo.insert(key, &stored).await?;
            match self.send(&stored).await {
                Ok(()) => {
                    *next_nonce += 1;
                    metrics::counter!("blockchain_transactions_total", "status" => "SUBMITTED")
                        .increment(1);
                    return Ok(stored.submission);
                }
                Err(ChainError::Refused(reason)) => {
                    // The refused transaction never enters a block: its nonce is reused.
                    self.inner.repo.delete(key).await?;
                    metrics::counter!("blockchain_transactions_total", "status" => "REFUSED")
                        .increment(1);
                    if attempt == 0 && is_nonce_too_low(&reason) {
                        *next_nonce = self
                            .inner
                            .provider
                            .get_transaction_count(self.inner.signer.address())
                            .await?;
                        continue;
                    }
                    return Err(ChainError::Refused(reason));
                }
                Err(other) => {
                    // The node may have the stored transaction: `resend_not_included` resends it.
                    *next_nonce += 1;
                    return Err(other);
                }
            }
        }
        Err(ChainError::Refused("nonce too low".into()))
    }

    fn sign(
        &self,
        nonce: u64,
        call: &Call,
        gas_limit: u64,
        max_fee: u128,
        priority_fee: u128,
    ) -> Result<StoredTransaction, ChainError> {
        let to = call.to.map_or(TxKind::Create, |to| TxKind::Call(to.raw()));
        let tx = TxEip1559 {
            chain_id: self.inner.chain_id,
            nonce,
            gas_limit,
            max_fee_per_gas: max_fee,
            max_priority_fee_per_gas: priority_fee,
            to,
            value: U256::ZERO,
            access_list: Default::default(),
            input: Bytes::from(call.data.clone()),
        };
        let signature = self
            .inner
            .signer
            .sign_hash_sync(&tx.signature_hash())
            .map_err(|error| ChainError::Signature(error.to_string()))?;
        let envelope = TxEnvelope::from(tx.into_signed(signature));
        let contract = call
            .to
            .is_none()
            .then(|| Address::from(self.inner.signer.address().create(nonce)));
        Ok(StoredTransaction {
            submission: Submission {
                tx_hash: TxHash::from(*envelope.tx_hash()),
                nonce,
                contract,
            },
            raw: envelope.encoded_2718(),
            included: false,
        })
    }

    /// Sends signed bytes. Succeeds if the node has them already.
    async fn send(&self, stored: &StoredTransaction) -> Result<(), ChainError> {
        match self.inner.provider.send_raw_transaction(&stored.raw).await {
            Ok(_) => Ok(()),
            Err(error) => match ChainError::from(error) {
                ChainError::Refused(reason) if is_already_known(&reason) => Ok(()),
                ChainError::Refused(reason)
                    if is_nonce_too_low(&reason)
                        && self
                            .unconfirmed_receipt(&stored.submission.tx_hash)
                            .await?
                            .is_some() =>
                {
                    Ok(())
                }
                other => Err(other),
            },
        }
    }

    /// Resends stored transactions that are in no block, oldest first.
    pub(super) async fn resend_not_included(&self) -> Result<usize, ChainError> {
        let _next_nonce = self.inner.next_nonce.lock().await;
        let not_included = self.inner.repo.not_included().await?;
        for stored in &not_included {
            self.send(stored).await?;
        }
        Ok(not_included.len())
    }

    /// The receipt, or `None` until the watcher has read the transaction's block. A read block has
    /// the required confirmations.
    #[boxed]
    pub async fn receipt(&self, tx_hash: &TxHash) -> Result<Option<Receipt>, ChainError> {
        match self.unconfirmed_receipt(tx_hash).await? {
            Some(receipt) if self.is_read(receipt.block_number).await? => Ok(Some(receipt)),
            _ => Ok(None),
        }
    }

    async fn is_read(&self, number: u64) -> Result<bool, ChainError> {
        // The store is updated before the watch channel: a consumer may already have the block's
        // events while the channel has the previous block.
        Ok(number <= *self.inner.last_read_block.borrow()
            || number <= self.stored_last_read_block().await?)
    }

    /// Number of the last block whose receipts were read, as stored.
    #[boxed]
    pub async fn stored_last_read_block(&self) -> Result<u64, ChainError> {
        let cursor = self.inner.repo.cursor().await?;
        Ok(cursor.map_or(0, |(number, _)| number))
    }

    /// The node's receipt; its block may be unconfirmed.
    async fn unconfirmed_receipt(&self, tx_hash: &TxHash) -> Result<Option<Receipt>, ChainError> {
        let receipt = self
            .inner
            .provider
            .get_transaction_receipt(tx_hash.raw())
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
            header: alloy::rlp::encode(&block.header.inner),
        }))
    }

    #[boxed]
    pub async fn block_number(&self) -> Result<u64, ChainError> {
        Ok(self.inner.provider.get_block_number().await?)
    }

    /// Whether the block with this number exists and has this hash.
    #[boxed]
    pub async fn verify_block_hash(&self, number: u64, hash: &TxHash) -> Result<bool, ChainError> {
        Ok(self
            .block(Some(number))
            .await?
            .is_some_and(|block| block.hash == *hash))
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
    #[boxed]
    pub async fn transfers(
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
        logs.sort_by_key(|log| (log.block_number, log.log_index));
        let mut transfers = Vec::with_capacity(logs.len());
        for log in logs {
            // A token contract that the platform did not deploy may declare `Transfer` with other
            // indexed fields.
            let Ok(event) = CfaToken::Transfer::decode_log(&log.inner) else {
                continue;
            };
            let party =
                |raw: alloy::primitives::Address| (!raw.is_zero()).then(|| Address::from(raw));
            transfers.push(TokenTransfer {
                token: Address::from(event.address),
                from: party(event.from),
                to: party(event.to),
                // `u128::MAX` units are impossible too, so capping hides no impossible transfer.
                units: u128::try_from(event.value).unwrap_or(u128::MAX),
                block_number: log.block_number.unwrap_or_default(),
            });
        }
        Ok(transfers)
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

    #[boxed]
    pub async fn is_agent(
        &self,
        contract: &Address,
        account: &Address,
    ) -> Result<bool, ChainError> {
        self.call_view(
            contract,
            CfaToken::isAgentCall {
                account: account.raw(),
            },
        )
        .await
    }
}

fn to_units(value: U256) -> Result<u128, ChainError> {
    u128::try_from(value).map_err(|_| ChainError::Malformed("amount exceeds 128 bits".into()))
}

fn to_receipt(receipt: &alloy::rpc::types::TransactionReceipt) -> Receipt {
    let failed_trades = receipt
        .logs()
        .iter()
        .filter_map(|log| Settlement::TradeFailed::decode_log(&log.inner).ok())
        .map(|failed| FailedTrade {
            token: Address::from(failed.token),
            number: failed.tradeNumber.saturating_to(),
        })
        .collect();
    Receipt {
        tx_hash: TxHash::from(receipt.transaction_hash),
        block_number: receipt.block_number.unwrap_or_default(),
        block_hash: TxHash::from(receipt.block_hash.unwrap_or_default()),
        status: if receipt.status() {
            ReceiptStatus::Success
        } else {
            ReceiptStatus::Reverted
        },
        gas_used: receipt.gas_used,
        from: Address::from(receipt.from),
        to: receipt.to.map(Address::from),
        contract_address: receipt.contract_address.map(Address::from),
        failed_trades,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R064
    #[test]
    fn r064_node_errors_are_known_in_any_case() {
        for text in ["nonce too low: next nonce 5, tx nonce 3", "Nonce too low"] {
            assert!(is_permanent_error(text) && is_nonce_too_low(text), "{text}");
            assert!(!is_already_known(text), "{text}");
        }
        for text in ["already known", "Known transaction"] {
            assert!(is_permanent_error(text) && is_already_known(text), "{text}");
            assert!(!is_nonce_too_low(text), "{text}");
        }
        assert!(!is_permanent_error("Internal error"));
    }
}
