//! Tests of the connector with the embedded chain, in process and as a remote node over HTTP.

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
use serde_json::{Value, json};
use sqlx::{Connection, SqliteConnection};
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
        id: None,
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
        "a refused transaction does not block the queue"
    );
    chain.stop().await;
}

/// A second connector to the same node, with the same key and its own store.
async fn second_connector(folder: &Path, node: &Running) -> (tempfile::TempDir, Running) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    node.handle.serve_json_rpc(listener);
    let other = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(other.path().join("chain")).expect("folder");
    let key = "chain/operator.key";
    std::fs::copy(folder.join(key), other.path().join(key)).expect("key");
    let second = start(other.path(), Some(url)).await;
    (other, second)
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_nonce_used_elsewhere_is_replaced_by_the_nodes() {
    let folder = tempfile::tempdir().expect("folder");
    let first = start(folder.path(), None).await;
    let (_other, second) = second_connector(folder.path(), &first).await;
    let connectors = [first.handle.connector(), second.handle.connector()];
    let mut nonces = Vec::new();
    // After one connector has sent, the next nonce of the other is wrong.
    for (turn, uses) in [3, 2, 1, 2].into_iter().enumerate() {
        for use_ in 0..uses {
            let connector = &connectors[turn % 2];
            let key = format!("deploy-{turn}-{use_}");
            let mut call = Action::DeployRegistry.call();
            // Identical bytes would be refused as already known.
            call.gas_limit = call.gas_limit.map(|gas| gas + nonces.len() as u64);
            let submitted = connector.submit(&key, &call).await.expect("submitted");
            let receipt = connector.wait_receipt(&submitted.tx_hash, WAIT).await;
            let receipt = receipt.expect("asked").expect("in a block");
            assert_eq!(receipt.status, ReceiptStatus::Success);
            assert_eq!(receipt.contract_address, submitted.contract);
            nonces.push(submitted.nonce);
        }
    }
    assert_eq!(nonces, (0..8).collect::<Vec<u64>>());
    second.stop().await;
    first.stop().await;
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

/// Bytes of all signed transactions in the connector's file.
async fn stored_bytes(folder: &Path) -> i64 {
    let file = folder.join("chain/connector.sqlite");
    let url = format!("sqlite://{}?mode=ro", file.display());
    let mut db = SqliteConnection::connect(&url).await.expect("opens");
    let sql = "SELECT COALESCE(SUM(length(raw)), 0) FROM attempt";
    let bytes = sqlx::query_scalar(sql).fetch_one(&mut db).await;
    bytes.expect("read")
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
            id: None,
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
    let action = Action::Burn {
        token,
        from: alice,
        units: 3,
        id: None,
    };
    let burn = run(&connector, "burn", &action).await;
    assert_eq!(burn.status, ReceiptStatus::Success);
    // A final transaction is not sent again, so its bytes are not kept.
    assert_eq!(run(&connector, "burn", &action).await, burn);
    assert_eq!(stored_bytes(folder.path()).await, 0);
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
            id: None,
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
        let delivery = tokio::time::timeout(WAIT, subscription.next()).await;
        let delivery = delivery.expect("the event arrives").expect("an event");
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

/// A chain with one successful and one reverted transaction, served on a port.
struct Served {
    chain: Running,
    token: Address,
    success: Receipt,
    reverted: Receipt,
    url: String,
}

impl Served {
    async fn start(folder: &Path) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let chain = start(folder, None).await;
        let connector = chain.handle.connector();
        let (registry, token) = token(&connector).await;
        let reverted = run(&connector, "mint", &Self::mint(token)).await;
        let register = Action::RegisterIdentities {
            registry,
            accounts: vec![Address::of_user("alice")],
        };
        let success = run(&connector, "register", &register).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        tokio::spawn(rpc::serve(
            listener,
            vec![chain.handle.service()],
            rpc::Authenticator::Sandbox,
            rpc::metrics_init(),
            chain.shutdown.clone(),
        ));
        Self {
            chain,
            token,
            success,
            reverted,
            url,
        }
    }

    fn mint(token: Address) -> Action {
        Action::Mint {
            token,
            to: Address::of_user("alice"),
            units: 5,
            id: None,
        }
    }

    /// Status and body of the response to an auditor. Asserts that an anonymous request is refused.
    async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let request = || {
            let http = reqwest::Client::builder().timeout(WAIT).build();
            let http = http.expect("an HTTP client");
            http.post(format!("{}{path}", self.url)).json(&body)
        };
        let anonymous = request().send().await.expect("answered");
        assert_eq!(anonymous.status(), 401);
        let answer = request().bearer_auth("sandbox.auditor").send().await;
        let answer = answer.expect("answered");
        let status = answer.status().as_u16();
        (status, answer.json().await.expect("JSON"))
    }
}

// rows: R290
#[tokio::test(flavor = "multi_thread")]
async fn r290_receipts_are_read_over_http() {
    const PATH: &str = "/getTransactionReceipt";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path()).await;
    let operator = served.chain.handle.connector().operator().to_string();
    for (receipt, text) in [(&served.success, "SUCCESS"), (&served.reverted, "REVERTED")] {
        let hash = receipt.tx_hash.to_string();
        let (status, body) = served.post(PATH, json!({ "tx_hash": hash })).await;
        assert_eq!((status, &body["status"]), (200, &json!(text)));
        assert_eq!(body["txHash"], hash);
        assert_eq!(body["blockNumber"], receipt.block_number.to_string());
        assert_eq!(body["blockHash"], receipt.block_hash.to_string());
        assert_eq!(body["gasUsed"], receipt.gas_used.to_string());
        assert_eq!(body["from"], operator);
    }
    let unknown = json!({ "tx_hash": format!("0x{}", "ab".repeat(32)) });
    let (status, body) = served.post(PATH, unknown).await;
    let text = json!("Receipt not found");
    assert_eq!((status, &body["message"]), (404, &text));
    let (status, _) = served.post(PATH, json!({ "tx_hash": "0x12" })).await;
    assert_eq!(status, 400);
    served.chain.stop().await;
}

// rows: R291
#[tokio::test(flavor = "multi_thread")]
async fn r291_blocks_are_read_over_http() {
    const PATH: &str = "/getBlock";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path()).await;
    let number = served.success.block_number;
    let connector = served.chain.handle.connector();
    let block = connector.block(Some(number)).await.expect("asked");
    let block = block.expect("exists");
    let (status, body) = served.post(PATH, json!({ "block_number": number })).await;
    assert_eq!((status, &body["number"]), (200, &json!(number.to_string())));
    assert_eq!(body["hash"], block.hash.to_string());
    assert_eq!(body["parentHash"], block.parent_hash.to_string());
    let hash = served.success.tx_hash.to_string();
    assert_eq!(body["txHashes"], json!([hash]));
    let (status, body) = served
        .post(PATH, json!({ "block_number": 1_000_000 }))
        .await;
    let text = json!("Block not found");
    assert_eq!((status, &body["message"]), (404, &text));
    served.chain.stop().await;
}

// rows: R292
#[tokio::test(flavor = "multi_thread")]
async fn r292_gas_is_estimated_over_http() {
    const PATH: &str = "/estimateGas";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path()).await;
    let connector = served.chain.handle.connector();
    let token = served.token;
    let mint = Served::mint(token);
    let data = mint.call().data;
    let call = json!({ "to": token.to_string(), "data": format!("0x{}", hex::encode(&data)) });
    let (status, body) = served.post(PATH, call).await;
    assert_eq!(status, 200, "{body}");
    let gas: u64 = body["gas"].as_str().expect("text").parse().expect("gas");
    let used = run(&connector, "mint-2", &mint).await.gas_used;
    assert!(gas >= used && gas < 2 * used, "{gas} against {used}");
    // The token has no fallback function.
    let bare = json!({ "to": token.to_string(), "data": "0x" });
    let (status, _) = served.post(PATH, bare).await;
    assert_eq!(status, 400);
    let bad = json!({ "to": "0x12", "data": "0x" });
    let (status, _) = served.post(PATH, bad).await;
    assert_eq!(status, 400);
    served.chain.stop().await;
}
