//! Contract tests of outbox and inbox, run on each database of a service.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use async_trait::async_trait;
use events::{
    Delivery, Embedded, Error, Log, Position, Record, Subscription, Waiting, consume_with, inbox,
    outbox::{self, Queue, Relay},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{FAST, event, in_time, receive};

/// Tables of the service under test.
pub const TABLES: &str = "CREATE TABLE changes (number BIGINT PRIMARY KEY); \
                          CREATE TABLE effects (number BIGINT NOT NULL);";

/// How a transaction ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Commit,
    Rollback,
    Drop,
}

/// A service with a table of changed numbers and a table of effects.
#[async_trait]
pub trait Service: Queue {
    /// One transaction: the number, and its event under the key `k` of the topic `t`.
    async fn change(&self, number: usize, end: End);
    /// One transaction: records the event in the inbox for each of these consumers, then the effect
    /// if it was new to the first.
    async fn accept(
        &self,
        consumers: &[&str],
        id: Uuid,
        effect: Option<usize>,
        end: End,
    ) -> Vec<bool>;
    async fn numbers(&self, table: &str) -> Vec<usize>;
    /// Waits until the relay may publish `count` committed changes. On PostgreSQL any older open
    /// transaction, also of another test, holds them back.
    async fn due(&self, _count: usize) {}
}

pub async fn all<S: Service>(mut fresh: impl AsyncFnMut() -> S) {
    only_a_committed_change_has_an_event(fresh().await).await;
    the_relay_is_woken_by_commits_and_loses_none(fresh().await).await;
    relay_crash_around_publish_causes_one_effect_per_change(fresh().await).await;
    an_effect_that_is_rolled_back_is_not_in_the_inbox(fresh().await).await;
    ids_are_forgotten_a_day_after_the_records_of_their_time(fresh().await).await;
}

async fn log() -> (tempfile::TempDir, Embedded) {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    (folder, log)
}

pub async fn published(log: &Embedded, count: usize) -> Vec<usize> {
    let mut subscription = log.subscribe("reader", &["t"]).await.unwrap();
    receive(&mut subscription, count)
        .await
        .into_iter()
        .map(|delivery| usize::from_be_bytes(delivery.record.event.payload.try_into().unwrap()))
        .collect()
}

async fn only_a_committed_change_has_an_event(db: impl Service) {
    let (_folder, log) = log().await;
    db.change(1, End::Drop).await;
    db.change(2, End::Rollback).await;
    db.change(3, End::Commit).await;
    assert_eq!(step(&db, &log).await.unwrap(), 1);
    assert_eq!(db.numbers("changes").await, [3]);
    assert_eq!(published(&log, 1).await, [3]);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 0);
}

async fn the_relay_is_woken_by_commits_and_loses_none(db: impl Service) {
    let (_folder, log) = log().await;
    let stop = CancellationToken::new();
    let relay = tokio::spawn(Relay::run(db.clone(), Arc::new(log.clone()), stop.clone()));
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let db = db.clone();
            tokio::spawn(async move {
                for step in 0..25 {
                    db.change(writer * 25 + step, End::Commit).await;
                }
            })
        })
        .collect();
    for writer in writers {
        in_time("a writer", writer).await.unwrap();
    }
    let seen = published(&log, 100).await;
    // The events of one sequential writer keep their order.
    for writer in 0..4 {
        let own: Vec<usize> = seen
            .iter()
            .copied()
            .filter(|number| number / 25 == writer)
            .collect();
        assert_eq!(own, (writer * 25..writer * 25 + 25).collect::<Vec<_>>());
    }
    stop.cancel();
    in_time("relay stops", relay).await.unwrap();
}

/// A log that fails on purpose: before it stores the events, or after it but before it returns.
struct Faulty {
    log: Embedded,
    calls: AtomicUsize,
}

#[async_trait]
impl Log for Faulty {
    async fn append(&self, records: &[Record]) -> Result<(), Error> {
        match self.calls.fetch_add(1, Ordering::SeqCst) {
            0 => Err(Error::Closed),
            1 => {
                self.log.append(records).await?;
                Err(Error::Closed)
            }
            _ => {
                // Like a log that does not track ids: publishes everything again, under additional
                // headers.
                let again: Vec<Record> = records
                    .iter()
                    .cloned()
                    .map(|mut record| {
                        record.headers.push(("again".into(), String::new()));
                        record
                    })
                    .collect();
                self.log.append(&again).await
            }
        }
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        self.log.commit(group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &Waiting {
        self.log.waiting()
    }
}

/// Repeats [`Relay::step`] until it relays events or fails. On PostgreSQL the first steps may relay
/// nothing: a dead relay keeps its lock until the server detects the closed connection, and rows
/// wait for older transactions, also of other tests. For the same reason a step may relay only some
/// of several changes.
async fn step(db: &impl Service, log: &dyn Log) -> Result<usize, Error> {
    let relayed = async {
        loop {
            match Relay::step(db, log).await {
                Ok(0) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
                relayed => return relayed,
            }
        }
    };
    in_time("a relay step", relayed).await
}

async fn relay_crash_around_publish_causes_one_effect_per_change(db: impl Service) {
    let (_folder, log) = log().await;
    let log = Faulty {
        log,
        calls: AtomicUsize::new(0),
    };
    for number in 0..3 {
        db.change(number, End::Commit).await;
    }
    // Each step below relays all three.
    db.due(3).await;
    assert!(step(&db, &log).await.is_err());
    assert!(step(&db, &log).await.is_err());
    assert_eq!(outbox::backlog(&db).await.unwrap(), 3);
    assert_eq!(step(&db, &log).await.unwrap(), 3);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 0);

    // Six records are in the log; the inbox reduces them to three effects.
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let (target, stop) = (db.clone(), CancellationToken::new());
    let handler = move |event: events::Event| {
        let (db, tx) = (target.clone(), tx.clone());
        async move {
            let number = usize::from_be_bytes(event.payload.as_slice().try_into()?);
            let fresh = db
                .accept(&["effects"], event.id, Some(number), End::Commit)
                .await;
            tx.send(fresh[0])?;
            Ok(())
        }
    };
    let consumer = tokio::spawn(consume_with(
        Arc::new(log.log.clone()),
        "effects",
        &["t"],
        handler,
        stop.clone(),
        FAST,
    ));
    let mut fresh = Vec::new();
    for _ in 0..6 {
        fresh.push(in_time("handled", rx.recv()).await.unwrap());
    }
    stop.cancel();
    in_time("consumer stops", consumer).await.unwrap().unwrap();
    assert_eq!(fresh, [true, true, true, false, false, false]);
    assert_eq!(db.numbers("effects").await, [0, 1, 2]);
}

async fn an_effect_that_is_rolled_back_is_not_in_the_inbox(db: impl Service) {
    let id = event("t", "k", 1).id;
    assert_eq!(db.accept(&["c"], id, None, End::Drop).await, [true]);
    let seen = db
        .accept(&["c", "c", "another consumer"], id, None, End::Commit)
        .await;
    assert_eq!(seen, [true, false, true]);
}

const DAY_US: i64 = 86_400_000_000;

/// A log whose only record occurred at this time. A group has consumed it.
async fn log_since(at_us: i64) -> (tempfile::TempDir, Embedded) {
    let (folder, log) = log().await;
    let mut record = event("t", "k", 1);
    record.occurred_at_us = at_us;
    log.publish(&[record]).await.unwrap();
    let mut reader = log.subscribe("reader", &["t"]).await.unwrap();
    let read = receive(&mut reader, 1).await;
    log.commit("reader", &read[0].position).await.unwrap();
    drop(reader);
    (folder, log)
}

async fn ids_are_forgotten_a_day_after_the_records_of_their_time(db: impl Service) {
    let now_us = service_kit::clock::now_us();
    // Of versions 5, 5 and 7: the last one has its time.
    let timed = (u128::from(now_us.unsigned_abs() / 1_000) << 80) | (7 << 76) | (2 << 62) | 1;
    let ids = [
        event("t", "k", 1).id,
        event("t", "k", 2).id,
        Uuid::from_u128(timed),
    ];
    let consumers = ["first", "second"];
    for id in ids {
        let accepted = db.accept(&consumers, id, None, End::Commit).await;
        assert_eq!(accepted, [true, true]);
    }
    let (_folder, log) = log_since(now_us).await;
    assert_eq!(inbox::sweep(&db, &log).await.unwrap(), 0);
    let accepted = db.accept(&consumers, ids[2], None, End::Commit).await;
    assert_eq!(accepted, [false, false]);
    let (_folder, log) = log_since(now_us + 2 * DAY_US).await;
    assert_eq!(inbox::sweep(&db, &log).await.unwrap(), 6);
    for id in ids {
        let accepted = db.accept(&consumers, id, None, End::Commit).await;
        assert_eq!(accepted, [true, true]);
    }
}
