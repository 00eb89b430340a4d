//! Writing what the fold made of a group: one statement a row, prepared once.
//!
//! Why not many rows a statement: on the writer's own connection a statement is a call, and one that writes a single row into a table without
//! triggers needs no way back of its own, which for many rows is a copy of each page that they touch.

use rusqlite::{CachedStatement, Connection, params};

use super::limits;
use crate::{
    Error,
    audit::Block,
    book::{Book, Change},
    fold::{Act, Command},
    model::{Account, Hold, Operation, Posting, SubAccount},
    repo::rows::outcome_text,
};

const SUB_ACCOUNT: &str = "INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, balance, held, unsettled, \
     version, freeze, closed, may_be_negative, created_at_us, updated_at_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
const SUB_ACCOUNT_STATE: &str = "UPDATE sub_accounts SET balance = ?2, held = ?3, unsettled = ?4, version = ?5, freeze = ?6, \
     closed = ?7, updated_at_us = ?8 WHERE subaccount_id = ?1 AND version = ?9";
const HOLD: &str = "INSERT INTO holds (hold_id, subaccount_id, user_id, instrument_id, amount, remaining, added, split_off, consumed, \
     released, returned_by_children, status, expiry_told, reason, owner, parent_hold_id, destination_subaccount_id, expires_at_us, \
     created_at_us, updated_at_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
const HOLD_STATE: &str = "UPDATE holds SET amount = ?2, remaining = ?3, added = ?4, split_off = ?5, consumed = ?6, released = ?7, \
     returned_by_children = ?8, status = ?9, expiry_told = ?10, updated_at_us = ?11 WHERE hold_id = ?1";
const OPERATION: &str = "INSERT INTO operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, tx_hash, \
     rejection_code, rejection_message, awaits_chain, reverses, reversed_by, digest, created_at_us, finalized_at_us, block, place) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
/// Only what may change.
const OPERATION_STATE: &str = "UPDATE operations SET status = ?2, tx_hash = ?3, rejection_code = ?4, rejection_message = ?5, \
     reversed_by = ?6, finalized_at_us = ?7 WHERE operation_id = ?1";
const POSTING: &str = "INSERT INTO postings (operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, \
     instrument_id, amount, hold_id, unsettled, debit_balance_after, debit_version, credit_balance_after, credit_version, created_at_us) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";

/// Writes every changed row; new operations are of this block. The order follows the references between the tables.
pub fn save(db: &Connection, book: &Book, block: u64) -> Result<(), Error> {
    limits::save(db, book)?;
    save_owners(db, book)?;
    save_holds(db, book)?;
    save_operations(db, book, block)?;
    save_memory(db, book)
}

/// What a command asks of the store alone.
pub fn tidy(db: &Connection, command: &Command) -> Result<(), Error> {
    if let Act::ForgetParked { before_us } = &command.act {
        db.execute("DELETE FROM parked WHERE at_us < ?1", [before_us])?;
    }
    Ok(())
}

/// Rows as they are now, apart by whether they are new.
fn new_and_moved<'a, K, V>(changes: Vec<Change<'a, K, V>>) -> (Vec<&'a V>, Vec<&'a V>) {
    let (new, moved): (Vec<_>, Vec<_>) = (changes.into_iter())
        .filter(|change| change.after.is_some())
        .partition(|change| change.before.is_none());
    let after = |changes: Vec<Change<'a, K, V>>| {
        let rows = changes.into_iter().filter_map(|change| change.after);
        rows.collect()
    };
    (after(new), after(moved))
}

/// A statement for each row of a kind, where there is any.
fn each<T>(
    db: &Connection,
    sql: &str,
    rows: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut CachedStatement, T) -> rusqlite::Result<usize>,
) -> Result<(), Error> {
    let mut rows = rows.into_iter().peekable();
    if rows.peek().is_some() {
        let mut statement = db.prepare_cached(sql)?;
        for row in rows {
            write(&mut statement, row)?;
        }
    }
    Ok(())
}

/// As [`each`], of rows that are there as they were loaded.
fn each_known<T>(
    db: &Connection,
    sql: &str,
    rows: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut CachedStatement, T) -> rusqlite::Result<usize>,
) -> Result<(), Error> {
    let mut is_missing = false;
    each(db, sql, rows, |to, row| {
        let written = write(to, row)?;
        is_missing |= written != 1;
        Ok(written)
    })?;
    if is_missing {
        return Err(Error::Broken(
            "a row is not as it was loaded in its transaction".to_owned(),
        ));
    }
    Ok(())
}

fn save_owners(db: &Connection, book: &Book) -> Result<(), Error> {
    let sql = "INSERT INTO instruments (instrument_id, decimals) VALUES (?1, ?2)";
    let scales = book.scales.changes();
    let scales = scales
        .iter()
        .filter_map(|change| Some((change.key, change.after?)));
    each(db, sql, scales, |to, row| to.execute(row))?;
    let sql = "INSERT INTO users (user_id, blocked) VALUES (?1, ?2) ON CONFLICT (user_id) DO UPDATE SET blocked = excluded.blocked";
    let users = book.users.changes();
    let users = users.iter().filter_map(|change| change.after);
    each(db, sql, users, |to, user| {
        to.execute((&user.user_id, user.blocked))
    })?;
    let sql = "INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) VALUES (?1, ?2, ?3, ?4, ?5)";
    let accounts = book.accounts.changes();
    let accounts = accounts.iter().filter_map(|change| change.after);
    each(db, sql, accounts, put_account)?;
    let changes = book.subaccounts.changes();
    let new = (changes.iter())
        .filter(|change| change.before.is_none())
        .filter_map(|change| change.after);
    each(db, SUB_ACCOUNT, new, put_subaccount)?;
    let moved = (changes.iter()).filter_map(|change| Some((change.before?, change.after?)));
    each_known(db, SUB_ACCOUNT_STATE, moved, put_subaccount_state)
}

fn save_holds(db: &Connection, book: &Book) -> Result<(), Error> {
    let (new, moved) = new_and_moved(book.holds.changes());
    each(db, HOLD, new, put_hold)?;
    each_known(db, HOLD_STATE, moved, put_hold_state)
}

/// The block of a group, if it has one.
pub fn save_block(db: &Connection, block: Option<&Block>) -> Result<(), Error> {
    let sql = "INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    each(db, sql, block, |to, block| {
        to.execute(params![
            block.block.cast_signed(),
            block.previous_hash,
            block.hash,
            block.operations.cast_signed(),
            block.postings.cast_signed(),
            block.sealed_at_us,
        ])
    })
}

fn save_operations(db: &Connection, book: &Book, block: u64) -> Result<(), Error> {
    let (new, moved) = new_and_moved(book.operations.changes());
    each(
        db,
        OPERATION,
        new.into_iter().enumerate(),
        |to, (place, row)| put_operation(to, row, block, place),
    )?;
    each_known(db, OPERATION_STATE, moved, put_operation_state)?;
    let postings = book.postings.changes();
    let postings = postings.iter().filter_map(|change| change.after).flatten();
    each(db, POSTING, postings, put_posting)
}

fn save_memory(db: &Connection, book: &Book) -> Result<(), Error> {
    let sql = "INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let answers = book.answers.changes();
    let answers = answers
        .iter()
        .filter_map(|change| Some((change.key, change.after?)));
    each(db, sql, answers, |to, ((call, user_id, key), answer)| {
        let outcome = outcome_text(&answer.outcome);
        to.execute(params![
            call.code(),
            user_id,
            key,
            answer.digest,
            outcome,
            book.now_us
        ])
    })?;
    let sql = "INSERT INTO sources (source, first_sequence, through_sequence, digest) VALUES (?1, ?2, ?3, ?4) \
               ON CONFLICT (source) DO UPDATE SET first_sequence = excluded.first_sequence, \
               through_sequence = excluded.through_sequence, digest = excluded.digest";
    let sources = book.sources.changes();
    let sources = sources
        .iter()
        .filter_map(|change| Some((change.key, change.after?)));
    each(db, sql, sources, |to, (source, at)| {
        let (first, through) = (
            at.first_sequence.cast_signed(),
            at.through_sequence.cast_signed(),
        );
        to.execute((source, first, through, at.digest))
    })?;
    let parked = book.parked.changes();
    let news = parked
        .iter()
        .filter_map(|change| Some((change.key, change.after?)));
    let sql = "INSERT INTO parked (match_key, tx_hash, reverted, at_us) VALUES (?1, ?2, ?3, ?4)";
    each(db, sql, news, |to, (key, news)| {
        to.execute((key, &news.tx_hash, news.reverted, news.at_us))
    })?;
    let gone = (parked.iter()).filter(|change| change.before.is_some() && change.after.is_none());
    let sql = "DELETE FROM parked WHERE match_key = ?1";
    each(db, sql, gone, |to, change| to.execute([change.key]))
}

fn put_account(to: &mut CachedStatement, account: &Account) -> rusqlite::Result<usize> {
    to.execute((
        &account.account_id,
        &account.user_id,
        account.kind.code(),
        account.created_at_us,
        account.updated_at_us,
    ))
}

fn put_subaccount(to: &mut CachedStatement, subaccount: &SubAccount) -> rusqlite::Result<usize> {
    let terms = &subaccount.terms;
    to.execute(params![
        terms.subaccount_id,
        terms.account_id,
        terms.user_id,
        terms.instrument_id,
        subaccount.balance.0,
        subaccount.held.0,
        subaccount.unsettled.0,
        subaccount.version.cast_signed(),
        subaccount.freeze,
        subaccount.closed,
        terms.may_be_negative,
        terms.created_at_us,
        subaccount.updated_at_us,
    ])
}

fn put_subaccount_state(
    to: &mut CachedStatement,
    (before, subaccount): (&SubAccount, &SubAccount),
) -> rusqlite::Result<usize> {
    to.execute(params![
        subaccount.terms.subaccount_id,
        subaccount.balance.0,
        subaccount.held.0,
        subaccount.unsettled.0,
        subaccount.version.cast_signed(),
        subaccount.freeze,
        subaccount.closed,
        subaccount.updated_at_us,
        before.version.cast_signed(),
    ])
}

fn put_hold(to: &mut CachedStatement, hold: &Hold) -> rusqlite::Result<usize> {
    let terms = &hold.terms;
    to.execute(params![
        terms.hold_id,
        terms.subaccount_id,
        terms.user_id,
        terms.instrument_id,
        hold.amount.0,
        hold.remaining.0,
        hold.added.0,
        hold.split_off.0,
        hold.consumed.0,
        hold.released.0,
        hold.returned.0,
        hold.status.code(),
        hold.expiry_told,
        terms.reason,
        terms.owner,
        terms.parent_hold_id,
        terms.destination_subaccount_id,
        terms.expires_at_us,
        terms.created_at_us,
        hold.updated_at_us,
    ])
}

fn put_hold_state(to: &mut CachedStatement, hold: &Hold) -> rusqlite::Result<usize> {
    to.execute(params![
        hold.terms.hold_id,
        hold.amount.0,
        hold.remaining.0,
        hold.added.0,
        hold.split_off.0,
        hold.consumed.0,
        hold.released.0,
        hold.returned.0,
        hold.status.code(),
        hold.expiry_told,
        hold.updated_at_us,
    ])
}

/// `block` and `place`: where the audit chain has it.
fn put_operation(
    to: &mut CachedStatement,
    operation: &Operation,
    block: u64,
    place: usize,
) -> rusqlite::Result<usize> {
    let terms = &operation.terms;
    to.execute(params![
        terms.operation_id,
        terms.scope.code(),
        terms.kind.code(),
        operation.status.code(),
        terms.user_id,
        terms.idempotency_key,
        terms.external_ref,
        operation.tx_hash,
        operation.rejection_code,
        operation.rejection_message,
        terms.awaits_chain,
        terms.reverses,
        operation.reversed_by,
        terms.digest,
        terms.created_at_us,
        operation.finalized_at_us,
        block.cast_signed(),
        place as i64,
    ])
}

fn put_operation_state(to: &mut CachedStatement, operation: &Operation) -> rusqlite::Result<usize> {
    to.execute(params![
        operation.terms.operation_id,
        operation.status.code(),
        operation.tx_hash,
        operation.rejection_code,
        operation.rejection_message,
        operation.reversed_by,
        operation.finalized_at_us,
    ])
}

fn put_posting(to: &mut CachedStatement, posting: &Posting) -> rusqlite::Result<usize> {
    to.execute(params![
        posting.operation_id,
        posting.ordinal,
        posting.posting_id,
        posting.debit_subaccount_id,
        posting.credit_subaccount_id,
        posting.amount.instrument_id,
        posting.amount.minor.0,
        posting.hold_id,
        posting.unsettled,
        posting.debit_balance_after.0,
        posting.debit_version.cast_signed(),
        posting.credit_balance_after.0,
        posting.credit_version.cast_signed(),
        posting.created_at_us,
    ])
}
