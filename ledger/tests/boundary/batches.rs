//! CreateOperations: order of operations and hold steps, atomicity of a batch, sources.

use proto::{
    common::v1::{OperationStatus, OperationType},
    convert::to_timestamp_us,
    ledger::v1::{hold_step::Step, *},
};
use tonic::Code;

use crate::{harness::*, requests::is_alone};

const RESERVE: &str = "system:reserve:CFA-RUB";

async fn trading_hold(world: &World, id: &str, user: &str, instrument: &str, value: &str) -> Hold {
    let hold = Hold {
        hold_id: id.to_owned(),
        owner: "market".to_owned(),
        ..new_hold(user, instrument, value)
    };
    world
        .open_hold(&fresh(), hold)
        .await
        .unwrap()
        .into_inner()
        .hold
        .unwrap()
}

fn split(
    parent: &str,
    child: &str,
    value: &str,
    instrument: &str,
    before_operation: u32,
) -> HoldStep {
    HoldStep {
        step: Some(Step::Split(SplitHold {
            parent_hold_id: parent.to_owned(),
            hold_id: child.to_owned(),
            amount: amount(instrument, value),
            reason: format!("Order {child}"),
        })),
        before_operation,
    }
}

fn return_to_parent_of(child: &str, value: Option<&str>, before_operation: u32) -> HoldStep {
    HoldStep {
        step: Some(Step::ReturnToParent(ReturnHold {
            hold_id: child.to_owned(),
            amount: value.and_then(|value| amount(RUB, value)),
            reason: "Order closed".to_owned(),
        })),
        before_operation,
    }
}

fn grow(hold: &str, value: &str) -> HoldStep {
    HoldStep {
        step: Some(Step::Grow(GrowHold {
            hold_id: hold.to_owned(),
            amount: amount(RUB, value),
        })),
        before_operation: 0,
    }
}

fn spend(hold: &str, value: &str) -> HoldStep {
    HoldStep {
        step: Some(Step::Spend(SpendHold {
            hold_id: hold.to_owned(),
            amount: amount(RUB, value),
        })),
        before_operation: 0,
    }
}

fn paid_from(mut item: NewOperation, hold_id: &str) -> NewOperation {
    item.postings[0].hold_id = Some(hold_id.to_owned());
    item
}

/// The operations of one trade as settlement posts them: money and units through the reserves with
/// unsettled credits, and the fee (T01, T05).
fn trade(id: &str, value: &str, quantity: &str, fee: &str) -> Vec<NewOperation> {
    let mut buy = item(
        OperationType::TradeBuy,
        "buyer",
        id,
        &[
            ("buyer:CFA-RUB", RESERVE, value, RUB),
            ("system:reserve:CFA-EQ", "buyer:BOND-1", quantity, BOND),
        ],
    );
    buy.postings[0].hold_id = Some("order-b".to_owned());
    buy.postings[1].unsettled = true;
    let mut sell = item(
        OperationType::TradeSell,
        "seller",
        &format!("{id}:sell"),
        &[
            (RESERVE, "seller:CFA-RUB", value, RUB),
            ("seller:BOND-1", "system:reserve:CFA-EQ", quantity, BOND),
        ],
    );
    sell.postings[0].unsettled = true;
    sell.postings[1].hold_id = Some("order-s".to_owned());
    let fee = item(
        OperationType::Fee,
        "buyer",
        &format!("{id}:fee"),
        &[("buyer:CFA-RUB", "system:fees:CFA-RUB", fee, RUB)],
    );
    vec![buy, sell, paid_from(fee, "order-b-fee")]
}

fn batch(
    source: &str,
    first: u64,
    through: u64,
    operations: Vec<NewOperation>,
    hold_steps: Vec<HoldStep>,
) -> CreateOperationsRequest {
    CreateOperationsRequest {
        context: write(&format!("{source}:{first}")),
        operations,
        hold_steps,
        source: source.to_owned(),
        first_sequence: first,
        through_sequence: through,
        ..Default::default()
    }
}

// rows: R190 R191 R214
#[tokio::test]
async fn dvp_of_two_fills_splits_consumes_returns_and_settles() {
    let world = World::new().await;
    world.fund("buyer", RUB, "2000").await;
    world.fund("seller", BOND, "10").await;
    trading_hold(&world, "pool-b", "buyer", RUB, "1500").await;
    trading_hold(&world, "pool-s", "seller", BOND, "10").await;
    // An order for 10 at 105 is filled with 4 at 100 and 6 at 101. The rest of the reserve returns
    // to the parent hold, not to available.
    let mut operations = trade("t1", "400", "4", "0.40");
    operations.extend(trade("t2", "606", "6", "0.61"));
    let steps = vec![
        split("pool-b", "order-b", "1050", RUB, 0),
        split("pool-b", "order-b-fee", "1.05", RUB, 0),
        split("pool-s", "order-s", "10", BOND, 0),
        return_to_parent_of("order-b", Some("20"), 3),
        return_to_parent_of("order-b", None, 6),
        return_to_parent_of("order-b-fee", None, 6),
        return_to_parent_of("order-s", None, 6),
    ];
    let request = batch("node-1", 1, 20, operations, steps);
    let answer = world
        .client
        .clone()
        .create_operations(request.clone())
        .await
        .unwrap()
        .into_inner();
    assert!(!answer.replayed && answer.outcomes.len() == 6);
    assert_eq!(
        world.balance("buyer:CFA-RUB").await,
        ["992.99", "492.99", "0.00", "500.00"]
    );
    assert_eq!(world.balance("buyer:BOND-1").await, ["10", "0", "10", "0"]);
    assert_eq!(
        world.balance("seller:CFA-RUB").await,
        ["1006.00", "0.00", "1006.00", "0.00"]
    );
    assert_eq!(world.balance("seller:BOND-1").await, ["0", "0", "0", "0"]);
    assert_eq!(world.balance("system:fees:CFA-RUB").await[0], "1.01");
    assert_eq!(world.balance("system:reserve:BOND-1").await[0], "-10");
    let pool = world.get_hold("pool-b").await;
    assert_eq!(
        (pool.status(), pool.remaining_amount.clone()),
        (HoldStatus::Active, amount(RUB, "492.99"))
    );
    assert_eq!(pool.returned_by_children.unwrap().value, "44.04");
    let order = world.get_hold("order-b").await;
    assert_eq!(
        (
            order.status(),
            order.owner.as_str(),
            order.parent_hold_id.as_deref()
        ),
        (HoldStatus::Consumed, "market", Some("pool-b"))
    );
    assert_eq!(order.reason, "Order order-b");
    let units = world.get_hold("pool-s").await;
    assert_eq!(
        (units.status(), units.remaining_amount),
        (HoldStatus::Active, amount(BOND, "0"))
    );
    assert_eq!(
        world.get_hold("order-s").await.status(),
        HoldStatus::Consumed
    );
    world.assert_books_balance().await;

    // A repeat of the batch after a restart returns the stored result and moves nothing.
    let world = world.restart().await;
    let again = world
        .client
        .clone()
        .create_operations(request)
        .await
        .unwrap();
    assert!(is_replay(&again));
    let again = again.into_inner();
    assert!(again.replayed && again.outcomes.iter().all(|outcome| outcome.replayed));
    let ids = |answer: &CreateOperationsResponse| -> Vec<_> {
        answer
            .outcomes
            .iter()
            .map(|outcome| outcome.operation.clone().unwrap().operation_id)
            .collect()
    };
    assert_eq!(ids(&again), ids(&answer));
    assert_eq!(world.balance("buyer:CFA-RUB").await[0], "992.99");

    let finalize = FinalizeOperationsRequest {
        context: write("f1"),
        operation_ids: ids(&answer),
        onchain_tx_hash: tx_hash("t1"),
    };
    let moved = world
        .client
        .clone()
        .finalize_operations(finalize.clone())
        .await
        .unwrap()
        .into_inner()
        .finalized;
    assert_eq!(moved, 6);
    assert_eq!(
        world
            .client
            .clone()
            .finalize_operations(finalize)
            .await
            .unwrap()
            .into_inner()
            .finalized,
        0
    );
    assert_eq!(world.balance("buyer:BOND-1").await, ["10", "0", "0", "10"]);
    assert_eq!(
        world.balance("seller:CFA-RUB").await,
        ["1006.00", "0.00", "0.00", "1006.00"]
    );
    let operation = world
        .get_operation(&ids(&answer)[0])
        .await
        .operation
        .unwrap();
    assert_eq!(
        (operation.status(), operation.onchain_tx_hash),
        (OperationStatus::Finalized, Some(tx_hash("t1")))
    );
    world.assert_books_balance().await;
}

// rows: R214
#[tokio::test]
async fn source_advances_without_gap_and_refused_batch_does_not_move_it() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let pay = |key: &str, value: &str| {
        vec![item(
            OperationType::Payment,
            "u1",
            key,
            &[("u1:CFA-RUB", "u2:CFA-RUB", value, RUB)],
        )]
    };
    let position = || async {
        let request = GetSourcePositionRequest {
            context: None,
            source: "node-1".to_owned(),
        };
        world
            .client
            .clone()
            .get_source_position(request)
            .await
            .unwrap()
            .into_inner()
            .through_sequence
    };
    let send = |request: CreateOperationsRequest| async {
        world.client.clone().create_operations(request).await
    };
    assert_eq!(position().await, 0);
    let gap = "Batch does not follow its source, expected first sequence 1";
    refused(
        send(batch("node-1", 2, 5, pay("a", "1"), vec![])).await,
        Code::FailedPrecondition,
        "SOURCE_GAP",
        gap,
    );
    let answer = send(batch("node-1", 1, 5, pay("a", "11"), vec![])).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    assert_eq!(position().await, 0);
    send(batch("node-1", 1, 5, pay("a", "4"), vec![]))
        .await
        .unwrap();
    assert_eq!(position().await, 5);
    let conflict = "Batch differs from the one stored for these sequences";
    refused(
        send(batch("node-1", 1, 5, pay("a", "5"), vec![])).await,
        Code::FailedPrecondition,
        "SOURCE_CONFLICT",
        conflict,
    );
    let overlap = "Batch does not follow its source, expected first sequence 6";
    refused(
        send(batch("node-1", 4, 7, pay("b", "1"), vec![])).await,
        Code::FailedPrecondition,
        "SOURCE_GAP",
        overlap,
    );
    // An empty batch still advances the position.
    send(batch("node-1", 6, 9, vec![], vec![])).await.unwrap();
    assert_eq!(position().await, 9);
    assert!(
        send(batch("node-1", 1, 5, pay("a", "4"), vec![]))
            .await
            .unwrap()
            .into_inner()
            .replayed
    );
    send(batch("node-2", 1, 1, pay("c", "1"), vec![]))
        .await
        .unwrap();
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "5.00");
    let independent = CreateOperationsRequest {
        mode: BatchMode::Independent as i32,
        ..batch("node-1", 10, 11, pay("d", "1"), vec![])
    };
    assert_eq!(
        send(independent).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

// rows: R214
#[tokio::test]
async fn d19_refusal_refuses_the_whole_batch_and_names_its_place() {
    use tonic_types::StatusExt;
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    trading_hold(&world, "pool", "u1", RUB, "5").await;
    let pay = |key: &str, value: &str| {
        item(
            OperationType::Payment,
            "u1",
            key,
            &[("u1:CFA-RUB", "u2:CFA-RUB", value, RUB)],
        )
    };
    let plain = |operations, hold_steps| CreateOperationsRequest {
        context: write(&fresh()),
        operations,
        hold_steps,
        ..Default::default()
    };
    let send = |request: CreateOperationsRequest| async {
        world.client.clone().create_operations(request).await
    };
    let fact = |status: &tonic::Status, name: &str| {
        status
            .get_details_error_info()
            .unwrap()
            .metadata
            .get(name)
            .cloned()
    };
    let status = send(plain(
        vec![pay("a", "2"), pay("b", "4")],
        vec![split("pool", "child", "1", RUB, 0)],
    ))
    .await
    .unwrap_err();
    assert_eq!(
        (status.message(), fact(&status, "operation_index")),
        ("Insufficient balance", Some("1".to_owned()))
    );
    let status = send(plain(
        vec![pay("a", "2")],
        vec![
            split("pool", "c1", "1", RUB, 0),
            split("pool", "c2", "5", RUB, 9),
        ],
    ))
    .await
    .unwrap_err();
    assert_eq!(status.message(), "Amount exceeds what remains of the hold");
    assert_eq!(fact(&status, "hold_step_index"), Some("1".to_owned()));
    let status = send(plain(vec![pay("a", "2"), pay("b", "0.001")], vec![]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status
            .message()
            .starts_with("operations[1].postings[0].amount.amount"),
        "{}",
        status.message()
    );
    let status = send(plain(vec![pay("a", "2")], vec![HoldStep::default()]))
        .await
        .unwrap_err();
    assert_eq!(status.message(), "hold_steps[0].step: is required");
    assert_eq!(
        send(plain(vec![pay("", "2")], vec![]))
            .await
            .unwrap_err()
            .code(),
        Code::InvalidArgument
    );
    assert_eq!(
        send(plain(vec![], vec![])).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["10.00", "5.00", "0.00", "5.00"]
    );
    assert_eq!(
        world.get_hold("pool").await.split_off.unwrap().value,
        "0.00"
    );
}

#[tokio::test]
async fn d19_independent_operations_and_repeats_of_their_keys() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let pay = |key: &str, value: &str| {
        item(
            OperationType::Payment,
            "u1",
            key,
            &[("u1:CFA-RUB", "u2:CFA-RUB", value, RUB)],
        )
    };
    // The same key twice in one batch is one operation.
    let request = CreateOperationsRequest {
        context: write("batch-1"),
        operations: vec![
            pay("a", "4"),
            pay("b", "7"),
            pay("a", "4"),
            pay("c", "x"),
            pay("d", "6"),
        ],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    let first = world
        .client
        .clone()
        .create_operations(request.clone())
        .await
        .unwrap()
        .into_inner();
    let reasons: Vec<_> = first
        .outcomes
        .iter()
        .map(|outcome| outcome.error_reason.as_str())
        .collect();
    assert_eq!(
        reasons,
        ["", "INSUFFICIENT_BALANCE", "", "INVALID_ARGUMENT", ""]
    );
    assert_eq!(first.outcomes[1].error_message, "Insufficient balance");
    assert!(first.outcomes[2].replayed);
    assert_eq!(first.outcomes[0].operation, first.outcomes[2].operation);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "0.00");
    world.fund("u1", RUB, "100").await;
    let again = world
        .client
        .clone()
        .create_operations(request)
        .await
        .unwrap();
    assert!(is_replay(&again));
    let again = again.into_inner();
    let ids = |answer: &CreateOperationsResponse| -> Vec<_> {
        answer
            .outcomes
            .iter()
            .map(|outcome| {
                outcome
                    .operation
                    .clone()
                    .map(|operation| operation.operation_id)
            })
            .collect()
    };
    assert_eq!(ids(&again), ids(&first));
    // The call's key determines the answer, even of a different request.
    let other = CreateOperationsRequest {
        context: write("batch-1"),
        operations: vec![pay("z", "1")],
        ..Default::default()
    };
    let other = world
        .client
        .clone()
        .create_operations(other)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(ids(&other), ids(&first));
    // The refusal is bound to the operation's key in a single call too.
    let alone = operation(
        OperationType::Payment,
        "u1",
        "b",
        &[("u1:CFA-RUB", "u2:CFA-RUB", "7", RUB)],
    );
    let answer = world.client.clone().create_operation(alone).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "100.00");

    // Under another key of the call each operation's own key determines its outcome, refusals
    // included. Operations with new keys are created.
    let again = CreateOperationsRequest {
        context: write("batch-2"),
        operations: vec![pay("b", "7"), pay("e", "0.01"), pay("a", "4")],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    world.fund("u1", RUB, "100").await;
    let second = world.client.clone().create_operations(again).await;
    let reasons: Vec<_> = (second.unwrap().into_inner().outcomes.iter())
        .map(|outcome| outcome.error_reason.clone())
        .collect();
    assert_eq!(reasons, ["INSUFFICIENT_BALANCE", "", ""]);
    assert_eq!(world.balance("u2:CFA-RUB").await[0], "10.01");
}

// rows: R214
/// The lookup of many keys is skipped if no stored key is between the first and the last of them.
/// The keys here are before, between, equal to and after stored keys.
#[tokio::test]
async fn t12_keys_are_found_at_any_position_among_stored_keys() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.fund("u2", RUB, "100").await;
    let pay = |user: &str, key: &str, value: &str| {
        let from = format!("{user}:CFA-RUB");
        item(
            OperationType::Payment,
            user,
            key,
            &[(&from, "u3:CFA-RUB", value, RUB)],
        )
    };
    let send = async |call: &str, operations: Vec<NewOperation>| {
        let request = CreateOperationsRequest {
            context: write(call),
            operations,
            mode: BatchMode::Independent as i32,
            ..Default::default()
        };
        let answer = world.client.clone().create_operations(request).await;
        let said = |outcome: OperationOutcome| (outcome.replayed, outcome.error_reason);
        let outcomes = answer.unwrap().into_inner().outcomes.into_iter();
        outcomes.map(said).collect::<Vec<_>>()
    };
    let none = || (false, String::new());
    let poor = |replayed| (replayed, "INSUFFICIENT_BALANCE".to_owned());
    // Too few keys for the range check. The greatest key belongs to another user, and one key is
    // refused.
    let first = ["b", "d", "Я"].map(|key| pay("u1", key, "1"));
    let first = [&first[..], &[pay("u1", "m", "1000"), pay("u2", "я", "1")]].concat();
    assert_eq!(
        send("first", first).await,
        [none(), none(), none(), poor(false), none()]
    );
    let mut then: Vec<NewOperation> = ["a", "b", "c", "d", "e", "m", "n", "Я", "я", "\u{10FFFF}"]
        .map(|key| pay("u1", key, "1"))
        .to_vec();
    then.push(pay("u2", "я", "1"));
    let there = [
        false, true, false, true, false, true, false, true, false, false, true,
    ];
    let expected = there.iter().enumerate().map(|(place, there)| match place {
        5 => poor(true),
        _ => (*there, String::new()),
    });
    assert_eq!(
        send("then", then.clone()).await,
        expected.collect::<Vec<_>>()
    );
    let again = send("again", then).await;
    assert!(again.iter().all(|(replayed, _)| *replayed));
    // First no stored key is between them, then only the two outermost keys are stored.
    let side_by_side: Vec<NewOperation> = (10..20)
        .map(|number| pay("u1", &format!("k{number}"), "1"))
        .collect();
    let ends = vec![side_by_side[0].clone(), side_by_side[9].clone()];
    assert_eq!(send("ends", ends).await, [none(), none()]);
    let made = send("side by side", side_by_side.clone()).await;
    let replayed: Vec<bool> = made.iter().map(|(replayed, _)| *replayed).collect();
    assert_eq!(replayed, [&[true][..], &[false; 8], &[true]].concat());
    let inner: Vec<NewOperation> = (0..9)
        .map(|number| pay("u1", &format!("k11{number}"), "1"))
        .collect();
    assert!(
        send("inner", inner.clone())
            .await
            .iter()
            .all(|(replayed, _)| !replayed)
    );
    assert!(
        send("inner again", inner)
            .await
            .iter()
            .all(|(replayed, _)| *replayed)
    );
    assert_eq!(world.balance("u3:CFA-RUB").await[0], "29.00");
    world.assert_books_balance().await;
}

// rows: R214 R329
#[tokio::test]
async fn t12_a_repeated_batch_returns_its_first_outcomes() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let pay = |key: &str, from: &str, value: &str| {
        let legs = [(from, "u2:CFA-RUB", value, RUB)];
        item(OperationType::Payment, "u1", key, &legs)
    };
    let mut known = pay("known", "u1:CFA-RUB", "1");
    known.operation.as_mut().unwrap().external_ref = Some("pay-1".to_owned());
    let mut taken = known.clone();
    taken.operation.as_mut().unwrap().idempotency_key = "taken".to_owned();
    let mut unknown = pay("unknown", "u1:CFA-RUB", "1");
    unknown.postings = postings(&[("system:reserve:NEW-1", "u1:NEW-1", "1", "NEW-1")]);
    let request = CreateOperationsRequest {
        context: write("batch"),
        operations: vec![
            known,
            pay("poor", "u1:CFA-RUB", "100"),
            pay("bad", "u1:CFA-RUB", "x"),
            pay("unknown", "u9:CFA-RUB", "1"),
            taken,
            unknown,
        ],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    let said = |answer: &CreateOperationsResponse| -> Vec<(String, String)> {
        let said = |outcome: &OperationOutcome| {
            (outcome.error_reason.clone(), outcome.error_message.clone())
        };
        answer.outcomes.iter().map(said).collect()
    };
    let first = { world.client.clone() }
        .create_operations(request.clone())
        .await;
    let first = first.unwrap().into_inner();
    let reasons: Vec<String> = said(&first).into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(
        reasons,
        [
            "",
            "INSUFFICIENT_BALANCE",
            "INVALID_ARGUMENT",
            "SUB_ACCOUNT_NOT_FOUND",
            "OPERATION_EXISTS",
            "INSTRUMENT_NOT_FOUND",
        ]
    );
    assert!(first.outcomes.iter().all(|outcome| !outcome.replayed));

    // Now each operation could succeed. The stored outcomes remain, also after a restart.
    world.fund("u1", RUB, "1000").await;
    world.fund("u9", RUB, "10").await;
    let world = world.restart().await;
    let again = { world.client.clone() }
        .create_operations(request.clone())
        .await;
    let again = again.unwrap();
    assert!(is_replay(&again));
    let again = again.into_inner();
    assert_eq!(said(&again), said(&first));
    assert!(again.outcomes.iter().all(|outcome| outcome.replayed));
    assert_eq!(again.outcomes[0].operation, first.outcomes[0].operation);

    // An older release stored answers without texts.
    let rows = world.rows().await;
    let old = r#"{"batch":[[null,"INVALID_ARGUMENT"],[null,"SUB_ACCOUNT_NOT_FOUND"],[null,"INSUFFICIENT_BALANCE"]]}"#;
    let sql = format!("UPDATE answers SET outcome = '{old}' WHERE idempotency_key = 'batch'");
    assert_eq!(rows.tamper(&sql).await.unwrap(), 1);
    rows.close().await;
    let world = world.restart().await;
    let again = { world.client.clone() }.create_operations(request).await;
    let texts: Vec<String> = said(&again.unwrap().into_inner())
        .into_iter()
        .map(|(_, text)| text)
        .collect();
    assert_eq!(
        texts,
        [
            "operation: was refused when the batch was first sent",
            "Sub-account not found",
            "Insufficient balance",
        ]
    );
}

// rows: R214 R329
#[tokio::test]
async fn t12_a_repeated_refusal_is_marked_and_mismatches_are_counted() {
    if !is_alone("batches::t12_a_repeated_refusal_is_marked_and_mismatches_are_counted") {
        return;
    }
    let metrics = rpc::metrics_init();
    let mismatches = || -> u64 {
        let text = metrics.render();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("ledger_idempotency_mismatches_total "));
        line.map_or(0, |count| count.parse().unwrap())
    };
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let legs = |value| [("u1:CFA-RUB", "u2:CFA-RUB", value, RUB)];
    let alone = |value| operation(OperationType::Payment, "u1", "poor", &legs(value));
    let first = { world.client.clone() }.create_operation(alone("50")).await;
    let first = first.unwrap_err();
    assert!(first.metadata().get("idempotent-replayed").is_none());
    let is_again = |status: &tonic::Status| {
        assert_eq!(status.message(), "Insufficient balance");
        status
            .metadata()
            .get("idempotent-replayed")
            .is_some_and(|value| value == "true")
    };
    let again = { world.client.clone() }.create_operation(alone("50")).await;
    assert!(is_again(&again.unwrap_err()));
    let reply = crate::requests::ask(&world, "ledger.createOperation", &alone("50")).await;
    assert_eq!(reply.headers["error-reason"], "INSUFFICIENT_BALANCE");
    assert_eq!(reply.headers["idempotent-replayed"], "true");
    let before = mismatches();
    let other = { world.client.clone() }.create_operation(alone("1")).await;
    assert!(is_again(&other.unwrap_err()));
    assert_eq!(mismatches(), before + 1, "of the call");

    // A batch with two known keys: one operation was refused, one was created.
    let pay = |key: &str, value| item(OperationType::Payment, "u1", key, &legs(value));
    { world.client.clone() }
        .create_operations(CreateOperationsRequest {
            context: write("batch-1"),
            operations: vec![pay("made", "1")],
            ..Default::default()
        })
        .await
        .unwrap();
    let before = mismatches();
    let request = CreateOperationsRequest {
        context: write("batch-2"),
        operations: vec![pay("poor", "2"), pay("made", "2"), pay("new", "2")],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    let answer = { world.client.clone() }
        .create_operations(request)
        .await
        .unwrap();
    assert!(!is_replay(&answer), "the call is new");
    let outcomes = answer.into_inner().outcomes;
    let replayed: Vec<bool> = outcomes.iter().map(|outcome| outcome.replayed).collect();
    assert_eq!(replayed, [true, true, false]);
    assert_eq!(outcomes[0].error_reason, "INSUFFICIENT_BALANCE");
    assert_eq!(mismatches(), before + 2, "of both operations");
    // In an atomic batch the stored refusal of a key refuses the batch.
    let before = mismatches();
    let request = CreateOperationsRequest {
        context: write("batch-3"),
        operations: vec![pay("poor", "3")],
        ..Default::default()
    };
    let refused = { world.client.clone() }.create_operations(request).await;
    assert!(is_again(&refused.unwrap_err()));
    assert_eq!(mismatches(), before + 1, "of the refused one");
    // The answer to a repeated batch with a source comes from the keys of its operations.
    let of_log = |value| CreateOperationsRequest {
        context: write("batch-4"),
        operations: vec![pay("of-log", value)],
        source: "log".to_owned(),
        first_sequence: 1,
        through_sequence: 2,
        ..Default::default()
    };
    { world.client.clone() }
        .create_operations(of_log("1"))
        .await
        .unwrap();
    let again = { world.client.clone() }
        .create_operations(of_log("1"))
        .await
        .unwrap();
    assert!(is_replay(&again) && again.into_inner().outcomes[0].replayed);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "6.00");
    world.assert_books_balance().await;
}

/// Settlement spends the hold of a trade that is bust before it is posted.
#[tokio::test]
async fn r186_a_spent_hold_is_as_after_a_payment_and_its_money_is_available() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    trading_hold(&world, "pool", "u1", RUB, "10").await;
    let steps = vec![
        split("pool", "child", "3", RUB, 0),
        spend("child", "2"),
        spend("child", "1"),
    ];
    let mut client = world.client.clone();
    let spent = batch("node-1", 1, 1, vec![], steps);
    client.create_operations(spent).await.unwrap();
    let child = world.get_hold("child").await;
    assert_eq!(child.status(), HoldStatus::Consumed);
    // The market counts what was released to it from this sum.
    let released = world.get_hold("pool").await.released;
    assert_eq!(released.map(|sum| sum.value).as_deref(), Some("0.00"));
    let balance = world.balance("u1:CFA-RUB").await;
    assert_eq!(balance, ["10.00", "7.00", "0.00", "3.00"]);
    // An order that is still open may need the hold again.
    let grown = batch("node-1", 2, 2, vec![], vec![grow("child", "2")]);
    client.create_operations(grown).await.unwrap();
    let more = batch("node-1", 3, 3, vec![], vec![spend("child", "2.01")]);
    let refused = client.create_operations(more).await.unwrap_err();
    assert_eq!(
        rpc::status::reason(&refused).as_deref(),
        Some("HOLD_AMOUNT_EXCEEDED")
    );
    // A hold with a destination pays that and no one else.
    let paying = Hold {
        destination_subaccount_id: Some(RESERVE.to_owned()),
        hold_id: "redemption-1".to_owned(),
        ..new_hold("u1", RUB, "1")
    };
    world.open_hold("h1", paying).await.unwrap();
    let request = batch("node-1", 3, 3, vec![], vec![spend("redemption-1", "1")]);
    let refused = client.create_operations(request).await.unwrap_err();
    let text = "hold_steps[0].spend.hold_id: is a hold with a destination";
    assert_eq!(refused.message(), text);
    world.assert_books_balance().await;
}

#[tokio::test]
async fn consumed_child_hold_may_grow_and_ended_hold_returns_zero() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    trading_hold(&world, "pool", "u1", RUB, "10").await;
    let pay = |key: &str, value: &str| {
        paid_from(
            item(
                OperationType::Payment,
                "u1",
                key,
                &[("u1:CFA-RUB", "u2:CFA-RUB", value, RUB)],
            ),
            "child",
        )
    };
    let send =
        |first, operations, steps| async move { batch("node-1", first, first, operations, steps) };
    let steps = vec![split("pool", "child", "3", RUB, 0)];
    world
        .client
        .clone()
        .create_operations(send(1, vec![pay("a", "3")], steps).await)
        .await
        .unwrap();
    assert_eq!(world.get_hold("child").await.status(), HoldStatus::Consumed);
    // Returning the remainder of an ended hold does nothing.
    world
        .client
        .clone()
        .create_operations(send(2, vec![], vec![return_to_parent_of("child", None, 0)]).await)
        .await
        .unwrap();
    let steps = vec![
        grow("child", "2"),
        return_to_parent_of("child", Some("1"), 1),
        return_to_parent_of("child", None, 1),
    ];
    world
        .client
        .clone()
        .create_operations(send(3, vec![], steps).await)
        .await
        .unwrap();
    let child = world.get_hold("child").await;
    assert_eq!(
        (child.status(), child.released.unwrap().value),
        (HoldStatus::Consumed, "2.00".to_owned())
    );
    // After the parent has ended, the remainder of its children returns to available.
    let steps = vec![split("pool", "late", "2", RUB, 0)];
    world
        .client
        .clone()
        .create_operations(send(4, vec![], steps).await)
        .await
        .unwrap();
    world.release("r1", "pool").await.unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["7.00", "2.00", "0.00", "5.00"]
    );
    let answer = world
        .client
        .clone()
        .create_operations(send(5, vec![], vec![grow("late", "1")]).await)
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    world
        .client
        .clone()
        .create_operations(send(5, vec![], vec![return_to_parent_of("late", None, 0)]).await)
        .await
        .unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["7.00", "0.00", "0.00", "7.00"]
    );
    assert_eq!(world.get_hold("late").await.status(), HoldStatus::Released);
    world.assert_books_balance().await;
}

// rows: R200 R214
/// A batch derives from a log and cannot be changed: a step without an amount must do nothing on a
/// hold that expired before the batch came, or the source stops for ever.
#[tokio::test]
async fn a_step_without_an_amount_does_nothing_on_an_expired_hold() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let mut pool = Hold {
        hold_id: "pool".to_owned(),
        owner: "market".to_owned(),
        ..new_hold("u1", RUB, "10")
    };
    pool.expires_at = Some(to_timestamp_us(START_US + 1_000_000));
    world.open_hold("pool", pool).await.unwrap();
    let mut client = world.client.clone();
    let steps = vec![split("pool", "child", "3", RUB, 0)];
    let made = client.create_operations(batch("node-1", 1, 1, vec![], steps));
    made.await.unwrap();
    world.clock.advance_us(1_000_000);
    let shrink = |value: Option<&str>| HoldStep {
        step: Some(Step::Shrink(ShrinkHold {
            hold_id: "pool".to_owned(),
            amount: value.and_then(|value| amount(RUB, value)),
            reason: "Hold closed".to_owned(),
        })),
        before_operation: 0,
    };
    // The batch itself finds the holds expired, the next one after it.
    for sequence in [2, 3] {
        let steps = vec![shrink(None), return_to_parent_of("child", None, 0)];
        let legs = [(RESERVE, "u2:CFA-RUB", "1", RUB)];
        let paid = item(OperationType::Deposit, "u2", &fresh(), &legs);
        let sent = batch("node-1", sequence, sequence, vec![paid], steps);
        client.create_operations(sent).await.unwrap();
        assert_eq!(world.get_hold("pool").await.status(), HoldStatus::Expired);
        assert_eq!(world.get_hold("child").await.status(), HoldStatus::Expired);
    }
    // With an amount the step is a claim on the hold, and is refused.
    let answer = client
        .create_operations(batch("node-1", 4, 4, vec![], vec![shrink(Some("1"))]))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["10.00", "0.00", "0.00", "10.00"]
    );
    world.assert_books_balance().await;
}

// rows: R214
/// A stored refusal with an unknown reason is a damaged row: an error, never another refusal.
#[tokio::test]
async fn r214_a_damaged_stored_refusal_is_an_error() {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "5", RUB)];
    let alone = operation(OperationType::Payment, "u1", "poor", &legs);
    let answer = { world.client.clone() }
        .create_operation(alone.clone())
        .await;
    assert_eq!(answer.unwrap_err().message(), "Insufficient balance");
    let several = CreateOperationsRequest {
        context: write("batch"),
        operations: vec![item(OperationType::Payment, "u1", "poor-too", &legs)],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    let answer = { world.client.clone() }
        .create_operations(several.clone())
        .await;
    answer.unwrap();

    let rows = world.rows().await;
    let sql = "UPDATE answers SET outcome = REPLACE(outcome, 'INSUFFICIENT_BALANCE', 'NO_SUCH_REASON') \
               WHERE idempotency_key IN ('poor', 'batch')";
    assert_eq!(rows.tamper(sql).await.unwrap(), 2);
    rows.close().await;
    let world = world.restart().await;
    let mut client = world.client.clone();
    let status = client.create_operation(alone).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status}");
    let status = client.create_operations(several).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status}");
    // The same operation in another batch reads the damaged refusal of its own key.
    let other = CreateOperationsRequest {
        context: write("other"),
        operations: vec![item(OperationType::Payment, "u1", "poor", &legs)],
        mode: BatchMode::Independent as i32,
        ..Default::default()
    };
    let status = client.create_operations(other).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status}");
    // Other writes continue.
    world.fund("u1", RUB, "1").await;
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "2.00");
}

/// A batch of a size that settlement uses. This is no measurement.
#[tokio::test]
async fn a_batch_of_six_hundred_operations_is_one_transaction() {
    let world = World::new().await;
    world.fund("u1", RUB, "600").await;
    let operations: Vec<_> = (0..600)
        .map(|n| {
            item(
                OperationType::Payment,
                "u1",
                &format!("p{n}"),
                &[("u1:CFA-RUB", &format!("v{}:CFA-RUB", n % 7), "1", RUB)],
            )
        })
        .collect();
    let answer = world
        .client
        .clone()
        .create_operations(batch("node-1", 1, 600, operations, vec![]))
        .await
        .unwrap();
    assert_eq!(answer.into_inner().outcomes.len(), 600);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "0.00");
    world.assert_books_balance().await;
}

// rows: R188
/// The full check compares these with the trades of the CFA service.
#[tokio::test]
async fn r188_operations_are_found_by_reference_and_sources_have_their_position() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
    let mut sold = item(OperationType::TradeSell, "u1", "sold", &legs);
    sold.operation.as_mut().unwrap().external_ref = Some("trade-1".to_owned());
    let request = batch("node-1", 1, 7, vec![sold], vec![]);
    let mut client = world.client.clone();
    client.create_operations(request).await.unwrap();

    let mut rows = ledger::ReferencedOperations::open(&world.config())
        .await
        .unwrap();
    let asked = ["trade-1", "trade-2"];
    let sold = rows.known(types::OperationType::TradeSell, &asked).await;
    assert!(sold.unwrap().into_iter().eq(["trade-1".to_owned()]));
    let bought = rows.known(types::OperationType::TradeBuy, &asked).await;
    assert!(bought.unwrap().is_empty());
    assert_eq!(rows.applied_through("node-1").await.unwrap(), 7);
    assert_eq!(rows.applied_through("node-2").await.unwrap(), 0);
    let page = rows.next_page().await.unwrap();
    let found = page.iter().find(|row| row.reference == "trade-1").unwrap();
    assert_eq!(found.kind, Some(types::OperationType::TradeSell));
    assert!(!found.is_final && found.tx_hash.is_empty());
    assert_eq!(found.amounts, [(RUB.to_owned(), 100)]);
    rows.close().await.unwrap();
}
