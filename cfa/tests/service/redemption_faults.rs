//! Redemptions of an issue that fail, stop halfway or cannot pay a holder: none burns units unpaid.

use chain::{Action, Address, ReceiptStatus};
use proto::cfa::v1 as pb;
use proto::common::v1::OperationType;
use proto::ledger::v1 as ledger_pb;

use crate::issues::revert_under;
use crate::redemption::{redemption, start};
use crate::world::*;

// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_failed_redemption_can_be_restarted() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, b"redemption:BOND-1");
    revert_under(&mut world, &format!("{id}:fund")).await;
    revert_under(&mut world, &format!("{id}:part:0:try-1")).await;
    let start = |key: &str| pb::StartRedemptionRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    // The funding reverts, then the distribution, then both succeed.
    for (key, status) in [
        ("k-1", pb::RedemptionStatus::Failed),
        ("k-2", pb::RedemptionStatus::Failed),
        ("k-3", pb::RedemptionStatus::Finalized),
    ] {
        let redemption = world
            .cfa
            .start_redemption(start(key))
            .await
            .expect("started")
            .into_inner()
            .redemption
            .expect("redemption");
        assert_eq!(redemption.status(), status, "{key}");
    }
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "2000.00"
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.supply("BOND-1").await.as_str()
        ),
        (2_000_00, "0"),
        "paid once"
    );
    assert_eq!(
        world.balance("issuer:CFA-RUB").await.balance.to_string(),
        "0.00"
    );
    world.stop().await;
}

// rows: R098 R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_a_restart_of_a_failed_redemption_is_checked_like_a_start() {
    const DAY: i64 = 24 * 3_600;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let now = world.clock.now_us() / 1_000_000;
    world
        .register(|request| {
            request.matures_at = Some(prost_types::Timestamp {
                seconds: now + 10 * DAY,
                nanos: 0,
            });
        })
        .await
        .expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, b"redemption:BOND-1");
    revert_under(&mut world, &format!("{id}:fund")).await;
    let failed = start(&world, "sandbox.service", None)
        .await
        .expect("started");
    assert_eq!(failed.status(), pb::RedemptionStatus::Failed);
    world.stop().await;

    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    for (credential, why) in [
        ("sandbox.issuer.issuer", "NOT_MATURED"),
        ("sandbox.operator", "APPROVAL_REQUIRED"),
    ] {
        let refused = start(&world, credential, None).await;
        let refused = refused.expect_err("too early");
        assert_eq!(
            (refused.code(), reason(&refused).as_str()),
            (tonic::Code::FailedPrecondition, why)
        );
    }
    for date in [now - DAY, now + 10 * DAY] {
        let refused = start(&world, "sandbox.service", Some(date))
            .await
            .expect_err("another day");
        assert!(
            refused.message().contains("must be the current day"),
            "{refused}"
        );
    }
    assert_eq!(redemption(&mut world).await, failed);
    assert_eq!(world.supply("BOND-1").await, "2");
    let done = start(&world, "sandbox.service", Some(now))
        .await
        .expect("started again");
    assert_eq!(
        (done.status(), done.total.clone(), done.record_date),
        (
            pb::RedemptionStatus::Finalized,
            failed.total,
            failed.record_date
        )
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    world.stop().await;
}

// rows: R098 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_units_issued_after_an_empty_redemption_are_not_burned() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world
        .register(|request| request.decimals = 18)
        .await
        .expect("registered");
    let dust = "0.000000000000000001";
    world.issue("BOND-1", "alice", dust).await;
    world.stop().await;
    // A crash after the record of a redemption without holders; units were issued since.
    let recorded = "INSERT INTO issue_redemption (redemption_id, instrument_id, reason, status, \
            record_date_us, total_minor, parts_done,
            idempotency_key, created_at_us) VALUES ('r-1', 'BOND-1', 2, 1, 1800000000000000, 0, 0, 'k-1', 1)";
    let stopped = "UPDATE instrument SET status = 4 WHERE instrument_id = 'BOND-1'";
    for statement in [recorded, stopped] {
        alter_store(folder.path(), statement).await;
    }

    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Failed
    );
    assert_eq!(
        world.instrument("BOND-1").await.status(),
        pb::InstrumentStatus::Matured
    );
    assert_eq!(world.supply("BOND-1").await, dust);
    assert_eq!(
        world.balance("alice:BOND-1").await.available.to_string(),
        dust
    );
    world.stop().await;
}

// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_health_names_an_issue_whose_redemption_is_not_recorded() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.deposit("issuer", "2000.00").await;
    world.stop().await;
    // A crash before the record of an early call.
    let stopped = "UPDATE instrument SET status = 4 WHERE instrument_id = 'BOND-1'";
    alter_store(folder.path(), stopped).await;
    let world = World::start(folder.path()).await;
    world.resume_operations().await;
    let part = "redemption of BOND-1";
    assert_eq!(
        world.service.health.failing()[part],
        "trading has stopped and no redemption is recorded: start it again"
    );
    let done = start(&world, "sandbox.service", None).await;
    let done = done.expect("started again");
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    world.resume_operations().await;
    assert!(!world.service.health.failing().contains_key(part));
    world.stop().await;
}

// rows: R099 R100
#[tokio::test(flavor = "multi_thread")]
async fn r100_units_moved_after_the_record_day_are_not_burned_unpaid() {
    const DAY_US: i64 = 24 * 3_600 * 1_000_000;
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.turn_back_us(3 * DAY_US);
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "3").await;
    world.deposit("issuer", "5000.00").await;
    let before = "UPDATE holding_history SET time_us = time_us - 345600000000";
    assert_eq!(world.holders("BOND-1").await.len(), 2);
    alter_store(folder.path(), before).await;
    follow_history(folder.path()).await;
    // Trading stops days after the record day.
    let transfer = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "bob".into(),
        to_user_id: "carol".into(),
        amount: amount("BOND-1", "1"),
        ..Default::default()
    };
    let sent = world.transfer(transfer).await.expect("sent");
    world.settle(&sent).await;
    world.turn_back_us(0);
    world.resume_operations().await;
    let part = "redemption of BOND-1";
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Submitted
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 0);
    assert_eq!(
        world.supply("BOND-1").await,
        "3",
        "nothing is burned unpaid"
    );
    assert_eq!(
        world.service.health.failing()[part],
        "2 holders cannot be paid yet"
    );

    // An operator resolves the difference.
    let back = Action::Transfer {
        token: world
            .instrument("BOND-1")
            .await
            .smart_contract_address
            .parse()
            .expect("address"),
        from: Address::of_user("carol"),
        to: Address::of_user("bob"),
        units: 1,
    };
    let back = world.connector().submit("back", &back.call()).await;
    let back = back.expect("submitted").tx_hash.to_string();
    let receipt = world.receipt(&back).await;
    assert_eq!(receipt.status, ReceiptStatus::Success);
    let posted = ledger_pb::CreateOperationRequest {
        context: context("back"),
        operation: Some(ledger_pb::Operation {
            r#type: OperationType::TradeBuy.into(),
            user_id: "bob".into(),
            idempotency_key: "back".into(),
            external_ref: Some("back".into()),
            ..Default::default()
        }),
        postings: vec![ledger_pb::Posting {
            debit_subaccount_id: "carol:BOND-1".into(),
            credit_subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            ..Default::default()
        }],
        ..Default::default()
    };
    world.ledger.create_operation(posted).await.expect("posted");
    world.resume_operations().await;
    assert_eq!(
        redemption(&mut world).await.status(),
        pb::RedemptionStatus::Finalized
    );
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 3_000_00);
    assert_eq!(world.supply("BOND-1").await, "0");
    assert!(!world.service.health.failing().contains_key(part));
    world.stop().await;
}

// rows: R097
#[tokio::test(flavor = "multi_thread")]
async fn r097_a_refused_holder_delays_no_other() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "1").await;
    world.deposit("issuer", "3000.00").await;
    let hold_id = key();
    let request = ledger_pb::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger_pb::Hold {
            hold_id: hold_id.clone(),
            subaccount_id: "bob:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            reason: "an order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(request).await.expect("held");
    let request = pb::StartRedemptionRequest {
        context: context("k-1"),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    };
    let started = world
        .cfa
        .start_redemption(request)
        .await
        .expect("started")
        .into_inner()
        .redemption
        .expect("redemption");
    assert_eq!(started.status(), pb::RedemptionStatus::Submitted);
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 2_000_00);
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 0);
    let request = ledger_pb::ReleaseHoldRequest {
        context: context(&key()),
        hold_id,
        reason: "the order is gone".into(),
    };
    world.ledger.release_hold(request).await.expect("released");
    world.resume_operations().await;
    assert_eq!(world.tokens("CFA-RUB", "bob").await, 1_000_00);
    assert_eq!(world.supply("BOND-1").await, "0");
    world.stop().await;
}
