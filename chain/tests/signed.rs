//! The signed transaction as a node receives it: a recording proxy is between connector and node.

#[allow(dead_code, reason = "each test target uses its part")]
mod common;

use std::sync::Arc;

use chain::{ChainConfig, ChainDeps, start_chain};
use common::{At, contracts};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Not the default, so a constant in the code would be noticed.
const CHAIN_ID: u64 = 90_210;

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_the_node_receives_transactions_signed_by_the_operator_for_the_configured_chain() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let log = events::Embedded::open(folder.path().join("log")).await;
    let log = Arc::new(log.expect("log opens"));
    let shutdown = CancellationToken::new();
    let config = ChainConfig {
        data_dir: folder.path().join("node"),
        chain_id: CHAIN_ID,
        seal_interval_ms: 1,
        ..ChainConfig::default()
    };
    let deps = ChainDeps { log };
    let node = start_chain(config, deps, shutdown.clone()).await;
    let node = node.expect("the chain starts");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    node.serve_json_rpc(listener);
    let at = At {
        url: url.clone(),
        chain_id: CHAIN_ID,
    };
    // The embedded chain gives coins to its own operator only.
    let key = folder.path().join("node/operator.key");
    contracts::the_node_receives_transactions_signed_for_the_configured_chain(url, &at, Some(&key))
        .await;
    shutdown.cancel();
    node.stopped().await;
}
