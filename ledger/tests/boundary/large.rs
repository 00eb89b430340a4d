//! Batches so large that their first operations are written while the rest is folded. A refused
//! batch leaves nothing. A committed batch is linked correctly in the chains of its sub-accounts
//! and in its block.

use proto::{
    common::v1::{OperationStatus, OperationType},
    ledger::v1::{hold_step::Step, *},
};
use tokio::task::JoinSet;
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::*;

fn pay(user: &str, key: &str, to: &str, value: &str) -> NewOperation {
    let from = format!("{user}:CFA-RUB");
    item(
        OperationType::Payment,
        user,
        key,
        &[(&from, to, value, RUB)],
    )
}

fn many(user: &str, name: &str, count: usize) -> Vec<NewOperation> {
    (0..count)
        .map(|number| pay(user, &format!("{name}-{number}"), "hub:CFA-RUB", "1"))
        .collect()
}

async fn send(
    world: &World,
    call: &str,
    mode: BatchMode,
    operations: Vec<NewOperation>,
) -> Answer<CreateOperationsResponse> {
    let request = CreateOperationsRequest {
        context: write(call),
        operations,
        mode: mode as i32,
        ..Default::default()
    };
    world.client.clone().create_operations(request).await
}

/// Asserts that the ledger verifies and has this number of operations.
async fn assert_sound(world: &World, operations: u64) {
    world.assert_books_balance().await;
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!((found.fault, found.operations), (None, operations));
}

/// Number of statement lines of a sub-account, counted in pages.
async fn entries(world: &World, subaccount: &str) -> usize {
    let mut seen = 0;
    let mut page_token = String::new();
    loop {
        let request = GetStatementRequest {
            subaccount_id: subaccount.to_owned(),
            pagination: Some(proto::common::v1::PaginationRequest {
                page_size: 300,
                page_token,
            }),
            ..Default::default()
        };
        let page = world.client.clone().get_statement(request).await.unwrap();
        let page = page.into_inner();
        seen += page.lines.len();
        page_token = page.pagination.unwrap_or_default().next_page_token;
        if page_token.is_empty() {
            return seen;
        }
    }
}

// rows: R237
#[tokio::test]
async fn d19_a_refusal_after_hundreds_of_operations_rolls_all_of_them_back() {
    let world = World::new().await;
    world.fund("u1", RUB, "700").await;
    let mut operations = many("u1", "p", 701);
    let refusal = send(&world, "all", BatchMode::AllOrNothing, operations.clone()).await;
    let status = refusal.expect_err("the last operation exceeds the balance");
    assert_eq!(status.code(), Code::FailedPrecondition);
    let facts = status.get_details_error_info().unwrap().metadata;
    assert_eq!(facts["operation_index"], "700");
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["700.00", "0.00", "0.00", "700.00"]
    );
    assert_sound(&world, 1).await;

    operations.pop();
    let made = send(
        &world,
        "mended",
        BatchMode::AllOrNothing,
        operations.clone(),
    )
    .await;
    let made = made.unwrap().into_inner();
    assert_eq!(world.balance("hub:CFA-RUB").await[0], "700.00");
    assert_eq!(entries(&world, "hub:CFA-RUB").await, 700);
    assert_sound(&world, 701).await;
    let again = send(&world, "mended", BatchMode::AllOrNothing, operations).await;
    let again = again.unwrap();
    assert!(is_replay(&again));
    let ids = |answer: &CreateOperationsResponse| -> Vec<String> {
        let operations = answer.outcomes.iter().map(|outcome| &outcome.operation);
        operations
            .map(|operation| operation.as_ref().unwrap().operation_id.clone())
            .collect()
    };
    assert_eq!(ids(&again.into_inner()), ids(&made));
    assert_sound(&world, 701).await;
}

// rows: R237
#[tokio::test]
async fn d19_hundreds_of_independent_operations_succeed_or_fail_alone() {
    let world = World::new().await;
    world.fund("u1", RUB, "1000").await;
    let mut operations = many("u1", "p", 700);
    for place in [0, 255, 256, 257, 511, 699] {
        operations[place] = pay("u1", &format!("poor-{place}"), "hub:CFA-RUB", "100000");
    }
    // Two operations with the same key, far apart: the second is a repeat.
    operations[600] = operations[10].clone();
    let answer = send(&world, "each", BatchMode::Independent, operations).await;
    let outcomes = answer.unwrap().into_inner().outcomes;
    let refused = outcomes.iter().enumerate();
    let refused: Vec<usize> = refused
        .filter(|(_, outcome)| outcome.error_reason == "INSUFFICIENT_BALANCE")
        .map(|(place, _)| place)
        .collect();
    assert_eq!(refused, [0, 255, 256, 257, 511, 699]);
    assert!(outcomes[600].replayed);
    assert_eq!(outcomes[600].operation, outcomes[10].operation);
    assert_eq!(world.balance("hub:CFA-RUB").await[0], "693.00");
    assert_eq!(entries(&world, "hub:CFA-RUB").await, 693);
    assert_sound(&world, 694).await;
}

// rows: R237
#[tokio::test]
async fn concurrent_large_batches_do_not_affect_each_other() {
    let world = World::new().await;
    let mut calls = JoinSet::new();
    for user in 0..8 {
        world.fund(&format!("u{user}"), RUB, "300").await;
    }
    for user in 0..8 {
        let name = format!("u{user}");
        // Every second batch is refused because of its last operation.
        let operations = many(&name, &name, 300 + user % 2);
        let request = CreateOperationsRequest {
            context: write(&name),
            operations,
            ..Default::default()
        };
        let mut client = world.client.clone();
        calls.spawn(async move { (user, client.create_operations(request).await) });
    }
    while let Some(called) = calls.join_next().await {
        let (user, answer) = called.unwrap();
        assert_eq!(answer.is_ok(), user % 2 == 0, "{user}: {answer:?}");
    }
    assert_eq!(world.balance("hub:CFA-RUB").await[0], "1200.00");
    assert_eq!(entries(&world, "hub:CFA-RUB").await, 1_200);
    assert_sound(&world, 8 + 1_200).await;
}

// rows: R190 R191
#[tokio::test]
async fn holds_opened_by_one_large_batch_are_used_by_the_next_ones() {
    let mut world = World::new().await;
    world.fund("u1", RUB, "800").await;
    let id = |number: usize| format!("hold-{number}");
    let open = |number: usize| HoldStep {
        step: Some(Step::Open(OpenHold {
            hold: Some(Hold {
                hold_id: id(number),
                ..new_hold("u1", RUB, "2")
            }),
        })),
        before_operation: 0,
    };
    let consume = |round: &str, value: &str| -> Vec<NewOperation> {
        let one = |number: usize| {
            let key = format!("{round}-{number}");
            let mut new = pay("u1", &key, "hub:CFA-RUB", value);
            new.postings[0].hold_id = Some(id(number));
            new
        };
        (0..400).map(one).collect()
    };
    // Opens the holds and consumes a first part of each.
    let request = CreateOperationsRequest {
        context: write("open"),
        operations: consume("first", "0.5"),
        hold_steps: (0..400).map(open).collect(),
        ..Default::default()
    };
    { world.client.clone() }
        .create_operations(request)
        .await
        .unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["600.00", "600.00", "0.00", "0.00"]
    );
    send(
        &world,
        "second",
        BatchMode::AllOrNothing,
        consume("second", "1"),
    )
    .await
    .unwrap();
    world = world.restart().await;
    let over = consume("over", "0.51");
    let status = send(&world, "over", BatchMode::AllOrNothing, over).await;
    refused(
        status,
        Code::FailedPrecondition,
        "HOLD_AMOUNT_EXCEEDED",
        "Amount exceeds what remains of the hold",
    );
    send(
        &world,
        "third",
        BatchMode::AllOrNothing,
        consume("third", "0.5"),
    )
    .await
    .unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["0.00", "0.00", "0.00", "0.00"]
    );
    let hold = world.get_hold("hold-399").await;
    assert_eq!(hold.status(), HoldStatus::Consumed);
    assert_sound(&world, 1 + 1_200).await;
}

/// Commands that change rows of one large batch are queued between this batch and the next one, all
/// of them after a batch that keeps the writer busy. So they usually form one group.
// rows: R217 R237
#[tokio::test]
async fn rows_of_one_large_batch_change_before_the_next_one() {
    let world = World::new().await;
    world.fund("u1", RUB, "3000").await;
    let named = |name: &str| {
        let mut operations = many("u1", name, 300);
        for (number, new) in operations.iter_mut().enumerate() {
            let operation = new.operation.as_mut().unwrap();
            operation.operation_id = format!("{name}-id-{number}");
        }
        operations
    };
    let batch = |name: &str, operations| CreateOperationsRequest {
        context: write(name),
        operations,
        ..Default::default()
    };
    let client = || world.client.clone();
    let (mut busy, mut first, mut second) = (client(), client(), client());
    let (mut ends, mut undoes) = (client(), client());
    let end = FinalizeOperationRequest {
        context: write("end"),
        operation_id: "first-id-5".to_owned(),
        ..Default::default()
    };
    let undo = ReverseOperationRequest {
        context: write("undo"),
        operation_id: "first-id-7".to_owned(),
        reason: "test".to_owned(),
    };
    // Sent in this order.
    let (busy, first, ended, undone, second) = tokio::join!(
        busy.create_operations(batch("busy", many("u1", "busy", 2_000))),
        first.create_operations(batch("first", named("first"))),
        ends.finalize_operation(end),
        undoes.reverse_operation(undo.clone()),
        second.create_operations(batch("second", named("second"))),
    );
    busy.unwrap();
    first.unwrap();
    second.unwrap();
    let ended = ended.unwrap().into_inner().operation.unwrap();
    let mirror = undone.unwrap().into_inner().operation.unwrap();
    let world = world.restart().await;
    let found = world.get_operation("first-id-5").await.operation.unwrap();
    assert_eq!(found.status, ended.status);
    assert_eq!(found.status(), OperationStatus::Finalized);
    let found = world.get_operation("first-id-7").await.operation.unwrap();
    assert_eq!(found.status(), OperationStatus::Failed);
    assert_eq!(mirror.reverses_operation_id.as_deref(), Some("first-id-7"));
    let again = ReverseOperationRequest {
        context: write("undo again"),
        ..undo
    };
    let again = world.client.clone().reverse_operation(again).await;
    assert_eq!(again.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(world.balance("hub:CFA-RUB").await[0], "2599.00");
    assert_sound(&world, 1 + 2_000 + 600 + 1).await;
}
