//! Market events published from the journal, after an outage of the log and after a crash.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use events::topics;
use sqlx::{Connection, SqliteConnection};

use crate::world::*;

/// Waits for a state of the feed in the health read.
async fn feed_until(world: &World, is_wanted: impl Fn(Option<&String>) -> bool) {
    let health = world.gateway.service().health;
    let mut failing = health.watch();
    let wanted = failing.wait_for(|failing| is_wanted(failing.get("feed")));
    drop(in_time("the health read follows the feed", wanted).await);
}

// rows: R248
#[tokio::test]
async fn r248_events_wait_for_a_log_that_is_away_and_the_market_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let log_is_unavailable = Arc::new(AtomicBool::new(true));
    let settings = Settings {
        log_is_unavailable: log_is_unavailable.clone(),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "0", "10").await;
    let order = world.place_with("ann", "one", sell("ann", "100", "1"));
    let order = order.await.unwrap();
    feed_until(&world, |reason| reason.is_some()).await;
    assert_eq!(world.order(&order.order_id).await.unwrap(), order);
    let backlog = world.log.backlog(&unique(), &[topics::MARKET]).await;
    assert!(backlog.unwrap().is_empty());

    log_is_unavailable.store(false, Ordering::SeqCst);
    let events = world.events(topics::MARKET, 1, |_| true).await;
    assert_eq!(events[0].correlation_id, "corr-one");
    feed_until(&world, |reason| reason.is_none()).await;
    world.stop().await;
}

// rows: R248 R180
#[tokio::test]
async fn r248_events_published_again_have_the_same_ids() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "0", "10").await;
    world.user("bob", "1000", "0").await;
    world.place(sell("ann", "100", "1")).await.unwrap();
    world.place(buy("bob", "100", "1")).await.unwrap();
    let before = world.events(topics::MARKET, 3, |_| true).await;
    let (path, identity, registry) = world.stop().await;

    // Simulates a crash before the position of the published events is saved.
    let file = path.join("gateway/market.db");
    let url = format!("sqlite://{}", file.display());
    let mut db = SqliteConnection::connect(&url).await.unwrap();
    let saved: i64 = sqlx::query_scalar("SELECT sequence FROM feed")
        .fetch_one(&mut db)
        .await
        .unwrap();
    let reset = sqlx::query("UPDATE feed SET sequence = 0");
    reset.execute(&mut db).await.unwrap();
    db.close().await.unwrap();
    assert!(saved > 0, "a stop saves the position");
    let world = World::start(&path, Settings::default(), identity, registry).await;
    world.place(sell("ann", "101", "1")).await.unwrap();
    let all = world.events(topics::MARKET, 4, |_| true).await;
    // The log deduplicates by id. Each event is there once and unchanged.
    assert_eq!(all[..3], before);
    assert_eq!(all[3].short_type(), "OrderPlacedEvent");
    world.stop().await;
}

// rows: R248
#[tokio::test]
async fn r248_a_stop_does_not_wait_for_a_log_that_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        log_is_unavailable: Arc::new(AtomicBool::new(true)),
        log_hangs: true,
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "0", "10").await;
    let placed = world.place(sell("ann", "100", "1")).await.unwrap();
    feed_until(&world, |reason| reason.is_some()).await;
    let stopped = in_time("a stop that does not wait for the log", world.stop());
    let (path, identity, registry) = stopped.await;

    let world = World::start(&path, Settings::default(), identity, registry).await;
    world.place(sell("ann", "101", "1")).await.unwrap();
    let events = world.events(topics::MARKET, 2, |_| true).await;
    assert_eq!(events[0].subject, placed.order_id);
    assert_ne!(events[1].subject, placed.order_id, "once each");
    world.stop().await;
}
