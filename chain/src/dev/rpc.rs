//! The development chain's JSON-RPC methods, named as in Ethereum's execution API.
//!
//! Only the head's state is available: a block parameter that selects another block is refused.
//!
//! A message (`eth_call`, `eth_estimateGas`) executes on a blocking thread and read-locks the state
//! for one execution. A message of the JSON-RPC port may use [`PORT_CALL_GAS_MAX`] gas, and
//! [`PORT_CALLS_MAX`] of them execute concurrently. As on other nodes, a larger gas limit is
//! lowered, not refused. A message of the connector may use the gas of a block.

use std::borrow::Cow;
use std::sync::Arc;

use alloy::consensus::transaction::Recovered;
use alloy::consensus::{Header, TxEnvelope};
use alloy::eips::{BlockId, BlockNumberOrTag, Decodable2718};
use alloy::primitives::{Address, B256, Bytes, TxKind, U64, U256};
use alloy::rpc::json_rpc::ErrorPayload;
use alloy::rpc::types::{
    Block, BlockTransactions, FeeHistory, Filter, Header as RpcHeader, Log, Transaction,
    TransactionReceipt, TransactionRequest,
};
use futures::TryStreamExt;
use revm::context::TxEnv;
use revm::context::result::ExecutionResult;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::repo::StoredTransaction;
use super::state::{ExecutionError, State};
use super::{BLOCK_GAS_LIMIT, DevChain, StoreError};

/// Limit of logs per query.
const LOG_LIMIT: usize = 20_000;
/// Limit of data in the logs of a query, in bytes.
const LOG_BYTES_MAX: usize = 16 << 20;
/// Limit of blocks per log query over the port.
const PORT_LOG_BLOCKS_MAX: u64 = 10_000;

/// Gas limit of a message of the JSON-RPC port: the default of geth, about 0.1 s of one core.
const PORT_CALL_GAS_MAX: u64 = 50_000_000;
/// Limit of concurrent messages of the port. Two would occupy both cores of a small machine.
pub const PORT_CALLS_MAX: usize = 1;

const _: () = assert!(PORT_CALL_GAS_MAX <= BLOCK_GAS_LIMIT);

/// Source of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The connector of this process.
    Connector,
    /// The JSON-RPC port.
    Port,
}

impl Source {
    fn call_gas_max(self) -> u64 {
        match self {
            Self::Connector => BLOCK_GAS_LIMIT,
            Self::Port => PORT_CALL_GAS_MAX,
        }
    }
}

/// JSON-RPC error object.
#[derive(Debug, Serialize)]
pub struct RpcFailure {
    code: i64,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Value>,
}

impl RpcFailure {
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            data: None,
        }
    }

    pub fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(-32602, message)
    }

    /// The server refuses the request (-32000): the pool, an execution, or a limit of a query.
    pub fn rejected(message: impl Into<String>) -> Self {
        Self::new(-32000, message)
    }

    fn reverted(output: &Bytes) -> Self {
        let reason = alloy::sol_types::decode_revert_reason(output)
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        Self {
            code: 3,
            message: format!("execution reverted{reason}"),
            data: Some(json!(output)),
        }
    }

    pub fn into_payload(self) -> ErrorPayload {
        let data = self.data.and_then(|data| to_raw_value(&data).ok());
        ErrorPayload {
            code: self.code,
            message: Cow::Owned(self.message),
            data,
        }
    }
}

impl From<StoreError> for RpcFailure {
    fn from(error: StoreError) -> Self {
        Self::new(-32603, error.to_string())
    }
}

impl From<ExecutionError> for RpcFailure {
    fn from(error: ExecutionError) -> Self {
        Self::rejected(error.to_string())
    }
}

struct Params(Vec<Value>);

impl Params {
    fn new(params: Value) -> Result<Self, RpcFailure> {
        match params {
            Value::Array(params) => Ok(Self(params)),
            Value::Null => Ok(Self(Vec::new())),
            _ => Err(RpcFailure::invalid_params("params must be an array")),
        }
    }

    fn take<T: DeserializeOwned>(&mut self, index: usize, name: &str) -> Result<T, RpcFailure> {
        let value = self
            .0
            .get_mut(index)
            .map(Value::take)
            .unwrap_or(Value::Null);
        serde_json::from_value(value)
            .map_err(|error| RpcFailure::invalid_params(format!("{name}: {error}")))
    }

    fn block(&mut self, index: usize) -> Result<BlockId, RpcFailure> {
        Ok(self
            .take::<Option<BlockId>>(index, "block")?
            .unwrap_or_default())
    }
}

impl DevChain {
    /// Executes one JSON-RPC method.
    pub(super) async fn handle(
        &self,
        method: &str,
        params: Value,
        source: Source,
    ) -> Result<Value, RpcFailure> {
        self.check_healthy()?;
        let mut params = Params::new(params)?;
        let value = match method {
            "web3_clientVersion" => json!(concat!("platform-devchain/", env!("CARGO_PKG_VERSION"))),
            "net_version" => json!(self.inner.chain_id.to_string()),
            "net_listening" => json!(true),
            "eth_syncing" => json!(false),
            "eth_accounts" => json!([]),
            "eth_chainId" => json!(U64::from(self.inner.chain_id)),
            "eth_blockNumber" => json!(U64::from(self.inner.state.read().await.head.number)),
            // The lowest price accepted from external accounts.
            "eth_gasPrice" | "eth_maxPriorityFeePerGas" => json!(U64::ONE),
            "eth_feeHistory" => json!(self.fee_history(params.take(0, "blockCount")?).await),
            "eth_sendRawTransaction" => json!(self.submit_raw(&params.take(0, "data")?).await?),
            "eth_getBalance" => json!(
                self.head_state(params.block(1)?)
                    .await?
                    .account(params.take(0, "address")?)
                    .balance
            ),
            "eth_getCode" => json!(
                self.head_state(params.block(1)?)
                    .await?
                    .code(params.take(0, "address")?)
            ),
            "eth_getStorageAt" => {
                let state = self.head_state(params.block(2)?).await?;
                json!(B256::from(
                    state.slot(params.take(0, "address")?, params.take(1, "slot")?)
                ))
            }
            "eth_getTransactionCount" => {
                let block = params.block(1)?;
                let address: Address = params.take(0, "address")?;
                let state = self.head_state(block).await?;
                let nonce = state.account(address).nonce;
                json!(U64::from(if block.is_pending() {
                    self.pool().next_nonce(address, nonce)
                } else {
                    nonce
                }))
            }
            "eth_call" => {
                let block = params.block(1)?;
                let message = message_env(params.take(0, "transaction")?, source.call_gas_max());
                json!(output_of(self.call(source, block, message).await??)?)
            }
            "eth_estimateGas" => {
                let block = params.block(1)?;
                let message = message_env(params.take(0, "transaction")?, source.call_gas_max());
                json!(U64::from(self.estimate_gas(source, block, message).await?))
            }
            other => return self.handle_blocks(other, params, source).await,
        };
        Ok(value)
    }

    /// Reads of blocks, their transactions and logs.
    async fn handle_blocks(
        &self,
        method: &str,
        mut params: Params,
        source: Source,
    ) -> Result<Value, RpcFailure> {
        let value = match method {
            "eth_getTransactionReceipt" => {
                let stored = self
                    .inner
                    .store
                    .transaction(params.take(0, "hash")?)
                    .await?;
                json!(stored.as_ref().map(|stored| &stored.receipt))
            }
            "eth_getTransactionByHash" => self.transaction_by_hash(params.take(0, "hash")?).await?,
            "eth_getBlockByNumber" => {
                let tag: BlockNumberOrTag = params.take(0, "block")?;
                self.block(
                    self.header_of(BlockId::Number(tag)).await?,
                    params.take::<Option<bool>>(1, "full")?.unwrap_or(false),
                )
                .await?
            }
            "eth_getBlockByHash" => {
                let hash: B256 = params.take(0, "hash")?;
                self.block(
                    self.inner.store.header_by_hash(hash).await?,
                    params.take::<Option<bool>>(1, "full")?.unwrap_or(false),
                )
                .await?
            }
            "eth_getBlockReceipts" => {
                let stored = self.block_transactions(params.block(0)?).await?;
                json!(stored.as_deref().map(receipts))
            }
            "eth_getLogs" => json!(self.logs(params.take(0, "filter")?, source).await?),
            other => {
                return Err(RpcFailure::new(
                    -32601,
                    format!("the method {other} does not exist"),
                ));
            }
        };
        Ok(value)
    }

    /// As [`Self::handle`], as text. The answers of a thousand logs are written without the tree of
    /// values in between, which takes several times as long.
    pub(super) async fn handle_as_text(
        &self,
        method: &str,
        params: Value,
        source: Source,
    ) -> Result<Box<RawValue>, RpcFailure> {
        let text = match method {
            "eth_getBlockReceipts" => {
                self.check_healthy()?;
                let stored = self.block_transactions(Params::new(params)?.block(0)?);
                to_raw_value(&stored.await?.as_deref().map(receipts))
            }
            "eth_getLogs" => {
                self.check_healthy()?;
                let filter = Params::new(params)?.take(0, "filter")?;
                to_raw_value(&self.logs(filter, source).await?)
            }
            _ => to_raw_value(&self.handle(method, params, source).await?),
        };
        text.map_err(|error| RpcFailure::new(-32603, error.to_string()))
    }

    fn check_healthy(&self) -> Result<(), RpcFailure> {
        if self.is_healthy() {
            return Ok(());
        }
        Err(RpcFailure::new(
            -32603,
            "the chain is halted: a block cannot be stored",
        ))
    }

    /// Transactions of a block; `None`: it does not exist.
    async fn block_transactions(
        &self,
        block: BlockId,
    ) -> Result<Option<Vec<Arc<StoredTransaction>>>, RpcFailure> {
        let Some(header) = self.header_of(block).await? else {
            return Ok(None);
        };
        let stored = self.inner.store.transactions(header.number, header.number);
        Ok(Some(stored.try_collect().await?))
    }

    async fn head_state(
        &self,
        block: BlockId,
    ) -> Result<tokio::sync::RwLockReadGuard<'_, State>, RpcFailure> {
        let state = self.inner.state.read().await;
        check_is_head(&state, block)?;
        Ok(state)
    }

    /// Executes a message on the head, on a blocking thread so that it delays no other request. A
    /// started execution completes and keeps its permit even if the caller drops the future.
    async fn call(
        &self,
        source: Source,
        block: BlockId,
        message: TxEnv,
    ) -> Result<Result<ExecutionResult, ExecutionError>, RpcFailure> {
        let permit = match source {
            Source::Connector => None,
            Source::Port => {
                let permits = self.inner.port_calls.clone();
                Some(permits.acquire_owned().await.expect("never closed"))
            }
        };
        let state = self.inner.state.clone().read_owned().await;
        check_is_head(&state, block)?;
        let executed = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            state.call(message)
        });
        executed
            .await
            .map_err(|error| RpcFailure::new(-32603, format!("execution stopped: {error}")))
    }

    /// Estimates the smallest sufficient gas limit, to within 1/64. Tries the gas used plus the
    /// reserve of nested calls (EIP-150), then bisects. Blocks may be sealed between attempts.
    async fn estimate_gas(
        &self,
        source: Source,
        block: BlockId,
        message: TxEnv,
    ) -> Result<u64, RpcFailure> {
        let with_limit = |gas_limit| {
            let message = TxEnv {
                gas_limit,
                ..message.clone()
            };
            self.call(source, block, message)
        };
        let result = with_limit(message.gas_limit).await??;
        let gas = *result.gas();
        output_of(result)?;
        let mut enough = message.gas_limit;
        let mut too_little = gas.tx_gas_used().saturating_sub(1);
        let mut attempt = (gas.total_gas_spent() + gas.total_gas_spent() / 63 + 2300).min(enough);
        while too_little + 1 < enough && (enough - too_little) > enough / 64 {
            // A limit below the intrinsic gas is an error, not a failed execution. In both cases
            // the limit is too low.
            let result = with_limit(attempt).await?;
            if result.is_ok_and(|result| result.is_success()) {
                enough = attempt
            } else {
                too_little = attempt
            }
            attempt = too_little + (enough - too_little) / 2;
        }
        Ok(enough)
    }

    async fn header_of(&self, block: BlockId) -> Result<Option<Header>, RpcFailure> {
        Ok(match block {
            BlockId::Hash(hash) => self.inner.store.header_by_hash(hash.block_hash).await?,
            BlockId::Number(BlockNumberOrTag::Number(number)) => {
                self.inner.store.header_by_number(number).await?
            }
            BlockId::Number(BlockNumberOrTag::Earliest) => {
                self.inner.store.header_by_number(0).await?
            }
            BlockId::Number(_) => Some(self.inner.state.read().await.head.clone()),
        })
    }

    async fn block(&self, header: Option<Header>, full: bool) -> Result<Value, RpcFailure> {
        let Some(header) = header else {
            return Ok(Value::Null);
        };
        let (number, timestamp) = (header.number, header.timestamp);
        let store = &self.inner.store;
        let transactions = if full {
            let stored: Vec<_> = store.transactions(number, number).try_collect().await?;
            let stored = stored.iter();
            let transactions = stored.map(|stored| rpc_transaction(stored, timestamp));
            BlockTransactions::Full(transactions.collect::<Result<_, _>>()?)
        } else {
            BlockTransactions::Hashes(store.hashes(number).await?)
        };
        let block: Block = Block {
            header: RpcHeader::new(header),
            uncles: Vec::new(),
            transactions,
            withdrawals: Some(Default::default()),
        };
        Ok(json!(block))
    }

    async fn transaction_by_hash(&self, hash: B256) -> Result<Value, RpcFailure> {
        if let Some(stored) = self.inner.store.transaction(hash).await? {
            let header = self
                .inner
                .store
                .header_by_number(stored.receipt.block_number.unwrap_or_default())
                .await?;
            return Ok(json!(rpc_transaction(
                &stored,
                header.map(|header| header.timestamp).unwrap_or_default()
            )?));
        }
        let waiting = self.pool().get(hash).cloned();
        Ok(match waiting {
            Some(inner) => json!(Transaction {
                inner,
                block_hash: None,
                block_number: None,
                transaction_index: None,
                effective_gas_price: None,
                block_timestamp: None
            }),
            None => Value::Null,
        })
    }

    async fn logs(&self, filter: Filter, source: Source) -> Result<Vec<Log>, RpcFailure> {
        let head = self.inner.state.read().await.head.number;
        let (from, to) = match filter.get_block_hash() {
            Some(hash) => match self.inner.store.header_by_hash(hash).await? {
                Some(header) => (header.number, header.number),
                None => return Err(RpcFailure::rejected("unknown block")),
            },
            None => (
                filter.get_from_block().unwrap_or(head),
                filter.get_to_block().unwrap_or(head),
            ),
        };
        if source == Source::Port && to.saturating_sub(from) >= PORT_LOG_BLOCKS_MAX {
            return Err(RpcFailure::rejected(format!(
                "query of more than {PORT_LOG_BLOCKS_MAX} blocks"
            )));
        }
        let (mut found, mut bytes) = (Vec::new(), 0);
        let mut transactions = self.inner.store.transactions(from, to);
        while let Some(stored) = transactions.try_next().await? {
            for log in stored.receipt.logs() {
                if filter.rpc_matches(log) {
                    bytes += log.data().data.len();
                    found.push(log.clone());
                }
            }
            if found.len() > LOG_LIMIT || bytes > LOG_BYTES_MAX {
                return Err(RpcFailure::rejected(format!(
                    "query returned more than {LOG_LIMIT} results or {LOG_BYTES_MAX} bytes"
                )));
            }
        }
        Ok(found)
    }

    async fn fee_history(&self, count: U64) -> FeeHistory {
        let head = self.inner.state.read().await.head.number;
        let count = count.to::<u64>().clamp(1, 1024).min(head + 1);
        FeeHistory {
            base_fee_per_gas: vec![0; count as usize + 1],
            gas_used_ratio: vec![0.0; count as usize],
            base_fee_per_blob_gas: Vec::new(),
            blob_gas_used_ratio: Vec::new(),
            oldest_block: head + 1 - count,
            reward: Some(vec![vec![1]; count as usize]),
        }
    }
}

fn receipts(stored: &[Arc<StoredTransaction>]) -> Vec<&TransactionReceipt> {
    stored.iter().map(|stored| &stored.receipt).collect()
}

fn rpc_transaction(
    stored: &StoredTransaction,
    block_timestamp: u64,
) -> Result<Transaction, RpcFailure> {
    let envelope = TxEnvelope::decode_2718_exact(stored.raw.as_ref())
        .map_err(|error| StoreError::Corrupt(error.to_string()))?;
    Ok(Transaction {
        inner: Recovered::new_unchecked(envelope, stored.receipt.from),
        block_hash: stored.receipt.block_hash,
        block_number: stored.receipt.block_number,
        transaction_index: stored.receipt.transaction_index,
        effective_gas_price: Some(stored.receipt.effective_gas_price),
        block_timestamp: Some(block_timestamp),
    })
}

fn check_is_head(state: &State, block: BlockId) -> Result<(), RpcFailure> {
    let is_head = match block {
        BlockId::Number(BlockNumberOrTag::Number(number)) => number == state.head.number,
        BlockId::Number(BlockNumberOrTag::Earliest) => state.head.number == 0,
        BlockId::Number(_) => true,
        BlockId::Hash(hash) => hash.block_hash == state.head_hash,
    };
    if is_head {
        return Ok(());
    }
    Err(RpcFailure::rejected(
        "state is kept for the latest block only",
    ))
}

/// Builds the environment of a message; its gas limit is at most `gas_max`.
fn message_env(request: TransactionRequest, gas_max: u64) -> TxEnv {
    TxEnv {
        caller: request.from.unwrap_or_default(),
        gas_limit: request.gas.unwrap_or(gas_max).min(gas_max),
        // The gas price is zero, so a reader needs no coins.
        gas_price: 0,
        kind: request.to.unwrap_or(TxKind::Create),
        value: request.value.unwrap_or(U256::ZERO),
        data: request.input.into_input().unwrap_or_default(),
        chain_id: None,
        ..TxEnv::default()
    }
}

/// The output of a successful execution.
fn output_of(result: ExecutionResult) -> Result<Bytes, RpcFailure> {
    match result {
        ExecutionResult::Success { output, .. } => Ok(output.into_data()),
        ExecutionResult::Revert { output, .. } => Err(RpcFailure::reverted(&output)),
        ExecutionResult::Halt { reason, .. } => Err(RpcFailure::rejected(format!(
            "execution halted: {reason:?}"
        ))),
    }
}
