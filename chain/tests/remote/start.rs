//! What a start checks, how a node is reached, and who signs.

use std::sync::LazyLock;

use alloy::consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy::eips::Encodable2718;
use alloy::primitives::{Bytes, TxKind};
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use axum::Router;
use axum::extract::State;
use axum::routing::post;
use chain::ChainError;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_chain_with_the_same_id_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let own = config(folder.path(), node.serve().await);
    start(folder.path(), own.clone()).await.stop().await;
    let other = config(folder.path(), Node::new(1).serve().await);
    let refused = try_start(folder.path(), other).await.err();
    let text = format!("{refused:?}");
    let Some(StartError::Chain(ChainError::OtherChain { node, stored, .. })) = refused else {
        panic!("{text}");
    };
    assert_ne!(node, stored);
    start(folder.path(), own).await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_node_of_another_chain_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let (node, other) = (Node::new(0), Node::new(1));
    let config = ChainConfig {
        rpc_fallback_url: Some(other.serve().await),
        ..config(folder.path(), node.serve().await)
    };
    let refused = try_start(folder.path(), config.clone()).await.err();
    let text = format!("{refused:?}");
    assert!(
        matches!(
            refused,
            Some(StartError::Chain(ChainError::OtherChain { .. }))
        ),
        "{text}"
    );
    // One that is away cannot be checked and keeps no start from its work.
    other.set_away(true);
    start(folder.path(), config).await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_key_than_that_of_the_store_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = config(folder.path(), node.serve().await);
    let chain = start(folder.path(), config.clone()).await;
    let operator = chain.handle.connector().operator().to_string();
    chain.stop().await;
    std::fs::remove_file(key_file(folder.path())).expect("removed");
    let refused = try_start(folder.path(), config).await.err();
    let text = format!("{refused:?}");
    let Some(StartError::Chain(ChainError::OtherOperator { configured, stored })) = refused else {
        panic!("{text}");
    };
    assert_eq!(stored, operator);
    assert_ne!(configured, operator);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_node_is_used_while_the_first_is_away() {
    let folder = tempfile::tempdir().expect("folder");
    let first = Node::new(0);
    let second = first.peer();
    first.set_away(true);
    let config = ChainConfig {
        rpc_fallback_url: Some(second.serve().await),
        ..config(folder.path(), first.serve().await)
    };
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    first.script().mine();
    chain.receipt(&sent.tx_hash).await;
    // A transaction goes to one node: the caller repeats it, and the other node takes it.
    first.set_away(false);
    second.set_away(true);
    let connector = chain.handle.connector();
    let sent = eventually(async || connector.submit("second", &call("second")).await.ok()).await;
    first.script().mine();
    chain.receipt(&sent.tx_hash).await;
    assert_eq!(executions(&first, "second"), 1);
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_nodes_away_is_shown_without_a_secret() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let url = node.serve().await;
    let secret = format!("{url}/s3cret-key").replace("http://", "http://user:s3cret@");
    let config = config(folder.path(), url);
    let chain = start(folder.path(), config.clone()).await;
    node.set_away(true);
    until(|| chain.failing("node").is_some()).await;
    node.set_away(false);
    until(|| chain.failing("node").is_none()).await;
    chain.stop().await;
    let config = ChainConfig {
        rpc_url: Some(secret),
        request_timeout_ms: 1_000,
        ..config
    };
    let refused = try_start(folder.path(), config).await.err();
    let text = refused.expect("no such path").to_string();
    assert!(!text.contains("s3cret"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_authorization_of_the_file_is_sent_with_each_request() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    node.script().authorization = Some("Bearer t0ken");
    let file = folder.path().join("node.auth");
    std::fs::write(&file, "Bearer t0ken\n").expect("written");
    let without = config(folder.path(), node.serve().await);
    let refused = try_start(folder.path(), without.clone()).await.err();
    let refused = refused.expect("no authorization").to_string();
    assert!(refused.contains("401"), "{refused}");
    let with = ChainConfig {
        rpc_auth_file: Some(file.clone()),
        ..without
    };
    let chain = start(folder.path(), with.clone()).await;
    let sent = chain.submit("first").await;
    node.script().mine();
    chain.receipt(&sent.tx_hash).await;
    chain.stop().await;
    for text in ["t0ken", "Digest t0ken", ""] {
        std::fs::write(&file, text).expect("written");
        let refused = try_start(folder.path(), with.clone()).await.err();
        let refused = refused.expect("no scheme").to_string();
        assert!(refused.contains("rpc_auth_file"), "{refused}");
        assert!(!refused.contains("t0ken"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_without_their_partner_or_above_their_limit_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let valid = config(folder.path(), node.serve().await);
    let changed = [
        ChainConfig {
            confirmations: 257,
            ..valid.clone()
        },
        ChainConfig {
            max_fee_per_gas_gwei: 0,
            ..valid.clone()
        },
        ChainConfig {
            rpc_url: None,
            rpc_fallback_url: valid.rpc_url.clone(),
            ..valid.clone()
        },
        ChainConfig {
            remote_signer_url: valid.rpc_url.clone(),
            ..valid.clone()
        },
    ];
    for config in changed {
        let refused = try_start(folder.path(), config).await.err();
        assert!(
            matches!(refused, Some(StartError::Setting(_))),
            "{refused:?}"
        );
    }
    let at_the_limit = ChainConfig {
        confirmations: 256,
        ..valid
    };
    start(folder.path(), at_the_limit).await.stop().await;
}

/// Serves `eth_signTransaction` with a key, as Web3Signer does.
async fn serve_signer(key: PrivateKeySigner) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = Router::new()
        .route("/", post(sign))
        .with_state(Arc::new(key));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

async fn sign(State(key): State<Arc<PrivateKeySigner>>, body: String) -> String {
    let request: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(request["method"], "eth_signTransaction");
    let asked = &request["params"][0];
    let text = |name: &str| asked[name].as_str().expect("text").to_owned();
    let number = |name: &str| {
        let digits = text(name);
        u128::from_str_radix(&digits[2..], 16).expect("a quantity")
    };
    let tx = TxEip1559 {
        chain_id: CHAIN_ID,
        nonce: number("nonce") as u64,
        gas_limit: number("gas") as u64,
        max_fee_per_gas: number("maxFeePerGas"),
        max_priority_fee_per_gas: number("maxPriorityFeePerGas"),
        to: TxKind::Call(text("to").parse().expect("an address")),
        input: text("data").parse::<Bytes>().expect("bytes"),
        ..TxEip1559::default()
    };
    let signature = key.sign_hash_sync(&tx.signature_hash()).expect("signed");
    let raw = TxEnvelope::from(tx.into_signed(signature)).encoded_2718();
    let result = format!("0x{}", hex::encode(raw));
    json!({ "jsonrpc": "2.0", "id": request["id"], "result": result }).to_string()
}

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_a_remote_signer_signs_without_a_key_file() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let key = PrivateKeySigner::random();
    let address = Address::from(key.address());
    let config = ChainConfig {
        remote_signer_url: Some(serve_signer(key).await),
        operator_address: Some(address.to_string()),
        ..config(folder.path(), node.serve().await)
    };
    let chain = start(folder.path(), config.clone()).await;
    assert_eq!(chain.handle.connector().operator(), address);
    let sent = chain.submit("first").await;
    node.script().mine();
    chain.receipt(&sent.tx_hash).await;
    assert!(!key_file(folder.path()).exists());
    chain.stop().await;
    // A signer with another key: nothing is stored or sent.
    let config = ChainConfig {
        remote_signer_url: Some(serve_signer(PrivateKeySigner::random()).await),
        ..config
    };
    let chain = start(folder.path(), config).await;
    let connector = chain.handle.connector();
    let refused = connector.submit("second", &call("second")).await;
    assert!(
        matches!(refused, Err(ChainError::Signature(_))),
        "{refused:?}"
    );
    assert_eq!(connector.submission("second").await.expect("read"), None);
    assert_eq!(node.script().received.len(), 1);
    chain.stop().await;
}

static FIRST_VERSION: LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/connector": "0001_connector");

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_the_first_version_keeps_its_submissions() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let other = tempfile::tempdir().expect("folder");
    // Two signed transactions: one in a block, one that is still to be sent.
    let url = node.serve().await;
    let chain = start(other.path(), config(other.path(), url.clone())).await;
    for key in ["first", "second"] {
        chain.submit(key).await;
    }
    chain.stop().await;
    let signed = node.script().received.clone();
    node.script().remove_blocks(0);
    node.script().mine_this(signed[0].clone());
    let head = node.script().head_hash();

    std::fs::create_dir_all(folder.path().join("chain")).expect("folder");
    std::fs::copy(key_file(other.path()), key_file(folder.path())).expect("key");
    let file = folder.path().join("chain/connector.sqlite");
    let store = events::sqlite::Sqlite::open(&file, &FIRST_VERSION).await;
    let store = store.expect("opens");
    let mut tx = store.write().await.expect("begun");
    for (key, transaction, block) in [
        ("first", &signed[0], Some(1_i64)),
        ("second", &signed[1], None),
    ] {
        sqlx::query(
            "INSERT INTO submission (key, nonce, tx_hash, raw, contract, submitted_us, block_number) \
             VALUES ($1, $2, $3, $4, '', 1, $5)",
        )
        .bind(key)
        .bind(transaction.nonce() as i64)
        .bind(format!("{:#x}", transaction.tx_hash()))
        .bind(transaction.encoded_2718())
        .bind(block)
        .execute(&mut *tx)
        .await
        .expect("inserted");
    }
    sqlx::query("INSERT INTO cursor (id, block_number, block_hash) VALUES (1, 1, $1)")
        .bind(head)
        .execute(&mut *tx)
        .await
        .expect("inserted");
    tx.commit().await.expect("committed");
    store.close().await;

    let chain = start(folder.path(), config(folder.path(), url)).await;
    let hash = |transaction: &TxEnvelope| TxHash::from(*transaction.tx_hash());
    assert_eq!(chain.receipt(&hash(&signed[0])).await.block_number, 1);
    assert_eq!(chain.submit("first").await.tx_hash, hash(&signed[0]));
    let sent = chain.submit("second").await;
    assert_eq!((sent.tx_hash, sent.nonce), (hash(&signed[1]), 1));
    node.script().mine();
    assert_eq!(chain.receipt(&sent.tx_hash).await.block_number, 2);
    assert_eq!(chain.submit("third").await.nonce, 2);
    chain.stop().await;
}
