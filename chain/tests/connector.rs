//! The connector against the embedded chain and, unchanged, against the same chain over HTTP.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chain::contracts::Call;
use chain::{
    Action, Address, ChainConfig, ChainDeps, ChainError, ChainHandle, Connector, Receipt,
    ReceiptStatus, TxHash, start_chain,
};
use prost::Message;
use proto::chain::v1 as pb;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(20);

struct Running {
    handle: ChainHandle,
    log: Arc<events::Embedded>,
    shutdown: CancellationToken,
}

async fn start(folder: &Path, rpc_url: Option<String>) -> Running {
    let log = Arc::new(
        events::Embedded::open(folder.join("log"))
            .await
            .expect("log opens"),
    );
    let shutdown = CancellationToken::new();
    let config = ChainConfig {
        data_dir: folder.join("chain"),
        seal_interval_ms: 1,
        poll_interval_ms: 5,
        rpc_url,
        ..ChainConfig::default()
    };
    let handle = start_chain(config, ChainDeps { log: log.clone() }, shutdown.clone())
        .await
        .expect("chain starts");
    Running {
        handle,
        log,
        shutdown,
    }
}

impl Running {
    async fn stop(self) {
        self.shutdown.cancel();
        self.handle.stopped().await;
    }
}

async fn run(connector: &Connector, key: &str, action: &Action) -> Receipt {
    let submitted = connector
        .submit(key, &action.call())
        .await
        .expect("submitted");
    connector
        .wait_receipt(&submitted.tx_hash, WAIT)
        .await
        .expect("asked")
        .expect("in a block")
}

async fn token(connector: &Connector) -> (Address, Address) {
    let registry = connector
        .submit("registry", &Action::DeployRegistry.call())
        .await
        .expect("submitted")
        .contract
        .expect("deploys");
    let deploy = Action::DeployToken {
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

// rows: R020 R033 R034 R035
#[tokio::test(flavor = "multi_thread")]
async fn r033_submissions_are_stored_by_key_and_receipts_show_reverts() {
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    let (registry, token) = token(&connector).await;
    let alice = Address::of_user("alice");
    let mint = Action::Mint {
        token,
        to: alice,
        units: 5,
    };
    let reverted = run(&connector, "mint-0", &mint).await;
    assert_eq!(
        reverted.status,
        ReceiptStatus::Reverted,
        "alice is not on the allow-list yet"
    );
    run(
        &connector,
        "allow-alice",
        &Action::RegisterIdentities {
            registry,
            accounts: vec![alice],
        },
    )
    .await;
    let first = connector
        .submit("mint-1", &mint.call())
        .await
        .expect("submitted");
    let again = connector
        .submit("mint-1", &mint.call())
        .await
        .expect("the same");
    assert_eq!(first, again);
    let receipt = connector
        .wait_receipt(&first.tx_hash, WAIT)
        .await
        .expect("asked")
        .expect("in a block");
    assert_eq!(
        connector
            .submit("mint-1", &mint.call())
            .await
            .expect("the same"),
        first
    );
    assert_eq!(connector.balance_of(&token, &alice).await.expect("read"), 5);
    assert_eq!(connector.total_supply(&token).await.expect("read").0, 5);
    assert_eq!(
        connector.token_metadata(&token).await.expect("read").symbol,
        "BOND-1"
    );
    let block = connector
        .block(Some(receipt.block_number))
        .await
        .expect("asked")
        .expect("exists");
    assert_eq!(block.tx_hashes, [first.tx_hash]);
    assert!(
        connector
            .verify_block_hash(block.number, &block.hash)
            .await
            .expect("asked")
    );
    assert!(
        !connector
            .verify_block_hash(block.number, &block.parent_hash)
            .await
            .expect("asked")
    );
    assert!(
        connector
            .block(Some(1_000_000))
            .await
            .expect("asked")
            .is_none()
    );
    let unknown: TxHash = format!("0x{}", "ab".repeat(32)).parse().expect("hash");
    assert_eq!(connector.receipt(&unknown).await.expect("asked"), None);
    let gas = connector
        .estimate_gas(Some(&token), &mint.call().data)
        .await
        .expect("estimated");
    let second = run(&connector, "mint-2", &mint).await;
    assert!(
        gas >= second.gas_used && gas < second.gas_used * 2,
        "{gas} against {}",
        second.gas_used
    );
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_the_nonce_of_a_refused_transaction_is_reused() {
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    let call = Call {
        to: None,
        data: vec![0; 100],
        gas_limit: Some(1_000),
    };
    let refused = connector
        .submit("too-little-gas", &call)
        .await
        .expect_err("refused");
    assert!(
        matches!(&refused, ChainError::Refused(reason) if reason.contains("intrinsic gas too low")),
        "{refused}"
    );
    let receipt = run(&connector, "registry", &Action::DeployRegistry).await;
    assert_eq!(
        receipt.status,
        ReceiptStatus::Success,
        "the refused one does not block the queue"
    );
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn receipt_counts_only_with_its_confirmations() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(folder.path().join("node")).expect("folder");
    let node = start(&folder.path().join("node"), None).await;
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
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    let call = Action::DeployRegistry.call();
    for n in 0..24 {
        let key = format!("dropped-{n}");
        let mut submission = std::pin::pin!(connector.submit(&key, &call));
        for _ in 0..n {
            let polled = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(submission.as_mut().poll(cx).is_ready())
            });
            if polled.await {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    let receipt = run(&connector, "after", &Action::DeployRegistry).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chain_and_queue_continue_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    let operator = connector.operator();
    let (registry, token) = token(&connector).await;
    let alice = Address::of_user("alice");
    run(
        &connector,
        "allow",
        &Action::RegisterIdentities {
            registry,
            accounts: vec![alice],
        },
    )
    .await;
    let mint = run(
        &connector,
        "mint",
        &Action::Mint {
            token,
            to: alice,
            units: 7,
        },
    )
    .await;
    let head = connector.block(None).await.expect("asked").expect("head");
    chain.stop().await;

    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    assert_eq!(connector.operator(), operator);
    assert_eq!(
        connector.block(None).await.expect("asked").expect("head"),
        head
    );
    assert_eq!(
        connector.receipt(&mint.tx_hash).await.expect("asked"),
        Some(mint)
    );
    assert_eq!(connector.balance_of(&token, &alice).await.expect("read"), 7);
    let burn = run(
        &connector,
        "burn",
        &Action::Burn {
            token,
            from: alice,
            units: 3,
        },
    )
    .await;
    assert_eq!(burn.status, ReceiptStatus::Success);
    assert_eq!(
        connector
            .block(None)
            .await
            .expect("asked")
            .expect("head")
            .parent_hash,
        head.hash
    );
    assert_eq!(connector.total_supply(&token).await.expect("read").0, 4);
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_node_is_reached_by_the_same_connector() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
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
    let remote = start(other.path(), Some(url.clone())).await;
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
    use events::Log;
    let folder = tempfile::tempdir().expect("folder");
    let chain = start(folder.path(), None).await;
    let connector = chain.handle.connector();
    let (_, token) = token(&connector).await;
    let reverted = run(
        &connector,
        "mint",
        &Action::Mint {
            token,
            to: Address::of_user("x"),
            units: 1,
        },
    )
    .await;
    let mut subscription = chain
        .log
        .subscribe("test", &[events::topics::CHAIN])
        .await
        .expect("subscribed");
    let mut next_block = 0;
    let mut seen_reverted = false;
    while next_block <= reverted.block_number {
        let delivery = subscription.next().await.expect("an event");
        let event = delivery.record.event;
        match event.type_name.as_str() {
            "dfa.chain.v1.BlockReadEvent" => {
                let block = pb::BlockReadEvent::decode(event.payload.as_slice()).expect("decodes");
                assert_eq!(
                    (block.number, event.key),
                    (next_block, next_block.to_string())
                );
                next_block += 1;
            }
            "dfa.chain.v1.TransactionReceiptReadyEvent" => {
                let receipt = pb::TransactionReceiptReadyEvent::decode(event.payload.as_slice())
                    .expect("decodes");
                assert_eq!(
                    (receipt.block_number, event.key),
                    (next_block, receipt.tx_hash.clone())
                );
                if receipt.tx_hash == reverted.tx_hash.to_string() {
                    assert_eq!(receipt.status(), pb::ReceiptStatus::Reverted);
                    seen_reverted = true;
                }
            }
            other => panic!("{other}"),
        }
    }
    assert!(seen_reverted);
    chain.stop().await;
}
