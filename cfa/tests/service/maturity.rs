//! Redemption of an issue with more holders than a part has, one of whom has an open order.

use proto::cfa::v1 as pb;
use proto::ledger::v1 as ledger;

use crate::world::*;

/// More than the holders of a part.
const HOLDERS: usize = 105;

async fn redemption(world: &mut World) -> pb::IssueRedemption {
    let request = pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let answer = world.cfa.get_redemption(request).await.expect("recorded");
    answer.into_inner().redemption.expect("redemption")
}

// rows: R098 R102
#[tokio::test(flavor = "multi_thread")]
async fn r102_every_holder_of_several_parts_is_paid_once_and_an_open_order_delays_its_own() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let register = world.register(|request| request.nominal = decimal("2"));
    register.await.expect("registered");
    for holder in 0..HOLDERS {
        world
            .issue("BOND-1", &format!("holder-{holder}"), "1")
            .await;
    }
    let total = format!("{}.00", 2 * HOLDERS);
    world.deposit("issuer", &total).await;
    let hold_id = uuid::Uuid::now_v7().to_string();
    let hold = ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: hold_id.clone(),
            subaccount_id: "holder-7:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            reason: "order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(hold).await.expect("held");
    let start = pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    world.cfa.start_redemption(start).await.expect("started");
    let waiting = redemption(&mut world).await;
    assert_eq!(waiting.total, amount("CFA-RUB", &total));
    assert_eq!(waiting.payments.len(), HOLDERS);
    // The others are paid; this holder's order still holds the unit.
    assert_eq!(waiting.status(), pb::RedemptionStatus::Submitted);
    assert_eq!(world.supply("BOND-1").await, "1");
    let release = ledger::ReleaseHoldRequest {
        context: context(&key()),
        hold_id,
        reason: "cancelled".into(),
    };
    world.ledger.release_hold(release).await.expect("released");
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(world.supply("BOND-1").await, "0");
    for holder in [0, 7, HOLDERS - 1] {
        let account = format!("holder-{holder}:CFA-RUB");
        let paid = world.balance(&account).await;
        assert_eq!(paid.balance.to_string(), "2.00", "{account}");
    }
    world.stop().await;
}
