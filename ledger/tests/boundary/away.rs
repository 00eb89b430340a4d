//! Operation while a peer is unavailable (specification 1.4.4): checks by gRPC and updates by
//! events do not wait for one another.

use events::topics;
use proto::{identity::v1::UserCreatedEvent, ledger::v1::*};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};

use crate::harness::*;

// rows: R213 R248
#[tokio::test]
async fn r213_holds_work_while_the_log_is_unavailable_and_their_events_follow() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut watch = world.watch().await;
    watch
        .until(|event| event.short_type() == "BalanceUpdatedEvent" && event.subject == "u1:CFA-RUB")
        .await;
    // The holder of the file lock blocks all writers.
    let options = SqliteConnectOptions::new().filename(world.log_file());
    let mut thief = SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE")
        .execute(&mut thief)
        .await
        .unwrap();

    let hold = world.hold("u1", RUB, "40").await;
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "40.00", "0.00", "60.00"]
    );
    let told = world
        .log
        .backlog(&fresh(), &[topics::LEDGER])
        .await
        .unwrap();
    let is_told = |name: &str| told.iter().any(|one| one.record.event.short_type() == name);
    assert!(!is_told("HoldCreatedEvent"), "the log is unavailable");

    sqlx::query("ROLLBACK").execute(&mut thief).await.unwrap();
    let (_, event): (_, HoldCreatedEvent) = watch.next_of("HoldCreatedEvent").await;
    assert_eq!(event.hold_id, hold.hold_id);
}

// rows: R213 R235
#[tokio::test]
async fn r213_events_wait_for_a_stopped_ledger() {
    let world = World::new().await;
    let created = UserCreatedEvent {
        user_id: "late".to_owned(),
        ..Default::default()
    };
    let name = "dfa.identity.v1.UserCreatedEvent";
    let told = event(topics::IDENTITY, name, "late", &created);
    // Published twice, as by a relay that crashed.
    let world = world.restart_after(&[told.clone(), told]).await;
    let request = GetSubAccountRequest {
        subaccount_id: "late:CFA-RUB".to_owned(),
        ..Default::default()
    };
    eventually(|| async {
        world
            .client
            .clone()
            .get_sub_account(request.clone())
            .await
            .ok()
    })
    .await;
}
