//! A crash between the ledger's hold and the journal's append, or the other way around (`design.md`
//! 4). No money is lost or stays on hold, and the old key enters no order.

use std::path::Path;
use std::process::Command;

use proto::ledger::v1::HoldStatus;
use proto::market::v1::{
    AdjustTradingHoldRequest, CloseTradingHoldRequest, TradingHold, TradingHoldStatus,
};
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

/// Body of the child process that is killed while it opens, grows, shrinks or closes a trading
/// hold. Does nothing in an ordinary test run.
#[tokio::test]
async fn child_changes_a_trading_hold_and_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else {
        return;
    };
    let mut world = World::with(Path::new(&folder), settings(60_000)).await;
    world.user("ann", "1000", "0").await;
    let hold_id = world.open_hold("ann", "CFA-RUB", "600").await.hold_id;
    let mut ann = world.trader("ann");
    for undrawn in ["800", "500"] {
        let request = AdjustTradingHoldRequest {
            context: context(&unique()),
            hold_id: hold_id.clone(),
            undrawn: decimal(undrawn),
        };
        ann.adjust_trading_hold(request).await.unwrap();
    }
    let request = CloseTradingHoldRequest {
        context: context(&unique()),
        hold_id,
    };
    ann.close_trading_hold(request).await.unwrap();
    unreachable!("the process is killed at one of the steps");
}

fn crash(folder: &Path) {
    crash_at(
        folder,
        "crash::child_places_an_order_and_is_killed",
        "market.hold_placed",
    );
}

/// Runs a test of this file in a child process, which a failpoint aborts.
fn crash_at(folder: &Path, child: &str, place: &str) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args([child, "--exact", "--nocapture"])
        .env(FOLDER, folder)
        .env("PLATFORM_CRASH_AT", place)
        .status()
        .unwrap();
    // A failed test has an exit code, an aborted process has none.
    assert_eq!(status.code(), None, "{place} was not reached");
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

// rows: R160
#[tokio::test]
async fn t49_a_trading_hold_killed_between_its_two_steps_is_the_same_in_ledger_and_journal() {
    let child = "crash::child_changes_a_trading_hold_and_is_killed";
    for (place, held, available) in [
        ("market.trading_hold_opened", "600.00", "400.00"),
        ("market.hold_grown", "800.00", "200.00"),
        // The hold shrinks, then it is closed.
        ("market.hold_taken", "500.00", "500.00"),
        ("market.hold_taken:2", "0.00", "1000.00"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        crash_at(folder.path(), child, place);
        let mut world = after_the_crash(folder.path(), 0).await;
        world.settled().await;
        world.gateway.sweep().await.unwrap();
        let (_, in_ledger, free) = world.balance("ann", "CFA-RUB").await;
        assert_eq!((&*in_ledger, &*free), (held, available), "{place}");
        let mut holds = world.trading_holds("ann").await;
        holds.retain(|hold| hold.status() == TradingHoldStatus::Open);
        let undrawn = |hold: &TradingHold| hold.undrawn.clone().unwrap().value;
        let undrawn: Vec<String> = holds.iter().map(undrawn).collect();
        let expected = match held {
            "0.00" => vec![],
            _ => vec![held],
        };
        assert_eq!(undrawn, expected, "{place}");
        world.stop().await;
    }
}
