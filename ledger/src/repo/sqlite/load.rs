//! Reading the working set of a group: some ten statements, each for all commands at once, keys in sorted order.

use std::collections::BTreeSet;

use serde_json::json;
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::rows;
use crate::{
    Error,
    book::Book,
    fold::{Command, Wanted},
    model::Id,
    repo::{
        keep,
        rows::{
            AccountRow, AnswerRow, HOLD, HoldRow, OperationRow, POSTING, ParkedRow, PostingRow,
            SUB_ACCOUNT, SubAccountRow,
        },
    },
};

/// A child knows its parent, a parent may be a child; no deeper chain is ever made.
const PARENT_ROUNDS: usize = 3;

/// Everything these commands can touch.
pub async fn load(
    tx: &mut SqliteConnection,
    commands: &[&Command],
    now_us: i64,
) -> Result<Book, Error> {
    let mut book = Book {
        now_us,
        ..Book::default()
    };
    let mut wanted = Wanted::default();
    for command in commands {
        wanted.add(command);
    }
    holds(tx, &mut wanted, &mut book).await?;
    operations_by_id(tx, &wanted.operation_ids, &mut book).await?;
    for command in commands {
        wanted.add_late(
            command,
            |id| book.holds.get(id).cloned(),
            |id| book.operations.get(id).cloned(),
        );
    }
    let answered = answers(tx, &wanted, &mut book).await?;
    operations_by_id(tx, &answered, &mut book).await?;
    operations_by_other(tx, &wanted, &mut book).await?;
    postings(tx, &mut wanted, &mut book).await?;
    subaccounts(tx, &wanted, &mut book).await?;
    owners(tx, &wanted, &mut book).await?;
    scales(tx, &wanted, commands, &mut book).await?;
    memory(tx, &wanted, &mut book).await?;
    Ok(book)
}

async fn holds(
    tx: &mut SqliteConnection,
    wanted: &mut Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    let mut asked = BTreeSet::new();
    for _ in 0..PARENT_ROUNDS {
        let missing: Vec<Id> = wanted.hold_ids.difference(&asked).cloned().collect();
        if missing.is_empty() {
            break;
        }
        let sql = format!(
            "{} WHERE h.hold_id IN (SELECT value FROM json_each($1))",
            HOLD
        );
        let found: Vec<HoldRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(rows::ids(&missing))
            .fetch_all(&mut *tx)
            .await?;
        keep::holds(wanted, book, found)?;
        asked.extend(missing);
    }
    Ok(())
}

async fn operations_by_id(
    tx: &mut SqliteConnection,
    ids: &BTreeSet<Id>,
    book: &mut Book,
) -> Result<(), Error> {
    if ids.is_empty() {
        return Ok(());
    }
    let found: Vec<OperationRow> = sqlx::query_as(
        "SELECT * FROM operations WHERE operation_id IN (SELECT value FROM json_each($1))",
    )
    .bind(rows::ids(ids))
    .fetch_all(tx)
    .await?;
    keep::operations(book, found)
}

async fn operations_by_other(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    if !wanted.operation_keys.is_empty() {
        let keys = wanted
            .operation_keys
            .keys()
            .map(|(user, key, scope)| json!([&**user, &**key, scope]));
        let found: Vec<OperationRow> = sqlx::query_as(
            "SELECT o.* FROM json_each($1) j CROSS JOIN operations o \
             ON o.user_id = j.value->>0 AND o.idempotency_key = j.value->>1 AND o.scope = j.value->>2",
        )
        .bind(rows::rows(keys))
        .fetch_all(&mut *tx)
        .await?;
        keep::operations(book, found)?;
    }
    if !wanted.references.is_empty() {
        let keys = wanted
            .references
            .keys()
            .map(|(reference, kind)| json!([&**reference, kind]));
        let found: Vec<OperationRow> = sqlx::query_as(
            "SELECT o.* FROM json_each($1) j CROSS JOIN operations o \
             ON o.external_ref = j.value->>0 AND o.kind = j.value->>1",
        )
        .bind(rows::rows(keys))
        .fetch_all(&mut *tx)
        .await?;
        keep::operations(book, found)?;
    }
    if !wanted.tx_hashes.is_empty() {
        let found: Vec<OperationRow> = sqlx::query_as(
            "SELECT * FROM operations WHERE tx_hash IN (SELECT value FROM json_each($1)) ORDER BY created_at_us, operation_id",
        )
        .bind(rows::ids(&wanted.tx_hashes))
        .fetch_all(tx)
        .await?;
        keep::operations(book, found)?;
    }
    Ok(())
}

/// Postings of every loaded operation: for its answer, its reversal, its unsettled credits.
async fn postings(
    tx: &mut SqliteConnection,
    wanted: &mut Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    let of: BTreeSet<Id> = book
        .operations
        .values()
        .map(|operation| operation.terms.operation_id.clone())
        .collect();
    if of.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "{} WHERE p.operation_id IN (SELECT value FROM json_each($1)) ORDER BY p.operation_id, p.ordinal",
        POSTING
    );
    let found: Vec<PostingRow> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(rows::ids(&of))
        .fetch_all(tx)
        .await?;
    keep::postings(wanted, book, found);
    Ok(())
}

async fn subaccounts(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    let by = [
        (&wanted.subaccount_ids, "s.subaccount_id"),
        (&wanted.whole_users, "s.user_id"),
    ];
    for (keys, column) in by {
        if keys.is_empty() {
            continue;
        }
        let sql = format!(
            "{} WHERE {column} IN (SELECT value FROM json_each($1))",
            SUB_ACCOUNT
        );
        let found: Vec<SubAccountRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(rows::ids(keys))
            .fetch_all(&mut *tx)
            .await?;
        keep::subaccounts(book, found);
    }
    Ok(())
}

async fn owners(tx: &mut SqliteConnection, wanted: &Wanted, book: &mut Book) -> Result<(), Error> {
    if !wanted.account_ids.is_empty() {
        let found: Vec<AccountRow> = sqlx::query_as(
            "SELECT * FROM accounts WHERE account_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows::ids(&wanted.account_ids))
        .fetch_all(&mut *tx)
        .await?;
        keep::accounts(book, found)?;
    }
    if !wanted.user_ids.is_empty() {
        let found: Vec<(String, bool)> = sqlx::query_as(
            "SELECT user_id, blocked FROM users WHERE user_id IN (SELECT value FROM json_each($1))",
        )
        .bind(rows::ids(&wanted.user_ids))
        .fetch_all(tx)
        .await?;
        keep::users(book, found);
    }
    Ok(())
}

async fn scales(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let instruments = keep::instruments(wanted, commands);
    if instruments.is_empty() {
        return Ok(());
    }
    let found: Vec<(String, u8)> = sqlx::query_as(
        "SELECT instrument_id, decimals FROM instruments WHERE instrument_id IN (SELECT value FROM json_each($1))",
    )
    .bind(rows::ids(&instruments))
    .fetch_all(tx)
    .await?;
    for (instrument_id, decimals) in found {
        book.scales.load(instrument_id.into(), decimals);
    }
    Ok(())
}

/// Stored answers; returns the operations they speak of.
async fn answers(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    book: &mut Book,
) -> Result<BTreeSet<Id>, Error> {
    if wanted.answer_keys.is_empty() {
        return Ok(BTreeSet::new());
    }
    let keys = wanted
        .answer_keys
        .keys()
        .map(|(user, key, call)| json!([&**user, &**key, call]));
    let found: Vec<AnswerRow> = sqlx::query_as(
        "SELECT a.call, a.user_id, a.idempotency_key, a.digest, a.outcome FROM json_each($1) j CROSS JOIN answers a \
         ON a.user_id = j.value->>0 AND a.idempotency_key = j.value->>1 AND a.call = j.value->>2",
    )
    .bind(rows::rows(keys))
    .fetch_all(tx)
    .await?;
    keep::answers(book, found)
}

/// What the ledger remembers beside its rows: source positions, parked news.
async fn memory(tx: &mut SqliteConnection, wanted: &Wanted, book: &mut Book) -> Result<(), Error> {
    if !wanted.sources.is_empty() {
        let found: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT source, first_sequence, through_sequence, digest FROM sources WHERE source IN (SELECT value FROM json_each($1))",
        )
        .bind(rows::ids(&wanted.sources))
        .fetch_all(&mut *tx)
        .await?;
        keep::sources(book, found);
    }
    if !wanted.parked.is_empty() {
        let found: Vec<ParkedRow> = sqlx::query_as(
            "SELECT * FROM parked WHERE match_key IN (SELECT value FROM json_each($1))",
        )
        .bind(rows::ids(&wanted.parked))
        .fetch_all(tx)
        .await?;
        for row in found {
            book.parked.load(row.match_key.as_str().into(), row.into());
        }
    }
    Ok(())
}
