//! The store of the ledger: the only place with SQL.
//!
//! The storage contract, kept by every back-end: a [`Group`] is one write transaction.
//! [`Group::load`] gives the working set of its commands, [`Group::save`] writes what the fold made
//! of it: on PostgreSQL in a few statements, whatever the size of the group, on SQLite in more,
//! called where they are; velocity limits cost more (see `limits`). After [`Group::commit`] it is
//! durable. [`Reads`] see committed rows only. An [`Evidence`] is one moment of all rows.

mod audit;
mod dialect;
mod keep;
mod limits;
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

pub use audit::{SealedOperation, SealedPosting};
pub use read::{Before, HoldFilter, OperationFilter, Reads, TrialBalance};
pub use statement::Line;
pub use verify::{BlockRow, Evidence, HoldState, SubAccountState};

use crate::{Error, LedgerConfig, book::Book, fold::Command};

/// The ledger's database. Clones share it.
#[derive(Clone)]
pub struct Store {
    reads: Arc<dyn Reads>,
    writes: Arc<dyn Writes>,
}

impl Store {
    /// Opens the database that the settings name, or `ledger.sqlite` in the data folder, and brings
    /// its schema up to date.
    ///
    /// # Errors
    /// [`Error::Events`]: it cannot be opened, or its schema cannot be brought up to date.
    /// [`Error::Url`]. [`Error::Broken`]: its chain of blocks was taken away.
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        let store = if config.url.is_empty() {
            let (reads, writes) = sqlite::open(&config.data_dir).await?;
            Store {
                reads: Arc::new(reads),
                writes: Arc::new(writes),
            }
        } else {
            let (reads, writes) = postgres::open(config.url.postgres()?).await?;
            Store {
                reads: Arc::new(reads),
                writes: Arc::new(writes),
            }
        };
        if store.has_lost_its_chain().await? {
            return Err(Error::Broken(
                "chain of blocks: operations without any".to_owned(),
            ));
        }
        Ok(store)
    }

    /// As [`Writes::keeps_its_thread`].
    pub fn keeps_its_thread(&self) -> bool {
        self.writes.keeps_its_thread()
    }

    /// Begins a write transaction.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Events`].
    pub async fn begin(&self) -> Result<Box<dyn Group>, Error> {
        self.writes.begin().await
    }

    /// As [`Writes::catch_up`].
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub async fn catch_up(&self) -> Result<(), Error> {
        self.writes.catch_up().await
    }

    /// Moves events of committed groups to the log until `shutdown`.
    pub async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        self.writes.relay(log, shutdown).await;
    }

    /// Whether the commands of a group that failed with this are to be folded again.
    pub fn again(&self, error: &Error) -> Again {
        self.writes.again(error)
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

/// All rows as of this moment, read-only, beside whatever else happens to them.
///
/// # Errors
/// [`Error::NoLedger`] when there is none, [`Error::Url`], [`Error::Store`] when it cannot be read.
pub async fn evidence(config: &LedgerConfig) -> Result<Box<dyn Evidence>, Error> {
    if config.url.is_empty() {
        Ok(Box::new(sqlite::evidence(&config.data_dir).await?))
    } else {
        Ok(Box::new(postgres::evidence(config.url.postgres()?).await?))
    }
}

/// What to do about a group that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// It would fail again, or cannot be judged.
    No,
    /// Another process was faster. Nothing was written; folded again it sees what the other one made.
    Contention,
    /// The connection is gone. Perhaps everything was written: the keys of the commands tell when
    /// they are folded again.
    Lost,
}

/// The writing half of the storage contract.
#[async_trait]
pub trait Writes: Send + Sync {
    /// Whether a group keeps the thread that writes it until the disk has answered, so that it
    /// wants one of its own, or that of a caller who would wait for it anyway.
    fn keeps_its_thread(&self) -> bool {
        false
    }
    async fn begin(&self) -> Result<Box<dyn Group>, Error>;
    /// Does what the store has put off, behind the answers of a group. What is left over the next
    /// group does before it begins.
    async fn catch_up(&self) -> Result<(), Error>;
    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken);
    fn again(&self, error: &Error) -> Again;
    /// Waits for all connections to be returned and closes them, those of [`Reads`] too.
    async fn close(&self);
}

/// Tells the events of what a group made, in their order.
pub type Events<'a> = dyn Fn(&Book, &mut dyn FnMut(EventRef<'_>)) + Sync + 'a;

/// Folds the commands of a group into its working set. Between two operations it calls what it is
/// given, which may give away what was made so far ([`Book::give`]).
pub type Fold<'a> = dyn FnMut(&mut Book, &mut dyn FnMut(&mut Book)) + Send + 'a;

/// One write transaction; dropped without [`Group::commit`] it leaves nothing.
#[async_trait]
pub trait Group: Send {
    /// Notes events as taken; `false` for each that was before, or is named twice.
    async fn accept(&mut self, consumer: &str, event_ids: &[Uuid]) -> Result<Vec<bool>, Error>;

    /// Everything these commands can touch, the limits about it included, as it stands and stays
    /// until the end of the group. Its time is the clock's, or that of the last block where the
    /// clock stands behind it: times of a sub-account's postings never fall.
    async fn load(&mut self, commands: &[&Command], clock_us: i64) -> Result<Book, Error>;

    /// Writes every changed row, the block that seals what was made ([`crate::audit::seal`]) and
    /// the events beside them. `events` may be asked from another thread, while the rows are
    /// written.
    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error>;

    /// Folds, and saves what came of it if there is anything; rows may be written while the fold goes on.
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

    /// What a command asks of the store alone.
    async fn tidy(&mut self, command: &Command) -> Result<(), Error>;

    async fn commit(self: Box<Self>) -> Result<(), Error>;
}
