//! Row seals: every alteration of a store past its service is found.

use std::path::Path;
use std::sync::LazyLock;

use events::seal::{self, Change, SealedStore, Sealing};
use events::{Direct, Sqlite};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, Connection, Executor, SqliteConnection};

const SCHEMA: &str = "CREATE TABLE users (user_id TEXT PRIMARY KEY, level BIGINT NOT NULL, note BLOB); \
    CREATE TABLE limits (user_id TEXT NOT NULL, kind TEXT NOT NULL, daily TEXT NOT NULL, \
        PRIMARY KEY (user_id, kind)) WITHOUT ROWID; \
    CREATE TABLE moves (number INTEGER PRIMARY KEY, flow INTEGER NOT NULL, amount BIGINT NOT NULL); \
    CREATE TABLE accounts (account_id TEXT PRIMARY KEY, frozen INTEGER NOT NULL, balance BIGINT NOT NULL); \
    CREATE TABLE answers (key TEXT PRIMARY KEY, call INTEGER NOT NULL, text TEXT NOT NULL); \
    CREATE TABLE scratch (id INTEGER PRIMARY KEY, text TEXT NOT NULL)";
const MORE: &str = "ALTER TABLE users ADD COLUMN email TEXT NOT NULL DEFAULT ''; \
    UPDATE limits SET daily = daily || '.00'";

static FIRST: LazyLock<Migrator> =
    LazyLock::new(|| events::migrations::migrator(&[("0001_rows", SCHEMA)]));
static SECOND: LazyLock<Migrator> =
    LazyLock::new(|| events::migrations::migrator(&[("0001_rows", SCHEMA), ("0002_more", MORE)]));

static SEALING: Sealing = Sealing {
    exempt: &[("scratch", "test")],
    partly: &[
        ("moves", "ROW.flow <> 6", "test"),
        ("answers", "ROW.call <> 6", "test"),
    ],
    columns: &[("accounts", &["frozen"])],
    summed: &[("answers", "test")],
};

fn store(folder: &Path) -> SealedStore {
    SealedStore {
        name: "test",
        path: folder.join("service.db"),
        sealing: &SEALING,
    }
}

async fn open(folder: &Path, migrator: &'static Migrator) -> Sqlite {
    let store = store(folder);
    let opened = Sqlite::open_sealed(&store.path, migrator, store.sealing).await;
    opened.unwrap()
}

async fn write(db: &Sqlite, statements: &[&str]) {
    let mut tx = db.write().await.unwrap();
    for sql in statements {
        tx.execute(AssertSqlSafe((*sql).to_owned())).await.unwrap();
    }
    tx.commit().await.unwrap();
}

/// Writes as another program.
async fn tamper(folder: &Path, sql: &str) {
    let url = format!("sqlite://{}", store(folder).path.display());
    let mut db = SqliteConnection::connect(&url).await.unwrap();
    let done = db.execute(AssertSqlSafe(sql.to_owned())).await.unwrap();
    assert!(done.rows_affected() > 0, "{sql}");
    db.close().await.unwrap();
}

type Found = (String, String, Change);

async fn found(folder: &Path) -> Vec<Found> {
    let checked = seal::check(&store(folder)).await.unwrap();
    let altered = checked.altered.into_iter();
    altered
        .map(|altered| (altered.table, altered.key, altered.change))
        .collect()
}

fn one(table: &str, key: &str, change: Change) -> Vec<Found> {
    vec![(table.to_owned(), key.to_owned(), change)]
}

fn none() -> Vec<Found> {
    Vec::new()
}

const ROWS: [&str; 6] = [
    "INSERT INTO users VALUES ('anna', 1, x'00FF'), ('boris', 2, NULL)",
    "INSERT INTO limits VALUES ('anna', 'DEPOSIT', '100'), ('anna', 'TRADING', '5')",
    "INSERT INTO moves VALUES (1, 1, 10), (2, 6, 20)",
    "INSERT INTO accounts VALUES ('anna:RUB', 0, 5)",
    "INSERT INTO answers VALUES ('a', 1, 'done'), ('b', 2, 'refused'), ('c', 6, 'done')",
    "INSERT INTO scratch VALUES (1, 'x')",
];

#[tokio::test]
async fn every_alteration_past_the_service_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    assert_eq!(found(folder.path()).await, none());
    // (statement, what is found, statement that undoes it)
    let cases = [
        (
            "UPDATE users SET level = 3 WHERE user_id = 'boris'",
            one("users", "'boris'", Change::Changed),
            "UPDATE users SET level = 2 WHERE user_id = 'boris'",
        ),
        (
            "UPDATE users SET note = x'00FE' WHERE user_id = 'anna'",
            one("users", "'anna'", Change::Changed),
            "UPDATE users SET note = x'00FF' WHERE user_id = 'anna'",
        ),
        (
            "DELETE FROM limits WHERE kind = 'TRADING'",
            one("limits", "'anna','TRADING'", Change::Deleted),
            "INSERT INTO limits VALUES ('anna', 'TRADING', '5')",
        ),
        (
            "INSERT INTO limits VALUES ('boris', 'TRADING', '9')",
            one("limits", "'boris','TRADING'", Change::Added),
            "DELETE FROM limits WHERE user_id = 'boris'",
        ),
        // A sealed row that becomes one without a seal.
        (
            "UPDATE moves SET flow = 6 WHERE number = 1",
            one("moves", "1", Change::Deleted),
            "UPDATE moves SET flow = 1 WHERE number = 1",
        ),
        (
            "UPDATE accounts SET frozen = 2",
            one("accounts", "'anna:RUB'", Change::Changed),
            "UPDATE accounts SET frozen = 0",
        ),
        // A summed table: its rows have no seals.
        (
            "UPDATE answers SET text = 'done' WHERE key = 'b'",
            one("answers", "2 rows of 2", Change::Changed),
            "UPDATE answers SET text = 'refused' WHERE key = 'b'",
        ),
        (
            "UPDATE answers SET call = 6 WHERE key = 'b'",
            one("answers", "1 rows of 2", Change::Changed),
            "UPDATE answers SET call = 2 WHERE key = 'b'",
        ),
        (
            "INSERT INTO answers VALUES ('d', 1, 'done')",
            one("answers", "3 rows of 2", Change::Changed),
            "DELETE FROM answers WHERE key = 'd'",
        ),
        (
            "UPDATE answers SET text = 'x' WHERE key = 'c'",
            Vec::new(),
            "UPDATE answers SET text = 'done' WHERE key = 'c'",
        ),
        // Without a seal: another check covers them.
        (
            "UPDATE moves SET amount = 21 WHERE number = 2",
            Vec::new(),
            "UPDATE moves SET amount = 20 WHERE number = 2",
        ),
        (
            "UPDATE accounts SET balance = 6",
            Vec::new(),
            "UPDATE accounts SET balance = 5",
        ),
        (
            "UPDATE scratch SET text = 'y'",
            Vec::new(),
            "UPDATE scratch SET text = 'x'",
        ),
    ];
    for (sql, expected, undo) in cases {
        tamper(folder.path(), sql).await;
        assert_eq!(found(folder.path()).await, expected, "{sql}");
        tamper(folder.path(), undo).await;
        assert_eq!(found(folder.path()).await, none(), "{undo}");
    }
}

#[tokio::test]
async fn a_row_that_is_deleted_with_its_seal_is_missing_in_the_sum() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    tamper(folder.path(), "DELETE FROM users WHERE user_id = 'anna'").await;
    tamper(
        folder.path(),
        "DELETE FROM row_seals WHERE name = 'users' AND key = '''anna'''",
    )
    .await;
    let missing = one("seal_total", "5 rows of 6", Change::Changed);
    assert_eq!(found(folder.path()).await, missing);
    // Without the key of the seals the sum cannot be put right.
    let sum = "UPDATE seal_total SET rows = rows - 1 WHERE name = ''";
    tamper(folder.path(), sum).await;
    assert_eq!(found(folder.path()).await.len(), 1);
}

#[tokio::test]
async fn the_services_own_writes_keep_their_seals() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    // More rows than one page, rows written more than once, moved keys, upserts, exempt rows.
    let many: Vec<String> = (10..2_510)
        .map(|number| format!("({number}, {}, 1)", number % 7))
        .collect();
    let insert = format!("INSERT INTO moves VALUES {}", many.join(", "));
    let statements = [
        insert.as_str(),
        "UPDATE moves SET amount = 2 WHERE number % 2 = 0",
        "UPDATE moves SET flow = 6 WHERE number BETWEEN 20 AND 30",
        "UPDATE moves SET flow = 1 WHERE number = 2",
        "DELETE FROM moves WHERE number BETWEEN 40 AND 60",
        "UPDATE users SET user_id = 'clara' WHERE user_id = 'anna'",
        "INSERT INTO limits VALUES ('anna', 'TRADING', '6') \
         ON CONFLICT (user_id, kind) DO UPDATE SET daily = excluded.daily",
        "INSERT INTO limits VALUES ('anna', 'TRADING', '7') \
         ON CONFLICT (user_id, kind) DO UPDATE SET daily = excluded.daily",
        "INSERT INTO limits VALUES ('anna', 'TRADING', '8') ON CONFLICT DO NOTHING",
        "UPDATE accounts SET balance = 9",
        "UPDATE accounts SET frozen = 1",
    ];
    write(&db, &statements).await;
    assert_eq!(found(folder.path()).await, none());
    // A transaction without a commit leaves no trace.
    let mut tx = db.write().await.unwrap();
    tx.execute("DELETE FROM moves").await.unwrap();
    drop(tx);
    write(&db, &["UPDATE users SET level = 7 WHERE user_id = 'boris'"]).await;
    assert_eq!(found(folder.path()).await, none());
    db.close().await;

    // Another start seals nothing anew.
    tamper(
        folder.path(),
        "UPDATE users SET level = 8 WHERE user_id = 'boris'",
    )
    .await;
    let db = open(folder.path(), &FIRST).await;
    let altered = one("users", "'boris'", Change::Changed);
    assert_eq!(found(folder.path()).await, altered);
    // The service writes the row again: it is as the service wants it.
    write(&db, &["UPDATE users SET level = 9 WHERE user_id = 'boris'"]).await;
    assert_eq!(found(folder.path()).await, none());
}

#[tokio::test]
async fn a_migration_does_not_hide_an_alteration() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    db.close().await;
    tamper(
        folder.path(),
        "UPDATE limits SET daily = '900' WHERE kind = 'TRADING'",
    )
    .await;
    let altered = one("limits", "'anna','TRADING'", Change::Changed);
    for _ in 0..2 {
        let db = open(folder.path(), &SECOND).await;
        assert_eq!(found(folder.path()).await, altered);
        write(
            &db,
            &["UPDATE users SET email = 'a@b' WHERE user_id = 'anna'"],
        )
        .await;
        assert_eq!(found(folder.path()).await, altered);
        db.close().await;
    }
}

#[tokio::test]
async fn a_row_of_a_summed_table_has_no_seal() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    let count = async || -> i64 {
        let count = sqlx::query_scalar("SELECT COUNT(*) FROM row_seals");
        count.fetch_one(db.read()).await.unwrap()
    };
    assert_eq!(count().await, 6);
    // More than one page, rows written more than once, a moved key, an upsert, a deletion.
    let many: Vec<String> = (0..2_500)
        .map(|number| format!("('k{number}', {}, 'x')", number % 7))
        .collect();
    let insert = format!("INSERT INTO answers VALUES {}", many.join(", "));
    let statements = [
        insert.as_str(),
        "UPDATE answers SET text = text || 'y' WHERE call <> 1",
        "UPDATE answers SET call = 6 WHERE key = 'k1'",
        "UPDATE answers SET call = 3 WHERE key = 'k6'",
        "UPDATE answers SET key = 'z' WHERE key = 'a'",
        "INSERT INTO answers VALUES ('b', 4, 'again') \
         ON CONFLICT (key) DO UPDATE SET call = excluded.call, text = excluded.text",
        "DELETE FROM answers WHERE key LIKE 'k1%'",
    ];
    write(&db, &statements).await;
    assert_eq!(count().await, 6);
    assert_eq!(found(folder.path()).await, none());
    // A transaction without a commit leaves no trace.
    let mut tx = db.write().await.unwrap();
    tx.execute("DELETE FROM answers").await.unwrap();
    drop(tx);
    write(&db, &["UPDATE answers SET text = 'w' WHERE key = 'z'"]).await;
    assert_eq!(found(folder.path()).await, none());
    db.close().await;
    let db = open(folder.path(), &SECOND).await;
    assert_eq!(found(folder.path()).await, none());
    db.close().await;
}

#[tokio::test]
async fn what_is_missing_in_the_sums_is_found_before_a_migration() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    db.close().await;
    for sql in [
        "DELETE FROM users WHERE user_id = 'anna'",
        "DELETE FROM row_seals WHERE name = 'users' AND key = '''anna'''",
        "UPDATE answers SET text = 'x' WHERE key = 'a'",
    ] {
        tamper(folder.path(), sql).await;
    }
    let db = open(folder.path(), &SECOND).await;
    let expected = [
        one("answers", "2 rows of 2", Change::Changed),
        one("seal_total", "''", Change::Changed),
    ];
    assert_eq!(found(folder.path()).await, expected.concat());
    db.close().await;
}

/// Without the key nothing proves the seals, and a store with a key has seals.
#[tokio::test]
async fn lost_seals_and_a_lost_key_are_findings_until_they_are_accepted() {
    for lost in ["seals", "key"] {
        let folder = tempfile::tempdir().unwrap();
        let db = open(folder.path(), &FIRST).await;
        write(&db, &ROWS).await;
        db.close().await;
        let key = seal::key_file(&store(folder.path()).path);
        let change = if lost == "seals" {
            tamper(folder.path(), "DELETE FROM row_seals").await;
            tamper(folder.path(), "DELETE FROM seal_total").await;
            tamper(folder.path(), "UPDATE users SET level = 9").await;
            Change::Deleted
        } else {
            std::fs::remove_file(&key).unwrap();
            Change::Changed
        };
        let finding = one("seal_total", "''", change);
        for _ in 0..2 {
            let db = open(folder.path(), &FIRST).await;
            assert_eq!(found(folder.path()).await, finding, "{lost}");
            db.close().await;
        }
        let accepted = seal::accept(&store(folder.path())).await.unwrap();
        assert_eq!(accepted.len(), 1, "{accepted:?}");
        assert!(!key.exists());
        let db = open(folder.path(), &FIRST).await;
        assert_eq!(found(folder.path()).await, none());
        let sql = "UPDATE users SET level = 7 WHERE user_id = 'boris'";
        write(&db, &[sql]).await;
        db.close().await;
        // Nothing to accept: the key stays.
        let former = std::fs::read(&key).unwrap();
        let accepted = seal::accept(&store(folder.path())).await.unwrap();
        assert!(accepted.is_empty(), "{accepted:?}");
        assert_eq!(std::fs::read(&key).unwrap(), former);
    }
}

#[tokio::test]
async fn accepted_rows_are_sealed_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let db = open(folder.path(), &FIRST).await;
    write(&db, &ROWS).await;
    db.close().await;
    tamper(folder.path(), "UPDATE users SET level = 9").await;
    let accepted = seal::accept(&store(folder.path())).await.unwrap();
    assert_eq!(accepted.len(), 2, "{accepted:?}");
    let db = open(folder.path(), &FIRST).await;
    assert_eq!(found(folder.path()).await, none());
    let sql = "UPDATE users SET level = 1 WHERE user_id = 'anna'";
    tamper(folder.path(), sql).await;
    let altered = one("users", "'anna'", Change::Changed);
    assert_eq!(found(folder.path()).await, altered);
    db.close().await;
}

/// A crash before and after the commit of the first seals.
#[tokio::test]
async fn an_interrupted_first_start_is_no_finding() {
    let folder = tempfile::tempdir().unwrap();
    let path = store(folder.path()).path;
    let key = seal::key_file(&path);
    let mut new_key = key.clone().into_os_string();
    new_key.push(".new");
    let db = Sqlite::open(&path, &FIRST).await.unwrap();
    write(&db, &ROWS).await;
    db.close().await;
    std::fs::write(&new_key, "ab".repeat(32)).unwrap();
    let db = open(folder.path(), &FIRST).await;
    assert_eq!(std::fs::read_to_string(&key).unwrap(), "ab".repeat(32));
    db.close().await;
    std::fs::rename(&key, &new_key).unwrap();
    assert_eq!(found(folder.path()).await, none());
    let db = open(folder.path(), &FIRST).await;
    assert!(key.exists());
    assert_eq!(found(folder.path()).await, none());
    db.close().await;
}

/// A store of an earlier release has no seals: its rows are sealed as they are.
#[tokio::test]
async fn a_store_without_seals_is_sealed_when_it_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = store(folder.path()).path;
    let db = Sqlite::open(&path, &FIRST).await.unwrap();
    write(&db, &ROWS).await;
    db.close().await;
    let db = open(folder.path(), &FIRST).await;
    assert_eq!(found(folder.path()).await, none());
    tamper(
        folder.path(),
        "UPDATE users SET level = 3 WHERE user_id = 'anna'",
    )
    .await;
    assert_eq!(
        found(folder.path()).await,
        one("users", "'anna'", Change::Changed)
    );
    db.close().await;
}

#[tokio::test]
async fn the_writer_on_the_calling_thread_seals_too() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let opened = Direct::open_sealed(store.path, &FIRST, store.sealing).await;
    let db = opened.unwrap();
    let tx = db.write().await.unwrap();
    for sql in ROWS {
        tx.execute_batch(sql).unwrap();
    }
    tx.commit().unwrap();
    let tx = db.write().await.unwrap();
    tx.execute_batch(
        "UPDATE moves SET amount = amount + 1; DELETE FROM limits WHERE kind = 'TRADING'; \
         UPDATE answers SET text = 'x' WHERE key <> 'a'; UPDATE accounts SET balance = 7",
    )
    .unwrap();
    tx.commit().unwrap();
    drop(db.write().await.unwrap());
    assert_eq!(found(folder.path()).await, none());
    tamper(
        folder.path(),
        "UPDATE moves SET amount = 1 WHERE number = 1",
    )
    .await;
    assert_eq!(
        found(folder.path()).await,
        one("moves", "1", Change::Changed)
    );
    db.close().await;
}
