//! Tests of the connector with the embedded chain, in process and as a remote node over HTTP.

#[allow(dead_code, reason = "each test target uses its part")]
mod common;

use std::time::Duration;

use chain::{Action, Address, ChainConfig, ChainDeps, ChainError, start_chain};
use common::{At, Embedded, Evm, contracts, run, start_on, token};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(20);

// rows: R020 R033 R034 R035
#[tokio::test(flavor = "multi_thread")]
async fn r033_submissions_are_stored_by_key_and_receipts_show_reverts() {
    contracts::submissions_are_stored_by_key_and_receipts_show_reverts(&Embedded).await;
}

// rows: R034
#[tokio::test(flavor = "multi_thread")]
async fn r034_trades_settle_with_the_platforms_contracts() {
    contracts::trades_settle_with_the_platforms_contracts(&Embedded).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_the_nonce_of_a_refused_transaction_is_reused() {
    contracts::the_nonce_of_a_refused_transaction_is_reused(&Embedded).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_nonce_used_elsewhere_is_replaced_by_the_nodes() {
    contracts::a_nonce_used_elsewhere_is_replaced_by_the_nodes(&Embedded).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receipt_counts_only_with_its_confirmations() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(folder.path().join("node")).expect("folder");
    let node = start_on(&folder.path().join("node"), &Embedded).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    node.handle.serve_json_rpc(listener);
    let data_dir = folder.path().join("remote");
    std::fs::create_dir_all(&data_dir).expect("folder");
    let key = "operator.key";
    std::fs::copy(
        folder.path().join("node/chain").join(key),
        data_dir.join(key),
    )
    .expect("key");
    let config = ChainConfig {
        data_dir,
        poll_interval_ms: 5,
        rpc_url: Some(url),
        confirmations: 2,
        ..ChainConfig::default()
    };
    let shutdown = CancellationToken::new();
    let deps = ChainDeps {
        log: node.log.clone(),
    };
    let remote = start_chain(config, deps, shutdown.clone())
        .await
        .expect("starts");
    let connector = remote.connector();
    let call = Action::DeployRegistry.call();
    let mut sent = Vec::new();
    for n in 0..3 {
        let submitted = connector
            .submit(&format!("deploy-{n}"), &call)
            .await
            .expect("submitted");
        // Each in a block of its own.
        let at_node = node.handle.connector();
        let receipt = at_node.wait_receipt(&submitted.tx_hash, WAIT).await;
        sent.push(receipt.expect("asked").expect("in a block"));
    }
    let first = connector.wait_receipt(&sent[0].tx_hash, WAIT).await;
    assert_eq!(first.expect("asked").as_ref(), Some(&sent[0]));
    for young in &sent[1..] {
        let receipt = connector.receipt(&young.tx_hash).await.expect("asked");
        assert_eq!(receipt, None, "too few blocks above it");
    }
    shutdown.cancel();
    remote.stopped().await;
    node.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_cancelled_caller_leaves_no_nonce_gap_and_no_collision() {
    contracts::a_cancelled_caller_leaves_no_nonce_gap_and_no_collision(&Embedded).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chain_and_queue_continue_after_a_restart() {
    contracts::chain_and_queue_continue_after_a_restart(&Embedded).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_node_is_reached_by_the_same_connector() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let chain = start_on(folder.path(), &Embedded).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    chain.handle.serve_json_rpc(listener);
    let other = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(other.path().join("chain")).expect("folder");
    std::fs::copy(
        folder.path().join("chain/operator.key"),
        other.path().join("chain/operator.key"),
    )
    .expect("key");
    let at = At {
        url: url.clone(),
        chain_id: Embedded.chain_id(),
    };
    let remote = start_on(other.path(), &at).await;
    let (registry, token) = token(&remote.handle.connector()).await;
    let alice = Address::of_user("alice");
    run(
        &remote.handle.connector(),
        "allow",
        &Action::RegisterIdentities {
            registry,
            accounts: vec![alice],
        },
    )
    .await;
    let mint = run(
        &remote.handle.connector(),
        "mint",
        &Action::Mint {
            token,
            to: alice,
            units: 7,
            id: None,
        },
    )
    .await;
    let embedded = chain.handle.connector();
    let there = embedded.wait_receipt(&mint.tx_hash, WAIT).await;
    assert_eq!(there.expect("asked"), Some(mint.clone()));
    let block = remote
        .handle
        .connector()
        .block(Some(mint.block_number))
        .await
        .expect("asked");
    assert_eq!(
        block,
        embedded
            .block(Some(mint.block_number))
            .await
            .expect("asked")
    );
    // A node on another chain is refused.
    let third = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        data_dir: third.path().to_owned(),
        operator_key_file: Some(other.path().join("chain/operator.key")),
        chain_id: 1,
        rpc_url: Some(url),
        ..ChainConfig::default()
    };
    let refused = start_chain(
        config,
        ChainDeps {
            log: remote.log.clone(),
        },
        CancellationToken::new(),
    )
    .await;
    assert!(matches!(
        refused.err(),
        Some(chain::StartError::Chain(ChainError::WrongChain {
            node: 31_337,
            configured: 1
        }))
    ));
    remote.stop().await;
    chain.stop().await;
}

// rows: R243
#[tokio::test(flavor = "multi_thread")]
async fn r243_blocks_and_receipts_are_published_in_order() {
    contracts::blocks_and_receipts_are_published_in_order(&Embedded).await;
}

// rows: R290
#[tokio::test(flavor = "multi_thread")]
async fn r290_receipts_are_read_over_http() {
    contracts::receipts_are_read_over_http(&Embedded).await;
}

// rows: R291
#[tokio::test(flavor = "multi_thread")]
async fn r291_blocks_are_read_over_http() {
    contracts::blocks_are_read_over_http(&Embedded).await;
}

// rows: R292
#[tokio::test(flavor = "multi_thread")]
async fn r292_gas_is_estimated_over_http() {
    contracts::gas_is_estimated_over_http(&Embedded).await;
}
