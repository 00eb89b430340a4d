//! Outbox and inbox: no event without its committed change, no committed change without its event, no effect twice.

mod common;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use common::{FAST, event, in_time, take};
use events::{
    Delivery, Embedded, Error, Log, Position, Record, Sqlite, Subscription, Waiting, consume_with,
    inbox, outbox, outbox::Relay,
};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// A service with one table: the numbers it has changed, and the effects it has had.
async fn service(folder: &Path) -> Sqlite {
    let sql = "CREATE TABLE changes (number BIGINT PRIMARY KEY); CREATE TABLE effects (number BIGINT NOT NULL);";
    let migration = Migration::new(
        1,
        "service".into(),
        MigrationType::Simple,
        sqlx::SqlStr::from_static(sql),
        false,
    );
    let migrator = Migrator::with_migrations(vec![migration]);
    Sqlite::open(folder.join("service.db"), &migrator)
        .await
        .unwrap()
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

async fn numbers(db: &Sqlite, table: &str) -> Vec<usize> {
    let sql = format!("SELECT number FROM {table} ORDER BY number");
    let rows: Vec<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
        .fetch_all(db.read())
        .await
        .unwrap();
    rows.into_iter().map(|number| number as usize).collect()
}

async fn published(log: &Embedded, count: usize) -> Vec<usize> {
    let mut subscription = log.subscribe("reader", &["t"]).await.unwrap();
    take(&mut subscription, count)
        .await
        .into_iter()
        .map(|delivery| usize::from_be_bytes(delivery.record.event.payload.try_into().unwrap()))
        .collect()
}

// rows: R248
#[tokio::test]
async fn r248_a_rolled_back_change_has_no_event_and_a_committed_one_has() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    drop(change(&db, 1).await);
    change(&db, 2).await.rollback().await.unwrap();
    change(&db, 3).await.commit().await.unwrap();
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 1);
    assert_eq!(numbers(&db, "changes").await, [3]);
    assert_eq!(published(&log, 1).await, [3]);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_is_woken_by_commits_and_keeps_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    let stop = CancellationToken::new();
    let relay = tokio::spawn(Relay::run(db.clone(), Arc::new(log.clone()), stop.clone()));
    // Overlapping writers: the order is that of the commits, whoever began first.
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let db = db.clone();
            tokio::spawn(async move {
                for step in 0..25 {
                    change(&db, writer * 25 + step)
                        .await
                        .commit()
                        .await
                        .unwrap();
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
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

/// A log that fails on purpose: before it has the events, or after it has them but before it says so.
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
                // As a log without memory of ids would: everything again, under headers of its own.
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

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_a_relay_that_dies_before_or_after_publishing_causes_one_effect_per_change() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let log = Faulty {
        log: Embedded::open(folder.path().join("log")).await.unwrap(),
        calls: AtomicUsize::new(0),
    };
    for number in 0..3 {
        change(&db, number).await.commit().await.unwrap();
    }
    assert!(Relay::step(&db, &log).await.is_err());
    assert!(Relay::step(&db, &log).await.is_err());
    assert_eq!(outbox::backlog(&db).await.unwrap(), 3);
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 3);
    assert_eq!(outbox::backlog(&db).await.unwrap(), 0);

    // Six records are in the log; the inbox makes three effects of them.
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let (target, stop) = (db.clone(), CancellationToken::new());
    let handler = move |event: events::Event| {
        let (db, tx) = (target.clone(), tx.clone());
        async move {
            let mut write = db.write().await?;
            let fresh = inbox::accept_in_tx(&mut write, "effects", event.id).await?;
            if fresh {
                let number = usize::from_be_bytes(event.payload.as_slice().try_into()?);
                sqlx::query("INSERT INTO effects (number) VALUES ($1)")
                    .bind(number as i64)
                    .execute(&mut *write)
                    .await?;
                write.commit().await?;
            }
            tx.send(fresh)?;
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
    assert_eq!(numbers(&db, "effects").await, [0, 1, 2]);
}

#[tokio::test]
async fn an_effect_that_is_rolled_back_is_not_in_the_inbox() {
    let folder = tempfile::tempdir().unwrap();
    let db = service(folder.path()).await;
    let id = event("t", "k", 1).id;
    let mut tx = db.write().await.unwrap();
    assert!(inbox::accept_in_tx(&mut tx, "c", id).await.unwrap());
    drop(tx);
    let mut tx = db.write().await.unwrap();
    assert!(inbox::accept_in_tx(&mut tx, "c", id).await.unwrap());
    assert!(!inbox::accept_in_tx(&mut tx, "c", id).await.unwrap());
    assert!(
        inbox::accept_in_tx(&mut tx, "another consumer", id)
            .await
            .unwrap()
    );
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

#[tokio::test]
async fn a_locked_or_closed_store_is_away_and_a_broken_constraint_is_not() {
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
    let pool = sqlx::SqlitePool::connect_with(impatient).await.unwrap();
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

const CHILD_FOLDER: &str = "OUTBOX_TEST_CHILD_FOLDER";

/// Not a test of its own: the process that the next test kills. It changes and relays at once and says each committed number.
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
    let first = numbers(&db, "changes").await.len();
    for number in first.. {
        change(&db, number).await.commit().await.unwrap();
        println!("committed {number}");
    }
}

// rows: R248
#[tokio::test]
async fn r248_kill_9_between_commit_and_publish_loses_and_invents_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut committed = 0;
    // Each round is killed after another number of commits and goes on with what the one before left.
    for after in [1, 2, 3, 5, 8, 13] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "child_changes_and_relays_until_killed",
                "--nocapture",
            ])
            .env(CHILD_FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let target = committed + after;
        for line in BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
        {
            if let Some((_, number)) = line.split_once("committed ") {
                committed = committed.max(number.parse::<usize>().unwrap() + 1);
            }
            if committed >= target {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(committed >= target);
    }
    let db = service(folder.path()).await;
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    while Relay::step(&db, &log).await.unwrap() > 0 {}
    let changes = numbers(&db, "changes").await;
    assert!(changes.len() >= committed);
    assert_eq!(changes, (0..changes.len()).collect::<Vec<_>>());
    assert_eq!(published(&log, changes.len()).await, changes);
}
