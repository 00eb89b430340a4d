//! The connector on a chain that it shares: stuck transactions, reorganisations, nodes, signers.

mod node;
mod reorganised;
mod start;
mod stuck;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chain::contracts::Call;
use chain::{
    Address, ChainConfig, ChainDeps, ChainHandle, Receipt, StartError, Submission, TxHash,
    start_chain,
};
use node::{CHAIN_ID, Node};
use testkit::eventually;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
/// For what must not happen. A dozen rounds of the watcher and of the resends fit in.
const MOMENT: Duration = Duration::from_millis(300);

struct Running {
    handle: ChainHandle,
    log: Arc<events::Embedded>,
    shutdown: CancellationToken,
}

/// Settings for a node, with short pauses.
fn config(folder: &Path, url: String) -> ChainConfig {
    ChainConfig {
        data_dir: folder.join("chain"),
        chain_id: CHAIN_ID,
        rpc_url: Some(url),
        poll_interval_ms: 5,
        resend_interval_ms: 10,
        replace_after_blocks: 0,
        ..ChainConfig::default()
    }
}

async fn try_start(folder: &Path, config: ChainConfig) -> Result<Running, StartError> {
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

async fn start(folder: &Path, config: ChainConfig) -> Running {
    try_start(folder, config).await.expect("the chain starts")
}

impl Running {
    async fn stop(self) {
        self.shutdown.cancel();
        self.handle.stopped().await;
    }

    async fn submit(&self, key: &str) -> Submission {
        let submitted = self.handle.connector().submit(key, &call(key)).await;
        submitted.expect("submitted")
    }

    async fn receipt(&self, tx_hash: &TxHash) -> Receipt {
        let receipt = self.handle.connector().wait_receipt(tx_hash, WAIT).await;
        receipt.expect("asked").expect("in a final block")
    }

    /// The reason of a failing part of the connector's health.
    fn failing(&self, part: &str) -> Option<String> {
        let failing = self.handle.service().health.failing();
        failing.get(part).cloned()
    }
}

/// A call that depends on the key.
fn call(key: &str) -> Call {
    Call {
        to: Some(Address::of_user("contract")),
        data: key.as_bytes().to_vec(),
        gas_limit: Some(100_000),
    }
}

/// Waits until a check holds.
async fn until(check: impl Fn() -> bool) {
    eventually(async || check().then_some(())).await;
}

/// How often the chain executed the call of a key.
fn executions(node: &Node, key: &str) -> usize {
    use alloy::consensus::Transaction as _;
    let mined = node.script().mined();
    let executed = mined
        .into_iter()
        .filter(|tx| tx.input().to_vec() == key.as_bytes());
    executed.count()
}

fn key_file(folder: &Path) -> PathBuf {
    folder.join("chain/operator.key")
}
