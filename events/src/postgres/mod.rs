//! A service's PostgreSQL database: pools, schema, transactions, the relay's own connection.
//!
//! Invariants: a committed transaction is durable (`synchronous_commit` is on for every session,
//! whatever the server's default); writers overlap at READ COMMITTED, so a service locks what it
//! decides on. A transaction dropped without [`Tx::commit`] is rolled back. Several processes may
//! share one database; only one relay publishes at a time (see [`outbox`]). Known limitation: no
//! session is pinned to a primary; an URL that names several hosts is not understood.

pub mod outbox;

use std::{
    ops::{Deref, DerefMut},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use sqlx::{
    Connection, PgConnection, PgPool, Transaction,
    migrate::Migrator,
    postgres::{PgConnectOptions, PgDatabaseError, PgPoolOptions},
};
use tokio::sync::{Mutex, Notify};

use crate::Error;

/// Connections for reads of one process.
const READERS: u32 = 8;
/// Connections for writes of one process: a service has one writer task and a few chores.
const WRITERS: u32 = 4;
/// How long a call waits for a connection before it fails.
const ACQUIRE_TIMEOUT_MS: u64 = 2_000;
/// How long a statement waits for a lock of another process before it fails.
const LOCK_TIMEOUT: &str = "4s";
/// A process that stopped in the middle of a transaction gives its locks back after this time.
const IDLE_IN_TRANSACTION_TIMEOUT: &str = "30s";

const SCHEMA: &str = include_str!("migrations.sql");
/// Held while the outbox and inbox tables are made, since `IF NOT EXISTS` of two sessions may collide.
const SCHEMA_LOCK: i64 = 0x6576_656e_7473;

/// Classes and codes of SQLSTATE that speak of the server or of other sessions, not of the
/// statement: connection, resources, limits of the server, operator, system, rollback for another's
/// sake, a lock not given in time, a server that takes no writes.
const STATES_OF_THE_SERVER: [&str; 8] = ["08", "53", "57", "58", "40", "55P03", "25006", "25P03"];

/// True when the server (or a lock of it) is away, so that the same statement may work later.
pub fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => error.code().is_some_and(|code| {
            STATES_OF_THE_SERVER
                .iter()
                .any(|state| code.starts_with(state))
        }),
        error => is_connection(error),
    }
}

/// True when the connection is lost or not to be had; what was under way may have been committed or not.
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

/// True for an error that came from a PostgreSQL server.
pub(crate) fn is_ours(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(error) if error.try_downcast_ref::<PgDatabaseError>().is_some())
}

/// Handle to one database; clones share the connections.
#[derive(Clone)]
pub struct Postgres {
    options: PgConnectOptions,
    readers: PgPool,
    writers: PgPool,
    committed: Arc<Notify>,
    /// Outside the pools, so that its lock goes with it.
    relay: Arc<Mutex<Option<outbox::Session>>>,
}

impl Postgres {
    /// Connects (`postgres://user:password@host:port/database`), makes the outbox and inbox tables
    /// and then the service's own schema.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Migrate`]: the URL is malformed, the server is away, the schema
    /// cannot be brought up to date.
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
            // A process whose host is gone gives its locks back within a minute, those of the relay too.
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
        // Every statement of a writer goes by key. Its plan must not depend on statistics, which
        // say "empty" long after a table has grown.
        let by_key = options.clone().options([
            ("enable_seqscan", "off"),
            ("enable_hashjoin", "off"),
            ("enable_mergejoin", "off"),
        ]);
        let writers = pool(WRITERS)
            // A lost connection is found by the statement that meets it, which its caller repeats.
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
        // Another process may be migrating for longer than a statement usually waits.
        let patient = options.clone().options([("lock_timeout", "0")]);
        let mut connection = PgConnection::connect_with(&patient).await?;
        let mut tx = connection.begin().await?;
        sqlx::query("SELECT pg_advisory_xact_lock($1)")
            .bind(SCHEMA_LOCK)
            .execute(&mut *tx)
            .await?;
        sqlx::raw_sql(SCHEMA).execute(&mut *tx).await?;
        tx.commit().await?;
        // Not `run`, whose future is not provably `Send`.
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
    /// [`Error::Store`], also when no connection is to be had within 2 s.
    pub async fn write(&self) -> Result<Tx, Error> {
        Ok(Tx {
            inner: self.writers.begin().await?,
            committed: self.committed.clone(),
        })
    }

    /// Host, port and database, for people.
    pub fn place(&self) -> String {
        format!(
            "{}:{}/{}",
            self.options.get_host(),
            self.options.get_port(),
            self.options.get_database().unwrap_or_default()
        )
    }

    /// Waits for all connections to be returned and closes them.
    pub async fn close(&self) {
        self.readers.close().await;
        self.writers.close().await;
        if let Some(connection) = self.relay.lock().await.take() {
            let _ = connection.close().await;
        }
    }

    /// Woken after commits of this process; at least once for each commit made after the last wake.
    pub(crate) async fn committed(&self) {
        self.committed.notified().await;
    }
}

/// A write transaction. Use it as a connection: `query.execute(&mut *tx)`, or pass `&mut tx` where
/// `&mut PgConnection` is asked for.
#[must_use = "a transaction that is not committed is rolled back"]
pub struct Tx {
    inner: Transaction<'static, sqlx::Postgres>,
    committed: Arc<Notify>,
}

impl Tx {
    /// Makes the change durable and wakes the outbox relay.
    ///
    /// # Errors
    /// [`Error::Store`]; when [`is_lost`] says so, the change may be durable all the same.
    pub async fn commit(self) -> Result<(), Error> {
        let committed = self.inner.commit().await;
        // Also when the answer was lost on the way: the rows may be there.
        self.committed.notify_one();
        Ok(committed?)
    }

    /// Undoes the change now instead of at drop.
    ///
    /// # Errors
    /// [`Error::Store`].
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
