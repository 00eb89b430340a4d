//! Opening a store: finds its sealed tables, checks it before a migration, and seals all rows the
//! first time and after a migration.

use std::collections::BTreeMap;
use std::path::Path;

use sqlx::{AssertSqlSafe, Executor, Row, SqliteConnection, migrate::Migrator};

use super::check::{sum_of_rows, sum_of_seals};
use super::table::Table;
use super::write::Seals;
use super::{ALL_SEALED, Altered, Change, Hash, Sealing, StoredTotal, TABLES, Total, check, key};
use crate::Error;

impl Seals {
    /// Reads the sealed tables of a file. Makes the key if there is none.
    pub async fn of(
        db: &mut SqliteConnection,
        path: &Path,
        migrator: &Migrator,
        sealing: &Sealing,
    ) -> Result<Self, Error> {
        let key = key::read_or_make(path)?;
        let (tables, _) = tables(db, sealing).await?;
        let definition = definition(&tables, migrator);
        Ok(Seals::new(key, tables, definition))
    }

    /// Seals all rows, unless the file has been sealed with the same schema. Part of opening the
    /// file, on the prepared writer, in its transaction. Memory: the keys of all rows with seals.
    pub async fn seal_all_in_tx(&self, db: &mut SqliteConnection) -> Result<(), Error> {
        let known = StoredTotal::find(db, ALL_SEALED).await?;
        if known.is_some_and(|known| known.definition == self.definition) {
            return Ok(());
        }
        // Not as one statement each: those are checked for scans.
        let sql = "PRAGMA main.data_version; DELETE FROM row_seals; DELETE FROM seal_total";
        Executor::execute(&mut *db, sql).await?;
        self.add_total_in_tx(ALL_SEALED, &self.definition, &Total::default(), db)
            .await?;
        for table in &self.tables {
            if table.is_summed {
                let total = sum_of_rows(db, &self.key, table).await?;
                self.add_total_in_tx(&table.name, &table.definition, &total, db)
                    .await?;
                continue;
            }
            sqlx::query(AssertSqlSafe(table.note_all.clone()))
                .execute(&mut *db)
                .await?;
        }
        self.seal_in_tx(db).await
    }

    async fn add_total_in_tx(
        &self,
        name: &str,
        definition: &str,
        total: &Total,
        db: &mut SqliteConnection,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO seal_total (name, definition, rows, sum, seal) VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(name)
        .bind(definition)
        .bind(total.rows)
        .bind(total.sum.as_slice())
        .bind(total.seal(&self.key, name, definition).as_slice())
        .execute(db)
        .await?;
        Ok(())
    }
}

/// What all seals of a file depend on, one per line: the newest migration, then each table.
fn definition(tables: &[Table], migrator: &Migrator) -> String {
    let newest = migrator.iter().map(|migration| migration.version).max();
    let mut lines = vec![newest.unwrap_or_default().to_string()];
    lines.extend(tables.iter().map(|table| table.definition.clone()));
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
    let found = StoredTotal::find(db, ALL_SEALED).await?;
    let altered = match found {
        None if !key::exists(path) => return Ok(()),
        // Sealed before: the seals were removed.
        None => vec![Altered::total(ALL_SEALED, Change::Deleted)],
        Some(found) => match key::read(path) {
            Ok(key) => before_sealing(db, &key, migrator, sealing, &found).await?,
            Err(error) if key::exists(path) => return Err(error),
            Err(_) => {
                // Rows are sealed anew, with another key.
                Executor::execute(&mut *db, "DELETE FROM seal_total").await?;
                vec![Altered::total(ALL_SEALED, Change::Changed)]
            }
        },
    };
    for altered in altered {
        tracing::error!(
            store = %path.display(),
            table = altered.table,
            key = altered.key,
            severity = "critical",
            "row altered past its service, found at the start: see `platform data check`"
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

/// What a start finds in a sealed store: the total alone, or before its seals are made anew all
/// rows, against the tables that the seals were made for. A table that this version seals and the
/// last one did not has no seals yet.
async fn before_sealing(
    db: &mut SqliteConnection,
    key: &Hash,
    migrator: &Migrator,
    sealing: &Sealing,
    found: &StoredTotal,
) -> Result<Vec<Altered>, Error> {
    let mut altered = Vec::new();
    let (tables, _) = tables(db, sealing).await?;
    let is_known = found.definition == definition(&tables, migrator);
    let is_same = is_known || sum_of_seals(db).await? == found.total;
    if !is_same || !found.is_sealed(key, ALL_SEALED) {
        altered.push(Altered::total(ALL_SEALED, Change::Changed));
    }
    if is_known {
        return Ok(altered);
    }
    for table in tables {
        let mut known = found.definition.lines();
        if known.any(|known| known == table.definition) {
            altered.append(&mut check::altered_of(db, key, &table).await?);
        }
    }
    Ok(altered)
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
        let (condition, is_summed) = (sealing.condition(&name), sealing.is_summed(&name));
        found.push(Table::new(
            name,
            keys.into_values().collect(),
            columns,
            covered.is_some(),
            condition,
            is_summed,
        ));
    }
    Ok((found, keyless))
}
