//! Lost connections: callers do not notice a loss around a commit. A longer loss is reported and
//! recovers.

use std::collections::{BTreeMap, BTreeSet};

use events::topics;
use proto::{
    cfa::v1::{CfaIssuedEvent, CfaRedeemedEvent},
    chain::v1::{ReceiptStatus, TransactionReceiptReadyEvent},
    common::v1::OperationType,
    identity::v1::UserCreatedEvent,
    ledger::v1::{hold_step::Step, *},
};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::*,
    proxy::Proxy,
    rows::{Database, audit},
};

/// A ledger whose connections to its server go through a proxy.
async fn through_proxy() -> (World, Proxy) {
    let database = Database::fresh().await;
    let (before, rest) = database
        .url
        .split_once("127.0.0.1:")
        .expect("a local server");
    let (port, rest) = rest.split_once('/').unwrap();
    let proxy = Proxy::to(format!("127.0.0.1:{port}")).await;
    let url = format!("{before}{}/{rest}", proxy.address);
    (World::on(database, Some(url)).await, proxy)
}

/// All rows without ids and times, and the counts per kind.
const ROWS: &str = "SELECT 'sub-account ' || subaccount_id || ' ' || balance || ' ' || held || ' ' || unsettled \
     || ' ' || version || ' ' || \"freeze\" || ' ' || closed FROM sub_accounts \
     UNION ALL SELECT 'operation ' || user_id || ' ' || kind || ' ' || status || ' ' || COUNT(*) FROM operations \
     GROUP BY user_id, kind, status \
     UNION ALL SELECT 'posting ' || debit_subaccount_id || ' ' || debit_version || ' ' || amount FROM postings \
     UNION ALL SELECT 'hold ' || subaccount_id || ' ' || amount || ' ' || remaining || ' ' || added \
     || ' ' || split_off || ' ' || consumed || ' ' || released || ' ' || returned_by_children || ' ' || status \
     FROM holds \
     UNION ALL SELECT 'answer ' || call || ' ' || idempotency_key FROM answers \
     UNION ALL SELECT 'source ' || source || ' ' || through_sequence FROM sources \
     UNION ALL SELECT 'parked ' || match_key FROM parked \
     UNION ALL SELECT 'user ' || user_id || ' ' || blocked FROM users \
     UNION ALL SELECT 'taken ' || consumer || ' ' || COUNT(*) FROM inbox GROUP BY consumer \
     ORDER BY 1";

/// Sends one command of every kind. Calls `before` before each.
async fn every_command(world: &World, before: &dyn Fn()) {
    let mut client = world.client.clone();
    let moving = |kind, user: &str, key: &str, value| {
        let (from, to) = ("system:reserve:CFA-RUB", format!("{user}:{RUB}"));
        operation(kind, user, key, &[(from, &to, value, RUB)])
    };
    before();
    let deposit = client.create_operation(moving(OperationType::Deposit, "u1", "k1", "100"));
    let deposit = deposit.await.unwrap().into_inner().operation.unwrap();
    before();
    let hold = Hold {
        hold_id: "h1".to_owned(),
        ..new_hold("u1", RUB, "40")
    };
    world.open_hold("k2", hold).await.unwrap();
    before();
    world.consume("k3", "h1", amount(RUB, "10")).await.unwrap();
    before();
    let adjust = AdjustHoldRequest {
        context: write("k4"),
        hold_id: "h1".to_owned(),
        remaining_amount: amount(RUB, "15"),
    };
    client.adjust_hold(adjust).await.unwrap();
    // A batch with a hold step, then one with a source.
    for (key, source) in [("k5", ""), ("k6", "log")] {
        before();
        let step = Step::Grow(GrowHold {
            hold_id: "h1".to_owned(),
            amount: amount(RUB, "1"),
        });
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "2", RUB)];
        let request = CreateOperationsRequest {
            context: write(key),
            operations: vec![item(
                OperationType::Payment,
                "u1",
                &format!("{key}-0"),
                &legs,
            )],
            hold_steps: vec![HoldStep {
                step: Some(step),
                before_operation: 0,
            }],
            source: source.to_owned(),
            first_sequence: u64::from(!source.is_empty()),
            through_sequence: u64::from(!source.is_empty()),
            ..Default::default()
        };
        client.create_operations(request).await.unwrap();
    }
    before();
    world.release("k7", "h1").await.unwrap();
    // A refused command, whose refusal is stored.
    before();
    let answer = world.open_hold("k8", new_hold("u1", RUB, "1000")).await;
    assert_eq!(answer.unwrap_err().message(), "Insufficient balance");
    // Finality, then reversals.
    let mut submitted = moving(OperationType::Deposit, "u3", "k9", "7");
    submitted.operation.as_mut().unwrap().awaits_chain = true;
    before();
    let submitted = client
        .create_operation(submitted)
        .await
        .unwrap()
        .into_inner()
        .operation
        .unwrap();
    before();
    let finalize = FinalizeOperationRequest {
        context: write("k10"),
        operation_id: submitted.operation_id,
        onchain_tx_hash: tx_hash("k9"),
    };
    client.finalize_operation(finalize).await.unwrap();
    before();
    let reverse = ReverseOperationRequest {
        context: write("k11"),
        operation_id: deposit.operation_id,
        reason: "typed wrong".to_owned(),
    };
    let refused = client.reverse_operation(reverse).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    before();
    let spare = client.create_operation(moving(OperationType::Deposit, "u3", "k12", "5"));
    let spare = spare.await.unwrap().into_inner().operation.unwrap();
    before();
    let reverse = ReverseOperationRequest {
        context: write("k13"),
        operation_id: spare.operation_id,
        reason: "typed wrong".to_owned(),
    };
    client.reverse_operation(reverse).await.unwrap();
    before();
    let freeze = SetSubAccountStatusRequest {
        context: write("k14"),
        subaccount_id: "u3:CFA-RUB".to_owned(),
        status: SubAccountStatus::Frozen as i32,
        reason: "court".to_owned(),
    };
    client.set_sub_account_status(freeze).await.unwrap();
    expiry(world, before).await;
    every_event(world, before).await;
}

/// Lets two holds expire. A call finds one expiry and is refused for it; the sweeper finds the
/// other.
async fn expiry(world: &World, before: &dyn Fn()) {
    for id in ["h2", "h3"] {
        let hold = Hold {
            hold_id: id.to_owned(),
            expires_at: Some(prost_types::Timestamp {
                seconds: world.clock.now_us() / 1_000_000 + 1,
                nanos: 0,
            }),
            ..new_hold("u1", RUB, "1")
        };
        before();
        world.open_hold(&format!("open-{id}"), hold).await.unwrap();
    }
    world.clock.advance_us(2_000_000);
    before();
    let late = world.consume("k15", "h2", None).await.unwrap_err();
    assert_eq!(late.message(), "Hold has expired");
    before();
    world.handle.sweep().await.unwrap();
}

/// Publishes events of other services. Each takes effect before the next is published.
async fn every_event(world: &World, before: &dyn Fn()) {
    let accepted = async |consumer: &'static str, count: usize| {
        let rows = world.rows().await;
        eventually(async || {
            let seen = rows.texts("SELECT consumer FROM inbox").await;
            let seen = seen.iter().filter(|name| *name == consumer).count();
            (seen == count).then_some(())
        })
        .await;
        rows.close().await;
    };
    let user = UserCreatedEvent {
        user_id: "u4".to_owned(),
        ..Default::default()
    };
    for (index, name) in ["UserCreatedEvent", "UserBlockedEvent", "UserUnblockedEvent"]
        .into_iter()
        .enumerate()
    {
        before();
        let name = format!("dfa.identity.v1.{name}");
        world.publish(topics::IDENTITY, &name, "u4", &user).await;
        accepted("ledger.identity", index + 1).await;
    }
    before();
    let issued = CfaIssuedEvent {
        operation_id: "op1".to_owned(),
        instrument_id: RUB.to_owned(),
        holder_id: "u4".to_owned(),
        amount: amount(RUB, "3"),
        tx_hash: "0x1".to_owned(),
        ..Default::default()
    };
    world
        .publish(topics::CFA, "dfa.cfa.v1.CfaIssuedEvent", "op1", &issued)
        .await;
    accepted("ledger.cfa", 1).await;
    // The operation does not exist, so the confirmation is parked.
    before();
    let redeemed = CfaRedeemedEvent {
        operation_id: "op2".to_owned(),
        ..Default::default()
    };
    world
        .publish(topics::CFA, "dfa.cfa.v1.CfaRedeemedEvent", "op2", &redeemed)
        .await;
    accepted("ledger.cfa", 2).await;
    before();
    let receipt = TransactionReceiptReadyEvent {
        tx_hash: "0x77".to_owned(),
        status: ReceiptStatus::Reverted as i32,
        ..Default::default()
    };
    let name = "dfa.chain.v1.TransactionReceiptReadyEvent";
    world.publish(topics::CHAIN, name, "0x77", &receipt).await;
    accepted("ledger.chain", 1).await;
}

// rows: R214 R236 R248
#[tokio::test(flavor = "multi_thread")]
async fn r214_no_command_acts_twice_when_its_commit_response_is_lost() {
    let quiet = World::new().await;
    every_command(&quiet, &|| {}).await;
    let (lossy, proxy) = through_proxy().await;
    let commands = std::cell::Cell::new(0);
    every_command(&lossy, &|| {
        commands.set(commands.get() + 1);
        proxy.drop_next_commit_response();
    })
    .await;
    // Each command was committed, and the response to each commit was lost.
    assert_eq!(proxy.lost(), commands.get());
    let (expected, found) = (quiet.rows().await, lossy.rows().await);
    audit(&found, "after every command").await;
    assert_eq!(found.texts(ROWS).await, expected.texts(ROWS).await);
    expected.close().await;
    found.close().await;
    lossy.assert_books_balance().await;
    assert_eq!(events_of(&lossy).await, events_of(&quiet).await);
}

/// Number of events per type, each counted once.
async fn events_of(world: &World) -> BTreeMap<String, usize> {
    let mut watch = world.watch().await;
    world.fund("last", RUB, "1").await;
    let is_last = |event: &events::Event| {
        event.short_type() == "BalanceUpdatedEvent" && event.subject.starts_with("last")
    };
    let seen = watch.until(is_last).await;
    let ids: BTreeSet<_> = seen.iter().map(|event| event.id).collect();
    assert_eq!(ids.len(), seen.len(), "an event was published twice");
    let mut types = BTreeMap::new();
    for event in seen {
        *types.entry(event.short_type().to_owned()).or_default() += 1;
    }
    types
}

// rows: R336
#[tokio::test(flavor = "multi_thread")]
async fn r336_an_unavailable_server_is_reported_and_recovers() {
    let (world, proxy) = through_proxy().await;
    world.fund("u1", RUB, "10").await;
    let health = world.handle.service().health;
    proxy.cut();
    let away = world
        .open_hold("k1", new_hold("u1", RUB, "4"))
        .await
        .unwrap_err();
    assert_eq!(away.code(), Code::Unavailable, "{away}");
    assert!(health.failing().contains_key("store"));
    // A read gets the same status, with `RetryInfo`.
    let request = GetBalanceRequest {
        subaccount_id: "u1:CFA-RUB".to_owned(),
        ..Default::default()
    };
    let unread = world.client.clone().get_balance(request).await;
    for status in [away, unread.unwrap_err()] {
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(status.message(), "Ledger is unavailable");
        assert!(status.get_details_retry_info().is_some());
    }
    proxy.restore();
    let hold = world.open_hold("k1", new_hold("u1", RUB, "4"));
    eventually_ok(hold, &world).await;
    assert!(!health.failing().contains_key("store"));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["10.00", "4.00", "0.00", "6.00"]
    );
}

// rows: R339
#[tokio::test]
async fn d23_a_write_that_the_store_refuses_for_good_is_not_retriable() {
    let world = World::new().await;
    let rows = world.rows().await;
    let sql = "ALTER TABLE postings ADD CONSTRAINT never CHECK (amount <> 4242)";
    rows.execute(sql).await.unwrap();
    rows.close().await;
    let deposit = |value| {
        let legs = [("system:reserve:CFA-RUB", "u1:CFA-RUB", value, RUB)];
        operation(OperationType::Deposit, "u1", &fresh(), &legs)
    };
    let mut client = world.client.clone();
    let never = client.create_operation(deposit("42.42")).await.unwrap_err();
    assert_eq!(
        (never.code(), never.message()),
        (Code::Internal, "Internal error")
    );
    assert!(never.get_details_retry_info().is_none());
    client.create_operation(deposit("1")).await.unwrap();
}

/// Repeats the call until it succeeds: the first call after the recovery may still fail while the
/// pool backs off. The same key makes a repeat act once.
async fn eventually_ok(first: impl Future<Output = Answer<CreateHoldResponse>>, world: &World) {
    if first.await.is_err() {
        eventually(async || {
            let again = world.open_hold("k1", new_hold("u1", RUB, "4")).await;
            again.ok()
        })
        .await;
    }
}
