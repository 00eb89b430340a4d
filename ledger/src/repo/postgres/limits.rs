//! Velocity limits in PostgreSQL.

use std::collections::BTreeSet;

use sqlx::{AssertSqlSafe, PgConnection};

use super::load::texts;
use crate::{
    Error,
    book::Book,
    fold::{Command, CommandKind},
    limit::VelocityLimit,
    model::Id,
    repo::limits::{LimitRow, LimitScope, SELECT_LIMITS, load_limit, usage_sql, window_starts},
};

/// Locks the limits that commands name: two ledgers cannot change the same limit concurrently.
pub async fn lock(tx: &mut PgConnection, commands: &[&Command]) -> Result<(), Error> {
    let named: BTreeSet<&Id> = commands
        .iter()
        .filter_map(|command| match &command.kind {
            CommandKind::SetLimit { limit, .. } => Some(&limit.limit_id),
            CommandKind::RemoveLimit { limit_id, .. } => Some(limit_id),
            _ => None,
        })
        .collect();
    if !named.is_empty() {
        sqlx::query(
            "SELECT 1 FROM velocity_limits WHERE limit_id = ANY($1) ORDER BY limit_id FOR UPDATE",
        )
        .bind(texts(named))
        .execute(tx)
        .await?;
    }
    Ok(())
}

/// Loads the limits that may apply to the working set, and those that its commands name, each with
/// its usage.
pub async fn load(
    tx: &mut PgConnection,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let scope = LimitScope::of(commands, book);
    let sql = format!(
        "{SELECT_LIMITS} WHERE l.instrument_id = ANY($1) AND (l.user_id = '' OR l.user_id = ANY($2)) \
         UNION {SELECT_LIMITS} WHERE l.limit_id = ANY($3)"
    );
    let found: Vec<LimitRow> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(texts(&scope.instruments))
        .bind(texts(&scope.users))
        .bind(texts(&scope.named))
        .fetch_all(&mut *tx)
        .await?;
    for row in found {
        let limit = VelocityLimit::try_from(row)?;
        let starts = window_starts::<sqlx::Postgres>(tx, &limit, book).await?;
        let mut usage = Vec::new();
        if !starts.is_empty() {
            let sql = usage_sql(
                limit.side,
                "UNNEST($3::text[], $4::bigint[]) AS j (id, version) \
                 JOIN postings p ON p.SIDE_subaccount_id = j.id AND p.SIDE_version > j.version",
            );
            usage = sqlx::query_as(AssertSqlSafe(sql))
                .bind(limit.since_us(book.now_us))
                .bind(limit.kinds.0)
                .bind(texts(starts.iter().map(|(id, _)| id)))
                .bind(starts.iter().map(|(_, from)| *from).collect::<Vec<_>>())
                .fetch_all(&mut *tx)
                .await?;
        }
        load_limit(book, limit, usage);
    }
    Ok(())
}

/// Writes the changed limits.
pub async fn save(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    for change in book.limits.changes() {
        let Some(limit) = change.after else {
            sqlx::query("DELETE FROM velocity_limits WHERE limit_id = $1")
                .bind(&**change.key)
                .execute(&mut *tx)
                .await?;
            continue;
        };
        let row = LimitRow::from(limit);
        let sql = if change.before.is_none() {
            "INSERT INTO velocity_limits (limit_id, user_id, account_kind, instrument_id, side, window_s, amount, \
             kinds, updated_at_us, created_at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
        } else {
            "UPDATE velocity_limits SET user_id = $2, account_kind = $3, instrument_id = $4, side = $5, \
             window_s = $6, amount = $7, kinds = $8, updated_at_us = $9 WHERE limit_id = $1 AND created_at_us = $10"
        };
        let affected = sqlx::query(sql)
            .bind(&row.limit_id)
            .bind(row.user_id)
            .bind(row.account_kind)
            .bind(row.instrument_id)
            .bind(row.side)
            .bind(row.window_s)
            .bind(row.amount)
            .bind(row.kinds)
            .bind(row.updated_at_us)
            .bind(row.created_at_us)
            .execute(&mut *tx)
            .await?
            .rows_affected();
        if affected != 1 {
            return Err(Error::Invariant(format!(
                "velocity limit {}: {affected} of 1 rows written",
                row.limit_id
            )));
        }
    }
    Ok(())
}
