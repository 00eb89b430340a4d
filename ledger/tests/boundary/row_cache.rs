//! The row cache of the SQLite writer: a group that was not committed leaves nothing in it.

use proto::{
    common::v1::{OperationStatus, OperationType},
    ledger::v1::*,
};
use tokio::task::JoinSet;
use tonic::Code;

use crate::{
    harness::*,
    rows::{Rows, audit},
};

async fn pay(world: &World, key: &str, amount: &str) -> Answer<CreateOperationResponse> {
    let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", amount, RUB)];
    let request = operation(OperationType::Payment, "u1", key, &legs);
    world.client.clone().create_operation(request).await
}

/// A user with 100, and a store that refuses operations by their keys: `torn...` at the write,
/// `late...` at the commit.
async fn sabotaged() -> (World, Rows) {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let rows = world.rows().await;
    for sql in [
        "CREATE TRIGGER refuses BEFORE INSERT ON postings \
         WHEN EXISTS (SELECT 1 FROM operations o WHERE o.operation_id = new.operation_id \
         AND o.idempotency_key LIKE 'torn%') \
         BEGIN SELECT RAISE(ABORT, 'refused by the store'); END",
        "CREATE TABLE _deferred (user_id TEXT REFERENCES users (user_id) DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER refuses_late AFTER INSERT ON operations WHEN new.idempotency_key LIKE 'late%' \
         BEGIN INSERT INTO _deferred VALUES ('none'); END",
    ] {
        rows.execute(sql).await.unwrap();
    }
    // From here on the ledger is the only writer, so the cache keeps all rows.
    pay(&world, "first", "1").await.unwrap();
    (world, rows)
}

fn not_written(answer: Answer<CreateOperationResponse>) {
    let status = answer.expect_err("the store refuses");
    // The store would refuse the same write again, so the status is not retriable.
    assert_eq!(status.code(), Code::Internal, "{status}");
    assert_eq!(status.message(), "Internal error");
}

// rows: R237
#[tokio::test]
async fn r237_a_failed_group_leaves_the_row_cache_as_stored() {
    for key in ["torn", "late"] {
        let (world, rows) = sabotaged().await;
        not_written(pay(&world, key, "60").await);
        assert_eq!(
            world.balance("u1:CFA-RUB").await,
            ["99.00", "0.00", "0.00", "99.00"],
            "{key}"
        );
        // This would be refused if the cache had the failed payment of 60.
        pay(&world, "rest", "99").await.unwrap();
        assert_eq!(world.balance("u2:CFA-RUB").await[0], "100.00", "{key}");
        audit(&rows, key).await;
        rows.close().await;
        let found = ledger::verify(&world.config()).await.unwrap();
        assert_eq!(found.fault, None, "{key}");
    }
}

// rows: R237
#[tokio::test]
async fn r237_a_refused_command_leaves_the_row_cache_as_stored() {
    let (world, rows) = sabotaged().await;
    let no = pay(&world, "too much", "99.01").await;
    refused(
        no,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    // Of a batch whose last operation is refused none is created.
    let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "50", RUB)];
    let both = CreateOperationsRequest {
        context: write("both"),
        operations: vec![
            item(OperationType::Payment, "u1", "one", &legs),
            item(OperationType::Payment, "u1", "two", &legs),
        ],
        ..Default::default()
    };
    world
        .client
        .clone()
        .create_operations(both)
        .await
        .unwrap_err();
    pay(&world, "rest", "99").await.unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["0.00", "0.00", "0.00", "0.00"]
    );
    audit(&rows, "after refusals").await;
    rows.close().await;
}

// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_refused_command_does_not_fail_its_group() {
    let (world, rows) = sabotaged().await;
    let mut tasks = JoinSet::new();
    for number in 0..96 {
        let mut client = world.client.clone();
        let key = match number % 8 {
            0 => format!("torn {number}"),
            4 => format!("late {number}"),
            _ => format!("paid {number}"),
        };
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
        let request = operation(OperationType::Payment, "u1", &key, &legs);
        tasks.spawn(async move { (key, client.create_operation(request).await) });
    }
    while let Some(answer) = tasks.join_next().await {
        let (key, answer) = answer.unwrap();
        if key.starts_with("paid") {
            answer.unwrap_or_else(|status| panic!("{key}: {status}"));
        } else {
            not_written(answer);
        }
    }
    // 72 of the 96 payments and the first one.
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "27.00");
    pay(&world, "rest", "27").await.unwrap();
    audit(&rows, "after groups that were refused").await;
    rows.close().await;
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!(found.fault, None);
}

// rows: R237
#[tokio::test]
async fn r237_a_failed_step_leaves_an_open_operation_as_stored() {
    let (world, rows) = sabotaged().await;
    let late = format!("0x{}", "a".repeat(64));
    rows.execute(
        "CREATE TRIGGER refuses_step AFTER UPDATE OF tx_hash ON operations WHEN new.tx_hash LIKE '0xaaaaaaaa%' \
         BEGIN INSERT INTO _deferred VALUES ('none'); END",
    )
    .await
    .unwrap();
    let legs: [Leg; 1] = [("system:reserve:CFA-RUB", "u2:CFA-RUB", "10", RUB)];
    let mut request = operation(OperationType::Deposit, "u2", "open", &legs);
    request.operation.as_mut().unwrap().awaits_chain = true;
    let created = world.client.clone().create_operation(request).await;
    let created = created.unwrap().into_inner().operation.unwrap();
    let finalize = async |key: &str, hash: &str| {
        let request = FinalizeOperationsRequest {
            context: write(key),
            operation_ids: vec![created.operation_id.clone()],
            onchain_tx_hash: hash.to_owned(),
        };
        world.client.clone().finalize_operations(request).await
    };
    let failed = finalize("first", &late).await.expect_err("refused");
    assert_eq!(failed.code(), Code::Internal, "{failed}");
    let read = world.get_operation(&created.operation_id).await;
    assert_eq!(read.operation, Some(created.clone()));

    let hash = tx_hash("included");
    let done = finalize("second", &hash).await.unwrap().into_inner();
    assert_eq!(done.finalized, 1);
    let again = finalize("third", &hash).await.unwrap().into_inner();
    assert_eq!(again.finalized, 0);
    let read = world.get_operation(&created.operation_id).await;
    let operation = read.operation.unwrap();
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert_eq!(operation.onchain_tx_hash, Some(hash));
    assert_eq!(read.postings.len(), 1);
    assert_eq!(world.balance("u2:CFA-RUB").await[0], "11.00");
    audit(&rows, "after a step that failed").await;
    rows.close().await;
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!(found.fault, None);
}

/// The batch is large: its response is built before it is durable.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_large_batch_is_answered_only_after_its_commit() {
    let (world, rows) = sabotaged().await;
    let batch = async |last: &str, others: usize| {
        let keys = (0..others).map(|number| format!("{last} {number}"));
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)];
        let operations = keys.map(|key| {
            item(
                OperationType::Payment,
                "u1",
                &key.replace("torn ", "t"),
                &legs,
            )
        });
        let bad = item(OperationType::Payment, "u1", last, &legs);
        let request = CreateOperationsRequest {
            context: write(&fresh()),
            operations: operations.chain([bad]).collect(),
            ..Default::default()
        };
        world.client.clone().create_operations(request).await
    };
    for (bad, others) in [("torn", 79), ("late", 79), ("torn", 599), ("late", 599)] {
        // First alone, then in a group that is retried one command at a time.
        let status = batch(bad, others).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        let key = fresh();
        let (first, second, single) = tokio::join!(
            batch(bad, others),
            batch(bad, others),
            pay(&world, &key, "1")
        );
        assert_eq!(first.unwrap_err().code(), Code::Internal);
        assert_eq!(second.unwrap_err().code(), Code::Internal);
        single.unwrap();
    }
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "95.00");
    let good = batch("good", 599).await.unwrap().into_inner();
    assert_eq!(good.outcomes.len(), 600);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "89.00");
    audit(&rows, "after large batches that were refused").await;
    rows.close().await;
}

/// The cache of holds contains committed rows only.
// rows: R237
#[tokio::test]
async fn r237_a_hold_whose_use_failed_is_unchanged() {
    let (world, rows) = sabotaged().await;
    let hold_id = world.hold("u1", RUB, "60").await.hold_id;
    let consume = async |key: &str| {
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "50", RUB)];
        let mut request = operation(OperationType::Payment, "u1", key, &legs);
        request.postings[0].hold_id = Some(hold_id.clone());
        world.client.clone().create_operation(request).await
    };
    not_written(consume("torn").await);
    not_written(consume("late").await);
    let hold = world.get_hold(&hold_id).await;
    assert_eq!(
        hold.remaining_amount.unwrap().amount.unwrap().value,
        "60.00"
    );
    consume("good").await.unwrap();
    refused(
        consume("over").await,
        Code::FailedPrecondition,
        "HOLD_AMOUNT_EXCEEDED",
        "Amount exceeds what remains of the hold",
    );
    // The ledger sees a change by another connection.
    rows.execute("UPDATE holds SET remaining = 0, released = 1000, status = 2")
        .await
        .unwrap();
    rows.execute("UPDATE sub_accounts SET held = 0")
        .await
        .unwrap();
    refused(
        consume("ended").await,
        Code::FailedPrecondition,
        "HOLD_NOT_ACTIVE",
        "Hold is not active",
    );
    audit(&rows, "after uses of a hold that were refused").await;
    rows.close().await;
}

/// On a runtime with several threads a single caller's command is written on the caller's thread. A
/// failed assertion there must stop the writer, not the caller.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_failed_assertion_stops_the_writer_and_not_the_caller() {
    // 300 further operations are folded on another thread.
    for others in [0, 300] {
        failed_assertion(others).await;
    }
}

async fn failed_assertion(others: usize) {
    let world = World::new().await;
    world.fund("u1", RUB, "1000").await;
    let hold_id = world.hold("u1", RUB, "1").await.hold_id;
    let call = async |key: &str| {
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
        let operations = (0..=others).map(|number| {
            let key = format!("{key} {number}");
            item(OperationType::Payment, "u1", &key, &legs)
        });
        let mut operations: Vec<_> = operations.collect();
        operations[0].postings[0].hold_id = Some(hold_id.clone());
        let request = CreateOperationsRequest {
            context: write(key),
            operations,
            ..Default::default()
        };
        world.client.clone().create_operations(request).await
    };
    let rows = world.rows().await;
    let lower = "UPDATE sub_accounts SET held = held - 1 WHERE subaccount_id = 'u1:CFA-RUB'";
    assert_eq!(rows.execute(lower).await.unwrap(), 1);
    for (key, what) in [("first", "the call"), ("next", "the next call")] {
        let status = call(key).await.expect_err(what);
        assert_eq!(status.code(), Code::Unavailable, "{what}: {status}");
    }
    let failing = world.handle.service().health.failing();
    assert!(format!("{failing:?}").contains("committer"), "{failing:?}");
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "1000.00");
    let mend = "UPDATE sub_accounts SET held = held + 1 WHERE subaccount_id = 'u1:CFA-RUB'";
    assert_eq!(rows.execute(mend).await.unwrap(), 1);
    audit(&rows, "after a failed assertion").await;
    rows.close().await;
}

/// Rows that no ledger could have written stop the writer, and health reports it.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_holds_above_held_stop_the_writer() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let hold_id = world.hold("u1", RUB, "60").await.hold_id;
    let rows = world.rows().await;
    let changed = rows
        .execute("UPDATE sub_accounts SET held = held - 1 WHERE held > 0")
        .await;
    assert_eq!(changed.unwrap(), 1);
    let status = world.consume("k1", &hold_id, amount(RUB, "10")).await;
    let status = status.expect_err("the hold is larger than what is held");
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    let failing = world.handle.service().health.failing();
    assert!(format!("{failing:?}").contains("committer"), "{failing:?}");
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "100.00");
    rows.close().await;
}
