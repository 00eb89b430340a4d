//! Outbox and inbox on SQLite: an event exists if and only if its change is committed, and takes
//! effect once. `full` runs the contract on PostgreSQL.

mod common;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use common::{
    event, in_time,
    outbox::{End, Service, TABLES, published},
    victim::Victim,
};
use events::{
    Delivery, Direct, Embedded, Error, Log, OutboxRow, Packed, Position, Record, Sqlite,
    Subscription, Waiting, inbox, outbox, outbox::Relay,
};
use sqlx::{
    SqlitePool,
    migrate::{Migration, MigrationType, Migrator},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

fn migrator() -> Migrator {
    let migration = Migration::new(
        1,
        "service".into(),
        MigrationType::Simple,
        sqlx::SqlStr::from_static(TABLES),
        false,
    );
    Migrator::with_migrations(vec![migration])
}

async fn service(folder: &Path) -> Sqlite {
    Sqlite::open(folder.join("service.db"), &migrator())
        .await
        .unwrap()
}

async fn direct(folder: &Path) -> Direct {
    Direct::open(folder.join("service.db"), &migrator())
        .await
        .unwrap()
}

async fn end(tx: events::Tx, end: End) {
    match end {
        End::Commit => tx.commit().await.unwrap(),
        End::Rollback => tx.rollback().await.unwrap(),
        End::Drop => drop(tx),
    }
}

#[async_trait]
impl Service for Sqlite {
    async fn change(&self, number: usize, how: End) {
        end(change(self, number).await, how).await;
    }

    async fn accept(
        &self,
        consumers: &[&str],
        id: Uuid,
        effect: Option<usize>,
        how: End,
    ) -> Vec<bool> {
        let mut tx = self.write().await.unwrap();
        let mut seen = Vec::new();
        for consumer in consumers {
            seen.push(inbox::accept_in_tx(&mut tx, consumer, id).await.unwrap());
        }
        if let Some(number) = effect.filter(|_| seen[0]) {
            sqlx::query("INSERT INTO effects (number) VALUES ($1)")
                .bind(number as i64)
                .execute(&mut *tx)
                .await
                .unwrap();
        }
        end(tx, how).await;
        seen
    }

    async fn numbers(&self, table: &str) -> Vec<usize> {
        numbers(self.read(), table).await
    }
}

async fn change(db: &Sqlite, number: usize) -> events::Tx {
    let mut tx = db.write().await.unwrap();
    sqlx::query("INSERT INTO changes (number) VALUES ($1)")
        .bind(number as i64)
        .execute(&mut *tx)
        .await
        .unwrap();
    outbox::append_in_tx(&mut tx, &[event("t", "k", number)])
        .await
        .unwrap();
    tx
}

fn end_direct(tx: events::DirectTx, end: End) {
    match end {
        End::Commit => tx.commit().unwrap(),
        End::Rollback | End::Drop => drop(tx),
    }
}

#[async_trait]
impl Service for Direct {
    async fn change(&self, number: usize, how: End) {
        let tx = self.write().await.unwrap();
        let sql = "INSERT INTO changes (number) VALUES (?1)";
        tx.execute(sql, [number as i64]).unwrap();
        tx.append(Packed::of(&[event("t", "k", number)])).unwrap();
        end_direct(tx, how);
    }

    async fn accept(
        &self,
        consumers: &[&str],
        id: Uuid,
        effect: Option<usize>,
        how: End,
    ) -> Vec<bool> {
        let tx = self.write().await.unwrap();
        let seen = consumers.iter().map(|name| tx.accept(name, id).unwrap());
        let seen: Vec<bool> = seen.collect();
        if let Some(number) = effect.filter(|_| seen[0]) {
            let sql = "INSERT INTO effects (number) VALUES (?1)";
            tx.execute(sql, [number as i64]).unwrap();
        }
        end_direct(tx, how);
        seen
    }

    async fn numbers(&self, table: &str) -> Vec<usize> {
        numbers(self.read(), table).await
    }
}

async fn numbers(db: &SqlitePool, table: &str) -> Vec<usize> {
    let sql = format!("SELECT number FROM {table} ORDER BY number");
    let rows: Vec<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
        .fetch_all(db)
        .await
        .unwrap();
    rows.into_iter().map(|number| number as usize).collect()
}

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_the_contract_of_outbox_and_inbox_holds_on_sqlite() {
    let mut folders = Vec::new();
    common::outbox::all(async || {
        let folder = tempfile::tempdir().unwrap();
        let db = service(folder.path()).await;
        folders.push(folder);
        db
    })
    .await;
}

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_the_contract_holds_for_a_direct_writer() {
    let mut folders = Vec::new();
    common::outbox::all(async || {
        let folder = tempfile::tempdir().unwrap();
        let db = direct(folder.path()).await;
        folders.push(folder);
        db
    })
    .await;
}

#[tokio::test]
async fn a_closed_writer_returns_closed() {
    let folder = tempfile::tempdir().unwrap();
    let db = direct(folder.path()).await;
    db.clone().close().await;
    assert!(matches!(db.write().await, Err(Error::Closed)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_is_the_commit_order() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
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
    let order: Vec<i64> = sqlx::query_scalar("SELECT number FROM changes ORDER BY rowid")
        .fetch_all(db.read())
        .await
        .unwrap();
    let seen: Vec<i64> = published(&log, 100)
        .await
        .into_iter()
        .map(|number| number as i64)
        .collect();
    assert_eq!(seen, order);
    stop.cancel();
    in_time("relay stops", relay).await.unwrap();
}

async fn rows(db: &Sqlite) -> i64 {
    sqlx::query_scalar("SELECT COUNT(*) FROM outbox")
        .fetch_one(db.read())
        .await
        .unwrap()
}

// rows: R248
#[tokio::test]
async fn r248_relayed_rows_are_deleted_with_the_next_commit_and_no_later_event() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    change(&db, 0).await.commit().await.unwrap();
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 1);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 0);
    assert_eq!(rows(&db).await, 1);
    // The rollback also undoes the delete; the next transaction repeats it.
    change(&db, 1).await.rollback().await.unwrap();
    assert_eq!(rows(&db).await, 1);
    change(&db, 2).await.commit().await.unwrap();
    assert_eq!(rows(&db).await, 1);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 1);
    // Without further writes the relay deletes the rows itself.
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 1);
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 0);
    assert_eq!(rows(&db).await, 0);
    change(&db, 3).await.commit().await.unwrap();
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 1);
    assert_eq!(published(&log, 3).await, [0, 2, 3]);
}

/// A log that stores events but reports failure, a given number of times.
struct Forgetful {
    log: Embedded,
    failures: AtomicUsize,
}

#[async_trait]
impl Log for Forgetful {
    async fn publish_rows(&self, rows: Vec<OutboxRow>) -> Result<(), Error> {
        self.log.publish_rows(rows).await?;
        let left = |failures: usize| failures.checked_sub(1);
        let fails = self
            .failures
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
        fails.map_or(Ok(()), |_| Err(Error::Closed))
    }

    async fn append(&self, records: &[Record]) -> Result<(), Error> {
        self.log.append(records).await
    }

    async fn subscribe(&self, group: &str, topics: &[&str]) -> Result<Subscription, Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(&self, group: &str, topics: &[&str]) -> Result<Vec<Delivery>, Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &Position) -> Result<(), Error> {
        Log::commit(&self.log, group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &Waiting {
        self.log.waiting()
    }
}

// rows: R248
/// Transactions have from one event to several rows of events, of one topic or of two. So the log
/// copies, merges or unpacks their rows.
#[tokio::test]
async fn r248_rows_of_any_size_are_published_once_and_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let log = || async { Embedded::open(folder.path().join("log")).await.unwrap() };
    let mut db = direct(folder.path()).await;
    let mut forgetful = Forgetful {
        log: log().await,
        failures: AtomicUsize::new(0),
    };
    let mut next = 0;
    let mut expected = Vec::new();
    let sizes = [1, 1, 31, 32, 1, 127, 128, 129, 257, 40, 1, 64, 1];
    for (round, failures) in [0, 1, 2, 0, 1].into_iter().enumerate() {
        for (place, size) in sizes.into_iter().enumerate() {
            let events: Vec<events::Event> = (next..next + size)
                .map(|number| {
                    // The tenth transaction of a round has two topics.
                    let topic = if place == 9 && number % 3 == 0 {
                        "u"
                    } else {
                        "t"
                    };
                    event(topic, "k", number)
                })
                .collect();
            next += size;
            expected.extend(events.iter().map(|event| (event.topic.clone(), event.id)));
            let tx = db.write().await.unwrap();
            tx.append(Packed::of(&events)).unwrap();
            tx.commit().unwrap();
        }
        forgetful.failures.store(failures, Ordering::SeqCst);
        for _ in 0..failures {
            assert!(Relay::step(&db, &forgetful).await.is_err());
        }
        // Every second round reopens the store, which loses the position up to which rows are
        // relayed but not deleted.
        if round % 2 == 1 {
            assert_eq!(
                Relay::step(&db, &forgetful).await.unwrap(),
                expected.len() / (round + 1)
            );
            db.close().await;
            forgetful.log.close().await;
            db = direct(folder.path()).await;
            forgetful.log = log().await;
        }
        while Relay::step(&db, &forgetful).await.unwrap() > 0 {}
        assert_eq!(outbox::backlog(&db).await.unwrap(), 0);
    }
    let group = format!("reader {}", Uuid::new_v4());
    let found = forgetful.log.backlog(&group, &["t", "u"]).await.unwrap();
    let found = found.into_iter().map(|delivery| delivery.record.event);
    let found: Vec<(String, Uuid)> = found.map(|event| (event.topic, event.id)).collect();
    assert_eq!(found.len(), expected.len());
    assert_eq!(found, expected);
}

#[tokio::test]
async fn readers_cannot_write() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let written = sqlx::query("INSERT INTO changes (number) VALUES (1)")
        .execute(db.read())
        .await;
    assert!(written.is_err());
}

/// Simulates a full disk: SQLite ends the transaction by itself. The limit is per connection.
const FULL: &str = "PRAGMA max_page_count = 1";
/// One row, so SQLite cannot undo the statement alone and ends the whole transaction.
const TOO_MUCH: &str = "INSERT INTO changes (number) VALUES (zeroblob(1000000))";

#[tokio::test]
async fn a_writer_is_replaced_after_a_full_disk_ends_its_transaction() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    for round in 0..3 {
        let mut tx = db.write().await.unwrap();
        sqlx::query(FULL).execute(&mut *tx).await.unwrap();
        let full = sqlx::query(TOO_MUCH).execute(&mut *tx).await.unwrap_err();
        assert!(
            full.to_string().contains("database or disk is full"),
            "{full}"
        );
        assert!(events::sqlite::is_away(&full), "{full}");
        match round {
            0 => drop(tx),
            1 => assert!(tx.rollback().await.is_err(), "SQLite has rolled back"),
            _ => drop(tx.commit().await),
        }
        in_time("the next transaction", db.change(round, End::Commit)).await;
    }
    assert_eq!(db.numbers("changes").await, [0, 1, 2]);
}

#[tokio::test]
async fn a_direct_writer_continues_after_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let db = direct(folder.path()).await;
    let tx = db.write().await.unwrap();
    tx.execute_batch(FULL).unwrap();
    let full = tx.execute(TOO_MUCH, []).unwrap_err();
    assert!(events::sqlite::direct::is_away(&full), "{full}");
    assert!(tx.commit().is_err(), "SQLite has rolled back");
    let tx = db.write().await.unwrap();
    tx.execute_batch("PRAGMA max_page_count = 1000000").unwrap();
    drop(tx);
    db.change(1, End::Commit).await;
    assert_eq!(db.numbers("changes").await, [1]);
}

#[tokio::test]
async fn locked_or_closed_store_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    change(&db, 1).await.commit().await.unwrap();
    let mut tx = db.write().await.unwrap();
    let twice = sqlx::query("INSERT INTO changes (number) VALUES (1)")
        .execute(&mut *tx)
        .await
        .unwrap_err();
    assert!(!events::sqlite::is_away(&twice), "{twice}");
    // Another process holds the lock of the file.
    let impatient = sqlx::sqlite::SqliteConnectOptions::new()
        .filename(db.path())
        .busy_timeout(std::time::Duration::ZERO);
    let pool = SqlitePool::connect_with(impatient).await.unwrap();
    let locked = sqlx::query("INSERT INTO changes (number) VALUES (2)")
        .execute(&pool)
        .await
        .unwrap_err();
    assert!(events::sqlite::is_away(&locked), "{locked}");
    drop(tx);
    db.close().await;
    let closed = db.write().await.err().expect("the file is closed");
    assert!(closed.is_away(), "{closed}");
}

#[tokio::test]
async fn a_direct_writer_distinguishes_unavailable_from_broken() {
    let folder = tempfile::tempdir().unwrap();
    let db = direct(folder.path()).await;
    db.change(1, End::Commit).await;
    let tx = db.write().await.unwrap();
    let twice = tx.execute("INSERT INTO changes (number) VALUES (1)", []);
    let twice = twice.unwrap_err();
    assert!(!events::sqlite::direct::is_away(&twice), "{twice}");
    let wrong = tx.query_row("SELECT 'text'", [], |row| row.get::<_, i64>(0));
    let wrong = wrong.unwrap_err();
    assert!(!events::sqlite::direct::is_away(&wrong), "{wrong}");
    // Another process holds the lock of the file.
    let impatient = rusqlite::Connection::open(folder.path().join("service.db")).unwrap();
    impatient.busy_timeout(std::time::Duration::ZERO).unwrap();
    let locked = impatient.execute("INSERT INTO changes (number) VALUES (2)", []);
    let locked = locked.unwrap_err();
    assert!(events::sqlite::direct::is_away(&locked), "{locked}");
    let away = Error::from(locked);
    assert!(away.is_away(), "{away}");
    drop(tx);
    // The failure has left no transaction open.
    db.change(2, End::Commit).await;
    assert_eq!(db.numbers("changes").await, [1, 2]);
    db.close().await;
    let closed = db.write().await.err().expect("the file is closed");
    assert!(closed.is_away(), "{closed}");
}

const CHILD_FOLDER: &str = "OUTBOX_TEST_CHILD_FOLDER";

/// Not a test: the process that a later test kills. Changes and relays concurrently and prints each
/// committed number.
#[tokio::test(flavor = "multi_thread")]
async fn child_changes_and_relays_until_killed() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let db = service(folder).await;
    let log = Embedded::open(folder.join("log")).await.unwrap();
    tokio::spawn(Relay::run(
        db.clone(),
        Arc::new(log),
        CancellationToken::new(),
    ));
    let first = numbers(db.read(), "changes").await.len();
    for number in first.. {
        change(&db, number).await.commit().await.unwrap();
        println!("committed {number}");
    }
}

/// Numbers changed per transaction of the next child.
const GROUP: usize = 3;

/// Not a test: the process that the last test kills. Two tasks commit groups without a pause.
#[tokio::test(flavor = "multi_thread")]
async fn child_changes_groups_directly_and_relays_until_killed() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let db = direct(folder).await;
    let log = Embedded::open(folder.join("log")).await.unwrap();
    tokio::spawn(Relay::run(
        db.clone(),
        Arc::new(log),
        CancellationToken::new(),
    ));
    let writers: Vec<_> = (0..2)
        .map(|_| {
            let db = db.clone();
            tokio::spawn(async move {
                for _ in 0_u64.. {
                    let tx = db.write().await.unwrap();
                    let last = change_group(&tx);
                    tx.commit().unwrap();
                    println!("committed {last}");
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

/// Changes the next numbers with their events; returns the last one.
fn change_group(tx: &events::DirectTx) -> usize {
    let sql = "SELECT COALESCE(MAX(number) + 1, 0) FROM changes";
    let first: i64 = tx.query_row(sql, [], |row| row.get(0)).unwrap();
    let numbers: Vec<usize> = (first as usize..).take(GROUP).collect();
    for number in &numbers {
        let sql = "INSERT INTO changes (number) VALUES (?1)";
        tx.execute(sql, [*number as i64]).unwrap();
    }
    let events: Vec<_> = numbers
        .iter()
        .map(|number| event("t", "k", *number))
        .collect();
    tx.append(Packed::of(&events)).unwrap();
    numbers[GROUP - 1]
}

/// Runs a child repeatedly on the same data and kills it each time after another number of commits.
/// Returns the number of committed changes.
fn kill_repeatedly(child: &str, folder: &Path) -> usize {
    let mut committed = 0;
    for after in [1, 2, 3, 5, 8, 13] {
        let mut child = Victim::spawn(child, [(CHILD_FOLDER, folder)]);
        let target = committed + after;
        while let Some(line) = child.next_line() {
            if let Some((_, number)) = line.split_once("committed ") {
                committed = committed.max(number.parse::<usize>().unwrap() + 1);
            }
            if committed >= target {
                child.kill();
            }
        }
        assert!(committed >= target);
    }
    committed
}

/// Asserts that every printed change and its event exist exactly once.
async fn assert_whole(db: impl Service, folder: &Path, committed: usize) -> usize {
    let log = Embedded::open(folder.join("log")).await.unwrap();
    while Relay::step(&db, &log).await.unwrap() > 0 {}
    let changes = db.numbers("changes").await;
    assert!(changes.len() >= committed);
    assert_eq!(changes, (0..changes.len()).collect::<Vec<_>>());
    assert_eq!(published(&log, changes.len()).await, changes);
    let left = log.backlog("another reader", &["t"]).await.unwrap();
    assert_eq!(left.len(), changes.len(), "an event is in the log twice");
    changes.len()
}

// rows: R248
#[tokio::test]
async fn r248_kill_9_between_commit_and_publish_loses_and_invents_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let child = "child_changes_and_relays_until_killed";
    let committed = kill_repeatedly(child, folder.path());
    let db = service(folder.path()).await;
    assert_whole(db, folder.path(), committed).await;
}

// rows: R248
#[tokio::test]
async fn r248_kill_9_in_a_group_written_directly_loses_and_halves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let child = "child_changes_groups_directly_and_relays_until_killed";
    let committed = kill_repeatedly(child, folder.path());
    let db = direct(folder.path()).await;
    let changes = assert_whole(db, folder.path(), committed).await;
    assert_eq!(changes % GROUP, 0, "a group is incomplete");
}

#[tokio::test]
async fn old_ids_are_forgotten_in_pages_and_young_ones_stay() {
    const DAY_US: i64 = 86_400_000_000;
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let now_us = service_kit::clock::now_us();
    let timed = |at_us: i64, number: u128| {
        let milliseconds = u128::from(at_us.unsigned_abs() / 1_000);
        Uuid::from_u128((milliseconds << 80) | (7 << 76) | (2 << 62) | number)
    };
    let random = |number: usize| event("t", "k", number).id;
    let old_us = now_us - 10 * DAY_US;
    let old = (0..2_500).map(|number| (timed(old_us, number), old_us));
    let old = old.chain((0..300).map(|number| (random(number), old_us)));
    let young = (0..300).map(|number| (random(1_000 + number), now_us));
    let young = young.chain((0..300).map(|number| (timed(now_us, number), now_us)));
    // An old event that a stopped consumer accepted late.
    let young = young.chain([(timed(old_us, 5_000), now_us)]);
    let mut tx = db.write().await.unwrap();
    for (id, accepted_us) in old.chain(young) {
        sqlx::query("INSERT INTO inbox (consumer, event_id, accepted_at_us) VALUES ('c', $1, $2)")
            .bind(id.to_string())
            .bind(accepted_us)
            .execute(&mut *tx)
            .await
            .unwrap();
    }
    tx.commit().await.unwrap();

    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    assert_eq!(inbox::sweep(&db, &log).await.unwrap(), 0, "an empty log");
    let mut record = event("t", "k", 1);
    record.occurred_at_us = now_us - 5 * DAY_US;
    log.publish(&[record]).await.unwrap();
    published(&log, 1).await;
    let read = log.backlog("other", &["t"]).await.unwrap();
    Log::commit(&log, "other", &read[0].position).await.unwrap();
    assert_eq!(inbox::sweep(&db, &log).await.unwrap(), 2_800);
    assert_eq!(inbox::sweep(&db, &log).await.unwrap(), 0);
    let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM inbox")
        .fetch_one(db.read())
        .await
        .unwrap();
    assert_eq!(left, 601);
}
