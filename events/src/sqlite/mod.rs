//! A service's SQLite file: WAL, synchronous FULL, one writer, several readers.
//!
//! Invariants: a committed transaction survives `kill -9` and power loss. Writes are serial: the
//! single writer connection uses `BEGIN IMMEDIATE`. So outbox positions appear in commit order.
//! Readers never wait for the writer. A transaction dropped without [`Tx::commit`] is rolled back.

pub mod direct;
pub mod outbox;

use futures::future::BoxFuture;
use std::{
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, Connection, Executor, SqliteConnection, SqlitePool, Transaction,
    migrate::Migrator,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::Notify;

use crate::{
    Error, migrations,
    seal::{self, Sealing, Seals},
};

/// Reader connections per file.
const READERS: u32 = 4;
const BUSY_TIMEOUT_MS: u64 = 5_000;
/// Page cache of the writer, in KiB. A batch of thousands of operations exceeds SQLite's default of
/// 2 MB, which would write pages out and read them again within a transaction. Four times this size
/// makes neither the ledger nor the history faster.
pub const WRITER_CACHE_KIB: u32 = 16 * 1024;
/// WAL pages after which a commit also checkpoints. Four times SQLite's default: a checkpoint
/// copies a page once, however often it has changed since the last one.
const CHECKPOINT_PAGES: u32 = 4_000;
/// Prepared statements kept by the writer.
const WRITER_STATEMENTS: usize = 256;
/// Longest wait for a connection: a write waits for the writes before it.
const WRITER_WAIT_MS: u64 = 30_000;

/// SQLite result codes caused by the statement or its values, not by the file: ERROR, TOOBIG,
/// CONSTRAINT, MISMATCH, MISUSE, RANGE.
const STATEMENT_CODES: [u32; 6] = [1, 18, 19, 20, 21, 25];

/// Whether the file, its lock, disk or connection is unavailable, so the statement may succeed
/// later.
///
/// False if the statement or its result is at fault: a broken constraint, a column of another type.
pub fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => error
            .code()
            .and_then(|code| code.parse::<u32>().ok())
            // Extended codes have the primary code in the low byte.
            .is_none_or(|code| !STATEMENT_CODES.contains(&(code & 0xFF))),
        sqlx::Error::Io(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        _ => false,
    }
}

/// Options of every pool that writes to a file.
///
/// After a full disk or a failed write SQLite ends the transaction by itself. sqlx's own `ROLLBACK`
/// then fails ("no transaction is active"), its count of open transactions stays wrong, and it
/// refuses every later `BEGIN` on the connection. Such a connection is closed instead of reused;
/// the pool opens a new one.
pub fn pool_options() -> SqlitePoolOptions {
    SqlitePoolOptions::new().before_acquire(|connection, _| {
        let is_broken = connection.is_in_transaction();
        Box::pin(async move {
            if is_broken {
                tracing::warn!("closing a connection whose transaction could not be rolled back");
            }
            Ok(!is_broken)
        })
    })
}

/// Handle to one file; clones share the connections.
#[derive(Clone)]
pub struct Sqlite {
    path: PathBuf,
    readers: SqlitePool,
    writer: SqlitePool,
    committed: Arc<Notify>,
    relayed: Arc<Relayed>,
    /// As [`CHECKPOINT_PAGES`].
    checkpoint_pages: u32,
    /// Set while rows are sealed.
    seals: Arc<OnceLock<Seals>>,
}

/// Progress of the relay: last relayed position, last deleted position. The next write transaction
/// deletes the relayed rows. A transaction of its own would wait for the disk, and one of another
/// connection would invalidate the writer's page cache.
#[derive(Default)]
struct Relayed {
    through: AtomicI64,
    deleted: AtomicI64,
}

impl Relayed {
    /// Position up to which rows may be deleted; `None`: all of them are deleted.
    fn due(&self) -> Option<i64> {
        let through = self.through.load(Ordering::Acquire);
        (through > self.deleted.load(Ordering::Acquire)).then_some(through)
    }

    fn is_deleted(&self, through: i64) {
        self.deleted.fetch_max(through, Ordering::AcqRel);
    }
}

impl Sqlite {
    /// Opens or creates the file, its folder, the outbox and inbox tables and the service's schema.
    ///
    /// # Errors
    /// [`Error::Files`], [`Error::Store`], [`Error::Migrate`].
    pub fn open(path: impl AsRef<Path>, migrator: &Migrator) -> BoxFuture<'_, Result<Self, Error>> {
        Self::open_file(path.as_ref().to_owned(), migrator)
    }

    fn open_file(path: PathBuf, migrator: &Migrator) -> BoxFuture<'_, Result<Self, Error>> {
        Box::pin(async move {
            let db = Self::open_bare(&path, SqliteSynchronous::Full).await?;
            sqlx::raw_sql(migrations::SQL).execute(&db.writer).await?;
            migrator.run(&db.writer).await?;
            Ok(db)
        })
    }

    /// Opens the file as [`Self::open`], and seals its rows from now on ([`crate::seal`]). Seals
    /// all rows if the file has no seals, or those of another schema: some microseconds per row,
    /// once per migration, in one transaction.
    ///
    /// # Errors
    /// As [`Self::open`]; [`Error::Files`] also if the key of the seals is unreadable.
    pub fn open_sealed(
        path: impl AsRef<Path>,
        migrator: &'static Migrator,
        sealing: &'static Sealing,
    ) -> BoxFuture<'static, Result<Self, Error>> {
        let path = path.as_ref().to_owned();
        Box::pin(async move {
            let db = Self::open_bare(&path, SqliteSynchronous::Full).await?;
            let mut writer = db.writer.acquire().await?;
            seal::prepare(&mut writer, &path, migrator, sealing).await?;
            drop(writer);
            sqlx::raw_sql(migrations::SQL).execute(&db.writer).await?;
            migrator.run(&db.writer).await?;
            let mut writer = db.writer.acquire().await?;
            let seals = Seals::of(&mut writer, &path, migrator, sealing).await?;
            writer.execute(AssertSqlSafe(seals.install())).await?;
            let mut tx = writer.begin_with("BEGIN IMMEDIATE").await?;
            seals.seal_all_in_tx(&mut tx).await?;
            tx.commit().await?;
            drop(writer);
            seal::keep_key(&path)?;
            assert!(db.seals.set(seals).is_ok(), "a file is sealed once");
            Ok(db)
        })
    }

    /// Opens the file without any schema.
    pub(crate) async fn open_bare(
        path: &Path,
        synchronous: SqliteSynchronous,
    ) -> Result<Self, Error> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .foreign_keys(true)
            .busy_timeout(Duration::from_millis(BUSY_TIMEOUT_MS));
        let seals: Arc<OnceLock<Seals>> = Arc::default();
        let of_writer = seals.clone();
        let pools = async move {
            let pool = || {
                pool_options()
                    .idle_timeout(None)
                    .max_lifetime(None)
                    // A connection to a local file does not break, and each test costs a round trip
                    // to its thread.
                    .test_before_acquire(false)
                    .acquire_timeout(Duration::from_millis(WRITER_WAIT_MS))
            };
            let writer = pool()
                .max_connections(1)
                .min_connections(1)
                // A connection that replaces a broken one. The first one opens the file.
                .after_connect(move |connection, _| {
                    let install = of_writer.get().map(Seals::install);
                    Box::pin(async move {
                        if let Some(install) = install {
                            connection.execute(AssertSqlSafe(install)).await?;
                        }
                        Ok(())
                    })
                })
                .connect_with(
                    options
                        .clone()
                        .statement_cache_capacity(WRITER_STATEMENTS)
                        .pragma("cache_size", format!("-{WRITER_CACHE_KIB}"))
                        .pragma("wal_autocheckpoint", CHECKPOINT_PAGES.to_string()),
                )
                .await?;
            let readers = pool()
                .max_connections(READERS)
                .connect_with(options.pragma("query_only", "on"))
                .await?;
            Ok::<_, sqlx::Error>((writer, readers))
        };
        // Opened on a runtime thread: a connection's thread inherits the priority of the thread
        // that opens it, and the caller may be the main thread.
        let opened = tokio::spawn(pools).await;
        let (writer, readers) =
            opened.map_err(|panic| Error::Files(std::io::Error::other(panic)))??;
        Ok(Sqlite {
            path: path.to_owned(),
            readers,
            writer,
            committed: Arc::new(Notify::new()),
            relayed: Arc::default(),
            checkpoint_pages: CHECKPOINT_PAGES,
            seals,
        })
    }

    /// Pool for reads; a write through it fails.
    pub fn read(&self) -> &SqlitePool {
        &self.readers
    }

    /// Begins a write transaction: waits for its turn, then holds the write lock until commit or
    /// drop.
    ///
    /// # Errors
    /// [`Error::Store`], also if other writes hold the writer for more than 30 s.
    pub fn write(&self) -> BoxFuture<'_, Result<Tx, Error>> {
        Box::pin(async move {
            let mut inner = self.writer.begin_with("BEGIN IMMEDIATE").await?;
            let deletes = self.relayed.due();
            if let Some(through) = deletes {
                sqlx::query("DELETE FROM outbox WHERE position <= $1")
                    .bind(through)
                    .execute(&mut *inner)
                    .await?;
            }
            Ok(Tx {
                inner,
                committed: self.committed.clone(),
                relayed: self.relayed.clone(),
                deletes,
                seals: self.seals.clone(),
            })
        })
    }

    /// Marks outbox rows up to this position as relayed: the next committed transaction deletes
    /// them.
    pub(crate) fn set_relayed(&self, through: i64) {
        self.relayed.through.fetch_max(through, Ordering::AcqRel);
    }

    /// Last outbox position known to be relayed by this process.
    pub(crate) fn relayed(&self) -> i64 {
        self.relayed.through.load(Ordering::Acquire)
    }

    /// Deletes relayed rows now if no transaction has done so.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub(crate) async fn delete_relayed(&self) -> Result<(), Error> {
        match self.relayed.due() {
            Some(_) => self.write().await?.commit().await,
            None => Ok(()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for all connections to be returned and closes the file.
    pub fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.readers.close().await;
            self.writer.close().await;
        })
    }

    /// Waits for a commit. Returns at once if there was one since the last call.
    pub(crate) async fn wait_for_commit(&self) {
        self.committed.notified().await;
    }
}

/// A write transaction. Use it as a connection: `query.execute(&mut *tx)`, or pass `&mut tx` for
/// `&mut SqliteConnection`.
#[must_use = "a transaction that is not committed is rolled back"]
pub struct Tx {
    inner: Transaction<'static, sqlx::Sqlite>,
    committed: Arc<Notify>,
    relayed: Arc<Relayed>,
    /// Outbox rows to delete with this transaction, up to this position.
    deletes: Option<i64>,
    seals: Arc<OnceLock<Seals>>,
}

impl Tx {
    /// Makes the change durable and wakes the outbox relay.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn commit(mut self) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            if let Some(seals) = self.seals.get() {
                seals.seal_in_tx(&mut self.inner).await?;
            }
            self.inner.commit().await?;
            if let Some(through) = self.deletes {
                self.relayed.is_deleted(through);
            }
            self.committed.notify_one();
            Ok(())
        })
    }

    /// Rolls back now instead of at drop.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn rollback(self) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move { Ok(self.inner.rollback().await?) })
    }
}

impl Deref for Tx {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.inner
    }
}

impl DerefMut for Tx {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.inner
    }
}
