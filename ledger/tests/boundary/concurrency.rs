//! Concurrent calls on one sub-account.

use proto::common::v1::OperationType;
use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::*;

// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_a_thousand_parallel_holds_on_money_for_ten() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut tasks = JoinSet::new();
    for n in 0..1_000 {
        let mut client = world.client.clone();
        tasks.spawn(async move {
            let request = proto::ledger::v1::CreateHoldRequest {
                context: write(&format!("h{n}")),
                hold: Some(new_hold("u1", RUB, "10")),
            };
            client.create_hold(request).await
        });
    }
    let mut held = 0;
    while let Some(answer) = tasks.join_next().await {
        match answer.unwrap() {
            Ok(_) => held += 1,
            Err(status) => {
                assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
                assert_eq!(status.message(), "Insufficient balance");
            }
        }
    }
    assert_eq!(held, 10);
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "100.00", "0.00", "0.00"]
    );
    world.assert_books_balance().await;
}

// rows: R237
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r237_parallel_spends_holds_and_parts_never_overdraw() {
    let world = World::new().await;
    world.fund("u1", RUB, "50").await;
    let hold = world.hold("u1", RUB, "20").await;
    let mut tasks = JoinSet::new();
    for n in 0..300 {
        let mut client = world.client.clone();
        let hold_id = hold.hold_id.clone();
        tasks.spawn(async move {
            match n % 3 {
                0 => {
                    let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
                    let request = operation(OperationType::Payment, "u1", &format!("p{n}"), &legs);
                    client.create_operation(request).await.map(|_| 0)
                }
                1 => {
                    let request = proto::ledger::v1::ConsumeHoldRequest {
                        context: write(&format!("c{n}")),
                        hold_id,
                        amount: amount(RUB, "1"),
                        ..Default::default()
                    };
                    client.consume_hold(request).await.map(|_| 1)
                }
                // Many callers use the same key: it acts once.
                _ => {
                    let request = proto::ledger::v1::CreateHoldRequest {
                        context: write("shared"),
                        hold: Some(new_hold("u1", RUB, "5")),
                    };
                    client.create_hold(request).await.map(|_| 2)
                }
            }
        });
    }
    let mut done = [0; 3];
    while let Some(answer) = tasks.join_next().await {
        match answer.unwrap() {
            Ok(kind) => done[kind] += 1,
            Err(status) => {
                assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
                let texts = ["Insufficient balance", "Hold is not active"];
                assert!(texts.contains(&status.message()), "{status}");
            }
        }
    }
    // A consumption without a destination returns its part to available. So the 20 could be spent
    // or held.
    let [balance, held, _, available] = world.balance("u1:CFA-RUB").await;
    assert_eq!(done[1], 20);
    assert!(done[2] == 100 || done[2] == 0);
    let number = |text: &str| text.parse::<types::Decimal>().unwrap();
    assert_eq!(number(&balance), types::Decimal::from(50 - done[0]));
    assert_eq!(
        number(&held),
        types::Decimal::from(if done[2] > 0 { 5 } else { 0 })
    );
    assert!(!number(&available).is_negative());
    world.assert_books_balance().await;
}

// rows: R237
#[tokio::test]
async fn r237_writes_of_another_connection_are_seen_by_the_next_group() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut client = world.client.clone();
    let mut pay = async |key: &str| {
        let legs: [Leg; 1] = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
        let request = operation(OperationType::Payment, "u1", key, &legs);
        client.create_operation(request).await
    };
    pay("before").await.unwrap();
    let rows = world.rows().await;
    let frozen = rows
        .execute("UPDATE sub_accounts SET \"freeze\" = 2 WHERE subaccount_id = 'u1:CFA-RUB'")
        .await
        .unwrap();
    assert_eq!(frozen, 1);
    refused(
        pay("while frozen").await,
        Code::FailedPrecondition,
        "SUB_ACCOUNT_FROZEN",
        "Sub-account is frozen",
    );
    rows.execute("UPDATE sub_accounts SET \"freeze\" = 0 WHERE subaccount_id = 'u1:CFA-RUB'")
        .await
        .unwrap();
    pay("after").await.unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["98.00", "0.00", "0.00", "98.00"]
    );
    rows.close().await;
    world.assert_books_balance().await;
}
