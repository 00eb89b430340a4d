//! The workload of the query plan tests: operations, holds, batches of a source, events of other
//! services and limits, with every list and filter.

use events::topics;
use proto::{
    cfa::v1::{CfaIssuedEvent, CfaRedeemedEvent},
    chain::v1::{ReceiptStatus, TransactionReceiptReadyEvent},
    common::v1::{Decimal, OperationStatus, OperationType},
    convert::to_timestamp_us,
    identity::v1::UserCreatedEvent,
    ledger::v1::{hold_step::Step, *},
};

use crate::harness::*;

const SECOND_US: i64 = 1_000_000;

pub async fn run(world: &World) {
    operations(world).await;
    chain(world).await;
    users(world).await;
    issues(world).await;
    holds(world).await;
    parts(world).await;
    limits(world).await;
    reads(world).await;
}

async fn send(world: &World, key: &str, source: Option<u64>, operations: Vec<NewOperation>) {
    let request = CreateOperationsRequest {
        context: write(key),
        operations,
        source: source.map(|_| "node-1".to_owned()).unwrap_or_default(),
        first_sequence: source.unwrap_or_default(),
        through_sequence: source.unwrap_or_default(),
        ..Default::default()
    };
    let answer = world.client.clone().create_operations(request).await;
    answer.unwrap();
}

fn payments(key: &str, count: usize) -> Vec<NewOperation> {
    let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)];
    let keys = (0..count).map(|number| format!("{key}-{number}"));
    let payment = |key: String| {
        let mut payment = item(OperationType::Payment, "u1", &key, &legs);
        payment.operation.as_mut().unwrap().external_ref = Some(key);
        payment
    };
    keys.map(payment).collect()
}

async fn operations(world: &World) {
    world.fund("u1", RUB, "1000").await;
    world.fund("u1", BOND, "10").await;
    world.fund("u2", RUB, "1000").await;
    // One, some and many operations, each sent twice; then batches with a source.
    for (key, count) in [("one", 1), ("some", 20), ("many", 600)] {
        for _ in 0..2 {
            send(world, key, None, payments(key, count)).await;
        }
    }
    for sequence in [1, 2] {
        let key = format!("of the log {sequence}");
        send(world, &key, Some(sequence), payments(&key, 2)).await;
    }
    let request = GetSourcePositionRequest {
        source: "node-1".into(),
        ..Default::default()
    };
    let position = world.client.clone().get_source_position(request).await;
    position.unwrap();
    let deposit: [Leg; 1] = [("system:reserve:CFA-RUB", "u1:CFA-RUB", "10", RUB)];
    let mut paid = operation(OperationType::Deposit, "u1", "paid", &deposit);
    paid.operation.as_mut().unwrap().external_ref = Some("pay-1".into());
    let answer = world.client.clone().create_operation(paid).await.unwrap();
    let paid = answer.into_inner().operation.unwrap();
    let reverse = ReverseOperationRequest {
        context: write("undo"),
        operation_id: paid.operation_id.clone(),
        reason: "test".into(),
    };
    let reversed = world.client.clone().reverse_operation(reverse).await;
    reversed.unwrap();
    world.get_operation(&paid.operation_id).await;
}

/// A deposit that a receipt makes final.
async fn chain(world: &World) {
    let deposit: [Leg; 1] = [("system:reserve:CFA-RUB", "u2:CFA-RUB", "10", RUB)];
    let mut awaited = operation(OperationType::Deposit, "u2", "awaited", &deposit);
    let asked = awaited.operation.as_mut().unwrap();
    asked.awaits_chain = true;
    asked.onchain_tx_hash = Some(tx_hash("a"));
    let answer = world.client.clone().create_operation(awaited).await;
    let id = answer.unwrap().into_inner().operation.unwrap().operation_id;
    let receipt = TransactionReceiptReadyEvent {
        tx_hash: tx_hash("a"),
        status: ReceiptStatus::Success as i32,
        ..Default::default()
    };
    let name = "dfa.chain.v1.TransactionReceiptReadyEvent";
    world.publish(topics::CHAIN, name, "a", &receipt).await;
    eventually(|| async {
        let operation = world.get_operation(&id).await.operation?;
        (operation.status() == OperationStatus::Finalized).then_some(())
    })
    .await;
}

/// A user is created, blocked and unblocked; staff freeze and unfreeze one of the user's
/// sub-accounts.
async fn users(world: &World) {
    let status_of_u5 = async || {
        let request = GetSubAccountRequest {
            subaccount_id: "u5:CFA-RUB".into(),
            ..Default::default()
        };
        let answer = world.client.clone().get_sub_account(request).await.ok()?;
        Some(answer.into_inner().subaccount?.status())
    };
    // The three events have the same fields.
    let user = UserCreatedEvent {
        user_id: "u5".into(),
        reason: "test".into(),
        ..Default::default()
    };
    for (name, then) in [
        ("UserCreatedEvent", SubAccountStatus::Active),
        ("UserBlockedEvent", SubAccountStatus::Frozen),
        ("UserUnblockedEvent", SubAccountStatus::Active),
    ] {
        let name = format!("dfa.identity.v1.{name}");
        world.publish(topics::IDENTITY, &name, "u5", &user).await;
        eventually(|| async { status_of_u5().await.filter(|status| *status == then) }).await;
    }
    for (key, status) in [
        ("freeze", SubAccountStatus::Frozen),
        ("thaw", SubAccountStatus::Active),
    ] {
        let request = SetSubAccountStatusRequest {
            context: write(key),
            subaccount_id: "u5:CFA-RUB".into(),
            status: status.into(),
            reason: "test".into(),
        };
        let mut client = world.client.clone();
        client.set_sub_account_status(request).await.unwrap();
    }
}

/// Issues money, confirms a redemption before it is posted, and lets a caller make deposits final.
async fn issues(world: &World) {
    let redeemed = CfaRedeemedEvent {
        operation_id: "redemption-1".into(),
        tx_hash: "0xb".into(),
        ..Default::default()
    };
    let name = "dfa.cfa.v1.CfaRedeemedEvent";
    world.publish(topics::CFA, name, "u5", &redeemed).await;
    let issued = CfaIssuedEvent {
        operation_id: "issue-1".into(),
        instrument_id: RUB.into(),
        holder_id: "u5".into(),
        amount: amount(RUB, "100"),
        tx_hash: "0xc".into(),
        ..Default::default()
    };
    let name = "dfa.cfa.v1.CfaIssuedEvent";
    world.publish(topics::CFA, name, "u5", &issued).await;
    eventually(|| async {
        let balance = world.balance("u5:CFA-RUB").await;
        (balance[0] == "100.00").then_some(())
    })
    .await;
    let legs: [Leg; 1] = [("u5:CFA-RUB", "system:reserve:CFA-RUB", "1", RUB)];
    let redeemed = awaiting(world, OperationType::Redemption, "redemption-1", &legs).await;
    assert_eq!(redeemed.status(), OperationStatus::Finalized);

    let legs: [Leg; 1] = [("system:reserve:CFA-RUB", "u5:CFA-RUB", "1", RUB)];
    let mut operation_ids = Vec::new();
    for reference in ["deposit-1", "deposit-2"] {
        let deposit = awaiting(world, OperationType::Deposit, reference, &legs).await;
        operation_ids.push(deposit.operation_id);
    }
    let request = FinalizeOperationsRequest {
        context: write("final"),
        operation_ids,
        onchain_tx_hash: tx_hash("d"),
    };
    let mut client = world.client.clone();
    let answer = client.finalize_operations(request).await.unwrap();
    assert_eq!(answer.into_inner().finalized, 2);
}

/// Creates an operation of `u5` that awaits the chain.
async fn awaiting(
    world: &World,
    kind: OperationType,
    reference: &str,
    legs: &[Leg<'_>],
) -> Operation {
    let mut request = operation(kind, "u5", reference, legs);
    let asked = request.operation.as_mut().unwrap();
    asked.awaits_chain = true;
    asked.external_ref = Some(reference.into());
    let answer = world.client.clone().create_operation(request).await;
    answer.unwrap().into_inner().operation.unwrap()
}

/// A hold is adjusted, split by a batch with a source, and its child released.
async fn parts(world: &World) {
    let whole = Hold {
        owner: "market".into(),
        ..new_hold("u5", RUB, "10")
    };
    let whole = world.open_hold("whole", whole).await.unwrap();
    let whole = whole.into_inner().hold.unwrap();
    let adjust = AdjustHoldRequest {
        context: write("adjust"),
        hold_id: whole.hold_id.clone(),
        remaining_amount: amount(RUB, "8"),
    };
    world.client.clone().adjust_hold(adjust).await.unwrap();
    let part = SplitHold {
        parent_hold_id: whole.hold_id,
        hold_id: "part".into(),
        amount: amount(RUB, "3"),
        reason: "test".into(),
    };
    let request = CreateOperationsRequest {
        context: write("split"),
        hold_steps: vec![HoldStep {
            step: Some(Step::Split(part)),
            before_operation: 0,
        }],
        source: "node-1".into(),
        first_sequence: 3,
        through_sequence: 3,
        ..Default::default()
    };
    let split = world.client.clone().create_operations(request).await;
    split.unwrap();
    world.release("part", "part").await.unwrap();
    world.get_hold("part").await;
}

async fn holds(world: &World) {
    let kept = world.hold("u1", RUB, "5").await;
    let released = world.hold("u1", RUB, "5").await;
    world.release("r", &released.hold_id).await.unwrap();
    // An ended hold is not cached, so it is read from the store.
    let gone = world.consume("gone", &released.hold_id, None).await;
    gone.unwrap_err();
    let part = amount(RUB, "1");
    world.consume("c", &kept.hold_id, part).await.unwrap();
    let expiring = Hold {
        expires_at: Some(to_timestamp_us(START_US + SECOND_US)),
        owner: "market".into(),
        ..new_hold("u2", RUB, "4")
    };
    world.open_hold("e", expiring).await.unwrap();
    let lists = [
        ("", "", "", HoldStatus::Unspecified),
        ("", "", "", HoldStatus::Active),
        ("", "market", "", HoldStatus::Active),
        ("u1:CFA-RUB", "", "", HoldStatus::Unspecified),
        ("u1:CFA-RUB", "", "", HoldStatus::Active),
        ("u1:CFA-RUB", "", "", HoldStatus::Released),
        ("", "", kept.hold_id.as_str(), HoldStatus::Active),
    ];
    let own = lists[..1].iter().chain(&lists[3..4]);
    let own = own.map(|list| (list, "sandbox.investor.u1"));
    for ((subaccount_id, owner, parent, status), caller) in
        (lists.iter().map(|list| (list, "sandbox.service"))).chain(own)
    {
        let request = ListHoldsRequest {
            subaccount_id: (*subaccount_id).into(),
            status: (*status).into(),
            owner: (*owner).into(),
            parent_hold_id: (*parent).into(),
            ..Default::default()
        };
        world.as_caller(caller).list_holds(request).await.unwrap();
    }
    world.clock.advance_us(2 * SECOND_US);
    assert_eq!(world.handle.sweep().await.unwrap(), 1);
}

async fn limits(world: &World) {
    let mut staff = world.as_caller("sandbox.compliance");
    let request = SetVelocityLimitRequest {
        context: write("limit"),
        limit: Some(VelocityLimit {
            limit_id: "daily".into(),
            instrument_id: RUB.into(),
            side: PostingSide::Debit.into(),
            window_seconds: 60,
            amount: Some(Decimal {
                value: "900".into(),
            }),
            ..Default::default()
        }),
        reason: "test".into(),
    };
    staff.set_velocity_limit(request).await.unwrap();
    send(world, "limited", None, payments("limited", 3)).await;
    let request = ListVelocityLimitsRequest::default();
    staff.list_velocity_limits(request).await.unwrap();
    let request = RemoveVelocityLimitRequest {
        context: write("no limit"),
        limit_id: "daily".into(),
        reason: "test".into(),
    };
    let mut approved = world.as_caller(testkit::APPROVED);
    approved.remove_velocity_limit(request).await.unwrap();
}

async fn reads(world: &World) {
    let mut client = world.client.clone();
    for user_id in ["", "u1"] {
        let request = ListAccountsRequest {
            user_id: user_id.into(),
            ..Default::default()
        };
        client.list_accounts(request).await.unwrap();
        for instrument_id in ["", RUB] {
            let request = ListSubAccountsRequest {
                user_id: user_id.into(),
                instrument_id: instrument_id.into(),
                ..Default::default()
            };
            client.list_sub_accounts(request).await.unwrap();
        }
        let request = ListSubAccountsRequest {
            user_id: user_id.into(),
            subaccount_ids: vec!["u1:CFA-RUB".into(), "u2:CFA-RUB".into()],
            ..Default::default()
        };
        client.list_sub_accounts(request).await.unwrap();
        for idempotency_key in ["", "paid"] {
            let request = ListOperationsRequest {
                user_id: user_id.into(),
                idempotency_key: idempotency_key.into(),
                ..Default::default()
            };
            client.list_operations(request).await.unwrap();
        }
        let request = ListOperationsRequest {
            user_id: user_id.into(),
            r#type: OperationType::Payment.into(),
            status: OperationStatus::Finalized.into(),
            ..Default::default()
        };
        client.list_operations(request).await.unwrap();
    }
    let as_of = Some(to_timestamp_us(START_US + SECOND_US));
    let request = GetStatementRequest {
        subaccount_id: "u1:CFA-RUB".into(),
        from: Some(to_timestamp_us(START_US)),
        to: as_of,
        ..Default::default()
    };
    client.get_statement(request).await.unwrap();
    let request = GetBalanceRequest {
        context: None,
        subaccount_id: "u1:CFA-RUB".into(),
        as_of,
    };
    client.get_balance(request).await.unwrap();
    let account_id = "u1:MAIN".into();
    let request = GetAccountRequest {
        context: None,
        account_id,
    };
    client.get_account(request).await.unwrap();
    let request = GetTrialBalanceRequest::default();
    client.get_trial_balance(request).await.unwrap();
    let request = GetChainHeadRequest::default();
    client.get_chain_head(request).await.unwrap();
    for (actor, object_id) in [("", ""), ("", "daily"), ("compliance", "")] {
        let request = ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        client.list_audit_records(request).await.unwrap();
    }
}
