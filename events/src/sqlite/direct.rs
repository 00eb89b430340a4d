//! A SQLite writer that runs statements on the calling thread, for services with a writer thread.
//!
//! [`Sqlite::write`] sends each statement, value and row through the connection's thread, a round
//! trip of about fifty microseconds. Here a statement is a function call. Cost: the calling thread
//! blocks until the disk has answered. An async task must use this writer only where it may block
//! (tokio's `block_in_place`). The invariants are those of [`Sqlite`]: this is its only writer.

use futures::future::BoxFuture;
use std::{ops::Deref, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use rusqlite::{
    Connection, OpenFlags,
    trace::{TraceEvent, TraceEventCodes},
};
use sqlx::{SqlitePool, migrate::Migrator};
use tokio::sync::{Mutex, OwnedMutexGuard};
use uuid::Uuid;

use super::{
    BUSY_TIMEOUT_MS, STATEMENT_CODES, Sqlite, WRITER_CACHE_KIB, WRITER_STATEMENTS, outbox,
};
use crate::{
    Error, Event, EventRef, Log, inbox,
    outbox::{Queue, RelayResult},
    pack,
    seal::Sealing,
};

/// Whether the file, its lock or its disk is unavailable, as [`super::is_away`].
pub fn is_away(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(error, _) => {
            !STATEMENT_CODES.contains(&(error.extended_code.cast_unsigned() & 0xFF))
        }
        _ => false,
    }
}

/// Handle to one file; clones share writer and readers.
#[derive(Clone)]
pub struct Direct {
    file: Sqlite,
    /// `None`: closed.
    writer: Arc<Mutex<Option<Connection>>>,
}

impl Direct {
    /// As [`Sqlite::open`].
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    pub fn open(path: PathBuf, migrator: &Migrator) -> BoxFuture<'_, Result<Self, Error>> {
        Self::open_with(path, migrator, super::CHECKPOINT_PAGES)
    }

    /// As [`Self::open`], with another checkpoint threshold: the number of WAL pages after which a
    /// commit also moves them into the file. The WAL takes 4 KiB of disk per page and does not grow
    /// beyond the threshold.
    ///
    /// # Errors
    /// As [`Sqlite::open`].
    pub fn open_with(
        path: PathBuf,
        migrator: &Migrator,
        checkpoint_pages: u32,
    ) -> BoxFuture<'_, Result<Self, Error>> {
        Box::pin(async move {
            let file = Sqlite::open(&path, migrator).await?;
            Self::over(file, checkpoint_pages).await
        })
    }

    /// As [`Sqlite::open_sealed`].
    ///
    /// # Errors
    /// As [`Sqlite::open_sealed`].
    pub fn open_sealed(
        path: PathBuf,
        migrator: &'static Migrator,
        sealing: &'static Sealing,
    ) -> BoxFuture<'static, Result<Self, Error>> {
        Box::pin(async move {
            let file = Sqlite::open_sealed(path, migrator, sealing).await?;
            Self::over(file, super::CHECKPOINT_PAGES).await
        })
    }

    async fn over(mut file: Sqlite, checkpoint_pages: u32) -> Result<Self, Error> {
        // A write of a second writer would invalidate the page cache of this one.
        file.writer.close().await;
        file.checkpoint_pages = checkpoint_pages;
        let writer = connect(&file)?;
        Ok(Direct {
            file,
            writer: Arc::new(Mutex::new(Some(writer))),
        })
    }

    /// Pool for reads; a write through it fails.
    pub fn read(&self) -> &SqlitePool {
        self.file.read()
    }

    /// Begins a write transaction: waits for its turn, then holds the write lock until commit or
    /// drop.
    ///
    /// # Errors
    /// [`Error::Sqlite`], [`Error::Closed`].
    pub fn write(&self) -> BoxFuture<'_, Result<DirectTx, Error>> {
        Box::pin(async move {
            DirectTx::begin(self.file.clone(), self.writer.clone().lock_owned().await)
        })
    }

    /// Runs `work` in a write transaction on a thread that may block, and commits it. An error of
    /// `work` rolls back. Dropping the caller's future does not undo the work.
    ///
    /// # Errors
    /// [`Error::Sqlite`], [`Error::Closed`], and the error of `work`.
    pub fn transact<'a, T, E>(
        &'a self,
        work: impl FnOnce(&DirectTx) -> Result<T, E> + Send + 'static,
    ) -> BoxFuture<'a, Result<T, E>>
    where
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        Box::pin(async move {
            let (file, writer) = (self.file.clone(), self.writer.clone().lock_owned().await);
            let run = move || {
                let tx = DirectTx::begin(file, writer)?;
                let done = work(&tx)?;
                tx.commit()?;
                Ok(done)
            };
            match tokio::task::spawn_blocking(run).await {
                Ok(done) => done,
                Err(ended) => match ended.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => Err(Error::Closed.into()),
                },
            }
        })
    }

    /// Waits for the writer and the readers, and closes the file.
    pub fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.file.readers.close().await;
            self.writer.lock().await.take();
        })
    }

    /// Deletes relayed rows now if no transaction has done so.
    async fn delete_relayed(&self) -> Result<(), Error> {
        if self.file.relayed.due().is_none() {
            return Ok(());
        }
        let (file, writer) = (self.file.clone(), self.writer.clone().lock_owned().await);
        let delete = move || DirectTx::begin(file, writer)?.commit();
        let deleted = tokio::task::spawn_blocking(delete).await;
        deleted.map_err(|_| Error::Closed)?
    }
}

/// Opens the writer with the settings of [`Sqlite`]'s writer.
fn connect(file: &Sqlite) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(file.path(), flags)?;
    db.busy_timeout(Duration::from_millis(BUSY_TIMEOUT_MS))?;
    db.execute_batch(&format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
         PRAGMA cache_size = -{WRITER_CACHE_KIB}; PRAGMA wal_autocheckpoint = {};",
        file.checkpoint_pages
    ))?;
    db.set_prepared_statement_cache_capacity(WRITER_STATEMENTS);
    if let Some(seals) = file.seals.get() {
        db.execute_batch(&seals.install())?;
    }
    if tracing::enabled!(target: STATEMENTS, tracing::Level::TRACE) {
        db.trace_v2(TraceEventCodes::SQLITE_TRACE_STMT, Some(trace));
    }
    Ok(db)
}

/// Target of the writer's statements. SQLite reports them only if tracing is enabled when the file
/// is opened.
const STATEMENTS: &str = "events::statements";

fn trace(event: TraceEvent<'_>) {
    if let TraceEvent::Stmt(statement, _) = event {
        let sql = statement.sql();
        tracing::trace!(target: STATEMENTS, summary = sql.as_ref());
    }
}

/// Events packed for the outbox: rows of record count and bytes.
#[derive(Default)]
pub struct Packed {
    rows: Vec<(i64, Vec<u8>)>,
    last: pack::Packer,
}

impl Packed {
    pub fn of(events: &[Event]) -> Self {
        let mut packed = Packed::default();
        events.iter().for_each(|event| packed.push(event.into()));
        packed
    }

    /// Appends an event.
    pub fn push(&mut self, event: EventRef<'_>) {
        self.last.push(event, &[]);
        if self.last.is_full() {
            self.rows.push(self.last.take());
        }
    }

    fn into_rows(mut self) -> Vec<(i64, Vec<u8>)> {
        let last = self.last.take();
        self.rows.extend((last.0 > 0).then_some(last));
        self.rows
    }
}

/// A write transaction. Use it as a connection, with `prepare_cached` for frequent statements.
#[must_use = "a transaction that is not committed is rolled back"]
pub struct DirectTx {
    writer: OwnedMutexGuard<Option<Connection>>,
    file: Sqlite,
    /// Outbox rows to delete with this transaction, up to this position.
    deletes: Option<i64>,
}

impl DirectTx {
    fn begin(file: Sqlite, mut writer: OwnedMutexGuard<Option<Connection>>) -> Result<Self, Error> {
        let db = writer.as_mut().ok_or(Error::Closed)?;
        if !db.is_autocommit() && db.execute_batch("ROLLBACK").is_err() {
            // The previous transaction cannot be rolled back: reconnect, which ends it.
            *db = connect(&file)?;
        }
        db.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let deletes = file.relayed.due();
        let tx = DirectTx {
            writer,
            file,
            deletes,
        };
        if let Some(through) = deletes {
            tx.prepare_cached("DELETE FROM outbox WHERE position <= ?1")?
                .execute([through])?;
        }
        Ok(tx)
    }

    /// As [`crate::outbox::append_in_tx`].
    ///
    /// # Errors
    /// [`Error::Sqlite`].
    pub fn append(&self, events: Packed) -> Result<(), Error> {
        let rows = events.into_rows();
        if rows.is_empty() {
            return Ok(());
        }
        let mut insert =
            self.prepare_cached("INSERT INTO outbox (count, events) VALUES (?1, ?2)")?;
        for (count, events) in rows {
            insert.execute((count, events))?;
        }
        Ok(())
    }

    /// As [`inbox::accept_in_tx`].
    ///
    /// # Errors
    /// [`Error::Sqlite`].
    pub fn accept(&self, consumer: &str, event_id: Uuid) -> Result<bool, Error> {
        let values = (consumer, event_id.to_string(), service_kit::clock::now_us());
        Ok(self.prepare_cached(inbox::ACCEPT)?.execute(values)? == 1)
    }

    /// Makes the change durable and wakes the outbox relay.
    ///
    /// # Errors
    /// [`Error::Sqlite`].
    pub fn commit(self) -> Result<(), Error> {
        if let Some(seals) = self.file.seals.get() {
            seals.seal_directly(&self)?;
        }
        self.prepare_cached("COMMIT")?.execute([])?;
        if let Some(through) = self.deletes {
            self.file.relayed.is_deleted(through);
        }
        self.file.committed.notify_one();
        Ok(())
    }
}

impl Deref for DirectTx {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.writer
            .as_ref()
            .expect("a transaction has an open writer")
    }
}

impl Drop for DirectTx {
    fn drop(&mut self) {
        // Some failures have ended the transaction already.
        if !self.is_autocommit()
            && let Err(error) = self.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, store = %self.file.path().display(), "rollback failed");
        }
    }
}

#[async_trait]
impl Queue for Direct {
    async fn backlog(&self) -> Result<i64, Error> {
        self.file.backlog().await
    }

    async fn relay_batch(&self, log: &dyn Log) -> Result<RelayResult, Error> {
        let relayed = outbox::publish_oldest(&self.file, log).await?;
        if relayed.events == 0 {
            self.delete_relayed().await?;
        }
        Ok(relayed)
    }

    async fn wait_for_commit(&self) {
        self.file.wait_for_commit().await;
    }

    fn name(&self) -> String {
        self.file.name()
    }

    async fn next_consumer(&self, after: &str) -> Result<Option<String>, Error> {
        self.file.next_consumer(after).await
    }

    async fn inbox_page(
        &self,
        consumer: &str,
        after: &str,
        until: &str,
    ) -> Result<Vec<(String, i64)>, Error> {
        self.file.inbox_page(consumer, after, until).await
    }

    async fn forget(
        &self,
        consumer: &str,
        after: &str,
        through: &str,
        before_us: i64,
    ) -> Result<u64, Error> {
        let [consumer, after, through] = [consumer, after, through].map(str::to_owned);
        let forget = move |tx: &DirectTx| {
            let values = (consumer, after, through, before_us);
            let forgotten = tx.prepare_cached(inbox::FORGET)?.execute(values)?;
            Ok::<u64, Error>(forgotten as u64)
        };
        self.transact(forget).await
    }
}
