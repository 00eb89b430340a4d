//! The process has no file descriptor left to read the journal with, and later has some again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use journal::fault::MemoryStorage;
use rpc::Health;
use types::Side;

use crate::world::*;

async fn until_failing(health: &Health, parts: &[&str]) {
    let mut changes = health.watch();
    let waiting = changes.wait_for(|failing| failing.keys().eq(parts));
    let what = format!("the health read has {parts:?} alone");
    drop(in_time(&what, waiting).await);
}

#[tokio::test]
async fn journal_readers_report_missing_descriptors_and_recover() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(MemoryStorage::default());
    let settings = Settings {
        journal: Some(storage.clone()),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, _of_bob) = world.session(login("bob", "b")).await;
    let market = world.gateway.service().health;
    let settlement = world.settlement.health();
    let (mut id, mut last) = (0, 0);
    for _ in 0..2 {
        world.settled().await;
        storage.open_fails_every.store(1, Ordering::SeqCst);
        for _ in 0..10 {
            id += 1;
            let (buy, sell) = (Side::Buy, Side::Sell);
            ann.send(0, wire_order(id, buy, 1_000, 1)).await.unwrap();
            bob.send(0, wire_order(id, sell, 1_000, 1)).await.unwrap();
        }
        until_failing(&market, &["replica"]).await;
        until_failing(&settlement, &["settlement-journal"]).await;
        storage.open_fails_every.store(0, Ordering::SeqCst);
        // An acknowledgement and a fill per order.
        for _ in 0..20 {
            last += 1;
            assert_eq!(numbered(&mut of_ann).await.sequence, last);
        }
        until_failing(&market, &[]).await;
        until_failing(&settlement, &[]).await;
    }
    world.settled().await;
    let trades = world.trades("ann").await;
    assert_eq!(trades.len(), 20);
    assert_eq!(world.balance("ann", BOND).await.0, "20");
    assert_eq!(world.balance("bob", BOND).await.0, "980");
    world.stop().await;
}
