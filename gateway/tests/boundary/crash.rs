//! A crash between the ledger's hold and the journal's append (`design.md` 4). No money is lost or
//! stays on hold, and the old key enters no order.

use std::path::Path;
use std::process::Command;

use proto::ledger::v1::HoldStatus;
use tonic::Code;

use crate::world::*;

const FOLDER: &str = "MARKET_CRASH_FOLDER";

fn settings(orphan_hold_age_ms: u64) -> Settings {
    let mut settings = Settings::default();
    settings.gateway.orphan_hold_age_ms = orphan_hold_age_ms;
    settings.gateway.sweep_interval_ms = 3_600_000;
    settings
}

/// Body of the child process that is killed. Does nothing in an ordinary test run.
#[tokio::test]
async fn child_places_an_order_and_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let mut world = World::with(Path::new(&folder), settings(60_000)).await;
    world.user("ann", "1000", "0").await;
    world.place(buy("ann", "10", "1")).await.unwrap();
    world
        .place_with("ann", "the-key", buy("ann", "10", "50"))
        .await
        .unwrap();
    unreachable!("the process is killed after the hold is placed");
}

fn crash(folder: &Path) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "crash::child_places_an_order_and_is_killed",
            "--exact",
            "--nocapture",
        ])
        .env(FOLDER, folder)
        .env("PLATFORM_CRASH_AT", "market.hold_placed")
        .status()
        .unwrap();
    assert!(!status.success(), "the child is killed");
}

async fn after_the_crash(folder: &Path, orphan_hold_age_ms: u64) -> World {
    let identity = std::sync::Arc::new(testkit::ServiceDoubles::default());
    identity.upsert_user("ann", |_| {});
    let registry = std::sync::Arc::new(testkit::Registry::default());
    registry.list(bond(BOND));
    World::start(folder, settings(orphan_hold_age_ms), identity, registry).await
}

// rows: R160
#[tokio::test]
async fn a_hold_unknown_to_the_journal_is_released_and_its_key_bound() {
    let folder = tempfile::tempdir().unwrap();
    crash(folder.path());
    let mut world = after_the_crash(folder.path(), 0).await;
    // The failpoint aborts at the first order with its own hold, before any order enters the book.
    let held = world.balance("ann", "CFA-RUB").await.1;
    assert_eq!(
        held, "10.01",
        "on hold in the ledger, unknown to the journal"
    );
    world.gateway.sweep().await.unwrap();
    world.settled().await;
    world.gateway.sweep().await.unwrap();
    assert_eq!(
        world.balance("ann", "CFA-RUB").await,
        ("1000.00".into(), "0.00".into(), "1000.00".into())
    );
    let holds = world.holds("ann", "CFA-RUB").await;
    assert!(
        holds
            .iter()
            .all(|hold| hold.status() == HoldStatus::Released)
    );
    // The hold's reason contains the key of the call.
    let key = holds[0]
        .reason
        .strip_prefix("Order of request ")
        .unwrap()
        .to_owned();
    let late = refused(
        world
            .place_with("ann", &key, buy("ann", "10", "1"))
            .await
            .unwrap_err(),
    );
    assert_eq!(
        (late.0, late.2.as_str()),
        (Code::FailedPrecondition, "REQUEST_EXPIRED")
    );
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "0.00");
    assert!(
        world.place(buy("ann", "10", "1")).await.is_ok(),
        "a new key is a new order"
    );
    world.stop().await;
}

// rows: R160
#[tokio::test]
async fn an_early_retry_finishes_the_order_on_the_same_hold() {
    let folder = tempfile::tempdir().unwrap();
    crash(folder.path());
    let mut world = after_the_crash(folder.path(), 60_000).await;
    world.gateway.sweep().await.unwrap();
    let hold = world.holds("ann", "CFA-RUB").await.remove(0);
    assert_eq!(
        hold.status(),
        HoldStatus::Active,
        "its call may still be in flight"
    );
    let key = hold.reason.strip_prefix("Order of request ").unwrap();
    let order = world
        .place_with("ann", key, buy("ann", "10", "1"))
        .await
        .unwrap();
    assert_eq!(
        world.balance("ann", "CFA-RUB").await.1,
        "10.01",
        "one hold, one order"
    );
    world.cancel("ann", &order.order_id).await.unwrap();
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "0.00");
    world.stop().await;
}
