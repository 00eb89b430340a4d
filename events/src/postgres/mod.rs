//! A service's PostgreSQL database: pools, schema, transactions, the relay's own connection.
//!
//! Invariants: a committed transaction is durable (every session sets `synchronous_commit = on`,
//! whatever the server's default). Writers are concurrent at READ COMMITTED, so a service locks the
//! rows that its decisions depend on. A transaction dropped without [`Tx::commit`] is rolled back.
//! Several processes may share one database; one relay publishes at a time (see [`outbox`]). Known
//! limitation: no session is pinned to a primary, and a URL with several hosts is not supported.

pub mod audit;
pub mod outbox;

use std::{
    ops::{Deref, DerefMut},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use async_recursion::async_recursion as boxed;
use sqlx::{
    Connection, PgConnection, PgPool, Transaction,
    migrate::Migrator,
    postgres::{PgConnectOptions, PgDatabaseError, PgPoolOptions},
};
use tokio::sync::{Mutex, Notify};

use crate::Error;

/// Read connections per process.
const READERS: u32 = 8;
/// Write connections per process: a service has one writer task and a few background jobs.
const WRITERS: u32 = 4;
/// Longest wait for a connection.
const ACQUIRE_TIMEOUT_MS: u64 = 2_000;
/// Longest wait of a statement for another process's lock.
const LOCK_TIMEOUT: &str = "4s";
/// Time after which a process stalled in a transaction loses its locks.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "30s";

const SCHEMA: &str = include_str!("migrations.sql");
/// Held while the outbox and inbox tables are created: concurrent `IF NOT EXISTS` may collide.
const SCHEMA_LOCK: i64 = 0x6576_656e_7473;

/// SQLSTATE classes and codes that the server or other sessions cause, not the statement:
/// connection, resources, server limits, operator, system, transaction rollback, lock timeout,
/// read-only server.
const SERVER_STATES: [&str; 8] = ["08", "53", "57", "58", "40", "55P03", "25006", "25P03"];

/// Whether the server or a lock on it is unavailable, so the statement may succeed later.
pub fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => error
            .code()
            .is_some_and(|code| SERVER_STATES.iter().any(|state| code.starts_with(state))),
        error => is_connection(error),
    }
}

/// Whether the connection is lost or unavailable. The outcome of a running commit is then unknown.
pub fn is_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => error.code().is_some_and(|code| {
            ["08", "53", "57P", "58", "25006", "25P03"]
                .iter()
                .any(|state| code.starts_with(state))
        }),
        error => is_connection(error),
    }
}

fn is_connection(error: &sqlx::Error) -> bool {
    matches!(
        error,
        sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed
    )
}

/// Whether the error is from a PostgreSQL server.
pub(crate) fn is_postgres(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(error) if error.try_downcast_ref::<PgDatabaseError>().is_some())
}

/// Handle to one database; clones share the connections.
#[derive(Clone)]
pub struct Postgres {
    options: PgConnectOptions,
    readers: PgPool,
    writers: PgPool,
    committed: Arc<Notify>,
    /// Not from a pool: closing the connection releases the relay's advisory lock.
    relay: Arc<Mutex<Option<outbox::RelayConnection>>>,
}

impl Postgres {
    /// Connects, creates the outbox and inbox tables and then the service's schema.
    ///
    /// URL: `postgres://user:password@host:port/database`.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Migrate`]: the URL is malformed, the server is unavailable, or
    /// the schema cannot be migrated.
    #[boxed]
    pub async fn open(url: &str, migrator: &Migrator) -> Result<Self, Error> {
        let options = PgConnectOptions::from_str(url)?.options([
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
            ("lock_timeout", LOCK_TIMEOUT),
            (
                "idle_in_transaction_session_timeout",
                IDLE_IN_TRANSACTION_TIMEOUT,
            ),
            ("jit", "off"),
            // Locks of a process on a vanished host, the relay's included, are released within a
            // minute.
            ("tcp_keepalives_idle", "20"),
            ("tcp_keepalives_interval", "10"),
            ("tcp_keepalives_count", "3"),
        ]);
        Self::prepare(&options, migrator).await?;
        let pool = |max: u32| {
            PgPoolOptions::new()
                .max_connections(max)
                .acquire_timeout(Duration::from_millis(ACQUIRE_TIMEOUT_MS))
        };
        // Every writer statement is by key. Its plan must not depend on statistics, which report an
        // empty table long after it has grown.
        let by_key = options.clone().options([
            ("enable_seqscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
        ]);
        let writers = pool(WRITERS)
            // A lost connection is detected by its next statement, which the caller repeats.
            .test_before_acquire(false)
            .connect_with(by_key)
            .await?;
        Ok(Postgres {
            readers: pool(READERS).connect_lazy_with(options.clone()),
            writers,
            options,
            committed: Arc::new(Notify::new()),
            relay: Arc::new(Mutex::new(None)),
        })
    }

    async fn prepare(options: &PgConnectOptions, migrator: &Migrator) -> Result<(), Error> {
        // Another process's migration may take longer than the usual lock timeout.
        let patient = options.clone().options([("lock_timeout", "0")]);
        let mut connection = PgConnection::connect_with(&patient).await?;
        let mut tx = connection.begin().await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(SCHEMA_LOCK)
            .execute(&mut *tx)
            .await?;
        sqlx::raw_sql(SCHEMA).execute(&mut *tx).await?;
        tx.commit().await?;
        // Not `run`: its future is not provably `Send`.
        migrator.run_direct(None, &mut connection, false).await?;
        connection.close().await?;
        Ok(())
    }

    /// Pool for reads.
    pub fn read(&self) -> &PgPool {
        &self.readers
    }

    /// Begins a write transaction at READ COMMITTED.
    ///
    /// # Errors
    /// [`Error::Store`], also if no connection is available within 2 s.
    #[boxed]
    pub async fn write(&self) -> Result<Tx, Error> {
        Ok(Tx {
            inner: self.writers.begin().await?,
            committed: self.committed.clone(),
        })
    }

    /// Host, port and database, for logs.
    pub fn location(&self) -> String {
        format!(
            "{}:{}/{}",
            self.options.get_host(),
            self.options.get_port(),
            self.options.get_database().unwrap_or_default()
        )
    }

    /// Waits for all connections to be returned and closes them.
    #[boxed]
    pub async fn close(&self) {
        self.readers.close().await;
        self.writers.close().await;
        if let Some(connection) = self.relay.lock().await.take() {
            let _ = connection.close().await;
        }
    }

    /// Waits for a commit of this process. Returns at once if there was one since the last call.
    pub(crate) async fn wait_for_commit(&self) {
        self.committed.notified().await;
    }
}

/// A write transaction. Use it as a connection: `query.execute(&mut *tx)`, or pass `&mut tx` for
/// `&mut PgConnection`.
#[must_use = "a transaction that is not committed is rolled back"]
pub struct Tx {
    inner: Transaction<'static, sqlx::Postgres>,
    committed: Arc<Notify>,
}

impl Tx {
    /// Makes the change durable and wakes the outbox relay.
    ///
    /// # Errors
    /// [`Error::Store`]; if [`is_lost`], the change may be durable nevertheless.
    #[boxed]
    pub async fn commit(self) -> Result<(), Error> {
        let committed = self.inner.commit().await;
        // Also if the answer was lost: the rows may be committed.
        self.committed.notify_one();
        Ok(committed?)
    }

    /// Rolls back now instead of at drop.
    ///
    /// # Errors
    /// [`Error::Store`].
    #[boxed]
    pub async fn rollback(self) -> Result<(), Error> {
        Ok(self.inner.rollback().await?)
    }
}

impl Deref for Tx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.inner
    }
}

impl DerefMut for Tx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.inner
    }
}
