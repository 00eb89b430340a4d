//! A caller with several roles: the roles that admit a call decide its rights.

use proto::cfa::v1 as pb;

use crate::world::*;

fn redemption(payout_id: &str) -> pb::RedeemCfaRubRequest {
    pb::RedeemCfaRubRequest {
        context: context(&key()),
        user_id: "alice".into(),
        amount: roubles("1"),
        payout_id: payout_id.into(),
    }
}

fn halt() -> pb::UpdateInstrumentRequest {
    pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: pb::InstrumentStatus::Halted.into(),
        ..Default::default()
    }
}

// rows: R333
#[tokio::test(flavor = "multi_thread")]
async fn r333_a_reading_role_does_not_widen_a_write() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100").await;
    world.register(|_| {}).await.expect("registered");

    let redeemed = world
        .as_caller("sandbox.investor+auditor.mallory")
        .redeem_cfa_rub(redemption("payout-1"))
        .await
        .expect_err("another user's money");
    assert_eq!(redeemed.code(), tonic::Code::PermissionDenied);
    let halted = world
        .as_caller("sandbox.issuer+auditor.other")
        .update_instrument(halt())
        .await
        .expect_err("another issuer's bond");
    assert_eq!(halted.code(), tonic::Code::PermissionDenied);
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Active);
    assert_eq!(world.supply("CFA-RUB").await, "100.00");

    // Own data, and reads admitted by the read role, work as before.
    world
        .as_caller("sandbox.issuer+auditor.issuer")
        .update_instrument(halt())
        .await
        .expect("the caller's own bond");
    let listed = world
        .as_caller("sandbox.auditor+investor.mallory")
        .list_operations(pb::ListOperationsRequest {
            user_id: "alice".into(),
            ..Default::default()
        })
        .await
        .expect("the auditor reads everything")
        .into_inner();
    assert_eq!(listed.operations.len(), 1);
    world.stop().await;
}

fn status(status: pb::InstrumentStatus) -> pb::UpdateInstrumentRequest {
    pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        status: status.into(),
        ..Default::default()
    }
}

// rows: R333
#[tokio::test(flavor = "multi_thread")]
async fn d32_one_person_halts_an_issue_and_two_end_the_halt() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    use pb::InstrumentStatus::{Active, Halted};
    let mut operator = world.as_caller("sandbox.operator.anna");
    operator
        .update_instrument(status(Halted))
        .await
        .expect("halted");
    // Neither an operator nor the issuer ends it alone.
    for credential in ["sandbox.operator.anna", "sandbox.issuer.issuer"] {
        let mut alone = world.as_caller(credential);
        let refused = alone.update_instrument(status(Active)).await;
        assert_eq!(
            reason(&refused.expect_err("refused")),
            "APPROVAL_REQUIRED",
            "{credential}"
        );
    }
    assert_eq!(world.instrument("BOND-1").await.status(), Halted);
    let request = testkit::messages::approved(status(Active));
    let mut approved = world.as_caller(testkit::APPROVED);
    approved.update_instrument(request).await.expect("active");
    assert_eq!(world.instrument("BOND-1").await.status(), Active);
    world.stop().await;
}

// rows: R098 R333
#[tokio::test(flavor = "multi_thread")]
async fn r098_an_issue_is_redeemed_early_by_two_persons() {
    use pb::RedemptionReason::{Buyback, Maturity};
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let start = |why: pb::RedemptionReason| pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: why.into(),
    };
    // The role of a service beside another one is a person's.
    for credential in [
        "sandbox.operator",
        "sandbox.operator.anna",
        "sandbox.operator+service",
    ] {
        let mut alone = world.as_caller(credential);
        for why in [Buyback, Maturity] {
            let refused = alone.start_redemption(start(why)).await;
            let refused = refused.expect_err("one person");
            assert_eq!(reason(&refused), "APPROVAL_REQUIRED", "{credential}");
        }
    }
    let status = world.instrument("BOND-1").await.status();
    assert_eq!(status, pb::InstrumentStatus::Active);
    assert_eq!(world.supply("BOND-1").await, "2");
    let money = world.balance("issuer:CFA-RUB").await.available;
    assert_eq!(money.to_string(), "2000.00");

    let request = testkit::messages::approved(start(Buyback));
    let mut approved = world.as_caller(testkit::APPROVED);
    let started = approved.start_redemption(request).await.expect("started");
    let redemption = started.into_inner().redemption.expect("redemption");
    assert_eq!(redemption.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(world.supply("BOND-1").await, "0");
    world.stop().await;
}
