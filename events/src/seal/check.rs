//! Compares all rows of a file with their seals. Read-only, in one snapshot, while the service may
//! go on writing; the snapshot keeps the write-ahead log from shrinking until the end. Memory: one
//! row at a time, and at most [`ALTERED_MAX`] alterations per table.

use std::fmt;
use std::path::PathBuf;

use futures::TryStreamExt;
use serde::Serialize;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, Connection, Executor, Row, SqliteConnection};

use super::prepare::tables;
use super::table::Table;
use super::{ALL_SEALED, DROP_TABLES, Hash, Sealing, StoredTotal, Total, key, row_seal, stored};
use crate::Error;

/// Alterations reported per table.
const ALTERED_MAX: usize = 100;
/// Table of the totals.
const TOTALS: &str = "seal_total";

/// A store with sealed rows.
#[derive(Clone, Debug)]
pub struct SealedStore {
    /// Name of its service.
    pub name: &'static str,
    pub path: PathBuf,
    pub sealing: &'static Sealing,
}

/// What happened to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Change {
    Changed,
    Added,
    Deleted,
}

impl Change {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Changed => "CHANGED",
            Self::Added => "ADDED",
            Self::Deleted => "DELETED",
        }
    }
}

/// A row that differs from its seal, or a summed table that differs from its total.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Altered {
    pub table: String,
    /// Values of the primary key, quoted as in SQL. Of a summed table its rows, and those of its
    /// total.
    pub key: String,
    pub change: Change,
}

impl Altered {
    /// An altered total.
    pub(super) fn total(name: &str, change: Change) -> Self {
        Altered {
            table: TOTALS.to_owned(),
            key: format!("'{name}'"),
            change,
        }
    }
}

impl fmt::Display for Altered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let change = match self.change {
            Change::Changed => "changed",
            Change::Added => "added",
            Change::Deleted => "deleted",
        };
        write!(f, "{} {}: {change}", self.table, self.key)
    }
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreCheck {
    /// Rows compared with their seals, or counted in a total.
    pub rows: u64,
    pub tables: u64,
    /// Empty: all rows are as their service wrote them.
    pub altered: Vec<Altered>,
}

/// Compares all rows of a store with their seals.
///
/// # Errors
/// [`Error::Store`], [`Error::Files`]: the store or the key of its seals cannot be read; the store
/// was never opened by a version that seals, or was last opened by one that seals other tables.
pub async fn check(store: &SealedStore) -> Result<StoreCheck, Error> {
    let key = key::read(&store.path)?;
    let mut db = connect(store, true).await?;
    sqlx::query("BEGIN").execute(&mut db).await?;
    let mut found = check_rows(&mut db, &key, store.sealing).await?;
    let earlier = sqlx::query("SELECT name, key, change FROM altered_rows ORDER BY name, key")
        .fetch_all(&mut db)
        .await?;
    for row in &earlier {
        let change: String = row.try_get("change")?;
        found.altered.push(Altered {
            table: row.try_get("name")?,
            key: row.try_get("key")?,
            change: match change.as_str() {
                "ADDED" => Change::Added,
                "DELETED" => Change::Deleted,
                _ => Change::Changed,
            },
        });
    }
    db.close().await?;
    Ok(found)
}

/// Accepts the rows of a store as they are, if there are findings: removes its seals and their key.
/// The next start seals all rows with a new key. No service may have the store open. Returns what
/// is accepted; empty: there is nothing to accept, and nothing was changed.
///
/// # Errors
/// [`Error::Store`], [`Error::Files`]: the store cannot be written, or its key not removed.
pub async fn accept(store: &SealedStore) -> Result<Vec<Altered>, Error> {
    let findings = match key::read(&store.path) {
        Ok(_) => check(store).await?.altered,
        Err(_) if !has_seals(store).await? => return Ok(Vec::new()),
        Err(_) => vec![Altered::total(ALL_SEALED, Change::Changed)],
    };
    if findings.is_empty() {
        return Ok(findings);
    }
    let mut db = connect(store, false).await?;
    Executor::execute(&mut db, DROP_TABLES).await?;
    db.close().await?;
    // Last: a start that finds the key without seals keeps that as a finding.
    key::remove(&store.path)?;
    Ok(findings)
}

/// False for a store of a version without seals.
async fn has_seals(store: &SealedStore) -> Result<bool, Error> {
    let mut db = connect(store, true).await?;
    let found: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM sqlite_schema WHERE name = $1")
        .bind(TOTALS)
        .fetch_one(&mut db)
        .await?;
    db.close().await?;
    Ok(found > 0)
}

async fn connect(store: &SealedStore, is_read_only: bool) -> Result<SqliteConnection, Error> {
    let options = SqliteConnectOptions::new()
        .filename(&store.path)
        .read_only(is_read_only);
    Ok(SqliteConnection::connect_with(&options).await?)
}

async fn check_rows(
    db: &mut SqliteConnection,
    key: &Hash,
    sealing: &Sealing,
) -> Result<StoreCheck, Error> {
    let mut done = StoreCheck::default();
    let mut counted = Total::default();
    let (tables, keyless) = tables(db, sealing).await?;
    if let Some(name) = keyless.first() {
        return Err(unusable(format!(
            "table {name} has no primary key: its rows cannot be sealed"
        )));
    }
    let Some(found) = StoredTotal::find(db, ALL_SEALED).await? else {
        done.altered
            .push(Altered::total(ALL_SEALED, Change::Deleted));
        return Ok(done);
    };
    for table in tables {
        if !found
            .definition
            .lines()
            .any(|line| line == table.definition)
        {
            return Err(unusable(format!(
                "table {} was not sealed by this version: start the platform once",
                table.name
            )));
        }
        match table.is_summed {
            true => check_sum(db, key, &table, &mut done).await?,
            false => check_table(db, key, &table, &mut done, &mut counted).await?,
        }
        done.tables += 1;
    }
    // Names no row: one was deleted or put back to an earlier state together with its seal.
    let is_same = found.total == counted && found.is_sealed(key, ALL_SEALED);
    if !is_same && done.altered.is_empty() {
        let key = format!("{} rows of {}", counted.rows, found.total.rows);
        done.altered.push(Altered {
            key,
            ..Altered::total(ALL_SEALED, Change::Changed)
        });
    }
    Ok(done)
}

fn unusable(text: String) -> Error {
    Error::Files(std::io::Error::other(text))
}

/// The alterations of one table.
pub(super) async fn altered_of(
    db: &mut SqliteConnection,
    key: &Hash,
    table: &Table,
) -> Result<Vec<Altered>, Error> {
    let mut done = StoreCheck::default();
    match table.is_summed {
        true => check_sum(db, key, table, &mut done).await?,
        false => check_table(db, key, table, &mut done, &mut Total::default()).await?,
    }
    Ok(done.altered)
}

async fn check_table(
    db: &mut SqliteConnection,
    key: &Hash,
    table: &Table,
    done: &mut StoreCheck,
    counted: &mut Total,
) -> Result<(), Error> {
    let mut altered = Vec::new();
    let before = counted.rows;
    let mut rows = sqlx::query(AssertSqlSafe(table.all.clone())).fetch(&mut *db);
    while let Some(row) = rows.try_next().await? {
        let (row_key, image): (String, String) = (row.try_get("key")?, row.try_get("image")?);
        let hash: Option<Vec<u8>> = row.try_get("hash")?;
        done.rows += 1;
        let change = match &hash {
            None => Some(Change::Added),
            Some(hash) => {
                let hash = stored(hash);
                counted.add(&hash);
                let is_same = hash == row_seal(key, table, &row_key, &image);
                (!is_same).then_some(Change::Changed)
            }
        };
        if let Some(change) = change.filter(|_| altered.len() < ALTERED_MAX) {
            altered.push(Altered {
                table: table.name.clone(),
                key: row_key,
                change,
            });
        }
    }
    drop(rows);
    let sealed: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM row_seals WHERE name = $1")
        .bind(&table.name)
        .fetch_one(&mut *db)
        .await?;
    if sealed != counted.rows - before {
        let keys: Vec<String> = sqlx::query_scalar(AssertSqlSafe(table.rowless.clone()))
            .fetch_all(&mut *db)
            .await?;
        altered.extend(keys.into_iter().take(ALTERED_MAX).map(|key| Altered {
            table: table.name.clone(),
            key,
            change: Change::Deleted,
        }));
    }
    done.altered.append(&mut altered);
    Ok(())
}

/// Compares a summed table with its total.
async fn check_sum(
    db: &mut SqliteConnection,
    key: &Hash,
    table: &Table,
    done: &mut StoreCheck,
) -> Result<(), Error> {
    let counted = sum_of_rows(db, key, table).await?;
    done.rows += counted.rows.unsigned_abs();
    let Some(found) = StoredTotal::find(db, &table.name).await? else {
        done.altered
            .push(Altered::total(&table.name, Change::Deleted));
        return Ok(());
    };
    if found.total != counted {
        done.altered.push(Altered {
            table: table.name.clone(),
            key: format!("{} rows of {}", counted.rows, found.total.rows),
            change: Change::Changed,
        });
    } else if !found.is_sealed(key, &table.name) {
        done.altered
            .push(Altered::total(&table.name, Change::Changed));
    }
    Ok(())
}

/// Number and sum of the seals that the rows of a summed table would have.
pub(super) async fn sum_of_rows(
    db: &mut SqliteConnection,
    key: &Hash,
    table: &Table,
) -> Result<Total, Error> {
    let mut total = Total::default();
    let mut rows = sqlx::query(AssertSqlSafe(table.all.clone())).fetch(db);
    while let Some(row) = rows.try_next().await? {
        let image: String = row.try_get("image")?;
        total.add(&row_seal(key, table, "", &image));
    }
    Ok(total)
}

/// Number and sum of the stored seals.
pub(super) async fn sum_of_seals(db: &mut SqliteConnection) -> Result<Total, Error> {
    let mut total = Total::default();
    let mut rows = sqlx::query("SELECT hash FROM row_seals").fetch(db);
    while let Some(row) = rows.try_next().await? {
        let hash: Vec<u8> = row.try_get("hash")?;
        total.add(&stored(&hash));
    }
    Ok(total)
}
