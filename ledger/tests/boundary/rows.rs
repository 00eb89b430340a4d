//! A separate database for each test, and direct access to a ledger's rows.

use std::path::Path;

use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, SqlitePool};

/// Database of a test ledger. Dropping the value drops its PostgreSQL schema.
pub struct Database {
    /// Empty: SQLite in the ledger's folder.
    pub url: String,
    /// Also the application name of the ledger's connections.
    pub schema: String,
    /// URL of the server; empty: SQLite.
    pub server: String,
}

impl Database {
    /// SQLite, or a fresh schema on the PostgreSQL server that the test binary names.
    pub async fn fresh() -> Self {
        match crate::server() {
            Some(server) => Self::on(server).await,
            None => Self::sqlite(),
        }
    }

    pub fn sqlite() -> Self {
        Database {
            url: String::new(),
            schema: String::new(),
            server: String::new(),
        }
    }

    /// A fresh schema on this server.
    pub async fn on(server: String) -> Self {
        let schema = format!("test_{}", uuid::Uuid::now_v7().simple());
        execute(&server, &format!("CREATE SCHEMA {schema}")).await;
        let url = format!("{server}?options[search_path]={schema}&application_name={schema}");
        Database {
            url,
            schema,
            server,
        }
    }

    /// Terminates the sessions of this database that match `condition`; returns their number.
    #[allow(dead_code, reason = "SQLite has no sessions")]
    pub async fn terminate(&self, condition: &str) -> i64 {
        let mut connection = PgConnection::connect(&self.server).await.unwrap();
        let sql = format!(
            "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{}' \
             AND {condition}",
            self.schema
        );
        let count = sqlx::query_scalar(AssertSqlSafe(sql));
        count.fetch_one(&mut connection).await.unwrap()
    }
}

async fn execute(server: &str, sql: &str) {
    let mut connection = PgConnection::connect(server).await.unwrap();
    let sql = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    sql.execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.url.is_empty() {
            return;
        }
        let (server, schema) = (self.server.clone(), self.schema.clone());
        // The value is dropped inside the test's runtime, whose thread cannot run another runtime.
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build().unwrap();
            let sql = format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{schema}'; \
                 SET client_min_messages = 'error'; DROP SCHEMA {schema} CASCADE"
            );
            runtime.block_on(execute(&server, &sql));
        });
        if dropped.join().is_err() {
            eprintln!("cannot drop schema {}", self.schema);
        }
    }
}

/// Direct access to the rows of either database.
pub enum Rows {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

/// Blocks the ledger's writes until it is released.
pub enum Lock {
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>),
    Postgres(sqlx::Transaction<'static, sqlx::Postgres>),
}

impl Rows {
    pub async fn open(database: &Database, folder: &Path) -> Self {
        if database.url.is_empty() {
            let options =
                sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join("ledger.sqlite"));
            Rows::Sqlite(SqlitePool::connect_with(options).await.unwrap())
        } else {
            // Under another application name, so [`Database::terminate`] spares this connection.
            let url = database
                .url
                .replace("application_name=", "application_name=rows_of_");
            Rows::Postgres(PgPool::connect(&url).await.unwrap())
        }
    }

    pub async fn execute(&self, sql: &'static str) -> Result<u64, sqlx::Error> {
        Ok(match self {
            Rows::Sqlite(pool) => sqlx::query(sql).execute(pool).await?.rows_affected(),
            Rows::Postgres(pool) => sqlx::query(sql).execute(pool).await?.rows_affected(),
        })
    }

    /// Executes a statement. On SQLite foreign keys and checks are off. `zeroblob(32)` in the
    /// statement works on both databases.
    pub async fn tamper(&self, sql: &str) -> Result<u64, sqlx::Error> {
        match self {
            Rows::Sqlite(pool) => {
                let mut db = pool.acquire().await?;
                for off in [
                    "PRAGMA foreign_keys = off",
                    "PRAGMA ignore_check_constraints = on",
                ] {
                    sqlx::query(off).execute(&mut *db).await?;
                }
                let sql = sqlx::query(AssertSqlSafe(sql.to_owned()));
                Ok(sql.execute(&mut *db).await?.rows_affected())
            }
            Rows::Postgres(pool) => {
                let sql = sql.replace("zeroblob(32)", "decode(repeat('00', 32), 'hex')");
                let sql = sqlx::query(AssertSqlSafe(sql));
                Ok(sql.execute(pool).await?.rows_affected())
            }
        }
    }

    /// The values of a query with one text column.
    pub async fn texts(&self, sql: &'static str) -> Vec<String> {
        match self {
            Rows::Sqlite(pool) => sqlx::query_scalar(sql).fetch_all(pool).await,
            Rows::Postgres(pool) => sqlx::query_scalar(sql).fetch_all(pool).await,
        }
        .unwrap()
    }

    pub async fn lock(&self) -> Lock {
        match self {
            Rows::Sqlite(pool) => Lock::Sqlite(pool.begin_with("BEGIN IMMEDIATE").await.unwrap()),
            Rows::Postgres(pool) => {
                let mut lock = pool.begin().await.unwrap();
                let sql = "LOCK TABLE sub_accounts IN ACCESS EXCLUSIVE MODE";
                sqlx::query(sql).execute(&mut *lock).await.unwrap();
                Lock::Postgres(lock)
            }
        }
    }

    pub async fn close(self) {
        match self {
            Rows::Sqlite(pool) => pool.close().await,
            Rows::Postgres(pool) => pool.close().await,
        }
    }
}

impl Lock {
    pub async fn release(self) {
        match self {
            Lock::Sqlite(lock) => lock.rollback().await,
            Lock::Postgres(lock) => lock.rollback().await,
        }
        .unwrap();
    }
}

/// Queries that must return no rows, regardless of the calls made.
const NEVER: [(&str, &str); 6] = [
    (
        "an instrument that does not add up to zero",
        "SELECT instrument_id FROM sub_accounts GROUP BY instrument_id HAVING SUM(balance) <> 0",
    ),
    (
        "held money that differs from the remainder of active holds",
        "SELECT subaccount_id FROM sub_accounts s WHERE held <> \
         (SELECT COALESCE(SUM(remaining), 0) FROM holds h WHERE h.subaccount_id = s.subaccount_id AND h.status = 1)",
    ),
    (
        "a user with a negative balance",
        "SELECT subaccount_id FROM sub_accounts WHERE subaccount_id NOT LIKE 'system:%' \
         AND (balance < 0 OR balance - held - unsettled < 0)",
    ),
    (
        "a hold that gained or lost money",
        "SELECT hold_id FROM holds WHERE amount + returned_by_children <> remaining + split_off + consumed + released \
         OR added > amount OR (status <> 1 AND remaining <> 0)",
    ),
    (
        "a balance that differs from its postings",
        "SELECT subaccount_id FROM sub_accounts s WHERE balance <> \
         (SELECT COALESCE(SUM(amount), 0) FROM postings p WHERE p.credit_subaccount_id = s.subaccount_id) - \
         (SELECT COALESCE(SUM(amount), 0) FROM postings p WHERE p.debit_subaccount_id = s.subaccount_id)",
    ),
    (
        "a closed sub-account that is not empty",
        "SELECT subaccount_id FROM sub_accounts WHERE closed AND (balance <> 0 OR held <> 0 OR unsettled <> 0)",
    ),
];

/// Asserts [`NEVER`]; `when` is part of the message.
pub async fn audit(rows: &Rows, when: &str) {
    for (what, sql) in NEVER {
        let found = rows.texts(sql).await;
        assert!(found.is_empty(), "{when}: {what}: {found:?}");
    }
}
