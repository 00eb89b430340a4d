//! Tables of the outbox and the inbox, the same in every service's database.
//!
//! [`crate::Sqlite::open`] applies the text before the service's own migrations, so a service need not repeat it; repeating it is harmless.
//! The outbox columns `id`, `aggregatetype`, `aggregateid`, `type`, `payload` are Debezium's defaults: an operator can swap our relay for
//! Debezium without a migration (`aggregatetype` holds the topic, `aggregateid` the key).

pub const SQL: &str = include_str!("migrations.sql");
