//! A repeated idempotency key gets the stored answer and changes nothing (D50).

use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;

use crate::node::{NO_COINS, gated_world};
use crate::redeem::redeem;
use crate::world::*;

fn is_repeat<T>(answer: &tonic::Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

// rows: R320
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_change_of_an_issue_does_not_undo_a_later_one() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let registration = bond("BOND-1");
    let first = world.cfa.register_instrument(registration.clone()).await;
    assert!(!is_repeat(&first.expect("registered")));
    let again = world.cfa.register_instrument(registration.clone()).await;
    assert!(is_repeat(&again.expect("the stored one")));
    // Other content under the key gets the stored issue.
    let other = pb::RegisterInstrumentRequest {
        symbol: "BOND-9".into(),
        ..registration
    };
    let stored = world.cfa.register_instrument(other).await.expect("stored");
    assert!(is_repeat(&stored));
    assert_eq!(stored.into_inner().instrument_id, "BOND-1");

    world.sign("BOND-1", "issuer").await.expect("signed");
    world.activate("BOND-1").await.expect("activated");
    let change = |key: &str, status: pb::InstrumentStatus| pb::UpdateInstrumentRequest {
        context: context(key),
        instrument_id: "BOND-1".into(),
        status: status.into(),
        ..Default::default()
    };
    use pb::InstrumentStatus::{Active, Halted};
    for (key, status, expected, repeats) in [
        ("k-1", Halted, Halted, false),
        ("k-2", Active, Active, false),
        ("k-1", Halted, Active, true),
        // The instrument has this status already, but the key is stored.
        ("k-3", Active, Active, false),
        ("k-4", Halted, Halted, false),
        ("k-3", Active, Halted, true),
    ] {
        let changed = world.cfa.update_instrument(change(key, status)).await;
        let changed = changed.expect("answered");
        assert_eq!(is_repeat(&changed), repeats, "{key}");
        assert_eq!(world.instrument("BOND-1").await.status(), expected, "{key}");
    }
    world.stop().await;
}

// rows: R089
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_clearing_does_not_lift_a_later_block() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.deposit("alice", "100.00").await;
    gate.refuse(NO_COINS);
    let operation = redeem(&mut world, "40.00", "payout-1").await;
    let set = |key: &str, blocked| pb::SetRedemptionBlockRequest {
        context: context(key),
        operation_id: operation.operation_id.clone(),
        blocked,
        reason: "115-FZ".into(),
    };
    let mut compliance = world.as_caller("sandbox.compliance");
    let mut approved = world.as_caller(testkit::APPROVED);
    for (key, blocked, repeats) in [
        ("k-1", true, false),
        ("k-2", false, false),
        ("k-3", true, false),
        ("k-2", false, true),
    ] {
        let caller = match blocked {
            true => &mut compliance,
            false => &mut approved,
        };
        let answer = caller.set_redemption_block(set(key, blocked)).await;
        assert_eq!(is_repeat(&answer.expect("answered")), repeats, "{key}");
    }
    let still = world.operation(&operation.operation_id).await;
    assert_eq!(still.status(), OperationStatus::Blocked);
    gate.pass();
    world.stop().await;
    node.stop().await;
}

// rows: R039
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_resolution_answers_with_its_operation() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let refusal = |world: &World, reason: Option<&str>| {
        let reason = reason.map(str::to_owned);
        world.double.with(|state| state.limit_refusal = reason);
    };
    for (payment_id, refund) in [("payment-1", false), ("payment-2", true)] {
        refusal(&world, Some("Daily limit"));
        world.double.paid(payment_id, "alice", "10.00");
        let request = pb::IssueCfaRubRequest {
            context: context(payment_id),
            user_id: "alice".into(),
            amount: roubles("10.00"),
            payment_id: payment_id.into(),
        };
        world.cfa.issue_cfa_rub(request).await.expect("refused");
        refusal(&world, None);
        let resolve = pb::ResolveSuspendedDepositRequest {
            context: context(&format!("resolve {payment_id}")),
            payment_id: payment_id.into(),
            refund,
        };
        let first = world.cfa.resolve_suspended_deposit(resolve.clone()).await;
        let first = first.expect("resolved");
        assert!(!is_repeat(&first), "{payment_id}");
        let again = world.cfa.resolve_suspended_deposit(resolve).await;
        let again = again.expect("the stored answer");
        assert!(is_repeat(&again), "{payment_id}");
        let id = |answer: pb::ResolveSuspendedDepositResponse| {
            answer.operation.expect("operation").operation_id
        };
        assert_eq!(id(again.into_inner()), id(first.into_inner()));
    }
    world.stop().await;
}
