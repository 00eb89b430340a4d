//! Captures the rows that a platform writes, by transaction.
//!
//! Triggers copy each inserted and updated row of every store, as in the `ledger` benchmark. A
//! thread notes the last copy of each table after each commit: a reader sees whole transactions
//! only. Two commits of a store between two looks count as one transaction, which makes the floor
//! higher, not lower.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rusqlite::{Connection, types::Value};

use super::files::{STORES, Store, data_version, open};
use crate::ledger::capture::{Rows, Table, last_rowid, tables, triggers};

/// Pause between two looks at the stores.
const PAUSE: Duration = Duration::from_micros(200);
/// Time until the thread has noted the last commit.
const NOTED_MAX: Duration = Duration::from_secs(10);
/// Rows read at once, about: bounds the memory.
const ROWS_MAX: i64 = 200_000;

/// Last captured rows of each table after a commit.
type End = Vec<i64>;

/// Commits of each store that are not read yet.
type Ends = Arc<Mutex<Vec<Vec<End>>>>;

/// Rows of consecutive transactions of one store: `transactions[transaction][table]`.
pub struct Chunk {
    /// Index in [`STORES`].
    pub store: usize,
    pub tables: Vec<Table>,
    pub transactions: Vec<Vec<Rows>>,
}

struct Captured {
    db: Connection,
    /// Tables without `changed`.
    names: Vec<Table>,
    /// Last rows that are read.
    read: End,
}

/// Capture of a platform that starts after [`Capture::install`].
pub struct Capture {
    stores: Vec<Captured>,
    ends: Ends,
    stop: Arc<AtomicBool>,
    watching: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Capture {
    /// Adds the triggers to the stores of a stopped platform and begins to watch them.
    ///
    /// # Errors
    /// A store cannot be changed.
    pub fn install(folder: &Path) -> anyhow::Result<Self> {
        let mut stores = Vec::with_capacity(STORES.len());
        for store in &STORES {
            let db = open(folder, store)?;
            let names = tables(&db)?;
            for table in &names {
                let sql = match store.is_in_floor {
                    true => triggers(table),
                    false => counters(table),
                };
                let added = db.execute_batch(&sql);
                added.with_context(|| format!("triggers of {}.{}", store.name, table.name))?;
            }
            stores.push(Captured {
                db,
                read: vec![0; names.len()],
                names,
            });
        }
        let ends: Ends = Arc::new(Mutex::new(vec![Vec::new(); STORES.len()]));
        let stop = Arc::new(AtomicBool::new(false));
        let mut watched = Vec::with_capacity(STORES.len());
        for (place, store) in in_floor() {
            let db = open(folder, store)?;
            let tables = tables(&db)?.into_iter();
            let tables = tables.filter(|table| !table.name.starts_with("captured_"));
            watched.push(Watched {
                place,
                db,
                tables: tables.collect(),
                version: -1,
                end: End::new(),
            });
        }
        let (shared, stopped) = (ends.clone(), stop.clone());
        let watching = std::thread::spawn(move || watch(watched, &shared, &stopped));
        Ok(Self {
            stores,
            ends,
            stop,
            watching: Some(watching),
        })
    }

    /// Next transactions of a store that bare statements write; `None` if all are read. Deletes the
    /// captured rows. Call it while the stores are quiet.
    ///
    /// # Errors
    /// The captured rows cannot be read, or the thread does not note the last of them.
    pub fn next_chunk(&mut self) -> anyhow::Result<Option<Chunk>> {
        let began = Instant::now();
        loop {
            if let Some(chunk) = self.noted_chunk()? {
                return Ok(Some(chunk));
            }
            if self.has_read_all()? {
                return Ok(None);
            }
            ensure!(began.elapsed() < NOTED_MAX, "commits are not noted");
            std::thread::sleep(PAUSE);
        }
    }

    /// On a busy machine the thread may look later than the stores have been quiet for a while.
    fn has_read_all(&self) -> anyhow::Result<bool> {
        for (place, _) in in_floor() {
            let of = &self.stores[place];
            for (table, read) in of.names.iter().zip(&of.read) {
                if last_rowid(&of.db, table)? != *read {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn noted_chunk(&mut self) -> anyhow::Result<Option<Chunk>> {
        for (place, store) in in_floor() {
            let of = &mut self.stores[place];
            let ends = {
                let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
                take(&mut ends[place], &of.read)
            };
            let Some(last) = ends.last().cloned() else {
                continue;
            };
            let mut chunk = Chunk {
                store: place,
                tables: Vec::with_capacity(of.names.len()),
                transactions: ends.iter().map(|_| Vec::new()).collect(),
            };
            for (at, table) in of.names.iter().enumerate() {
                let read = read_rows(&of.db, at, table, of.read[at], &ends, &mut chunk);
                read.with_context(|| format!("{}.{}", store.name, table.name))?;
            }
            of.read = last;
            return Ok(Some(chunk));
        }
        Ok(None)
    }

    /// Rows inserted and updated so far, by store and table. Call it while the stores are quiet.
    ///
    /// # Errors
    /// The rows cannot be counted.
    pub fn rows(&self) -> anyhow::Result<Vec<(String, i64)>> {
        let mut counts = Vec::new();
        for (store, of) in STORES.iter().zip(&self.stores) {
            for table in &of.names {
                // Numbers have no gap, and the last copy is never deleted.
                let count = last_rowid(&of.db, table)?;
                counts.push((format!("{}.{}", store.name, table.name), count));
            }
        }
        Ok(counts)
    }

    /// Ends the thread.
    ///
    /// # Errors
    /// It has failed: transactions are missing.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let watching = self.watching.take().context("ended once")?;
        let ended = watching.join();
        ended.map_err(|_| anyhow::anyhow!("the watching thread panicked"))?
    }
}

/// The first commits with about [`ROWS_MAX`] rows, at least one.
fn take(ends: &mut Vec<End>, read: &[i64]) -> Vec<End> {
    let rows = |end: &End| end.iter().sum::<i64>() - read.iter().sum::<i64>();
    let count = ends.iter().take_while(|end| rows(end) <= ROWS_MAX).count();
    let count = count.max(1).min(ends.len());
    ends.drain(..count).collect()
}

fn in_floor() -> impl Iterator<Item = (usize, &'static Store)> {
    let stores = STORES.iter().enumerate();
    stores.filter(|(_, store)| store.is_in_floor)
}

/// As [`triggers`], for rows that are only counted.
fn counters(table: &Table) -> String {
    let name = &table.name;
    format!(
        "CREATE TABLE captured_{name} (written INTEGER NOT NULL); \
         CREATE TRIGGER capture_insert_{name} AFTER INSERT ON {name} \
         BEGIN INSERT INTO captured_{name} VALUES (0); END; \
         CREATE TRIGGER capture_update_{name} AFTER UPDATE ON {name} \
         BEGIN INSERT INTO captured_{name} VALUES (1); END;"
    )
}

/// A store that the thread looks at.
struct Watched {
    /// Index in [`STORES`].
    place: usize,
    db: Connection,
    tables: Vec<Table>,
    version: i64,
    end: End,
}

fn watch(mut stores: Vec<Watched>, ends: &Ends, stop: &AtomicBool) -> anyhow::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        for of in &mut stores {
            let version = data_version(&of.db)?;
            if version == of.version {
                continue;
            }
            // One snapshot of all tables.
            of.db.prepare_cached("BEGIN")?.execute([])?;
            let end: End = of
                .tables
                .iter()
                .map(|table| last_rowid(&of.db, table))
                .collect::<rusqlite::Result<_>>()?;
            of.db.prepare_cached("COMMIT")?.execute([])?;
            if end != of.end && end.iter().any(|row| *row > 0) {
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
                ends[of.place].push(end.clone());
            }
            (of.version, of.end) = (version, end);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Reads the rows of a table after `read` into the transactions of the chunk, and deletes all but
/// the last of them: numbers continue after it.
fn read_rows(
    db: &Connection,
    at: usize,
    table: &Table,
    read: i64,
    ends: &[End],
    chunk: &mut Chunk,
) -> anyhow::Result<()> {
    let last = ends.last().map_or(read, |end| end[at]);
    let sql = format!(
        "SELECT rowid, written, {} FROM captured_{} WHERE rowid > ? AND rowid <= ? ORDER BY rowid",
        table.columns.join(", "),
        table.name
    );
    let mut statement = db.prepare_cached(&sql)?;
    let mut rows = statement.query([read, last])?;
    let (mut transaction, mut changed) = (0, 0_i64);
    let mut of: Vec<Rows> = ends.iter().map(|_| Rows::default()).collect();
    while let Some(row) = rows.next()? {
        let rowid: i64 = row.get(0)?;
        while ends.get(transaction).is_some_and(|end| end[at] < rowid) {
            transaction += 1;
        }
        let written: i64 = row.get(1)?;
        let values = (0..table.columns.len())
            .map(|column| row.get(column + 2))
            .collect::<Result<Vec<Value>, _>>()?;
        changed |= written;
        let rows = of
            .get_mut(transaction)
            .context("a row after the last commit")?;
        match written {
            0 => rows.inserted.push(values),
            _ => rows.updated.push(values),
        }
    }
    drop(rows);
    let changed: Vec<usize> = (0..table.columns.len())
        .filter(|column| changed & (1 << column) != 0)
        .collect();
    ensure!(
        !table.key.iter().any(|key| changed.contains(key)),
        "the key of a row changes"
    );
    for (rows, transaction) in of.into_iter().zip(&mut chunk.transactions) {
        transaction.push(rows);
    }
    chunk.tables.push(Table {
        name: table.name.clone(),
        columns: table.columns.clone(),
        key: table.key.clone(),
        changed,
    });
    let sql = format!("DELETE FROM captured_{} WHERE rowid < ?", table.name);
    db.prepare_cached(&sql)?.execute([last])?;
    Ok(())
}
