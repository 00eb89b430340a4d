//! The store of the ledger: the only module with SQL.
//!
//! The storage contract, with a SQLite and a PostgreSQL implementation:
//! - A [`Group`] is one write transaction. [`Group::load`] returns the working set of its commands,
//!   [`Group::save`] writes the folded rows. After [`Group::commit`] the group is durable.
//! - [`Reads`] see committed rows only.
//! - A [`LedgerSnapshot`] contains all rows at one moment.
//!
//! Cost on PostgreSQL: a fixed number of statements per group. SQLite runs in process and uses
//! more. Velocity limits add statements (see `limits`).

mod audit;
mod dialect;
mod limits;
mod load;
mod postgres;
mod read;
mod rows;
mod sqlite;
mod statement;
mod verify;

use std::{ops::Deref, sync::Arc};

use async_trait::async_trait;
use events::EventRef;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use audit::{RecordFilter, RecordRow, SealedOperation, SealedPosting};
pub use read::{HoldFilter, OperationFilter, PageBound, Reads, SubAccountFilter, TrialBalance};
pub use statement::Line;
pub use verify::{BlockRow, HoldState, LedgerSnapshot, ReferencedRow, SubAccountState};

use crate::{Error, LedgerConfig, book::Book, fold::Command};

/// The ledger's database. Clones share it.
#[derive(Clone)]
pub struct Store {
    reads: Arc<dyn Reads>,
    writes: Arc<dyn Writes>,
}

impl Store {
    /// Opens the configured database, or `ledger.sqlite` in the data folder, and migrates its
    /// schema.
    ///
    /// # Errors
    /// [`Error::Url`]. [`Error::Invariant`]: operations exist without the audit chain. Others:
    /// the database cannot be opened, migrated or read.
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        let store = if config.url.is_empty() {
            let (reads, writes) = sqlite::open(&config.data_dir).await?;
            Store {
                reads: Arc::new(reads),
                writes: Arc::new(writes),
            }
        } else {
            let (reads, writes) = postgres::open(crate::url::postgres(&config.url)?).await?;
            Store {
                reads: Arc::new(reads),
                writes: Arc::new(writes),
            }
        };
        if store.is_audit_chain_missing().await? {
            return Err(Error::Invariant(
                "chain of blocks is missing, operations exist: restore a backup".to_owned(),
            ));
        }
        Ok(store)
    }

    /// As [`Writes::blocks_thread`].
    pub fn blocks_thread(&self) -> bool {
        self.writes.blocks_thread()
    }

    /// Begins a write transaction.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Events`].
    pub async fn begin(&self) -> Result<Box<dyn Group>, Error> {
        self.writes.begin().await
    }

    /// As [`Writes::run_deferred`].
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub async fn run_deferred(&self) -> Result<(), Error> {
        self.writes.run_deferred().await
    }

    /// Publishes the events of committed groups to the log until `shutdown`.
    pub async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        self.writes.relay(log, shutdown).await;
    }

    /// Whether a group that failed with `error` may be retried.
    pub fn retry_kind(&self, error: &Error) -> RetryKind {
        self.writes.retry_kind(error)
    }

    pub async fn close(&self) {
        self.writes.close().await;
    }
}

impl Deref for Store {
    type Target = dyn Reads;

    fn deref(&self) -> &Self::Target {
        &*self.reads
    }
}

/// The configured ledger's file, with the tables whose rows have seals; `None` on PostgreSQL, which
/// has no seals.
pub fn sealed_store(config: &LedgerConfig) -> Option<events::SealedStore> {
    let is_file = config.url.is_empty();
    is_file.then(|| sqlite::sealed_store(&config.data_dir))
}

/// Opens a read-only snapshot of all rows, concurrent with writes.
///
/// # Errors
/// [`Error::NoLedger`], [`Error::OldSchema`], [`Error::Url`]. [`Error::Store`]: it cannot be read.
pub async fn snapshot(config: &LedgerConfig) -> Result<Box<dyn LedgerSnapshot>, Error> {
    if config.url.is_empty() {
        Ok(Box::new(sqlite::snapshot(&config.data_dir).await?))
    } else {
        Ok(Box::new(
            postgres::snapshot(crate::url::postgres(&config.url)?).await?,
        ))
    }
}

/// Classifies the failure of a group for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryKind {
    /// The group would fail again, or the error is unknown.
    Never,
    /// Conflict with another ledger. Nothing was written. A retry sees the other ledger's rows.
    Contention,
    /// The connection was lost. The group may be committed: a retry finds the keys of its commands.
    Lost,
}

/// The writes of the storage contract.
#[async_trait]
pub trait Writes: Send + Sync {
    /// True if a write blocks its thread until the disk answers. The writer then needs its own
    /// thread, or the thread of a caller that waits for the write.
    fn blocks_thread(&self) -> bool {
        false
    }
    async fn begin(&self) -> Result<Box<dyn Group>, Error>;
    /// Does deferred work after the answers of a group. The next group first completes what is
    /// left.
    async fn run_deferred(&self) -> Result<(), Error>;
    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken);
    fn retry_kind(&self, error: &Error) -> RetryKind;
    /// Waits until all connections are idle and closes them, including those of [`Reads`].
    async fn close(&self);
}

/// Emits the events of a group, in order.
pub type Events<'a> = dyn Fn(&Book, &mut dyn FnMut(EventRef<'_>)) + Sync + 'a;

/// Folds the commands of a group into its working set. Calls its second argument after each
/// operation, which may flush the rows created so far ([`Book::drain_ready`]).
pub type Fold<'a> = dyn FnMut(&mut Book, &mut dyn FnMut(&mut Book)) + Send + 'a;

/// One write transaction. Dropping it without [`Group::commit`] rolls it back.
#[async_trait]
pub trait Group: Send {
    /// Adds events to the inbox. `false` for an event that is in it already or occurs twice.
    async fn accept(&mut self, consumer: &str, event_ids: &[Uuid]) -> Result<Vec<bool>, Error>;

    /// Loads all rows that these commands can touch, with the applicable limits, and locks them
    /// until the end of the group. The group's time is the later of `clock_us` and the last block's
    /// time, so the times of a sub-account's postings never decrease.
    async fn load(&mut self, commands: &[&Command], clock_us: i64) -> Result<Book, Error>;

    /// Writes every changed row, the block that seals new operations ([`crate::audit::seal`]), the
    /// audit records and the events. `events` may be called on another thread during the write.
    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error>;

    /// Folds, and saves the changes. May write rows while the fold continues.
    async fn fold_and_save(
        &mut self,
        mut book: Book,
        fold: &mut Fold<'_>,
        events: &Events<'_>,
    ) -> Result<Book, Error> {
        fold(&mut book, &mut |_| {});
        if !book.is_clean() {
            self.save(&book, events).await?;
        }
        Ok(book)
    }

    /// Executes the part of a command that does not need the fold: deletion of parked notices.
    async fn run_maintenance(&mut self, command: &Command) -> Result<(), Error>;

    async fn commit(self: Box<Self>) -> Result<(), Error>;
}
