//! A separate database for each test.

use std::path::Path;

use sqlx::{
    AssertSqlSafe, Connection, PgConnection, SqliteConnection, sqlite::SqliteConnectOptions,
};
use uuid::Uuid;

/// Database of a test. Dropping the value drops its PostgreSQL schema.
pub struct Database {
    /// Empty: SQLite in the test's folder.
    pub url: String,
    schema: String,
    server: String,
}

impl Database {
    /// SQLite, or a fresh schema on the PostgreSQL server that the test binary names.
    pub async fn fresh() -> Self {
        let Some(server) = crate::server() else {
            return Database {
                url: String::new(),
                schema: String::new(),
                server: String::new(),
            };
        };
        let schema = format!("test_{}", Uuid::now_v7().simple());
        execute(&server, &format!("CREATE SCHEMA {schema}")).await;
        Database {
            url: format!("{server}?options[search_path]={schema}&application_name={schema}"),
            schema,
            server,
        }
    }
}

/// Changes the state in audit record 2 past the service, as the owner of a database can.
#[allow(dead_code, reason = "each test target uses its part")]
pub async fn alter_record(url: &str, file: &Path) {
    let change = "UPDATE audit_records SET after = 'EXECUTED' WHERE sequence = 2";
    if url.is_empty() {
        let options = SqliteConnectOptions::new().filename(file);
        let mut db = SqliteConnection::connect_with(&options).await.unwrap();
        let sql = format!("DROP TRIGGER audit_records_never_change; {change}");
        let altered = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut db).await;
        altered.unwrap();
        db.close().await.unwrap();
        return;
    }
    let sql = format!("DROP TRIGGER audit_records_never_change ON audit_records; {change}");
    execute(url, &sql).await;
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
