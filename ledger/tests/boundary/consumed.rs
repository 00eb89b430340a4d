//! Consumed events of other services and their effects (specification 6.6).

use events::topics;
use proto::{
    cfa::v1::{
        CfaIssuedEvent, CfaOperation, CfaRedeemedEvent, CfaTransferredEvent,
        InstrumentRegisteredEvent,
    },
    chain::v1::{BlockReadEvent, ReceiptStatus, TransactionReceiptReadyEvent},
    common::v1::{OperationStatus, OperationType},
    identity::v1::UserCreatedEvent,
    ledger::v1::*,
};
use tonic::Code;

use crate::harness::*;

async fn find(world: &World, user: &str, kind: OperationType) -> Vec<Operation> {
    let request = ListOperationsRequest {
        user_id: user.to_owned(),
        r#type: kind as i32,
        ..Default::default()
    };
    world
        .client
        .clone()
        .list_operations(request)
        .await
        .unwrap()
        .into_inner()
        .operations
}

/// The only operation of this user and type, once it has this status.
async fn only(
    world: &World,
    user: &str,
    kind: OperationType,
    status: OperationStatus,
) -> Operation {
    eventually(|| async {
        let found = find(world, user, kind).await;
        assert!(found.len() <= 1, "{found:?}");
        found
            .into_iter()
            .next()
            .filter(|operation| operation.status() == status)
    })
    .await
}

async fn status_of(world: &World, subaccount: &str) -> Option<SubAccountStatus> {
    let request = GetSubAccountRequest {
        context: None,
        subaccount_id: subaccount.to_owned(),
    };
    let answer = world.client.clone().get_sub_account(request).await.ok()?;
    Some(answer.into_inner().subaccount?.status())
}

fn issued(operation_id: &str, holder: &str, value: &str) -> CfaIssuedEvent {
    CfaIssuedEvent {
        operation_id: operation_id.to_owned(),
        instrument_id: RUB.to_owned(),
        holder_id: holder.to_owned(),
        amount: amount(RUB, value),
        tx_hash: format!("0x{operation_id}"),
        ..Default::default()
    }
}

async fn issue(world: &World, operation_id: &str, holder: &str, value: &str) -> events::Event {
    let event = issued(operation_id, holder, value);
    world
        .publish(
            topics::CFA,
            "dfa.cfa.v1.CfaIssuedEvent",
            operation_id,
            &event,
        )
        .await
}

// rows: R235
#[tokio::test]
async fn r235_users_are_created_frozen_and_thawed() {
    let world = World::new().await;
    let identity = |name: &'static str, message: UserCreatedEvent| {
        let world = &world;
        async move {
            world
                .publish(
                    topics::IDENTITY,
                    &format!("dfa.identity.v1.{name}"),
                    &message.user_id.clone(),
                    &message,
                )
                .await
        }
    };
    // The three events have the same fields.
    let user = |id: &str| UserCreatedEvent {
        user_id: id.to_owned(),
        reason: "test".to_owned(),
        ..Default::default()
    };
    identity("UserCreatedEvent", user("u1")).await;
    eventually(|| status_of(&world, "u1:CFA-RUB")).await;
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "0.00");
    let request = ListAccountsRequest {
        user_id: "u1".to_owned(),
        ..Default::default()
    };
    let accounts = world
        .client
        .clone()
        .list_accounts(request)
        .await
        .unwrap()
        .into_inner()
        .accounts;
    let mut types: Vec<_> = accounts.iter().map(|account| account.r#type).collect();
    types.sort_unstable();
    assert_eq!(
        types,
        [AccountType::Main as i32, AccountType::Invest as i32]
    );
    let answer = world.open_hold("h0", new_hold("u1", RUB, "1")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );

    world.fund("u1", RUB, "10").await;
    identity("UserBlockedEvent", user("u1")).await;
    eventually(|| async {
        status_of(&world, "u1:CFA-RUB")
            .await
            .filter(|status| *status == SubAccountStatus::Frozen)
    })
    .await;
    let answer = world.open_hold("h1", new_hold("u1", RUB, "1")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    // A sub-account that a credit creates during the block is frozen too.
    world.fund("u1", BOND, "3").await;
    assert_eq!(
        status_of(&world, "u1:BOND-1").await,
        Some(SubAccountStatus::Frozen)
    );
    // A freeze by staff outlives the user's block.
    let freeze = SetSubAccountStatusRequest {
        context: write("s1"),
        subaccount_id: "u1:BOND-1".to_owned(),
        status: SubAccountStatus::Frozen as i32,
        reason: "court".to_owned(),
    };
    world
        .client
        .clone()
        .set_sub_account_status(freeze)
        .await
        .unwrap();
    identity("UserUnblockedEvent", user("u1")).await;
    eventually(|| async {
        status_of(&world, "u1:CFA-RUB")
            .await
            .filter(|status| *status == SubAccountStatus::Active)
    })
    .await;
    assert_eq!(
        status_of(&world, "u1:BOND-1").await,
        Some(SubAccountStatus::Frozen)
    );
    world.hold("u1", RUB, "1").await;
}

// rows: R218 R324
#[tokio::test]
async fn r324_system_sub_accounts_cannot_be_frozen_or_closed_and_deposits_go_on() {
    let world = World::new().await;
    issue(&world, "op1", "u1", "100").await;
    for credential in ["sandbox.compliance", "sandbox.operator", "sandbox.service"] {
        for subaccount_id in ["system:reserve:CFA-RUB", "system:reserve:CFA-EQ"] {
            for status in [SubAccountStatus::Frozen, SubAccountStatus::Closed] {
                let request = SetSubAccountStatusRequest {
                    context: write(&fresh()),
                    subaccount_id: subaccount_id.to_owned(),
                    status: status as i32,
                    reason: "court".to_owned(),
                };
                let mut client = world.as_caller(credential);
                refused(
                    client.set_sub_account_status(request).await,
                    Code::FailedPrecondition,
                    "SYSTEM_SUB_ACCOUNT",
                    "System sub-account cannot be frozen, closed, or debited by a person",
                );
            }
        }
    }
    issue(&world, "op2", "u2", "50").await;
    only(
        &world,
        "u2",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
}

// rows: R218 R236
#[tokio::test]
async fn r218_issue_of_money_is_a_deposit_out_of_the_reserve_once() {
    let world = World::new().await;
    let event = issue(&world, "op1", "u1", "100").await;
    let operation = only(
        &world,
        "u1",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
    assert_eq!(operation.onchain_tx_hash.as_deref(), Some("0xop1"));
    assert_eq!(operation.external_ref.as_deref(), Some("op1"));
    let posted = world.get_operation(&operation.operation_id).await.postings;
    assert_eq!(posted.len(), 1);
    assert_eq!(
        (
            posted[0].debit_subaccount_id.as_str(),
            posted[0].credit_subaccount_id.as_str()
        ),
        ("system:reserve:CFA-RUB", "u1:CFA-RUB")
    );
    assert_eq!(posted[0].amount, amount(RUB, "100.00"));
    // The same event again, then another event of the same operation, then a marker.
    world.log.publish(&[event]).await.unwrap();
    issue(&world, "op1", "u1", "100").await;
    issue(&world, "op2", "u2", "1").await;
    only(
        &world,
        "u2",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
    assert_eq!(world.balance("system:reserve:CFA-RUB").await[0], "-101.00");
    world.assert_books_balance().await;
}

// rows: R218
#[tokio::test]
async fn r218_events_of_a_batch_are_posted_together_up_to_the_first_failure() {
    let world = World::new().await;
    let deposit = |operation_id: &str, holder: &str, value: &str| {
        let message = issued(operation_id, holder, value);
        let name = "dfa.cfa.v1.CfaIssuedEvent";
        event(topics::CFA, name, "one-key", &message)
    };
    let mut unreadable = deposit("op3", "u3", "1");
    unreadable.payload = vec![0xff];
    let mut events = vec![
        deposit("op1", "u1", "100"),
        deposit("op1", "u1", "100"),
        deposit("op2", "u2", "7"),
        deposit("op-minus", "u4", "-5"),
        unreadable,
        deposit("op5", "u1", "1"),
        deposit("op6", "u6", "2"),
    ];
    events.push(events[0].clone());
    world.log.publish(&events).await.unwrap();
    for user in ["u2", "u6"] {
        let (kind, status) = (OperationType::Deposit, OperationStatus::Finalized);
        only(&world, user, kind, status).await;
    }
    let balance = async |user: &str| world.balance(&format!("{user}:CFA-RUB")).await[0].clone();
    assert_eq!(balance("u1").await, "101.00");
    assert_eq!(balance("u2").await, "7.00");
    assert_eq!(world.balance("system:reserve:CFA-RUB").await[0], "-110.00");
    let letters = eventually(|| async {
        let letters = events::dlq::list(&*world.log, &[topics::CFA], Some("ledger.cfa")).await;
        Some(letters.unwrap()).filter(|letters| letters.len() == 2)
    })
    .await;
    let ids: Vec<_> = letters.iter().map(|letter| letter.event_id).collect();
    assert_eq!(ids, [events[3].id, events[4].id]);
    world.assert_books_balance().await;
}

// rows: R218
#[tokio::test]
async fn r218_issue_to_a_closed_sub_account_opens_it_again() {
    let world = World::new().await;
    for user in ["u1", "u2"] {
        let funded = world.fund(user, RUB, "1").await;
        let reverse = ReverseOperationRequest {
            context: write(&format!("r-{user}")),
            operation_id: funded.operation_id,
            reason: String::new(),
        };
        let mut client = world.client.clone();
        client.reverse_operation(reverse).await.unwrap();
        let close = SetSubAccountStatusRequest {
            context: write(&format!("s-{user}")),
            subaccount_id: format!("{user}:CFA-RUB"),
            status: SubAccountStatus::Closed as i32,
            reason: "leaves".to_owned(),
        };
        client.set_sub_account_status(close).await.unwrap();
    }
    // One of the users is blocked: a credit opens the sub-account frozen.
    let blocked = UserCreatedEvent {
        user_id: "u2".to_owned(),
        ..Default::default()
    };
    let name = "dfa.identity.v1.UserBlockedEvent";
    world.publish(topics::IDENTITY, name, "u2", &blocked).await;
    // The block is applied: new sub-accounts of the user are frozen.
    eventually(|| async {
        world.fund("u2", BOND, "1").await;
        status_of(&world, "u2:BOND-1")
            .await
            .filter(|status| *status == SubAccountStatus::Frozen)
    })
    .await;
    assert_eq!(
        status_of(&world, "u2:CFA-RUB").await,
        Some(SubAccountStatus::Closed)
    );
    for (user, status) in [
        ("u1", SubAccountStatus::Active),
        ("u2", SubAccountStatus::Frozen),
    ] {
        issue(&world, &format!("op-{user}"), user, "7").await;
        let subaccount = format!("{user}:CFA-RUB");
        eventually(|| async {
            status_of(&world, &subaccount)
                .await
                .filter(|now| *now == status)
        })
        .await;
        assert_eq!(world.balance(&subaccount).await[0], "7.00");
    }
    world.assert_books_balance().await;
}

// rows: R336
#[tokio::test(flavor = "multi_thread")]
async fn r336_events_wait_while_the_store_is_locked() {
    let world = World::new().await;
    let rows = world.rows().await;
    let lock = rows.lock().await;
    issue(&world, "op1", "u1", "7").await;
    let health = world.handle.service().health;
    let part = format!("ledger.cfa:{}", topics::CFA);
    let reason = eventually(|| async { health.failing().remove(&part) }).await;
    assert!(reason.contains("lock"), "{reason}");
    lock.release().await;
    only(
        &world,
        "u1",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
    eventually(|| async { health.failing().is_empty().then_some(()) }).await;
    rows.close().await;
}

async fn receipt(world: &World, name: &str, status: ReceiptStatus) {
    let event = TransactionReceiptReadyEvent {
        tx_hash: tx_hash(name),
        status: status as i32,
        ..Default::default()
    };
    world
        .publish(
            topics::CHAIN,
            "dfa.chain.v1.TransactionReceiptReadyEvent",
            name,
            &event,
        )
        .await;
}

fn submitted(user: &str, key: &str, name: &str) -> CreateOperationRequest {
    let legs: [Leg; 1] = [(
        "system:reserve:CFA-RUB",
        &format!("{user}:CFA-RUB"),
        "10",
        RUB,
    )];
    let mut request = operation(OperationType::Deposit, user, key, &legs);
    let operation = request.operation.as_mut().unwrap();
    operation.awaits_chain = true;
    operation.onchain_tx_hash = Some(tx_hash(name));
    request
}

// rows: R220
#[tokio::test]
async fn r220_receipt_makes_final_and_a_reverted_one_undoes() {
    let world = World::new().await;
    let created = world
        .client
        .clone()
        .create_operation(submitted("u1", "k1", "aa"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        created.operation.unwrap().status(),
        OperationStatus::OnchainSubmitted
    );
    receipt(&world, "aa", ReceiptStatus::Success).await;
    let done = only(
        &world,
        "u1",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
    assert!(done.finalized_at.is_some());
    // A receipt after the end changes nothing, whatever it says.
    receipt(&world, "aa", ReceiptStatus::Reverted).await;
    // T30: reverted.
    world
        .client
        .clone()
        .create_operation(submitted("u2", "k2", "bb"))
        .await
        .unwrap();
    receipt(&world, "bb", ReceiptStatus::Reverted).await;
    let failed = eventually(|| async {
        find(&world, "u2", OperationType::Deposit)
            .await
            .into_iter()
            .find(|op| op.status() == OperationStatus::Failed)
    })
    .await;
    assert_eq!(
        failed.rejection_message.as_deref(),
        Some("Blockchain transaction reverted")
    );
    assert_eq!(
        failed.rejection_reason(),
        proto::common::v1::RejectionReasonCode::IntegrationError
    );
    assert_eq!(world.balance("u2:CFA-RUB").await[0], "0.00");
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "10.00");
    let mirror = find(&world, "u2", OperationType::Deposit).await;
    assert!(
        mirror
            .iter()
            .any(|op| op.reverses_operation_id.as_deref() == Some(failed.operation_id.as_str()))
    );
    // T30: a receipt for an unknown operation is parked until the operation is created.
    receipt(&world, "cc", ReceiptStatus::Success).await;
    receipt(&world, "dd", ReceiptStatus::Success).await;
    world
        .client
        .clone()
        .create_operation(submitted("u4", "k4", "dd"))
        .await
        .unwrap();
    only(
        &world,
        "u4",
        OperationType::Deposit,
        OperationStatus::Finalized,
    )
    .await;
    let late = world
        .client
        .clone()
        .create_operation(submitted("u3", "k3", "cc"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(late.operation.unwrap().status(), OperationStatus::Finalized);
    world.assert_books_balance().await;
}

// rows: R236
#[tokio::test]
async fn r236_redemption_is_confirmed_in_either_order() {
    let world = World::new().await;
    let redeem = |id: &str| CfaRedeemedEvent {
        operation_id: id.to_owned(),
        instrument_id: RUB.to_owned(),
        holder_id: "u1".to_owned(),
        amount: amount(RUB, "4"),
        tx_hash: "0xburn".to_owned(),
        ..Default::default()
    };
    for (id, event_first) in [("op1", false), ("op2", true)] {
        let user = format!("u-{id}");
        world.fund(&user, RUB, "10").await;
        let hold = Hold {
            destination_subaccount_id: Some("system:reserve:CFA-RUB".to_owned()),
            ..new_hold(&user, RUB, "4")
        };
        let hold = world
            .open_hold(&format!("h-{id}"), hold)
            .await
            .unwrap()
            .into_inner()
            .hold
            .unwrap();
        let consume = ConsumeHoldRequest {
            context: write(&format!("c-{id}")),
            hold_id: hold.hold_id,
            external_ref: Some(id.to_owned()),
            ..Default::default()
        };
        if event_first {
            world
                .publish(topics::CFA, "dfa.cfa.v1.CfaRedeemedEvent", id, &redeem(id))
                .await;
            // Once a later event of the topic is handled, this one is too.
            issue(&world, "marker", "u-marker", "1").await;
            only(
                &world,
                "u-marker",
                OperationType::Deposit,
                OperationStatus::Finalized,
            )
            .await;
        }
        let operation = world
            .client
            .clone()
            .consume_hold(consume)
            .await
            .unwrap()
            .into_inner()
            .operation
            .unwrap();
        let expected = if event_first {
            OperationStatus::Finalized
        } else {
            OperationStatus::Settled
        };
        assert_eq!(operation.status(), expected);
        if !event_first {
            world
                .publish(topics::CFA, "dfa.cfa.v1.CfaRedeemedEvent", id, &redeem(id))
                .await;
            world
                .publish(topics::CFA, "dfa.cfa.v1.CfaRedeemedEvent", id, &redeem(id))
                .await;
        }
        let done = only(
            &world,
            &user,
            OperationType::Redemption,
            OperationStatus::Finalized,
        )
        .await;
        assert_eq!(done.onchain_tx_hash.as_deref(), Some("0xburn"));
        assert_eq!(world.balance(&format!("{user}:CFA-RUB")).await[0], "6.00");
    }
    world.assert_books_balance().await;
}

// rows: R236
#[tokio::test]
async fn r236_transfer_settles_its_trade_or_is_posted_once() {
    let world = World::new().await;
    let registered = InstrumentRegisteredEvent {
        instrument_id: "EQ-7".to_owned(),
        decimals: 3,
        ..Default::default()
    };
    world
        .publish(
            topics::CFA,
            "dfa.cfa.v1.InstrumentRegisteredEvent",
            "EQ-7",
            &registered,
        )
        .await;
    eventually(|| status_of(&world, "system:reserve:EQ-7")).await;
    let credit = operation(
        OperationType::Issuance,
        "from",
        "i1",
        &[("system:reserve:EQ-7", "from:EQ-7", "5.125", "EQ-7")],
    );
    world.client.clone().create_operation(credit).await.unwrap();
    let transfer = |id: &str, trade: &str| CfaTransferredEvent {
        operation_id: id.to_owned(),
        instrument_id: "EQ-7".to_owned(),
        from_user_id: "from".to_owned(),
        to_user_id: "to".to_owned(),
        amount: amount("EQ-7", "2.125"),
        tx_hash: "0xMOVE".to_owned(),
        trade_id: trade.to_owned(),
        ..Default::default()
    };
    for _ in 0..2 {
        world
            .publish(
                topics::CFA,
                "dfa.cfa.v1.CfaTransferredEvent",
                "op1",
                &transfer("op1", ""),
            )
            .await;
    }
    let moved = only(
        &world,
        "from",
        OperationType::P2pTransfer,
        OperationStatus::Finalized,
    )
    .await;
    assert_eq!(
        (
            moved.external_ref.as_deref(),
            moved.onchain_tx_hash.as_deref()
        ),
        (Some("op1"), Some("0xmove"))
    );
    assert_eq!(world.balance("to:EQ-7").await[0], "2.125");

    // The service that moved the units has posted the operation, so it is only confirmed.
    let mut posted = operation(
        OperationType::P2pTransfer,
        "from",
        "k2",
        &[("from:EQ-7", "to2:EQ-7", "1", "EQ-7")],
    );
    posted.operation.as_mut().unwrap().external_ref = Some("op2".to_owned());
    let posted = world
        .client
        .clone()
        .create_operation(posted)
        .await
        .unwrap()
        .into_inner()
        .operation
        .unwrap();
    let event = CfaTransferredEvent {
        to_user_id: "to2".to_owned(),
        amount: amount("EQ-7", "1"),
        ..transfer("op2", "")
    };
    world
        .publish(topics::CFA, "dfa.cfa.v1.CfaTransferredEvent", "op2", &event)
        .await;
    eventually(|| async {
        let operation = world
            .get_operation(&posted.operation_id)
            .await
            .operation
            .unwrap();
        (operation.status() == OperationStatus::Finalized).then_some(())
    })
    .await;
    assert_eq!(world.balance("to2:EQ-7").await[0], "1.000");

    // The operations of a trade exist, so nothing is posted.
    let leg = |kind, user: &str, key: &str, unsettled: &str| {
        let mut request = operation(
            kind,
            user,
            key,
            &[("system:reserve:CFA-RUB", unsettled, "3", RUB)],
        );
        request.postings[0].unsettled = true;
        request
    };
    for (kind, user, key) in [
        (OperationType::TradeBuy, "to", "t1"),
        (OperationType::TradeSell, "from", "t1:sell"),
        (OperationType::Fee, "to", "t1:fee"),
    ] {
        world
            .client
            .clone()
            .create_operation(leg(kind, user, key, &format!("{user}:CFA-RUB")))
            .await
            .unwrap();
    }
    world
        .publish(
            topics::CFA,
            "dfa.cfa.v1.CfaTransferredEvent",
            "op3",
            &transfer("op3", "t1"),
        )
        .await;
    only(
        &world,
        "to",
        OperationType::TradeBuy,
        OperationStatus::Finalized,
    )
    .await;
    only(
        &world,
        "from",
        OperationType::TradeSell,
        OperationStatus::Finalized,
    )
    .await;
    only(&world, "to", OperationType::Fee, OperationStatus::Finalized).await;
    assert_eq!(
        world.balance("to:CFA-RUB").await,
        ["6.00", "0.00", "0.00", "6.00"]
    );
    assert_eq!(
        find(&world, "from", OperationType::P2pTransfer).await.len(),
        2
    );
    world.assert_books_balance().await;
}

/// Settlement and the event of the CFA service both report the end of a trade.
#[tokio::test]
async fn a_second_report_of_a_trades_end_changes_nothing() {
    let world = World::new().await;
    let buy = async |trade: &str| {
        let legs: [Leg; 1] = [("system:reserve:CFA-RUB", "to:CFA-RUB", "3", RUB)];
        let mut request = operation(OperationType::TradeBuy, "to", trade, &legs);
        request.operation.as_mut().unwrap().awaits_chain = true;
        let answer = world.client.clone().create_operation(request).await;
        answer.unwrap().into_inner().operation.unwrap().operation_id
    };
    let report = async |trade: &str| {
        let event = CfaTransferredEvent {
            operation_id: format!("of {trade}"),
            from_user_id: "from".to_owned(),
            to_user_id: "to".to_owned(),
            tx_hash: tx_hash("a"),
            trade_id: trade.to_owned(),
            ..Default::default()
        };
        let name = "dfa.cfa.v1.CfaTransferredEvent";
        world.publish(topics::CFA, name, trade, &event).await;
    };
    let first = buy("t1").await;
    let request = FinalizeOperationsRequest {
        context: write("final"),
        operation_ids: vec![first.clone()],
        onchain_tx_hash: tx_hash("a"),
    };
    let finalized = world.client.clone().finalize_operations(request).await;
    finalized.unwrap();
    report("t1").await;
    let request = ReverseOperationRequest {
        context: write("undo"),
        operation_id: first.clone(),
        reason: "test".into(),
    };
    let reversed = world.client.clone().reverse_operation(request).await;
    reversed.unwrap();
    report("t1").await;
    // The last event of the topic.
    let second = buy("t2").await;
    report("t2").await;
    eventually(|| async {
        let operation = world.get_operation(&second).await.operation?;
        (operation.status() == OperationStatus::Finalized).then_some(())
    })
    .await;
    let operation = world.get_operation(&first).await.operation.unwrap();
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert_eq!(world.balance("to:CFA-RUB").await[0], "3.00");
    world.assert_books_balance().await;
}

// rows: R221
#[tokio::test]
async fn r221_missed_operations_of_a_block_are_posted_together() {
    const MISSED: usize = 40;
    let world = World::new().await;
    let registry = std::sync::Arc::new(testkit::Registry::default());
    let tx_hash = |n: usize| format!("0x{n:064x}");
    let missed = (0..MISSED).map(|n| CfaOperation {
        operation_id: format!("op-{n}"),
        r#type: OperationType::Issuance.into(),
        status: OperationStatus::Finalized.into(),
        user_id: format!("u{n}"),
        instrument_id: RUB.to_owned(),
        amount: testkit::messages::decimal("1.00"),
        onchain_tx_hash: tx_hash(n),
        ..Default::default()
    });
    *registry.operations.lock().unwrap() = missed.collect();
    let routes = registry.routes();
    let auth = rpc::Authenticator::Sandbox;
    world.cfa.fill(rpc::with_auth(routes, &auth));
    let rows = world.rows().await;
    let groups = "SELECT CAST(COUNT(*) AS TEXT) FROM audit_blocks";
    let groups = async || rows.texts(groups).await[0].parse::<usize>().unwrap();
    let before = groups().await;

    let block = BlockReadEvent {
        number: 1,
        tx_hashes: (0..MISSED).map(tx_hash).collect(),
        ..Default::default()
    };
    let name = "dfa.chain.v1.BlockReadEvent";
    world.publish(topics::CHAIN, name, "1", &block).await;
    for n in 0..MISSED {
        let (user, kind) = (format!("u{n}"), OperationType::Deposit);
        only(&world, &user, kind, OperationStatus::Finalized).await;
    }
    let written = groups().await - before;
    assert!(written <= MISSED / 2, "{written} transactions");
    world.assert_books_balance().await;
    rows.close().await;
}

/// The CFA service has posted issuance and redemption, so the block only confirms them. The
/// transfer is posted when the block is read.
// rows: R221
#[tokio::test]
async fn r221_a_missed_operation_of_each_type_is_final_after_its_block() {
    let world = World::new().await;
    for user in ["redeemer", "sender"] {
        world.fund(user, RUB, "10").await;
    }
    let units = [("system:reserve:BOND-1", "investor:BOND-1", "5", BOND)];
    let mut issue = operation(OperationType::Issuance, "investor", "i1", &units);
    issue.instrument_scales = scale(BOND);
    issue.operation.as_mut().unwrap().external_ref = Some("op-issue".to_owned());
    world.client.clone().create_operation(issue).await.unwrap();
    let hold = Hold {
        destination_subaccount_id: Some("system:reserve:CFA-RUB".to_owned()),
        ..new_hold("redeemer", RUB, "4")
    };
    let hold = world.open_hold("h1", hold).await.unwrap().into_inner();
    let consume = ConsumeHoldRequest {
        context: write("c1"),
        hold_id: hold.hold.unwrap().hold_id,
        external_ref: Some("op-redeem".to_owned()),
        ..Default::default()
    };
    world.client.clone().consume_hold(consume).await.unwrap();
    let all = [
        ("op-issue", OperationType::Issuance, "investor", BOND, "5"),
        ("op-redeem", OperationType::Redemption, "redeemer", RUB, "4"),
        ("op-move", OperationType::P2pTransfer, "sender", RUB, "3"),
    ];
    for (_, kind, user, ..) in &all[..2] {
        only(&world, user, *kind, OperationStatus::Settled).await;
    }
    let moved = find(&world, "sender", OperationType::P2pTransfer).await;
    assert!(moved.is_empty(), "{moved:?}");

    let tx_hash = |id: &str| format!("0x{id}");
    let missed = all.map(|(id, kind, user, instrument, value)| CfaOperation {
        operation_id: id.to_owned(),
        r#type: kind.into(),
        status: OperationStatus::Finalized.into(),
        user_id: user.to_owned(),
        from_user_id: user.to_owned(),
        to_user_id: "receiver".to_owned(),
        instrument_id: instrument.to_owned(),
        amount: testkit::messages::decimal(value),
        onchain_tx_hash: tx_hash(id),
        ..Default::default()
    });
    let registry = std::sync::Arc::new(testkit::Registry::default());
    *registry.operations.lock().unwrap() = missed.to_vec();
    let auth = rpc::Authenticator::Sandbox;
    world.cfa.fill(rpc::with_auth(registry.routes(), &auth));
    let block = BlockReadEvent {
        number: 1,
        tx_hashes: all.iter().map(|(id, ..)| tx_hash(id)).collect(),
        ..Default::default()
    };
    let name = "dfa.chain.v1.BlockReadEvent";
    world.publish(topics::CHAIN, name, "1", &block).await;
    for (id, kind, user, ..) in all {
        let done = only(&world, user, kind, OperationStatus::Finalized).await;
        assert_eq!(done.external_ref.as_deref(), Some(id));
        assert_eq!(done.onchain_tx_hash, Some(tx_hash(id)));
    }
    for (account, balance) in [
        ("investor:BOND-1", "5"),
        ("redeemer:CFA-RUB", "6.00"),
        ("sender:CFA-RUB", "7.00"),
        ("receiver:CFA-RUB", "3.00"),
    ] {
        assert_eq!(world.balance(account).await[0], balance, "{account}");
    }
    world.assert_books_balance().await;
}
