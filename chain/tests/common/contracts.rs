//! Bodies of tests on a chain with an EVM: contracts, receipts, blocks, refusals, HTTP reads.

use alloy::consensus::transaction::SignerRecoverable;
use alloy::consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy::eips::Decodable2718;
use alloy::primitives::{Address as RawAddress, TxKind, U256};
use alloy::signers::local::PrivateKeySigner;
use chain::contracts::Contracts;
use chain::{FailedTrade, HolderState, TokenCode, TokenTransfer, Trade, Version};
use events::Log;
use prost::Message;
use proto::chain::v1 as pb;
use serde_json::{Value, json};
use sqlx::{Connection as _, SqliteConnection};

use super::proxy::Proxy;
use super::*;

/// A mint of five units for alice in a token of version 1.
fn mint(token: Address) -> Action {
    Action::Mint {
        token,
        to: Address::of_user("alice"),
        units: 5,
        id: None,
    }
}

/// Puts alice on the allow-list.
fn allow(registry: Address) -> Action {
    Action::RegisterIdentities {
        registry,
        accounts: vec![Address::of_user("alice")],
    }
}

/// A repeat of a key is the first submission. A reverted call has a receipt. Blocks are those of
/// the node, and their hashes are those of their headers.
pub async fn submissions_are_stored_by_key_and_receipts_show_reverts(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    let (registry, token) = token(&connector).await;
    let (alice, mint) = (Address::of_user("alice"), mint(token));
    let reverted = run(&connector, "mint-0", &mint).await;
    assert_eq!(
        reverted.status,
        ReceiptStatus::Reverted,
        "alice is not on the allow-list yet"
    );
    run(&connector, "allow-alice", &allow(registry)).await;
    let submit = async || connector.submit("mint-1", &mint.call()).await;
    let first = submit().await.expect("submitted");
    assert_eq!(submit().await.expect("the same"), first);
    let receipt = running.receipt(&first.tx_hash).await;
    assert_eq!(submit().await.expect("the same"), first);
    // Another call under a used key is noticed and not executed.
    let differences = || {
        let text = rpc::metrics_init().render();
        let name = r#"idempotency_mismatches_total{call="SubmitTransaction"}"#;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map_or(0, |count| count.trim().parse::<u64>().expect("a count"))
    };
    let before = differences();
    let other = connector.submit("mint-1", &allow(registry).call()).await;
    assert_eq!(other.expect("the first"), first);
    assert!(differences() > before);
    assert_eq!(connector.balance_of(&token, &alice).await.expect("read"), 5);
    assert_eq!(connector.total_supply(&token).await.expect("read").0, 5);
    let metadata = connector.token_metadata(&token).await.expect("read");
    assert_eq!(metadata.symbol, "BOND-1");
    let block = async |number: u64| connector.block(Some(number)).await.expect("asked");
    let found = block(receipt.block_number).await.expect("exists");
    assert_eq!(found.tx_hashes, [first.tx_hash]);
    assert_eq!(found.hash, receipt.block_hash);
    assert_eq!(found.computed_hash(), found.hash);
    let verify = async |hash: &TxHash| {
        let verified = connector.verify_block_hash(found.number, hash).await;
        verified.expect("asked")
    };
    assert!(verify(&found.hash).await);
    assert!(!verify(&found.parent_hash).await);
    assert!(block(1_000_000).await.is_none());
    let unknown: TxHash = format!("0x{}", "ab".repeat(32)).parse().expect("hash");
    assert_eq!(connector.receipt(&unknown).await.expect("asked"), None);
    let data = mint.call().data;
    let gas = connector.estimate_gas(Some(&token), &data).await;
    let (gas, second) = (
        gas.expect("estimated"),
        run(&connector, "mint-2", &mint).await,
    );
    let used = second.gas_used;
    assert!(gas >= used && gas < used * 2, "{gas} against {used}");
    running.stop().await;
}

/// A refused transaction leaves its nonce for the next one.
pub async fn the_nonce_of_a_refused_transaction_is_reused(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
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
    running.stop().await;
}

/// A second connector to the same node, with the same key and its own store.
async fn second_connector(
    folder: &Path,
    first: &Running,
    chain: &impl Evm,
) -> (tempfile::TempDir, Running) {
    let url = match chain.url() {
        Some(url) => url,
        None => {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
            let listener = listener.expect("port");
            let url = format!("http://{}", listener.local_addr().expect("address"));
            first.handle.serve_json_rpc(listener);
            url
        }
    };
    let other = tempfile::tempdir().expect("folder");
    std::fs::create_dir_all(other.path().join("chain")).expect("folder");
    std::fs::copy(key_file(folder), key_file(other.path())).expect("key");
    let at = At {
        url,
        chain_id: chain.chain_id(),
    };
    let second = start_on(other.path(), &at).await;
    (other, second)
}

/// Two programs with one account: the node's nonce replaces a wrong one.
pub async fn a_nonce_used_elsewhere_is_replaced_by_the_nodes(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let first = start_on(folder.path(), chain).await;
    let (_other, second) = second_connector(folder.path(), &first, chain).await;
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

pub async fn a_cancelled_caller_leaves_no_nonce_gap_and_no_collision(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
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
    running.stop().await;
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

pub async fn chain_and_queue_continue_after_a_restart(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    let operator = connector.operator();
    let (registry, token) = token(&connector).await;
    let alice = Address::of_user("alice");
    run(&connector, "allow", &allow(registry)).await;
    let mint = run(&connector, "mint", &mint(token)).await;
    let latest = async |connector: &Connector| {
        let block = connector.block(None).await;
        block.expect("asked").expect("head")
    };
    let head = latest(&connector).await;
    running.stop().await;

    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    assert_eq!(connector.operator(), operator);
    assert_eq!(latest(&connector).await, head);
    let receipt = connector.receipt(&mint.tx_hash).await;
    assert_eq!(receipt.expect("asked"), Some(mint));
    assert_eq!(connector.balance_of(&token, &alice).await.expect("read"), 5);
    let burn = Action::Burn {
        token,
        from: alice,
        units: 3,
        id: None,
    };
    let burned = run(&connector, "burn", &burn).await;
    assert_eq!(burned.status, ReceiptStatus::Success);
    // A final transaction is not sent again, so its bytes are not kept.
    assert_eq!(run(&connector, "burn", &burn).await, burned);
    assert_eq!(stored_bytes(folder.path()).await, 0);
    assert_eq!(latest(&connector).await.parent_hash, head.hash);
    assert_eq!(connector.total_supply(&token).await.expect("read").0, 2);
    running.stop().await;
}

/// Every block is published once and in order, after the receipts of its transactions.
pub async fn blocks_and_receipts_are_published_in_order(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    let (_, token) = token(&connector).await;
    let reverted = run(&connector, "mint", &mint(token)).await;
    let topics = [events::topics::CHAIN];
    let subscription = running.log.subscribe("test", &topics).await;
    let mut subscription = subscription.expect("subscribed");
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
    running.stop().await;
}

/// A connector with one successful and one reverted transaction, served on a port.
struct Served {
    running: Running,
    token: Address,
    success: Receipt,
    reverted: Receipt,
    url: String,
}

impl Served {
    async fn start(folder: &Path, chain: &impl Evm) -> Self {
        let running = start_on(folder, chain).await;
        let connector = running.handle.connector();
        let (registry, token) = token(&connector).await;
        let reverted = run(&connector, "mint", &mint(token)).await;
        let success = run(&connector, "register", &allow(registry)).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        tokio::spawn(rpc::serve(
            listener,
            vec![running.handle.service()],
            rpc::Authenticator::Sandbox,
            rpc::metrics_init(),
            running.shutdown.clone(),
        ));
        Self {
            running,
            token,
            success,
            reverted,
            url,
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

pub async fn receipts_are_read_over_http(chain: &impl Evm) {
    const PATH: &str = "/getTransactionReceipt";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path(), chain).await;
    let operator = served.running.handle.connector().operator().to_string();
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
    served.running.stop().await;
}

pub async fn blocks_are_read_over_http(chain: &impl Evm) {
    const PATH: &str = "/getBlock";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path(), chain).await;
    let number = served.success.block_number;
    let connector = served.running.handle.connector();
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
    served.running.stop().await;
}

pub async fn gas_is_estimated_over_http(chain: &impl Evm) {
    const PATH: &str = "/estimateGas";
    let folder = tempfile::tempdir().expect("folder");
    let served = Served::start(folder.path(), chain).await;
    let connector = served.running.handle.connector();
    let token = served.token;
    let mint = mint(token);
    let data = mint.call().data;
    let call = json!({ "to": token.to_string(), "data": format!("0x{}", hex::encode(&data)) });
    let (status, body) = served.post(PATH, call).await;
    assert_eq!(status, 200, "{body}");
    let gas: u64 = body["gas"].as_str().expect("text").parse().expect("gas");
    let used = run(&connector, "mint-2", &mint).await.gas_used;
    assert!(gas >= used && gas < 2 * used, "{gas} against {used}");
    // The token has no fallback function.
    let bare = json!({ "to": token.to_string(), "data": "0x" });
    let (status, body) = served.post(PATH, bare).await;
    assert_eq!(status, 400, "{body}");
    // A deployment whose code is the invalid instruction.
    let invalid = json!({ "to": "", "data": "0xfe" });
    let (status, body) = served.post(PATH, invalid).await;
    assert_eq!(status, 400, "{body}");
    let bad = json!({ "to": "0x12", "data": "0x" });
    let (status, _) = served.post(PATH, bad).await;
    assert_eq!(status, 400);
    served.running.stop().await;
}

/// Decodes a raw transaction and asserts its sender from the signature alone, chain id, recipient,
/// nonce, value, data and hash.
fn assert_is_signed(
    raw: &[u8],
    chain_id: u64,
    sender: RawAddress,
    to: Option<Address>,
    sent: &Submission,
    call: &Call,
) {
    let mut rest = raw;
    let transaction = TxEnvelope::decode_2718(&mut rest).expect("EIP-2718");
    assert!(rest.is_empty(), "{} bytes are left", rest.len());
    assert_eq!(transaction.chain_id(), Some(chain_id));
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
        chain_id: chain_id + 1,
        ..signed.tx().clone()
    };
    let elsewhere = TxEnvelope::from(elsewhere.into_signed(*signed.signature()));
    assert_ne!(elsewhere.recover_signer().ok(), Some(sender));
}

/// `node`: URL of a node. `operator_key`: its operator's key, if that has coins from the start.
pub async fn the_node_receives_transactions_signed_for_the_configured_chain(
    node: String,
    chain: &impl Evm,
    operator_key: Option<&Path>,
) {
    let folder = tempfile::tempdir().expect("folder");
    if let Some(key) = operator_key {
        std::fs::create_dir_all(folder.path().join("chain")).expect("folder");
        std::fs::copy(key, key_file(folder.path())).expect("key");
    }
    let proxy = Proxy::new(node);
    let at = At {
        url: proxy.serve().await,
        chain_id: chain.chain_id(),
    };
    let running = start_on(folder.path(), &at).await;
    let connector = running.handle.connector();
    chain.fund(connector.operator()).await;
    let key = std::fs::read_to_string(key_file(folder.path())).expect("key");
    let signer: PrivateKeySigner = key.trim().parse().expect("a key");
    let sender = signer.address();
    assert_eq!(connector.operator(), Address::from(sender));

    let submit = async |key: &str, call: &Call| {
        let submitted = connector.submit(key, call).await.expect("submitted");
        let receipt = running.receipt(&submitted.tx_hash).await;
        assert_eq!(receipt.status, ReceiptStatus::Success, "{key}");
        submitted
    };
    let deploy = Action::DeployRegistry.call();
    let deployed = submit("registry", &deploy).await;
    let registry = deployed.contract.expect("a contract");
    let allow = allow(registry).call();
    let allowed = submit("allow", &allow).await;
    assert_eq!((deployed.nonce, allowed.nonce), (0, 1));

    let received = proxy.received();
    assert_eq!(received.len(), 2);
    let id = chain.chain_id();
    assert_is_signed(&received[0], id, sender, None, &deployed, &deploy);
    assert_is_signed(&received[1], id, sender, Some(registry), &allowed, &allow);
    running.stop().await;
}

/// The platform's contracts, a bond, and two members with money, one of them with units.
struct Market {
    contracts: Contracts,
    bond: Address,
    buyer: Address,
    seller: Address,
}

impl Market {
    async fn deploy(connector: &Connector) -> Self {
        let done = async |key: &str, action: Action| {
            let receipt = run(connector, key, &action).await;
            assert_eq!(receipt.status, ReceiptStatus::Success, "{key}");
            receipt
        };
        let [buyer, seller, fees] = ["buyer", "seller", "fees"].map(Address::of_user);
        let platform = Action::DeployPlatform {
            name: "Digital rouble claim".into(),
            symbol: "CFA-RUB".into(),
            decimals: 2,
            owner: connector.owner(),
            operator: connector.operator(),
            fee_account: fees,
            accounts: vec![fees, buyer, seller],
        };
        let platform = done("platform", platform).await.contract_address;
        let contracts = Contracts::of_platform(&platform.expect("a deployment"));
        let bond = Action::DeployToken {
            name: "Bond".into(),
            symbol: "BOND-2".into(),
            decimals: 0,
            registry: contracts.registry,
            owner: connector.owner(),
            grants: contracts.token_grants(connector.operator()),
            terms: None,
        };
        let bond = done("bond", bond).await.contract_address;
        let bond = bond.expect("a deployment");
        for (token, to, units) in [
            (contracts.money, buyer, 1_000),
            (contracts.money, seller, 500),
            (bond, seller, 10),
        ] {
            let id = format!("mint-{token}-{to}");
            let mint = Action::Mint {
                token,
                to,
                units,
                id: Some(id.clone()),
            };
            done(&id, mint).await;
        }
        Self {
            contracts,
            bond,
            buyer,
            seller,
        }
    }

    fn trade(&self, number: u64, quantity: u128) -> Trade {
        Trade {
            token: self.bond,
            number,
            buyer: self.buyer,
            seller: self.seller,
            quantity,
            payment: 100 * quantity,
            fee: quantity,
        }
    }

    fn batch(&self, id: &str, trades: Vec<Trade>) -> Action {
        Action::SettleTrades {
            settlement: self.contracts.settlement,
            id: id.to_owned(),
            trades,
        }
    }
}

/// Deploys the platform's contracts and settles trades with them. A trade that cannot settle leaves
/// its batch, and a batch is accepted once.
pub async fn trades_settle_with_the_platforms_contracts(chain: &impl Evm) {
    let folder = tempfile::tempdir().expect("folder");
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    let market = Market::deploy(&connector).await;
    let Market {
        contracts,
        bond,
        buyer,
        seller,
    } = &market;
    for contract in [
        &contracts.registry,
        &contracts.settlement,
        &contracts.redemption,
    ] {
        assert!(connector.has_code(contract).await.expect("read"));
    }
    let code = connector.token_code(bond).await.expect("read");
    assert_eq!(code, TokenCode::Token(Version::V2));
    let rights = connector.token_rights(bond).await.expect("read");
    assert_eq!(rights.registry, contracts.registry);
    assert_eq!(rights.grants.len(), 3);

    // The seller has ten units, so the second trade fails.
    let trades = vec![market.trade(1, 4), market.trade(2, 11), market.trade(3, 2)];
    let batch = run(&connector, "batch", &market.batch("n1:1-3", trades)).await;
    assert_eq!(batch.status, ReceiptStatus::Success);
    let failed = FailedTrade {
        token: *bond,
        number: 2,
    };
    assert_eq!(batch.failed_trades, [failed]);
    let balance = async |token: &Address, holder: &Address| {
        let balance = connector.balance_of(token, holder).await;
        balance.expect("read")
    };
    assert_eq!(balance(bond, buyer).await, 6);
    assert_eq!(balance(bond, seller).await, 4);
    assert_eq!(balance(&contracts.money, buyer).await, 1_000 - 600 - 6);
    assert_eq!(balance(&contracts.money, seller).await, 500 + 600);
    let block = batch.block_number;
    let moved = TokenTransfer {
        token: *bond,
        from: Some(*seller),
        to: Some(*buyer),
        units: 4,
        block_number: block,
    };
    let second = TokenTransfer {
        units: 2,
        ..moved.clone()
    };
    let transfers = connector.transfers(&[*bond], block, block).await;
    assert_eq!(transfers.expect("read"), [moved, second]);

    let repeated = market.batch("n1:1-3", vec![market.trade(4, 1)]);
    let repeated = run(&connector, "repeated", &repeated).await;
    assert_eq!(repeated.status, ReceiptStatus::Reverted);
    assert!(repeated.failed_trades.is_empty(), "{repeated:?}");
    freezes_hold_units(&connector, &market).await;
    running.stop().await;
    // A restart has no blocks in memory: the node's logs are read.
    let running = start_on(folder.path(), chain).await;
    let connector = running.handle.connector();
    let transfers = connector.transfers(&[*bond], 0, block).await;
    let transfers = transfers.expect("read");
    let units: Vec<u128> = transfers.iter().map(|moved| moved.units).collect();
    assert_eq!(units, [10, 4, 2], "the mint and two trades");
    running.stop().await;
}

async fn freezes_hold_units(connector: &Connector, market: &Market) {
    let (token, account) = (market.bond, market.buyer);
    let freeze = Action::FreezeUnits {
        token,
        account,
        units: 5,
    };
    let frozen = run(connector, "freeze", &freeze).await;
    assert_eq!(frozen.status, ReceiptStatus::Success);
    let state = connector.holder_state(&token, &account).await;
    let expected = HolderState {
        balance: 6,
        frozen_units: 5,
        frozen: false,
    };
    assert_eq!(state.expect("read"), expected);
    let transfer = |units| Action::Transfer {
        token,
        from: account,
        to: market.seller,
        units,
    };
    let refused = run(connector, "transfer-2", &transfer(2)).await;
    assert_eq!(refused.status, ReceiptStatus::Reverted);
}
