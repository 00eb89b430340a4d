//! Query plans of every statement that the connector executes: none scans a table.

#[allow(dead_code, reason = "each test target uses its part")]
mod common;
#[allow(dead_code, reason = "each test target uses its part")]
#[path = "remote/node.rs"]
mod node;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use alloy::consensus::{Transaction as _, TxEnvelope};
use chain::contracts::Call;
use chain::{Address, ChainConfig, ChainDeps, ChainHandle, start_chain};
use common::{Lab, make_key};
use node::{CHAIN_ID, Node};
use testkit::{eventually, plans};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);

async fn start(folder: &Path, url: String, shutdown: &CancellationToken) -> ChainHandle {
    let log = events::Embedded::open(folder.join("log")).await;
    make_key(folder);
    let config = ChainConfig {
        data_dir: folder.join("chain"),
        chain_id: CHAIN_ID,
        rpc_url: Some(url),
        poll_interval_ms: 5,
        resend_interval_ms: 10,
        replace_after_blocks: 1,
        confirmations: 2,
        ..ChainConfig::default()
    };
    let deps = ChainDeps {
        log: Arc::new(log.expect("log opens")),
    };
    let started = start_chain(config, deps, shutdown.clone()).await;
    started.expect("the chain starts")
}

fn call(key: &str) -> Call {
    Call {
        to: Some(Address::of_user("contract")),
        data: key.as_bytes().to_vec(),
        gas_limit: Some(100_000),
    }
}

fn has_received(node: &Node, is_wanted: impl Fn(&TxEnvelope) -> bool) -> bool {
    node.script().received.iter().any(is_wanted)
}

async fn until(check: impl Fn() -> bool) {
    eventually(async || check().then_some(())).await;
}

/// A cancellation, a new nonce, a reorganisation and a replacement.
async fn run(node: &Node, chain: &ChainHandle) {
    let connector = chain.connector();
    let first = connector.submit("first", &call("first")).await;
    let first = first.expect("submitted");
    {
        let mut script = node.script();
        script.remove_blocks(0);
        script.judge = Some(Box::new(|tx: &TxEnvelope| {
            (!tx.input().is_empty()).then(|| "exceeds block gas limit".into())
        }));
    }
    until(|| has_received(node, |tx| tx.input().is_empty())).await;
    {
        let mut script = node.script();
        script.mine();
        script.mine_empty(2);
        script.judge = None;
    }
    until(|| has_received(node, |tx| tx.nonce() == 1)).await;
    let known = connector.submit("first", &call("first")).await;
    assert_eq!(known.expect("known").tx_hash, first.tx_hash);
    node.script().mine();
    // The watcher has read the block, since it has finalised the one two below it.
    let head = node.script().head();
    until(|| {
        let last_final = connector.last_read_block();
        let number = *last_final.borrow();
        number + 2 >= head
    })
    .await;
    {
        let mut script = node.script();
        script.remove_blocks(1);
        script.mine_empty(2);
    }
    until(|| {
        let mut script = node.script();
        script.mine();
        script.mined().len() == 2
    })
    .await;
    node.script().mine_empty(2);
    let receipt = connector.wait_receipt(&first.tx_hash, WAIT).await;
    receipt.expect("asked").expect("final");
    let second = connector.submit("second", &call("second")).await;
    let second = second.expect("submitted");
    node.script().base_fee = 1_000;
    node.script().mine_empty(1);
    until(|| has_received(node, |tx| tx.nonce() == 2 && tx.max_fee_per_gas() >= 1_000)).await;
    node.script().mine();
    node.script().mine_empty(2);
    let receipt = connector.wait_receipt(&second.tx_hash, WAIT).await;
    receipt.expect("asked").expect("final");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_of_the_connector_scans_a_table() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let url = node.serve().await;
    plans::record();
    let shutdown = CancellationToken::new();
    let chain = start(folder.path(), url, &shutdown).await;
    run(&node, &chain).await;
    shutdown.cancel();
    chain.stopped().await;

    let file = folder.path().join("chain/connector.sqlite");
    let explained = plans::explain(&[file.as_path()]).await;
    explained.assert_no_scans(&[plans::Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per version, read at startup",
    }]);
    explained.assert_explained(&[
        "SELECT MAX(nonce) FROM attempt",
        "FROM attempt WHERE tx_hash =",
        "FROM attempt WHERE key =",
        "FROM attempt JOIN submission ON submission.key = attempt.key WHERE attempt.tx_hash =",
        "FROM attempt JOIN submission ON submission.key = attempt.key WHERE attempt.tx_hash IN",
        "FROM submission JOIN attempt",
        "FROM submission WHERE key =",
        "AND nonce IS NULL AND rowid >",
        "SELECT nonce FROM submission WHERE nonce >=",
        "UPDATE submission SET latest =",
        "UPDATE submission SET included = NULL",
        "UPDATE submission SET included = $1",
        "UPDATE submission SET block_number =",
        "UPDATE submission SET nonce = NULL",
        "UPDATE submission SET nonce = $1",
        "UPDATE attempt SET raw",
        "FROM unconfirmed WHERE number >= 0",
        "DELETE FROM unconfirmed WHERE number >",
        "DELETE FROM unconfirmed WHERE number <=",
        "FROM cursor WHERE id = 1",
        "FROM chain WHERE id = 1",
    ]);
}
