//! The store: all SQL of this crate. A change and its events share one transaction. Rows are
//! decoded into the core's types; an unknown name or amount is an error, not a default.

pub mod intents;
pub mod payouts;
pub mod receipts;
pub mod reports;

use std::str::FromStr;

use sqlx::{QueryBuilder, Row, Sqlite, sqlite::SqliteRow};
use types::TextError;

/// Schema, applied after that of the outbox and inbox.
pub static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/sqlite": "0001_payments", "0002_report_keys", "0003_payout_refunds",
    "0004_payout_keys", "0005_refunds", "0006_lists", "0007_receipts", "0008_audit_records",
    "0009_resolved_receipts", "0010_polled_intents", "0011_reports_explained"
);

/// Position of a page: rows strictly before it in (created, id) order.
#[derive(Clone, Copy, Debug)]
pub struct PageBound<'a> {
    pub created_at_us: i64,
    pub id: &'a str,
    pub limit: i64,
}

/// Filters of a list; an empty text matches any value.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    pub user_id: &'a str,
    pub status: &'a str,
}

/// Query for a page of a table, newest first. It names the index, because with both filters SQLite
/// would scan the index by status instead of the index by user.
fn page_query(
    table: &str,
    id: &str,
    filter: Filter<'_>,
    bound: PageBound<'_>,
) -> QueryBuilder<Sqlite> {
    let by = match (filter.user_id, filter.status) {
        ("", "") => "time",
        ("", _) => "status",
        _ => "user",
    };
    let mut query = QueryBuilder::new(format!(
        "SELECT * FROM {table} INDEXED BY {table}_by_{by} WHERE (created_at_us, {id}) < ("
    ));
    query.push_bind(bound.created_at_us).push(", ");
    query.push_bind(bound.id).push(")");
    for (column, value) in [("user_id", filter.user_id), ("status", filter.status)] {
        if !value.is_empty() {
            query.push(format!(" AND {column} = ")).push_bind(value);
        }
    }
    query.push(format!(" ORDER BY created_at_us DESC, {id} DESC LIMIT "));
    query.push_bind(bound.limit);
    query
}

/// Refuses to write a row that violates an invariant.
fn check_write(contradiction: Option<&'static str>, id: &str) -> sqlx::Result<()> {
    match contradiction {
        None => Ok(()),
        Some(what) => Err(sqlx::Error::Encode(format!("{what}: {id}").into())),
    }
}

/// Refuses a row that was read and violates an invariant.
fn check_read(contradiction: Option<&'static str>, id: &str) -> sqlx::Result<()> {
    match contradiction {
        None => Ok(()),
        Some(what) => Err(sqlx::Error::Decode(format!("{what}: {id}").into())),
    }
}

/// Parses a column that contains the name of an enum value.
fn parse_name<T: FromStr<Err = TextError>>(row: &SqliteRow, column: &str) -> sqlx::Result<T> {
    let text: String = row.try_get(column)?;
    text.parse().map_err(|error| sqlx::Error::ColumnDecode {
        index: column.to_owned(),
        source: Box::new(error),
    })
}
