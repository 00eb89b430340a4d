//! Reorganisations: within the confirmations they are undone, below them they are a break.

use super::*;

// rows: R243
#[tokio::test(flavor = "multi_thread")]
async fn r243_a_dropped_transaction_is_sent_again_and_published_once_it_is_final() {
    let node = Node::new(0);
    nodes::a_dropped_transaction_is_sent_again_and_published_once_it_is_final(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_while_the_connector_is_stopped_is_undone_at_the_start() {
    let node = Node::new(0);
    nodes::a_reorganisation_while_the_connector_is_stopped_is_undone_at_the_start(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_below_the_confirmations_is_a_break() {
    nodes::a_replaced_final_block_is_a_break(&Node::new(0), 2, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reorganisation_of_a_chain_declared_final_is_a_break() {
    nodes::a_replaced_final_block_is_a_break(&Node::new(0), 0, 1).await;
}
