//! The store in a SQLite file: one writer at a time, so what a group loads is its own until it ends.

mod limits;
mod load;
mod rows;
mod save;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use events::{Direct, DirectTx, Event};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Again, Writes,
    verify::{ASIDE, Reader},
};
use crate::{
    Error,
    audit::{Block, Head},
    book::Book,
    fold::Command,
};

/// The ledger's file in its folder.
const FILE: &str = "ledger.sqlite";

static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// Opens `ledger.sqlite` in the folder and brings its schema up to date; gives both halves of the contract.
pub async fn open(data_dir: &Path) -> Result<(sqlx::SqlitePool, impl Writes + use<>), Error> {
    let db = Direct::open(data_dir.join(FILE), &MIGRATOR).await?;
    Ok((db.read().clone(), Writer { db }))
}

/// One moment of the ledger's file in a folder.
pub async fn evidence(data_dir: &Path) -> Result<Reader<sqlx::Sqlite>, Error> {
    let path = data_dir.join(FILE);
    if !path.is_file() {
        return Err(Error::NoLedger(data_dir.to_owned()));
    }
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    for sql in ASIDE.into_iter().chain(["BEGIN"]) {
        sqlx::query(sql).execute(&mut db).await?;
    }
    Ok(Reader(db))
}

struct Writer {
    db: Direct,
}

#[async_trait]
impl Writes for Writer {
    async fn begin(&self) -> Result<Box<dyn super::Group>, Error> {
        Ok(Box::new(Group {
            tx: self.db.write().await?,
            head: None,
        }))
    }

    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        events::outbox::Relay::run(self.db.clone(), log, shutdown).await;
    }

    fn keeps_its_thread(&self) -> bool {
        true
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
    tx: DirectTx,
    /// Read with the working set.
    head: Option<Head>,
}

#[async_trait]
impl super::Group for Group {
    async fn accept(&mut self, consumer: &str, event_ids: &[Uuid]) -> Result<Vec<bool>, Error> {
        let accepted = event_ids
            .iter()
            .map(|event_id| Ok(self.tx.accept(consumer, *event_id)?));
        accepted.collect()
    }

    async fn load(&mut self, commands: &[&Command], clock_us: i64) -> Result<Book, Error> {
        let (book, head) = load::load(&self.tx, commands, clock_us)?;
        self.head = Some(head);
        Ok(book)
    }

    async fn head(&mut self) -> Result<Head, Error> {
        Ok(self.head.clone().expect("a group is loaded first"))
    }

    async fn save(
        &mut self,
        book: &Book,
        block: Option<&Block>,
        events: &[Event],
    ) -> Result<(), Error> {
        save::save(&self.tx, book, block)?;
        Ok(self.tx.append(events)?)
    }

    async fn tidy(&mut self, command: &Command) -> Result<(), Error> {
        save::tidy(&self.tx, command)
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        Ok(self.tx.commit()?)
    }
}
