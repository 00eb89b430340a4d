//! The store: all SQL of this room. One transaction holds a change and its events; rows are read back into the core's types and never
//! leave half read: a row that the core cannot express is an error, not a default.

pub mod intents;
pub mod payouts;
pub mod receipts;
pub mod reports;

use std::str::FromStr;

use sqlx::{Row, sqlite::SqliteRow};

use crate::intent::UnknownName;

/// Schema, applied after that of outbox and inbox.
pub static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!("migrations/sqlite": "0001_payments", "0002_report_keys", "0003_payout_refunds", "0004_payout_keys", "0005_refunds");

/// Position of a page: rows strictly before it in (created, id) order.
#[derive(Clone, Copy, Debug)]
pub struct Before<'a> {
    pub created_at_us: i64,
    pub id: &'a str,
    pub limit: i64,
}

/// Filters of a list; empty text = any.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    pub user_id: &'a str,
    pub status: &'a str,
}

/// A column that holds a name of ours.
fn name<T: FromStr<Err = UnknownName>>(row: &SqliteRow, column: &str) -> sqlx::Result<T> {
    let text: String = row.try_get(column)?;
    text.parse()
        .map_err(|error: UnknownName| sqlx::Error::ColumnDecode {
            index: column.to_owned(),
            source: Box::new(error),
        })
}
