//! Reading the working set of a group: some ten statements, each for up to 512 keys of all commands at once; one is left out where nothing is wanted.

use std::collections::BTreeSet;

use events::many::Many;
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::{ids, limits};
use crate::{
    Error,
    audit::Head,
    book::Book,
    fold::{Command, Wanted},
    model::Id,
    repo::{
        audit::Start,
        keep,
        rows::{
            AccountRow, AnswerRow, HOLD, HoldRow, OperationRow, POSTING, ParkedRow, PostingRow,
            SUB_ACCOUNT, SubAccountRow,
        },
    },
};

/// Operations by (user, key, scope).
static BY_KEY: Many = Many::new(
    "WITH k (user_id, idempotency_key, scope) AS (SELECT * FROM (VALUES ",
    3,
    ") LIMIT +?) SELECT o.* FROM k CROSS JOIN operations o \
     ON o.user_id = k.user_id AND o.idempotency_key = k.idempotency_key AND o.scope = k.scope",
);
/// Operations by (reference, kind).
static BY_REFERENCE: Many = Many::new(
    "WITH k (external_ref, kind) AS (SELECT * FROM (VALUES ",
    2,
    ") LIMIT +?) SELECT o.* FROM k CROSS JOIN operations o ON o.external_ref = k.external_ref AND o.kind = k.kind",
);
/// Stored answers by (user, key, call).
static ANSWERS: Many = Many::new(
    "WITH k (user_id, idempotency_key, call) AS (SELECT * FROM (VALUES ",
    3,
    ") LIMIT +?) SELECT a.call, a.user_id, a.idempotency_key, a.digest, a.outcome FROM k CROSS JOIN answers a \
     ON a.user_id = k.user_id AND a.idempotency_key = k.idempotency_key AND a.call = k.call",
);

/// A child knows its parent, a parent may be a child; no deeper chain is ever made.
const PARENT_ROUNDS: usize = 3;

/// Everything these commands can touch, and the end of the audit chain.
pub async fn load(
    tx: &mut SqliteConnection,
    commands: &[&Command],
    clock_us: i64,
) -> Result<(Book, Head), Error> {
    let start: Start = sqlx::query_as(Start::SQL).fetch_one(&mut *tx).await?;
    let head = start.head()?;
    let mut book = Book {
        now_us: clock_us.max(head.sealed_at_us),
        ..Book::default()
    };
    let mut wanted = Wanted {
        no_news: !start.has_news,
        ..Wanted::default()
    };
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
    owners(tx, &mut wanted, &mut book).await?;
    scales(tx, &wanted, commands, &mut book).await?;
    memory(tx, &wanted, &mut book).await?;
    if start.has_limits {
        limits::load(tx, commands, &mut book).await?;
    }
    Ok((book, head))
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
            .bind(ids(&missing))
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
    .bind(super::ids(ids))
    .fetch_all(tx)
    .await?;
    keep::operations(book, found)
}

async fn operations_by_other(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    let keys: Vec<_> = wanted.operation_keys.keys().collect();
    let found = BY_KEY
        .fetch(tx, &keys, |(user, key, scope), row| {
            row.put(user.shared());
            row.put(key.shared());
            row.put(*scope);
        })
        .await?;
    keep::operations(book, found)?;
    let references: Vec<_> = wanted.references.keys().collect();
    let found = BY_REFERENCE
        .fetch(tx, &references, |(reference, kind), row| {
            row.put(reference.shared());
            row.put(*kind);
        })
        .await?;
    keep::operations(book, found)?;
    if !wanted.tx_hashes.is_empty() {
        let found: Vec<OperationRow> = sqlx::query_as(
            "SELECT * FROM operations WHERE tx_hash IN (SELECT value FROM json_each($1)) ORDER BY created_at_us, operation_id",
        )
        .bind(ids(&wanted.tx_hashes))
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
        .bind(ids(&of))
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
            .bind(ids(keys))
            .fetch_all(&mut *tx)
            .await?;
        keep::subaccounts(book, found);
    }
    Ok(())
}

/// Accounts and users, where a sub-account or an account may have to be made; whoever has the sub-account has them too.
async fn owners(
    tx: &mut SqliteConnection,
    wanted: &mut Wanted,
    book: &mut Book,
) -> Result<(), Error> {
    wanted.add_owners(|id| book.subaccounts.get(id).is_some());
    if !wanted.account_ids.is_empty() {
        let found: Vec<AccountRow> = sqlx::query_as(
            "SELECT * FROM accounts WHERE account_id IN (SELECT value FROM json_each($1))",
        )
        .bind(ids(&wanted.account_ids))
        .fetch_all(&mut *tx)
        .await?;
        keep::accounts(book, found)?;
    }
    if !wanted.user_ids.is_empty() {
        let found: Vec<(String, bool)> = sqlx::query_as(
            "SELECT user_id, blocked FROM users WHERE user_id IN (SELECT value FROM json_each($1))",
        )
        .bind(ids(&wanted.user_ids))
        .fetch_all(tx)
        .await?;
        keep::users(book, found);
    }
    Ok(())
}

/// Decimals of instruments, where a sub-account may have to be made or decimals may be bound.
async fn scales(
    tx: &mut SqliteConnection,
    wanted: &Wanted,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let instruments = keep::instruments(wanted, commands, book);
    if instruments.is_empty() {
        return Ok(());
    }
    let found: Vec<(String, u8)> = sqlx::query_as(
        "SELECT instrument_id, decimals FROM instruments WHERE instrument_id IN (SELECT value FROM json_each($1))",
    )
    .bind(ids(&instruments))
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
    let keys: Vec<_> = wanted.answer_keys.keys().collect();
    let found: Vec<AnswerRow> = ANSWERS
        .fetch(tx, &keys, |(user, key, call), row| {
            row.put(user.shared());
            row.put(key.shared());
            row.put(*call);
        })
        .await?;
    keep::answers(book, found)
}

/// What the ledger remembers beside its rows: source positions, parked news.
async fn memory(tx: &mut SqliteConnection, wanted: &Wanted, book: &mut Book) -> Result<(), Error> {
    if !wanted.sources.is_empty() {
        let found: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT source, first_sequence, through_sequence, digest FROM sources WHERE source IN (SELECT value FROM json_each($1))",
        )
        .bind(ids(&wanted.sources))
        .fetch_all(&mut *tx)
        .await?;
        keep::sources(book, found);
    }
    if !wanted.parked.is_empty() {
        let found: Vec<ParkedRow> = sqlx::query_as(
            "SELECT * FROM parked WHERE match_key IN (SELECT value FROM json_each($1))",
        )
        .bind(ids(&wanted.parked))
        .fetch_all(tx)
        .await?;
        for row in found {
            book.parked.load(row.match_key.as_str().into(), row.into());
        }
    }
    Ok(())
}
