//! Emitted events (specification 6.5), as a subscriber sees them.

use std::collections::HashMap;

use prost::Message;
use proto::{
    common::v1::{OperationStatus, OperationType},
    convert::to_timestamp_us,
    ledger::v1::*,
};

use crate::harness::*;

// rows: R222 R230 R231 R233
#[tokio::test]
async fn r222_operation_emits_itself_its_postings_and_both_balances() {
    let world = World::new().await;
    let mut watch = world.watch().await;
    let mut request = operation(
        OperationType::TradeBuy,
        "u1",
        "t1",
        &[
            ("system:reserve:CFA-RUB", "u1:CFA-RUB", "5", RUB),
            ("system:reserve:CFA-EQ", "u1:BOND-1", "2", BOND),
        ],
    );
    request.instrument_scales = scale(BOND);
    let created = world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap()
        .into_inner();
    let operation = created.operation.unwrap();
    let finalize = FinalizeOperationRequest {
        context: write("f1"),
        operation_id: operation.operation_id.clone(),
        onchain_tx_hash: tx_hash("t1"),
    };
    world
        .client
        .clone()
        .finalize_operation(finalize)
        .await
        .unwrap();
    let seen = watch
        .until(|event| event.short_type() == "OperationStatusChangedEvent")
        .await;
    let names: Vec<_> = seen.iter().map(|event| event.short_type()).collect();
    let posting = [
        "PostingCreatedEvent",
        "BalanceUpdatedEvent",
        "BalanceUpdatedEvent",
    ];
    assert_eq!(
        names,
        [
            &["OperationCreatedEvent"][..],
            &posting,
            &posting,
            &["OperationStatusChangedEvent"]
        ]
        .concat()
    );
    assert!(
        seen[..7]
            .iter()
            .all(|event| event.correlation_id == "corr-t1" && event.source == "ledger")
    );

    let first = OperationCreatedEvent::decode(seen[0].payload.as_slice()).unwrap();
    assert_eq!(
        (&first.operation_id, first.user_id.as_str()),
        (&operation.operation_id, "u1")
    );
    assert_eq!(
        (first.r#type(), first.amount),
        (OperationType::TradeBuy, amount(RUB, "5.00"))
    );
    assert_eq!(first.created_at, operation.created_at);
    assert_eq!(first.context.unwrap().correlation_id, "corr-t1");
    assert_eq!(seen[0].key, operation.operation_id);
    let posted = PostingCreatedEvent::decode(seen[4].payload.as_slice()).unwrap();
    assert_eq!(posted.posting_id, created.postings[1].posting_id);
    assert_eq!(posted.amount, amount(BOND, "2"));
    assert_eq!(
        (
            posted.debit_subaccount_id.as_str(),
            posted.credit_subaccount_id.as_str()
        ),
        ("system:reserve:BOND-1", "u1:BOND-1")
    );
    let balance = BalanceUpdatedEvent::decode(seen[3].payload.as_slice()).unwrap();
    assert_eq!(balance.subaccount_id, "u1:CFA-RUB");
    assert_eq!(
        (
            balance.old_balance.unwrap().value,
            balance.new_balance.unwrap().value
        ),
        ("0.00".to_owned(), "5.00".to_owned())
    );
    assert_eq!(balance.operation_id, operation.operation_id);
    assert!(balance.updated_at.is_some());
    assert_eq!(seen[3].key, "u1:CFA-RUB");
    let moved = OperationStatusChangedEvent::decode(seen[7].payload.as_slice()).unwrap();
    assert_eq!(
        (moved.old_status(), moved.new_status()),
        (OperationStatus::Settled, OperationStatus::Finalized)
    );
    assert!(moved.changed_at.is_some());
}

// rows: R335 R233
#[tokio::test]
async fn r335_payloads_of_postings_and_status_changes_are_complete() {
    let world = World::new().await;
    let mut watch = world.watch().await;
    let mut request = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "5", RUB)],
    );
    request.operation.as_mut().unwrap().awaits_chain = true;
    let made = world.client.clone().create_operation(request).await;
    let made = made.unwrap().into_inner();
    let operation_id = made.operation.unwrap().operation_id;
    let (event, posted): (_, PostingCreatedEvent) = watch.next_of("PostingCreatedEvent").await;
    assert_eq!(posted.context.as_ref().unwrap().correlation_id, "corr-k1");
    assert_eq!(event.key, operation_id);
    let expected = PostingCreatedEvent {
        context: posted.context.clone(),
        posting_id: made.postings[0].posting_id.clone(),
        operation_id: operation_id.clone(),
        debit_subaccount_id: "system:reserve:CFA-RUB".to_owned(),
        credit_subaccount_id: "u1:CFA-RUB".to_owned(),
        amount: amount(RUB, "5.00"),
        created_at: Some(to_timestamp_us(START_US)),
    };
    assert_eq!(posted, expected);

    world.clock.advance_us(3_000_000);
    let reverse = ReverseOperationRequest {
        context: write("r1"),
        operation_id: operation_id.clone(),
        reason: "typed wrong".to_owned(),
    };
    let reversal = world.client.clone().reverse_operation(reverse).await;
    let reversal = reversal.unwrap().into_inner();
    let name = "OperationStatusChangedEvent";
    let (event, moved): (_, OperationStatusChangedEvent) = watch.next_of(name).await;
    assert_eq!(moved.context.as_ref().unwrap().correlation_id, "corr-r1");
    assert_eq!(event.key, operation_id);
    let expected = OperationStatusChangedEvent {
        context: moved.context.clone(),
        operation_id,
        old_status: OperationStatus::Processing as i32,
        new_status: OperationStatus::Failed as i32,
        reason: "typed wrong".to_owned(),
        changed_at: Some(to_timestamp_us(START_US + 3_000_000)),
    };
    assert_eq!(moved, expected);
    assert_eq!(reversal.postings[0].debit_subaccount_id, "u1:CFA-RUB");
}

/// `name: type` of a message's fields in the order of their numbers. Asserts that the numbers have
/// no gap.
fn fields(name: &str) -> String {
    let contract = rpc::contract::Contract::platform();
    let message = contract.pool().get_message_by_name(name).expect(name);
    let mut fields: Vec<_> = message.fields().collect();
    fields.sort_by_key(|field| field.number());
    let fields = fields.iter().zip(1..).map(|(field, number)| {
        assert_eq!(field.number(), number, "{name}.{}", field.name());
        let kind = field.kind();
        let kind = match (kind.as_message(), kind.as_enum()) {
            (Some(message), _) => message.name().to_owned(),
            (_, Some(values)) => values.name().to_owned(),
            _ => format!("{kind:?}").to_lowercase(),
        };
        let many = if field.is_list() { "repeated " } else { "" };
        format!("{}: {many}{kind}", field.name())
    });
    fields.collect::<Vec<_>>().join(", ")
}

/// Covers every payload, of all services, that the specification names without its fields.
// rows: R335
#[test]
fn r335_payloads_that_the_text_leaves_open_have_their_fields() {
    let user = "context: RequestContext, user_id: string, reason: string, at: Timestamp";
    let registration = "context: RequestContext, user_id: string, address: string, \
        tx_hash: string, at: Timestamp";
    let issuance = "context: RequestContext, operation_id: string, user_id: string, \
        amount: MonetaryAmount, tx_hash: string, reason: string, at: Timestamp";
    let payloads = [
        (
            "ledger.v1.OperationStatusChangedEvent",
            "context: RequestContext, operation_id: string, old_status: OperationStatus, \
             new_status: OperationStatus, reason: string, changed_at: Timestamp",
        ),
        (
            "ledger.v1.PostingCreatedEvent",
            "context: RequestContext, posting_id: string, operation_id: string, \
             debit_subaccount_id: string, credit_subaccount_id: string, amount: MonetaryAmount, \
             created_at: Timestamp",
        ),
        (
            "ledger.v1.UserOnchainRegistrationRequestedEvent",
            registration,
        ),
        (
            "ledger.v1.UserOnchainRegistrationConfirmedEvent",
            registration,
        ),
        ("identity.v1.UserCreatedEvent", user),
        ("identity.v1.UserUpdatedEvent", user),
        ("identity.v1.UserBlockedEvent", user),
        ("identity.v1.UserUnblockedEvent", user),
        (
            "chain.v1.TransactionReceiptReadyEvent",
            "context: RequestContext, tx_hash: string, block_number: uint64, \
             status: ReceiptStatus, gas_used: uint64, at: Timestamp",
        ),
        (
            "chain.v1.BlockReadEvent",
            "context: RequestContext, number: uint64, hash: string, parent_hash: string, \
             tx_hashes: repeated string, at: Timestamp",
        ),
        ("cfa.v1.IssuanceStartedEvent", issuance),
        ("cfa.v1.IssuanceFailedEvent", issuance),
        (
            "payments.v1.PaymentIntentCreatedEvent",
            "context: RequestContext, payment_id: string, user_id: string, amount: Money, \
             method: PaymentMethod, at: Timestamp",
        ),
    ];
    for (name, expected) in payloads {
        assert_eq!(fields(&format!("dfa.{name}")), expected, "{name}");
    }
}

// rows: R231
#[tokio::test]
async fn r231_old_and_new_balances_form_a_gapless_chain() {
    let world = World::new().await;
    let mut watch = world.watch().await;
    for n in 1..=5 {
        world.fund("u1", RUB, &n.to_string()).await;
        let request = operation(
            OperationType::Payment,
            "u1",
            &format!("p{n}"),
            &[("u1:CFA-RUB", "u2:CFA-RUB", "0.50", RUB)],
        );
        world
            .client
            .clone()
            .create_operation(request)
            .await
            .unwrap();
    }
    let mut last: HashMap<String, String> = HashMap::new();
    for _ in 0..20 {
        let (event, balance): (_, BalanceUpdatedEvent) = watch.next_of("BalanceUpdatedEvent").await;
        assert_eq!(event.key, balance.subaccount_id);
        let before = last
            .entry(balance.subaccount_id)
            .or_insert_with(|| "0.00".to_owned());
        assert_eq!(*before, balance.old_balance.unwrap().value);
        *before = balance.new_balance.unwrap().value;
    }
    for (subaccount, value) in last {
        assert_eq!(world.balance(&subaccount).await[0], value);
    }
}

// rows: R224 R228 R232
#[tokio::test]
async fn r232_hold_events_carry_their_fields() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let mut watch = world.watch().await;
    let one = world.hold("u1", RUB, "4").await;
    let two = world.hold("u1", RUB, "5").await;
    world.consume("c1", &one.hold_id, None).await.unwrap();
    world.release("r1", &two.hold_id).await.unwrap();
    let (event, created): (_, HoldCreatedEvent) = watch.next_of("HoldCreatedEvent").await;
    assert_eq!(
        (event.key.as_str(), &created.hold_id),
        ("u1:CFA-RUB", &one.hold_id)
    );
    assert_eq!(
        (created.subaccount_id.as_str(), created.reason.as_str()),
        ("u1:CFA-RUB", "test hold")
    );
    assert_eq!(
        (created.amount, created.created_at),
        (amount(RUB, "4.00"), one.created_at)
    );
    let (_, consumed): (_, HoldConsumedEvent) = watch.next_of("HoldConsumedEvent").await;
    assert_eq!(consumed.hold_id, one.hold_id);
    assert!(consumed.consumed_at.is_some() && consumed.context.is_some());
    let (event, released): (_, HoldReleasedEvent) = watch.next_of("HoldReleasedEvent").await;
    assert_eq!(
        (
            event.key.as_str(),
            released.hold_id.as_str(),
            released.reason.as_str()
        ),
        ("u1:CFA-RUB", two.hold_id.as_str(), "test")
    );
    assert!(released.released_at.is_some());
}

// rows: R233 R222
#[tokio::test]
async fn refused_and_replayed_calls_emit_nothing() {
    let world = World::new().await;
    let mut watch = world.watch().await;
    let pay = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "1", RUB)],
    );
    for _ in 0..3 {
        world
            .client
            .clone()
            .create_operation(pay.clone())
            .await
            .unwrap();
    }
    world
        .open_hold("h1", new_hold("u1", RUB, "2"))
        .await
        .unwrap_err();
    let last = world.hold("u1", RUB, "1").await;
    let seen = watch.until(|event| event.subject == last.hold_id).await;
    let names: Vec<_> = seen.iter().map(|event| event.short_type()).collect();
    assert_eq!(
        names,
        [
            "OperationCreatedEvent",
            "PostingCreatedEvent",
            "BalanceUpdatedEvent",
            "BalanceUpdatedEvent",
            "HoldCreatedEvent"
        ]
    );
}
