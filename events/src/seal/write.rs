//! Seals the written rows of a transaction, and all rows when a store is opened for the first time
//! or with another schema.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use async_recursion::async_recursion as boxed;
use sqlx::{AssertSqlSafe, Executor, Row, SqliteConnection, migrate::Migrator};

use super::table::{CHUNK, Table};
use super::{
    Altered, Change, DROP_SEALS, Hash, SAVE_SEALS, SAVE_TOTAL, Sealing, TABLES, TOTAL, Total,
    check, key_file, make_key, seal_of, stored,
};
use crate::Error;

/// The sealed tables of one open file, and the key of their seals.
pub struct Seals {
    key: Hash,
    tables: Vec<Table>,
    /// One column per table: true if the transaction wrote rows of it.
    written: Arc<str>,
    install: Arc<str>,
    /// What all seals depend on: the newest migration and the tables.
    definition: String,
}

/// A written row.
struct Written {
    position: i64,
    key: String,
    /// `None`: deleted, or no longer sealed.
    image: Option<String>,
    hash: Option<Vec<u8>>,
}

/// Seals to store and to drop, as JSON arrays, after a page of written rows.
struct Changes {
    saved: Option<String>,
    dropped: Option<String>,
    /// Position of the last row of the page.
    through: i64,
    is_last: bool,
}

impl Seals {
    /// Reads the sealed tables of a file. Creates the key at the first start.
    pub async fn of(
        db: &mut SqliteConnection,
        path: &Path,
        migrator: &Migrator,
        sealing: &Sealing,
    ) -> Result<Self, Error> {
        let key = make_key(path)?;
        let (tables, _) = tables(db, sealing).await?;
        let definition = definition(&tables, migrator);
        let written: Vec<String> = tables.iter().map(Table::is_written).collect();
        let install: Vec<String> = tables.iter().map(Table::install).collect();
        Ok(Seals {
            key,
            written: match written.is_empty() {
                true => "SELECT FALSE".into(),
                false => format!("SELECT {}", written.join(", ")).into(),
            },
            install: format!("PRAGMA temp_store = MEMORY; {}", install.join(" ")).into(),
            tables,
            definition,
        })
    }

    /// Statements that prepare a writer's connection.
    pub fn install(&self) -> Arc<str> {
        self.install.clone()
    }

    /// Seals all rows, unless the file has been sealed with the same schema. Part of opening the
    /// file, on the prepared writer, in its transaction.
    pub async fn seal_all_in_tx(&self, db: &mut SqliteConnection) -> Result<(), Error> {
        let known: Option<String> = sqlx::query_scalar("SELECT definition FROM seal_total")
            .fetch_optional(&mut *db)
            .await?;
        if known.as_ref() == Some(&self.definition) {
            return Ok(());
        }
        let total = Total::default();
        // Not as one statement each: those are checked for scans.
        let sql = "PRAGMA main.data_version; DELETE FROM row_seals; DELETE FROM seal_total";
        Executor::execute(&mut *db, sql).await?;
        sqlx::query(
            "INSERT INTO seal_total (one, definition, rows, sum, seal) VALUES (1, $1, $2, $3, $4)",
        )
        .bind(&self.definition)
        .bind(total.rows)
        .bind(total.sum.as_slice())
        .bind(total.seal(&self.key, &self.definition).as_slice())
        .execute(&mut *db)
        .await?;
        for table in &self.tables {
            sqlx::query(AssertSqlSafe(table.note_all.clone()))
                .execute(&mut *db)
                .await?;
        }
        self.seal_in_tx(db).await
    }

    /// Seals the rows that the transaction wrote.
    #[boxed]
    pub async fn seal_in_tx(&self, db: &mut SqliteConnection) -> Result<(), Error> {
        let is_written = sqlx::query(AssertSqlSafe(self.written.clone()))
            .fetch_one(&mut *db)
            .await?;
        let mut total = None;
        for (index, table) in self.tables.iter().enumerate() {
            if !is_written.try_get::<bool, _>(index)? {
                continue;
            }
            let mut sum = match total {
                Some(sum) => sum,
                None => {
                    let row = sqlx::query(TOTAL).fetch_one(&mut *db).await?;
                    read_total(row.try_get("rows")?, &row.try_get::<Vec<u8>, _>("sum")?)
                }
            };
            self.seal_table_in_tx(table, &mut sum, db).await?;
            total = Some(sum);
        }
        if let Some(total) = total {
            sqlx::query(SAVE_TOTAL)
                .bind(total.rows)
                .bind(total.sum.as_slice())
                .bind(total.seal(&self.key, &self.definition).as_slice())
                .execute(&mut *db)
                .await?;
        }
        Ok(())
    }

    async fn seal_table_in_tx(
        &self,
        table: &Table,
        total: &mut Total,
        db: &mut SqliteConnection,
    ) -> Result<(), Error> {
        loop {
            let rows = sqlx::query(AssertSqlSafe(table.written.clone()))
                .fetch_all(&mut *db)
                .await?;
            let mut written = Vec::with_capacity(rows.len());
            for row in &rows {
                written.push(Written {
                    position: row.try_get("position")?,
                    key: row.try_get("key")?,
                    image: row.try_get("image")?,
                    hash: row.try_get("hash")?,
                });
            }
            let Some(changes) = self.changes(table, written, total) else {
                return Ok(());
            };
            for (sql, keys) in [(SAVE_SEALS, &changes.saved), (DROP_SEALS, &changes.dropped)] {
                if let Some(keys) = keys {
                    let statement = sqlx::query(sql).bind(&table.name).bind(keys);
                    statement.execute(&mut *db).await?;
                }
            }
            sqlx::query(AssertSqlSafe(table.forget.clone()))
                .bind(changes.through)
                .execute(&mut *db)
                .await?;
            if changes.is_last {
                return Ok(());
            }
        }
    }

    /// As [`Self::seal_in_tx`], on the calling thread.
    pub fn seal_directly(&self, db: &rusqlite::Connection) -> Result<(), Error> {
        let is_written: Vec<bool> = db.prepare_cached(&self.written)?.query_row([], |row| {
            (0..self.tables.len()).map(|at| row.get(at)).collect()
        })?;
        if !is_written.contains(&true) {
            return Ok(());
        }
        let mut total = db.prepare_cached(TOTAL)?.query_row([], |row| {
            Ok(read_total(row.get("rows")?, &row.get::<_, Vec<u8>>("sum")?))
        })?;
        for (table, _) in self.tables.iter().zip(is_written).filter(|(_, is)| *is) {
            self.seal_table_directly(table, &mut total, db)?;
        }
        let seal = total.seal(&self.key, &self.definition);
        let values = (total.rows, total.sum.as_slice(), seal.as_slice());
        db.prepare_cached(SAVE_TOTAL)?.execute(values)?;
        Ok(())
    }

    fn seal_table_directly(
        &self,
        table: &Table,
        total: &mut Total,
        db: &rusqlite::Connection,
    ) -> Result<(), Error> {
        loop {
            let written = db
                .prepare_cached(&table.written)?
                .query_map([], |row| {
                    Ok(Written {
                        position: row.get("position")?,
                        key: row.get("key")?,
                        image: row.get("image")?,
                        hash: row.get("hash")?,
                    })
                })?
                .collect::<Result<Vec<_>, _>>()?;
            let Some(changes) = self.changes(table, written, total) else {
                return Ok(());
            };
            for (sql, keys) in [(SAVE_SEALS, &changes.saved), (DROP_SEALS, &changes.dropped)] {
                if let Some(keys) = keys {
                    db.prepare_cached(sql)?.execute((&table.name, keys))?;
                }
            }
            db.prepare_cached(&table.forget)?
                .execute([changes.through])?;
            if changes.is_last {
                return Ok(());
            }
        }
    }

    /// The new seals of a page of written rows; `None` if it is empty. A row may be in it more than
    /// once, each time with the same columns.
    fn changes(&self, table: &Table, written: Vec<Written>, total: &mut Total) -> Option<Changes> {
        let through = written.last()?.position;
        let is_last = (written.len() as i64) < CHUNK;
        let mut rows = BTreeMap::new();
        for row in written {
            rows.insert(row.key, (row.image, row.hash));
        }
        let (mut saved, mut dropped) = (Vec::new(), Vec::new());
        for (key, (image, hash)) in rows {
            if let Some(hash) = &hash {
                total.subtract(&stored(hash));
            }
            match image {
                Some(image) => {
                    let seal = table_seal(&self.key, table, &key, &image);
                    total.add(&seal);
                    saved.push([key, hex::encode(seal)]);
                }
                None if hash.is_some() => dropped.push(key),
                None => {}
            }
        }
        let json =
            |is_empty: bool, value: serde_json::Value| (!is_empty).then(|| value.to_string());
        Some(Changes {
            saved: json(saved.is_empty(), serde_json::json!(saved)),
            dropped: json(dropped.is_empty(), serde_json::json!(dropped)),
            through,
            is_last,
        })
    }
}

/// What all seals of a file depend on, one per line: the newest migration, then each table.
fn definition(tables: &[Table], migrator: &Migrator) -> String {
    let newest = migrator.iter().map(|migration| migration.version).max();
    let mut lines = vec![newest.unwrap_or_default().to_string()];
    lines.extend(tables.iter().map(Table::definition));
    lines.join("\n")
}

/// Creates the tables of the seals. A store whose seals are about to be made anew, since it is
/// migrated or other tables are sealed, is checked first: otherwise what was altered before would
/// be sealed too. The alterations are kept.
pub async fn prepare(
    db: &mut SqliteConnection,
    path: &Path,
    migrator: &Migrator,
    sealing: &Sealing,
) -> Result<(), Error> {
    Executor::execute(&mut *db, TABLES).await?;
    let Some(row) = sqlx::query(TOTAL).fetch_optional(&mut *db).await? else {
        return Ok(());
    };
    let known: String = row.try_get("definition")?;
    let mut altered = Vec::new();
    let has_key = key_file(path).is_file();
    if !has_key || !check::is_sealed(&row, path)? {
        altered.push(Altered {
            table: "seal_total".to_owned(),
            key: "1".to_owned(),
            change: Change::Changed,
        });
    }
    let (tables, _) = tables(db, sealing).await?;
    if !has_key {
        // Rows are sealed anew, with another key.
        let sql = "PRAGMA main.data_version; DELETE FROM seal_total";
        Executor::execute(&mut *db, sql).await?;
    } else if known != definition(&tables, migrator) {
        altered.append(&mut check::before_migration(db, path, tables, &known).await?);
    }
    for altered in altered {
        tracing::error!(
            store = %path.display(),
            table = altered.table,
            key = altered.key,
            severity = "critical",
            "row altered past its service, found at the start"
        );
        sqlx::query(
            "INSERT INTO altered_rows (name, key, change) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        )
        .bind(&altered.table)
        .bind(&altered.key)
        .bind(altered.change.as_str())
        .execute(&mut *db)
        .await?;
    }
    Ok(())
}

/// The sealed tables of the file, by name; and tables that would be, but have no primary key. The
/// check refuses those.
pub(super) async fn tables(
    db: &mut SqliteConnection,
    sealing: &Sealing,
) -> Result<(Vec<Table>, Vec<String>), Error> {
    let (mut found, mut keyless) = (Vec::new(), Vec::new());
    let listed = sqlx::query("PRAGMA main.table_list")
        .fetch_all(&mut *db)
        .await?;
    let mut names = Vec::new();
    for row in &listed {
        let (name, kind): (String, String) = (row.try_get("name")?, row.try_get("type")?);
        let is_own = kind == "table" && !name.starts_with("sqlite_");
        if is_own && sealing.exemption(&name).is_none() {
            names.push(name);
        }
    }
    names.sort();
    for name in names {
        let columns = format!("PRAGMA main.table_info(\"{name}\")");
        let rows = sqlx::query(AssertSqlSafe(columns))
            .fetch_all(&mut *db)
            .await?;
        let (mut keys, mut columns) = (BTreeMap::new(), Vec::new());
        for row in &rows {
            let (column, place): (String, i64) = (row.try_get("name")?, row.try_get("pk")?);
            if place > 0 {
                keys.insert(place, column.clone());
            }
            columns.push(column);
        }
        if keys.is_empty() {
            keyless.push(name);
            continue;
        }
        let covered = sealing.columns(&name);
        if let Some(covered) = covered {
            columns.retain(|column| {
                covered.contains(&column.as_str()) || keys.values().any(|key| key == column)
            });
        }
        let condition = sealing.condition(&name);
        found.push(Table::new(
            name,
            keys.into_values().collect(),
            columns,
            covered.is_some(),
            condition,
        ));
    }
    Ok((found, keyless))
}

/// The seal of a row.
pub(super) fn table_seal(key: &Hash, table: &Table, row: &str, image: &str) -> Hash {
    let texts = [table.name.as_bytes(), row.as_bytes(), image.as_bytes()];
    seal_of(key, &texts)
}

pub(super) fn read_total(rows: i64, sum: &[u8]) -> Total {
    Total {
        rows,
        sum: stored(sum),
    }
}
