//! What a start checks, how a node is reached, and who signs.

use std::sync::LazyLock;

use alloy::consensus::Transaction as _;
use alloy::eips::Encodable2718;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_chain_with_the_same_id_is_refused() {
    let (node, other) = (Node::new(0), Node::new(1));
    nodes::a_node_of_another_chain_with_the_same_id_is_refused(&node, &other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_away_at_the_start_is_checked_before_its_use() {
    let (node, other) = (Node::new(0), Node::new(1));
    nodes::a_node_that_was_away_at_the_start_is_checked_before_its_use(&node, &other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_chain_id_is_refused() {
    nodes::a_node_with_another_chain_id_is_refused(&Node::new(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_key_than_that_of_the_store_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = config(folder.path(), &node).await;
    let chain = start(folder.path(), config.clone()).await;
    let operator = chain.handle.connector().operator().to_string();
    chain.stop().await;
    write_key(&key_file(folder.path()));
    let refused = try_start(folder.path(), config).await.err();
    let text = format!("{refused:?}");
    let Some(StartError::Chain(ChainError::OtherOperator { configured, stored })) = refused else {
        panic!("{text}");
    };
    assert_eq!(stored, operator);
    assert_ne!(configured, operator);
}

/// A new key would own none of the contracts and have no coins.
// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_no_key_is_made_for_a_remote_chain() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let config = config(folder.path(), &node).await;
    let file = key_file(folder.path());
    for empty in [false, true] {
        std::fs::remove_file(&file).expect("removed");
        if empty {
            std::fs::write(&file, "").expect("written");
        }
        let refused = try_start(folder.path(), config.clone()).await.err();
        let text = refused.expect("no key").to_string();
        let named = format!("operator key file {} is missing or empty", file.display());
        assert!(text.starts_with(&named), "{text}");
        for way in ["64 hex digits", "chain.remote_signer_url"] {
            assert!(text.contains(way), "{text}");
        }
        if !empty {
            assert!(!file.exists(), "a key was made");
            write_key(&file);
        }
    }
    write_key(&file);
    start(folder.path(), config).await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_node_is_used_while_the_first_is_away() {
    nodes::the_second_node_is_used_while_the_first_is_away(&Node::new(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_away_is_shown_without_a_secret() {
    nodes::a_node_that_is_away_is_shown_without_a_secret(&Node::new(0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_authorization_of_the_file_is_sent_with_each_request() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    node.script().authorization = Some("Bearer t0ken");
    let file = folder.path().join("node.auth");
    std::fs::write(&file, "Bearer t0ken\n").expect("written");
    let without = config(folder.path(), &node).await;
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
    let valid = config(folder.path(), &node).await;
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

// rows: R020
#[tokio::test(flavor = "multi_thread")]
async fn r020_a_remote_signer_signs_without_a_key_file() {
    nodes::a_remote_signer_signs_without_a_key_file(&Node::new(0)).await;
}

static FIRST_VERSION: LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/connector": "0001_connector");

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_the_first_version_keeps_its_submissions() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::new(0);
    let other = tempfile::tempdir().expect("folder");
    // Two signed transactions: one in a block, one that is still to be sent.
    let chain = start(other.path(), config(other.path(), &node).await).await;
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

    let chain = start(folder.path(), config(folder.path(), &node).await).await;
    assert_eq!(
        chain.receipt(&nodes::hash(&signed[0])).await.block_number,
        1
    );
    assert_eq!(chain.submit("first").await.tx_hash, nodes::hash(&signed[0]));
    let sent = chain.submit("second").await;
    assert_eq!((sent.tx_hash, sent.nonce), (nodes::hash(&signed[1]), 1));
    node.script().mine();
    assert_eq!(chain.receipt(&sent.tx_hash).await.block_number, 2);
    assert_eq!(chain.submit("third").await.nonce, 2);
    chain.stop().await;
}
