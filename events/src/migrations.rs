//! Tables of the outbox and the inbox, the same in every service's SQLite file.
//!
//! [`crate::Sqlite::open`] applies the text before the service's own migrations, so a service need not repeat it; repeating it is harmless.
//! On PostgreSQL (`postgres/migrations.sql`) the outbox has a row an event with Debezium's columns `id`, `aggregatetype`, `aggregateid`, `type`,
//! `payload`: an operator can swap our relay for Debezium without a migration (`aggregatetype` holds the topic, `aggregateid` the key).

pub const SQL: &str = include_str!("migrations.sql");
