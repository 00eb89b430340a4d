//! Redemption of an issue whose units are in trading holds.

use proto::cfa::v1 as pb;
use proto::ledger::v1 as ledger;
use proto::market::v1::{TradingHold, TradingHoldStatus};

use crate::redeem::trail_has;
use crate::world::*;

/// Alice has two units, one of them in a trading hold. The issuer has the money of both.
async fn trading_world(folder: &std::path::Path) -> (World, String) {
    let mut world = World::start(folder).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let hold_id = world.hold("alice", "BOND-1", "1", "market").await;
    world.double.with(|state| {
        state.trading_hold = Some(TradingHold {
            hold_id: hold_id.clone(),
            user_id: "alice".into(),
            instrument_id: "BOND-1".into(),
            undrawn: decimal("1"),
            drawn: decimal("0"),
            status: TradingHoldStatus::Open.into(),
            ..Default::default()
        });
    });
    (world, hold_id)
}

// rows: R098 R102
#[tokio::test(flavor = "multi_thread")]
async fn r098_units_left_in_a_trading_hold_are_redeemed() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, hold_id) = trading_world(folder.path()).await;
    let redemption = world.redeem_issue().await.expect("started");
    assert_ne!(redemption.status(), pb::RedemptionStatus::Finalized);
    assert!(
        trail_has(&world, &format!("adjust {hold_id} 0")),
        "{:?}",
        world.double.trail()
    );
    // The market releases after its answer.
    let request = ledger::AdjustHoldRequest {
        context: context(&key()),
        hold_id,
        remaining_amount: amount("BOND-1", "0"),
    };
    world.ledger.adjust_hold(request).await.expect("released");
    world.resume_operations().await;
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Redeemed);
    for (account, due) in [("CFA-RUB", "2000.00"), ("BOND-1", "0")] {
        let balance = world.balance(&format!("alice:{account}")).await;
        assert_eq!(balance.available.to_string(), due, "{account}");
    }
    assert_eq!(world.supply("BOND-1").await, "0");
    world.stop().await;
}
