//! The connector on chains that tests provide: the embedded one, a scripted node, real nodes.
//!
//! | file | content |
//! |---|---|
//! | `contracts` | bodies of tests on a chain with an EVM |
//! | `nodes` | bodies of tests on a node whose blocks the test controls |
//! | `proxy` | a port before a node, which records transactions and can be away |
//!
//! A body is a test without its attribute. Each test target runs it on its own chain.

pub mod contracts;
pub mod nodes;
pub mod proxy;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use alloy::consensus::TxEnvelope;
use alloy::signers::local::PrivateKeySigner;
use chain::contracts::Call;
use chain::{
    Action, Address, ChainConfig, ChainDeps, ChainError, ChainHandle, Connector, Receipt,
    ReceiptStatus, StartError, Submission, TxHash, start_chain,
};
use testkit::eventually;
use tokio_util::sync::CancellationToken;

pub const WAIT: Duration = Duration::from_secs(60);
/// For what must not happen. A dozen rounds of the watcher and of the resends fit in.
pub const MOMENT: Duration = Duration::from_millis(300);

/// A chain with an EVM.
pub trait Evm {
    fn chain_id(&self) -> u64;

    /// URL of its node. `None`: the embedded chain.
    fn url(&self) -> Option<String>;

    /// Gives an account coins, unless it has some.
    async fn fund(&self, account: Address);
}

/// The embedded chain, which gives the operator coins.
pub struct Embedded;

impl Evm for Embedded {
    fn chain_id(&self) -> u64 {
        ChainConfig::default().chain_id
    }

    fn url(&self) -> Option<String> {
        None
    }

    async fn fund(&self, _: Address) {}
}

/// A node whose operator has coins.
pub struct At {
    pub url: String,
    pub chain_id: u64,
}

impl Evm for At {
    fn chain_id(&self) -> u64 {
        self.chain_id
    }

    fn url(&self) -> Option<String> {
        Some(self.url.clone())
    }

    async fn fund(&self, _: Address) {}
}

/// A node whose blocks the test controls. A call returns when its blocks are there.
pub trait Lab: Clone {
    /// Whether a transaction waits until the test makes a block.
    const IS_STEPPED: bool;

    fn chain_id(&self) -> u64;

    /// Serves a port that may be away; returns its URL.
    async fn serve(&self) -> String;

    /// Another node of the same chain, which is away on its own.
    fn peer(&self) -> Self;

    fn set_away(&self, is_away: bool);

    /// Takes the coins of an account that was not funded, if it has any.
    async fn make_poor(&self);

    async fn fund(&self, account: Address);

    /// Makes a block with what waits, unless the node has done that.
    async fn mine(&self);

    /// Adds blocks. Transactions that a connector sends meanwhile may enter them.
    async fn mine_empty(&self, count: usize);

    /// Keeps the waiting transactions of the connector out of the next blocks, which are full.
    async fn fill_blocks(&self);

    /// Makes or awaits blocks, full ones after `fill_blocks`.
    async fn pass_blocks(&self, count: u64);

    /// Puts a transaction of another program into the next block, or into the last one in place of
    /// the transaction with its nonce.
    async fn preempt(&self, transaction: TxEnvelope);

    /// Removes the last blocks and loses their transactions. New blocks have other hashes.
    async fn remove_blocks(&self, count: u64);

    /// Keeps the chain as it is for `restore`.
    async fn keep(&self);

    /// Returns to the kept chain. False: the node cannot.
    async fn restore(&self) -> bool;

    async fn head(&self) -> u64;

    /// Transactions in blocks, with the numbers of these.
    async fn mined(&self) -> Vec<(u64, TxEnvelope)>;

    /// All transactions that connectors sent, once each.
    fn received(&self) -> Vec<TxEnvelope>;

    async fn block_gas_limit(&self) -> u64;
}

pub struct Running {
    pub handle: ChainHandle,
    pub log: Arc<events::Embedded>,
    pub shutdown: CancellationToken,
}

impl Running {
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.handle.stopped().await;
    }

    pub async fn submit(&self, key: &str) -> Submission {
        let submitted = self.handle.connector().submit(key, &call(key)).await;
        submitted.expect("submitted")
    }

    pub async fn receipt(&self, tx_hash: &TxHash) -> Receipt {
        let receipt = self.handle.connector().wait_receipt(tx_hash, WAIT).await;
        receipt.expect("asked").expect("in a final block")
    }

    /// The reason of a failing part of the connector's health.
    pub fn failing(&self, part: &str) -> Option<String> {
        let failing = self.handle.service().health.failing();
        failing.get(part).cloned()
    }
}

pub async fn try_start(folder: &Path, config: ChainConfig) -> Result<Running, StartError> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let log = events::Embedded::open(folder.join("log")).await;
    let log = Arc::new(log.expect("log opens"));
    let shutdown = CancellationToken::new();
    let deps = ChainDeps { log: log.clone() };
    let handle = start_chain(config, deps, shutdown.clone()).await?;
    Ok(Running {
        handle,
        log,
        shutdown,
    })
}

pub async fn start(folder: &Path, config: ChainConfig) -> Running {
    try_start(folder, config).await.expect("the chain starts")
}

/// Starts a connector whose account has coins.
pub async fn start_on(folder: &Path, chain: &impl Evm) -> Running {
    let config = ChainConfig {
        data_dir: folder.join("chain"),
        chain_id: chain.chain_id(),
        seal_interval_ms: 1,
        poll_interval_ms: 5,
        rpc_url: chain.url(),
        ..ChainConfig::default()
    };
    if config.rpc_url.is_some() {
        make_key(folder);
    }
    let running = start(folder, config).await;
    chain.fund(running.handle.connector().operator()).await;
    running
}

/// Settings for a node, with short pauses. Creates the operator's key.
pub async fn config(folder: &Path, node: &impl Lab) -> ChainConfig {
    make_key(folder);
    ChainConfig {
        data_dir: folder.join("chain"),
        chain_id: node.chain_id(),
        rpc_url: Some(node.serve().await),
        poll_interval_ms: 5,
        resend_interval_ms: 10,
        replace_after_blocks: 0,
        ..ChainConfig::default()
    }
}

/// Starts a connector on a node and gives its account coins.
pub async fn start_funded(folder: &Path, config: ChainConfig, node: &impl Lab) -> Running {
    let running = start(folder, config).await;
    node.fund(running.handle.connector().operator()).await;
    running
}

pub async fn run(connector: &Connector, key: &str, action: &Action) -> Receipt {
    let submitted = connector.submit(key, &action.call()).await;
    let tx_hash = submitted.expect("submitted").tx_hash;
    let receipt = connector.wait_receipt(&tx_hash, WAIT).await;
    receipt.expect("asked").expect("in a block")
}

/// Deploys an allow-list and a token.
pub async fn token(connector: &Connector) -> (Address, Address) {
    let registry = connector
        .submit("registry", &Action::DeployRegistry.call())
        .await
        .expect("submitted")
        .contract
        .expect("deploys");
    let deploy = Action::DeployTokenV1 {
        name: "Bond".into(),
        symbol: "BOND-1".into(),
        decimals: 2,
        registry,
        agents: Vec::new(),
    };
    let receipt = run(connector, "token", &deploy).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    (registry, receipt.contract_address.expect("a deployment"))
}

/// A call that depends on the key.
pub fn call(key: &str) -> Call {
    Call {
        to: Some(Address::of_user("contract")),
        data: key.as_bytes().to_vec(),
        gas_limit: Some(100_000),
    }
}

/// Waits until a check holds.
pub async fn until(check: impl Fn() -> bool) {
    eventually(async || check().then_some(())).await;
}

/// Blocks that contain the call of a key.
pub async fn blocks_of(node: &impl Lab, key: &str) -> Vec<u64> {
    use alloy::consensus::Transaction as _;
    let mined = node.mined().await.into_iter();
    let of_key = mined.filter(|(_, transaction)| transaction.input().to_vec() == key.as_bytes());
    of_key.map(|(number, _)| number).collect()
}

/// How often the chain executed the call of a key.
pub async fn executions(node: &impl Lab, key: &str) -> usize {
    blocks_of(node, key).await.len()
}

/// Makes blocks until one of them contains the call of a key; returns its number.
pub async fn mined_in(node: &impl Lab, key: &str) -> u64 {
    eventually(async || {
        if let Some(number) = blocks_of(node, key).await.first() {
            return Some(*number);
        }
        node.mine().await;
        None
    })
    .await
}

pub fn key_file(folder: &Path) -> PathBuf {
    folder.join("chain/operator.key")
}

/// Creates the operator's key, unless the folder has one.
pub fn make_key(folder: &Path) {
    let file = key_file(folder);
    if !file.exists() {
        std::fs::create_dir_all(folder.join("chain")).expect("folder");
        write_key(&file);
    }
}

/// Writes a new key.
pub fn write_key(file: &Path) {
    let key = PrivateKeySigner::random().to_bytes();
    std::fs::write(file, hex::encode(key)).expect("written");
}

/// The reason of an expected `Unavailable`.
pub fn unavailable<T: std::fmt::Debug>(answer: Result<T, ChainError>) -> String {
    match answer {
        Err(ChainError::Unavailable(reason)) => reason,
        other => panic!("{other:?}"),
    }
}
