//! A day limit is reserved before an operation takes effect, and confirmed or cancelled after its
//! end (T24).

use std::collections::HashMap;

use proto::cfa::v1 as pb;
use proto::common::v1::{LimitType, OperationStatus, PaymentStatus, RejectionReasonCode};

use crate::node::{NO_COINS, gated_world};
use crate::redeem::{finalize, redeem, set_block};
use crate::world::*;

/// State of each reservation and its amount in kopecks, sorted.
fn reservations(world: &World) -> Vec<(&'static str, i64)> {
    let mut states: Vec<_> = world.double.with(|state| {
        let reservations = state.reservations.values();
        reservations
            .map(|stored| (stored.state, stored.amount_minor))
            .collect()
    });
    states.sort_unstable();
    states
}

fn limit(world: &World, limit_type: LimitType, kopecks: i64) {
    let set = |limits: &mut HashMap<i32, i64>| limits.insert(limit_type.into(), kopecks);
    world.double.with(|state| set(&mut state.daily_limits));
}

fn assert_limit_refused(operation: &pb::CfaOperation) {
    assert_eq!(operation.status(), OperationStatus::Rejected);
    assert_eq!(
        operation.rejection_reason(),
        RejectionReasonCode::LimitExceeded
    );
    assert_eq!(operation.rejection_message, "Daily limit exceeded");
}

// rows: R012 R340
#[tokio::test(flavor = "multi_thread")]
async fn t24_ten_redemptions_at_once_stay_within_the_day_limit() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world.resume_operations().await;
    world.double.with(|state| state.reservations.clear());
    limit(&world, LimitType::Withdrawal, 25_00);
    let calls = (0..10).map(|number| {
        let mut cfa = world.as_caller("sandbox.investor.alice");
        tokio::spawn(async move {
            let request = pb::RedeemCfaRubRequest {
                context: context(&key()),
                user_id: "alice".into(),
                amount: roubles("10.00"),
                payout_id: format!("payout-{number}"),
            };
            let answer = cfa.redeem_cfa_rub(request).await.expect("answered");
            answer.into_inner().operation.expect("operation")
        })
    });
    let mut accepted = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        let operation = call.await.expect("no panic");
        match operation.status() {
            OperationStatus::Rejected => assert_limit_refused(&operation),
            _ => accepted.push(operation),
        }
    }
    assert_eq!(accepted.len(), 2, "25.00 allows two redemptions of 10.00");
    assert_eq!(reservations(&world), [("RESERVED", 10_00); 2]);
    // The refused amount is available again.
    let balance = world.balance("alice:CFA-RUB").await;
    let held = (balance.held.to_string(), balance.available.to_string());
    assert_eq!(held, ("20.00".to_owned(), "80.00".to_owned()));
    for operation in &accepted {
        world.settle(operation).await;
    }
    assert_eq!(world.supply("CFA-RUB").await, "80.00");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_reservation_ends_with_its_operation_also_after_an_outage_of_identity() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world.resume_operations().await;
    assert_eq!(reservations(&world), [("CONFIRMED", 100_00)]);
    let set_unavailable = |world: &World, is_unavailable| {
        world
            .double
            .with(|state| state.reservations_unavailable = is_unavailable)
    };
    // Identity cannot reserve: nothing is burned, and the sweep continues when it can.
    set_unavailable(&world, true);
    let waiting = redeem(&mut world, "10.00", "payout-1").await;
    assert_eq!(waiting.status(), OperationStatus::Processing);
    assert_eq!(waiting.onchain_tx_hash, "");
    set_unavailable(&world, false);
    world.resume_operations().await;
    let sent = world.operation(&waiting.operation_id).await;
    assert_eq!(sent.status(), OperationStatus::OnchainSubmitted);
    // The operation ends while identity is unavailable.
    world.settle(&sent).await;
    set_unavailable(&world, true);
    let failed = PaymentStatus::Failed;
    world.double.payout_becomes("payout-1", failed);
    let ended = finalize(&mut world, "payout-1").await;
    ended.expect_err("the payout failed");
    world.resume_operations().await;
    let open = [("CONFIRMED", 100_00), ("RESERVED", 10_00)];
    assert_eq!(reservations(&world), open);
    set_unavailable(&world, false);
    world.resume_operations().await;
    let ended = [("CANCELLED", 10_00), ("CONFIRMED", 100_00)];
    assert_eq!(reservations(&world), ended);
    world.resume_operations().await;
    let once = world.double.with(|state| {
        let mut reservations = state.reservations.values();
        reservations.all(|stored| stored.end_calls == 1)
    });
    assert!(once, "a second call ended a reservation");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_refused_purchase_returns_the_money_and_the_units() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let limited = |request: &mut pb::RegisterInstrumentRequest| {
        request.issue_limit = decimal("5");
    };
    world.register(limited).await.expect("registered");
    world.resume_operations().await;
    let buy = |payment| issue_request("BOND-1", "alice", "5", Some(payment));
    let subscribed = world.subscribe("BOND-1", "alice", "5", "50.00").await;
    subscribed.expect("subscribed");
    limit(&world, LimitType::Trading, 0);
    let refused = world.cfa.issue_investment_cfa(buy("50.00")).await;
    let refused = refused.expect("answered").into_inner().operation;
    assert_limit_refused(&refused.expect("operation"));
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(balance.available.to_string(), "100.00");
    assert!(world.balance("issuer:CFA-RUB").await.balance.is_zero());
    // The units are available in the issue limit again. The subscription stays used.
    world.double.with(|state| state.daily_limits.clear());
    let unused = world.cfa.issue_investment_cfa(buy("50.00")).await;
    assert_eq!(reason(&unused.expect_err("used")), "NOT_SUBSCRIBED");
    let subscribed = world.subscribe("BOND-1", "alice", "5", "50.00").await;
    subscribed.expect("subscribed");
    let issued = world.cfa.issue_investment_cfa(buy("50.00")).await;
    let issued = issued.expect("answered").into_inner().operation;
    let issued = world.settle(&issued.expect("operation")).await;
    assert_eq!(issued.status(), OperationStatus::Finalized);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_refused_deposit_is_suspended_and_a_refused_transfer_moves_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    limit(&world, LimitType::Deposit, 0);
    limit(&world, LimitType::Withdrawal, 0);
    world.double.paid("payment-2", "bob", "30.00");
    let request = pb::IssueCfaRubRequest {
        context: context(&key()),
        user_id: "bob".into(),
        amount: roubles("30.00"),
        payment_id: "payment-2".into(),
    };
    let refused = world.cfa.issue_cfa_rub(request).await.expect("answered");
    assert_limit_refused(&refused.into_inner().operation.expect("operation"));
    let request = pb::ListSuspendedDepositsRequest::default();
    let suspended = world.cfa.list_suspended_deposits(request).await;
    let suspended = suspended.expect("listed").into_inner().deposits;
    assert_eq!(suspended.len(), 1);
    assert_eq!(suspended[0].payment_id, "payment-2");

    let request = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "CFA-RUB".into(),
        from_user_id: "alice".into(),
        to_user_id: "bob".into(),
        amount: amount("CFA-RUB", "10.00"),
        ..Default::default()
    };
    let refused = world.transfer(request).await.expect("answered");
    assert_limit_refused(&refused);
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(balance.available.to_string(), "100.00");
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 100_00);

    // The deposit is issued once its limit allows it.
    world.double.with(|state| state.daily_limits.clear());
    let request = pb::ResolveSuspendedDepositRequest {
        context: context(&key()),
        payment_id: "payment-2".into(),
        refund: false,
    };
    let issued = world.cfa.resolve_suspended_deposit(request).await;
    let issued = issued.expect("issued").into_inner().operation;
    world.settle(&issued.expect("operation")).await;
    world.balance_becomes("bob:CFA-RUB", "30.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "130.00");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_redemption_past_its_limit_cannot_be_blocked() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    limit(&world, LimitType::Withdrawal, 0);
    let refused = redeem(&mut world, "10.00", "payout-1").await;
    assert_limit_refused(&refused);
    // The state after a crash before the release of the hold.
    world.stop().await;
    let unfinished = "UPDATE operation SET status = 5, fact_undone = 0 WHERE operation_id = $1";
    alter_store_by(folder.path(), unfinished, &[&refused.operation_id]).await;
    let mut world = World::start(folder.path()).await;
    let blocked = set_block(&world, &refused, true).await;
    assert_eq!(reason(&blocked.expect_err("it ends")), "OPERATION_STATE");
    world.resume_operations().await;
    assert_limit_refused(&world.operation(&refused.operation_id).await);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_an_operation_from_before_reservations_is_finished_without_one() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.refuse(NO_COINS);
    let waiting = redeem(&mut world, "10.00", "payout-1").await;
    assert_eq!(waiting.status(), OperationStatus::Processing);
    // The state that the migration gives such an operation.
    let migrated = "UPDATE operation SET fact_limit = 3 WHERE operation_id = $1";
    alter_store_by(folder.path(), migrated, &[&waiting.operation_id]).await;
    world.double.with(|state| state.reservations.clear());
    limit(&world, LimitType::Withdrawal, 0);
    gate.pass();
    world.resume_operations().await;
    let sent = world.operation(&waiting.operation_id).await;
    assert_eq!(sent.status(), OperationStatus::OnchainSubmitted);
    assert_eq!(reservations(&world), []);
    world.stop().await;
    node.stop().await;
}
