//! The store in a SQLite file: one writer at a time, so what a group loads is its own until it ends.

mod load;
mod rows;
mod save;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use events::{Event, Sqlite};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Again, Writes};
use crate::{Error, book::Book, fold::Command};

static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// Opens `ledger.sqlite` in the folder and brings its schema up to date; gives both halves of the contract.
pub async fn open(data_dir: &Path) -> Result<(sqlx::SqlitePool, impl Writes + use<>), Error> {
    let db = Sqlite::open(data_dir.join("ledger.sqlite"), &MIGRATOR).await?;
    Ok((db.read().clone(), Writer { db }))
}

struct Writer {
    db: Sqlite,
}

#[async_trait]
impl Writes for Writer {
    async fn begin(&self) -> Result<Box<dyn super::Group>, Error> {
        Ok(Box::new(Group {
            tx: self.db.write().await?,
        }))
    }

    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        events::outbox::Relay::run(self.db.clone(), log, shutdown).await;
    }

    /// Nobody else writes, and the wait for the file's lock is behind it.
    fn again(&self, _: &Error) -> Again {
        Again::No
    }

    async fn close(&self) {
        self.db.close().await;
    }
}

struct Group {
    tx: events::Tx,
}

#[async_trait]
impl super::Group for Group {
    async fn accept(&mut self, consumer: &str, event_id: Uuid) -> Result<bool, Error> {
        Ok(events::inbox::accept_in_tx(&mut self.tx, consumer, event_id).await?)
    }

    async fn load(&mut self, commands: &[&Command], now_us: i64) -> Result<Book, Error> {
        load::load(&mut self.tx, commands, now_us).await
    }

    async fn save(&mut self, book: &Book) -> Result<(), Error> {
        self.save_rows(book).await
    }

    async fn tidy(&mut self, command: &Command) -> Result<(), Error> {
        self.tidy_rows(command).await
    }

    async fn append_events(&mut self, events: &[Event]) -> Result<(), Error> {
        Ok(events::outbox::append_in_tx(&mut self.tx, events).await?)
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        Ok(self.tx.commit().await?)
    }
}
