//! Reorganisations: within the confirmations they are undone, below them they are a break.

use chain::ChainError;
use events::Log;
use prost::Message;
use proto::chain::v1 as pb;

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

// rows: R243
#[tokio::test(flavor = "multi_thread")]
async fn r243_a_dropped_transaction_is_sent_again_and_published_once_it_is_final() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = ChainConfig {
        confirmations: 3,
        ..config(folder.path(), node.serve().await)
    };
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    node.script().mine();
    node.script().mine_empty(1);
    tokio::time::sleep(MOMENT).await;
    let connector = chain.handle.connector();
    let receipt = connector.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.expect("asked"), None, "two blocks are missing");
    // Two blocks, the one with the transaction among them, are replaced by three without it.
    {
        let mut script = node.script();
        script.remove_blocks(2);
        script.mine_empty(3);
    }
    // The chain lost it, so it is sent again, and the new chain includes it.
    until(|| {
        let mut script = node.script();
        let is_mined = script.mined().len() == 1;
        if !is_mined {
            script.mine();
        }
        is_mined
    })
    .await;
    let included = node.script().head();
    node.script().mine_empty(2);
    tokio::time::sleep(MOMENT).await;
    let receipt = connector.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.expect("asked"), None, "a block is missing");
    node.script().mine_empty(1);
    let receipt = chain.receipt(&sent.tx_hash).await;
    assert_eq!(receipt.block_number, included);
    assert_eq!(executions(&node, "first"), 1);
    assert_eq!(
        published(&chain, included).await,
        [(sent.tx_hash.to_string(), included)]
    );
    assert_eq!(chain.failing("finality"), None);
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_while_the_connector_is_stopped_is_undone_at_the_start() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = ChainConfig {
        confirmations: 3,
        ..config(folder.path(), node.serve().await)
    };
    let chain = start(folder.path(), config.clone()).await;
    let sent = chain.submit("first").await;
    node.script().mine();
    node.script().mine_empty(1);
    tokio::time::sleep(MOMENT).await;
    chain.stop().await;
    {
        let mut script = node.script();
        script.remove_blocks(2);
        script.mine_empty(4);
    }
    let chain = start(folder.path(), config).await;
    until(|| {
        let mut script = node.script();
        script.mine();
        script.mined().len() == 1
    })
    .await;
    node.script().mine_empty(3);
    chain.receipt(&sent.tx_hash).await;
    assert_eq!(executions(&node, "first"), 1);
    chain.stop().await;
}

/// Replaces final blocks, expects the break, and restores them.
async fn assert_breaks(confirmations: u64, count: usize) {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = ChainConfig {
        confirmations,
        ..config(folder.path(), node.serve().await)
    };
    let chain = start(folder.path(), config).await;
    let sent = chain.submit("first").await;
    node.script().mine();
    node.script().mine_empty(confirmations as usize);
    chain.receipt(&sent.tx_hash).await;
    let connector = chain.handle.connector();
    let token = [Address::of_user("contract")];
    // Kept with the receipts of the block: this node has no `eth_getLogs`.
    let transfers = connector.transfers(&token, 1, 1).await;
    assert_eq!(transfers.expect("asked"), Vec::new());
    let blocks = node.script().blocks();
    {
        let mut script = node.script();
        script.remove_blocks(count);
        // As many blocks as before: the head's number does not show the change.
        script.mine_empty(count);
    }
    until(|| chain.failing("finality").is_some()).await;
    let text = chain.failing("finality").expect("the break");
    assert!(text.contains("replaced final block 1"), "{text}");
    let refused = connector.submit("second", &call("second")).await;
    assert!(
        matches!(&refused, Err(ChainError::Unavailable(reason)) if *reason == text),
        "{refused:?}"
    );
    let receipt = connector.receipt(&sent.tx_hash).await;
    assert!(matches!(receipt, Err(ChainError::Unavailable(_))));
    let transfers = connector.transfers(&token, 1, 1).await;
    assert!(matches!(transfers, Err(ChainError::Unavailable(_))));
    node.script().mine_empty(5);
    tokio::time::sleep(MOMENT).await;
    let last = connector.stored_last_read_block().await.expect("read");
    assert_eq!(last, 1, "nothing is finalised after the break");
    // The node returns to the chain that was read.
    node.script().set_blocks(blocks);
    until(|| chain.failing("finality").is_none()).await;
    let second = chain.submit("second").await;
    node.script().mine();
    node.script().mine_empty(confirmations as usize);
    chain.receipt(&second.tx_hash).await;
    chain.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_below_the_confirmations_is_a_break() {
    assert_breaks(2, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_of_a_chain_declared_final_is_a_break() {
    assert_breaks(0, 1).await;
}
