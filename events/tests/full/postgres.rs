//! Outbox and inbox on a real PostgreSQL, with concurrent transactions.

use async_trait::async_trait;
use events::{
    Embedded, Postgres, outbox,
    outbox::{Queue, Relay},
    postgres::{Tx, is_away, outbox::accept_in_tx, outbox::append_in_tx},
};
use sqlx::{
    AssertSqlSafe, Connection, PgConnection,
    migrate::{Migration, MigrationType, Migrator},
};
use uuid::Uuid;

use crate::common::{
    self, event,
    outbox::{End, Service, TABLES, published},
};

fn server() -> String {
    std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `tests/services/postgres.sh start` and pass the printed URL",
    )
}

fn migrator() -> Migrator {
    let tables = sqlx::SqlStr::from_static(TABLES);
    let migration = Migration::new(1, "service".into(), MigrationType::Simple, tables, false);
    Migrator::with_migrations(vec![migration])
}

async fn execute(sql: String) {
    let mut connection = PgConnection::connect(&server()).await.unwrap();
    let sql = sqlx::raw_sql(AssertSqlSafe(sql));
    sql.execute(&mut connection).await.unwrap();
}

/// URL of a new schema.
async fn fresh() -> String {
    let schema = format!("test_{}", Uuid::now_v7().simple());
    execute(format!("CREATE SCHEMA {schema}")).await;
    let server = server();
    format!("{server}?options[search_path]={schema}&application_name={schema}")
}

async fn drop_schema(url: &str) {
    let schema = url.rsplit('=').next().unwrap();
    execute(format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{schema}'; \
         SET client_min_messages = 'error'; DROP SCHEMA {schema} CASCADE"
    ))
    .await;
}

async fn end(tx: Tx, end: End) {
    match end {
        End::Commit => tx.commit().await.unwrap(),
        End::Rollback => tx.rollback().await.unwrap(),
        End::Drop => drop(tx),
    }
}

async fn change(db: &Postgres, key: &str, number: usize) -> Tx {
    let mut tx = db.write().await.unwrap();
    sqlx::query("INSERT INTO changes (number) VALUES ($1)")
        .bind(number as i64)
        .execute(&mut *tx)
        .await
        .unwrap();
    let event = event("t", key, number);
    append_in_tx(&mut tx, &[event]).await.unwrap();
    tx
}

#[async_trait]
impl Service for Postgres {
    async fn change(&self, number: usize, how: End) {
        end(change(self, "k", number).await, how).await;
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
            seen.push(accept_in_tx(&mut tx, consumer, id).await.unwrap());
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
        let sql = format!("SELECT number FROM {table} ORDER BY number");
        let rows = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql)).fetch_all(self.read());
        rows.await
            .unwrap()
            .into_iter()
            .map(|number| number as usize)
            .collect()
    }

    async fn due(&self, count: usize) {
        let sql = "SELECT COUNT(*) FROM outbox \
                   WHERE transaction_id < pg_snapshot_xmin(pg_current_snapshot())";
        common::in_time("no older transaction is open", async {
            loop {
                let due = sqlx::query_scalar::<_, i64>(sql).fetch_one(self.read());
                if due.await.unwrap() == count as i64 {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_the_contract_of_outbox_and_inbox_holds_on_postgres() {
    let mut urls = Vec::new();
    common::outbox::all(async || {
        let url = fresh().await;
        let db = Postgres::open(&url, &migrator()).await.unwrap();
        urls.push(url);
        db
    })
    .await;
    for url in urls {
        drop_schema(&url).await;
    }
}

async fn log() -> (tempfile::TempDir, Embedded) {
    let folder = tempfile::tempdir().unwrap();
    let log = Embedded::open(folder.path().join("log")).await.unwrap();
    (folder, log)
}

/// Relays until the outbox is empty.
async fn drain(db: &Postgres, log: &Embedded) {
    common::in_time("the outbox empties", async {
        while outbox::backlog(db).await.unwrap() > 0 {
            Relay::step(db, log).await.unwrap();
        }
    })
    .await;
}

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_a_slow_transaction_with_an_earlier_position_is_not_skipped() {
    let (url, (_folder, log)) = (fresh().await, log().await);
    let db = Postgres::open(&url, &migrator()).await.unwrap();
    change(&db, "k", 0).await.commit().await.unwrap();
    drain(&db, &log).await;
    let slow = change(&db, "k", 1).await;
    // Rows with later positions are committed first. They wait for the slow transaction, whatever
    // their key.
    change(&db, "k", 2).await.commit().await.unwrap();
    change(&db, "other", 3).await.commit().await.unwrap();
    for _ in 0..3 {
        assert_eq!(Relay::step(&db, &log).await.unwrap(), 0);
    }
    assert_eq!(outbox::backlog(&db).await.unwrap(), 2);
    slow.commit().await.unwrap();
    drain(&db, &log).await;
    assert_eq!(published(&log, 4).await, [0, 1, 2, 3]);
    // A transaction that was rolled back holds nothing back and leaves no row.
    let rolled_back = change(&db, "k", 4).await;
    change(&db, "k", 5).await.commit().await.unwrap();
    rolled_back.rollback().await.unwrap();
    drain(&db, &log).await;
    assert_eq!(numbers(&log, 5).await, [0, 1, 2, 3, 5]);
    assert_eq!(db.numbers("changes").await, [0, 1, 2, 3, 5]);
    drop_schema(&url).await;
}

async fn numbers(log: &Embedded, count: usize) -> Vec<usize> {
    use events::Log;
    let group = format!("reader-{}", Uuid::now_v7());
    let mut subscription = log.subscribe(&group, &["t"]).await.unwrap();
    let taken = common::receive(&mut subscription, count).await;
    let payload = |delivery: events::Delivery| delivery.record.event.payload.try_into().unwrap();
    taken
        .into_iter()
        .map(|delivery| usize::from_be_bytes(payload(delivery)))
        .collect()
}

// rows: R248
#[tokio::test(flavor = "multi_thread")]
async fn r248_the_order_of_a_key_follows_its_locks_not_transaction_age() {
    let (url, (_folder, log)) = (fresh().await, log().await);
    let db = Postgres::open(&url, &migrator()).await.unwrap();
    // The oldest transaction appends last. A transaction between it and the first writer's holds
    // the horizon.
    let mut older = db.write().await.unwrap();
    sqlx::query("SELECT pg_current_xact_id()")
        .execute(&mut *older)
        .await
        .unwrap();
    let horizon = change(&db, "other", 1).await;
    change(&db, "k", 2).await.commit().await.unwrap();
    append_in_tx(&mut older, &[event("t", "k", 3)])
        .await
        .unwrap();
    older.commit().await.unwrap();
    // The row of the oldest transaction is below the horizon, but the rows before it are not.
    assert_eq!(Relay::step(&db, &log).await.unwrap(), 0);
    horizon.commit().await.unwrap();
    drain(&db, &log).await;
    let order = published(&log, 3).await;
    assert_eq!(order, [1, 2, 3]);
    drop_schema(&url).await;
}

// rows: R248
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn r248_two_relays_and_overlapping_writers_publish_each_event_once() {
    use std::sync::Arc;
    use tokio_util::sync::CancellationToken;
    let (url, (_folder, log)) = (fresh().await, log().await);
    let stop = CancellationToken::new();
    let (mut relays, mut writers) = (Vec::new(), Vec::new());
    for process in 0..2_usize {
        let db = Postgres::open(&url, &migrator()).await.unwrap();
        let shared = Arc::new(log.clone());
        relays.push(tokio::spawn(Relay::run(db.clone(), shared, stop.clone())));
        for writer in 0..4 {
            let db = db.clone();
            writers.push(tokio::spawn(async move {
                for step in 0..50 {
                    let number = (process * 4 + writer) * 50 + step;
                    let tx = change(&db, &format!("k{writer}"), number).await;
                    if step % 7 == 0 {
                        tokio::task::yield_now().await;
                    }
                    end(
                        tx,
                        if step % 10 == 9 {
                            End::Drop
                        } else {
                            End::Commit
                        },
                    )
                    .await;
                }
            }));
        }
    }
    for writer in writers {
        common::in_time("a writer", writer).await.unwrap();
    }
    let db = Postgres::open(&url, &migrator()).await.unwrap();
    common::in_time("the outbox empties", async {
        while db.backlog().await.unwrap() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let changes = db.numbers("changes").await;
    assert_eq!(changes.len(), 8 * 45);
    let mut seen = numbers(&log, changes.len()).await;
    for writer in 0..8 {
        let own: Vec<usize> = seen
            .iter()
            .copied()
            .filter(|number| number / 50 == writer)
            .collect();
        assert!(own.is_sorted(), "writer {writer}: {own:?}");
    }
    seen.sort_unstable();
    assert_eq!(seen, changes);
    stop.cancel();
    for relay in relays {
        common::in_time("relay stops", relay).await.unwrap();
    }
    drop_schema(&url).await;
}

#[tokio::test]
async fn a_lost_or_locked_server_is_unavailable_and_a_broken_constraint_is_not() {
    let url = fresh().await;
    let db = Postgres::open(&url, &migrator()).await.unwrap();
    change(&db, "k", 1).await.commit().await.unwrap();
    let mut tx = db.write().await.unwrap();
    let twice = sqlx::query("INSERT INTO changes (number) VALUES (1)");
    let twice = twice.execute(&mut *tx).await.unwrap_err();
    assert!(!is_away(&twice) && !events::is_away(&twice), "{twice}");
    drop(tx);
    let mut lock = db.write().await.unwrap();
    sqlx::query("LOCK TABLE changes")
        .execute(&mut *lock)
        .await
        .unwrap();
    let mut tx = db.write().await.unwrap();
    let locked = sqlx::query("INSERT INTO changes (number) VALUES (2)");
    let locked = locked.execute(&mut *tx).await.unwrap_err();
    assert!(events::is_away(&locked), "{locked}");
    let schema = url.rsplit('=').next().unwrap();
    execute(format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{schema}'"
    ))
    .await;
    let lost = lock.commit().await.unwrap_err();
    assert!(lost.is_away(), "{lost}");
    drop(tx);
    db.close().await;
    let closed = db.write().await.err().expect("the pools are closed");
    assert!(closed.is_away(), "{closed}");
    let refused = Postgres::open("postgres://none@127.0.0.1:1/none", &migrator()).await;
    assert!(refused.err().expect("no server listens").is_away());
    drop_schema(&url).await;
}
