//! A process that temporarily has no file descriptor to read its journal.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use journal::fault::MemoryStorage;
use rpc::Health;
use types::{RejectReason, Side};
use wire::ServerMessage;

use crate::checkpoints::cancel_own;
use crate::world::*;

async fn until_failing(health: &Health, parts: &[&str]) {
    let mut changes = health.watch();
    let waiting = changes.wait_for(|failing| failing.keys().eq(parts));
    let what = format!("the health read has {parts:?} alone");
    drop(in_time(&what, waiting).await);
}

/// Until the journal's readers recover, the market refuses new orders (`design.md` 7).
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
    let mut id = 0;
    for _ in 0..2 {
        world.settled().await;
        // This order rests while the readers fail. Its cancel is accepted.
        id += 1;
        let resting = id;
        ann.send(0, wire_order(id, Side::Buy, 900, 1))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
        world.settled().await;
        storage.open_fails_every.store(1, Ordering::SeqCst);
        // New orders are refused once the replica cannot read the first one.
        let refused = loop {
            id += 1;
            ann.send(0, wire_order(id, Side::Buy, 900, 1))
                .await
                .unwrap();
            let answer = |message: &ServerMessage| match message {
                ServerMessage::OrderAck(_) => Some(None),
                ServerMessage::Rejected(rejected) => Some(Some(rejected.reason)),
                _ => None,
            };
            if let Some(reason) = until(&mut of_ann, answer).await {
                break reason;
            }
        };
        assert_eq!(refused, RejectReason::SessionsBacklog);
        ann.send(0, cancel_own(resting)).await.unwrap();
        until_failing(&market, &["replica", "trading_path"]).await;
        until_failing(&settlement, &["settlement-journal"]).await;
        storage.open_fails_every.store(0, Ordering::SeqCst);
        let cancelled = until(&mut of_ann, |message| match message {
            ServerMessage::Cancelled(cancelled) => Some(cancelled.client_order_id),
            _ => None,
        });
        assert_eq!(cancelled.await, resting);
        until_failing(&market, &[]).await;
        until_failing(&settlement, &[]).await;
        for _ in 0..10 {
            id += 1;
            let (buy, sell) = (Side::Buy, Side::Sell);
            ann.send(0, wire_order(id, buy, 1_000, 1)).await.unwrap();
            until(&mut of_ann, ack).await;
            bob.send(0, wire_order(id, sell, 1_000, 1)).await.unwrap();
            until(&mut of_ann, fill).await;
        }
    }
    world.settled().await;
    let trades = world.trades("ann").await;
    assert_eq!(trades.len(), 20);
    assert_eq!(world.balance("ann", BOND).await.0, "20");
    assert_eq!(world.balance("bob", BOND).await.0, "980");
    world.stop().await;
}
