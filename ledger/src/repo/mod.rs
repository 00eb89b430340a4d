//! The store of the ledger: the only place with SQL.
//!
//! The storage contract, kept by every back-end: a [`Group`] is one write transaction. [`Group::load`] gives the working set of its commands in a
//! few statements, [`Group::save`] writes what the fold made of it in a few, each of up to 512 rows of one kind, whatever the size of the group; velocity
//! limits cost more (see `limits`). After [`Group::commit`] it is durable. Reads see committed rows only. Today: SQLite.

mod audit;
mod limits;
mod load;
mod read;
mod rows;
mod save;
mod statement;
mod verify;

use std::path::Path;

use events::Sqlite;
use uuid::Uuid;

pub use audit::{SealedOperation, SealedPosting};
pub use read::{Before, HoldFilter, OperationFilter, TrialBalance};
pub use statement::Line;
pub use verify::{BlockRow, Evidence, HoldState, SubAccountState};

use crate::Error;

/// The ledger's file in its folder.
pub const FILE: &str = "ledger.sqlite";

static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// The ledger's database. Clones share it.
#[derive(Clone)]
pub struct Store {
    db: Sqlite,
}

impl Store {
    /// Opens `ledger.sqlite` in the folder and brings its schema up to date.
    pub async fn open(data_dir: &Path) -> Result<Self, Error> {
        let store = Store {
            db: Sqlite::open(data_dir.join(FILE), &MIGRATOR).await?,
        };
        store.check_chain().await?;
        Ok(store)
    }

    /// The database itself, for the outbox relay.
    pub fn db(&self) -> &Sqlite {
        &self.db
    }

    /// Begins a write transaction.
    pub async fn begin(&self) -> Result<Group, Error> {
        Ok(Group {
            tx: self.db.write().await?,
        })
    }

    pub async fn close(&self) {
        self.db.close().await;
    }
}

/// One write transaction; dropped without [`Group::commit`] it leaves nothing.
pub struct Group {
    tx: events::Tx,
}

impl Group {
    /// Notes an event as taken; `false` when it was before.
    pub async fn accept(&mut self, consumer: &str, event_id: Uuid) -> Result<bool, Error> {
        Ok(events::inbox::accept_in_tx(&mut self.tx, consumer, event_id).await?)
    }

    pub async fn commit(self) -> Result<(), Error> {
        Ok(self.tx.commit().await?)
    }
}
