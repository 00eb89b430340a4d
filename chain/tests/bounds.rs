//! Limits of the development chain's JSON-RPC port, each tested at the limit and one above it.

use std::time::Duration;

use alloy::consensus::{SignableTransaction, TxEip1559, TxEnvelope};
use alloy::eips::Encodable2718;
use alloy::primitives::{Address as RawAddress, TxKind, U256};
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use chain::{
    ChainConfig, ChainDeps, ChainHandle, Receipt, ReceiptStatus, StartError, TxHash, start_chain,
};
use rpc::{ConnectionBudget, Limits};
use serde_json::{Value, json};
use testkit::ports::{patient, until, until_closed};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);
const BLOCK_GAS: u64 = 500_000_000;
const CALL_GAS: u64 = 50_000_000;
const BATCH: usize = 100;
/// Gas of a plain transfer.
const TRANSFER_GAS: u64 = 21_000;

struct Port {
    chain: ChainHandle,
    address: String,
    operator: PrivateKeySigner,
    http: reqwest::Client,
    shutdown: CancellationToken,
    _folder: tempfile::TempDir,
}

async fn started(
    folder: &tempfile::TempDir,
    origins: &[&str],
    shutdown: &CancellationToken,
) -> Result<ChainHandle, StartError> {
    let log = events::Embedded::open(folder.path().join("log"))
        .await
        .expect("log opens");
    let config = ChainConfig {
        data_dir: folder.path().join("chain"),
        seal_interval_ms: 1,
        rpc_cors_origins: origins.iter().map(ToString::to_string).collect(),
        ..ChainConfig::default()
    };
    let deps = ChainDeps {
        log: std::sync::Arc::new(log),
    };
    start_chain(config, deps, shutdown.clone()).await
}

impl Port {
    async fn start() -> Self {
        Self::start_with(patient(), &[]).await
    }

    async fn start_with(limits: Limits, origins: &[&str]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().expect("folder");
        let shutdown = CancellationToken::new();
        let chain = started(&folder, origins, &shutdown).await.expect("starts");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
        let address = listener.local_addr().expect("address").to_string();
        chain.serve_json_rpc_within(listener, limits);
        let key = std::fs::read_to_string(folder.path().join("chain/operator.key")).expect("key");
        Self {
            chain,
            address,
            operator: key.trim().parse().expect("a key"),
            http: reqwest::Client::builder()
                .timeout(testkit::PATIENCE)
                .build()
                .expect("an HTTP client"),
            shutdown,
            _folder: folder,
        }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.chain.stopped().await;
    }

    async fn post(&self, body: String) -> reqwest::Response {
        let request = self
            .http
            .post(format!("http://{}", self.address))
            .header("content-type", "application/json")
            .body(body);
        request.send().await.expect("answered")
    }

    async fn ask(&self, method: &str, params: Value) -> Result<Value, String> {
        let answer = self.post(request(method, params).to_string()).await;
        let mut answer: Value = answer.json().await.expect("JSON");
        match answer["error"]["message"].as_str() {
            Some(message) => Err(message.to_owned()),
            None => Ok(answer["result"].take()),
        }
    }

    async fn send(&self, signer: &PrivateKeySigner, tx: TxEip1559) -> Result<TxHash, String> {
        let signature = signer.sign_hash_sync(&tx.signature_hash()).expect("signed");
        let raw = TxEnvelope::from(tx.into_signed(signature)).encoded_2718();
        let raw = format!("0x{}", hex::encode(raw));
        let hash = self.ask("eth_sendRawTransaction", json!([raw])).await?;
        Ok(hash.as_str().expect("a hash").parse().expect("a hash"))
    }

    async fn receipt(&self, hash: &TxHash) -> Receipt {
        let receipt = self.chain.connector().wait_receipt(hash, WAIT).await;
        receipt.expect("asked").expect("in a block")
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).await.expect("connected")
    }
}

fn request(method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params })
}

fn chain_id() -> String {
    request("eth_chainId", json!([])).to_string()
}

fn transfer(nonce: u64, to: RawAddress, wei: u64, fee: u128) -> TxEip1559 {
    TxEip1559 {
        chain_id: 31_337,
        nonce,
        gas_limit: TRANSFER_GAS,
        max_fee_per_gas: fee,
        max_priority_fee_per_gas: fee,
        to: TxKind::Call(to),
        value: U256::from(wei),
        ..Default::default()
    }
}

fn head(body_bytes: usize) -> String {
    format!(
        "POST / HTTP/1.1\r\nhost: h\r\n\
         content-type: application/json\r\ncontent-length: {body_bytes}\r\n\r\n"
    )
}

async fn answered(stream: &mut TcpStream) {
    let body = chain_id();
    let request = format!("{}{body}", head(body.len()));
    stream.write_all(request.as_bytes()).await.expect("sent");
    until(stream, "\"0x7a69\"}").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_may_use_the_gas_of_a_block_and_not_one_more() {
    let port = Port::start().await;
    let with_gas = |nonce, gas_limit| TxEip1559 {
        gas_limit,
        ..transfer(nonce, RawAddress::ZERO, 0, 1)
    };
    let hash = port.send(&port.operator, with_gas(0, BLOCK_GAS)).await;
    let receipt = port.receipt(&hash.expect("accepted")).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    let refused = port.send(&port.operator, with_gas(1, BLOCK_GAS + 1)).await;
    assert_eq!(refused, Err("exceeds block gas limit".into()));
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gas_of_a_call_is_capped() {
    let port = Port::start().await;
    let left = async |gas: Option<u64>| {
        // returns GAS
        let mut call = json!({ "data": "0x5a5f5260205ff3" });
        if let Some(gas) = gas {
            call["gas"] = format!("{gas:#x}").into();
        }
        let word = port.ask("eth_call", json!([call, "latest"])).await;
        let word = word.expect("executed");
        let digits = &word.as_str().expect("hex")[2..];
        u64::from_str_radix(digits, 16).expect("a number")
    };
    let at_the_bound = left(Some(CALL_GAS)).await;
    assert_eq!(left(Some(CALL_GAS - 1)).await, at_the_bound - 1);
    assert_eq!(left(Some(CALL_GAS + 1)).await, at_the_bound);
    assert_eq!(left(None).await, at_the_bound);
    // A call and an estimate of an endless loop end.
    for method in ["eth_call", "eth_estimateGas"] {
        let endless = json!([{ "data": "0x5b5f56" }, "latest"]);
        let ended = port.ask(method, endless).await.expect_err("no end");
        assert!(ended.contains("OutOfGas"), "{method}: {ended}");
    }
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_pays_for_gas_and_the_operator_need_not() {
    let port = Port::start().await;
    let stranger = PrivateKeySigner::random();
    let own = stranger.address();
    let zero_fee = port.send(&stranger, transfer(0, own, 0, 0)).await;
    let refusal = zero_fee.expect_err("refused");
    assert!(refusal.contains("underpriced"), "{refusal}");
    // After a nonce gap the transaction would never leave the pool.
    let zero_fee = port.send(&stranger, transfer(7, own, 0, 0)).await;
    assert!(zero_fee.expect_err("refused").contains("underpriced"));
    let empty = port.send(&stranger, transfer(0, own, 0, 1)).await;
    assert!(empty.expect_err("refused").contains("insufficient funds"));

    let coins = port.send(&port.operator, transfer(0, own, TRANSFER_GAS, 0));
    let receipt = port.receipt(&coins.await.expect("accepted")).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    // Execution would refuse such a transaction without a fee.
    let tip_above_fee = TxEip1559 {
        max_priority_fee_per_gas: 2,
        ..transfer(0, own, 0, 1)
    };
    let tip_above_fee = port.send(&stranger, tip_above_fee).await;
    assert!(
        tip_above_fee
            .expect_err("refused")
            .contains("higher than max fee")
    );
    // The port accepts the price it quotes.
    let price = port.ask("eth_gasPrice", json!([])).await;
    assert_eq!(price.expect("a price"), "0x1");
    // A fee cap without a tip.
    let no_tip = TxEip1559 {
        max_priority_fee_per_gas: 0,
        ..transfer(0, own, 0, 1)
    };
    let no_tip = port.send(&stranger, no_tip).await;
    assert!(no_tip.expect_err("refused").contains("underpriced"));
    let paid = port.send(&stranger, transfer(0, own, 0, 1)).await;
    let receipt = port.receipt(&paid.expect("accepted")).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_may_have_its_bound_of_requests_and_not_one_more() {
    let port = Port::start().await;
    let batch = |requests| {
        let one = request("eth_chainId", json!([]));
        Value::from(vec![one; requests]).to_string()
    };
    let answers: Value = port.post(batch(BATCH)).await.json().await.expect("JSON");
    assert_eq!(answers.as_array().map(Vec::len), Some(BATCH));
    for requests in [0, BATCH + 1] {
        let refused = port.post(batch(requests)).await;
        let refused: Value = refused.json().await.expect("JSON");
        assert_eq!(refused["error"]["code"], -32_600, "{refused}");
    }
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answers_of_a_batch_are_bounded() {
    let port = Port::start().await;
    // Returns 20,000 zero bytes as the contract's code: PUSH2, PUSH0, RETURN.
    let deploy = TxEip1559 {
        gas_limit: 10_000_000,
        to: TxKind::Create,
        input: vec![0x61, 0x4e, 0x20, 0x5f, 0xf3].into(),
        ..transfer(0, RawAddress::ZERO, 0, 1)
    };
    let hash = port.send(&port.operator, deploy).await.expect("accepted");
    let contract = port.receipt(&hash).await.contract_address;
    let contract = contract.expect("deployed").to_string();
    let one = request("eth_getCode", json!([contract, "latest"]));
    let batch = Value::from(vec![one; BATCH]).to_string();
    let answers: Value = port.post(batch).await.json().await.expect("JSON");
    let answers = answers.as_array().expect("a batch");
    let is_refused = |answer: &&Value| answer["error"]["message"].is_string();
    let refused = answers.iter().filter(is_refused).count();
    assert_eq!(answers.len(), BATCH);
    assert_eq!(refused, BATCH - 53, "53 responses have more than 2 MiB");
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_of_logs_may_have_its_bound_of_blocks_and_not_one_more() {
    let port = Port::start().await;
    let logs = async |blocks: u64| {
        let last = format!("0x{:x}", blocks - 1);
        let filter = json!([{ "fromBlock": "0x0", "toBlock": last }]);
        port.ask("eth_getLogs", filter).await
    };
    assert!(logs(10_000).await.is_ok());
    let refused = logs(10_001).await;
    assert_eq!(refused, Err("query of more than 10000 blocks".into()));
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_may_have_its_bound_of_bytes_and_not_one_more() {
    let port = Port::start().await;
    let padded = |bytes: usize| {
        let body = chain_id();
        let spaces = " ".repeat(bytes - body.len());
        body + &spaces
    };
    let answer = port.post(padded(rpc::MESSAGE_BYTES_MAX)).await;
    let answer: Value = answer.json().await.expect("JSON");
    assert_eq!(answer["result"], "0x7a69");
    let refused = port.post(padded(rpc::MESSAGE_BYTES_MAX + 1)).await;
    assert_eq!(refused.status(), 413);
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_reads_the_port_only_from_a_configured_origin() {
    const KNOWN: &str = "http://localhost:3000";
    const ALLOWED: &str = "access-control-allow-origin";
    let allowed = async |port: &Port, method: reqwest::Method, origin: &str| {
        let request = port
            .http
            .request(method, format!("http://{}", port.address))
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("content-type", "application/json")
            .body(chain_id());
        let answer = request.send().await.expect("answered");
        let header = answer.headers().get(ALLOWED);
        header.map(|origin| origin.to_str().expect("text").to_owned())
    };
    let (silent, port) = (
        Port::start().await,
        Port::start_with(patient(), &[KNOWN]).await,
    );
    for method in [reqwest::Method::OPTIONS, reqwest::Method::POST] {
        assert_eq!(allowed(&silent, method.clone(), KNOWN).await, None);
        let known = allowed(&port, method.clone(), KNOWN).await;
        assert_eq!(known.as_deref(), Some(KNOWN));
        let other = allowed(&port, method, "http://localhost:3001").await;
        assert_eq!(other, None);
    }
    silent.stop().await;
    port.stop().await;
}

#[tokio::test]
async fn a_malformed_origin_is_refused_at_start() {
    for text in ["*", "localhost:3000", "http://localhost:3000/", "null"] {
        let folder = tempfile::tempdir().expect("folder");
        let refused = started(&folder, &[text], &CancellationToken::new()).await;
        assert!(
            matches!(refused.err(), Some(StartError::Origin(named)) if named == text),
            "{text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_the_bound_are_closed_and_open_ones_go_on() {
    let port = Port::start_with(
        Limits {
            connections: ConnectionBudget::with_limits(2, 2, 2),
            ..patient()
        },
        &[],
    )
    .await;
    let (mut first, mut second) = (port.connect().await, port.connect().await);
    answered(&mut first).await;
    answered(&mut second).await;
    assert_eq!(until_closed(&mut port.connect().await).await, "");
    answered(&mut first).await;
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_never_sends_a_request_is_closed() {
    let port = Port::start_with(
        Limits {
            first_request: SHORT,
            ..patient()
        },
        &[],
    )
    .await;
    for begun in ["", "POST / HTTP/1.1\r\nhost: h\r\n"] {
        let mut stream = port.connect().await;
        stream.write_all(begun.as_bytes()).await.expect("sent");
        let answer = until_closed(&mut stream).await;
        assert!(!answer.contains("200"), "{begun}: {answer}");
    }
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed() {
    let port = Port::start_with(
        Limits {
            idle: SHORT,
            ..patient()
        },
        &[],
    )
    .await;
    let mut stream = port.connect().await;
    answered(&mut stream).await;
    assert_eq!(until_closed(&mut stream).await, "");
    port.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overdue_body_is_refused() {
    let port = Port::start_with(
        Limits {
            body: SHORT,
            ..patient()
        },
        &[],
    )
    .await;
    let mut stream = port.connect().await;
    let begun = format!("{}{{", head(100));
    stream.write_all(begun.as_bytes()).await.expect("sent");
    until(&mut stream, "did not arrive in time").await;
    port.stop().await;
}
