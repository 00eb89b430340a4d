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
        mpsc,
    },
};

use async_trait::async_trait;
use events::{Direct, DirectTx, Packed};
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Again, Events, Fold, Writes,
    verify::{ASIDE, Reader},
};
use crate::{
    Error,
    audit::{self, Block, Head},
    book::{Book, Made},
    fold::Command,
};
use known::{Changed, Known};

/// The ledger's file in its folder.
const FILE: &str = "ledger.sqlite";

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!("migrations/sqlite": "0001_ledger", "0002_limits_audit", "0003_replace_nothing", "0004_chains", "0005_lists");

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
            weight: 0,
            sealed: 0,
            changed: Changed::default(),
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
    /// Of its commands.
    weight: usize,
    /// Operations that this group makes.
    sealed: u64,
    /// Rows as this group leaves them.
    changed: Changed,
}

/// The block and the events of a group.
type Sealed = (Option<Block>, Packed);

/// Facts of a group from which on its block and its events are made by another thread while its rows are written.
const FACTS_ASIDE_MIN: usize = 256;

/// Weight of a group from which on it is folded by another thread while its first rows are written.
const WEIGHT_ALONG_MIN: usize = 256;

/// Changes of operations after which the rows that were made are given to the writer: mostly as
/// many as its largest statement takes.
const GIVEN_CHANGES: usize = 256;

/// What the thread that folds a group gives to the one that writes it.
enum Part {
    Made(Made),
    /// Everything, once it is folded.
    Book(Arc<Book>),
}

impl Group {
    fn known(&self) -> MutexGuard<'_, Known> {
        // One that was left in the middle of a change has forgotten rather too much.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn head(&self) -> &Head {
        self.head.as_ref().expect("a group is loaded first")
    }

    fn save_rows(&self, book: &Book, seal: impl Fn() -> Sealed + Sync) -> Result<Sealed, Error> {
        let block = self.head().block + 1;
        if book.facts.len() < FACTS_ASIDE_MIN {
            save::save(&self.tx, book, block)?;
            return Ok(seal());
        }
        std::thread::scope(|scope| {
            let aside = std::thread::Builder::new().spawn_scoped(scope, &seal);
            let saved = save::save(&self.tx, book, block);
            let sealed = match aside {
                Ok(aside) => aside.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(error) => {
                    tracing::debug!(%error, "no thread to be had");
                    seal()
                }
            };
            saved.map(|()| sealed)
        })
    }

    /// Writes what another thread folds, while it folds, and then the rest, while the other one
    /// makes the block and the events. `None`: there is no other thread.
    fn fold_along(
        &mut self,
        book: &mut Option<Book>,
        fold: &mut Fold<'_>,
        events: &Events<'_>,
    ) -> Result<Option<Book>, Error> {
        let head = self.head().clone();
        let (giver, given) = mpsc::channel();
        let done: Result<_, Error> = std::thread::scope(|scope| {
            let along = move || {
                let mut book = book.take()?;
                // A writer that has failed takes nothing any more.
                fold(&mut book, &mut |book| {
                    if let Some(made) = book.give(GIVEN_CHANGES) {
                        let _ = giver.send(Part::Made(made));
                    }
                });
                let book = Arc::new(book);
                let _ = giver.send(Part::Book(book.clone()));
                drop(giver);
                Some(seal(&head, &book, events))
            };
            let Ok(along) = std::thread::Builder::new().spawn_scoped(scope, along) else {
                return Ok(None);
            };
            let saved = self.save_given(given);
            let sealed = along.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok(saved?.zip(sealed))
        });
        let Some((book, sealed)) = done? else {
            return Ok(None);
        };
        if !book.is_clean() {
            self.finish(sealed)?;
        }
        Ok(Arc::into_inner(book))
    }

    /// Writes rows as they come; gives the working set with all its rows written.
    fn save_given(&mut self, given: mpsc::Receiver<Part>) -> Result<Option<Arc<Book>>, Error> {
        let block = self.head().block + 1;
        let mut place = 0;
        for part in given {
            match part {
                Part::Made(made) => {
                    if place == 0 {
                        self.tx.prepare_cached("SAVEPOINT given")?.execute([])?;
                    }
                    save::save_made(&self.tx, &made, block, place)?;
                    place += made.operations.len();
                }
                Part::Book(book) => {
                    if place > 0 && book.has_taken_back() {
                        self.tx.execute_batch("ROLLBACK TO given")?;
                    }
                    if place > 0 {
                        self.tx.prepare_cached("RELEASE given")?.execute([])?;
                    }
                    if !book.is_clean() {
                        let changed = self.known().take_changed(&book);
                        self.changed = changed;
                        save::save(&self.tx, &book, block)?;
                    }
                    return Ok(Some(book));
                }
            }
        }
        Ok(None)
    }

    /// Writes what seals the rows of a group, and what tells of them.
    fn finish(&mut self, (block, events): Sealed) -> Result<(), Error> {
        save::save_block(&self.tx, block.as_ref())?;
        self.sealed = block.map_or(0, |block| block.operations);
        Ok(self.tx.append(events)?)
    }
}

fn seal(head: &Head, book: &Book, events: &Events<'_>) -> Sealed {
    let mut packed = Packed::default();
    events(book, &mut |event| packed.push(event));
    (audit::seal(head, book), packed)
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
        self.weight = commands.iter().map(|command| command.weight()).sum();
        Ok(book)
    }

    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error> {
        let changed = self.known().take_changed(book);
        self.changed = changed;
        let head = self.head().clone();
        let sealed = self.save_rows(book, || seal(&head, book, events))?;
        self.finish(sealed)
    }

    async fn fold_and_save(
        &mut self,
        mut book: Book,
        fold: &mut Fold<'_>,
        events: &Events<'_>,
    ) -> Result<Book, Error> {
        if self.weight >= WEIGHT_ALONG_MIN {
            let mut slot = Some(book);
            if let Some(book) = self.fold_along(&mut slot, fold, events)? {
                return Ok(book);
            }
            book = slot.expect("nobody else has taken it");
        }
        fold(&mut book, &mut |_| {});
        if !book.is_clean() {
            self.save(&book, events).await?;
        }
        Ok(book)
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
        known.keep(changed);
        Ok(())
    }
}
