//! The life of operations, holds, batches of a source, chain events and limits, with every list and filter: what the tests of query plans explain.

use events::topics;
use proto::{
    chain::v1::{ReceiptStatus, TransactionReceiptReadyEvent},
    common::v1::{Decimal, OperationStatus, OperationType},
    convert::to_timestamp_us,
    ledger::v1::*,
};

use crate::harness::*;

const SECOND_US: i64 = 1_000_000;

pub async fn live(world: &World) {
    operations(world).await;
    chain(world).await;
    holds(world).await;
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
    keys.map(|key| item(OperationType::Payment, "u1", &key, &legs))
        .collect()
}

async fn operations(world: &World) {
    world.fund("u1", RUB, "1000").await;
    world.fund("u1", BOND, "10").await;
    world.fund("u2", RUB, "1000").await;
    // One, some and many; again; and of a log.
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

/// A deposit that its receipt makes final.
async fn chain(world: &World) {
    let deposit: [Leg; 1] = [("system:reserve:CFA-RUB", "u2:CFA-RUB", "10", RUB)];
    let mut awaited = operation(OperationType::Deposit, "u2", "awaited", &deposit);
    let asked = awaited.operation.as_mut().unwrap();
    asked.awaits_chain = true;
    asked.onchain_tx_hash = Some("0xa".into());
    let answer = world.client.clone().create_operation(awaited).await;
    let id = answer.unwrap().into_inner().operation.unwrap().operation_id;
    let receipt = TransactionReceiptReadyEvent {
        tx_hash: "0xa".into(),
        status: ReceiptStatus::Success as i32,
        ..Default::default()
    };
    let name = "platform.chain.v1.TransactionReceiptReadyEvent";
    world.publish(topics::CHAIN, name, "0xa", &receipt).await;
    eventually(|| async {
        let operation = world.get_operation(&id).await.operation?;
        (operation.status() == OperationStatus::Finalized).then_some(())
    })
    .await;
}

async fn holds(world: &World) {
    let kept = world.hold("u1", RUB, "5").await;
    let released = world.hold("u1", RUB, "5").await;
    world.release("r", &released.hold_id).await.unwrap();
    // One that has ended is not remembered: it is read again.
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
    staff.remove_velocity_limit(request).await.unwrap();
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
    world.assert_books_balance().await;
}
