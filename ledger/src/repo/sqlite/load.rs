//! Loads the working set of a group with one index lookup per key, on the writer's connection.

use std::collections::BTreeSet;

use rusqlite::Connection;

use super::{
    limits,
    row_cache::RowCache,
    rows::{self, OPERATION, find},
};
use crate::{
    Error,
    audit::Head,
    book::Book,
    fold::{Command, ReadSet},
    model::Id,
    repo::{
        audit::Start,
        load,
        rows::{HOLD, POSTING},
    },
};

/// Loads a hold, its parent and its grandparent. Callers create no deeper chain.
const PARENT_ROUNDS: usize = 3;

/// Number of keys from which a lookup of the last stored key may save theirs.
const LAST_KEY_CHECK_MIN: usize = 8;

/// One id as the bound values of a statement.
fn key(id: &Id) -> [&str; 1] {
    [&**id]
}

/// Loads all rows that these commands can touch, and the last block of the audit chain.
pub fn load(
    db: &Connection,
    row_cache: &mut RowCache,
    commands: &[&Command],
    clock_us: i64,
) -> Result<(Book, Head), Error> {
    row_cache.check(db)?;
    let start = db.prepare_cached(Start::SQL)?.query_row([], |row| {
        Ok(Start {
            block: row.get(0)?,
            hash: row.get(1)?,
            sealed_at_us: row.get(2)?,
            has_limits: row.get(3)?,
            has_news: row.get(4)?,
        })
    })?;
    let head = start.head()?;
    let mut book = Book::at(clock_us.max(head.sealed_at_us));
    book.next_posting = db
        .prepare_cached("SELECT COALESCE(MAX(posting_no), 0) + 1 FROM postings")?
        .query_row([], |row| row.get(0))?;
    let mut read_set = ReadSet {
        no_notices: !start.has_news,
        no_named_notices: !(start.has_news && has_named_notices(db)?),
        ..ReadSet::default()
    };
    for command in commands {
        read_set.add(command);
    }
    holds(db, row_cache, &mut read_set, &mut book)?;
    operations_by_id(db, row_cache, &read_set.operation_ids, &mut book)?;
    for command in commands {
        read_set.add_dependent(
            command,
            |id| book.holds.get(id).cloned(),
            |id| book.operations.get(id).cloned(),
        );
    }
    let answered = answers(db, &read_set, &mut book)?;
    operations_by_id(db, row_cache, &answered, &mut book)?;
    operations_by_other(db, row_cache, &read_set, &mut book)?;
    let with_ended = !commands.iter().all(|command| command.kind.only_ends());
    postings(db, row_cache, &mut read_set, &mut book, with_ended)?;
    subaccounts(db, row_cache, &read_set, &mut book)?;
    owners(db, &mut read_set, &mut book)?;
    scales(db, &read_set, commands, &mut book)?;
    sources_and_notices(db, &read_set, &mut book)?;
    if start.has_limits {
        limits::load(db, commands, &mut book)?;
    }
    Ok((book, head))
}

/// Whether a notice is parked by id, key or reference. One by transaction is parked per batch of
/// trades, whose operations have no transaction before their end.
fn has_named_notices(db: &Connection) -> Result<bool, Error> {
    let sql = "SELECT EXISTS (SELECT 1 FROM parked WHERE match_key < 'tx:')";
    Ok(db.prepare_cached(sql)?.query_row([], |row| row.get(0))?)
}

fn holds(
    db: &Connection,
    row_cache: &RowCache,
    read_set: &mut ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    let mut requested = BTreeSet::new();
    for _ in 0..PARENT_ROUNDS {
        let missing: Vec<Id> = read_set.hold_ids.difference(&requested).cloned().collect();
        if missing.is_empty() {
            break;
        }
        let mut unknown = Vec::new();
        for id in &missing {
            match row_cache.hold(id) {
                Some(hold) => load::hold(read_set, book, hold.clone()),
                None => unknown.push(id),
            }
        }
        let sql = format!("{HOLD} WHERE h.hold_id = ?1");
        let found = find(db, &sql, unknown.into_iter().map(key), rows::hold)?;
        load::holds(read_set, book, found)?;
        requested.extend(missing);
    }
    Ok(())
}

fn operations_by_id(
    db: &Connection,
    row_cache: &RowCache,
    ids: &BTreeSet<Id>,
    book: &mut Book,
) -> Result<(), Error> {
    let mut unknown = Vec::new();
    for id in ids {
        match row_cache.operation(id) {
            Some(stored) => load::operation(book, stored.operation.clone()),
            None => unknown.push(id),
        }
    }
    let last = "SELECT MAX(operation_id) FROM operations WHERE operation_id <= ?1";
    let keys = may_be_stored(db, last, unknown, |id| *id)?;
    let sql = format!("{OPERATION} WHERE operation_id = ?1");
    load::operations(book, find(db, &sql, keys.map(key), rows::operation)?)
}

fn operations_by_other(
    db: &Connection,
    row_cache: &RowCache,
    read_set: &ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    let mut unknown = Vec::new();
    for of in &read_set.operation_keys {
        let (user_id, key, scope) = of;
        match row_cache.ended(user_id, key, *scope) {
            Some(ended) => load::operation(book, ended.clone()),
            None => unknown.push(of),
        }
    }
    let last = "SELECT MAX(idempotency_key) FROM operations WHERE idempotency_key <= ?1";
    let keys = may_be_stored(db, last, unknown, |(_, key, _)| key)?;
    let keys = keys.map(|(user, key, scope)| (&**key, &**user, *scope));
    let sql = format!("{OPERATION} WHERE idempotency_key = ?1 AND user_id = ?2 AND scope = ?3");
    load::operations(book, find(db, &sql, keys, rows::operation)?)?;
    let last = "SELECT MAX(external_ref) FROM operations WHERE external_ref <= ?1";
    let references = may_be_stored(db, last, read_set.references.keys(), |(id, _)| id)?;
    let references = references.map(|(reference, kind)| (&**reference, *kind));
    let sql = format!("{OPERATION} WHERE external_ref = ?1 AND kind = ?2");
    load::operations(book, find(db, &sql, references, rows::operation)?)?;
    // Open ones: a receipt does not change an operation that has ended.
    let sql = format!(
        "{OPERATION} WHERE tx_hash = ?1 AND status NOT IN (7, 8, 9, 12) \
         ORDER BY created_at_us, operation_id"
    );
    let hashes = read_set.tx_hashes.iter().map(key);
    load::operations(book, find(db, &sql, hashes, rows::operation)?)
}

/// Loads the postings of the loaded operations, for answers, reversals and unsettled credits.
/// `with_ended`: also those of operations that have ended.
fn postings(
    db: &Connection,
    row_cache: &RowCache,
    read_set: &mut ReadSet,
    book: &mut Book,
    with_ended: bool,
) -> Result<(), Error> {
    let loaded = book.operations.values();
    let loaded: BTreeSet<Id> = loaded
        .filter(|operation| with_ended || operation.status.is_open())
        .map(|operation| operation.terms.operation_id.clone())
        .collect();
    let mut unknown = Vec::new();
    for id in &loaded {
        match row_cache.operation(id) {
            Some(stored) => load::postings_of_one(read_set, book, stored.postings.clone()),
            None => unknown.push(id),
        }
    }
    if !unknown.is_empty() {
        let sql = format!("{POSTING} WHERE p.operation_id = ?1 ORDER BY p.ordinal");
        let found = find(db, &sql, unknown.into_iter().map(key), rows::posting)?;
        load::postings(read_set, book, found);
    }
    Ok(())
}

fn subaccounts(
    db: &Connection,
    row_cache: &mut RowCache,
    read_set: &ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    let mut unknown = Vec::new();
    book.subaccounts.reserve(read_set.subaccount_ids.len());
    for id in &read_set.subaccount_ids {
        match row_cache.subaccount(id) {
            Some(row) => book.subaccounts.load(id.clone(), row.clone()),
            None => unknown.push(id),
        }
    }
    let by = [
        (unknown, "s.subaccount_id"),
        (read_set.whole_users.iter().collect(), "s.user_id"),
    ];
    for (keys, column) in by {
        if keys.is_empty() {
            continue;
        }
        let sql = format!("{} WHERE {column} = ?1", rows::SUB_ACCOUNT);
        for row in find(db, &sql, keys.into_iter().map(key), rows::subaccount)? {
            row_cache.insert_subaccount(row.clone());
            book.subaccounts.load(row.terms.subaccount_id.clone(), row);
        }
    }
    Ok(())
}

/// Loads account and user of each sub-account that may have to be created.
fn owners(db: &Connection, read_set: &mut ReadSet, book: &mut Book) -> Result<(), Error> {
    read_set.add_owners(|id| book.subaccounts.get(id).is_some());
    let sql = "SELECT * FROM accounts WHERE account_id = ?1";
    let found = find(db, sql, read_set.account_ids.iter().map(key), rows::account)?;
    load::accounts(book, found)?;
    let sql = "SELECT user_id, blocked FROM users WHERE user_id = ?1";
    let found = find(db, sql, read_set.user_ids.iter().map(key), |row| {
        Ok((row.get(0)?, row.get(1)?))
    })?;
    load::users(book, found);
    Ok(())
}

/// Loads the decimals that are needed to open a sub-account or to bind decimals.
fn scales(
    db: &Connection,
    read_set: &ReadSet,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let instruments = load::instruments(read_set, commands, book);
    let sql = "SELECT instrument_id, decimals FROM instruments WHERE instrument_id = ?1";
    let found = find(db, sql, instruments.iter().map(key), |row| {
        Ok((row.get(0)?, row.get(1)?))
    })?;
    for (instrument_id, decimals) in found {
        book.scales.load(instrument_id, decimals);
    }
    Ok(())
}

/// Returns the keys that may be stored. `last_sql` selects the last stored key up to the greatest
/// of them: a key after it is new. New time-ordered keys (UUIDv7) follow the stored ones.
fn may_be_stored<'a, K>(
    db: &Connection,
    last_sql: &str,
    keys: impl IntoIterator<Item = K>,
    text: impl Fn(&K) -> &'a Id,
) -> Result<impl Iterator<Item = K>, Error> {
    let mut keys: Vec<K> = keys.into_iter().collect();
    if keys.len() >= LAST_KEY_CHECK_MIN
        && let Some(last) = keys.iter().map(&text).max()
    {
        let mut statement = db.prepare_cached(last_sql)?;
        let stored: Option<Id> = statement.query_row([last], |row| row.get(0))?;
        keys.retain(|key| stored.as_ref().is_some_and(|stored| text(key) <= stored));
    }
    Ok(keys.into_iter())
}

/// Loads stored answers. Returns the operations to which they refer.
fn answers(db: &Connection, read_set: &ReadSet, book: &mut Book) -> Result<BTreeSet<Id>, Error> {
    let last = "SELECT MAX(idempotency_key) FROM answers WHERE idempotency_key <= ?1";
    let keys = may_be_stored(db, last, &read_set.answer_keys, |(_, key, _)| key)?;
    let sql = "SELECT call, user_id, idempotency_key, digest, outcome FROM answers \
               WHERE idempotency_key = ?1 AND user_id = ?2 AND call = ?3";
    let keys = keys.map(|(user, key, call)| (&**key, &**user, *call));
    load::answers(book, find(db, sql, keys, rows::answer)?)
}

/// Loads source positions and parked notices.
fn sources_and_notices(db: &Connection, read_set: &ReadSet, book: &mut Book) -> Result<(), Error> {
    let sql =
        "SELECT source, first_sequence, through_sequence, digest FROM sources WHERE source = ?1";
    let found = find(db, sql, read_set.sources.iter().map(key), |row| {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
    })?;
    load::sources(book, found);
    let sql = "SELECT * FROM parked WHERE match_key = ?1";
    for row in find(
        db,
        sql,
        read_set.pending_receipts.iter().map(key),
        rows::pending_receipt,
    )? {
        book.pending_receipts
            .load(row.match_key.as_str().into(), row.into());
    }
    Ok(())
}
