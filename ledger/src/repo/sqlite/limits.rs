//! Velocity limits in SQLite.

use sqlx::{AssertSqlSafe, SqliteConnection};

use super::ids;
use crate::{
    Error,
    book::Book,
    fold::Command,
    limit::VelocityLimit,
    repo::limits::{About, LIMIT, LimitRow, keep, places, used_sql},
};

/// Adds the limits that may be about this working set, and what is used of each.
pub async fn load(
    tx: &mut SqliteConnection,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let about = About::of(commands, book);
    let sql = format!(
        "{LIMIT} WHERE l.instrument_id IN (SELECT value FROM json_each($1)) \
         AND (l.user_id = '' OR l.user_id IN (SELECT value FROM json_each($2))) \
         UNION {LIMIT} WHERE l.limit_id IN (SELECT value FROM json_each($3))"
    );
    let found: Vec<LimitRow> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(ids(&about.instruments))
        .bind(ids(&about.users))
        .bind(ids(&about.named))
        .fetch_all(&mut *tx)
        .await?;
    for row in found {
        let limit = VelocityLimit::try_from(row)?;
        let places = places::<sqlx::Sqlite>(tx, &limit, book).await?;
        let mut used = Vec::new();
        if !places.is_empty() {
            let sql = used_sql(
                limit.side,
                "json_each($3) j CROSS JOIN postings p ON p.SIDE_subaccount_id = j.value->>0 AND p.SIDE_version > j.value->>1",
            );
            let places: Vec<(&str, i64)> = places.iter().map(|(id, from)| (&**id, *from)).collect();
            let places =
                serde_json::to_string(&places).expect("texts and numbers have a JSON form");
            used = sqlx::query_as(AssertSqlSafe(sql))
                .bind(limit.since_us(book.now_us))
                .bind(limit.kinds.0)
                .bind(places)
                .fetch_all(&mut *tx)
                .await?;
        }
        keep(book, limit, used);
    }
    Ok(())
}

/// Writes the limits that changed.
pub async fn save(tx: &mut SqliteConnection, book: &Book) -> Result<(), Error> {
    for change in book.limits.changes() {
        let Some(limit) = change.after else {
            sqlx::query("DELETE FROM velocity_limits WHERE limit_id = $1")
                .bind(&**change.key)
                .execute(&mut *tx)
                .await?;
            continue;
        };
        let row = LimitRow::from(limit);
        sqlx::query(
            "INSERT INTO velocity_limits (limit_id, user_id, account_kind, instrument_id, side, window_s, amount, kinds, \
             created_at_us, updated_at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
             ON CONFLICT (limit_id) DO UPDATE SET user_id = excluded.user_id, account_kind = excluded.account_kind, \
             instrument_id = excluded.instrument_id, side = excluded.side, window_s = excluded.window_s, \
             amount = excluded.amount, kinds = excluded.kinds, updated_at_us = excluded.updated_at_us",
        )
        .bind(row.limit_id)
        .bind(row.user_id)
        .bind(row.account_kind)
        .bind(row.instrument_id)
        .bind(row.side)
        .bind(row.window_s)
        .bind(row.amount)
        .bind(row.kinds)
        .bind(row.created_at_us)
        .bind(row.updated_at_us)
        .execute(&mut *tx)
        .await?;
    }
    Ok(())
}
