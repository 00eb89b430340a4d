//! Writes the folded group with many rows per statement; each statement is prepared once.
//!
//! A statement that fires a trigger needs a statement journal with a copy of each page that it
//! touches. Many rows per statement share one.

use std::sync::OnceLock;

use rusqlite::{CachedStatement, Connection, OptionalExtension, ToSql, params};

use super::limits;
use crate::{
    Error,
    audit::{self, Block},
    book::{Book, Change, FlushedRows},
    fold::{Command, CommandKind},
    model::{Account, Hold, Operation, Posting, SubAccount},
    repo::{
        audit::{INSERT_RECORD, LAST_RECORD, hash_of},
        rows::outcome_text,
    },
};

static SUB_ACCOUNT: Insert = Insert::new(
    "sub_accounts (subaccount_id, account_id, user_id, instrument_id, balance, held, unsettled, version, freeze, \
     closed, may_be_negative, created_at_us, updated_at_us, last_posting)",
    14,
);
/// Without `freeze` and `closed`, whose updates have triggers (`events::seal`).
const SUB_ACCOUNT_BALANCE: &str = "UPDATE sub_accounts SET balance = ?2, held = ?3, unsettled = ?4, version = ?5, \
     updated_at_us = ?6, last_posting = ?7 WHERE subaccount_id = ?1 AND version = ?8";
const SUB_ACCOUNT_STATE: &str = "UPDATE sub_accounts SET balance = ?2, held = ?3, unsettled = ?4, version = ?5, \
     freeze = ?6, closed = ?7, updated_at_us = ?8, last_posting = ?9 WHERE subaccount_id = ?1 AND version = ?10";
static HOLD: Insert = Insert::new(
    "holds (hold_id, subaccount_id, user_id, instrument_id, amount, remaining, added, split_off, consumed, released, \
     returned_by_children, status, expiry_told, reason, owner, parent_hold_id, destination_subaccount_id, \
     expires_at_us, created_at_us, updated_at_us)",
    20,
);
const HOLD_STATE: &str = "UPDATE holds SET amount = ?2, remaining = ?3, added = ?4, split_off = ?5, consumed = ?6, \
     released = ?7, returned_by_children = ?8, status = ?9, expiry_told = ?10, updated_at_us = ?11 WHERE hold_id = ?1";
static OPERATION: Insert = Insert::new(
    "operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, tx_hash, rejection_code, \
     rejection_message, awaits_chain, reverses, reversed_by, digest, created_at_us, finalized_at_us, block, place)",
    18,
);
/// Mutable columns only.
const OPERATION_STATE: &str = "UPDATE operations SET status = ?2, tx_hash = ?3, rejection_code = ?4, \
     rejection_message = ?5, reversed_by = ?6, finalized_at_us = ?7 WHERE operation_id = ?1";
static POSTING: Insert = Insert::new(
    "postings (posting_no, operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, \
     instrument_id, amount, hold_id, unsettled, debit_balance_after, debit_version, credit_balance_after, \
     credit_version, created_at_us, debit_previous, credit_previous)",
    17,
);

/// Rows per INSERT, largest first. A remainder uses the next smaller sizes.
const SIZES: [usize; 5] = [256, 64, 16, 4, 1];

/// INSERT into a table, with one statement for each of [`SIZES`].
struct Insert {
    into: &'static str,
    columns: usize,
    sql: OnceLock<[String; SIZES.len()]>,
}

impl Insert {
    const fn new(into: &'static str, columns: usize) -> Self {
        Insert {
            into,
            columns,
            sql: OnceLock::new(),
        }
    }

    fn sql(&self) -> &[String; SIZES.len()] {
        self.sql.get_or_init(|| {
            let row = format!("({})", vec!["?"; self.columns].join(","));
            SIZES.map(|size| {
                let rows = vec![row.as_str(); size].join(",");
                format!("INSERT INTO {} VALUES {rows}", self.into)
            })
        })
    }

    /// Writes the rows in order. `put` binds the values of one row.
    fn write<T>(
        &self,
        db: &Connection,
        rows: &[T],
        put: impl Fn(&mut Values, &T) -> rusqlite::Result<()>,
    ) -> Result<(), Error> {
        let mut left = rows;
        for (sql, size) in self.sql().iter().zip(SIZES) {
            let chunks = left.chunks_exact(size);
            left = chunks.remainder();
            if chunks.len() == 0 {
                continue;
            }
            let mut statement = db.prepare_cached(sql)?;
            for chunk in chunks {
                let mut values = Values {
                    statement: &mut statement,
                    count: 0,
                };
                for row in chunk {
                    put(&mut values, row)?;
                }
                debug_assert_eq!(values.count, size * self.columns, "{}", self.into);
                statement.raw_execute()?;
            }
        }
        Ok(())
    }
}

/// Binds the values of a statement in order.
struct Values<'a, 'db> {
    statement: &'a mut CachedStatement<'db>,
    count: usize,
}

/// Binds the values of one row.
macro_rules! put {
    ($to:ident, $($value:expr),+ $(,)?) => {{
        $(
            $to.count += 1;
            $to.statement.raw_bind_parameter($to.count, &$value as &dyn ToSql)?;
        )+
        Ok(())
    }};
}

/// Writes every changed row, except flushed rows ([`Book::drain_ready`]) that did not change since.
/// `block` is the block of new operations. The order follows the foreign keys.
pub fn save(db: &Connection, book: &Book, block: u64) -> Result<(), Error> {
    limits::save(db, book)?;
    save_accounts(db, book)?;
    save_holds(db, book)?;
    save_operations(db, book, block)?;
    save_answers_and_sources(db, book)?;
    save_records(db, book)
}

/// Writes the audit records.
fn save_records(db: &Connection, book: &Book) -> Result<(), Error> {
    if !audit::has_records(book) {
        return Ok(());
    }
    let last: Option<(i64, Vec<u8>)> = db
        .prepare_cached(LAST_RECORD)?
        .query_row([], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let last = match last {
        Some((sequence, hash)) => Some((sequence, hash_of(sequence, &hash)?)),
        None => None,
    };
    let sealed = audit::seal_records(last, book);
    execute_each(db, INSERT_RECORD, sealed, |to, sealed| {
        let (record, act) = (sealed.record, sealed.record.act);
        to.execute(params![
            record.sequence,
            record.at_us,
            act.actor,
            act.action,
            act.object_id,
            act.before,
            act.after,
            act.reason,
            act.request_id,
            act.correlation_id,
            sealed.previous_hash,
            sealed.hash,
        ])
    })
}

/// Writes new operations and their postings. `place`: position of the first one in the block.
pub fn save_flushed_rows(
    db: &Connection,
    rows: &FlushedRows,
    block: u64,
    place: usize,
) -> Result<(), Error> {
    let operations: Vec<&Operation> = rows.operations.iter().collect();
    let postings: Vec<&Posting> = rows.postings.iter().collect();
    save_new_operations(db, &operations, &postings, block, place)
}

/// Deletes parked notices if the command asks for it.
pub fn run_maintenance(db: &Connection, command: &Command) -> Result<(), Error> {
    if let CommandKind::PurgePendingReceipts { before_us } = &command.kind {
        db.execute("DELETE FROM parked WHERE at_us < ?1", [before_us])?;
    }
    Ok(())
}

/// Splits changes into new rows and existing rows.
fn split<'a, K: 'a, V>(
    changes: impl Iterator<Item = Change<'a, K, V>>,
) -> (Vec<&'a V>, Vec<&'a V>) {
    let (mut new, mut updated) = (Vec::new(), Vec::new());
    for change in changes {
        match change.before {
            None => new.extend(change.after),
            Some(_) => updated.extend(change.after),
        }
    }
    (new, updated)
}

/// Executes a statement once per row.
fn execute_each<T>(
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

/// As [`execute_each`], for existing rows: each execution must affect exactly one row.
fn execute_each_existing<T>(
    db: &Connection,
    sql: &str,
    rows: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut CachedStatement, T) -> rusqlite::Result<usize>,
) -> Result<(), Error> {
    let mut is_missing = false;
    execute_each(db, sql, rows, |to, row| {
        let written = write(to, row)?;
        is_missing |= written != 1;
        Ok(written)
    })?;
    if is_missing {
        return Err(Error::Invariant(
            "an update did not affect exactly one row of the loaded version".to_owned(),
        ));
    }
    Ok(())
}

fn save_accounts(db: &Connection, book: &Book) -> Result<(), Error> {
    let sql = "INSERT INTO instruments (instrument_id, decimals) VALUES (?1, ?2)";
    let scales = (book.scales.changes()).filter_map(|change| Some((change.key, change.after?)));
    execute_each(db, sql, scales, |to, row| to.execute(row))?;
    let sql = "INSERT INTO users (user_id, blocked) VALUES (?1, ?2) \
               ON CONFLICT (user_id) DO UPDATE SET blocked = excluded.blocked";
    let users = (book.users.changes()).filter_map(|change| change.after);
    execute_each(db, sql, users, |to, user| {
        to.execute((&user.user_id, user.blocked))
    })?;
    let sql = "INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) \
               VALUES (?1, ?2, ?3, ?4, ?5)";
    let accounts = (book.accounts.changes()).filter_map(|change| change.after);
    execute_each(db, sql, accounts, put_account)?;
    let new: Vec<&SubAccount> = (book.subaccounts.changes())
        .filter(|change| change.before.is_none())
        .filter_map(|change| change.after)
        .collect();
    SUB_ACCOUNT.write(db, &new, |to, row| put_subaccount(to, row))?;
    let mut updated: Vec<(&SubAccount, &SubAccount)> = (book.subaccounts.changes())
        .filter_map(|change| Some((change.before?, change.after?)))
        .collect();
    // In key order, so that rows of one page are updated together.
    updated.sort_unstable_by(|a, b| a.1.terms.subaccount_id.cmp(&b.1.terms.subaccount_id));
    let is_marked = |(before, row): &(&SubAccount, &SubAccount)| {
        (before.freeze, before.closed) != (row.freeze, row.closed)
    };
    let (marked, moved): (Vec<_>, Vec<_>) = updated.into_iter().partition(is_marked);
    execute_each_existing(db, SUB_ACCOUNT_BALANCE, moved, |to, (before, row)| {
        put_subaccount_balance(to, before, row)
    })?;
    execute_each_existing(db, SUB_ACCOUNT_STATE, marked, |to, (before, row)| {
        put_subaccount_state(to, before, row)
    })
}

fn save_holds(db: &Connection, book: &Book) -> Result<(), Error> {
    let (new, updated) = split(book.holds.changes());
    HOLD.write(db, &new, |to, row| put_hold(to, row))?;
    execute_each_existing(db, HOLD_STATE, updated, put_hold_state)
}

/// Writes the block of a group, if it has one.
pub fn save_block(db: &Connection, block: Option<&Block>) -> Result<(), Error> {
    let sql = "INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    execute_each(db, sql, block, |to, block| {
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
    let (operations, postings) = book.unflushed();
    save_new_operations(db, &operations, &postings, block, book.flushed_count())?;
    let updated = (book.operations.changes())
        .filter(|change| change.before.is_some())
        .filter_map(|change| change.after);
    execute_each_existing(db, OPERATION_STATE, updated, put_operation_state)?;
    execute_each_existing(
        db,
        OPERATION_STATE,
        book.flushed_and_modified(),
        put_operation_state,
    )
}

fn save_new_operations(
    db: &Connection,
    operations: &[&Operation],
    postings: &[&Posting],
    block: u64,
    place: usize,
) -> Result<(), Error> {
    let placed: Vec<(usize, &Operation)> = (place..).zip(operations.iter().copied()).collect();
    OPERATION.write(db, &placed, |to, (place, row)| {
        put_operation(to, row, block, *place)
    })?;
    POSTING.write(db, postings, |to, row| put_posting(to, row))
}

fn save_answers_and_sources(db: &Connection, book: &Book) -> Result<(), Error> {
    let sql = "INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let answers = (book.answers.changes()).filter_map(|change| Some((change.key, change.after?)));
    execute_each(db, sql, answers, |to, ((call, user_id, key), answer)| {
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
    let sources = (book.sources.changes()).filter_map(|change| Some((change.key, change.after?)));
    execute_each(db, sql, sources, |to, (source, at)| {
        let (first, through) = (
            at.first_sequence.cast_signed(),
            at.through_sequence.cast_signed(),
        );
        to.execute((source, first, through, at.digest))
    })?;
    let notices =
        (book.pending_receipts.changes()).filter_map(|change| Some((change.key, change.after?)));
    let sql = "INSERT INTO parked (match_key, tx_hash, reverted, at_us) VALUES (?1, ?2, ?3, ?4)";
    execute_each(db, sql, notices, |to, (key, notice)| {
        to.execute((key, &notice.tx_hash, notice.reverted, notice.at_us))
    })?;
    let deleted = (book.pending_receipts.changes())
        .filter(|change| change.before.is_some() && change.after.is_none());
    let sql = "DELETE FROM parked WHERE match_key = ?1";
    execute_each(db, sql, deleted, |to, change| to.execute([change.key]))
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

fn put_subaccount(to: &mut Values, subaccount: &SubAccount) -> rusqlite::Result<()> {
    let terms = &subaccount.terms;
    put!(
        to,
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
        subaccount.last_posting,
    )
}

fn put_subaccount_balance(
    to: &mut CachedStatement,
    before: &SubAccount,
    subaccount: &SubAccount,
) -> rusqlite::Result<usize> {
    to.execute(params![
        subaccount.terms.subaccount_id,
        subaccount.balance.0,
        subaccount.held.0,
        subaccount.unsettled.0,
        subaccount.version.cast_signed(),
        subaccount.updated_at_us,
        subaccount.last_posting,
        before.version.cast_signed(),
    ])
}

fn put_subaccount_state(
    to: &mut CachedStatement,
    before: &SubAccount,
    subaccount: &SubAccount,
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
        subaccount.last_posting,
        before.version.cast_signed(),
    ])
}

fn put_hold(to: &mut Values, hold: &Hold) -> rusqlite::Result<()> {
    let terms = &hold.terms;
    put!(
        to,
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
        hold.expiry_reported,
        terms.reason,
        terms.owner,
        terms.parent_hold_id,
        terms.destination_subaccount_id,
        terms.expires_at_us,
        terms.created_at_us,
        hold.updated_at_us,
    )
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
        hold.expiry_reported,
        hold.updated_at_us,
    ])
}

/// `block` and `place`: position in the audit chain.
fn put_operation(
    to: &mut Values,
    operation: &Operation,
    block: u64,
    place: usize,
) -> rusqlite::Result<()> {
    let terms = &operation.terms;
    put!(
        to,
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
    )
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

fn put_posting(to: &mut Values, posting: &Posting) -> rusqlite::Result<()> {
    put!(
        to,
        posting.link.number,
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
        posting.link.debit_previous,
        posting.link.credit_previous,
    )
}
