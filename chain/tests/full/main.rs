//! The connector on real nodes: anvil and geth. `cargo test` skips these tests, `cargo xtask full`
//! runs them: `cargo test -p chain --test full`. Each test starts nodes of its own with
//! `tests/services/anvil.sh` and `geth.sh`, which install them.

#[allow(dead_code, reason = "each test target uses its part")]
#[path = "../common/mod.rs"]
mod common;
mod logged;
mod real;
#[path = "../../../tests/services/server.rs"]
mod server;

use common::{
    Evm, Lab, MOMENT, call, config, contracts, executions, nodes, start, start_funded, unavailable,
    until,
};
use real::Real;
use testkit::eventually;

// rows: R033 R034 R035
#[tokio::test(flavor = "multi_thread")]
async fn r033_submissions_receipts_and_block_hashes_on_anvil_and_geth() {
    for node in Real::both() {
        contracts::submissions_are_stored_by_key_and_receipts_show_reverts(&node).await;
    }
}

// rows: R034
#[tokio::test(flavor = "multi_thread")]
async fn r034_trades_settle_with_the_platforms_contracts_on_anvil_and_geth() {
    for node in Real::both() {
        contracts::trades_settle_with_the_platforms_contracts(&node).await;
    }
}

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_transactions_are_signed_for_the_chain_of_anvil_and_geth() {
    for node in Real::both() {
        let url = node.url().expect("a URL");
        contracts::the_node_receives_transactions_signed_for_the_configured_chain(url, &node, None)
            .await;
    }
}

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_a_remote_signer_signs_for_anvil_and_geth() {
    for node in Real::both() {
        nodes::a_remote_signer_signs_without_a_key_file(&node).await;
    }
}

// rows: R290
#[tokio::test(flavor = "multi_thread")]
async fn r290_receipts_of_anvil_and_geth_are_read_over_http() {
    for node in Real::both() {
        contracts::receipts_are_read_over_http(&node).await;
    }
}

// rows: R291
#[tokio::test(flavor = "multi_thread")]
async fn r291_blocks_of_anvil_and_geth_are_read_over_http() {
    for node in Real::both() {
        contracts::blocks_are_read_over_http(&node).await;
    }
}

// rows: R292
#[tokio::test(flavor = "multi_thread")]
async fn r292_gas_is_estimated_by_anvil_and_geth_over_http() {
    for node in Real::both() {
        contracts::gas_is_estimated_over_http(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_nonces_are_in_order_on_anvil_and_geth() {
    for node in Real::both() {
        contracts::the_nonce_of_a_refused_transaction_is_reused(&node).await;
        contracts::a_nonce_used_elsewhere_is_replaced_by_the_nodes(&node).await;
        contracts::a_cancelled_caller_leaves_no_nonce_gap_and_no_collision(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_an_account_without_coins_is_named_on_anvil_and_geth() {
    for node in Real::both() {
        nodes::an_account_without_coins_is_named_and_frees_its_nonces(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_waiting_transaction_of_anvil_and_geth_is_replaced_with_a_higher_fee() {
    for node in [Real::anvil(), Real::geth_with_period()] {
        nodes::a_transaction_without_inclusion_is_replaced_with_a_higher_fee(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_call_has_at_most_the_gas_of_a_block_of_anvil_and_geth() {
    for node in Real::both() {
        nodes::a_call_has_at_most_the_gas_of_a_block(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_a_call_has_at_most_the_gas_of_a_transaction_of_anvil_and_geth() {
    for node in [Real::anvil_with_gas_cap(), Real::geth_with_large_blocks()] {
        nodes::a_call_above_the_gas_limit_of_a_transaction_is_sent_with_that_limit(&node).await;
    }
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_nonces_of_another_program_on_anvil_and_geth() {
    for node in Real::both() {
        nodes::a_nonce_that_a_reorganisation_freed_is_filled(&node).await;
    }
    for node in Real::both() {
        nodes::a_submission_whose_nonce_another_program_used_gets_a_new_one(&node).await;
    }
}

// rows: R243
#[tokio::test(flavor = "multi_thread")]
async fn r243_blocks_and_receipts_of_anvil_and_geth_are_published_in_order() {
    for node in Real::both() {
        contracts::blocks_and_receipts_are_published_in_order(&node).await;
    }
}

// rows: R243
#[tokio::test(flavor = "multi_thread")]
async fn r243_a_reorganisation_of_two_blocks_of_anvil_and_geth_is_undone() {
    for node in Real::both() {
        nodes::a_dropped_transaction_is_sent_again_and_published_once_it_is_final(&node).await;
    }
    for node in Real::both() {
        nodes::a_reorganisation_while_the_connector_is_stopped_is_undone_at_the_start(&node).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_final_block_of_anvil_and_geth_is_a_break() {
    for node in Real::both() {
        nodes::a_replaced_final_block_is_a_break(&node, 2, 3).await;
    }
    for node in Real::both() {
        nodes::a_replaced_final_block_is_a_break(&node, 0, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_chain_of_anvil_and_geth_is_refused() {
    for (node, other) in [(Real::anvil(), Real::anvil()), (Real::geth(), Real::geth())] {
        nodes::a_node_of_another_chain_with_the_same_id_is_refused(&node, &other).await;
        nodes::a_node_that_was_away_at_the_start_is_checked_before_its_use(&node, &other).await;
        nodes::a_node_with_another_chain_id_is_refused(&node).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_of_anvil_and_geth_that_is_away_is_replaced_and_shown() {
    for node in Real::both() {
        nodes::the_second_node_is_used_while_the_first_is_away(&node).await;
        nodes::a_node_that_is_away_is_shown_without_a_secret(&node).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connector_goes_on_after_a_restart_of_anvil_and_geth() {
    for node in Real::both() {
        contracts::chain_and_queue_continue_after_a_restart(&node).await;
        let folder = tempfile::tempdir().expect("folder");
        let config = config(folder.path(), &node).await;
        let chain = start_funded(folder.path(), config, &node).await;
        let sent = chain.submit("first").await;
        chain.receipt(&sent.tx_hash).await;
        node.stop();
        until(|| chain.failing("node").is_some()).await;
        let connector = chain.handle.connector();
        unavailable(connector.submit("second", &call("second")).await);
        // The submission is known and final.
        assert_eq!(chain.submit("first").await, sent);
        node.start_again();
        until(|| chain.failing("node").is_none()).await;
        let sent = eventually(async || connector.submit("second", &call("second")).await.ok());
        let sent = sent.await;
        chain.receipt(&sent.tx_hash).await;
        assert_eq!(executions(&node, "first").await, 1);
        assert_eq!(executions(&node, "second").await, 1);
        chain.stop().await;
    }
}

/// The log names account, balance and key file, and asks for coins while there are none.
#[tokio::test(flavor = "multi_thread")]
async fn preflight_on_anvil_and_geth_names_account_balance_and_key() {
    logged::record();
    for node in Real::both() {
        let folder = tempfile::tempdir().expect("folder");
        let config = config(folder.path(), &node).await;
        let chain = start(folder.path(), config.clone()).await;
        let account = chain.handle.connector().operator();
        let operator = account.to_string();
        let key = common::key_file(folder.path()).display().to_string();
        let first = preflight(&operator, 0).await;
        for text in [
            "the signing account has no coins",
            "send coins to it",
            key.as_str(),
        ] {
            assert!(first.contains(text), "{text}: {first}");
        }
        Lab::fund(&node, account).await;
        chain.stop().await;
        let known = logged::of_account(&operator, 0).len();
        let chain = start(folder.path(), config).await;
        let second = preflight(&operator, known).await;
        for text in ["signing account", "balance_wei", key.as_str()] {
            assert!(second.contains(text), "{text}: {second}");
        }
        assert!(!second.contains("no coins"), "{second}");
        tokio::time::sleep(MOMENT).await;
        assert_eq!(chain.failing("node"), None);
        chain.stop().await;
    }
}

/// The first event of a signing account after its first `known` ones.
async fn preflight(operator: &str, known: usize) -> String {
    eventually(async || logged::of_account(operator, known).into_iter().next()).await
}
