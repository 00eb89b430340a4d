//! A repeated idempotency key gets the stored answer and changes nothing (D50).

use std::time::Duration;

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, PaymentStatus};
use testkit::Fault;

use crate::node::{NO_COINS, gated_world};
use crate::redeem::redeem;
use crate::trades::{leg, market_world, wait_batch};
use crate::world::*;

fn is_repeat<T>(answer: &tonic::Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

// rows: R320
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_repeated_batch_or_finalization_is_marked() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = market_world(folder.path()).await;
    let batch = pb::SettleTradesRequest {
        context: context(&key()),
        batch_id: "n1:1-1".into(),
        trades: vec![leg("t-1", 1, "alice", "bob", "2", "2000.00", "0.00")],
    };
    let first = world.cfa.settle_trades(batch.clone()).await;
    assert!(!is_repeat(&first.expect("submitted")));
    wait_batch(&mut world, "n1:1-1").await;
    let again = world.cfa.settle_trades(batch).await.expect("answered");
    assert!(is_repeat(&again));

    // The operation's receipt ends it: each later call is a repeat.
    let issued = world.deposit("alice", "100.00").await;
    let issuance = pb::FinalizeIssuanceRequest {
        context: context(&key()),
        tx_hash: issued.onchain_tx_hash.clone(),
    };
    let again = world.cfa.finalize_issuance(issuance).await;
    assert!(is_repeat(&again.expect("answered")));

    let redemption = redeem(&mut world, "40.00", "payout-1").await;
    world.settle(&redemption).await;
    let finalize = || pb::FinalizeRedemptionRequest {
        context: context(&key()),
        payout_id: "payout-1".into(),
    };
    let open = world.cfa.finalize_redemption(finalize()).await;
    assert!(!is_repeat(&open.expect("the bank has not answered")));
    world
        .double
        .payout_becomes("payout-1", PaymentStatus::Success);
    let first = world.cfa.finalize_redemption(finalize()).await;
    let first = first.expect("finalized").into_inner().operation;
    assert_eq!(
        first.expect("operation").status(),
        OperationStatus::Finalized
    );
    let again = world.cfa.finalize_redemption(finalize()).await;
    assert!(is_repeat(&again.expect("answered")));
    world.stop().await;
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
    for (payment_id, refund) in [("payment-1", false), ("payment-2", true)] {
        suspend(&mut world, payment_id).await;
        let key = format!("resolve {payment_id}");
        let resolve = resolving(&key, payment_id, refund);
        let first = world.cfa.resolve_suspended_deposit(resolve.clone()).await;
        let first = first.expect("resolved");
        assert!(!is_repeat(&first), "{payment_id}");
        let again = world.cfa.resolve_suspended_deposit(resolve).await;
        let again = again.expect("the stored answer");
        assert!(is_repeat(&again), "{payment_id}");
        assert_eq!(resolved(again.into_inner()), resolved(first.into_inner()));
    }
    world.stop().await;
}

/// A paid deposit of Alice whose issue was refused by a limit.
async fn suspend(world: &mut World, payment_id: &str) {
    let refusal = Some("Daily limit".to_owned());
    world.double.with(|state| state.limit_refusal = refusal);
    world.double.paid(payment_id, "alice", "10.00");
    let request = pb::IssueCfaRubRequest {
        context: context(payment_id),
        user_id: "alice".into(),
        amount: roubles("10.00"),
        payment_id: payment_id.into(),
    };
    world.cfa.issue_cfa_rub(request).await.expect("refused");
    world.double.with(|state| state.limit_refusal = None);
}

fn resolving(key: &str, payment_id: &str, refund: bool) -> pb::ResolveSuspendedDepositRequest {
    pb::ResolveSuspendedDepositRequest {
        context: context(key),
        payment_id: payment_id.into(),
        refund,
    }
}

fn resolved(answer: pb::ResolveSuspendedDepositResponse) -> String {
    answer.operation.expect("operation").operation_id
}

/// The answers to two calls with one key: one acts, the other is its repeat.
fn first_and_repeat<T>(answers: [Result<tonic::Response<T>, tonic::Status>; 2]) -> [T; 2] {
    let answers = answers.map(|answer| answer.expect("answered"));
    let repeats = answers.iter().filter(|answer| is_repeat(answer)).count();
    assert_eq!(repeats, 1);
    answers.map(tonic::Response::into_inner)
}

// rows: R039
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_key_in_use_for_another_deposit_refunds_only_the_first() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for payment_id in ["payment-1", "payment-2"] {
        suspend(&mut world, payment_id).await;
    }
    // Both calls are in progress at once.
    let late = Fault::Late(Duration::from_millis(200));
    world.double.with(|state| state.faults.extend([late; 2]));
    let [mut one, mut two] = [world.cfa.clone(), world.cfa.clone()];
    let (first, second) = tokio::join!(
        one.resolve_suspended_deposit(resolving("k-1", "payment-1", true)),
        two.resolve_suspended_deposit(resolving("k-1", "payment-2", true))
    );
    let [first, second] = first_and_repeat([first, second]);
    assert_eq!(resolved(first), resolved(second));
    assert_eq!(world.double.with(|state| state.payouts.len()), 1);
    world.stop().await;
}

// rows: R320
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_key_in_use_for_another_issue_changes_only_the_first() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let registration = |symbol: &str| pb::RegisterInstrumentRequest {
        context: context("registration"),
        ..bond(symbol)
    };
    let [mut one, mut two] = [world.cfa.clone(), world.cfa.clone()];
    let (first, second) = tokio::join!(
        one.register_instrument(registration("BOND-8")),
        two.register_instrument(registration("BOND-9"))
    );
    let answers = first_and_repeat([first, second]);
    assert_eq!(answers[0].instrument_id, answers[1].instrument_id);

    for symbol in ["BOND-1", "BOND-2"] {
        let registered = world.register(|request| request.symbol = symbol.into());
        registered.await.expect("registered");
    }
    use pb::InstrumentStatus::{Active, Halted};
    for (round, status) in [Halted, Active, Halted, Active].into_iter().enumerate() {
        let change = |instrument_id: &str| pb::UpdateInstrumentRequest {
            context: context(&format!("change {round}")),
            instrument_id: instrument_id.into(),
            status: status.into(),
            ..Default::default()
        };
        let (first, second) = tokio::join!(
            one.update_instrument(change("BOND-1")),
            two.update_instrument(change("BOND-2"))
        );
        let changed = first_and_repeat([first, second])
            .map(|answer| answer.instrument.expect("instrument").instrument_id);
        assert_eq!(changed[0], changed[1]);
    }
    world.stop().await;
}
