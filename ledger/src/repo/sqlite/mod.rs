//! The store in a SQLite file: one writer at a time, so what a group loads is its own until it ends.

mod known;
mod limits;
mod lists;
mod load;
mod rows;
mod save;

use std::{
    panic::resume_unwind,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use events::{Direct, DirectTx, Packed};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Again, Events, Writes,
    verify::{ASIDE, Reader},
};
use crate::{
    Error,
    audit::{self, Block, Head},
    book::Book,
    fold::Command,
    model::SubAccount,
};
use known::Known;
use save::Chains;

/// The ledger's file in its folder.
const FILE: &str = "ledger.sqlite";

static MIGRATOR: sqlx::migrate::Migrator = sqlx::migrate!("migrations/sqlite");

/// Opens `ledger.sqlite` in the folder and brings its schema up to date; gives both halves of the contract.
pub async fn open(data_dir: &Path) -> Result<(sqlx::SqlitePool, impl Writes + use<>), Error> {
    let db = Direct::open(data_dir.join(FILE), &MIGRATOR).await?;
    let tx = db.write().await?;
    let unlisted = lists::unlisted(&tx)?;
    drop(tx);
    let writer = Writer {
        known: Arc::default(),
        unlisted: Arc::new(AtomicU64::new(unlisted)),
        db,
    };
    Ok((writer.db.read().clone(), writer))
}

/// One moment of the ledger's file in a folder.
pub async fn evidence(data_dir: &Path) -> Result<Reader<sqlx::Sqlite>, Error> {
    let path = data_dir.join(FILE);
    if !path.is_file() {
        return Err(Error::NoLedger(data_dir.to_owned()));
    }
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    let is_older =
        "SELECT NOT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'operations_listed')";
    if sqlx::query_scalar(is_older).fetch_one(&mut db).await? {
        return Err(Error::Older(data_dir.to_owned()));
    }
    for sql in ASIDE.into_iter().chain(["BEGIN"]) {
        sqlx::query(sql).execute(&mut db).await?;
    }
    Ok(Reader(db))
}

struct Writer {
    db: Direct,
    known: Arc<Mutex<Known>>,
    /// Operations that are not listed by user yet.
    unlisted: Arc<AtomicU64>,
}

impl Writer {
    /// Lists what waits for it, between two groups.
    async fn list(&self) -> Result<(), Error> {
        let tx = self.db.write().await?;
        let listed = lists::list(&tx)?;
        tx.commit()?;
        self.unlisted.fetch_sub(listed, Ordering::Relaxed);
        Ok(())
    }
}

#[async_trait]
impl Writes for Writer {
    async fn begin(&self) -> Result<Box<dyn super::Group>, Error> {
        self.catch_up().await?;
        Ok(Box::new(Group {
            tx: self.db.write().await?,
            known: self.known.clone(),
            unlisted: self.unlisted.clone(),
            head: None,
            sealed: 0,
            changed: Vec::new(),
        }))
    }

    async fn catch_up(&self) -> Result<(), Error> {
        if self.unlisted.load(Ordering::Relaxed) >= lists::UNLISTED_MAX {
            self.list().await?;
        }
        Ok(())
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
    known: Arc<Mutex<Known>>,
    unlisted: Arc<AtomicU64>,
    /// Read with the working set.
    head: Option<Head>,
    /// Operations that this group makes.
    sealed: u64,
    /// Sub-accounts as this group leaves them.
    changed: Vec<SubAccount>,
}

/// The block and the events of a group.
type Made = (Option<Block>, Packed);

/// Facts of a group from which on its block and its events are made by another thread while its rows are written.
const FACTS_ASIDE_MIN: usize = 256;

impl Group {
    fn known(&self) -> MutexGuard<'_, Known> {
        // One that was left in the middle of a change has forgotten rather too much.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn save_rows(
        &self,
        book: &Book,
        chains: &Chains,
        made: impl Fn() -> Made + Sync,
    ) -> Result<Made, Error> {
        let head = self.head.as_ref().expect("a group is loaded first");
        if book.facts.len() < FACTS_ASIDE_MIN {
            save::save(&self.tx, book, chains, head.block + 1)?;
            return Ok(made());
        }
        std::thread::scope(|scope| {
            let aside = std::thread::Builder::new().spawn_scoped(scope, &made);
            let saved = save::save(&self.tx, book, chains, head.block + 1);
            let made = match aside {
                Ok(aside) => aside.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(error) => {
                    tracing::debug!(%error, "no thread to be had");
                    made()
                }
            };
            saved.map(|()| made)
        })
    }
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
        let (book, head) = load::load(&self.tx, &mut self.known(), commands, clock_us)?;
        self.head = Some(head);
        Ok(book)
    }

    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error> {
        let chains = Chains::of(&self.tx, book)?;
        let mut changed = self.known().take_changed(book, &chains.subaccounts);
        for row in &mut changed {
            row.last_posting = chains.last_of(&row.terms.subaccount_id);
        }
        self.changed = changed;
        let head = self.head.clone().expect("a group is loaded first");
        let made = || {
            let mut packed = Packed::default();
            events(&mut |event| packed.push(event));
            (audit::seal(&head, book), packed)
        };
        let (block, events) = self.save_rows(book, &chains, made)?;
        save::save_block(&self.tx, block.as_ref())?;
        self.sealed = block.map_or(0, |block| block.operations);
        Ok(self.tx.append(events)?)
    }

    async fn tidy(&mut self, command: &Command) -> Result<(), Error> {
        save::tidy(&self.tx, command)
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        let Group {
            tx,
            known,
            unlisted,
            sealed,
            changed,
            ..
        } = *self;
        // Before the next group begins, and only if this one stands.
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        tx.commit()?;
        unlisted.fetch_add(sealed, Ordering::Relaxed);
        changed.into_iter().for_each(|row| known.keep(row));
        Ok(())
    }
}
