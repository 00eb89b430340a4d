//! The signed transaction as a node receives it: a recording proxy is between connector and node.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy::consensus::transaction::SignerRecoverable;
use alloy::consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy::eips::Decodable2718;
use alloy::primitives::{Address as RawAddress, TxKind, U256};
use alloy::signers::local::PrivateKeySigner;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use chain::contracts::Call;
use chain::{
    Action, Address, ChainConfig, ChainDeps, ChainHandle, Connector, ReceiptStatus, Submission,
    TxHash, start_chain,
};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);
/// Not the default, so a constant in the code would be noticed.
const CHAIN_ID: u64 = 90_210;

/// Forwards requests to a node and keeps the raw transactions.
#[derive(Clone)]
struct Recorder {
    node: String,
    http: reqwest::Client,
    raw: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    /// Serves a port; returns its URL.
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        let router = Router::new()
            .route("/", post(forward))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    /// Each raw transaction once, in the order of arrival.
    fn received(&self) -> Vec<Vec<u8>> {
        let raw = self.raw.lock().expect("a lock").clone();
        let bytes = raw.iter().map(|raw| raw.strip_prefix("0x").expect("hex"));
        bytes.map(|raw| hex::decode(raw).expect("hex")).collect()
    }
}

async fn forward(
    State(recorder): State<Recorder>,
    body: Bytes,
) -> ([(&'static str, &'static str); 1], Bytes) {
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let calls = request
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![request.clone()]);
    for call in calls {
        if call["method"] == "eth_sendRawTransaction" {
            let raw = call["params"][0].as_str().expect("a raw transaction");
            let mut received = recorder.raw.lock().expect("a lock");
            // The connector may send a transaction again until it has read its block.
            if received.iter().all(|one| one != raw) {
                received.push(raw.to_owned());
            }
        }
    }
    let asked = recorder
        .http
        .post(&recorder.node)
        .header("content-type", "application/json")
        .body(body);
    let answer = asked.send().await.expect("an answer");
    let answer = answer.bytes().await.expect("a body");
    ([("content-type", "application/json")], answer)
}

async fn start(
    data_dir: &Path,
    log: &Arc<events::Embedded>,
    rpc_url: Option<String>,
    shutdown: &CancellationToken,
) -> ChainHandle {
    let config = ChainConfig {
        data_dir: data_dir.to_owned(),
        chain_id: CHAIN_ID,
        seal_interval_ms: 1,
        poll_interval_ms: 5,
        rpc_url,
        ..ChainConfig::default()
    };
    let deps = ChainDeps { log: log.clone() };
    let started = start_chain(config, deps, shutdown.clone()).await;
    started.expect("the chain starts")
}

async fn submit(connector: &Connector, key: &str, call: &Call) -> Submission {
    let submitted = connector.submit(key, call).await.expect("submitted");
    let receipt = connector.wait_receipt(&submitted.tx_hash, WAIT).await;
    let receipt = receipt.expect("asked").expect("in a block");
    assert_eq!(receipt.status, ReceiptStatus::Success, "{key}");
    submitted
}

/// Decodes a raw transaction and asserts its sender from the signature alone, chain id, recipient,
/// nonce, value, data and hash.
fn assert_is_signed(
    raw: &[u8],
    sender: RawAddress,
    to: Option<Address>,
    sent: &Submission,
    call: &Call,
) {
    let mut rest = raw;
    let transaction = TxEnvelope::decode_2718(&mut rest).expect("EIP-2718");
    assert!(rest.is_empty(), "{} bytes are left", rest.len());
    assert_eq!(transaction.chain_id(), Some(CHAIN_ID));
    assert_eq!(transaction.recover_signer().expect("a signature"), sender);
    match to {
        Some(to) => assert_eq!(transaction.to().map(Address::from), Some(to)),
        None => assert_eq!(transaction.kind(), TxKind::Create),
    }
    assert_eq!(transaction.nonce(), sent.nonce);
    assert_eq!(transaction.value(), U256::ZERO);
    assert_eq!(transaction.input()[..], call.data[..]);
    assert_eq!(TxHash::from(*transaction.tx_hash()), sent.tx_hash);

    // The signature covers the chain id: on another chain it is not the sender's.
    let signed = transaction.as_eip1559().expect("EIP-1559");
    let elsewhere = TxEip1559 {
        chain_id: CHAIN_ID + 1,
        ..signed.tx().clone()
    };
    let elsewhere = TxEnvelope::from(elsewhere.into_signed(*signed.signature()));
    assert_ne!(elsewhere.recover_signer().ok(), Some(sender));
}

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_the_node_receives_transactions_signed_by_the_operator_for_the_configured_chain() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().expect("folder");
    let log = events::Embedded::open(folder.path().join("log")).await;
    let log = Arc::new(log.expect("log opens"));
    let shutdown = CancellationToken::new();
    let node = start(&folder.path().join("node"), &log, None, &shutdown).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
    let recorder = Recorder {
        node: format!("http://{}", listener.local_addr().expect("address")),
        http: reqwest::Client::builder()
            .timeout(WAIT)
            .build()
            .expect("client"),
        raw: Arc::default(),
    };
    node.serve_json_rpc(listener);

    let data_dir = folder.path().join("remote");
    std::fs::create_dir_all(&data_dir).expect("folder");
    let key = folder.path().join("node/operator.key");
    std::fs::copy(&key, data_dir.join("operator.key")).expect("key");
    let key = std::fs::read_to_string(key).expect("key");
    let signer: PrivateKeySigner = key.trim().parse().expect("a key");
    let url = recorder.serve().await;
    let remote = start(&data_dir, &log, Some(url), &shutdown).await;
    let connector = remote.connector();
    assert_eq!(connector.operator(), Address::from(signer.address()));

    let deploy = Action::DeployRegistry.call();
    let deployed = submit(&connector, "registry", &deploy).await;
    let registry = deployed.contract.expect("a contract");
    let accounts = vec![Address::of_user("alice")];
    let allow = Action::RegisterIdentities { registry, accounts }.call();
    let allowed = submit(&connector, "allow", &allow).await;
    assert_eq!((deployed.nonce, allowed.nonce), (0, 1));

    let received = recorder.received();
    assert_eq!(received.len(), 2);
    let sender = signer.address();
    assert_is_signed(&received[0], sender, None, &deployed, &deploy);
    assert_is_signed(&received[1], sender, Some(registry), &allowed, &allow);
    shutdown.cancel();
    remote.stopped().await;
    node.stopped().await;
}
