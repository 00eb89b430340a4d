//! The store of the ledger: the only place with SQL.
//!
//! The storage contract, kept by every back-end: a [`Group`] is one write transaction. [`Group::load`] gives the working set of its commands in a
//! fixed number of statements, [`Group::save`] writes what the fold made of it in a fixed number of statements, whatever the size of the group;
//! after [`Group::commit`] it is durable. [`Reads`] see committed rows only.

mod keep;
mod postgres;
mod read;
mod rows;
mod sqlite;

use std::{ops::Deref, sync::Arc};

use async_trait::async_trait;
use events::Event;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use read::{Before, HoldFilter, OperationFilter, Reads, TrialBalance};

use crate::{Error, LedgerConfig, book::Book, fold::Command};

/// The ledger's database. Clones share it.
#[derive(Clone)]
pub struct Store {
    reads: Arc<dyn Reads>,
    writes: Arc<dyn Writes>,
}

impl Store {
    /// Opens the database that the settings name, or `ledger.sqlite` in the data folder, and brings its schema up to date.
    ///
    /// # Errors
    /// [`Error::Events`]: it cannot be opened, or its schema cannot be brought up to date. [`Error::Url`].
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        if config.url.is_empty() {
            let (reads, writes) = sqlite::open(&config.data_dir).await?;
            return Ok(Store {
                reads: Arc::new(reads),
                writes: Arc::new(writes),
            });
        }
        if !config.url.is_postgres() {
            return Err(Error::Url(config.url.to_string()));
        }
        let (reads, writes) = postgres::open(config.url.secret()).await?;
        Ok(Store {
            reads: Arc::new(reads),
            writes: Arc::new(writes),
        })
    }

    /// Begins a write transaction.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Events`].
    pub async fn begin(&self) -> Result<Box<dyn Group>, Error> {
        self.writes.begin().await
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

/// What to do about a group that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// It would fail again, or cannot be judged.
    No,
    /// Another process was faster. Nothing was written; folded again it sees what the other one made.
    Contention,
    /// The connection is gone. Perhaps everything was written: the keys of the commands tell when they are folded again.
    Lost,
}

/// The writing half of the storage contract.
#[async_trait]
pub trait Writes: Send + Sync {
    async fn begin(&self) -> Result<Box<dyn Group>, Error>;
    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken);
    fn again(&self, error: &Error) -> Again;
    /// Waits for all connections to be returned and closes them, those of [`Reads`] too.
    async fn close(&self);
}

/// One write transaction; dropped without [`Group::commit`] it leaves nothing.
#[async_trait]
pub trait Group: Send {
    /// Notes an event as taken; `false` when it was before.
    async fn accept(&mut self, consumer: &str, event_id: Uuid) -> Result<bool, Error>;

    /// Everything these commands can touch, as it stands and stays until the end of the group.
    async fn load(&mut self, commands: &[&Command], now_us: i64) -> Result<Book, Error>;

    /// Writes every changed row.
    async fn save(&mut self, book: &Book) -> Result<(), Error>;

    /// What a command asks of the store alone.
    async fn tidy(&mut self, command: &Command) -> Result<(), Error>;

    /// Puts events beside the change that caused them.
    async fn append_events(&mut self, events: &[Event]) -> Result<(), Error>;

    async fn commit(self: Box<Self>) -> Result<(), Error>;
}
