//! What the writer of the SQLite file remembers of sub-accounts and holds from one group to the
//! next: a group that did not come about is not among it.

use proto::{common::v1::OperationType, ledger::v1::*};
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

/// A user with 100, and a store that refuses operations by their keys: `torn...` where they are
/// written, `late...` when they are committed.
async fn sabotaged() -> (World, Rows) {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let rows = world.rows().await;
    for sql in [
        "CREATE TRIGGER refuses BEFORE INSERT ON postings \
         WHEN EXISTS (SELECT 1 FROM operations o WHERE o.operation_id = new.operation_id AND o.idempotency_key LIKE 'torn%') \
         BEGIN SELECT RAISE(ABORT, 'refused by the store'); END",
        "CREATE TABLE _owed (user_id TEXT REFERENCES users (user_id) DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER refuses_late AFTER INSERT ON operations WHEN new.idempotency_key LIKE 'late%' \
         BEGIN INSERT INTO _owed VALUES ('nobody'); END",
    ] {
        rows.execute(sql).await.unwrap();
    }
    // From here on nobody else writes, so that everything is remembered.
    pay(&world, "first", "1").await.unwrap();
    (world, rows)
}

fn not_written(answer: Answer<CreateOperationResponse>) {
    let status = answer.expect_err("the store refuses");
    // It will refuse the same write again, so nobody is asked to come back with it.
    assert_eq!(status.code(), Code::Internal, "{status}");
    assert_eq!(status.message(), "Internal error");
}

// rows: R237
#[tokio::test]
async fn r237_a_group_that_the_store_refused_leaves_the_next_one_what_the_file_has() {
    for key in ["torn", "late"] {
        let (world, rows) = sabotaged().await;
        not_written(pay(&world, key, "60").await);
        assert_eq!(
            world.balance("u1:CFA-RUB").await,
            ["99.00", "0.00", "0.00", "99.00"],
            "{key}"
        );
        // Were the 60 remembered, this would be refused.
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
async fn r237_a_refused_command_leaves_the_next_group_what_the_file_has() {
    let (world, rows) = sabotaged().await;
    let no = pay(&world, "too much", "99.01").await;
    refused(
        no,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    // A call of several, of which the last cannot be done: none is.
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
async fn r237_one_that_the_store_refuses_spoils_nobody_who_came_with_it() {
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
    // 72 of 96, and the first.
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "27.00");
    pay(&world, "rest", "27").await.unwrap();
    audit(&rows, "after groups that were refused").await;
    rows.close().await;
    let found = ledger::verify(&world.config()).await.unwrap();
    assert_eq!(found.fault, None);
}

/// A large batch, whose answer is made before it is durable.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_large_batch_is_told_of_only_what_the_store_took() {
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
        // Alone, and in a group that is tried again one by one.
        let status = batch(bad, others).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        let key = fresh();
        let (first, second, beside) = tokio::join!(
            batch(bad, others),
            batch(bad, others),
            pay(&world, &key, "1")
        );
        assert_eq!(first.unwrap_err().code(), Code::Internal);
        assert_eq!(second.unwrap_err().code(), Code::Internal);
        beside.unwrap();
    }
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "95.00");
    let good = batch("good", 599).await.unwrap().into_inner();
    assert_eq!(good.outcomes.len(), 600);
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "89.00");
    audit(&rows, "after large batches that were refused").await;
    rows.close().await;
}

/// What is remembered of holds is what was committed.
// rows: R237
#[tokio::test]
async fn r237_a_hold_whose_use_the_store_refused_is_whole() {
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
    // Somebody else's change is seen.
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

/// A lone caller writes on its own thread where there are several; what fails there is the ledger's failure, not his.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_failed_assertion_ends_the_writer_and_not_whoever_asked() {
    // So many that another thread folds them.
    for others in [0, 300] {
        failed_assertion(others).await;
    }
}

async fn failed_assertion(others: usize) {
    let world = World::new().await;
    world.fund("u1", RUB, "1").await;
    let call = async |key: &str, amount: &str| {
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", amount, RUB)];
        let operations = (0..=others).map(|number| {
            let key = format!("{key} {number}");
            item(OperationType::Payment, "u1", &key, &legs)
        });
        let request = CreateOperationsRequest {
            context: write(key),
            operations: operations.collect(),
            ..Default::default()
        };
        world.client.clone().create_operations(request).await
    };
    let short = call("short", "60").await.unwrap_err();
    assert_eq!(short.code(), Code::FailedPrecondition, "{short}");
    let rows = world.rows().await;
    // A stored refusal that no ledger wrote.
    let changed = rows
        .execute("UPDATE answers SET outcome = '{\"refused\":{\"reason\":\"NOBODY_KNOWS\",\"operation\":null,\"hold_step\":null}}'")
        .await;
    assert_eq!(changed.unwrap(), 1);
    for (key, what) in [("short", "the repeat"), ("next", "what comes behind it")] {
        let status = call(key, "1").await.expect_err(what);
        assert_eq!(status.code(), Code::Unavailable, "{what}: {status}");
    }
    let failing = world.handle.service().health.failing();
    assert!(format!("{failing:?}").contains("committer"), "{failing:?}");
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "1.00");
    audit(&rows, "after a failed assertion").await;
    rows.close().await;
}

/// Rows that no ledger wrote are not gone on from: the writer ends, health says so.
// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_holds_past_what_their_sub_account_holds_back_end_the_writer() {
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
