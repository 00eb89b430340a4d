//! Writes the folded group with one statement per kind of row and a typed array per column.
//!
//! New rows are inserted, never upserted. If a row exists already, another ledger committed it
//! first, and the group is folded again.

use sqlx::{Arguments, FromRow, PgConnection, Postgres, Row, postgres::PgArguments, query::Query};

use super::limits;
use crate::{
    Error,
    audit::{self, Block, Head},
    book::{Book, Change},
    fold::{Command, CommandKind},
    model::{Hold, Id, Posting, SubAccount},
    repo::{
        audit::{INSERT_RECORD, LAST_RECORD, Start, hash_of},
        rows::outcome_text,
    },
};

/// One column of many rows.
fn column<'a, R, T>(rows: &'a [R], get: impl Fn(&'a R) -> T) -> Vec<T> {
    rows.iter().map(get).collect()
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).expect("versions and sequences stay below 2^63")
}

/// Splits changes into new rows and existing rows.
fn split<'a, K, V>(
    changes: impl Iterator<Item = Change<'a, K, V>>,
) -> (Vec<(&'a K, &'a V)>, Vec<(&'a K, &'a V)>) {
    let (mut new, mut updated) = (Vec::new(), Vec::new());
    for change in changes {
        let Some(after) = change.after else { continue };
        if change.before.is_none() {
            new.push((change.key, after));
        } else {
            updated.push((change.key, after));
        }
    }
    (new, updated)
}

/// Executes a statement that must affect `rows` rows. `what` names them in the error.
async fn execute_all(
    tx: &mut PgConnection,
    what: &str,
    rows: usize,
    query: Query<'_, Postgres, PgArguments>,
) -> Result<(), Error> {
    if rows == 0 {
        return Ok(());
    }
    let affected = query.execute(tx).await?.rows_affected();
    check(what, rows, affected)
}

fn check(what: &str, rows: usize, affected: u64) -> Result<(), Error> {
    if affected != rows as u64 {
        return Err(Error::Invariant(format!(
            "{what}: {affected} of {rows} written"
        )));
    }
    Ok(())
}

/// Writes every changed row, and the block that seals new operations. The end of the chain is
/// locked before new rows are inserted, because other ledgers may wait for their keys. The order
/// follows the foreign keys.
pub async fn save(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let block = if audit::has_new_operations(book) {
        let head = update_subaccounts_and_lock_head(tx, book).await?;
        Some(audit::seal(&head, book).expect("the group has new operations"))
    } else {
        update_subaccounts(tx, book).await?;
        None
    };
    owners(tx, book).await?;
    limits::save(tx, book).await?;
    insert_subaccounts(tx, book).await?;
    holds(tx, book).await?;
    match block {
        Some(block) => insert_block(tx, book, &block).await?,
        None => answers(tx, book).await?,
    }
    operations(tx, book).await?;
    sources(tx, book).await?;
    pending_receipts(tx, book).await?;
    records(tx, book).await
}

/// Writes the audit records. Locks their chain until the commit. The second statement sees what was
/// committed by the session that had the lock.
async fn records(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    if !audit::has_records(book) {
        return Ok(());
    }
    sqlx::query("SELECT pg_advisory_xact_lock('audit_records'::regclass::oid::bigint << 8)")
        .execute(&mut *tx)
        .await?;
    let last: Option<(i64, Vec<u8>)> = sqlx::query_as(LAST_RECORD).fetch_optional(&mut *tx).await?;
    let last = last.map(|(sequence, hash)| Ok::<_, Error>((sequence, hash_of(sequence, &hash)?)));
    for sealed in audit::seal_records(last.transpose()?, book) {
        let (record, act) = (sealed.record, sealed.record.act);
        sqlx::query(INSERT_RECORD)
            .bind(record.sequence)
            .bind(record.at_us)
            .bind(act.actor)
            .bind(act.action)
            .bind(act.object_id)
            .bind(act.before)
            .bind(act.after)
            .bind(act.reason)
            .bind(act.request_id)
            .bind(act.correlation_id)
            .bind(&sealed.previous_hash[..])
            .bind(&sealed.hash[..])
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

async fn owners(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, _) = split(book.scales.changes());
    let query = sqlx::query(
        "INSERT INTO instruments (instrument_id, decimals) SELECT * FROM UNNEST($1::text[], $2::int[])",
    )
    .bind(column(&new, |(id, _)| &***id))
    .bind(column(&new, |(_, decimals)| i32::from(**decimals)));
    execute_all(tx, "instruments", new.len(), query).await?;
    let (new, updated) = split(book.users.changes());
    let query = sqlx::query(
        "INSERT INTO users (user_id, blocked) SELECT * FROM UNNEST($1::text[], $2::boolean[])",
    )
    .bind(column(&new, |(id, _)| &***id))
    .bind(column(&new, |(_, user)| user.blocked));
    execute_all(tx, "users", new.len(), query).await?;
    let query = sqlx::query(
        "UPDATE users u SET blocked = j.blocked FROM UNNEST($1::text[], $2::boolean[]) AS j (user_id, blocked) \
         WHERE u.user_id = j.user_id",
    )
    .bind(column(&updated, |(id, _)| &***id))
    .bind(column(&updated, |(_, user)| user.blocked));
    execute_all(tx, "users", updated.len(), query).await?;
    let (new, _) = split(book.accounts.changes());
    let query = sqlx::query(
        "INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) \
         SELECT * FROM UNNEST($1::text[], $2::text[], $3::int[], $4::bigint[], $5::bigint[])",
    )
    .bind(column(&new, |(id, _)| &***id))
    .bind(column(&new, |(_, account)| &*account.user_id))
    .bind(column(&new, |(_, account)| account.kind.code()))
    .bind(column(&new, |(_, account)| account.created_at_us))
    .bind(column(&new, |(_, account)| account.updated_at_us));
    execute_all(tx, "accounts", new.len(), query).await
}

/// Binds the ids and the mutable columns of sub-accounts.
fn mutable_columns(rows: &[(&Id, &SubAccount)]) -> Result<PgArguments, Error> {
    let mut to = PgArguments::default();
    (|| {
        to.add(column(rows, |(_, row)| &*row.terms.subaccount_id))?;
        to.add(column(rows, |(_, row)| row.balance.0))?;
        to.add(column(rows, |(_, row)| row.held.0))?;
        to.add(column(rows, |(_, row)| row.unsettled.0))?;
        to.add(column(rows, |(_, row)| signed(row.version)))?;
        to.add(column(rows, |(_, row)| i32::from(row.freeze)))?;
        to.add(column(rows, |(_, row)| row.closed))?;
        to.add(column(rows, |(_, row)| row.updated_at_us))
    })()
    .map_err(sqlx::Error::Encode)?;
    Ok(to)
}

async fn insert_subaccounts(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, _) = split(book.subaccounts.changes());
    let query = sqlx::query_with(
        "INSERT INTO sub_accounts (subaccount_id, balance, held, unsettled, version, \"freeze\", closed, \
         updated_at_us, account_id, user_id, instrument_id, may_be_negative, created_at_us) \
         SELECT * FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::int[], \
         $7::boolean[], $8::bigint[], $9::text[], $10::text[], $11::text[], $12::boolean[], $13::bigint[])",
        mutable_columns(&new)?,
    )
    .bind(column(&new, |(_, row)| &*row.terms.account_id))
    .bind(column(&new, |(_, row)| &*row.terms.user_id))
    .bind(column(&new, |(_, row)| &*row.terms.instrument_id))
    .bind(column(&new, |(_, row)| row.terms.may_be_negative))
    .bind(column(&new, |(_, row)| row.terms.created_at_us));
    execute_all(tx, "new sub-accounts", new.len(), query).await
}

macro_rules! update_subaccounts_sql {
    () => {
        "UPDATE sub_accounts s SET balance = j.balance, held = j.held, unsettled = j.unsettled, version = j.version, \
         \"freeze\" = j.\"freeze\", closed = j.closed, updated_at_us = j.updated_at_us \
         FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::int[], $7::boolean[], \
         $8::bigint[]) \
         AS j (subaccount_id, balance, held, unsettled, version, \"freeze\", closed, updated_at_us) \
         WHERE s.subaccount_id = j.subaccount_id"
    };
}

async fn update_subaccounts(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (_, updated) = split(book.subaccounts.changes());
    let query = sqlx::query_with(update_subaccounts_sql!(), mutable_columns(&updated)?);
    execute_all(tx, "sub-accounts", updated.len(), query).await
}

/// As [`update_subaccounts`]. In the same round trip locks the chain of blocks until the commit and
/// reads its last block.
async fn update_subaccounts_and_lock_head(
    tx: &mut PgConnection,
    book: &Book,
) -> Result<Head, Error> {
    let (_, updated) = split(book.subaccounts.changes());
    let sql = concat!(
        "WITH updated AS (",
        update_subaccounts_sql!(),
        " RETURNING 1) SELECT e.*, (SELECT COUNT(*) FROM updated) AS updated FROM locked_end_of_chain() AS e"
    );
    let locked = sqlx::query_with(sql, mutable_columns(&updated)?)
        .fetch_one(tx)
        .await?;
    let written: i64 = locked.try_get("updated")?;
    check("sub-accounts", updated.len(), written.unsigned_abs())?;
    Start::from_row(&locked)?.head()
}

async fn holds(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, updated) = split(book.holds.changes());
    let state = |query: Query<'static, Postgres, PgArguments>, rows: &[(&Id, &Hold)]| {
        query
            .bind(column(rows, |(_, row)| &*row.terms.hold_id))
            .bind(column(rows, |(_, row)| row.amount.0))
            .bind(column(rows, |(_, row)| row.remaining.0))
            .bind(column(rows, |(_, row)| row.added.0))
            .bind(column(rows, |(_, row)| row.split_off.0))
            .bind(column(rows, |(_, row)| row.consumed.0))
            .bind(column(rows, |(_, row)| row.released.0))
            .bind(column(rows, |(_, row)| row.returned.0))
            .bind(column(rows, |(_, row)| row.status.code()))
            .bind(column(rows, |(_, row)| row.expiry_reported))
            .bind(column(rows, |(_, row)| row.updated_at_us))
    };
    let query = sqlx::query(
        "INSERT INTO holds (hold_id, amount, remaining, added, split_off, consumed, released, returned_by_children, \
         status, expiry_told, updated_at_us, subaccount_id, user_id, instrument_id, reason, owner, parent_hold_id, \
         destination_subaccount_id, expires_at_us, created_at_us) \
         SELECT * FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], \
         $7::bigint[], $8::bigint[], $9::int[], $10::boolean[], $11::bigint[], $12::text[], $13::text[], $14::text[], \
         $15::text[], $16::text[], $17::text[], $18::text[], $19::bigint[], $20::bigint[])",
    );
    let query = state(query, &new)
        .bind(column(&new, |(_, row)| &*row.terms.subaccount_id))
        .bind(column(&new, |(_, row)| &*row.terms.user_id))
        .bind(column(&new, |(_, row)| &*row.terms.instrument_id))
        .bind(column(&new, |(_, row)| &*row.terms.reason))
        .bind(column(&new, |(_, row)| &*row.terms.owner))
        .bind(column(&new, |(_, row)| row.terms.parent_hold_id.as_deref()))
        .bind(column(&new, |(_, row)| {
            row.terms.destination_subaccount_id.as_deref()
        }))
        .bind(column(&new, |(_, row)| row.terms.expires_at_us))
        .bind(column(&new, |(_, row)| row.terms.created_at_us));
    execute_all(tx, "new holds", new.len(), query).await?;
    let query = sqlx::query(
        "UPDATE holds h SET amount = j.amount, remaining = j.remaining, added = j.added, split_off = j.split_off, \
         consumed = j.consumed, released = j.released, returned_by_children = j.returned, status = j.status, \
         expiry_told = j.expiry_told, updated_at_us = j.updated_at_us \
         FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], \
         $8::bigint[], $9::int[], $10::boolean[], $11::bigint[]) AS j (hold_id, amount, remaining, added, split_off, \
         consumed, released, returned, status, expiry_told, updated_at_us) WHERE h.hold_id = j.hold_id",
    );
    execute_all(tx, "holds", updated.len(), state(query, &updated)).await
}

const INSERT_BLOCK: &str = "\
     WITH sealed AS (INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) \
     VALUES ($1, $2, $3, $4, $5, $6)), \
     made AS (INSERT INTO operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, \
     tx_hash, rejection_code, rejection_message, awaits_chain, reverses, reversed_by, digest, created_at_us, \
     finalized_at_us, place, block) \
     SELECT j.*, $1 FROM UNNEST($7::text[], $8::int[], $9::int[], $10::int[], $11::text[], $12::text[], \
     $13::text[], $14::text[], $15::int[], $16::text[], $17::boolean[], $18::text[], $19::text[], $20::bigint[], \
     $21::bigint[], $22::bigint[], $23::bigint[]) AS j), \
     posted AS (INSERT INTO postings (operation_id, ordinal, posting_id, debit_subaccount_id, \
     credit_subaccount_id, instrument_id, amount, hold_id, unsettled, \
     debit_balance_after, debit_version, credit_balance_after, credit_version, created_at_us) \
     SELECT * FROM UNNEST($24::text[], $25::int[], $26::text[], $27::text[], $28::text[], $29::text[], \
     $30::bigint[], $31::text[], $32::boolean[], $33::bigint[], $34::bigint[], $35::bigint[], $36::bigint[], \
     $37::bigint[])) \
     INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) \
     SELECT j.*, $43 FROM UNNEST($38::int[], $39::text[], $40::text[], $41::bigint[], $42::text[]) AS j";

/// Writes the block of a group, its operations and postings, and the stored answers in one round
/// trip.
async fn insert_block(tx: &mut PgConnection, book: &Book, block: &Block) -> Result<(), Error> {
    let (new, _) = split(book.operations.changes());
    let changes = book.postings.changes();
    let postings: Vec<&Posting> = changes
        .filter_map(|change| change.after)
        .flatten()
        .collect();
    let (stored, _) = split(book.answers.changes());
    sqlx::query(INSERT_BLOCK)
        .bind(signed(block.block))
        .bind(&block.previous_hash[..])
        .bind(&block.hash[..])
        .bind(signed(block.operations))
        .bind(signed(block.postings))
        .bind(block.sealed_at_us)
        .bind(column(&new, |(id, _)| &***id))
        .bind(column(&new, |(_, row)| row.terms.scope.code()))
        .bind(column(&new, |(_, row)| row.terms.kind.code()))
        .bind(column(&new, |(_, row)| row.status.code()))
        .bind(column(&new, |(_, row)| &*row.terms.user_id))
        .bind(column(&new, |(_, row)| &*row.terms.idempotency_key))
        .bind(column(&new, |(_, row)| row.terms.external_ref.as_deref()))
        .bind(column(&new, |(_, row)| row.tx_hash.as_deref()))
        .bind(column(&new, |(_, row)| row.rejection_code))
        .bind(column(&new, |(_, row)| row.rejection_message.as_deref()))
        .bind(column(&new, |(_, row)| row.terms.awaits_chain))
        .bind(column(&new, |(_, row)| row.terms.reverses.as_deref()))
        .bind(column(&new, |(_, row)| row.reversed_by.as_deref()))
        .bind(column(&new, |(_, row)| row.terms.digest))
        .bind(column(&new, |(_, row)| row.terms.created_at_us))
        .bind(column(&new, |(_, row)| row.finalized_at_us))
        // Position in the block.
        .bind((0..new.len() as i64).collect::<Vec<_>>())
        .bind(column(&postings, |row| &*row.operation_id))
        .bind(column(&postings, |row| {
            i32::try_from(row.ordinal).expect("an ordinal fits 31 bits")
        }))
        .bind(column(&postings, |row| &*row.posting_id))
        .bind(column(&postings, |row| &*row.debit_subaccount_id))
        .bind(column(&postings, |row| &*row.credit_subaccount_id))
        .bind(column(&postings, |row| &*row.amount.instrument_id))
        .bind(column(&postings, |row| row.amount.minor.0))
        .bind(column(&postings, |row| row.hold_id.as_deref()))
        .bind(column(&postings, |row| row.unsettled))
        .bind(column(&postings, |row| row.debit_balance_after.0))
        .bind(column(&postings, |row| signed(row.debit_version)))
        .bind(column(&postings, |row| row.credit_balance_after.0))
        .bind(column(&postings, |row| signed(row.credit_version)))
        .bind(column(&postings, |row| row.created_at_us))
        .bind(column(&stored, |((call, _, _), _)| call.code()))
        .bind(column(&stored, |((_, user_id, _), _)| &**user_id))
        .bind(column(&stored, |((_, _, key), _)| &**key))
        .bind(column(&stored, |(_, answer)| answer.digest))
        .bind(column(&stored, |(_, answer)| outcome_text(&answer.outcome)))
        .bind(book.now_us)
        .execute(tx)
        .await?;
    Ok(())
}

/// Updates existing operations.
async fn operations(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (_, updated) = split(book.operations.changes());
    let query = sqlx::query(
        "UPDATE operations o SET status = j.status, tx_hash = j.tx_hash, rejection_code = j.rejection_code, \
         rejection_message = j.rejection_message, reversed_by = j.reversed_by, finalized_at_us = j.finalized_at_us \
         FROM UNNEST($1::text[], $2::int[], $3::text[], $4::int[], $5::text[], $6::text[], $7::bigint[]) \
         AS j (operation_id, status, tx_hash, rejection_code, rejection_message, reversed_by, finalized_at_us) \
         WHERE o.operation_id = j.operation_id",
    )
    .bind(column(&updated, |(id, _)| &***id))
    .bind(column(&updated, |(_, row)| row.status.code()))
    .bind(column(&updated, |(_, row)| row.tx_hash.as_deref()))
    .bind(column(&updated, |(_, row)| row.rejection_code))
    .bind(column(&updated, |(_, row)| row.rejection_message.as_deref()))
    .bind(column(&updated, |(_, row)| row.reversed_by.as_deref()))
    .bind(column(&updated, |(_, row)| row.finalized_at_us));
    execute_all(tx, "operations", updated.len(), query).await
}

async fn answers(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, _) = split(book.answers.changes());
    let query = sqlx::query(
        "INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) \
         SELECT j.*, $6 FROM UNNEST($1::int[], $2::text[], $3::text[], $4::bigint[], $5::text[]) AS j",
    )
    .bind(column(&new, |((call, _, _), _)| call.code()))
    .bind(column(&new, |((_, user_id, _), _)| &**user_id))
    .bind(column(&new, |((_, _, key), _)| &**key))
    .bind(column(&new, |(_, answer)| answer.digest))
    .bind(column(&new, |(_, answer)| outcome_text(&answer.outcome)))
    .bind(book.now_us);
    execute_all(tx, "answers", new.len(), query).await
}

async fn sources(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, updated) = split(book.sources.changes());
    for (rows, sql) in [
        (
            new,
            "INSERT INTO sources (source, first_sequence, through_sequence, digest) \
             SELECT * FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[])",
        ),
        (
            updated,
            "UPDATE sources s SET first_sequence = j.first_sequence, through_sequence = j.through_sequence, \
             digest = j.digest \
             FROM UNNEST($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS j (source, first_sequence, \
             through_sequence, digest) \
             WHERE s.source = j.source",
        ),
    ] {
        let query = sqlx::query(sql)
            .bind(column(&rows, |(source, _)| &***source))
            .bind(column(&rows, |(_, at)| signed(at.first_sequence)))
            .bind(column(&rows, |(_, at)| signed(at.through_sequence)))
            .bind(column(&rows, |(_, at)| at.digest));
        execute_all(tx, "sources", rows.len(), query).await?;
    }
    Ok(())
}

async fn pending_receipts(tx: &mut PgConnection, book: &Book) -> Result<(), Error> {
    let (new, _) = split(book.pending_receipts.changes());
    let query = sqlx::query(
        "INSERT INTO parked (match_key, tx_hash, reverted, at_us) \
         SELECT * FROM UNNEST($1::text[], $2::text[], $3::boolean[], $4::bigint[])",
    )
    .bind(column(&new, |(key, _)| &***key))
    .bind(column(&new, |(_, notice)| notice.tx_hash.as_deref()))
    .bind(column(&new, |(_, notice)| notice.reverted))
    .bind(column(&new, |(_, notice)| notice.at_us));
    execute_all(tx, "parked notices", new.len(), query).await?;
    let deleted: Vec<&str> = (book.pending_receipts.changes())
        .filter(|change| change.before.is_some() && change.after.is_none())
        .map(|change| &**change.key)
        .collect();
    if !deleted.is_empty() {
        // The sweeper may have deleted them concurrently, so the count is not checked.
        sqlx::query("DELETE FROM parked WHERE match_key = ANY($1)")
            .bind(deleted)
            .execute(tx)
            .await?;
    }
    Ok(())
}

/// Deletes parked notices if the command asks for it.
pub async fn run_maintenance(tx: &mut PgConnection, command: &Command) -> Result<(), Error> {
    if let CommandKind::PurgePendingReceipts { before_us } = &command.kind {
        sqlx::query("DELETE FROM parked WHERE at_us < $1")
            .bind(before_us)
            .execute(tx)
            .await?;
    }
    Ok(())
}
