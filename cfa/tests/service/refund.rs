//! Compliance refunds a blocked redemption by an approval: its completed steps are undone (R089).

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, PaymentStatus, RejectionReasonCode};
use proto::ledger::v1 as ledger;
use tonic::Code;

use crate::node::{NO_COINS, gated_world};
use crate::redeem::{finalize, hold, redeem, set_block};
use crate::world::*;

async fn refund(
    world: &World,
    credential: &str,
    operation: &pb::CfaOperation,
) -> Result<(pb::CfaOperation, bool), tonic::Status> {
    let request = pb::RefundRedemptionRequest {
        context: context(&key()),
        operation_id: operation.operation_id.clone(),
        reason: "documents were not given".into(),
    };
    let mut caller = world.as_caller(credential);
    let answer = caller.refund_redemption(request).await?;
    let replayed = answer.metadata().contains_key("idempotent-replayed");
    let operation = answer.into_inner().operation.expect("operation");
    Ok((operation, replayed))
}

/// Tokens and money are back with the user, and no payout is open.
async fn assert_refunded(world: &mut World, operation: &pb::CfaOperation) {
    let ended = world.operation(&operation.operation_id).await;
    assert_eq!(
        (ended.status(), ended.rejection_reason()),
        (OperationStatus::Refunded, RejectionReasonCode::AmlBlocked)
    );
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(balance.available.to_string(), "100.00");
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 100_00);
    let held = hold(world, &ended.hold_id.clone().expect("hold")).await;
    assert_eq!(held.status(), ledger::HoldStatus::Released);
    let payouts = world.double.with(|state| state.payouts.clone());
    let is_open = |payout: &proto::payments::v1::Payout| {
        payout.sent || payout.status() != PaymentStatus::Failed
    };
    assert!(!payouts.values().any(is_open), "{payouts:?}");
    world.resume_operations().await;
    let reservations = world.double.with(|state| state.reservations.clone());
    assert_eq!(reservations[&ended.operation_id].state, "CANCELLED");
}

// rows: R089
#[tokio::test(flavor = "multi_thread")]
async fn r089_a_blocked_redemption_is_refunded_after_its_burn() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.hide_blocks();
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    let early = refund(&world, testkit::APPROVED, &operation).await;
    assert_eq!(reason(&early.expect_err("not blocked")), "OPERATION_STATE");
    set_block(&world, &operation, true).await.expect("blocked");
    for credential in [
        "sandbox.operator",
        "sandbox.treasury",
        "sandbox.investor.alice",
    ] {
        let refused = refund(&world, credential, &operation).await;
        assert_eq!(refused.expect_err("refused").code(), Code::PermissionDenied);
    }
    // Money and tokens return by two persons (D32).
    let alone = refund(&world, "sandbox.compliance", &operation).await;
    assert_eq!(reason(&alone.expect_err("refused")), "APPROVAL_REQUIRED");
    // The burn may still succeed: it is undone once its receipt is known.
    let (waiting, replayed) = refund(&world, testkit::APPROVED, &operation)
        .await
        .expect("ordered");
    assert_eq!(
        (waiting.status(), replayed),
        (OperationStatus::Blocked, false)
    );
    let late = set_block(&world, &operation, false).await;
    assert_eq!(reason(&late.expect_err("ordered")), "OPERATION_STATE");
    gate.pass();
    world.settle(&operation).await;
    world.resume_operations().await;
    assert_refunded(&mut world, &operation).await;
    // A repeat changes nothing, and neither does the failure of the payout.
    let (again, replayed) = refund(&world, testkit::APPROVED, &operation)
        .await
        .expect("repeated");
    assert_eq!(
        (again.status(), replayed),
        (OperationStatus::Refunded, true)
    );
    let asked = finalize(&mut world, "payout-1").await;
    assert_eq!(reason(&asked.expect_err("ended")), "OPERATION_NOT_FOUND");
    assert_refunded(&mut world, &operation).await;
    world.stop().await;
    node.stop().await;
}

// rows: R089
#[tokio::test(flavor = "multi_thread")]
async fn r089_a_redemption_blocked_before_its_burn_is_refunded_without_one() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.refuse(NO_COINS);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    set_block(&world, &operation, true).await.expect("blocked");
    gate.pass();
    refund(&world, testkit::APPROVED, &operation)
        .await
        .expect("refunded");
    let ended = world.operation(&operation.operation_id).await;
    assert_eq!(ended.onchain_tx_hash, "");
    assert_refunded(&mut world, &operation).await;
    world.stop().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r089_only_compliance_lets_a_blocked_redemption_continue() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.refuse(NO_COINS);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    let mut operator = world.as_caller("sandbox.operator");
    let mut request = pb::SetRedemptionBlockRequest {
        context: context(&key()),
        operation_id: operation.operation_id.clone(),
        blocked: true,
        reason: "suspicious".into(),
    };
    let blocked = operator.set_redemption_block(request.clone()).await;
    blocked.expect("an operator may stop it");
    (request.context, request.blocked) = (context(&key()), false);
    let refused = operator.set_redemption_block(request).await;
    let refused = refused.expect_err("an operator may not let it continue");
    assert_eq!(refused.code(), Code::PermissionDenied);
    set_block(&world, &operation, false)
        .await
        .expect("continues");
    gate.pass();
    world.stop().await;
    node.stop().await;
}

/// The id of a second user with the on-chain address of the first.
fn twin_of(user_id: &str) -> String {
    chain::Address::of_user(user_id).to_string()[2..].to_owned()
}

// rows: R039
#[tokio::test(flavor = "multi_thread")]
async fn t14_a_deposit_of_a_user_with_a_taken_address_is_suspended() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let twin = twin_of("alice");
    world.double.paid("payment-2", &twin, "30.00");
    let request = pb::IssueCfaRubRequest {
        context: context(&key()),
        user_id: twin.clone(),
        amount: roubles("30.00"),
        payment_id: "payment-2".into(),
    };
    let ended = world.cfa.issue_cfa_rub(request).await.expect("answered");
    let ended = ended.into_inner().operation.expect("operation");
    assert_eq!(
        (ended.status(), ended.rejection_reason()),
        (
            OperationStatus::Rejected,
            RejectionReasonCode::IntegrationError
        )
    );
    let list = pb::ListSuspendedDepositsRequest::default();
    let suspended = world.cfa.list_suspended_deposits(list).await;
    let suspended = suspended.expect("listed").into_inner().deposits;
    assert_eq!(suspended[0].payment_id, "payment-2");
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    world.stop().await;
}
