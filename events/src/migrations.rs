//! Migrations: SQL texts in the binary, applied when a store is opened.
//!
//! Outbox, inbox and answered calls have the same tables in every service's SQLite file.
//! [`crate::Sqlite::open`] applies [`SQL`] before the service's own migrations. On PostgreSQL
//! (`postgres/migrations.sql`) the outbox has one row per event with Debezium's columns `id`,
//! `aggregatetype`, `aggregateid`, `type`, `payload`: an operator can replace the relay with
//! Debezium without a migration (`aggregatetype` has the topic, `aggregateid` the key).

use sqlx::{
    SqlStr,
    migrate::{Migration, MigrationType, Migrator},
};

pub const SQL: &str = include_str!("migrations.sql");

/// The named files (`NNNN_name`, without `.sql`) of the crate's folder, as a `LazyLock<Migrator>`.
///
/// Replaces sqlx's `migrate!`, whose feature builds SQLite a second time for the build machine.
#[macro_export]
macro_rules! migrations {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        ::std::sync::LazyLock::new(|| {
            $crate::migrations::migrator(&[$((
                $name,
                include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $folder, "/", $name, ".sql")),
            )),+])
        })
    };
}

/// Migrations from names of the form `NNNN_name` and their SQL.
///
/// # Panics
/// A name does not begin with its number.
pub fn migrator(files: &[(&'static str, &'static str)]) -> Migrator {
    let migration = |&(name, sql): &(&'static str, &'static str)| {
        let (number, description) = name.split_once('_').expect("NNNN_what");
        Migration::new(
            number.parse().expect("NNNN_what"),
            description.replace('_', " ").into(),
            MigrationType::Simple,
            SqlStr::from_static(sql),
            false,
        )
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_has_the_number_and_description_of_its_file() {
        let migrator = migrator(&[("0002_more_rows", "SELECT 2"), ("0001_rows", "SELECT 1")]);
        let seen: Vec<_> = migrator
            .iter()
            .map(|migration| (migration.version, &*migration.description))
            .collect();
        assert_eq!(seen, [(1, "rows"), (2, "more rows")]);
    }
}
