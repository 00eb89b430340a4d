//! Operation while a peer is unavailable (specification 1.4.4): calls over gRPC and updates by
//! events do not wait for each other.

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
    // This connection holds the lock of the log's file, which blocks all its writers.
    let options = SqliteConnectOptions::new().filename(world.log_file());
    let mut lock_holder = SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE")
        .execute(&mut lock_holder)
        .await
        .unwrap();

    let hold = world.hold("u1", RUB, "40").await;
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "40.00", "0.00", "60.00"]
    );
    let published = world
        .log
        .backlog(&fresh(), &[topics::LEDGER])
        .await
        .unwrap();
    let is_published = |name: &str| {
        published
            .iter()
            .any(|one| one.record.event.short_type() == name)
    };
    assert!(!is_published("HoldCreatedEvent"), "the log is unavailable");

    sqlx::query("ROLLBACK")
        .execute(&mut lock_holder)
        .await
        .unwrap();
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
    let published = event(topics::IDENTITY, name, "late", &created);
    // Published twice, as a relay does after a crash.
    let world = world.restart_after(&[published.clone(), published]).await;
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
