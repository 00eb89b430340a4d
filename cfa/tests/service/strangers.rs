//! Transactions and contracts of other users of the chain are ignored.

use std::path::Path;
use std::sync::Arc;

use ::chain::contracts::Call;
use ::chain::{Action, Address, ChainConfig, ChainDeps, ReceiptStatus, keccak256, start_chain};
use prost::Message;
use proto::cfa::v1 as pb;
use proto::chain::v1 as chain;
use tokio_util::sync::CancellationToken;

use crate::world::*;

/// Code of a contract that emits one `Transfer(from, to, units)` during its deployment.
fn code_with_transfer(units: [u8; 32]) -> Vec<u8> {
    let mut code = vec![0x7f];
    code.extend(units);
    // MSTORE at 0.
    code.extend([0x60, 0x00, 0x52]);
    for party in ["mallory", "alice"] {
        code.push(0x73);
        let address = Address::of_user(party).to_string();
        code.extend(hex::decode(&address[2..]).expect("hex"));
    }
    code.push(0x7f);
    let topic = keccak256(b"Transfer(address,address,uint256)");
    code.extend(hex::decode(&topic[2..]).expect("hex"));
    // LOG3 of the 32 bytes at 0, STOP.
    code.extend([0x60, 0x20, 0x60, 0x00, 0xa3, 0x00]);
    code
}

/// Deploys over the node's JSON-RPC with the operator's key but without the connector, which does
/// not know these transactions. Returns their hashes.
async fn deploy_past_the_connector(world: &World, folder: &Path, codes: &[Vec<u8>]) -> Vec<String> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("port");
    let address = listener.local_addr().expect("address");
    world.chain.serve_json_rpc(listener);
    let other = tempfile::tempdir().expect("folder");
    let log = events::Embedded::open(other.path().join("log"))
        .await
        .expect("log opens");
    let config = ChainConfig {
        data_dir: other.path().to_owned(),
        rpc_url: Some(format!("http://{address}")),
        operator_key_file: Some(folder.join("chain/operator.key")),
        poll_interval_ms: 5,
        ..ChainConfig::default()
    };
    let shutdown = CancellationToken::new();
    let deps = ChainDeps { log: Arc::new(log) };
    let stranger = start_chain(config, deps, shutdown.clone())
        .await
        .expect("starts");
    let connector = stranger.connector();
    let mut hashes = Vec::new();
    for (n, code) in codes.iter().enumerate() {
        let call = Call {
            to: None,
            data: code.clone(),
            gas_limit: Some(200_000),
        };
        let submitted = connector
            .submit(&format!("code-{n}"), &call)
            .await
            .expect("submitted");
        let hash = submitted.tx_hash.to_string();
        assert_eq!(world.receipt(&hash).await.status, ReceiptStatus::Success);
        hashes.push(hash);
    }
    shutdown.cancel();
    stranger.stopped().await;
    hashes
}

// rows: R030 R217
#[tokio::test(flavor = "multi_thread")]
async fn r030_transfer_events_of_other_contracts_do_not_stop_the_registry() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    // 2^256 - 1 units, more units than fit 64 bits, and a valid number.
    let mut beyond_64 = [0; 32];
    beyond_64[19] = 0x10;
    let mut seven = [0; 32];
    seven[31] = 7;
    let codes = [[0xff; 32], beyond_64, seven].map(code_with_transfer);
    let foreign_hashes = deploy_past_the_connector(&world, folder.path(), &codes).await;
    let issued = world.issue("BOND-1", "bob", "1").await;
    assert_eq!(
        world.holders("BOND-1").await,
        [("alice".into(), "2".into()), ("bob".into(), "1".into())]
    );
    let request = pb::ReplayChainTransfersRequest {
        context: None,
        from_block: 0,
    };
    let replayed = world.cfa.replay_chain_transfers(request).await;
    let transfers = replayed.expect("replayed").into_inner().transfers;
    assert_eq!(transfers.len(), 2, "{transfers:?}");
    assert!(
        transfers
            .iter()
            .all(|transfer| transfer.instrument_id == "BOND-1")
    );
    // Transactions of other programs are not published.
    let published = world.events_until(events::topics::CHAIN, |event| {
        event.short_type() == "BlockReadEvent"
            && chain::BlockReadEvent::decode(event.payload.as_slice())
                .is_ok_and(|block| block.tx_hashes.contains(&issued.onchain_tx_hash))
    });
    for event in published.await {
        let hashes = match event.short_type() {
            "BlockReadEvent" => {
                chain::BlockReadEvent::decode(event.payload.as_slice())
                    .expect("decodes")
                    .tx_hashes
            }
            _ => vec![event.key],
        };
        assert!(
            hashes.iter().all(|hash| !foreign_hashes.contains(hash)),
            "{hashes:?}"
        );
    }
    world.stop().await;
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_an_adopted_contract_keeps_its_earlier_holders() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let connector = world.connector();
    let token = world.deploy_token("BOND-2", |_| {}).await;
    world.issue("BOND-1", "alice", "1").await;
    let mint = Action::Mint {
        token,
        to: Address::of_user("alice"),
        units: 5,
        id: Some("mint".into()),
    };
    let minted = connector
        .submit("mint", &mint.call())
        .await
        .expect("submitted");
    let receipt = world.receipt(&minted.tx_hash.to_string()).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    // The registry has read the block of the mint.
    assert_eq!(
        world.holders("BOND-1").await,
        [("alice".into(), "1".into())]
    );
    world
        .register(|request| {
            request.symbol = "BOND-2".into();
            request.smart_contract_address = token.to_string();
        })
        .await
        .expect("adopted");
    world.issue("BOND-2", "bob", "3").await;
    let holders = [("alice".into(), "5".into()), ("bob".into(), "3".into())];
    assert_eq!(world.holders("BOND-2").await, holders);
    assert_eq!(
        world.holders("BOND-2").await,
        holders,
        "each transfer counts once"
    );
    world.stop().await;
}
