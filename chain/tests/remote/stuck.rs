//! Transactions that the node refuses, loses or leaves waiting.

use std::sync::Arc;
use std::time::Duration;

use alloy::consensus::{Transaction as _, TxEnvelope};
use tokio::sync::Notify;

use super::*;

/// The judge that refuses the call of a key with a text.
fn refusing(
    key: &'static str,
    text: &'static str,
) -> Option<Box<dyn Fn(&TxEnvelope) -> Option<String> + Send>> {
    Some(Box::new(move |tx: &TxEnvelope| {
        (tx.input()[..] == *key.as_bytes()).then(|| text.to_owned())
    }))
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_transaction_refused_for_good_is_cancelled_and_tried_again() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = config(folder.path(), &node).await;
    let chain = start(folder.path(), config.clone()).await;
    // The answer leaves open whether the node has it, so its nonce stays assigned.
    node.script().judge = refusing("first", "node is syncing");
    let connector = chain.handle.connector();
    let unclear = connector.submit("first", &call("first")).await;
    assert!(
        matches!(unclear, Err(ChainError::Unavailable(_))),
        "{unclear:?}"
    );
    let first = connector.submission("first").await.expect("read");
    let first = first.expect("stored");
    let second = chain.submit("second").await;
    assert_eq!((first.nonce, second.nonce), (0, 1));
    // A stop between the refusal and its handling. Then no node ever takes these bytes.
    chain.stop().await;
    node.script().judge = refusing("first", "intrinsic gas too low");
    let chain = start(folder.path(), config).await;
    until(|| {
        let received = node.script().received.clone();
        received
            .iter()
            .any(|tx| tx.nonce() == 0 && tx.input().is_empty())
    })
    .await;
    node.script().mine();
    assert_eq!(chain.receipt(&second.tx_hash).await.block_number, 1);
    assert_eq!(executions(&node, "first").await, 0);
    // A repeat learns of the refusal, after which nothing of the key is left.
    let connector = chain.handle.connector();
    let refused = eventually(
        async || match connector.submit("first", &call("first")).await {
            Err(ChainError::Refused(reason)) => Some(reason),
            Err(ChainError::Unavailable(_)) => None,
            other => panic!("{other:?}"),
        },
    );
    assert_eq!(refused.await, "intrinsic gas too low");
    assert_eq!(connector.submission("first").await.expect("read"), None);
    // Once the cause is removed, the key can be submitted.
    node.script().judge = None;
    let again = chain.submit("first").await;
    node.script().mine();
    let receipt = chain.receipt(&again.tx_hash).await;
    assert_eq!(executions(&node, "first").await, 1);
    assert_eq!(receipt.included_tx_hash, again.tx_hash);
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_the_call_of_a_cancelled_transaction_keeps_its_hash_and_acts_once() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = config(folder.path(), &node).await;
    let chain = start(folder.path(), config.clone()).await;
    let first = chain.submit("first").await;
    // The node loses it and refuses it from now on.
    {
        let mut script = node.script();
        script.remove_blocks(0);
        script.judge = refusing("first", "exceeds block gas limit");
    }
    until(|| {
        let received = node.script().received.clone();
        received.iter().any(|tx| tx.input().is_empty())
    })
    .await;
    node.script().mine();
    until(|| chain.failing("transactions").is_some()).await;
    chain.stop().await;
    node.script().judge = None;
    let chain = start(folder.path(), config).await;
    until(|| node.script().received.iter().any(|tx| tx.nonce() == 1)).await;
    let receipt = async {
        loop {
            node.script().mine();
            let receipt = chain.handle.connector().receipt(&first.tx_hash).await;
            if let Some(receipt) = receipt.expect("asked") {
                return receipt;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let receipt = tokio::time::timeout(WAIT, receipt).await.expect("in time");
    assert_eq!(receipt.tx_hash, first.tx_hash);
    assert_ne!(receipt.included_tx_hash, first.tx_hash);
    assert_eq!(executions(&node, "first").await, 1);
    let by_its_own = chain.receipt(&receipt.included_tx_hash).await;
    assert_eq!(by_its_own, receipt);
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_an_unanswered_send_does_not_hold_up_other_submissions() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let notice = Arc::new(Notify::new());
    node.script().hangs.insert(0, notice.clone());
    let chain = start(folder.path(), config(folder.path(), &node).await).await;
    let connector = chain.handle.connector();
    let hanging = tokio::spawn(async move { connector.submit("first", &call("first")).await });
    until(|| node.script().hanging == 1).await;
    assert_eq!(chain.submit("second").await.nonce, 1);
    assert!(!hanging.is_finished());
    node.script().hangs.clear();
    notice.notify_one();
    let first = hanging.await.expect("no panic").expect("submitted");
    node.script().mine();
    chain.receipt(&first.tx_hash).await;
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_transaction_without_inclusion_is_replaced_with_a_higher_fee() {
    nodes::a_transaction_without_inclusion_is_replaced_with_a_higher_fee(&Node::new(0)).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_the_replaced_transaction_counts_if_a_block_contains_it() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = ChainConfig {
        replace_after_blocks: 1,
        ..config(folder.path(), &node).await
    };
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    node.script().base_fee = 1_000;
    node.script().mine_empty(1);
    until(|| node.script().received.len() > 1).await;
    let old = node.script().received[0].clone();
    node.script().mine_this(old);
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.included_tx_hash, sent.tx_hash);
    node.script().mine();
    tokio::time::sleep(MOMENT).await;
    assert_eq!(executions(&node, "first").await, 1);
    assert_eq!(chain.failing("transactions"), None);
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_the_fee_stops_at_its_limit_and_health_shows_it() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    node.script().base_fee = 450_000_000;
    let config = ChainConfig {
        replace_after_blocks: 1,
        max_fee_per_gas_gwei: 1,
        ..config(folder.path(), &node).await
    };
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    node.script().base_fee = 2_000_000_000;
    node.script().mine_empty(3);
    until(|| {
        let failing = chain.failing("transactions");
        failing.is_some_and(|text| text.contains("max_fee_per_gas_gwei"))
    })
    .await;
    let limit = 1_000_000_000;
    let received = node.script().received.clone();
    assert!(received.iter().all(|tx| tx.max_fee_per_gas() <= limit));
    // The chain becomes cheaper.
    node.script().base_fee = 100;
    node.script().mine();
    chain.receipt(&sent.tx_hash).await;
    until(|| chain.failing("transactions").is_none()).await;
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_call_has_at_most_the_gas_of_a_block() {
    nodes::a_call_has_at_most_the_gas_of_a_block(&Node::new(0)).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_nonce_that_a_reorganisation_freed_is_filled() {
    nodes::a_nonce_that_a_reorganisation_freed_is_filled(&Node::new(0)).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_filler_with_a_higher_fee_is_not_sent_again_under_another_nonce() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = ChainConfig {
        confirmations: 2,
        replace_after_blocks: 1,
        ..config(folder.path(), &node).await
    };
    // Creates the key.
    start(folder.path(), config.clone()).await.stop().await;
    node.script()
        .mine_this(nodes::foreign(folder.path(), CHAIN_ID, 0));
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    {
        let mut script = node.script();
        script.remove_blocks(1);
        script.base_fee = 1_000;
        script.mine_empty(2);
    }
    let has_received = |nonce: u64, fee: u128| {
        let received = node.script().received.clone();
        let mut received = received.iter();
        received.any(|tx| tx.nonce() == nonce && tx.max_fee_per_gas() >= fee)
    };
    until(|| has_received(0, 1)).await;
    // The filler needs a higher fee too.
    node.script().base_fee = 10_000;
    until(|| {
        node.script().mine_empty(1);
        has_received(0, 10_000) && has_received(1, 10_000)
    })
    .await;
    until(|| {
        let mut script = node.script();
        script.mine();
        script.mined().len() == 2
    })
    .await;
    node.script().mine_empty(2);
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.tx_hash, sent.tx_hash);
    tokio::time::sleep(MOMENT).await;
    assert!(!has_received(2, 0), "the filler has no call");
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_call_whose_refusal_the_caller_knows_is_not_sent_by_a_later_step_of_the_round() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let chain = start(folder.path(), config(folder.path(), &node).await).await;
    chain.submit("first").await;
    let [first, second] = [Arc::new(Notify::new()), Arc::new(Notify::new())];
    node.script().hangs.insert(1, second.clone());
    let connector = chain.handle.connector();
    let refused = tokio::spawn(async move { connector.submit("second", &call("second")).await });
    until(|| node.script().hanging == 1).await;
    // A round that has read both waits at the first one.
    node.script().hangs.insert(0, first.clone());
    until(|| node.script().hanging == 2).await;
    {
        let mut script = node.script();
        script.hangs.clear();
        script.judge = refusing("second", "intrinsic gas too low");
    }
    second.notify_one();
    let refused = refused.await.expect("no panic");
    assert!(
        matches!(refused, Err(ChainError::Refused(_))),
        "{refused:?}"
    );
    node.script().judge = None;
    first.notify_one();
    tokio::time::sleep(MOMENT).await;
    node.script().mine();
    assert_eq!(executions(&node, "first").await, 1);
    assert_eq!(executions(&node, "second").await, 0);
    chain.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_submission_whose_nonce_another_program_used_gets_a_new_one() {
    nodes::a_submission_whose_nonce_another_program_used_gets_a_new_one(&Node::new(0)).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_an_account_without_coins_is_named_and_frees_its_nonces() {
    nodes::an_account_without_coins_is_named_and_frees_its_nonces(&Node::new(0)).await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_call_above_the_gas_limit_of_a_transaction_is_sent_with_that_limit() {
    let node = Node::new(0);
    node.script().judge = Some(Box::new(|tx: &TxEnvelope| {
        let gas = tx.gas_limit();
        let text = format!("transaction gas limit too high (cap: 16777216, tx: {gas})");
        (gas > 1 << 24).then_some(text)
    }));
    nodes::a_call_above_the_gas_limit_of_a_transaction_is_sent_with_that_limit(&node).await;
}
