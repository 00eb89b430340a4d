//! Hashes of blocks, computed from their headers.

use super::*;

// rows: R032 R035
#[tokio::test(flavor = "multi_thread")]
async fn r032_a_block_hash_of_qbft_is_verified_and_another_hash_is_not() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    node.script().mine_empty(1);
    let chain = start(folder.path(), config(folder.path(), &node).await).await;
    let connector = chain.handle.connector();
    let head = async || {
        let block = connector.block(Some(1)).await.expect("read");
        let block = block.expect("exists");
        let verified = connector.verify_block_hash(1, &block.hash).await;
        (block, verified.expect("read"))
    };
    let (block, verified) = head().await;
    assert_eq!(block.hash.to_string(), node.script().head_hash());
    assert_eq!(block.computed_hash(), block.hash);
    assert!(verified);
    node.script().restate_head();
    let (restated, verified) = head().await;
    assert_ne!(restated.hash, block.hash);
    assert_ne!(restated.computed_hash(), restated.hash);
    assert!(!verified);
    chain.stop().await;
}
