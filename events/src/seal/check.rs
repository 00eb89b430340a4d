//! Compares all rows of a file with their seals. Read-only, in one snapshot, while the service may
//! go on writing. Memory: one row at a time, and at most [`ALTERED_MAX`] alterations per table.

use std::fmt;
use std::path::{Path, PathBuf};

use futures::TryStreamExt;
use serde::Serialize;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection};

use super::table::Table;
use super::write::{read_total, table_seal, tables};
use super::{Hash, Sealing, TOTAL, Total, read_key, stored};
use crate::Error;

/// Alterations reported per table.
const ALTERED_MAX: usize = 100;

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

/// A row that differs from its seal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Altered {
    pub table: String,
    /// Values of the primary key, quoted as in SQL.
    pub key: String,
    pub change: Change,
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
    /// Rows compared with their seals.
    pub rows: u64,
    pub tables: u64,
    /// Empty: all rows are as their service wrote them.
    pub altered: Vec<Altered>,
}

/// Compares all rows of a store with their seals.
///
/// # Errors
/// [`Error::Store`], [`Error::Files`]: the store or the key of its seals cannot be read, or the
/// store was never opened by a version that seals.
pub async fn check(store: &SealedStore) -> Result<StoreCheck, Error> {
    let key = read_key(&store.path)?;
    let options = SqliteConnectOptions::new()
        .filename(&store.path)
        .read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
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

/// Checks a store whose seals are about to be made anew, against the tables that they were made
/// for: a table that this version seals and the last one did not has no seals yet.
pub(super) async fn before_migration(
    db: &mut SqliteConnection,
    path: &Path,
    tables: Vec<Table>,
    definition: &str,
) -> Result<Vec<Altered>, Error> {
    let key = read_key(path)?;
    let mut altered = Vec::new();
    for table in tables {
        let own = table.definition();
        if definition.lines().any(|known| known == own) {
            let mut done = StoreCheck::default();
            check_table(db, &key, &table, &mut done, &mut Total::default()).await?;
            altered.append(&mut done.altered);
        }
    }
    Ok(altered)
}

/// Whether the row of the total has its seal.
pub(super) fn is_sealed(row: &SqliteRow, path: &Path) -> Result<bool, Error> {
    let key = read_key(path)?;
    let total = read_total(row.try_get("rows")?, &row.try_get::<Vec<u8>, _>("sum")?);
    let definition: String = row.try_get("definition")?;
    let seal: Vec<u8> = row.try_get("seal")?;
    Ok(stored(&seal) == total.seal(&key, &definition))
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
        let text = format!("table {name} has no primary key: its rows cannot be sealed");
        return Err(Error::Files(std::io::Error::other(text)));
    }
    for table in tables {
        check_table(db, key, &table, &mut done, &mut counted).await?;
        done.tables += 1;
    }
    let row = sqlx::query(TOTAL).fetch_one(&mut *db).await?;
    let total = read_total(row.try_get("rows")?, &row.try_get::<Vec<u8>, _>("sum")?);
    let seal: Vec<u8> = row.try_get("seal")?;
    let is_sealed = stored(&seal) == total.seal(key, &row.try_get::<String, _>("definition")?);
    // Names no row: one was deleted or put back to an earlier state together with its seal.
    if (total != counted || !is_sealed) && done.altered.is_empty() {
        done.altered.push(Altered {
            table: "seal_total".to_owned(),
            key: format!("{} rows of {}", counted.rows, total.rows),
            change: Change::Changed,
        });
    }
    Ok(done)
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
                let is_same = hash == table_seal(key, table, &row_key, &image);
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
