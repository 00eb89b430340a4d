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
        limits::{LIMIT, LimitRow, LimitScope, limited_subaccounts, load_limit},
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

/// Loads the limits that may apply to this working set, with the usage of each.
pub fn load(db: &Connection, commands: &[&Command], book: &mut Book) -> Result<(), Error> {
    let scope = LimitScope::of(commands, book);
    let sql = format!(
        "{LIMIT} WHERE l.instrument_id IN (SELECT value FROM json_each(?1)) \
         AND (l.user_id = '' OR l.user_id IN (SELECT value FROM json_each(?2))) \
         UNION {LIMIT} WHERE l.limit_id IN (SELECT value FROM json_each(?3))"
    );
    let texts = [
        ids(&scope.instruments),
        ids(&scope.users),
        ids(&scope.named),
    ];
    for row in find(db, &sql, [texts], rows::limit)? {
        let limit = VelocityLimit::try_from(row)?;
        let used = used(db, &limit, book)?;
        load_limit(book, limit, used);
    }
    Ok(())
}

/// Usage of a window by sub-account `$1`. Follows the links from its last posting back to the first
/// one before the window (`$2`: start). Counts one side (`$3`: debit) and some operation types
/// (`$4`). Returns the sum in two halves, and whether the chain is complete.
const USED: &str = "WITH RECURSIVE walk (posting_no, version) AS (\
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

/// Usage of a limit: (sub-account, high half, low half).
fn used(
    db: &Connection,
    limit: &VelocityLimit,
    book: &Book,
) -> Result<Vec<(String, i64, i64)>, Error> {
    let since_us = limit.since_us(book.now_us);
    let mut statement = db.prepare_cached(USED)?;
    let mut used = Vec::new();
    for row in limited_subaccounts(limit, book) {
        let values = named_params! {
            "$1": row.terms.subaccount_id, "$2": since_us, "$3": limit.side == Side::Debit, "$4": limit.kinds.0,
        };
        let (high, low, is_whole): (i64, i64, bool) =
            statement.query_row(values, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        if !is_whole {
            return Err(corrupt("chain of postings of", &row.terms.subaccount_id));
        }
        used.push((row.terms.subaccount_id.to_string(), high, low));
    }
    Ok(used)
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
