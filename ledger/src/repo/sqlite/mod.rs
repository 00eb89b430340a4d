//! The store in a SQLite file: one writer at a time, so what a group loads is its own until it ends.

mod limits;
mod load;
mod save;

use std::{path::Path, sync::Arc};

use async_trait::async_trait;
use events::{Event, Sqlite};
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
    model::Id,
};

/// The ledger's file in its folder.
const FILE: &str = "ledger.sqlite";

static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// Opens `ledger.sqlite` in the folder and brings its schema up to date; gives both halves of the contract.
pub async fn open(data_dir: &Path) -> Result<(sqlx::SqlitePool, impl Writes + use<>), Error> {
    let db = Sqlite::open(data_dir.join(FILE), &MIGRATOR).await?;
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

/// Many ids in one bound value.
fn ids<'a>(items: impl IntoIterator<Item = &'a Id>) -> String {
    let items: Vec<&str> = items.into_iter().map(|id| &**id).collect();
    serde_json::to_string(&items).expect("texts have a JSON form")
}

struct Writer {
    db: Sqlite,
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
    /// Read with the working set.
    head: Option<Head>,
}

#[async_trait]
impl super::Group for Group {
    async fn accept(&mut self, consumer: &str, event_ids: &[Uuid]) -> Result<Vec<bool>, Error> {
        Ok(events::inbox::accept_many_in_tx(&mut self.tx, consumer, event_ids).await?)
    }

    async fn load(&mut self, commands: &[&Command], clock_us: i64) -> Result<Book, Error> {
        let (book, head) = load::load(&mut self.tx, commands, clock_us).await?;
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
        save::save(&mut self.tx, book, block, events).await
    }

    async fn tidy(&mut self, command: &Command) -> Result<(), Error> {
        save::tidy(&mut self.tx, command).await
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        Ok(self.tx.commit().await?)
    }
}
