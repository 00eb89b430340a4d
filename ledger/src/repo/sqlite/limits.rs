//! Velocity limits in SQLite.

use rusqlite::{Connection, OptionalExtension, named_params, params};
use sqlx::Sqlite;

use super::rows::{self, find};
use crate::{
    Error,
    book::Book,
    fold::Command,
    limit::{Side, VelocityLimit},
    model::{Id, SubAccount},
    repo::{
        dialect::Dialect,
        limits::{About, LIMIT, LimitRow, about, is_small, keep},
        statement::{Halving, missing, time_sql},
    },
};

/// Many ids in one bound value.
fn ids<'a>(items: impl IntoIterator<Item = &'a Id>) -> String {
    let items: Vec<&str> = items.into_iter().map(|id| &**id).collect();
    json(&items)
}

fn json(items: &impl serde::Serialize) -> String {
    serde_json::to_string(items).expect("texts and numbers have a JSON form")
}

/// Adds the limits that may be about this working set, and what is used of each.
pub fn load(db: &Connection, commands: &[&Command], book: &mut Book) -> Result<(), Error> {
    let about = About::of(commands, book);
    let sql = format!(
        "{LIMIT} WHERE l.instrument_id IN (SELECT value FROM json_each(?1)) \
         AND (l.user_id = '' OR l.user_id IN (SELECT value FROM json_each(?2))) \
         UNION {LIMIT} WHERE l.limit_id IN (SELECT value FROM json_each(?3))"
    );
    let texts = [
        ids(&about.instruments),
        ids(&about.users),
        ids(&about.named),
    ];
    for row in find(db, &sql, [texts], rows::limit)? {
        let limit = VelocityLimit::try_from(row)?;
        let used = used(db, &limit, book)?;
        keep(book, limit, used);
    }
    Ok(())
}

/// (sub-account, used in two halves)
fn used(
    db: &Connection,
    limit: &VelocityLimit,
    book: &Book,
) -> Result<Vec<(String, i64, i64)>, Error> {
    let since_us = limit.since_us(book.now_us);
    let sql = format!(
        "{} SELECT CAST(SUM(e.amount >> 32) AS BIGINT), CAST(SUM(e.amount & 4294967295) AS BIGINT) \
         FROM entries e JOIN operations o ON o.operation_id = e.operation_id \
         WHERE e.is_debit = $4 AND e.created_at_us > $5 AND o.reverses IS NULL AND o.reversed_by IS NULL \
         AND ($6 = 0 OR (($6 >> o.kind) & 1) = 1)",
        Sqlite::ENTRIES
    );
    let mut statement = db.prepare_cached(&sql)?;
    let mut used = Vec::new();
    for row in about(limit, book) {
        let values = named_params! {
            "$1": row.terms.subaccount_id, "$2": begins(db, row, since_us)?, "$3": row.version.cast_signed(),
            "$4": limit.side == Side::Debit, "$5": since_us, "$6": limit.kinds.0,
        };
        let sums = statement.query_row(values, |row| Ok((row.get(0)?, row.get(1)?)))?;
        if let (Some(high), Some(low)) = sums {
            used.push((row.terms.subaccount_id.to_string(), high, low));
        }
    }
    Ok(used)
}

/// A version at or before the beginning of the window.
fn begins(db: &Connection, of: &SubAccount, since_us: i64) -> Result<i64, Error> {
    if is_small(of) {
        return Ok(0);
    }
    let mut time_of = db.prepare_cached(&time_sql::<Sqlite>())?;
    let mut halving = Halving::to(of.version);
    while let Some(version) = halving.asks() {
        let at = version.cast_signed();
        let values = named_params! { "$1": of.terms.subaccount_id, "$2": at - 1, "$3": at };
        let at_us: Option<i64> = time_of.query_row(values, |row| row.get(0)).optional()?;
        let at_us = at_us.ok_or_else(|| missing(of, version))?;
        halving.hears(version, at_us <= since_us);
    }
    Ok(halving.found().cast_signed())
}

/// Writes the limits that changed.
pub fn save(db: &Connection, book: &Book) -> Result<(), Error> {
    for change in book.limits.changes() {
        let Some(limit) = change.after else {
            db.prepare_cached("DELETE FROM velocity_limits WHERE limit_id = ?1")?
                .execute([change.key])?;
            continue;
        };
        let row = LimitRow::from(limit);
        db.prepare_cached(
            "INSERT INTO velocity_limits (limit_id, user_id, account_kind, instrument_id, side, window_s, amount, kinds, \
             created_at_us, updated_at_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) \
             ON CONFLICT (limit_id) DO UPDATE SET user_id = excluded.user_id, account_kind = excluded.account_kind, \
             instrument_id = excluded.instrument_id, side = excluded.side, window_s = excluded.window_s, \
             amount = excluded.amount, kinds = excluded.kinds, updated_at_us = excluded.updated_at_us",
        )?
        .execute(params![
            row.limit_id,
            row.user_id,
            row.account_kind,
            row.instrument_id,
            row.side,
            row.window_s,
            row.amount,
            row.kinds,
            row.created_at_us,
            row.updated_at_us,
        ])?;
    }
    Ok(())
}
