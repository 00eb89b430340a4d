//! The floor of settlement: the same batches in bare revm on one thread, and the same rows as bare
//! statements on another, both at once.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use chain::{BareChain, BareTransaction};
use rusqlite::{Connection, TransactionBehavior, params_from_iter};

use super::capture::{Capture, Chunk};
use super::files::STORES;
use crate::ledger::baseline::{self, Sql, Write, net_writes, statements};
use crate::ledger::capture::Table;

/// Prepared statements per connection: those of all tables in all sizes.
const STATEMENTS: usize = 512;

/// Time of each thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    pub rows: Duration,
    /// Of the rows: those of the ledger.
    pub ledger: Duration,
    pub evm: Duration,
}

impl std::ops::AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.ledger += other.ledger;
        self.evm += other.evm;
    }
}

/// A chunk whose values are computed.
struct Prepared {
    store: usize,
    sql: Vec<Sql>,
    transactions: Vec<Vec<Write>>,
}

/// Stores and chain state of a copied data folder.
pub struct Floor {
    stores: Vec<Option<Connection>>,
    chain: BareChain,
}

impl Floor {
    /// Opens a copy of the folder that the captured platform started on.
    ///
    /// # Errors
    /// A store cannot be opened.
    pub async fn open(folder: &Path) -> anyhow::Result<Self> {
        let mut stores = Vec::with_capacity(STORES.len());
        for store in &STORES {
            let db = match store.is_in_floor {
                true => Some(baseline::open(&folder.join(store.file)).context(store.name)?),
                false => None,
            };
            if let Some(db) = &db {
                db.set_prepared_statement_cache_capacity(STATEMENTS);
            }
            stores.push(db);
        }
        Ok(Self {
            stores,
            chain: BareChain::open(&folder.join("chain")).await?,
        })
    }

    /// Executes what the captured platform, which is idle, has written since the last call. Reading
    /// and preparing are not timed.
    ///
    /// # Errors
    /// A store refuses a row, or the chain a transaction.
    pub async fn run(&mut self, capture: &mut Capture, captured: &Path) -> anyhow::Result<Spent> {
        let batches = self.chain.read_new(&captured.join("chain")).await?;
        let mut rows = Vec::new();
        while let Some(chunk) = capture.next_chunk()? {
            rows.push(prepare(chunk));
        }
        let (stores, chain) = (&mut self.stores, &mut self.chain);
        std::thread::scope(|scope| {
            let executing = scope.spawn(|| execute(chain, &batches));
            let written = write_all(stores, &rows);
            let executed = executing.join();
            let evm = executed.map_err(|_| anyhow::anyhow!("the chain's thread panicked"))??;
            let (rows, ledger) = written?;
            Ok(Spent { rows, ledger, evm })
        })
    }
}

fn execute(chain: &mut BareChain, batches: &[BareTransaction]) -> anyhow::Result<Duration> {
    let began = Instant::now();
    chain.execute(batches)?;
    Ok(began.elapsed())
}

/// Returns the time of all rows, and of those of the ledger.
fn write_all(
    stores: &mut [Option<Connection>],
    rows: &[Prepared],
) -> anyhow::Result<(Duration, Duration)> {
    let (mut all, mut ledger) = (Duration::ZERO, Duration::ZERO);
    for of in rows {
        let began = Instant::now();
        write(stores, of)?;
        let spent = began.elapsed();
        all += spent;
        if STORES[of.store].name == "ledger" {
            ledger += spent;
        }
    }
    Ok((all, ledger))
}

fn prepare(chunk: Chunk) -> Prepared {
    let tables: &[Table] = &chunk.tables;
    let transactions = chunk.transactions.into_iter().map(|mut rows| {
        for (table, rows) in tables.iter().zip(&mut rows) {
            // Updates that changed nothing.
            if table.changed.is_empty() {
                rows.updated.clear();
            }
        }
        net_writes(tables, vec![rows])
    });
    Prepared {
        store: chunk.store,
        transactions: transactions.collect(),
        sql: tables.iter().map(statements).collect(),
    }
}

fn write(stores: &mut [Option<Connection>], of: &Prepared) -> anyhow::Result<()> {
    let db = stores[of.store].as_mut().context("a store of the floor")?;
    for writes in &of.transactions {
        let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for write in writes {
            let sql = &of.sql[write.table];
            for values in &write.updates {
                let mut update = tx.prepare_cached(&sql.update)?;
                update.execute(params_from_iter(values))?;
            }
            for (size, values) in &write.inserts {
                let mut insert = tx.prepare_cached(&sql.inserts[*size])?;
                insert.execute(params_from_iter(values))?;
            }
        }
        tx.commit()?;
    }
    Ok(())
}
