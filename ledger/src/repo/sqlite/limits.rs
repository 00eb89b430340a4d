//! Velocity limits in SQLite.

use rusqlite::{Connection, named_params, params};

use super::rows::{self, find};
use crate::{
    Error,
    book::Book,
    fold::Command,
    limit::{Side, VelocityLimit},
    model::Id,
    repo::{
        limits::{LimitRow, LimitScope, SELECT_LIMITS, limited_subaccounts, load_limit},
        rows::corrupt,
    },
};

/// Ids as one bound JSON array.
fn ids<'a>(items: impl IntoIterator<Item = &'a Id>) -> String {
    let items: Vec<&str> = items.into_iter().map(|id| &**id).collect();
    json(&items)
}

fn json(items: &impl serde::Serialize) -> String {
    serde_json::to_string(items).expect("texts and numbers have a JSON form")
}

/// Loads the limits that may apply to the working set, and those that its commands name, each with
/// its usage.
pub fn load(db: &Connection, commands: &[&Command], book: &mut Book) -> Result<(), Error> {
    let scope = LimitScope::of(commands, book);
    let sql = format!(
        "{SELECT_LIMITS} WHERE l.instrument_id IN (SELECT value FROM json_each(?1)) \
         AND (l.user_id = '' OR l.user_id IN (SELECT value FROM json_each(?2))) \
         UNION {SELECT_LIMITS} WHERE l.limit_id IN (SELECT value FROM json_each(?3))"
    );
    let texts = [
        ids(&scope.instruments),
        ids(&scope.users),
        ids(&scope.named),
    ];
    for row in find(db, &sql, [texts], rows::limit)? {
        let limit = VelocityLimit::try_from(row)?;
        let usage = read_usage(db, &limit, book)?;
        load_limit(book, limit, usage);
    }
    Ok(())
}

/// Usage of one sub-account (`$1`) in a window that starts at `$2`. Follows the links back from its
/// last posting. `$3`: debit side, `$4`: operation types, 0 = all. Skips reversed operations and
/// reversals. Returns the sums of the amounts' high and low 32 bits (no overflow), and whether
/// every link was found.
const USAGE_SQL: &str = "WITH RECURSIVE walk (posting_no, version) AS (\
     SELECT last_posting, version FROM sub_accounts WHERE subaccount_id = $1 AND version > 0 \
     UNION ALL SELECT CASE p.debit_subaccount_id WHEN $1 THEN p.debit_previous ELSE p.credit_previous END, \
     w.version - 1 \
     FROM walk w CROSS JOIN postings p ON p.posting_no = w.posting_no WHERE p.created_at_us > $2 AND w.version > 1), \
     entries AS (SELECT p.posting_no IS NOT NULL AND w.version = CASE $1 \
     WHEN p.debit_subaccount_id THEN p.debit_version \
     WHEN p.credit_subaccount_id THEN p.credit_version END AS is_whole, p.amount, p.created_at_us > $2 \
     AND o.reverses IS NULL AND o.reversed_by IS NULL \
     AND (p.debit_subaccount_id = $1) = $3 AND ($4 = 0 OR (($4 >> o.kind) & 1) = 1) AS counts \
     FROM walk w LEFT JOIN postings p ON p.posting_no = w.posting_no LEFT JOIN operations o \
     ON o.operation_id = p.operation_id) \
     SELECT COALESCE(SUM(CASE WHEN counts THEN amount >> 32 END), 0), \
     COALESCE(SUM(CASE WHEN counts THEN amount & 4294967295 END), 0), \
     COALESCE(MIN(COALESCE(is_whole, 0)), 1) FROM entries";

/// Usage of a limit per sub-account of the working set: (id, sum of high 32 bits, sum of low 32
/// bits).
fn read_usage(
    db: &Connection,
    limit: &VelocityLimit,
    book: &Book,
) -> Result<Vec<(String, i64, i64)>, Error> {
    let since_us = limit.since_us(book.now_us);
    let mut statement = db.prepare_cached(USAGE_SQL)?;
    let mut usage = Vec::new();
    for row in limited_subaccounts(limit, book) {
        let values = named_params! {
            "$1": row.terms.subaccount_id, "$2": since_us, "$3": limit.side == Side::Debit, "$4": limit.kinds.0,
        };
        let (high, low, is_whole): (i64, i64, bool) =
            statement.query_row(values, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        if !is_whole {
            return Err(corrupt("chain of postings of", &row.terms.subaccount_id));
        }
        usage.push((row.terms.subaccount_id.to_string(), high, low));
    }
    Ok(usage)
}

/// Writes the changed limits.
pub fn save(db: &Connection, book: &Book) -> Result<(), Error> {
    for change in book.limits.changes() {
        let Some(limit) = change.after else {
            db.prepare_cached("DELETE FROM velocity_limits WHERE limit_id = ?1")?
                .execute([change.key])?;
            continue;
        };
        let row = LimitRow::from(limit);
        db.prepare_cached(
            "INSERT INTO velocity_limits (limit_id, user_id, account_kind, instrument_id, side, window_s, amount, \
             kinds, created_at_us, updated_at_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) \
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
