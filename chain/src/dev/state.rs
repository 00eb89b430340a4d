//! State and transaction execution of the development chain: revm on an in-memory database.
//!
//! `execute_block` turns ready transactions and a time into a block and its state changes. It does
//! no I/O: the caller stores the result. The rules are those of Shanghai with a base fee of zero.
//! Gas is counted as on any chain.
//!
//! `state_root` is not a Merkle root: it is keccak256 over the parent's value and the block's
//! sorted state changes. It commits to the whole history of the state, at a cost proportional to
//! the block. The other roots, the bloom and the header hash follow Ethereum's rules.

use std::collections::BTreeMap;

use alloy::consensus::proofs::{calculate_receipt_root, calculate_transaction_root};
use alloy::consensus::transaction::Recovered;
use alloy::consensus::{
    EMPTY_OMMER_ROOT_HASH, EMPTY_ROOT_HASH, Eip658Value, Header, Receipt, ReceiptEnvelope,
    Transaction as _, TxEnvelope, TxReceipt, TxType, Typed2718,
};
use alloy::primitives::{Address, B64, B256, Bloom, Bytes, Log, U256, keccak256};
use revm::context::result::{EVMError, ExecutionResult, InvalidTransaction, ResultAndState};
use revm::context::{BlockEnv, TxEnv};
use revm::database::{CacheDB, EmptyDB};
use revm::database_interface::WrapDatabaseRef;
use revm::primitives::hardfork::SpecId;
use revm::state::{AccountInfo, Bytecode, EvmState};
use revm::{Context, DatabaseCommit, ExecuteEvm, MainBuilder, MainContext};

/// EVM rules.
pub const SPEC: SpecId = SpecId::SHANGHAI;

#[derive(Debug, thiserror::Error)]
pub enum ExecutionError {
    #[error("{0}")]
    Invalid(InvalidTransaction),
    #[error("execution failed: {0}")]
    Fatal(String),
}

impl<E: std::fmt::Debug> From<EVMError<E>> for ExecutionError {
    fn from(error: EVMError<E>) -> Self {
        match error {
            EVMError::Transaction(invalid) => Self::Invalid(invalid),
            other => Self::Fatal(format!("{other:?}")),
        }
    }
}

/// State changes of one block, ordered by key so that the encoding is unique.
#[derive(Debug, Default)]
pub struct StateDiff {
    pub accounts: BTreeMap<Address, AccountInfo>,
    pub slots: BTreeMap<(Address, U256), U256>,
    pub codes: BTreeMap<B256, Bytes>,
}

impl StateDiff {
    /// Adds the state changes of one transaction.
    fn record(&mut self, state: &EvmState) {
        for (address, account) in state {
            if !account.is_touched() {
                continue;
            }
            assert!(
                !account.is_selfdestructed(),
                "the development chain does not support SELFDESTRUCT"
            );
            for (key, slot) in account.changed_storage_slots() {
                self.slots.insert((*address, *key), slot.present_value);
            }
            if let Some(code) = account.info.code.as_ref().filter(|code| !code.is_empty()) {
                self.codes
                    .entry(account.info.code_hash)
                    .or_insert_with(|| code.original_bytes());
            }
            let mut info = account.info.clone();
            info.code = None;
            self.accounts.insert(*address, info);
        }
    }

    /// The `state_root` of the block after `parent`.
    fn commitment(&self, parent: B256) -> B256 {
        let mut bytes = parent.to_vec();
        for (address, info) in &self.accounts {
            bytes.extend_from_slice(address.as_slice());
            bytes.extend_from_slice(&info.nonce.to_be_bytes());
            bytes.extend_from_slice(&info.balance.to_be_bytes::<32>());
            bytes.extend_from_slice(info.code_hash.as_slice());
        }
        for ((address, key), value) in &self.slots {
            bytes.extend_from_slice(address.as_slice());
            bytes.extend_from_slice(&key.to_be_bytes::<32>());
            bytes.extend_from_slice(&value.to_be_bytes::<32>());
        }
        keccak256(&bytes)
    }
}

/// A transaction in a block, with its result.
#[derive(Debug)]
pub struct Included {
    pub transaction: Recovered<TxEnvelope>,
    pub success: bool,
    pub gas_used: u64,
    pub cumulative_gas_used: u64,
    pub contract_address: Option<Address>,
    pub logs: Vec<Log>,
    pub bloom: Bloom,
}

impl Included {
    /// The consensus receipt with these logs.
    pub fn envelope<T>(&self, logs: Vec<T>) -> ReceiptEnvelope<T> {
        let receipt = Receipt {
            status: Eip658Value::Eip658(self.success),
            cumulative_gas_used: self.cumulative_gas_used,
            logs,
        };
        let receipt = alloy::consensus::ReceiptWithBloom {
            receipt,
            logs_bloom: self.bloom,
        };
        match self.transaction.inner().ty() {
            0 => ReceiptEnvelope::Legacy(receipt),
            1 => ReceiptEnvelope::Eip2930(receipt),
            _ => ReceiptEnvelope::Eip1559(receipt),
        }
    }
}

#[derive(Debug)]
pub struct Block {
    pub header: Header,
    pub hash: B256,
    pub transactions: Vec<Included>,
    pub diff: StateDiff,
    /// Ready transactions that could not execute, with the reason.
    pub dropped: Vec<(B256, String)>,
}

pub struct State {
    pub db: CacheDB<EmptyDB>,
    pub head: Header,
    pub head_hash: B256,
    chain_id: u64,
    block_gas_limit: u64,
}

impl State {
    pub fn new(chain_id: u64, block_gas_limit: u64, db: CacheDB<EmptyDB>, head: Header) -> Self {
        let head_hash = head.hash_slow();
        Self {
            db,
            head,
            head_hash,
            chain_id,
            block_gas_limit,
        }
    }

    /// Block 0, in which the `funded` accounts have coins.
    pub fn genesis(
        chain_id: u64,
        block_gas_limit: u64,
        funded: &[Address],
        time_s: u64,
    ) -> (Self, StateDiff) {
        let mut db = CacheDB::new(EmptyDB::default());
        let mut diff = StateDiff::default();
        for address in funded {
            let info = AccountInfo {
                balance: U256::from(10u64).pow(U256::from(24u64)),
                ..AccountInfo::default()
            };
            db.insert_account_info(*address, info.clone());
            diff.accounts
                .insert(*address, AccountInfo { code: None, ..info });
        }
        let root = diff.commitment(B256::ZERO);
        let header = header(B256::ZERO, 0, time_s, block_gas_limit, root);
        (Self::new(chain_id, block_gas_limit, db, header), diff)
    }

    pub fn account(&self, address: Address) -> AccountInfo {
        self.db
            .cache
            .accounts
            .get(&address)
            .map(|account| account.info.clone())
            .unwrap_or_default()
    }

    pub fn code(&self, address: Address) -> Bytes {
        let hash = self.account(address).code_hash;
        self.db
            .cache
            .contracts
            .get(&hash)
            .map(Bytecode::original_bytes)
            .unwrap_or_default()
    }

    pub fn slot(&self, address: Address, key: U256) -> U256 {
        self.db
            .cache
            .accounts
            .get(&address)
            .and_then(|account| account.storage.get(&key))
            .copied()
            .unwrap_or_default()
    }

    /// Executes a message and discards its changes. The nonce is not checked.
    pub fn call(&self, message: TxEnv) -> Result<ExecutionResult, ExecutionError> {
        let block = self.next_block_env(self.head.timestamp);
        let chain_id = self.chain_id;
        let mut evm = Context::mainnet()
            .with_db(WrapDatabaseRef(&self.db))
            .modify_cfg_chained(|cfg| {
                cfg.chain_id = chain_id;
                cfg.set_spec_and_mainnet_gas_params(SPEC);
                cfg.disable_nonce_check = true;
                cfg.tx_gas_limit_cap = Some(u64::MAX);
            })
            .with_block(block)
            .build_mainnet();
        Ok(evm.transact(message)?.result)
    }

    /// Executes the transactions in order and advances the head. The caller makes the block durable
    /// before it is visible.
    pub fn execute_block(&mut self, ready: Vec<Recovered<TxEnvelope>>, time_s: u64) -> Block {
        let time_s = time_s.max(self.head.timestamp);
        let env = self.next_block_env(time_s);
        let mut diff = StateDiff::default();
        let mut included: Vec<Included> = Vec::with_capacity(ready.len());
        let mut dropped = Vec::new();
        for transaction in ready {
            let outcome = match self.execute(&transaction, env.clone()) {
                Ok(outcome) => outcome,
                Err(reason) => {
                    dropped.push((*transaction.inner().tx_hash(), reason.to_string()));
                    continue;
                }
            };
            diff.record(&outcome.state);
            self.keep(outcome.state);
            let gas_before = included.last().map_or(0, |last| last.cumulative_gas_used);
            included.push(included_of(transaction, &outcome.result, gas_before));
        }
        let mut header = header(
            self.head_hash,
            self.head.number + 1,
            time_s,
            self.block_gas_limit,
            diff.commitment(self.head.state_root),
        );
        seal_transactions(&mut header, &included);
        let hash = header.hash_slow();
        self.db
            .cache
            .block_hashes
            .insert(U256::from(header.number), hash);
        self.head = header.clone();
        self.head_hash = hash;
        Block {
            header,
            hash,
            transactions: included,
            diff,
            dropped,
        }
    }

    /// Executes a transaction and keeps its changes, without a block. False: it reverted.
    pub fn execute_bare(
        &mut self,
        transaction: &Recovered<TxEnvelope>,
    ) -> Result<bool, ExecutionError> {
        let env = self.next_block_env(self.head.timestamp);
        let outcome = self.execute(transaction, env)?;
        self.keep(outcome.state);
        Ok(outcome.result.is_success())
    }

    /// Executes a transaction without its changes.
    fn execute(
        &mut self,
        transaction: &Recovered<TxEnvelope>,
        env: BlockEnv,
    ) -> Result<ResultAndState, ExecutionError> {
        let chain_id = self.chain_id;
        let mut evm = Context::mainnet()
            .with_db(&mut self.db)
            .modify_cfg_chained(|cfg| {
                cfg.chain_id = chain_id;
                cfg.set_spec_and_mainnet_gas_params(SPEC);
                cfg.tx_gas_limit_cap = Some(u64::MAX);
            })
            .with_block(env)
            .build_mainnet();
        Ok(evm.transact(tx_env(transaction))?)
    }

    fn keep(&mut self, state: EvmState) {
        self.db.commit(state);
        self.db.cache.logs.clear();
    }

    fn next_block_env(&self, time_s: u64) -> BlockEnv {
        BlockEnv {
            number: U256::from(self.head.number + 1),
            timestamp: U256::from(time_s),
            gas_limit: self.block_gas_limit,
            basefee: 0,
            difficulty: U256::ZERO,
            prevrandao: Some(self.head_hash),
            ..Default::default()
        }
    }
}

fn header(parent_hash: B256, number: u64, time_s: u64, gas_limit: u64, state_root: B256) -> Header {
    Header {
        parent_hash,
        ommers_hash: EMPTY_OMMER_ROOT_HASH,
        state_root,
        transactions_root: EMPTY_ROOT_HASH,
        receipts_root: EMPTY_ROOT_HASH,
        number,
        gas_limit,
        timestamp: time_s,
        mix_hash: parent_hash,
        nonce: B64::ZERO,
        base_fee_per_gas: Some(0),
        withdrawals_root: Some(EMPTY_ROOT_HASH),
        ..Header::default()
    }
}

/// `gas_before`: gas of the block's earlier transactions.
fn included_of(
    transaction: Recovered<TxEnvelope>,
    result: &ExecutionResult,
    gas_before: u64,
) -> Included {
    let (success, gas_used) = (result.is_success(), result.tx_gas_used());
    // A reverted transaction leaves no logs.
    let logs = match success {
        true => result.logs().to_vec(),
        false => Vec::new(),
    };
    let mut bloom = Bloom::ZERO;
    logs.iter().for_each(|log| bloom.accrue_log(log));
    Included {
        success,
        gas_used,
        cumulative_gas_used: gas_before + gas_used,
        contract_address: result.created_address().filter(|_| success),
        bloom,
        logs,
        transaction,
    }
}

/// Sets what a header states of its block's transactions.
fn seal_transactions(header: &mut Header, included: &[Included]) {
    header.gas_used = included.last().map_or(0, |last| last.cumulative_gas_used);
    let transactions = included.iter().map(|tx| tx.transaction.inner().clone());
    let transactions: Vec<TxEnvelope> = transactions.collect();
    header.transactions_root = calculate_transaction_root(&transactions);
    let receipts = included.iter().map(|tx| tx.envelope(tx.logs.clone()));
    let receipts: Vec<ReceiptEnvelope> = receipts.collect();
    header.receipts_root = calculate_receipt_root(&receipts);
    let blooms = receipts.iter().map(|receipt| receipt.bloom());
    header.logs_bloom = blooms.fold(Bloom::ZERO, |all, bloom| all | bloom);
}

fn tx_env(transaction: &Recovered<TxEnvelope>) -> TxEnv {
    let tx = transaction.inner();
    TxEnv {
        tx_type: tx.ty(),
        caller: transaction.signer(),
        gas_limit: tx.gas_limit(),
        gas_price: tx.max_fee_per_gas(),
        kind: tx.kind(),
        value: tx.value(),
        data: tx.input().clone(),
        nonce: tx.nonce(),
        chain_id: tx.chain_id(),
        access_list: tx.access_list().cloned().unwrap_or_default(),
        gas_priority_fee: if tx.ty() == TxType::Eip1559 as u8 {
            tx.max_priority_fee_per_gas()
        } else {
            None
        },
        ..TxEnv::default()
    }
}
