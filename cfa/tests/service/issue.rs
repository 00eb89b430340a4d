//! Issuance of CFA-RUB: deposits, refusals, reverted mints, suspended deposits.

use events::Log;
use prost::Message;
use proto::audit::v1 as audit;
use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, OperationType, PaymentStatus, RejectionReasonCode};
use proto::payments::v1 as payments;

use crate::world::*;

fn request(user_id: &str, amount: &str, payment_id: &str, key: &str) -> pb::IssueCfaRubRequest {
    pb::IssueCfaRubRequest {
        context: context(key),
        user_id: user_id.into(),
        amount: roubles(amount),
        payment_id: payment_id.into(),
    }
}

// rows: R019 R023 R024 R036 R038 R040 R048 R049 R050 R051 R053 R054 R058 R059 R060 R063
#[tokio::test(flavor = "multi_thread")]
async fn r038_deposit_becomes_tokens_and_a_balance() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    assert_eq!(
        world.holders("CFA-RUB").await,
        [],
        "CFA-RUB is registered at the first start, without holders"
    );
    let user = "00112233445566778899aabbccddeeff00112233";
    world.double.paid("pay-1", user, "100.00");
    let operation = world
        .cfa
        .issue_cfa_rub(request(user, "100.00", "pay-1", "k-1"))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        world.double.trail(),
        [
            format!("profile {user}"),
            format!("limits {user} DEPOSIT 100.00 ISSUANCE"),
            format!("sanctions {user}")
        ]
    );
    assert_eq!(operation.status(), OperationStatus::OnchainSubmitted);
    assert_eq!(operation.r#type(), OperationType::Issuance);
    assert_eq!(
        (operation.user_id.as_str(), operation.external_ref.as_str()),
        (user, "pay-1")
    );
    assert_eq!(
        (operation.amount.clone(), operation.currency_code.as_str()),
        (decimal("100.00"), "RUB")
    );
    assert_eq!(
        (
            operation.hold_id.clone(),
            operation.idempotency_key.as_str()
        ),
        (None, "k-1")
    );
    let receipt = world.receipt(&operation.onchain_tx_hash).await;
    let operation = world.settle(&operation).await;
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert!(operation.finalized_at.is_some());
    assert_eq!(operation.block_number, receipt.block_number);
    let token = world.instrument("CFA-RUB").await.smart_contract_address;
    assert_eq!(
        receipt.to.map(|to| to.to_string()),
        Some(token.clone()),
        "the token's mint, not a coin transfer"
    );
    let address = format!("0x{user}").parse().expect("address");
    let balance = world
        .connector()
        .balance_of(&token.parse().expect("address"), &address)
        .await
        .expect("read");
    assert_eq!(balance, 100_00);
    world
        .balance_becomes(&format!("{user}:CFA-RUB"), "100.00")
        .await;
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.type_name == "dfa.cfa.v1.CfaIssuedEvent"
        })
        .await;
    let names: Vec<_> = seen
        .iter()
        .map(|event| event.short_type().to_owned())
        .collect();
    assert_eq!(
        names,
        [
            "InstrumentRegisteredEvent",
            "IssuanceStartedEvent",
            "CfaIssuedEvent"
        ]
    );
    let started = pb::IssuanceStartedEvent::decode(seen[1].payload.as_slice()).expect("decodes");
    assert_eq!(
        (started.operation_id, started.user_id.as_str()),
        (operation.operation_id.clone(), user)
    );
    assert_eq!(
        (started.amount, started.tx_hash),
        (
            amount("CFA-RUB", "100.00"),
            operation.onchain_tx_hash.clone()
        )
    );
    let issued = pb::CfaIssuedEvent::decode(seen[2].payload.as_slice()).expect("decodes");
    assert_eq!(
        (issued.operation_id.as_str(), issued.instrument_id.as_str()),
        (operation.operation_id.as_str(), "CFA-RUB")
    );
    assert_eq!(
        (issued.holder_id.as_str(), issued.amount),
        (user, amount("CFA-RUB", "100.00"))
    );
    assert_eq!(issued.tx_hash, operation.onchain_tx_hash);
    assert!(issued.issued_at.is_some());
    assert_eq!(issued.context.expect("context").correlation_id, "corr-k-1");
    assert_eq!(seen[2].key, operation.operation_id);
    let records = world.events_until(events::topics::AUDIT, |event| {
        audit::AuditRecordEvent::decode(event.payload.as_slice())
            .is_ok_and(|record| record.action == "issuance.finalized")
    });
    let records = records.await;
    let of_operation = records.iter().map(|event| {
        let record = audit::AuditRecordEvent::decode(event.payload.as_slice());
        let record = record.expect("decodes");
        (record.action, record.object_id)
    });
    let expected = ["issuance.requested", "issuance.finalized"];
    let expected = expected.map(|action| (action.to_owned(), operation.operation_id.clone()));
    assert_eq!(of_operation.collect::<Vec<_>>(), expected);
    world.stop().await;
}

// rows: R039
#[tokio::test(flavor = "multi_thread")]
async fn r039_same_key_returns_the_stored_operation() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.double.paid("pay-1", "alice", "100.00");
    world.double.paid("pay-3", "bob", "5.00");
    let first = world
        .cfa
        .issue_cfa_rub(request("alice", "100.00", "pay-1", "k-1"))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    let calls_before = world.double.trail().len();
    let again = world
        .cfa
        .issue_cfa_rub(request("alice", "777.00", "pay-2", "k-1"))
        .await
        .expect("answered");
    assert_eq!(
        again
            .metadata()
            .get("idempotent-replayed")
            .map(|value| value.as_bytes()),
        Some(b"true".as_slice())
    );
    let again = again.into_inner().operation.expect("operation");
    assert_eq!(
        (again.operation_id.clone(), again.external_ref.as_str()),
        (first.operation_id.clone(), "pay-1")
    );
    assert_eq!(
        world.double.trail().len(),
        calls_before,
        "no service was called again"
    );
    // Another key with the same payment has no second effect.
    let other_key = world
        .cfa
        .issue_cfa_rub(request("alice", "100.00", "pay-1", "k-2"))
        .await
        .expect("answered")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(other_key.operation_id, first.operation_id);
    // Keys are scoped per user: bob's k-1 is not alice's.
    let bob = world
        .cfa
        .issue_cfa_rub(request("bob", "5.00", "pay-3", "k-1"))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    assert_ne!(bob.operation_id, first.operation_id);
    world.settle(&first).await;
    world.settle(&bob).await;
    assert_eq!(world.supply("CFA-RUB").await, "105.00");
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.key == bob.operation_id && event.short_type() == "CfaIssuedEvent"
        })
        .await;
    let of_first: Vec<_> = seen
        .iter()
        .filter(|event| event.key == first.operation_id)
        .map(|event| event.short_type())
        .collect();
    assert_eq!(of_first, ["IssuanceStartedEvent", "CfaIssuedEvent"]);
    let replayed = world
        .cfa
        .replay_chain_transfers(pb::ReplayChainTransfersRequest::default())
        .await
        .expect("replayed");
    let minted: Vec<_> = replayed
        .into_inner()
        .transfers
        .into_iter()
        .map(|transfer| transfer.quantity)
        .collect();
    assert_eq!(minted, [decimal("100.00"), decimal("5.00")]);
    world.stop().await;
}

// rows: R041 R042 R043 R044 R045 R046 R257
#[tokio::test(flavor = "multi_thread")]
async fn r041_refused_deposit_is_a_rejected_operation_and_in_suspense() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let head = world
        .connector()
        .block_number()
        .await
        .expect("block number");
    let mut rejected = Vec::new();
    for (text, reason) in [
        ("KYC level too low", RejectionReasonCode::KycRequired),
        ("Daily limit", RejectionReasonCode::LimitExceeded),
    ] {
        world
            .double
            .with(|state| state.limit_refusal = Some(text.into()));
        let payment = format!("pay {text}");
        world.double.paid(&payment, "alice", "100.00");
        let operation = world
            .cfa
            .issue_cfa_rub(request("alice", "100.00", &payment, &key()))
            .await
            .expect("a result")
            .into_inner()
            .operation
            .expect("operation");
        assert_eq!(
            (operation.status(), operation.r#type()),
            (OperationStatus::Rejected, OperationType::Issuance)
        );
        assert_eq!(
            (
                operation.rejection_reason(),
                operation.rejection_message.as_str()
            ),
            (reason, text)
        );
        assert_eq!(operation.onchain_tx_hash, "");
        assert_eq!(world.operation(&operation.operation_id).await, operation);
        rejected.push(operation.operation_id);
    }
    assert_eq!(
        world
            .connector()
            .block_number()
            .await
            .expect("block number"),
        head,
        "nothing was sent to the chain"
    );
    let records = world.events_until(events::topics::AUDIT, |event| {
        audit::AuditRecordEvent::decode(event.payload.as_slice())
            .is_ok_and(|record| record.reason == "Daily limit")
    });
    let record =
        audit::AuditRecordEvent::decode(records.await.last().expect("a record").payload.as_slice())
            .expect("decodes");
    assert_eq!(
        (
            record.action.as_str(),
            record.object_id.as_str(),
            record.context.expect("context").user_id.as_str()
        ),
        ("issuance.rejected", rejected[1].as_str(), "service")
    );
    // The query names the caller and the user.
    let listed = crate::records::records(&world, "", &rejected[1]).await;
    let listed: Vec<_> = listed
        .iter()
        .map(|one| [&*one.action, &*one.actor, &*one.after, &*one.reason])
        .collect();
    let refused = [
        "issuance.rejected",
        "service",
        "REJECTED for alice",
        "Daily limit",
    ];
    assert_eq!(listed, [refused]);
    // The deposit is paid but refused. An operator retries the issue or refunds it (T24).
    let suspended = world
        .cfa
        .list_suspended_deposits(pb::ListSuspendedDepositsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .deposits;
    assert_eq!(
        suspended
            .iter()
            .map(|deposit| deposit.payment_id.as_str())
            .collect::<Vec<_>>(),
        ["pay Daily limit", "pay KYC level too low"]
    );
    world.double.with(|state| state.limit_refusal = None);
    let resolve_request = |payment: &str, refund| pb::ResolveSuspendedDepositRequest {
        context: context(&key()),
        payment_id: payment.into(),
        refund,
    };
    let issued = world
        .cfa
        .resolve_suspended_deposit(resolve_request("pay Daily limit", false))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(
        world.settle(&issued).await.status(),
        OperationStatus::Finalized
    );
    let refunded = world
        .cfa
        .resolve_suspended_deposit(resolve_request("pay KYC level too low", true))
        .await
        .expect("paid back")
        .into_inner()
        .operation
        .expect("operation");
    assert_eq!(refunded.status(), OperationStatus::Refunded);
    assert!(
        world
            .double
            .with(|state| state.payouts["refund-pay KYC level too low"].sent)
    );
    let again = world
        .cfa
        .resolve_suspended_deposit(resolve_request("pay KYC level too low", true))
        .await
        .expect_err("resolved");
    assert_eq!(reason(&again), "DEPOSIT_RESOLVED");
    assert!(
        world
            .cfa
            .list_suspended_deposits(pb::ListSuspendedDepositsRequest::default())
            .await
            .expect("listed")
            .into_inner()
            .deposits
            .is_empty()
    );
    // The bank refuses the refund: the deposit is suspended again, and the next attempt is another
    // payout.
    let first = "refund-pay KYC level too low";
    world.double.payout_becomes(first, PaymentStatus::Failed);
    let failed = payments::PayoutFailedEvent {
        payout_id: first.into(),
        ..Default::default()
    };
    let name = "dfa.payments.v1.PayoutFailedEvent";
    let payout_failed = event(events::topics::PAYMENTS, first, name, &failed);
    Log::publish(&*world.log, &[payout_failed])
        .await
        .expect("published");
    world
        .events_until(events::topics::AUDIT, |event| {
            audit::AuditRecordEvent::decode(event.payload.as_slice())
                .is_ok_and(|record| record.action == "deposit.refund_failed")
        })
        .await;
    world
        .cfa
        .resolve_suspended_deposit(resolve_request("pay KYC level too low", true))
        .await
        .expect("refunded by another payout");
    assert!(
        world
            .double
            .with(|state| state.payouts["refund-pay KYC level too low:2"].sent)
    );
    world.stop().await;
}

// rows: R055 R056 R057 R249 R258
#[tokio::test(flavor = "multi_thread")]
async fn r056_reverted_mint_rejects_the_operation() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let unknown = pb::FinalizeIssuanceRequest {
        context: context(&key()),
        tx_hash: format!("0x{}", "ab".repeat(32)),
    };
    let error = world
        .cfa
        .finalize_issuance(unknown)
        .await
        .expect_err("unknown");
    assert_eq!(
        (error.code(), error.message()),
        (tonic::Code::NotFound, "Operation not found")
    );
    call_contract(&mut world, "CFA-RUB", "pause()").await;
    world.double.paid("pay-1", "alice", "100.00");
    let operation = world
        .cfa
        .issue_cfa_rub(request("alice", "100.00", "pay-1", "k-1"))
        .await
        .expect("issued")
        .into_inner()
        .operation
        .expect("operation");
    let operation = world.settle(&operation).await;
    assert_eq!(
        (operation.status(), operation.rejection_reason()),
        (
            OperationStatus::Rejected,
            RejectionReasonCode::IntegrationError
        )
    );
    assert_eq!(
        operation.rejection_message,
        "Blockchain transaction reverted"
    );
    let seen = world
        .events_until(events::topics::CFA, |event| {
            event.short_type() == "IssuanceFailedEvent"
        })
        .await;
    assert!(
        seen.iter()
            .all(|event| event.short_type() != "CfaIssuedEvent")
    );
    let failed = seen.last().expect("the event").payload.as_slice();
    let failed = pb::IssuanceFailedEvent::decode(failed).expect("decodes");
    assert_eq!(
        (failed.operation_id, failed.user_id.as_str()),
        (operation.operation_id, "alice")
    );
    assert_eq!(
        (failed.amount, failed.tx_hash),
        (amount("CFA-RUB", "100.00"), operation.onchain_tx_hash)
    );
    assert_eq!(failed.reason, "Blockchain transaction reverted");
    assert_eq!(world.supply("CFA-RUB").await, "0.00");
    let suspended = world
        .cfa
        .list_suspended_deposits(pb::ListSuspendedDepositsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .deposits;
    assert_eq!(suspended.len(), 1, "the deposit is suspended");
    world.stop().await;
}

// rows: R061 R062
#[tokio::test(flavor = "multi_thread")]
async fn r061_a_redelivered_fiat_deposited_mints_once() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.double.paid("pay-1", "alice", "100.00");
    world.double.paid("pay-2", "alice", "1.00");
    let first = deposited("pay-1", "alice", "100.00");
    let again = deposited("pay-1", "alice", "100.00");
    let last = deposited("pay-2", "alice", "1.00");
    world
        .log
        .publish(&[first.clone(), first, again, last])
        .await
        .expect("published");
    // Receipts arrive as events, so the operations become final without a call.
    world.balance_becomes("alice:CFA-RUB", "101.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "101.00");
    let listed = pb::ListOperationsRequest {
        user_id: "alice".into(),
        ..Default::default()
    };
    let operations = world
        .cfa
        .list_operations(listed)
        .await
        .expect("listed")
        .into_inner()
        .operations;
    let refs: Vec<_> = operations
        .iter()
        .map(|operation| operation.external_ref.as_str())
        .collect();
    assert_eq!(refs, ["pay-2", "pay-1"]);
    assert!(
        operations
            .iter()
            .all(|operation| operation.status() == OperationStatus::Finalized)
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_names_the_field_and_stores_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let mut cases = vec![
        (request("alice", "-1", "p", "k"), "amount"),
        (request("alice", "1.001", "p", "k"), "amount"),
        (request("alice", "abc", "p", "k"), "amount"),
        (request("alice", "0", "p", "k"), "amount"),
        (request("", "1", "p", "k"), "user_id"),
        (request("a:b", "1", "p", "k"), "user_id"),
        (request("alice", "1", "", "k"), "payment_id"),
        (request("alice", "1", "p", ""), "context.idempotency_key"),
    ];
    let mut dollars = request("alice", "1", "p", "k");
    dollars.amount.as_mut().expect("amount").currency_code = "USD".into();
    cases.push((dollars, "amount"));
    for (bad, field) in cases {
        let error = world.cfa.issue_cfa_rub(bad).await.expect_err(field);
        assert_eq!(
            error.code(),
            tonic::Code::InvalidArgument,
            "{field}: {error}"
        );
        let violations = tonic_types::StatusExt::get_details_bad_request(&error)
            .expect("details")
            .field_violations;
        assert_eq!(violations[0].field, field);
    }
    assert_nothing_stored(&mut world).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_user_and_another_users_list_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.double.with(|state| state.default_user = None);
    let error = world
        .cfa
        .issue_cfa_rub(request("unknown", "1", "p", "k"))
        .await
        .expect_err("unknown user");
    assert_eq!(
        (error.code(), error.message(), reason(&error).as_str()),
        (tonic::Code::NotFound, "User not found", "USER_NOT_FOUND")
    );
    let foreign = world
        .as_caller("sandbox.investor.bob")
        .list_operations(pb::ListOperationsRequest {
            user_id: "alice".into(),
            ..Default::default()
        })
        .await;
    assert_eq!(
        foreign.expect_err("another user's list").code(),
        tonic::Code::PermissionDenied
    );
    assert_nothing_stored(&mut world).await;
    world.stop().await;
}

async fn assert_nothing_stored(world: &mut World) {
    let operations = world
        .cfa
        .list_operations(pb::ListOperationsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .operations;
    assert!(operations.is_empty());
    assert_eq!(world.supply("CFA-RUB").await, "0.00");
}

async fn suspended(world: &mut World) -> Vec<pb::SuspendedDeposit> {
    world
        .cfa
        .list_suspended_deposits(pb::ListSuspendedDepositsRequest::default())
        .await
        .expect("listed")
        .into_inner()
        .deposits
}

pub async fn resolve(world: &World, refund: bool) -> Result<pb::CfaOperation, tonic::Status> {
    let request = pb::ResolveSuspendedDepositRequest {
        context: context(&key()),
        payment_id: "pay-1".into(),
        refund,
    };
    let mut cfa = world.cfa.clone();
    Ok(cfa
        .resolve_suspended_deposit(request)
        .await?
        .into_inner()
        .operation
        .expect("operation"))
}

/// Makes a suspended deposit `pay-1`: 100 roubles from alice, refused by her daily limit.
pub async fn refused_deposit(world: &mut World) {
    world.double.paid("pay-1", "alice", "100.00");
    world
        .double
        .with(|state| state.limit_refusal = Some("Daily limit".into()));
    world
        .cfa
        .issue_cfa_rub(request("alice", "100.00", "pay-1", "k-1"))
        .await
        .expect("a result");
    world.double.with(|state| state.limit_refusal = None);
    assert_eq!(suspended(world).await.len(), 1);
}

type Change = fn(&mut payments::PaymentIntent);

/// Changes after which `pay-1` (alice, 100 roubles, paid) no longer proves her deposit.
const INVALIDATING_CHANGES: [(&str, Option<Change>); 6] = [
    ("unknown", None),
    (
        "not paid",
        Some(|intent| intent.status = PaymentStatus::Pending.into()),
    ),
    (
        "failed",
        Some(|intent| intent.status = PaymentStatus::Failed.into()),
    ),
    (
        "paid back",
        Some(|intent| intent.status = PaymentStatus::Refunded.into()),
    ),
    (
        "another user's",
        Some(|intent| intent.user_id = "mallory".into()),
    ),
    (
        "of another amount",
        Some(|intent| intent.amount = roubles("99.99")),
    ),
];

/// Applies a change to `pay-1`. `None` removes all payments.
fn change_payment(world: &World, change: Option<Change>) {
    world.double.with(|state| match change {
        Some(change) => change(state.intents.get_mut("pay-1").expect("intent")),
        None => state.intents.clear(),
    });
}

fn assert_unpaid(refused: &tonic::Status, case: &str) {
    let expected = (
        tonic::Code::FailedPrecondition,
        "Payment not found or not paid",
        "PAYMENT_NOT_PAID",
    );
    let reason = reason(refused);
    assert_eq!(
        (refused.code(), refused.message(), reason.as_str()),
        expected,
        "{case}"
    );
}

// rows: R038 R041
#[tokio::test(flavor = "multi_thread")]
async fn t24_a_mint_needs_a_paid_payment_of_this_user_and_amount() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    for limit_refusal in [None, Some("Daily limit".to_owned())] {
        world
            .double
            .with(|state| state.limit_refusal = limit_refusal.clone());
        for (case, change) in INVALIDATING_CHANGES {
            world.double.paid("pay-1", "alice", "100.00");
            change_payment(&world, change);
            let request = request("alice", "100.00", "pay-1", &key());
            let refused = world.cfa.issue_cfa_rub(request).await.expect_err(case);
            assert_unpaid(&refused, case);
        }
        // Part of a real payment, or a real payment of another user.
        world.double.paid("pay-1", "alice", "100.00");
        for (user, amount) in [("alice", "0.01"), ("mallory", "100.00")] {
            let request = request(user, amount, "pay-1", &key());
            let refused = world.cfa.issue_cfa_rub(request).await.expect_err(user);
            assert_unpaid(&refused, user);
        }
    }
    world.double.with(|state| state.limit_refusal = None);
    assert!(suspended(&mut world).await.is_empty(), "nothing is stored");
    let listed = pb::ListOperationsRequest::default();
    let listed = world.cfa.list_operations(listed).await.expect("listed");
    assert_eq!(listed.into_inner().operations, []);
    // The payment's event still mints the whole amount.
    world.publish_deposit("pay-1", "alice", "100.00").await;
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    world.stop().await;
}

// rows: R047
#[tokio::test(flavor = "multi_thread")]
async fn t24_a_deposit_waits_while_payments_is_unavailable() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.double.paid("pay-1", "alice", "100.00");
    world.double.with(|state| state.payments_unavailable = true);
    let issue = request("alice", "100.00", "pay-1", &key());
    let refused = world.cfa.issue_cfa_rub(issue).await;
    let unavailable = refused.expect_err("payments is unavailable");
    assert_eq!(unavailable.code(), tonic::Code::Unavailable);
    let calls_before = world.double.with(|state| state.payments_contexts.len());
    world.publish_deposit("pay-1", "alice", "100.00").await;
    let two_more_calls = async {
        while world.double.with(|state| state.payments_contexts.len()) < calls_before + 2 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let called = tokio::time::timeout(WAIT, two_more_calls).await;
    called.expect("two more calls of payments");
    assert_eq!(world.supply("CFA-RUB").await, "0.00");
    world
        .double
        .with(|state| state.payments_unavailable = false);
    world.balance_becomes("alice:CFA-RUB", "100.00").await;
    assert_eq!(world.supply("CFA-RUB").await, "100.00");
    world.stop().await;
}

// rows: R133
#[tokio::test(flavor = "multi_thread")]
async fn t24_a_refused_deposit_is_resolved_only_with_proof_of_payment() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    refused_deposit(&mut world).await;
    for (case, change) in INVALIDATING_CHANGES {
        world.double.paid("pay-1", "alice", "100.00");
        change_payment(&world, change);
        for refund in [true, false] {
            let refused = resolve(&world, refund).await.expect_err(case);
            assert_unpaid(&refused, case);
        }
    }
    world.double.with(|state| state.payments_unavailable = true);
    for refund in [true, false] {
        let resolved = resolve(&world, refund).await;
        let unavailable = resolved.expect_err("payments is unavailable");
        assert_eq!(unavailable.code(), tonic::Code::Unavailable);
    }
    world
        .double
        .with(|state| state.payments_unavailable = false);
    assert_eq!(suspended(&mut world).await.len(), 1, "nothing was resolved");
    assert!(world.double.with(|state| state.payouts.is_empty()));
    assert_eq!(world.supply("CFA-RUB").await, "0.00");
    world.double.paid("pay-1", "alice", "100.00");
    let refunded = resolve(&world, true).await.expect("paid back");
    assert_eq!(refunded.status(), OperationStatus::Refunded);
    let again = resolve(&world, false).await.expect_err("paid back");
    assert_eq!(reason(&again), "DEPOSIT_RESOLVED");
    world.stop().await;
}

// rows: R133
#[tokio::test(flavor = "multi_thread")]
async fn t24_a_refund_paid_by_the_bank_is_recorded_by_a_retry() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    refused_deposit(&mut world).await;
    // The response to the first call was lost, so nothing is stored here.
    world.double.with(|state| {
        let refund = payments::Payout {
            payout_id: "refund-pay-1".into(),
            user_id: "alice".into(),
            amount: roubles("100.00"),
            status: PaymentStatus::Success.into(),
            sent: true,
            ..Default::default()
        };
        state.payouts.insert("refund-pay-1".into(), refund);
        let intent = state.intents.get_mut("pay-1").expect("intent");
        intent.status = PaymentStatus::Refunded.into();
    });
    let refunded = resolve(&world, true).await.expect("paid back");
    assert_eq!(refunded.status(), OperationStatus::Refunded);
    assert!(suspended(&mut world).await.is_empty());
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_a_deposit_is_suspended_again_after_its_retried_issue_reverts() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    refused_deposit(&mut world).await;
    call_contract(&mut world, "CFA-RUB", "pause()").await;
    // Otherwise the service may learn of the revert before the reads below.
    world.losing.lose(&["TransactionReceiptReadyEvent"]);
    let retried = resolve(&world, false).await.expect("resolved");
    assert!(
        suspended(&mut world).await.is_empty(),
        "the issue is in progress"
    );
    let refused = resolve(&world, true).await;
    let refused = refused.expect_err("the issue is in progress");
    assert_eq!(reason(&refused), "DEPOSIT_RESOLVED");
    assert_eq!(
        world.settle(&retried).await.status(),
        OperationStatus::Rejected
    );
    let deposits = suspended(&mut world).await;
    assert_eq!(
        (deposits.len(), deposits[0].operation_id.as_str()),
        (1, retried.operation_id.as_str())
    );
    let refunded = resolve(&world, true).await.expect("paid back");
    assert_eq!(
        (refunded.operation_id.clone(), refunded.status()),
        (retried.operation_id, OperationStatus::Refunded)
    );
    // The refund is in progress: neither IssueCfaRub nor an operator can issue tokens.
    call_contract(&mut world, "CFA-RUB", "unpause()").await;
    let issued = world
        .cfa
        .issue_cfa_rub(request("alice", "100.00", "pay-1", "k-2"))
        .await
        .expect_err("paid back");
    assert_eq!(reason(&issued), "DEPOSIT_RESOLVED");
    let issued = resolve(&world, false).await.expect_err("paid back");
    assert_eq!(reason(&issued), "DEPOSIT_RESOLVED");
    world.resume_operations().await;
    assert_eq!(world.supply("CFA-RUB").await, "0.00");
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t24_one_of_two_operators_resolves_a_deposit() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    refused_deposit(&mut world).await;
    let (issued, refunded) = tokio::join!(resolve(&world, false), resolve(&world, true));
    assert_ne!(issued.is_ok(), refunded.is_ok(), "{issued:?} {refunded:?}");
    let sent = world
        .double
        .with(|state| state.payouts.values().any(|payout| payout.sent));
    assert_eq!(sent, refunded.is_ok());
    if let Ok(operation) = issued {
        world.settle(&operation).await;
    }
    let supply = if sent { "0.00" } else { "100.00" };
    assert_eq!(world.supply("CFA-RUB").await, supply);
    world.stop().await;
}
