//! The store in a SQLite file. It has a single writer, so loaded rows do not change during a group.

mod limits;
mod load;
mod row_cache;
mod rows;
mod save;
mod user_index;

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
    Events, Fold, RetryKind, Writes,
    verify::{Reader, TEMP_TABLES},
};
use crate::{
    Error,
    audit::{self, Block, Head},
    book::{Book, FlushedRows},
    fold::Command,
};
use row_cache::{Changed, RowCache};

/// File name in the data folder.
const FILE: &str = "ledger.sqlite";

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/sqlite":
    "0001_ledger",
    "0002_limits_audit",
    "0003_replace_nothing",
    "0004_chains",
    "0005_lists",
    "0006_operation_types",
    "0007_audit_records",
    "0008_smaller_indexes"
);

const VERIFIED: &str = "checked by `verify`";

/// What no trade writes has seals, or a total. `verify` checks operations and postings with their
/// blocks, balances and amounts of holds with the postings, and the terms of an order's hold with
/// those of its trading hold.
static SEALING: events::Sealing = events::Sealing {
    exempt: &[
        ("operations", VERIFIED),
        ("postings", VERIFIED),
        ("audit_blocks", VERIFIED),
        ("audit_records", VERIFIED),
        ("operations_of_users", VERIFIED),
        ("operations_listed", "how far the list of a user reaches"),
    ],
    partly: &[("holds", "ROW.parent_hold_id IS NULL", VERIFIED)],
    columns: &[
        (
            "sub_accounts",
            &[
                "account_id",
                "user_id",
                "instrument_id",
                "freeze",
                "closed",
                "may_be_negative",
                "created_at_us",
            ],
        ),
        (
            "holds",
            &[
                "subaccount_id",
                "user_id",
                "instrument_id",
                "reason",
                "owner",
                "parent_hold_id",
                "destination_subaccount_id",
                "expires_at_us",
                "created_at_us",
            ],
        ),
    ],
    summed: &[
        ("answers", "one per call"),
        ("holds", "one per order of a user without a trading hold"),
    ],
};

/// The ledger's file in the folder, with the tables whose rows have seals.
pub fn sealed_store(data_dir: &Path) -> events::SealedStore {
    events::SealedStore {
        name: "ledger",
        path: data_dir.join(FILE),
        sealing: &SEALING,
    }
}

/// Opens `ledger.sqlite` in the folder and migrates its schema. Returns the reads and the writes of
/// the contract.
pub async fn open(data_dir: &Path) -> Result<(sqlx::SqlitePool, impl Writes + use<>), Error> {
    let store = sealed_store(data_dir);
    let db = Direct::open_sealed(store.path, &MIGRATOR, store.sealing).await?;
    let tx = db.write().await?;
    let unindexed = user_index::unindexed(&tx)?;
    drop(tx);
    let writer = Writer {
        row_cache: Arc::default(),
        unindexed: Arc::new(AtomicU64::new(unindexed)),
        db,
    };
    Ok((writer.db.read().clone(), writer))
}

/// Opens a snapshot of the ledger's file in a folder.
pub async fn snapshot(data_dir: &Path) -> Result<Reader<sqlx::Sqlite>, Error> {
    let path = data_dir.join(FILE);
    if !path.is_file() {
        return Err(Error::NoLedger(data_dir.to_owned()));
    }
    let options = SqliteConnectOptions::new().filename(path).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    let is_older = "SELECT NOT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'audit_records')";
    if sqlx::query_scalar(is_older).fetch_one(&mut db).await? {
        return Err(Error::OldSchema(data_dir.to_owned()));
    }
    for sql in TEMP_TABLES.into_iter().chain(["BEGIN"]) {
        sqlx::query(sql).execute(&mut db).await?;
    }
    Ok(Reader(db))
}

struct Writer {
    db: Direct,
    row_cache: Arc<Mutex<RowCache>>,
    /// Number of operations without entries in the user index.
    unindexed: Arc<AtomicU64>,
}

impl Writer {
    /// Fills the user index, between two groups.
    async fn fill_user_index(&self) -> Result<(), Error> {
        let tx = self.db.write().await?;
        let indexed = user_index::fill(&tx)?;
        tx.commit()?;
        self.unindexed.fetch_sub(indexed, Ordering::Relaxed);
        Ok(())
    }
}

#[async_trait]
impl Writes for Writer {
    async fn begin(&self) -> Result<Box<dyn super::Group>, Error> {
        self.run_deferred().await?;
        Ok(Box::new(Group {
            tx: self.db.write().await?,
            row_cache: self.row_cache.clone(),
            unindexed: self.unindexed.clone(),
            head: None,
            weight: 0,
            sealed: 0,
            changed: Changed::default(),
        }))
    }

    async fn run_deferred(&self) -> Result<(), Error> {
        if self.unindexed.load(Ordering::Relaxed) >= user_index::UNINDEXED_MAX {
            self.fill_user_index().await?;
        }
        Ok(())
    }

    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        events::outbox::Relay::run(self.db.clone(), log, shutdown).await;
    }

    fn blocks_thread(&self) -> bool {
        true
    }

    /// Never: there is no other writer, and SQLite has already waited for the file lock.
    fn retry_kind(&self, _: &Error) -> RetryKind {
        RetryKind::Never
    }

    async fn close(&self) {
        self.db.close().await;
    }
}

struct Group {
    tx: DirectTx,
    row_cache: Arc<Mutex<RowCache>>,
    unindexed: Arc<AtomicU64>,
    /// The last block, read with the working set.
    head: Option<Head>,
    /// [`Command::weight`] of its commands.
    weight: usize,
    /// Number of operations that this group creates.
    sealed: u64,
    /// Rows changed by this group.
    changed: Changed,
}

/// The block and the events of a group.
type Sealed = (Option<Block>, Packed);

/// Effects of a group from which another thread builds its block and events during the write.
const PARALLEL_SEAL_EFFECTS_MIN: usize = 256;

/// Weight of a group from which another thread folds it while this one writes the first rows.
const CONCURRENT_WEIGHT_MIN: usize = 256;

/// Changes of operations per flush: the row count of the largest INSERT.
const FLUSH_CHANGES: usize = 256;
/// Flushes that wait for the writing thread; with more, the folding thread waits too.
const FLUSHES_MAX: usize = 64;

/// Message from the folding thread to the writing thread.
enum FoldMessage {
    Rows(FlushedRows),
    /// The working set, after the fold.
    Book(Arc<Book>),
}

impl Group {
    fn row_cache(&self) -> MutexGuard<'_, RowCache> {
        // Valid even if poisoned: a panic leaves only rows that equal the stored ones.
        self.row_cache
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn head(&self) -> &Head {
        self.head.as_ref().expect("load precedes save")
    }

    /// Writes the changed rows. Seals the group on another thread if it has many effects.
    fn save_rows(&self, book: &Book, seal: impl Fn() -> Sealed + Sync) -> Result<Sealed, Error> {
        let block = self.head().block + 1;
        if book.effects.len() < PARALLEL_SEAL_EFFECTS_MIN {
            save::save(&self.tx, book, block)?;
            return Ok(seal());
        }
        std::thread::scope(|scope| {
            let sealing = std::thread::Builder::new().spawn_scoped(scope, &seal);
            let saved = save::save(&self.tx, book, block);
            let sealed = match sealing {
                Ok(sealing) => sealing.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(error) => {
                    tracing::debug!(%error, "cannot start a thread, sealing on this one");
                    seal()
                }
            };
            saved.map(|()| sealed)
        })
    }

    /// Writes flushed rows while another thread folds, and the rest while that thread builds the
    /// block and the events. `None`: the thread cannot be started; `book` is then unchanged.
    fn fold_concurrently(
        &mut self,
        book: &mut Option<Book>,
        fold: &mut Fold<'_>,
        events: &Events<'_>,
    ) -> Result<Option<Book>, Error> {
        let head = self.head().clone();
        let (sender, messages) = mpsc::sync_channel(FLUSHES_MAX);
        let done: Result<_, Error> = std::thread::scope(|scope| {
            let folding = move || {
                let mut book = book.take()?;
                // Sending fails after a failed write, which drops the receiver.
                fold(&mut book, &mut |book| {
                    if let Some(rows) = book.drain_ready(FLUSH_CHANGES) {
                        let _ = sender.send(FoldMessage::Rows(rows));
                    }
                });
                let book = Arc::new(book);
                let _ = sender.send(FoldMessage::Book(book.clone()));
                drop(sender);
                Some(seal(&head, &book, events))
            };
            let Ok(folding) = std::thread::Builder::new().spawn_scoped(scope, folding) else {
                return Ok(None);
            };
            let saved = self.save_flushed(messages);
            let sealed = folding.join().unwrap_or_else(|panic| resume_unwind(panic));
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

    /// Writes rows as they arrive. Returns the working set after all its rows are written.
    fn save_flushed(
        &mut self,
        messages: mpsc::Receiver<FoldMessage>,
    ) -> Result<Option<Arc<Book>>, Error> {
        let block = self.head().block + 1;
        let mut place = 0;
        for message in messages {
            match message {
                FoldMessage::Rows(rows) => {
                    if place == 0 {
                        self.tx.prepare_cached("SAVEPOINT flush")?.execute([])?;
                    }
                    save::save_flushed_rows(&self.tx, &rows, block, place)?;
                    place += rows.operations.len();
                }
                FoldMessage::Book(book) => {
                    if place > 0 && book.rolled_back_past_flush() {
                        self.tx.execute_batch("ROLLBACK TO flush")?;
                    }
                    if place > 0 {
                        self.tx.prepare_cached("RELEASE flush")?.execute([])?;
                    }
                    if !book.is_clean() {
                        let changed = self.row_cache().evict_changed(&book);
                        self.changed = changed;
                        save::save(&self.tx, &book, block)?;
                    }
                    return Ok(Some(book));
                }
            }
        }
        Ok(None)
    }

    /// Writes the block and the events of a group.
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
        let (book, head) = load::load(&self.tx, &mut self.row_cache(), commands, clock_us)?;
        self.head = Some(head);
        self.weight = commands.iter().map(|command| command.weight()).sum();
        Ok(book)
    }

    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error> {
        let changed = self.row_cache().evict_changed(book);
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
        if self.weight >= CONCURRENT_WEIGHT_MIN {
            let mut slot = Some(book);
            if let Some(book) = self.fold_concurrently(&mut slot, fold, events)? {
                return Ok(book);
            }
            book = slot.expect("the folding thread has not started");
        }
        fold(&mut book, &mut |_| {});
        if !book.is_clean() {
            self.save(&book, events).await?;
        }
        Ok(book)
    }

    async fn run_maintenance(&mut self, command: &Command) -> Result<(), Error> {
        save::run_maintenance(&self.tx, command)
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        let Group {
            tx,
            row_cache,
            unindexed,
            sealed,
            changed,
            ..
        } = *self;
        // Locked before the next group can begin, and filled only after the commit.
        let mut row_cache = row_cache.lock().unwrap_or_else(PoisonError::into_inner);
        tx.commit()?;
        unindexed.fetch_add(sealed, Ordering::Relaxed);
        row_cache.insert_committed(changed);
        Ok(())
    }
}
