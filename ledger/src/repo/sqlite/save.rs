//! Writing what the fold made of a group: every row of a kind in as few statements as it takes ([`events::many`]), those of a small group in one trip.
//!
//! Texts are bound as the fold has them, not copied.

use std::sync::Arc;

use events::{
    Event,
    many::{Many, Script, Values},
};
use sqlx::SqliteConnection;

use super::limits;
use crate::{
    Error,
    audit::Block,
    book::{Book, Change},
    fold::{Act, Command, StoredAnswer},
    model::{Account, Hold, Id, Operation, Parked, Posting, SourcePosition, SubAccount, User},
    repo::rows::outcome_text,
};

static INSTRUMENTS: Many = Many::new(
    "INSERT INTO instruments (instrument_id, decimals) SELECT * FROM (VALUES ",
    2,
    ") LIMIT +?",
);
static USERS: Many = Many::new(
    "INSERT INTO users (user_id, blocked) SELECT * FROM (VALUES ",
    2,
    ") WHERE true LIMIT +? ON CONFLICT (user_id) DO UPDATE SET blocked = excluded.blocked",
);
static ACCOUNTS: Many = Many::new(
    "INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) SELECT * FROM (VALUES ",
    5,
    ") LIMIT +?",
);
static SUB_ACCOUNTS: Many = Many::new(
    "INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, balance, held, unsettled, version, freeze, closed, \
     may_be_negative, created_at_us, updated_at_us) SELECT * FROM (VALUES ",
    13,
    ") WHERE true LIMIT +? ON CONFLICT (subaccount_id) DO UPDATE SET balance = excluded.balance, held = excluded.held, \
     unsettled = excluded.unsettled, version = excluded.version, freeze = excluded.freeze, closed = excluded.closed, \
     updated_at_us = excluded.updated_at_us",
);
static HOLDS: Many = Many::new(
    "INSERT INTO holds (hold_id, subaccount_id, user_id, instrument_id, amount, remaining, added, split_off, consumed, released, \
     returned_by_children, status, expiry_told, reason, owner, parent_hold_id, destination_subaccount_id, expires_at_us, created_at_us, \
     updated_at_us) SELECT * FROM (VALUES ",
    20,
    ") WHERE true LIMIT +? ON CONFLICT (hold_id) DO UPDATE SET amount = excluded.amount, remaining = excluded.remaining, \
     added = excluded.added, split_off = excluded.split_off, consumed = excluded.consumed, released = excluded.released, \
     returned_by_children = excluded.returned_by_children, status = excluded.status, expiry_told = excluded.expiry_told, \
     updated_at_us = excluded.updated_at_us",
);
static BLOCKS: Many = Many::new(
    "INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) SELECT * FROM (VALUES ",
    6,
    ") LIMIT +?",
);
static OPERATIONS: Many = Many::new(
    "INSERT INTO operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, tx_hash, rejection_code, \
     rejection_message, awaits_chain, reverses, reversed_by, digest, created_at_us, finalized_at_us, block, place) SELECT * FROM (VALUES ",
    18,
    ") LIMIT +?",
);
/// Only what may change.
static OPERATION_STATES: Many = Many::new(
    "UPDATE operations SET status = v.column2, tx_hash = v.column3, rejection_code = v.column4, rejection_message = v.column5, \
     reversed_by = v.column6, finalized_at_us = v.column7 FROM (SELECT * FROM (VALUES ",
    7,
    ") LIMIT +?) v WHERE operation_id = v.column1",
);
static POSTINGS: Many = Many::new(
    "INSERT INTO postings (operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, instrument_id, amount, hold_id, \
     unsettled, debit_balance_after, debit_version, credit_balance_after, credit_version, created_at_us) SELECT * FROM (VALUES ",
    14,
    ") LIMIT +?",
);
static ANSWERS: Many = Many::new(
    "INSERT INTO answers (call, user_id, idempotency_key, digest, outcome, created_at_us) SELECT * FROM (VALUES ",
    6,
    ") LIMIT +?",
);
static SOURCES: Many = Many::new(
    "INSERT INTO sources (source, first_sequence, through_sequence, digest) SELECT * FROM (VALUES ",
    4,
    ") WHERE true LIMIT +? ON CONFLICT (source) DO UPDATE SET first_sequence = excluded.first_sequence, \
     through_sequence = excluded.through_sequence, digest = excluded.digest",
);
static PARKED: Many = Many::new(
    "INSERT INTO parked (match_key, tx_hash, reverted, at_us) SELECT * FROM (VALUES ",
    4,
    ") LIMIT +?",
);
static UNPARKED: Many = Many::new(
    "DELETE FROM parked WHERE match_key IN (SELECT * FROM (VALUES ",
    1,
    ") LIMIT +?)",
);

fn text(id: &Id) -> Arc<str> {
    id.shared()
}

fn some(id: &Option<Id>) -> Option<Arc<str>> {
    id.as_ref().map(Id::shared)
}

/// Writes every changed row and the events beside them. The order follows the references between the tables.
pub async fn save(
    tx: &mut SqliteConnection,
    book: &Book,
    block: Option<&Block>,
    events: &[Event],
) -> Result<(), Error> {
    limits::save(tx, book).await?;
    let mut script = Script::default();
    save_owners(&mut script, tx, book).await?;
    save_block(&mut script, tx, block).await?;
    let block = block.map_or(0, |block| block.block);
    save_operations(&mut script, tx, book, block).await?;
    save_memory(&mut script, tx, book).await?;
    events::outbox::append_to(&mut script, tx, events).await?;
    Ok(script.run(tx).await?)
}

/// What a command asks of the store alone.
pub async fn tidy(tx: &mut SqliteConnection, command: &Command) -> Result<(), Error> {
    if let Act::ForgetParked { before_us } = &command.act {
        sqlx::query("DELETE FROM parked WHERE at_us < $1")
            .bind(before_us)
            .execute(tx)
            .await?;
    }
    Ok(())
}

/// The block of a group, if it has one.
async fn save_block(
    script: &mut Script,
    tx: &mut SqliteConnection,
    block: Option<&Block>,
) -> Result<(), sqlx::Error> {
    let block: Vec<&Block> = block.into_iter().collect();
    script
        .add(tx, &BLOCKS, &block, |block, row| {
            row.put(block.block.cast_signed());
            row.put(block.previous_hash.to_vec());
            row.put(block.hash.to_vec());
            row.put(block.operations as i64);
            row.put(block.postings as i64);
            row.put(block.sealed_at_us);
        })
        .await
}

/// Rows that are there after the group.
fn after<'a, K, V>(changes: Vec<Change<'a, K, V>>) -> Vec<(&'a K, &'a V)> {
    let rows = changes.into_iter();
    rows.filter_map(|change| Some((change.key, change.after?)))
        .collect()
}

async fn save_owners(
    script: &mut Script,
    tx: &mut SqliteConnection,
    book: &Book,
) -> Result<(), sqlx::Error> {
    let scales = after(book.scales.changes());
    script
        .add(tx, &INSTRUMENTS, &scales, |(id, decimals), row| {
            row.put(text(id));
            row.put(i32::from(**decimals));
        })
        .await?;
    let users = after(book.users.changes());
    script
        .add(tx, &USERS, &users, |(_, user): &(_, &User), row| {
            row.put(text(&user.user_id));
            row.put(user.blocked);
        })
        .await?;
    let accounts = after(book.accounts.changes());
    script
        .add(tx, &ACCOUNTS, &accounts, |(_, account), row| {
            put_account(account, row);
        })
        .await?;
    let subaccounts = after(book.subaccounts.changes());
    script
        .add(tx, &SUB_ACCOUNTS, &subaccounts, |(_, subaccount), row| {
            put_subaccount(subaccount, row);
        })
        .await?;
    let holds = after(book.holds.changes());
    script
        .add(tx, &HOLDS, &holds, |(_, hold), row| put_hold(hold, row))
        .await
}

async fn save_operations(
    script: &mut Script,
    tx: &mut SqliteConnection,
    book: &Book,
    block: u64,
) -> Result<(), sqlx::Error> {
    let (new, moved): (Vec<_>, Vec<_>) = book
        .operations
        .changes()
        .into_iter()
        .partition(|change| change.before.is_none());
    let new: Vec<(usize, &Operation)> = (after(new).into_iter())
        .map(|(_, operation)| operation)
        .enumerate()
        .collect();
    script
        .add(tx, &OPERATIONS, &new, |(place, operation), row| {
            put_operation(operation, row);
            // Where the audit chain has it.
            row.put(block.cast_signed());
            row.put(*place as i64);
        })
        .await?;
    script
        .add(tx, &OPERATION_STATES, &after(moved), |(_, of), row| {
            put_operation_state(of, row);
        })
        .await?;
    let postings = after(book.postings.changes());
    let postings: Vec<&Posting> = postings.into_iter().flat_map(|(_, own)| own).collect();
    script
        .add(tx, &POSTINGS, &postings, |posting, row| {
            put_posting(posting, row);
        })
        .await
}

async fn save_memory(
    script: &mut Script,
    tx: &mut SqliteConnection,
    book: &Book,
) -> Result<(), sqlx::Error> {
    let answers = after(book.answers.changes());
    script
        .add(
            tx,
            &ANSWERS,
            &answers,
            |((call, user_id, key), answer): &(&crate::book::AnswerKey, &StoredAnswer), row| {
                row.put(call.code());
                row.put(text(user_id));
                row.put(text(key));
                row.put(answer.digest);
                row.put(outcome_text(&answer.outcome));
                row.put(book.now_us);
            },
        )
        .await?;
    let sources = after(book.sources.changes());
    script
        .add(
            tx,
            &SOURCES,
            &sources,
            |(source, at): &(&Id, &SourcePosition), row| {
                row.put(text(source));
                row.put(at.first_sequence.cast_signed());
                row.put(at.through_sequence.cast_signed());
                row.put(at.digest);
            },
        )
        .await?;
    let parked = book.parked.changes();
    let gone: Vec<&Id> = parked
        .iter()
        .filter(|change| change.before.is_some() && change.after.is_none())
        .map(|change| change.key)
        .collect();
    script
        .add(
            tx,
            &PARKED,
            &after(parked),
            |(key, news): &(&Id, &Parked), row| {
                row.put(text(key));
                row.put(some(&news.tx_hash));
                row.put(news.reverted);
                row.put(news.at_us);
            },
        )
        .await?;
    script
        .add(tx, &UNPARKED, &gone, |key, row| row.put(text(key)))
        .await
}

fn put_account(account: &Account, row: &mut Values) {
    row.put(text(&account.account_id));
    row.put(text(&account.user_id));
    row.put(account.kind.code());
    row.put(account.created_at_us);
    row.put(account.updated_at_us);
}

fn put_subaccount(subaccount: &SubAccount, row: &mut Values) {
    let terms = &subaccount.terms;
    row.put(text(&terms.subaccount_id));
    row.put(text(&terms.account_id));
    row.put(text(&terms.user_id));
    row.put(text(&terms.instrument_id));
    row.put(subaccount.balance.0);
    row.put(subaccount.held.0);
    row.put(subaccount.unsettled.0);
    row.put(subaccount.version.cast_signed());
    row.put(i32::from(subaccount.freeze));
    row.put(subaccount.closed);
    row.put(terms.may_be_negative);
    row.put(terms.created_at_us);
    row.put(subaccount.updated_at_us);
}

fn put_hold(hold: &Hold, row: &mut Values) {
    let terms = &hold.terms;
    row.put(text(&terms.hold_id));
    row.put(text(&terms.subaccount_id));
    row.put(text(&terms.user_id));
    row.put(text(&terms.instrument_id));
    for minor in [
        hold.amount,
        hold.remaining,
        hold.added,
        hold.split_off,
        hold.consumed,
        hold.released,
        hold.returned,
    ] {
        row.put(minor.0);
    }
    row.put(hold.status.code());
    row.put(hold.expiry_told);
    row.put(terms.reason.clone());
    row.put(terms.owner.clone());
    row.put(some(&terms.parent_hold_id));
    row.put(some(&terms.destination_subaccount_id));
    row.put(terms.expires_at_us);
    row.put(terms.created_at_us);
    row.put(hold.updated_at_us);
}

fn put_operation(operation: &Operation, row: &mut Values) {
    let terms = &operation.terms;
    row.put(text(&terms.operation_id));
    row.put(terms.scope.code());
    row.put(terms.kind.code());
    row.put(operation.status.code());
    row.put(text(&terms.user_id));
    row.put(text(&terms.idempotency_key));
    row.put(some(&terms.external_ref));
    row.put(some(&operation.tx_hash));
    row.put(operation.rejection_code);
    row.put(operation.rejection_message.clone());
    row.put(terms.awaits_chain);
    row.put(some(&terms.reverses));
    row.put(some(&operation.reversed_by));
    row.put(terms.digest);
    row.put(terms.created_at_us);
    row.put(operation.finalized_at_us);
}

fn put_operation_state(operation: &Operation, row: &mut Values) {
    row.put(text(&operation.terms.operation_id));
    row.put(operation.status.code());
    row.put(some(&operation.tx_hash));
    row.put(operation.rejection_code);
    row.put(operation.rejection_message.clone());
    row.put(some(&operation.reversed_by));
    row.put(operation.finalized_at_us);
}

fn put_posting(posting: &Posting, row: &mut Values) {
    row.put(text(&posting.operation_id));
    row.put(posting.ordinal);
    row.put(text(&posting.posting_id));
    row.put(text(&posting.debit_subaccount_id));
    row.put(text(&posting.credit_subaccount_id));
    row.put(text(&posting.amount.instrument_id));
    row.put(posting.amount.minor.0);
    row.put(some(&posting.hold_id));
    row.put(posting.unsettled);
    row.put(posting.debit_balance_after.0);
    row.put(posting.debit_version.cast_signed());
    row.put(posting.credit_balance_after.0);
    row.put(posting.credit_version.cast_signed());
    row.put(posting.created_at_us);
}
