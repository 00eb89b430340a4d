//! What a crash or an absent node leaves is taken up again (T13).

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use cfa::chain::{ChainConfig, ChainDeps, ChainHandle, start_chain};
use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;
use tokio_util::sync::CancellationToken;

use crate::world::*;

/// A chain of its own that is reached over HTTP only.
struct Node {
    handle: ChainHandle,
    shutdown: CancellationToken,
    address: SocketAddr,
}

impl Node {
    async fn start(folder: &Path, address: &str) -> Self {
        let log = Arc::new(
            events::Embedded::open(folder.join("node-log"))
                .await
                .expect("log"),
        );
        let shutdown = CancellationToken::new();
        let config = ChainConfig {
            data_dir: folder.join("node"),
            seal_interval_ms: 1,
            ..ChainConfig::default()
        };
        let handle = start_chain(config, ChainDeps { log }, shutdown.clone())
            .await
            .expect("node");
        let listener = tokio::net::TcpListener::bind(address).await.expect("port");
        let address = listener.local_addr().expect("address");
        handle.serve_json_rpc(listener);
        Self {
            handle,
            shutdown,
            address,
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.handle.stopped().await;
    }
}

fn deposit(key: &str) -> pb::IssueCfaRubRequest {
    pb::IssueCfaRubRequest {
        context: context(key),
        user_id: "alice".into(),
        amount: roubles("100.00"),
        payment_id: format!("payment of {key}"),
    }
}

// rows: R047 R064
#[tokio::test(flavor = "multi_thread")]
async fn r047_operation_stands_in_processing_while_the_node_is_away() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::start(folder.path(), "127.0.0.1:0").await;
    let address = node.address.to_string();
    std::fs::create_dir_all(folder.path().join("chain")).expect("folder");
    std::fs::copy(
        folder.path().join("node/operator.key"),
        folder.path().join("chain/operator.key"),
    )
    .expect("key");
    let mut world = World::start_on(folder.path(), Some(format!("http://{address}"))).await;
    node.stop().await;
    let stuck = world
        .cfa
        .issue_cfa_rub(deposit("k-1"))
        .await
        .expect("a result")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        (stuck.status(), stuck.onchain_tx_hash.as_str()),
        (OperationStatus::Processing, "")
    );
    let again = world
        .cfa
        .issue_cfa_rub(deposit("k-1"))
        .await
        .expect("a result")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        (again.operation_id.clone(), again.status()),
        (stuck.operation_id.clone(), OperationStatus::Processing)
    );
    let node = Node::start(folder.path(), &address).await;
    world.sweep().await;
    let sent = world.operation(&stuck.operation_id).await;
    assert_ne!(sent.onchain_tx_hash, "");
    assert_eq!(
        world.settle(&sent).await.status(),
        OperationStatus::Finalized
    );
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "100.00", "minted once");
    world.stop().await;
    node.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_transaction_that_the_node_forgot_is_sent_again() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("bob", "1.00").await;
    world.stop_sealing().await;
    let sent = world
        .cfa
        .issue_cfa_rub(deposit("k-1"))
        .await
        .expect("a result")
        .into_inner()
        .operation
        .expect("operation");
    assert_ne!(sent.status(), OperationStatus::Finalized);
    world.stop().await;
    // the pool was memory; the raw transaction is in the connector's store
    let mut world = World::start(folder.path()).await;
    world.sweep().await;
    let resumed = world.operation(&sent.operation_id).await;
    assert_eq!(
        world.settle(&resumed).await.status(),
        OperationStatus::Finalized
    );
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "101.00");
    world.stop().await;
}
