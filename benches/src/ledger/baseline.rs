//! Baseline of the ledger on SQLite: bare statements write the captured rows without a service.
//!
//! File, indexes, checks, triggers and connection settings are those of the service. A statement
//! inserts up to 256 rows. Each changed row is updated once per transaction. A transaction has as
//! many operations as one of the service. Rows and net changes are computed before the clock
//! starts.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, TransactionBehavior, params_from_iter, types::Value};

use super::capture::{Captured, Rows, Table};
use crate::load::Random;

/// Rows per INSERT, largest first. Rows that do not fill a statement use the next smaller sizes.
pub(crate) const SIZES: [usize; 6] = [256, 64, 16, 4, 2, 1];

/// Writes to one table in one transaction.
pub(crate) struct Write {
    /// Index of the table.
    pub table: usize,
    /// Per statement: index in [`SIZES`], and the values of all rows.
    pub inserts: Vec<(usize, Vec<Value>)>,
    /// Per row: values of the changed columns, then of the key.
    pub updates: Vec<Vec<Value>>,
}

pub(crate) struct Sql {
    /// By index in [`SIZES`].
    pub inserts: [String; SIZES.len()],
    pub update: String,
}

/// Prepared transactions of bare statements.
pub struct Baseline {
    db: Connection,
    sql: Vec<Sql>,
    transactions: std::vec::IntoIter<Vec<Write>>,
    operations: f64,
}

impl Baseline {
    /// Prepares the transactions, `merge` requests each.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn new(folder: &Path, captured: Captured, merge: usize) -> anyhow::Result<Self> {
        let db = open(&folder.join("ledger.sqlite"))?;
        Self::from_connection(db, captured, merge)
    }

    fn from_connection(db: Connection, captured: Captured, merge: usize) -> anyhow::Result<Self> {
        let count = captured.requests.len().div_ceil(merge);
        let operations = captured.operations as f64 / count as f64;
        let mut transactions = Vec::with_capacity(count);
        let mut requests = captured.requests.into_iter().peekable();
        while requests.peek().is_some() {
            let group: Vec<Vec<Rows>> = requests.by_ref().take(merge).collect();
            transactions.push(net_writes(&captured.tables, group));
        }
        db.set_prepared_statement_cache_capacity(256);
        Ok(Self {
            db,
            sql: captured.tables.iter().map(statements).collect(),
            transactions: transactions.into_iter(),
            operations,
        })
    }

    /// Number of transactions that have not run.
    pub fn remaining(&self) -> usize {
        self.transactions.len()
    }

    /// Runs up to `transactions` transactions within `limit`. Returns operations and time.
    ///
    /// # Errors
    /// The store rejects a row.
    pub fn run(&mut self, transactions: usize, limit: Duration) -> anyhow::Result<(f64, Duration)> {
        // Executed writes are dropped after the clock has stopped. Transactions beyond the limit
        // stay queued, because blocks of the audit chain must be consecutive.
        let mut done: Vec<Vec<Write>> = Vec::with_capacity(transactions);
        let began = Instant::now();
        while done.len() < transactions && began.elapsed() <= limit {
            let Some(writes) = self.transactions.next() else {
                break;
            };
            let tx = self
                .db
                .transaction_with_behavior(TransactionBehavior::Immediate)?;
            for write in &writes {
                let sql = &self.sql[write.table];
                for values in &write.updates {
                    tx.prepare_cached(&sql.update)?
                        .execute(params_from_iter(values))?;
                }
                for (size, values) in &write.inserts {
                    tx.prepare_cached(&sql.inserts[*size])?
                        .execute(params_from_iter(values))?;
                }
            }
            tx.commit()?;
            done.push(writes);
        }
        let elapsed = began.elapsed();
        Ok((self.operations * done.len() as f64, elapsed))
    }
}

/// Opens a file with the settings of the service's own writer.
pub(crate) fn open(path: &Path) -> rusqlite::Result<Connection> {
    let db = Connection::open(path)?;
    db.busy_timeout(Duration::from_secs(5))?;
    db.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; PRAGMA cache_size = -65536; \
         PRAGMA wal_autocheckpoint = 4000;",
    )?;
    Ok(db)
}

/// Statements that write the rows of a table.
pub(crate) fn statements(table: &Table) -> Sql {
    let columns = &table.columns;
    let one = format!("({})", vec!["?"; columns.len()].join(", "));
    let insert = |rows: usize| {
        let values = vec![one.as_str(); rows].join(", ");
        format!(
            "INSERT INTO {} ({}) VALUES {values}",
            table.name,
            columns.join(", ")
        )
    };
    let each = |places: &[usize], between: &str| {
        let terms: Vec<String> = places
            .iter()
            .map(|place| format!("{} = ?", columns[*place]))
            .collect();
        terms.join(between)
    };
    Sql {
        inserts: SIZES.map(insert),
        update: format!(
            "UPDATE {} SET {} WHERE {}",
            table.name,
            each(&table.changed, ", "),
            each(&table.key, " AND ")
        ),
    }
}

/// Nets the writes of several requests into one transaction: each row once, in its final state.
pub(crate) fn net_writes(tables: &[Table], requests: Vec<Vec<Rows>>) -> Vec<Write> {
    let mut rows: Vec<Rows> = tables.iter().map(|_| Rows::default()).collect();
    for request in requests {
        for (all, mut own) in rows.iter_mut().zip(request) {
            all.inserted.append(&mut own.inserted);
            all.updated.append(&mut own.updated);
        }
    }
    let writes = tables.iter().zip(rows).enumerate();
    writes
        .map(|(place, (table, mut rows))| {
            let key = |row: &[Value]| -> Vec<String> {
                table
                    .key
                    .iter()
                    .map(|key| format!("{:?}", row[*key]))
                    .collect()
            };
            // A row that is inserted and updated in one transaction is only inserted.
            let mut made: HashMap<Vec<String>, usize> = HashMap::new();
            for (at, row) in rows.inserted.iter().enumerate() {
                made.insert(key(row), at);
            }
            let mut last: HashMap<Vec<String>, Vec<Value>> = HashMap::new();
            for row in rows.updated {
                match made.get(&key(&row)) {
                    Some(at) => rows.inserted[*at] = row,
                    None => {
                        last.insert(key(&row), row);
                    }
                }
            }
            let mut last: Vec<(Vec<String>, Vec<Value>)> = last.into_iter().collect();
            last.sort_by(|a, b| a.0.cmp(&b.0));
            let updates = last
                .into_iter()
                .map(|(_, row)| {
                    let places = table.changed.iter().chain(&table.key);
                    places.map(|place| row[*place].clone()).collect()
                })
                .collect();
            let mut inserts = Vec::new();
            let mut left = &rows.inserted[..];
            for (place, size) in SIZES.into_iter().enumerate() {
                let mut chunks = left.chunks_exact(size);
                inserts.extend(chunks.by_ref().map(|rows| (place, rows.concat())));
                left = chunks.remainder();
            }
            Write {
                table: place,
                inserts,
                updates,
            }
        })
        .filter(|write| !write.inserts.is_empty() || !write.updates.is_empty())
        .collect()
}

/// Accounts of [`minimal_schema`].
const MINIMAL_ACCOUNTS: u64 = 10_000;

/// Runs the same statements on a minimal schema of three tables of integers, to compare this
/// baseline with published figures. A transaction has `batch` operations of two entries and one
/// update per changed account. Returns operations per second.
///
/// # Errors
/// The store rejects a statement.
pub fn minimal_schema(folder: &Path, batch: usize, transactions: usize) -> anyhow::Result<f64> {
    std::fs::create_dir_all(folder)?;
    let db = open(&folder.join(format!("plain-{batch}.sqlite")))?;
    db.execute_batch(
        "PRAGMA cache_size = -200000; \
         CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL CHECK (balance >= 0)) STRICT; \
         CREATE TABLE operation (id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, ts INTEGER NOT NULL) STRICT; \
            CREATE TABLE posting (op INTEGER NOT NULL, leg INTEGER NOT NULL, account INTEGER NOT NULL, \
            amount INTEGER NOT NULL, \
         PRIMARY KEY (op, leg)) WITHOUT ROWID, STRICT; \
         WITH RECURSIVE n (id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM n WHERE id < 9999) \
         INSERT INTO account SELECT id, 1000000000 FROM n;",
    )?;
    let mut random = Random::new(1);
    let mut balances = vec![1_000_000_000_i64; MINIMAL_ACCOUNTS as usize];
    let mut id = 0;
    let requests = (0..transactions).map(|_| {
        let mut tables: Vec<Rows> = (0..3).map(|_| Rows::default()).collect();
        for _ in 0..batch {
            let from = random.below(MINIMAL_ACCOUNTS) as i64;
            let to =
                (from + 1 + random.below(MINIMAL_ACCOUNTS - 1) as i64) % MINIMAL_ACCOUNTS as i64;
            let amount = 1 + random.below(1_000) as i64;
            tables[1]
                .inserted
                .push([id, 1, id].map(Value::Integer).to_vec());
            for (leg, account, amount) in [(0, from, -amount), (1, to, amount)] {
                let balance = &mut balances[account as usize];
                *balance += amount;
                tables[0]
                    .updated
                    .push([account, *balance].map(Value::Integer).to_vec());
                let entry = [id, leg, account, amount].map(Value::Integer).to_vec();
                tables[2].inserted.push(entry);
            }
            id += 1;
        }
        tables
    });
    let table = |name: &str, columns: &[&str], key: &[usize], changed: &[usize]| Table {
        name: name.to_owned(),
        columns: columns.iter().map(|column| (*column).to_owned()).collect(),
        key: key.to_vec(),
        changed: changed.to_vec(),
    };
    let captured = Captured {
        requests: requests.collect(),
        tables: vec![
            table("account", &["id", "balance"], &[0], &[1]),
            table("operation", &["id", "kind", "ts"], &[0], &[]),
            table("posting", &["op", "leg", "account", "amount"], &[0, 1], &[]),
        ],
        operations: batch * transactions,
    };
    let (operations, elapsed) =
        Baseline::from_connection(db, captured, 1)?.run(transactions, Duration::MAX)?;
    Ok(operations / elapsed.as_secs_f64())
}
