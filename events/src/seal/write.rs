//! Seals the written rows of a transaction before its commit.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_recursion::async_recursion as boxed;
use rusqlite::OptionalExtension;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::table::{CHUNK, Table};
use super::{
    ALL_SEALED, DROP_SEALS, Hash, SAVE_SEALS, SAVE_TOTAL, StoredTotal, TOTAL, Total, row_seal,
    stored,
};
use crate::Error;

/// The sealed tables of one open file, and the key of their seals.
pub struct Seals {
    pub(super) key: Hash,
    pub(super) tables: Vec<Table>,
    /// One column per table: true if the transaction wrote rows of it.
    written: Arc<str>,
    install: Arc<str>,
    /// What all seals depend on: the newest migration and the tables.
    pub(super) definition: String,
}

/// A written row.
struct Written {
    position: i64,
    key: String,
    /// `None`: deleted, or no longer sealed.
    image: Option<String>,
    hash: Option<Vec<u8>>,
}

/// A write to a summed table.
struct Counted {
    position: i64,
    old_image: Option<String>,
    new_image: Option<String>,
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
    pub(super) fn new(key: Hash, tables: Vec<Table>, definition: String) -> Self {
        let written: Vec<String> = tables.iter().map(Table::is_written).collect();
        let install: Vec<String> = tables.iter().map(Table::install).collect();
        Seals {
            key,
            written: match written.is_empty() {
                true => "SELECT FALSE".into(),
                false => format!("SELECT {}", written.join(", ")).into(),
            },
            install: format!("PRAGMA temp_store = MEMORY; {}", install.join(" ")).into(),
            tables,
            definition,
        }
    }

    /// Statements that prepare a writer's connection.
    pub fn install(&self) -> Arc<str> {
        self.install.clone()
    }

    /// Seals the rows that the transaction wrote.
    #[boxed]
    pub async fn seal_in_tx(&self, db: &mut SqliteConnection) -> Result<(), Error> {
        let is_written = sqlx::query(AssertSqlSafe(self.written.clone()))
            .fetch_one(&mut *db)
            .await?;
        let mut sealed = None;
        for (index, table) in self.tables.iter().enumerate() {
            if !is_written.try_get::<bool, _>(index)? {
                continue;
            }
            if table.is_summed {
                let mut total = total_in_tx(&table.name, db).await?;
                self.count_in_tx(table, &mut total, db).await?;
                self.save_total_in_tx(&table.name, &table.definition, &total, db)
                    .await?;
                continue;
            }
            let mut total = match sealed {
                Some(total) => total,
                None => total_in_tx(ALL_SEALED, db).await?,
            };
            self.seal_table_in_tx(table, &mut total, db).await?;
            sealed = Some(total);
        }
        if let Some(total) = sealed {
            self.save_total_in_tx(ALL_SEALED, &self.definition, &total, db)
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
            forget_in_tx(table, changes.through, db).await?;
            if changes.is_last {
                return Ok(());
            }
        }
    }

    async fn count_in_tx(
        &self,
        table: &Table,
        total: &mut Total,
        db: &mut SqliteConnection,
    ) -> Result<(), Error> {
        loop {
            let rows = sqlx::query(AssertSqlSafe(table.written.clone()))
                .fetch_all(&mut *db)
                .await?;
            let mut counted = Vec::with_capacity(rows.len());
            for row in &rows {
                counted.push(Counted {
                    position: row.try_get("position")?,
                    old_image: row.try_get("old_image")?,
                    new_image: row.try_get("new_image")?,
                });
            }
            let Some(through) = self.count(table, &counted, total) else {
                return Ok(());
            };
            forget_in_tx(table, through, db).await?;
            if (counted.len() as i64) < CHUNK {
                return Ok(());
            }
        }
    }

    pub(super) async fn save_total_in_tx(
        &self,
        name: &str,
        definition: &str,
        total: &Total,
        db: &mut SqliteConnection,
    ) -> Result<(), Error> {
        sqlx::query(SAVE_TOTAL)
            .bind(total.rows)
            .bind(total.sum.as_slice())
            .bind(total.seal(&self.key, name, definition).as_slice())
            .bind(name)
            .execute(db)
            .await?;
        Ok(())
    }

    /// As [`Self::seal_in_tx`], on the calling thread.
    pub fn seal_directly(&self, db: &rusqlite::Connection) -> Result<(), Error> {
        let is_written: Vec<bool> = db.prepare_cached(&self.written)?.query_row([], |row| {
            (0..self.tables.len()).map(|at| row.get(at)).collect()
        })?;
        if !is_written.contains(&true) {
            return Ok(());
        }
        let mut sealed = None;
        for (table, _) in self.tables.iter().zip(is_written).filter(|(_, is)| *is) {
            if table.is_summed {
                let mut total = total_directly(&table.name, db)?;
                self.count_directly(table, &mut total, db)?;
                self.save_total_directly(&table.name, &table.definition, &total, db)?;
                continue;
            }
            let mut total = match sealed {
                Some(total) => total,
                None => total_directly(ALL_SEALED, db)?,
            };
            self.seal_table_directly(table, &mut total, db)?;
            sealed = Some(total);
        }
        if let Some(total) = sealed {
            self.save_total_directly(ALL_SEALED, &self.definition, &total, db)?;
        }
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

    fn count_directly(
        &self,
        table: &Table,
        total: &mut Total,
        db: &rusqlite::Connection,
    ) -> Result<(), Error> {
        loop {
            let counted = db
                .prepare_cached(&table.written)?
                .query_map([], |row| {
                    Ok(Counted {
                        position: row.get("position")?,
                        old_image: row.get("old_image")?,
                        new_image: row.get("new_image")?,
                    })
                })?
                .collect::<Result<Vec<_>, _>>()?;
            let Some(through) = self.count(table, &counted, total) else {
                return Ok(());
            };
            db.prepare_cached(&table.forget)?.execute([through])?;
            if (counted.len() as i64) < CHUNK {
                return Ok(());
            }
        }
    }

    fn save_total_directly(
        &self,
        name: &str,
        definition: &str,
        total: &Total,
        db: &rusqlite::Connection,
    ) -> Result<(), Error> {
        let seal = total.seal(&self.key, name, definition);
        let values = (total.rows, total.sum.as_slice(), seal.as_slice(), name);
        db.prepare_cached(SAVE_TOTAL)?.execute(values)?;
        Ok(())
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
                    let seal = row_seal(&self.key, table, &key, &image);
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

    /// Adds a page of writes to the total of a summed table. Writes of one row follow each other,
    /// so all but its first and last columns cancel out. `None` if the page is empty.
    fn count(&self, table: &Table, counted: &[Counted], total: &mut Total) -> Option<i64> {
        for write in counted {
            if let Some(image) = &write.old_image {
                total.subtract(&row_seal(&self.key, table, "", image));
            }
            if let Some(image) = &write.new_image {
                total.add(&row_seal(&self.key, table, "", image));
            }
        }
        counted.last().map(|last| last.position)
    }
}

/// A missing total counts as zero: the write goes on, and the check names the missing total.
async fn total_in_tx(name: &str, db: &mut SqliteConnection) -> Result<Total, Error> {
    let found = StoredTotal::find(db, name).await?;
    Ok(found.map(|found| found.total).unwrap_or_default())
}

fn total_directly(name: &str, db: &rusqlite::Connection) -> Result<Total, Error> {
    let found = db.prepare_cached(TOTAL)?.query_row([name], |row| {
        Ok(Total::read(
            row.get("rows")?,
            &row.get::<_, Vec<u8>>("sum")?,
        ))
    });
    Ok(found.optional()?.unwrap_or_default())
}

async fn forget_in_tx(table: &Table, through: i64, db: &mut SqliteConnection) -> Result<(), Error> {
    sqlx::query(AssertSqlSafe(table.forget.clone()))
        .bind(through)
        .execute(db)
        .await?;
    Ok(())
}
