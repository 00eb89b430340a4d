//! Bodies of tests on a node whose blocks the test controls: waiting transactions, reorganisations,
//! nodes that are away, what a start checks, who signs.

use alloy::consensus::{SignableTransaction, Transaction as _, TxEip1559, TxEnvelope};
use alloy::eips::Encodable2718;
use alloy::primitives::{Bytes, TxKind};
use alloy::signers::SignerSync;
use alloy::signers::local::PrivateKeySigner;
use axum::Router;
use axum::extract::State;
use axum::routing::post;
use events::Log;
use prost::Message;
use proto::chain::v1 as pb;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;

/// The receipts that were published up to a block, as (hash, block).
async fn published(chain: &Running, through: u64) -> Vec<(String, u64)> {
    let topics = [events::topics::CHAIN];
    let subscription = chain.log.subscribe("test", &topics).await;
    let mut subscription = subscription.expect("subscribed");
    let mut receipts = Vec::new();
    loop {
        let delivery = tokio::time::timeout(WAIT, subscription.next()).await;
        let delivery = delivery.expect("the event arrives").expect("an event");
        let event = delivery.record.event;
        match event.short_type() {
            "TransactionReceiptReadyEvent" => {
                let receipt = pb::TransactionReceiptReadyEvent::decode(&*event.payload);
                let receipt = receipt.expect("decodes");
                receipts.push((receipt.tx_hash, receipt.block_number));
            }
            _ => {
                let block = pb::BlockReadEvent::decode(&*event.payload).expect("decodes");
                if block.number == through {
                    return receipts;
                }
            }
        }
    }
}

/// Adds blocks until the head has this number.
async fn mine_to(node: &impl Lab, number: u64) {
    while node.head().await < number {
        node.mine_empty(1).await;
    }
}

/// Two blocks are replaced, one of them with the transaction. Finality is far away, so a block more
/// changes nothing.
pub async fn a_dropped_transaction_is_sent_again_and_published_once_it_is_final(node: &impl Lab) {
    const CONFIRMATIONS: u64 = 6;
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        confirmations: CONFIRMATIONS,
        ..config(folder.path(), node).await
    };
    let chain = start_funded(folder.path(), config, node).await;
    let sent = chain.submit("first").await;
    node.mine().await;
    node.mine_empty(1).await;
    tokio::time::sleep(MOMENT).await;
    let connector = chain.handle.connector();
    let receipt = connector.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.expect("asked"), None, "blocks are missing");
    let removed = node.head().await + 1 - mined_in(node, "first").await;
    node.remove_blocks(removed).await;
    assert_eq!(executions(node, "first").await, 0);
    node.mine_empty(3).await;
    // The chain lost it, so it is sent again, and the new chain includes it.
    let included = mined_in(node, "first").await;
    if node.head().await < included + CONFIRMATIONS {
        mine_to(node, included + CONFIRMATIONS - 1).await;
        tokio::time::sleep(MOMENT).await;
        let receipt = connector.receipt(&sent.tx_hash).await;
        assert_eq!(receipt.expect("asked"), None, "a block is missing");
    }
    mine_to(node, included + CONFIRMATIONS).await;
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.block_number, included);
    assert_eq!(executions(node, "first").await, 1);
    assert_eq!(
        published(&chain, included).await,
        [(sent.tx_hash.to_string(), included)]
    );
    assert_eq!(chain.failing("finality"), None);
    chain.stop().await;
}

pub async fn a_reorganisation_while_the_connector_is_stopped_is_undone_at_the_start(
    node: &impl Lab,
) {
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        confirmations: 3,
        ..config(folder.path(), node).await
    };
    let chain = start_funded(folder.path(), config.clone(), node).await;
    let sent = chain.submit("first").await;
    node.mine().await;
    node.mine_empty(1).await;
    tokio::time::sleep(MOMENT).await;
    chain.stop().await;
    node.remove_blocks(2).await;
    node.mine_empty(4).await;
    let chain = start(folder.path(), config).await;
    let included = mined_in(node, "first").await;
    mine_to(node, included + 3).await;
    chain.receipt(&sent.tx_hash).await;
    assert_eq!(executions(node, "first").await, 1);
    chain.stop().await;
}

/// Replaces final blocks, expects the break, and restores them if the node can.
pub async fn a_replaced_final_block_is_a_break(node: &impl Lab, confirmations: u64, count: u64) {
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        confirmations,
        ..config(folder.path(), node).await
    };
    let chain = start_funded(folder.path(), config, node).await;
    let sent = chain.submit("first").await;
    node.mine().await;
    node.mine_empty(confirmations as usize).await;
    let number = chain.receipt(&sent.tx_hash).await.block_number;
    let connector = chain.handle.connector();
    let token = [Address::of_user("contract")];
    // Kept with the receipts of the block: the scripted node has no `eth_getLogs`.
    let transfers = connector.transfers(&token, number, number).await;
    assert_eq!(transfers.expect("asked"), Vec::new());
    node.keep().await;
    node.remove_blocks(count).await;
    // As many blocks as before: the head's number does not show the change.
    node.mine_empty(count as usize).await;
    until(|| chain.failing("finality").is_some()).await;
    let text = chain.failing("finality").expect("the break");
    let expected = format!("replaced final block {number}");
    assert!(text.contains(&expected), "{text}");
    let refused = connector.submit("second", &call("second")).await;
    assert_eq!(unavailable(refused), text);
    unavailable(connector.receipt(&sent.tx_hash).await);
    unavailable(connector.transfers(&token, number, number).await);
    node.mine_empty(5).await;
    tokio::time::sleep(MOMENT).await;
    let last = connector.stored_last_read_block().await.expect("read");
    assert_eq!(last, number, "nothing is finalised after the break");
    assert_eq!(executions(node, "second").await, 0);
    if node.restore().await {
        until(|| chain.failing("finality").is_none()).await;
        let second = chain.submit("second").await;
        node.mine().await;
        node.mine_empty(confirmations as usize).await;
        chain.receipt(&second.tx_hash).await;
    }
    chain.stop().await;
}

/// `other`: a node of another chain with the same id.
pub async fn a_node_of_another_chain_with_the_same_id_is_refused<N: Lab>(node: &N, other: &N) {
    let folder = tempfile::tempdir().expect("folder");
    let own = config(folder.path(), node).await;
    start(folder.path(), own.clone()).await.stop().await;
    let elsewhere = config(folder.path(), other).await;
    let refused = try_start(folder.path(), elsewhere).await.err();
    let text = format!("{refused:?}");
    let Some(StartError::Chain(ChainError::OtherChain { node, stored, .. })) = refused else {
        panic!("{text}");
    };
    assert_ne!(node, stored);
    // As the second node of the own chain it is refused too. While it is away it cannot be checked
    // and keeps no start from its work.
    let both = ChainConfig {
        rpc_fallback_url: Some(other.serve().await),
        ..own
    };
    let refused = try_start(folder.path(), both.clone()).await.err();
    let text = format!("{refused:?}");
    assert!(
        matches!(
            refused,
            Some(StartError::Chain(ChainError::OtherChain { .. }))
        ),
        "{text}"
    );
    other.set_away(true);
    start(folder.path(), both).await.stop().await;
    other.set_away(false);
}

/// `other`: a node of another chain. It is away at the start, so the start cannot refuse it.
pub async fn a_node_that_was_away_at_the_start_is_checked_before_its_use<N: Lab>(
    node: &N,
    other: &N,
) {
    let folder = tempfile::tempdir().expect("folder");
    let both = ChainConfig {
        rpc_fallback_url: Some(other.serve().await),
        ..config(folder.path(), node).await
    };
    other.set_away(true);
    let chain = start_funded(folder.path(), both, node).await;
    other.set_away(false);
    node.set_away(true);
    let is_named = |text: String| text.contains("not used: the node is on chain");
    until(|| chain.failing("node").is_some_and(is_named)).await;
    let connector = chain.handle.connector();
    unavailable(connector.submit("first", &call("first")).await);
    assert!(other.received().is_empty());
    node.set_away(false);
    until(|| chain.failing("node").is_none()).await;
    let sent = eventually(async || connector.submit("first", &call("first")).await.ok()).await;
    node.mine().await;
    chain.receipt(&sent.tx_hash).await;
    assert_eq!(executions(node, "first").await, 1);
    assert!(other.received().is_empty());
    chain.stop().await;
}

pub async fn a_node_with_another_chain_id_is_refused(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = config(folder.path(), node).await;
    let wrong = ChainConfig {
        chain_id: node.chain_id() + 1,
        ..config
    };
    let refused = try_start(folder.path(), wrong).await.err();
    let text = format!("{refused:?}");
    let Some(StartError::Chain(ChainError::WrongChain {
        node: found,
        configured,
    })) = refused
    else {
        panic!("{text}");
    };
    assert_eq!((found, configured), (node.chain_id(), node.chain_id() + 1));
}

pub async fn the_second_node_is_used_while_the_first_is_away(first: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let second = first.peer();
    first.set_away(true);
    let config = ChainConfig {
        rpc_fallback_url: Some(second.serve().await),
        ..config(folder.path(), first).await
    };
    let chain = start_funded(folder.path(), config, first).await;
    let sent = chain.submit("first").await;
    first.mine().await;
    chain.receipt(&sent.tx_hash).await;
    // A transaction goes to one node: the caller repeats it, and the other node takes it.
    first.set_away(false);
    second.set_away(true);
    let connector = chain.handle.connector();
    let sent = eventually(async || connector.submit("second", &call("second")).await.ok()).await;
    first.mine().await;
    chain.receipt(&sent.tx_hash).await;
    assert_eq!(executions(first, "second").await, 1);
    chain.stop().await;
}

pub async fn a_node_that_is_away_is_shown_without_a_secret(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = config(folder.path(), node).await;
    let url = config.rpc_url.clone().expect("a node");
    let secret = format!("{url}/s3cret-key").replace("http://", "http://user:s3cret@");
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

/// Serves `eth_signTransaction` with a key, as Web3Signer does.
async fn serve_signer(key: PrivateKeySigner, chain_id: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = Router::new()
        .route("/", post(sign))
        .with_state(Arc::new((key, chain_id)));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

async fn sign(State(signer): State<Arc<(PrivateKeySigner, u64)>>, body: String) -> String {
    let (key, chain_id) = &*signer;
    let request: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(request["method"], "eth_signTransaction");
    let asked = &request["params"][0];
    let text = |name: &str| asked[name].as_str().expect("text").to_owned();
    let number = |name: &str| {
        let digits = text(name);
        u128::from_str_radix(&digits[2..], 16).expect("a quantity")
    };
    let tx = TxEip1559 {
        chain_id: *chain_id,
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

pub async fn a_remote_signer_signs_without_a_key_file(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let key = PrivateKeySigner::random();
    let address = Address::from(key.address());
    let config = ChainConfig {
        remote_signer_url: Some(serve_signer(key, node.chain_id()).await),
        operator_address: Some(address.to_string()),
        ..config(folder.path(), node).await
    };
    std::fs::remove_file(key_file(folder.path())).expect("removed");
    let chain = start_funded(folder.path(), config.clone(), node).await;
    assert_eq!(chain.handle.connector().operator(), address);
    let sent = chain.submit("first").await;
    node.mine().await;
    chain.receipt(&sent.tx_hash).await;
    assert!(!key_file(folder.path()).exists());
    chain.stop().await;
    // A signer with another key: nothing is stored or sent.
    let other = serve_signer(PrivateKeySigner::random(), node.chain_id()).await;
    let config = ChainConfig {
        remote_signer_url: Some(other),
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
    assert_eq!(node.received().len(), 1);
    chain.stop().await;
}

/// The refusal names the account and leaves no transaction.
pub async fn an_account_without_coins_is_named_and_frees_its_nonces(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    node.make_poor().await;
    let chain = start(folder.path(), config(folder.path(), node).await).await;
    let connector = chain.handle.connector();
    let operator = connector.operator();
    for key in ["first", "second"] {
        let refused = connector.submit(key, &call(key)).await;
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains(&operator.to_string()), "{text}");
        assert_eq!(connector.submission(key).await.expect("read"), None);
    }
    node.fund(operator).await;
    // A node's pool may learn of a block later than its readers.
    let sent = eventually(async || connector.submit("first", &call("first")).await.ok()).await;
    assert_eq!(sent.nonce, 0);
    node.mine().await;
    chain.receipt(&sent.tx_hash).await;
    chain.stop().await;
}

/// A waiting transaction gets a higher fee after the third block without it, not before.
pub async fn a_transaction_without_inclusion_is_replaced_with_a_higher_fee(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        replace_after_blocks: 3,
        ..config(folder.path(), node).await
    };
    let chain = start_funded(folder.path(), config, node).await;
    // The connector counts from the block that it knows.
    tokio::time::sleep(MOMENT).await;
    let head = node.head().await;
    node.fill_blocks().await;
    let sent = chain.submit("first").await;
    node.pass_blocks(2).await;
    tokio::time::sleep(MOMENT).await;
    let count = node.received().len();
    let blocks = node.head().await - head;
    assert!(
        count == 1 || (blocks > 2 && !is_stepped(node)),
        "{blocks} blocks are too few"
    );
    node.pass_blocks(1).await;
    until(|| node.received().len() > 1).await;
    assert!(node.head().await >= head + 3);
    let received = node.received();
    let [old, new] = [&received[0], &received[1]];
    assert_eq!((old.nonce(), new.nonce()), (0, 0));
    assert_eq!(old.input(), new.input());
    assert!(8 * new.max_fee_per_gas() >= 9 * old.max_fee_per_gas());
    let priority = |tx: &TxEnvelope| tx.max_priority_fee_per_gas().expect("EIP-1559");
    assert!(8 * priority(new) >= 9 * priority(old));
    mined_in(node, "first").await;
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.tx_hash, sent.tx_hash);
    let hashes: Vec<TxHash> = node.received().iter().map(hash).collect();
    assert!(hashes[1..].contains(&receipt.included_tx_hash));
    assert_eq!(executions(node, "first").await, 1);
    // A repeat of the key returns the first submission.
    assert_eq!(chain.submit("first").await, sent);
    chain.stop().await;
}

fn is_stepped<N: Lab>(_: &N) -> bool {
    N::IS_STEPPED
}

pub fn hash(transaction: &TxEnvelope) -> TxHash {
    TxHash::from(*transaction.tx_hash())
}

/// A call that needs more gas than a block has gets the gas of a block.
pub async fn a_call_has_at_most_the_gas_of_a_block(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = config(folder.path(), node).await;
    let chain = start_funded(folder.path(), config, node).await;
    let first = chain.submit("first").await;
    node.mine().await;
    chain.receipt(&first.tx_hash).await;
    let batch = Call {
        gas_limit: Some(43_100_000),
        ..call("batch")
    };
    let connector = chain.handle.connector();
    let sent = connector.submit("batch", &batch).await.expect("submitted");
    let received = node.received();
    let limits: Vec<u64> = received.iter().map(|tx| tx.gas_limit()).collect();
    assert_eq!(limits, [100_000, node.block_gas_limit().await]);
    node.mine().await;
    chain.receipt(&sent.tx_hash).await;
    chain.stop().await;
}

/// A chain may allow a transaction less gas than a block has (EIP-7825).
pub async fn a_call_above_the_gas_limit_of_a_transaction_is_sent_with_that_limit(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = config(folder.path(), node).await;
    let chain = start_funded(folder.path(), config, node).await;
    let connector = chain.handle.connector();
    for (nonce, key) in ["first", "second"].into_iter().enumerate() {
        let batch = Call {
            gas_limit: Some(28_000_000),
            ..call(key)
        };
        let sent = connector.submit(key, &batch).await.expect("submitted");
        assert_eq!(sent.nonce, nonce as u64);
        node.mine().await;
        chain.receipt(&sent.tx_hash).await;
    }
    // The limit is learnt from one refusal.
    let received = node.received();
    let limits: Vec<u64> = received.iter().map(|tx| tx.gas_limit()).collect();
    assert_eq!(limits, [28_000_000, 1 << 24, 1 << 24]);
    assert_eq!(chain.failing("transactions"), None);
    chain.stop().await;
}

/// A transaction of another program with the operator's key.
pub fn foreign(folder: &Path, chain_id: u64, nonce: u64) -> TxEnvelope {
    let key = std::fs::read_to_string(key_file(folder)).expect("key");
    let key: PrivateKeySigner = key.trim().parse().expect("a key");
    let tx = TxEip1559 {
        chain_id,
        nonce,
        gas_limit: 21_000,
        max_fee_per_gas: 20_000_000_000,
        max_priority_fee_per_gas: 1,
        to: TxKind::Call(key.address()),
        ..TxEip1559::default()
    };
    let signature = key.sign_hash_sync(&tx.signature_hash()).expect("signed");
    TxEnvelope::from(tx.into_signed(signature))
}

pub async fn a_nonce_that_a_reorganisation_freed_is_filled(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        confirmations: 5,
        ..config(folder.path(), node).await
    };
    // Gives the account coins.
    let chain = start_funded(folder.path(), config.clone(), node).await;
    chain.stop().await;
    let head = node.head().await;
    let foreign = foreign(folder.path(), node.chain_id(), 0);
    node.preempt(foreign).await;
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    assert_eq!(sent.nonce, 1);
    if !is_stepped(node) {
        node.mine().await;
    }
    let count = node.head().await - head;
    node.remove_blocks(count).await;
    node.mine_empty(count as usize + 1).await;
    until(|| {
        let received = node.received();
        received
            .iter()
            .any(|tx| tx.nonce() == 0 && tx.input().is_empty())
    })
    .await;
    mined_in(node, "first").await;
    let of_both = node.mined().await.len() as u64 - mined_before(node, head).await;
    assert_eq!(of_both, 2);
    node.mine_empty(5).await;
    chain.receipt(&sent.tx_hash).await;
    chain.stop().await;
}

/// Number of transactions up to a block.
async fn mined_before(node: &impl Lab, head: u64) -> u64 {
    let mined = node.mined().await;
    mined.iter().filter(|(number, _)| *number <= head).count() as u64
}

pub async fn a_submission_whose_nonce_another_program_used_gets_a_new_one(node: &impl Lab) {
    let folder = tempfile::tempdir().expect("folder");
    let config = ChainConfig {
        confirmations: 2,
        ..config(folder.path(), node).await
    };
    let chain = start_funded(folder.path(), config, node).await;
    let sent = chain.submit("first").await;
    if !is_stepped(node) {
        // The connector reads its block and sends it no more.
        node.mine().await;
        tokio::time::sleep(MOMENT).await;
    }
    let foreign = foreign(folder.path(), node.chain_id(), 0);
    node.preempt(foreign).await;
    tokio::time::sleep(MOMENT).await;
    let sent_again = || node.received().iter().any(|tx| tx.nonce() == 1);
    assert!(!sent_again(), "the block may be replaced");
    node.mine_empty(2).await;
    until(sent_again).await;
    mined_in(node, "first").await;
    node.mine_empty(2).await;
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_ne!(receipt.included_tx_hash, sent.tx_hash);
    assert_eq!(executions(node, "first").await, 1);
    chain.stop().await;
}
