//! Velocity limits in SQLite.

use rusqlite::{Connection, OptionalExtension, named_params, params};

use super::rows::{self, find};
use crate::{
    Error,
    book::Book,
    fold::Command,
    limit::VelocityLimit,
    model::{Id, SubAccount},
    repo::{
        limits::{About, LIMIT, LimitRow, about, is_small, keep, used_sql},
        statement::{Halving, TIME_OF, missing},
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
    let places = about(limit, book)
        .map(|row| Ok((&*row.terms.subaccount_id, begins(db, row, since_us)?)))
        .collect::<Result<Vec<(&str, i64)>, Error>>()?;
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let sql = used_sql(
        limit.side,
        "json_each($3) j CROSS JOIN postings p ON p.SIDE_subaccount_id = j.value->>0 AND p.SIDE_version > j.value->>1",
    );
    let mut statement = db.prepare_cached(&sql)?;
    let places = json(&places);
    let values = named_params! { "$1": since_us, "$2": limit.kinds.0, "$3": places };
    let used = statement.query_map(values, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(used.collect::<Result<_, _>>()?)
}

/// A version at or before the beginning of the window.
fn begins(db: &Connection, of: &SubAccount, since_us: i64) -> Result<i64, Error> {
    if is_small(of) {
        return Ok(0);
    }
    let mut time_of = db.prepare_cached(TIME_OF)?;
    let mut halving = Halving::to(of.version);
    while let Some(version) = halving.asks() {
        let values = named_params! { "$1": of.terms.subaccount_id, "$2": version.cast_signed() };
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
