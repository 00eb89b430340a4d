//! Part D of the checklist: redemption of CFA-RUB.

use events::Log;
use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;
use proto::common::v1::{
    KycStatus, OperationStatus, OperationType, PaymentStatus, RejectionReasonCode,
};
use proto::ledger::v1 as ledger;
use proto::payments::v1 as payments;

use crate::node::{NO_COINS, gated_world};
use crate::world::*;

fn request(amount: &str, payout_id: &str, key: &str) -> pb::RedeemCfaRubRequest {
    pb::RedeemCfaRubRequest {
        context: context(key),
        user_id: "alice".into(),
        amount: roubles(amount),
        payout_id: payout_id.into(),
    }
}

pub async fn hold(world: &mut World, hold_id: &str) -> ledger::Hold {
    let request = ledger::GetHoldRequest {
        context: None,
        hold_id: hold_id.into(),
    };
    world
        .ledger
        .get_hold(request)
        .await
        .expect("found")
        .into_inner()
        .hold
        .expect("hold")
}

async fn holds(world: &mut World) -> usize {
    world
        .ledger
        .list_holds(ledger::ListHoldsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .holds
        .len()
}

pub async fn redeem(world: &mut World, amount: &str, payout_id: &str) -> pb::CfaOperation {
    world
        .redeem_rub(request(amount, payout_id, &key()))
        .await
        .expect("redeemed")
        .into_inner()
        .operation
        .expect("operation")
}

pub async fn finalize(
    world: &mut World,
    payout_id: &str,
) -> Result<pb::CfaOperation, tonic::Status> {
    let request = pb::FinalizeRedemptionRequest {
        context: context(&key()),
        payout_id: payout_id.into(),
    };
    Ok(world
        .cfa
        .finalize_redemption(request)
        .await?
        .into_inner()
        .operation
        .expect("operation"))
}

// rows: R016 R036 R065 R066 R068 R070 R072 R073 R074 R075 R077 R082 R083 R084 R086 R090
#[tokio::test(flavor = "multi_thread")]
async fn r065_redemption_burns_pays_and_consumes_the_hold() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world.double.with(|state| state.trail.clear());
    let operation = world
        .redeem_rub(request("40.00", "payout-1", "k-1"))
        .await
        .expect("redeemed")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        (operation.status(), operation.r#type()),
        (OperationStatus::OnchainSubmitted, OperationType::Redemption)
    );
    assert_eq!(operation.external_ref, "payout-1");
    let hold_id = operation.hold_id.clone().expect("hold id");
    assert_eq!(
        world.double.trail()[..5],
        [
            "profile alice",
            "limits alice WITHDRAWAL 40.00 WITHDRAWAL",
            "sanctions alice",
            "profile alice",
            "initiate payout-1 alice 40.00 account of alice",
        ]
    );
    let taken = hold(&mut world, &hold_id).await;
    assert_eq!(
        (taken.subaccount_id.as_str(), taken.amount),
        ("alice:CFA-RUB", amount("CFA-RUB", "40.00"))
    );
    assert!(taken.reason.contains("payout-1"));
    // With the same key there is still one hold, one burn and one payout.
    let again = world
        .redeem_rub(request("40.00", "payout-1", "k-1"))
        .await
        .expect("answered")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(again.operation_id, operation.operation_id);
    assert_eq!(holds(&mut world).await, 1);
    // The bank has not responded: finalization changes nothing and is no error (T08).
    world.settle(&operation).await;
    assert_eq!(
        world.double.trail().last().map(String::as_str),
        Some("release payout-1"),
        "released after the burn's receipt"
    );
    assert_eq!(
        (
            world.supply("CFA-RUB").await.as_str(),
            world.tokens("CFA-RUB", "alice").await
        ),
        ("60.00", 60_00)
    );
    let pending = finalize(&mut world, "payout-1").await.expect("no error");
    assert_eq!(pending.status(), OperationStatus::OnchainSubmitted);
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    let done = finalize(&mut world, "payout-1").await.expect("finalized");
    assert_eq!(done.status(), OperationStatus::Finalized);
    assert!(done.finalized_at.is_some());
    assert_eq!(
        hold(&mut world, &hold_id).await.status(),
        ledger::HoldStatus::Consumed
    );
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(
        (balance.balance.to_string(), balance.available.to_string()),
        ("60.00".into(), "60.00".into())
    );
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "CfaRedeemedEvent"
        })
        .await;
    let redeemed: pb::CfaRedeemedEvent =
        Message::decode(seen.last().expect("event").payload.as_slice()).expect("decodes");
    assert_eq!(
        (redeemed.operation_id, redeemed.holder_id.as_str()),
        (done.operation_id, "alice")
    );
    assert_eq!(
        (redeemed.instrument_id.as_str(), redeemed.amount),
        ("CFA-RUB", amount("CFA-RUB", "40.00"))
    );
    assert_eq!(redeemed.tx_hash, done.onchain_tx_hash);
    world.stop().await;
}

// rows: R067 R069 R071 R078 R249 R251
#[tokio::test(flavor = "multi_thread")]
async fn r067_refusals_leave_no_operation_and_no_hold() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world
        .double
        .upsert_user("alice", |alice| alice.kyc = KycStatus::Simplified);
    let error = world
        .redeem_rub(request("1", "payout-1", &key()))
        .await
        .expect_err("kyc");
    assert_eq!(
        (error.code(), error.message()),
        (
            tonic::Code::FailedPrecondition,
            "KYC level too low for withdrawal"
        )
    );
    assert_eq!(reason(&error), "KYC_LEVEL_TOO_LOW");
    world
        .double
        .upsert_user("alice", |alice| alice.kyc = KycStatus::Standard);
    let error = world
        .redeem_rub(request("100.01", "payout-1", &key()))
        .await
        .expect_err("balance");
    assert_eq!(
        (error.message(), reason(&error).as_str()),
        ("Insufficient balance", "INSUFFICIENT_BALANCE")
    );
    let unknown = finalize(&mut world, "payout-1").await.expect_err("unknown");
    assert_eq!(unknown.message(), "Operation not found");
    let listed = pb::ListOperationsRequest {
        r#type: OperationType::Redemption.into(),
        ..Default::default()
    };
    assert!(
        world
            .cfa
            .list_operations(listed.clone())
            .await
            .expect("listed")
            .into_inner()
            .operations
            .is_empty()
    );
    assert_eq!(holds(&mut world).await, 0);
    world
        .double
        .with(|state| state.limit_refusal = Some("Daily withdrawal limit".into()));
    let rejected = redeem(&mut world, "1", "payout-1").await;
    assert_eq!(
        (rejected.status(), rejected.rejection_reason()),
        (
            OperationStatus::Rejected,
            RejectionReasonCode::LimitExceeded
        )
    );
    assert_eq!(
        (rejected.r#type(), rejected.rejection_message.as_str()),
        (OperationType::Redemption, "Daily withdrawal limit")
    );
    assert_eq!(
        (
            holds(&mut world).await,
            world.supply("CFA-RUB").await.as_str()
        ),
        (0, "100.00")
    );
    let foreign = world
        .as_caller("sandbox.investor.bob")
        .redeem_cfa_rub(request("1", "payout-2", &key()))
        .await
        .expect_err("foreign");
    assert_eq!(foreign.code(), tonic::Code::PermissionDenied);
    // A call with the payout id of another user's redemption discloses nothing about it.
    world.double.with(|state| state.limit_refusal = None);
    redeem(&mut world, "1", "payout-3").await;
    let taken = pb::RedeemCfaRubRequest {
        user_id: "bob".into(),
        ..request("1", "payout-3", &key())
    };
    let taken = world
        .as_caller("sandbox.investor.bob")
        .redeem_cfa_rub(taken)
        .await
        .expect_err("taken");
    assert_eq!(
        (taken.code(), reason(&taken).as_str(), taken.message()),
        (
            tonic::Code::AlreadyExists,
            "REFERENCE_TAKEN",
            "Reference belongs to another operation"
        )
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payout_id_cannot_equal_references_of_the_service() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    for payout_id in ["", "redemption:0x01", "refund-payment-1"] {
        let error = world
            .redeem_rub(request("1", payout_id, &key()))
            .await
            .expect_err("refused");
        assert_eq!(error.code(), tonic::Code::InvalidArgument, "{payout_id}");
        assert!(error.message().contains("payout_id"), "{error}");
    }
    assert_eq!(holds(&mut world).await, 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payout_of_another_is_never_released() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    for (payout_id, user_id, amount) in [
        ("payout-1", "bob", "40.00"),
        ("payout-2", "alice", "5000.00"),
    ] {
        let foreign = payments::Payout {
            payout_id: payout_id.into(),
            user_id: user_id.into(),
            amount: roubles(amount),
            status: PaymentStatus::Pending.into(),
            ..Default::default()
        };
        world
            .double
            .with(|state| state.payouts.insert(payout_id.into(), foreign.clone()));
        let operation = redeem(&mut world, "40.00", payout_id).await;
        let failed = world.settle(&operation).await;
        assert_eq!(
            (failed.status(), failed.rejection_message.as_str()),
            (OperationStatus::Failed, "Payout failed, tokens returned")
        );
        assert_eq!(
            world.double.with(|state| state.payouts[payout_id].clone()),
            foreign,
            "neither released nor cancelled"
        );
        assert_eq!(world.supply("CFA-RUB").await, "100.00");
        assert_eq!(
            world.balance("alice:CFA-RUB").await.available.to_string(),
            "100.00"
        );
    }
    world.stop().await;
}

// rows: R079 R080 R081 R087 R088 R091 R256 R321
#[tokio::test(flavor = "multi_thread")]
async fn r079_failed_payout_returns_the_tokens() {
    for end in [PaymentStatus::Failed, PaymentStatus::Expired] {
        payout_returns_the_tokens(end).await;
    }
}

/// The tokens return if the payout ends with `end`.
async fn payout_returns_the_tokens(end: PaymentStatus) {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    world.settle(&operation).await;
    assert_eq!(world.supply("CFA-RUB").await, "60.00");
    world.double.payout_becomes("payout-1", end);
    let error = finalize(&mut world, "payout-1").await.expect_err("failed");
    assert_eq!(
        (error.message(), reason(&error).as_str()),
        ("Payout failed", "PAYOUT_FAILED"),
        "{end:?}"
    );
    let failed = world.operation(&operation.operation_id).await;
    assert_eq!(
        (failed.status(), failed.rejection_reason()),
        (
            OperationStatus::Failed,
            RejectionReasonCode::IntegrationError
        )
    );
    assert_eq!(failed.rejection_message, "Payout failed, tokens returned");
    assert_eq!(
        (
            world.supply("CFA-RUB").await.as_str(),
            world.tokens("CFA-RUB", "alice").await
        ),
        ("100.00", 100_00)
    );
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(
        (balance.balance.to_string(), balance.available.to_string()),
        ("100.00".into(), "100.00".into())
    );
    let hold = hold(&mut world, &operation.hold_id.expect("hold")).await;
    assert_eq!(hold.status(), ledger::HoldStatus::Released);
    // A repeat and the event have the same result, and nothing more is minted.
    assert_eq!(
        finalize(&mut world, "payout-1")
            .await
            .expect_err("failed")
            .message(),
        "Payout failed"
    );
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "RedemptionFailedEvent"
        })
        .await;
    assert_eq!(
        seen.iter()
            .filter(|event| event.short_type() == "CfaIssuedEvent")
            .count(),
        1,
        "a mint-back is not an issuance (T09)"
    );
    world.stop().await;
}

// rows: R321
#[tokio::test(flavor = "multi_thread")]
async fn t07_reverted_burn_cancels_the_payout_and_frees_the_money() {
    reverted_burn_frees_the_money(None).await;
    // Nothing is left to cancel.
    reverted_burn_frees_the_money(Some(PaymentStatus::Expired)).await;
}

/// `earlier`: how the payout ended before the burn's receipt.
async fn reverted_burn_frees_the_money(earlier: Option<PaymentStatus>) {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    // Tokens are moved on the chain without the ledger, so the burn reverts.
    let token = world
        .instrument("CFA-RUB")
        .await
        .smart_contract_address
        .parse()
        .expect("address");
    let from = chain::Address::of_user("alice");
    let burn = chain::Action::Burn {
        token,
        from,
        units: 90_00,
        id: Some("behind".into()),
    };
    let burned = world
        .connector()
        .submit("behind", &burn.call())
        .await
        .expect("submitted");
    world.receipt(&burned.tx_hash.to_string()).await;
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    if let Some(earlier) = earlier {
        world.double.payout_becomes("payout-1", earlier);
    }
    let operation = world.settle(&operation).await;
    assert_eq!(
        (operation.status(), operation.rejection_message.as_str()),
        (OperationStatus::Rejected, "Blockchain transaction reverted")
    );
    assert_eq!(
        operation.rejection_reason(),
        RejectionReasonCode::IntegrationError
    );
    let payout = world.double.with(|state| state.payouts["payout-1"].clone());
    match earlier {
        Some(earlier) => assert_eq!((payout.status(), payout.sent), (earlier, false)),
        None => assert_eq!(
            (payout.status(), payout.sent, payout.failure_code.as_str()),
            (PaymentStatus::Failed, false, "BURN_REVERTED")
        ),
    }
    assert_eq!(
        world.balance("alice:CFA-RUB").await.available.to_string(),
        "100.00"
    );
    world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "RedemptionFailedEvent"
        })
        .await;
    assert_eq!(
        world.supply("CFA-RUB").await,
        "10.00",
        "nothing is minted back for a burn that did not happen"
    );
    world.stop().await;
}

// rows: R085
#[tokio::test(flavor = "multi_thread")]
async fn r085_payout_confirmed_finalizes_by_event() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    world.settle(&operation).await;
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    let confirmed = payments::PayoutConfirmedEvent {
        payout_id: "payout-1".into(),
        user_id: "alice".into(),
        ..Default::default()
    };
    let unknown = payments::PayoutConfirmedEvent {
        payout_id: "payout-0".into(),
        ..Default::default()
    };
    let name = "dfa.payments.v1.PayoutConfirmedEvent";
    world
        .log
        .publish(&[
            event(events::topics::PAYMENTS, "payout-0", name, &unknown),
            event(events::topics::PAYMENTS, "payout-1", name, &confirmed),
        ])
        .await
        .expect("published");
    world.balance_becomes("alice:CFA-RUB", "60.00").await;
    world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "CfaRedeemedEvent"
        })
        .await;
    assert_eq!(
        world.operation(&operation.operation_id).await.status(),
        OperationStatus::Finalized
    );
    world.stop().await;
}

pub fn trail_has(world: &World, call: &str) -> bool {
    world
        .double
        .trail()
        .iter()
        .any(|made| made.starts_with(call))
}

// rows: R076
#[tokio::test(flavor = "multi_thread")]
async fn r076_payout_is_initiated_after_the_burn_is_sent_and_released_after_its_receipt() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    // No burn can be sent: payments is not called, by the request or by a sweep.
    gate.refuse("node is syncing");
    let unsent = redeem(&mut world, "40.00", "payout-1").await;
    for _ in 0..3 {
        world.resume_operations().await;
    }
    let unsent = world.operation(&unsent.operation_id).await;
    assert_eq!(
        (unsent.status(), unsent.onchain_tx_hash.as_str()),
        (OperationStatus::Processing, "")
    );
    assert!(!trail_has(&world, "initiate payout-1"));
    // The burn is sent and executed, but its receipt is not known yet.
    gate.hide_blocks();
    world.resume_operations().await;
    let sent = world.operation(&unsent.operation_id).await;
    assert_eq!(sent.status(), OperationStatus::OnchainSubmitted);
    let hash = sent.onchain_tx_hash.parse().expect("hash");
    let at_node = node.handle.connector();
    let burned = at_node
        .wait_receipt(&hash, WAIT)
        .await
        .expect("receipt lookup");
    assert_eq!(
        burned.expect("in a block").status,
        chain::ReceiptStatus::Success
    );
    for _ in 0..3 {
        world.resume_operations().await;
    }
    assert!(trail_has(&world, "initiate payout-1"));
    assert!(!trail_has(&world, "release payout-1"));
    // The receipt arrives.
    gate.pass();
    world.settle(&sent).await;
    assert!(trail_has(&world, "release payout-1"));
    world.stop().await;
    node.stop().await;
}

pub async fn set_block(
    world: &World,
    operation: &pb::CfaOperation,
    blocked: bool,
) -> Result<pb::CfaOperation, tonic::Status> {
    let request = |blocked| pb::SetRedemptionBlockRequest {
        context: context(&key()),
        operation_id: operation.operation_id.clone(),
        blocked,
        reason: "115-FZ".into(),
    };
    // Compliance blocks alone, and clears with a second person (D32).
    let mut compliance = world.as_caller("sandbox.compliance");
    if !blocked {
        let alone = compliance.set_redemption_block(request(false)).await;
        let reason = rpc::status::reason(&alone.expect_err("one person"));
        assert_eq!(reason.as_deref(), Some("APPROVAL_REQUIRED"));
        compliance = world.as_caller(testkit::APPROVED);
    }
    let answer = compliance.set_redemption_block(request(blocked)).await?;
    Ok(answer.into_inner().operation.expect("operation"))
}

/// The audit records of compliance's blocks and clearings.
async fn blocks_in_audit(world: &World, operation: &pb::CfaOperation) -> Vec<[String; 4]> {
    let decoded = |event: &events::Event| {
        let record = audit::AuditRecordEvent::decode(event.payload.as_slice());
        let record = record.expect("decodes");
        (record.object_id == operation.operation_id).then_some([
            record.action,
            record.before,
            record.after,
            record.reason,
        ])
    };
    let seen = world
        .events_until(events::topics::AUDIT, |event| {
            decoded(event).is_some_and(|record| record[0] == "redemption.finalized")
        })
        .await;
    let mut records: Vec<_> = seen.iter().filter_map(decoded).collect();
    records.pop();
    records
}

// rows: R089 R320
#[tokio::test(flavor = "multi_thread")]
async fn r089_a_blocked_redemption_waits_until_it_is_unblocked() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    // The burn's receipt cannot arrive before the block.
    gate.hide_blocks();
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    assert_eq!(operation.status(), OperationStatus::OnchainSubmitted);
    let blocked = set_block(&world, &operation, true).await.expect("blocked");
    assert_eq!(
        (blocked.status(), blocked.rejection_reason()),
        (OperationStatus::Blocked, RejectionReasonCode::AmlBlocked)
    );
    assert_eq!(blocked.rejection_message, "115-FZ");
    gate.pass();
    world.settle(&operation).await;
    world.resume_operations().await;
    // The bank's answer does not change a blocked redemption.
    let asked = finalize(&mut world, "payout-1").await.expect("no error");
    assert_eq!(asked.status(), OperationStatus::Blocked);
    assert!(trail_has(&world, "initiate payout-1"));
    assert!(!trail_has(&world, "release payout-1"));
    let frozen = world.balance("alice:CFA-RUB").await;
    assert_eq!(
        (frozen.held.to_string(), frozen.available.to_string()),
        ("40.00".into(), "60.00".into())
    );
    let held = hold(&mut world, &operation.hold_id.clone().expect("hold")).await;
    assert_eq!(held.status(), ledger::HoldStatus::Active);
    let cleared = set_block(&world, &operation, false).await.expect("cleared");
    assert_eq!(
        (cleared.status(), cleared.rejection_message.as_str()),
        (OperationStatus::OnchainSubmitted, "")
    );
    assert!(trail_has(&world, "release payout-1"));
    // The bank has the payout.
    let late = set_block(&world, &operation, true).await;
    assert_eq!(reason(&late.expect_err("too late")), "OPERATION_STATE");
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    let done = finalize(&mut world, "payout-1").await.expect("finalized");
    assert_eq!(done.status(), OperationStatus::Finalized);
    let late = set_block(&world, &operation, true).await;
    assert_eq!(reason(&late.expect_err("too late")), "OPERATION_STATE");
    let [sent, held] = ["ONCHAIN_SUBMITTED", "BLOCKED"];
    assert_eq!(
        blocks_in_audit(&world, &operation).await,
        [
            ["redemption.requested", "", "CREATED", ""],
            ["redemption.blocked", sent, held, "115-FZ"],
            ["redemption.cleared", held, sent, "115-FZ"],
        ]
    );
    world.stop().await;
    node.stop().await;
}

// rows: R089 R320
#[tokio::test(flavor = "multi_thread")]
async fn r089_a_redemption_blocked_before_its_burn_burns_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.refuse(NO_COINS);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    assert_eq!(operation.status(), OperationStatus::Processing);
    let blocked = set_block(&world, &operation, true).await.expect("blocked");
    assert_eq!(blocked.status(), OperationStatus::Blocked);
    gate.pass();
    world.resume_operations().await;
    let waiting = world.operation(&operation.operation_id).await;
    assert_eq!(
        (waiting.status(), waiting.onchain_tx_hash.as_str()),
        (OperationStatus::Blocked, "")
    );
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    assert_eq!(
        world.balance("alice:CFA-RUB").await.held.to_string(),
        "40.00"
    );
    assert!(!trail_has(&world, "initiate payout-1"));
    let cleared = set_block(&world, &operation, false).await.expect("cleared");
    assert_eq!(cleared.status(), OperationStatus::OnchainSubmitted);
    world.settle(&cleared).await;
    assert_eq!(world.supply("CFA-RUB").await, "60.00");
    assert!(trail_has(&world, "release payout-1"));
    // A redemption in any terminal status cannot be blocked.
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Failed);
    finalize(&mut world, "payout-1").await.expect_err("failed");
    world
        .double
        .with(|state| state.limit_refusal = Some("Daily limit".into()));
    let rejected = redeem(&mut world, "1.00", "payout-2").await;
    assert_eq!(rejected.status(), OperationStatus::Rejected);
    let failed = world.operation(&operation.operation_id).await;
    assert_eq!(failed.status(), OperationStatus::Failed);
    for ended in [failed, rejected] {
        let late = set_block(&world, &ended, true).await;
        assert_eq!(reason(&late.expect_err("too late")), "OPERATION_STATE");
        assert_eq!(world.operation(&ended.operation_id).await, ended);
    }
    world.stop().await;
    node.stop().await;
}

// rows: R064 R072
#[tokio::test(flavor = "multi_thread")]
async fn r072_a_burn_refused_by_the_node_is_processing_with_its_hold_then_fails() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let refusals = [
        ("intrinsic gas too low: gas 1, minimum needed 21000", "p-1"),
        ("nonce too low: next nonce 99, tx nonce 12", "p-2"),
        (NO_COINS, "p-3"),
    ];
    for (refusal, payout_id) in refusals {
        gate.refuse(refusal);
        let stuck = redeem(&mut world, "40.00", payout_id).await;
        assert_eq!(stuck.status(), OperationStatus::Processing, "{refusal}");
        let hold_id = stuck.hold_id.expect("hold");
        let held = hold(&mut world, &hold_id).await;
        assert_eq!(held.status(), ledger::HoldStatus::Active, "{refusal}");
        // The second and third attempts. This world allows three.
        world.resume_operations().await;
        let tried = world.operation(&stuck.operation_id).await;
        assert_eq!(tried.status(), OperationStatus::Processing, "{refusal}");
        world.resume_operations().await;
        let failed = world.operation(&stuck.operation_id).await;
        assert_eq!(
            (failed.status(), failed.rejection_reason()),
            (
                OperationStatus::Failed,
                RejectionReasonCode::IntegrationError
            ),
            "{refusal}"
        );
        let freed = hold(&mut world, &hold_id).await;
        assert_eq!(freed.status(), ledger::HoldStatus::Released, "{refusal}");
        assert!(!trail_has(&world, &format!("initiate {payout_id}")));
    }
    // After one refusal the next attempt succeeds.
    gate.refuse(NO_COINS);
    let delayed = redeem(&mut world, "40.00", "p-4").await;
    gate.pass();
    world.resume_operations().await;
    let sent = world.operation(&delayed.operation_id).await;
    world.settle(&sent).await;
    world.double.payout_becomes("p-4", PaymentStatus::Success);
    let done = finalize(&mut world, "p-4").await.expect("finalized");
    assert_eq!(done.status(), OperationStatus::Finalized);
    let balance = world.balance("alice:CFA-RUB").await;
    assert_eq!(
        (balance.balance.to_string(), balance.available.to_string()),
        ("60.00".into(), "60.00".into())
    );
    assert_eq!(world.tokens("CFA-RUB", "alice").await, 60_00);
    world.stop().await;
    node.stop().await;
}

// rows: R064
#[tokio::test(flavor = "multi_thread")]
async fn r064_open_operations_continue_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world.double.with(|state| state.payments_unavailable = true);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    assert_eq!(operation.status(), OperationStatus::OnchainSubmitted);
    world.stop().await;

    let mut world = World::start(folder.path()).await;
    world.receipt(&operation.onchain_tx_hash).await;
    world.resume_operations().await;
    assert!(
        world.double.with(|state| state.payouts["payout-1"].sent),
        "payout recorded and released by the sweep"
    );
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    world.resume_operations().await;
    assert_eq!(
        world.operation(&operation.operation_id).await.status(),
        OperationStatus::Finalized
    );
    assert_eq!(
        world.balance("alice:CFA-RUB").await.balance.to_string(),
        "60.00"
    );
    assert_eq!(
        (
            world.supply("CFA-RUB").await.as_str(),
            holds(&mut world).await
        ),
        ("60.00", 1)
    );
    world.stop().await;
}

/// Alice has a hundred roubles, eighty of them in a trading hold with ten drawn.
async fn trading_world(folder: &std::path::Path) -> World {
    let mut world = World::start(folder).await;
    world.deposit("alice", "100.00").await;
    let hold_id = world.hold("alice", "CFA-RUB", "80.00", "market").await;
    world.double.with(|state| {
        state.trading_hold = Some(proto::market::v1::TradingHold {
            hold_id,
            user_id: "alice".into(),
            instrument_id: "CFA-RUB".into(),
            undrawn: decimal("70.00"),
            drawn: decimal("10.00"),
            status: proto::market::v1::TradingHoldStatus::Open.into(),
            ..Default::default()
        });
    });
    world
}

// rows: R070
#[tokio::test(flavor = "multi_thread")]
async fn r070_undrawn_trading_money_covers_a_redemption() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = trading_world(folder.path()).await;
    let operation = redeem(&mut world, "50.00", "p-1").await;
    assert_eq!(operation.status(), OperationStatus::OnchainSubmitted);
    let hold = hold(&mut world, &operation.hold_id.clone().expect("hold")).await;
    assert_eq!(
        (hold.amount, hold.owner.as_str()),
        (amount("CFA-RUB", "50.00"), "cfa")
    );
    let left = world
        .double
        .with(|state| state.trading_hold.clone().expect("hold").undrawn);
    assert_eq!(left, decimal("40.00"), "only the shortage");
    // For a larger amount nothing is moved, and the refusal contains the trading money.
    let short = world
        .redeem_rub(request("40.01", "p-2", &key()))
        .await
        .expect_err("short");
    assert_eq!(short.message(), "Insufficient balance");
    let facts = tonic_types::StatusExt::get_details_error_info(&short)
        .expect("details")
        .metadata;
    let figure = |name: &str| facts.get(name).map(String::as_str);
    assert_eq!(
        [
            figure("balance"),
            figure("held"),
            figure("undrawn"),
            figure("drawn")
        ],
        [Some("100.00"), Some("100.00"), Some("40.00"), Some("10.00")]
    );
    // An unavailable market is not a lack of money.
    world.double.with(|state| state.market_unavailable = true);
    let away = world
        .redeem_rub(request("30.00", "p-3", &key()))
        .await
        .expect_err("market is away");
    assert_eq!(away.code(), tonic::Code::Unavailable);
    world.double.with(|state| state.market_unavailable = false);
    let later = redeem(&mut world, "30.00", "p-3").await;
    assert_eq!(later.status(), OperationStatus::OnchainSubmitted);
    world.stop().await;
}

// rows: R080
#[tokio::test(flavor = "multi_thread")]
async fn r080_a_released_hold_does_not_stop_a_redemption() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    let operation = redeem(&mut world, "50.00", "p-1").await;
    world.settle(&operation).await;
    let release = ledger::ReleaseHoldRequest {
        context: context(&key()),
        hold_id: operation.hold_id.clone().expect("hold"),
        reason: "by another service".into(),
    };
    world.ledger.release_hold(release).await.expect("released");
    world.double.payout_becomes("p-1", PaymentStatus::Failed);
    let failed = finalize(&mut world, "p-1").await.expect_err("failed");
    assert_eq!(failed.message(), "Payout failed");
    assert_eq!(
        world.operation(&operation.operation_id).await.status(),
        OperationStatus::Failed
    );
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    world.stop().await;
}

// rows: R123
#[tokio::test(flavor = "multi_thread")]
async fn r123_health_names_a_payout_with_a_refused_release() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.deposit("alice", "100.00").await;
    world.double.with(|state| state.release_refused = true);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    world.receipt(&operation.onchain_tx_hash).await;
    let later = redeem(&mut world, "10.00", "payout-2").await;
    world.receipt(&later.onchain_tx_hash).await;
    for _ in 0..5 {
        world.resume_operations().await;
    }
    let part = "payout releases";
    let both = "2 payouts refused by payments, oldest: payout-1";
    assert_eq!(world.service.health.failing()[part], both);
    let waiting = world.operation(&operation.operation_id).await;
    assert_eq!(waiting.status(), OperationStatus::OnchainSubmitted);
    // The payout of a blocked or failed redemption is not counted.
    set_block(&world, &operation, true).await.expect("blocked");
    world.resume_operations().await;
    assert_eq!(
        world.service.health.failing()[part],
        "1 payouts refused by payments, oldest: payout-2"
    );
    world
        .double
        .payout_becomes("payout-2", PaymentStatus::Failed);
    let failed = finalize(&mut world, "payout-2").await;
    assert_eq!(failed.expect_err("failed").message(), "Payout failed");
    world.resume_operations().await;
    assert!(!world.service.health.failing().contains_key(part));
    let cleared = set_block(&world, &operation, false).await;
    cleared.expect_err("the release is refused");
    world.resume_operations().await;
    assert_eq!(
        world.service.health.failing()[part],
        "1 payouts refused by payments, oldest: payout-1"
    );
    world.double.with(|state| state.release_refused = false);
    world.resume_operations().await;
    assert!(!world.service.health.failing().contains_key(part));
    assert!(world.double.trail().contains(&"release payout-1".into()));
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    let done = finalize(&mut world, "payout-1").await.expect("paid");
    assert_eq!(done.status(), OperationStatus::Finalized);
    world.stop().await;
    // Health reports a payout after three refusals in this world.
    let counted =
        "UPDATE operation SET attempts = 0 WHERE external_ref = 'payout-1' AND attempts = 3";
    alter_store(folder.path(), counted).await;
}
