//! A token with impossible transfers is quarantined. Other tokens are not affected.

use chain::{Action, Address, ReceiptStatus};
use proto::cfa::v1 as pb;
use tonic::Code;

use crate::world::*;

/// Mints on the token's contract without the service.
async fn mint(world: &mut World, instrument_id: &str, units: u128) {
    let token = world.instrument(instrument_id).await.smart_contract_address;
    let mint = Action::Mint {
        token: token.parse().expect("address"),
        to: Address::of_user("alice"),
        units,
        id: Some(key()),
    };
    let submitted = world.connector().submit(&key(), &mint.call()).await;
    let hash = submitted.expect("submitted").tx_hash.to_string();
    assert_eq!(world.receipt(&hash).await.status, ReceiptStatus::Success);
}

async fn quarantined(world: &World) -> String {
    let reason = async {
        loop {
            if let Some(reason) = world.service.health.findings().get("quarantined tokens") {
                return reason.clone();
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let reason = tokio::time::timeout(WAIT, reason).await;
    reason.expect("health names the token")
}

async fn assert_refused(world: &mut World) {
    let list = pb::ListHoldersRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let listed = world.cfa.list_holders(list).await.map(drop);
    let start = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let started = world.cfa.start_redemption(start).await.map(drop);
    let resume = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: pb::InstrumentStatus::Active.into(),
        ..Default::default()
    };
    let resumed = world.cfa.update_instrument(resume).await.map(drop);
    for call in [listed, started, resumed] {
        let refused = call.expect_err("refused");
        assert_eq!(
            (refused.code(), reason(&refused).as_str()),
            (Code::FailedPrecondition, "TOKEN_QUARANTINED")
        );
    }
}

/// Several impossible transfers over more blocks than one page reads: the first quarantines.
#[tokio::test(flavor = "multi_thread")]
async fn r030_later_impossible_transfers_of_a_quarantined_token_are_ignored() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for symbol in ["BOND-1", "BOND-2"] {
        let registered = world.register(|request| request.symbol = symbol.into());
        registered.await.expect("registered");
    }
    // Puts the holder on the allow-list.
    world.issue("BOND-1", "alice", "1").await;
    for _ in 0..20 {
        mint(&mut world, "BOND-1", 1 << 100).await;
    }
    quarantined(&world).await;
    assert_refused(&mut world).await;
    world.issue("BOND-2", "bob", "1").await;
    let holders = [("bob".to_owned(), "1".to_owned())];
    assert_eq!(world.holders("BOND-2").await, holders);
    world.stop().await;
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_an_impossible_transfer_quarantines_its_token_alone() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for symbol in ["BOND-1", "BOND-2"] {
        let registered = world.register(|request| request.symbol = symbol.into());
        registered.await.expect("registered");
        world.issue(symbol, "alice", "2").await;
    }
    // Beyond 64 bits.
    mint(&mut world, "BOND-1", 1 << 100).await;
    assert!(quarantined(&world).await.starts_with("BOND-1: "));
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Halted);
    assert_refused(&mut world).await;

    // The other token, deposits and the replay of the chain continue.
    world.issue("BOND-2", "bob", "1").await;
    let holders = [("alice".into(), "2".into()), ("bob".into(), "1".into())];
    assert_eq!(world.holders("BOND-2").await, holders);
    world.deposit("alice", "10.00").await;
    let replay = pb::ReplayChainTransfersRequest::default();
    let replayed = world.cfa.replay_chain_transfers(replay).await;
    let replayed = replayed.expect("replayed").into_inner().transfers;
    let names: Vec<_> = replayed.iter().map(|moved| &moved.instrument_id).collect();
    assert_eq!(names, ["BOND-2", "BOND-2", "CFA-RUB"]);
    world.stop().await;

    let mut world = World::start(folder.path()).await;
    assert!(quarantined(&world).await.starts_with("BOND-1: "));
    assert_refused(&mut world).await;
    assert_eq!(world.holders("BOND-2").await, holders);
    world.stop().await;
}
