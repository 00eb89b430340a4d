//! Locks and reads the working set of a group.
//!
//! Lock order of every group: source positions, sub-accounts (one statement, sorted), users, named
//! limits, parked notices. At READ COMMITTED each statement sees the rows committed before it
//! began. Rows read after the locks are therefore current, and stay current until the commit.
//! - A hold or an operation changes only under the locks of its sub-accounts. They are found before
//!   the locks, from columns that never change, and checked again under the locks.
//! - A new sub-account starts frozen if its user is blocked. The lock on the user excludes a
//!   concurrent block.
//! - A notice is parked if its operation does not exist, and looked up when an operation is
//!   created. Of two such groups one must see the other, so both lock the hash of the key. Groups
//!   that create operations lock it shared and do not exclude each other.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, FromRow, PgConnection, Row};

use super::limits;
use crate::{
    Error,
    book::Book,
    fold::{Command, CommandKind, ReadSet},
    model::Id,
    repo::{
        audit::Start,
        load,
        rows::{
            AccountRow, AnswerRow, HOLD, HoldRow, OperationRow, POSTING, PendingReceiptRow,
            PostingRow, SubAccountRow,
        },
    },
};

/// Loads a hold, its parent and its grandparent. Callers create no deeper chain.
const PARENT_ROUNDS: usize = 3;
/// Rounds of locking rows that other ledgers committed meanwhile, before the group is retried.
const LOCK_ROUNDS: usize = 4;

/// Condition that operation `o` has the key `j`, written so that only the index on keys matches.
/// With `o.user_id = j.user_id` the planner may use the index on the user and read all operations
/// of the user for each key.
const HAS_KEY: &str = "o.idempotency_key = j.key \
     AND (o.user_id, o.scope) >= (j.user_id, j.scope) AND (o.user_id, o.scope) <= (j.user_id, j.scope)";

pub fn texts<'a>(ids: impl IntoIterator<Item = &'a Id>) -> Vec<&'a str> {
    ids.into_iter().map(|id| &**id).collect()
}

/// Locks and loads all rows that these commands can touch.
///
/// # Errors
/// [`Error::Conflict`]: other ledgers committed new rows in every round. [`Error::Store`],
/// [`Error::Invariant`].
pub async fn load(
    tx: &mut PgConnection,
    commands: &[&Command],
    clock_us: i64,
) -> Result<Book, Error> {
    let mut named = ReadSet::default();
    for command in commands {
        named.add(command);
    }
    lock_sources(tx, &named).await?;
    let mut to_lock: BTreeSet<Id> = named.subaccount_ids.iter().cloned().collect();
    subaccounts_of_holds(tx, &named, &mut to_lock).await?;
    if commands.iter().any(|command| changes_operations(command)) {
        subaccounts_of_operations(tx, &named, &mut to_lock).await?;
    }
    let mut locked = Locked::default();
    locked.add(tx, &to_lock, &named.whole_users).await?;
    // These may have to be created, including the destination of a hold.
    named.subaccount_ids.extend(to_lock);
    named.add_owners(|id| locked.has(id));
    lock_users(tx, &named, &locked).await?;
    limits::lock(tx, commands).await?;
    // Read after the locks: no posting of these sub-accounts has a later time than this group.
    let mut started = lock_notices(tx, commands, &named).await?;
    for _ in 0..LOCK_ROUNDS {
        let now_us = clock_us.max(started.start.head()?.sealed_at_us);
        let (mut read_set, mut book) = read(tx, &started, commands, now_us).await?;
        load::subaccounts(&mut book, locked.rows.values().cloned().collect());
        let missing = missing(tx, &read_set, &book, &locked).await?;
        if missing.is_empty() {
            read_set.add_owners(|id| book.subaccounts.get(id).is_some());
            owners(tx, &read_set, &mut book).await?;
            scales(tx, &read_set, commands, &mut book).await?;
            if started.start.has_limits {
                limits::load(tx, commands, &mut book).await?;
            }
            return Ok(book);
        }
        locked.add(tx, &missing, &BTreeSet::new()).await?;
        started = GroupStart {
            start: sqlx::query_as(Start::SQL).fetch_one(&mut *tx).await?,
            has_operations: true,
            has_answers: true,
        };
    }
    Err(Error::Conflict)
}

/// State that a group reads after it has its locks.
struct GroupStart {
    start: Start,
    /// False if no operation has one of the commands' keys.
    has_operations: bool,
    /// False if no stored answer has one of the commands' keys.
    has_answers: bool,
}

impl FromRow<'_, PgRow> for GroupStart {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            start: Start::from_row(row)?,
            has_operations: row.try_get("has_operations")?,
            has_answers: row.try_get("has_answers")?,
        })
    }
}

/// Locked sub-accounts.
#[derive(Default)]
struct Locked {
    requested: BTreeSet<Id>,
    rows: BTreeMap<Id, SubAccountRow>,
}

impl Locked {
    async fn add(
        &mut self,
        tx: &mut PgConnection,
        ids: &BTreeSet<Id>,
        whole_users: &BTreeSet<Id>,
    ) -> Result<(), Error> {
        self.requested.extend(ids.iter().cloned());
        let sql = "SELECT (found.sub_account).*, found.decimals FROM locked_sub_accounts($1, $2) AS found";
        let found: Vec<SubAccountRow> = sqlx::query_as(sql)
            .bind(texts(ids))
            .bind(texts(whole_users))
            .fetch_all(tx)
            .await?;
        let found = found.into_iter().map(|row| (Id::from(row.id()), row));
        self.rows.extend(found);
        Ok(())
    }

    fn has(&self, id: &Id) -> bool {
        self.rows.contains_key(id)
    }
}

/// True for commands that change existing operations.
fn changes_operations(command: &Command) -> bool {
    match &command.kind {
        CommandKind::Post(batch) => batch.from_event,
        CommandKind::Finalize { .. }
        | CommandKind::Confirm { .. }
        | CommandKind::Receipt { .. }
        | CommandKind::Reverse { .. } => true,
        _ => false,
    }
}

async fn lock_sources(tx: &mut PgConnection, read_set: &ReadSet) -> Result<(), Error> {
    if !read_set.sources.is_empty() {
        sqlx::query("SELECT 1 FROM sources WHERE source = ANY($1) ORDER BY source FOR UPDATE")
            .bind(texts(&read_set.sources))
            .execute(tx)
            .await?;
    }
    Ok(())
}

async fn subaccounts_of_holds(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    to_lock: &mut BTreeSet<Id>,
) -> Result<(), Error> {
    if read_set.hold_ids.is_empty() {
        return Ok(());
    }
    let found: Vec<(String, Option<String>)> = sqlx::query_as(
        "WITH RECURSIVE chain AS ( \
         SELECT hold_id, subaccount_id, destination_subaccount_id, parent_hold_id FROM holds WHERE hold_id = ANY($1) \
         UNION SELECT h.hold_id, h.subaccount_id, h.destination_subaccount_id, h.parent_hold_id \
         FROM chain c JOIN holds h ON h.hold_id = c.parent_hold_id) \
         SELECT subaccount_id, destination_subaccount_id FROM chain",
    )
    .bind(texts(&read_set.hold_ids))
    .fetch_all(tx)
    .await?;
    for (subaccount_id, destination) in found {
        to_lock.insert(subaccount_id.into());
        to_lock.extend(destination.map(Id::from));
    }
    Ok(())
}

async fn subaccounts_of_operations(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    to_lock: &mut BTreeSet<Id>,
) -> Result<(), Error> {
    let (users, keys, scopes) = columns(&read_set.operation_keys);
    let (references, kinds) = references(read_set);
    let sql = format!(
        "SELECT DISTINCT p.debit_subaccount_id, p.credit_subaccount_id FROM ( \
         SELECT operation_id FROM operations WHERE operation_id = ANY($1) \
         UNION SELECT operation_id FROM operations WHERE tx_hash = ANY($2) AND status NOT IN (7, 8, 9, 12) \
         UNION SELECT o.operation_id FROM UNNEST($3::text[], $4::text[], $5::int[]) AS j (user_id, key, scope) \
         JOIN operations o ON {HAS_KEY} \
         UNION SELECT o.operation_id FROM UNNEST($6::text[], $7::int[]) AS j (reference, kind) \
         JOIN operations o ON o.external_ref = j.reference AND o.kind = j.kind \
         ) o JOIN postings p ON p.operation_id = o.operation_id",
    );
    let found: Vec<(String, String)> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(texts(&read_set.operation_ids))
        .bind(texts(&read_set.tx_hashes))
        .bind(users)
        .bind(keys)
        .bind(scopes)
        .bind(references)
        .bind(kinds)
        .fetch_all(tx)
        .await?;
    for (debit, credit) in found {
        to_lock.insert(debit.into());
        to_lock.insert(credit.into());
    }
    Ok(())
}

/// Locks users. Blocking a user and creating a sub-account exclude each other; two creations do
/// not.
async fn lock_users(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    locked: &Locked,
) -> Result<(), Error> {
    let how = if !read_set.whole_users.is_empty() {
        "UPDATE"
    } else if read_set.subaccount_ids.iter().any(|id| !locked.has(id)) {
        "SHARE"
    } else {
        return Ok(());
    };
    let sql = format!("SELECT 1 FROM users WHERE user_id = ANY($1) ORDER BY user_id FOR {how}");
    sqlx::query(AssertSqlSafe(sql))
        .bind(texts(&read_set.user_ids))
        .execute(tx)
        .await?;
    Ok(())
}

/// Locks the notices about the operations of these commands, then reads the start of the group.
/// Commands that create operations lock shared; finality notices lock exclusively.
async fn lock_notices(
    tx: &mut PgConnection,
    commands: &[&Command],
    named: &ReadSet,
) -> Result<GroupStart, Error> {
    let (mut creators, mut notices) = (ReadSet::default(), ReadSet::default());
    for command in commands {
        match &command.kind {
            CommandKind::Confirm { .. } | CommandKind::Receipt { .. } => notices.add(command),
            _ => creators.add(command),
        }
    }
    let (operation_users, operation_keys, scopes) = columns(&named.operation_keys);
    let (answer_users, answer_keys, calls) = columns(&named.answer_keys);
    let sql = "SELECT * FROM start_behind_news($1, $2, $3, $4, $5, $6, $7, $8)";
    Ok(sqlx::query_as(sql)
        .bind(texts(&creators.pending_receipts))
        .bind(texts(&notices.pending_receipts))
        .bind(operation_users)
        .bind(operation_keys)
        .bind(scopes)
        .bind(answer_users)
        .bind(answer_keys)
        .bind(calls)
        .fetch_one(tx)
        .await?)
}

/// Reads all rows that the fold depends on, except sub-accounts and their owners.
async fn read(
    tx: &mut PgConnection,
    started: &GroupStart,
    commands: &[&Command],
    now_us: i64,
) -> Result<(ReadSet, Book), Error> {
    let mut book = Book::at(now_us);
    let mut read_set = ReadSet {
        // No notice can be parked for an operation created here: that needs an exclusive lock.
        no_notices: !started.start.has_news,
        no_named_notices: !started.start.has_news,
        ..ReadSet::default()
    };
    for command in commands {
        read_set.add(command);
    }
    // Keys that `lock_notices` found to be new need no lookup.
    let absent = |keys: &[Key], has: bool| if has { 0 } else { keys.len() };
    let absent_operations = absent(&read_set.operation_keys, started.has_operations);
    let absent_answers = absent(&read_set.answer_keys, started.has_answers);
    holds(tx, &mut read_set, &mut book).await?;
    operations_by_id(tx, &read_set.operation_ids, &mut book).await?;
    for command in commands {
        read_set.add_dependent(
            command,
            |id| book.holds.get(id).cloned(),
            |id| book.operations.get(id).cloned(),
        );
    }
    let answered = answers(tx, &read_set.answer_keys[absent_answers..], &mut book).await?;
    operations_by_id(tx, &answered, &mut book).await?;
    operations_by_key(tx, &read_set.operation_keys[absent_operations..], &mut book).await?;
    operations_by_other(tx, &read_set, &mut book).await?;
    postings(tx, &mut read_set, &mut book).await?;
    sources_and_notices(tx, &read_set, &mut book).await?;
    Ok((read_set, book))
}

/// Sub-accounts that are not locked yet, because other ledgers committed them, or rows that name
/// them, before this group had its locks.
async fn missing(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    book: &Book,
    locked: &Locked,
) -> Result<BTreeSet<Id>, Error> {
    let mut missing: BTreeSet<Id> = read_set
        .subaccount_ids
        .iter()
        .filter(|id| !locked.requested.contains(*id))
        .cloned()
        .collect();
    let of_holds = book.holds.values().map(|hold| &hold.terms.subaccount_id);
    let of_postings = book
        .postings
        .values()
        .flatten()
        .flat_map(|posting| [&posting.debit_subaccount_id, &posting.credit_subaccount_id]);
    for id in of_holds.chain(of_postings) {
        if book.subaccounts.get(id).is_none() {
            missing.insert(id.clone());
        }
    }
    if !read_set.whole_users.is_empty() {
        // No other sub-account of these users can be created while the users are locked.
        let found: Vec<String> =
            sqlx::query_scalar("SELECT subaccount_id FROM sub_accounts WHERE user_id = ANY($1)")
                .bind(texts(&read_set.whole_users))
                .fetch_all(tx)
                .await?;
        let unknown = found.into_iter().map(Id::from);
        missing.extend(unknown.filter(|id| book.subaccounts.get(id).is_none()));
    }
    Ok(missing)
}

async fn holds(
    tx: &mut PgConnection,
    read_set: &mut ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    let mut requested = BTreeSet::new();
    for _ in 0..PARENT_ROUNDS {
        let missing: Vec<Id> = read_set.hold_ids.difference(&requested).cloned().collect();
        if missing.is_empty() {
            break;
        }
        let found: Vec<HoldRow> =
            sqlx::query_as(AssertSqlSafe(format!("{HOLD} WHERE h.hold_id = ANY($1)")))
                .bind(texts(&missing))
                .fetch_all(&mut *tx)
                .await?;
        load::holds(read_set, book, found)?;
        requested.extend(missing);
    }
    Ok(())
}

async fn operations_by_id(
    tx: &mut PgConnection,
    ids: &BTreeSet<Id>,
    book: &mut Book,
) -> Result<(), Error> {
    if ids.is_empty() {
        return Ok(());
    }
    let found: Vec<OperationRow> =
        sqlx::query_as("SELECT * FROM operations WHERE operation_id = ANY($1)")
            .bind(texts(ids))
            .fetch_all(tx)
            .await?;
    load::operations(book, found)
}

/// (user, key, scope or call)
type Key = (Id, Id, i32);

fn columns(keys: &[Key]) -> (Vec<&str>, Vec<&str>, Vec<i32>) {
    let (users, rest): (Vec<&str>, Vec<(&str, i32)>) = (keys.iter())
        .map(|(user, key, number)| (&**user, (&**key, *number)))
        .unzip();
    let (keys, numbers) = rest.into_iter().unzip();
    (users, keys, numbers)
}

fn references(read_set: &ReadSet) -> (Vec<&str>, Vec<i32>) {
    let keys = read_set.references.keys();
    keys.map(|(reference, kind)| (&**reference, *kind)).unzip()
}

async fn operations_by_key(
    tx: &mut PgConnection,
    keys: &[Key],
    book: &mut Book,
) -> Result<(), Error> {
    if keys.is_empty() {
        return Ok(());
    }
    let (users, keys, scopes) = columns(keys);
    let sql = format!(
        "SELECT o.* FROM UNNEST($1::text[], $2::text[], $3::int[]) AS j (user_id, key, scope) \
         JOIN operations o ON {HAS_KEY}"
    );
    let found: Vec<OperationRow> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(users)
        .bind(keys)
        .bind(scopes)
        .fetch_all(tx)
        .await?;
    load::operations(book, found)
}

async fn operations_by_other(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    if !read_set.references.is_empty() {
        let (references, kinds) = references(read_set);
        let found: Vec<OperationRow> = sqlx::query_as(
            "SELECT o.* FROM UNNEST($1::text[], $2::int[]) AS j (reference, kind) JOIN operations o \
             ON o.external_ref = j.reference AND o.kind = j.kind",
        )
        .bind(references)
        .bind(kinds)
        .fetch_all(&mut *tx)
        .await?;
        load::operations(book, found)?;
    }
    if !read_set.tx_hashes.is_empty() {
        let found: Vec<OperationRow> = sqlx::query_as(
            // Open ones: a receipt does not change an operation that has ended.
            "SELECT * FROM operations WHERE tx_hash = ANY($1) AND status NOT IN (7, 8, 9, 12) \
             ORDER BY created_at_us, operation_id",
        )
        .bind(texts(&read_set.tx_hashes))
        .fetch_all(tx)
        .await?;
        load::operations(book, found)?;
    }
    Ok(())
}

/// Loads the postings of every loaded operation, for its answer, reversal and unsettled credits.
async fn postings(
    tx: &mut PgConnection,
    read_set: &mut ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    let of: Vec<String> = book
        .operations
        .values()
        .map(|operation| operation.terms.operation_id.to_string())
        .collect();
    if of.is_empty() {
        return Ok(());
    }
    let sql =
        format!("{POSTING} WHERE p.operation_id = ANY($1) ORDER BY p.operation_id, p.ordinal");
    let found: Vec<PostingRow> = sqlx::query_as(AssertSqlSafe(sql))
        .bind(of)
        .fetch_all(tx)
        .await?;
    load::postings(read_set, book, found);
    Ok(())
}

async fn owners(tx: &mut PgConnection, read_set: &ReadSet, book: &mut Book) -> Result<(), Error> {
    if !read_set.account_ids.is_empty() {
        let found: Vec<AccountRow> =
            sqlx::query_as("SELECT * FROM accounts WHERE account_id = ANY($1)")
                .bind(texts(&read_set.account_ids))
                .fetch_all(&mut *tx)
                .await?;
        load::accounts(book, found)?;
    }
    if !read_set.user_ids.is_empty() {
        let found: Vec<(String, bool)> =
            sqlx::query_as("SELECT user_id, blocked FROM users WHERE user_id = ANY($1)")
                .bind(texts(&read_set.user_ids))
                .fetch_all(tx)
                .await?;
        load::users(book, found);
    }
    Ok(())
}

async fn scales(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    commands: &[&Command],
    book: &mut Book,
) -> Result<(), Error> {
    let instruments = load::instruments(read_set, commands, book);
    if instruments.is_empty() {
        return Ok(());
    }
    let found: Vec<(String, i32)> = sqlx::query_as(
        "SELECT instrument_id, decimals FROM instruments WHERE instrument_id = ANY($1)",
    )
    .bind(texts(&instruments))
    .fetch_all(tx)
    .await?;
    for (instrument_id, decimals) in found {
        let decimals = u8::try_from(decimals).map_err(|_| {
            Error::Invariant(format!("corrupt decimals of instrument {instrument_id}"))
        })?;
        book.scales.load(instrument_id.into(), decimals);
    }
    Ok(())
}

/// Loads stored answers. Returns the operations to which they refer.
async fn answers(
    tx: &mut PgConnection,
    keys: &[Key],
    book: &mut Book,
) -> Result<BTreeSet<Id>, Error> {
    if keys.is_empty() {
        return Ok(BTreeSet::new());
    }
    let (users, keys, calls) = columns(keys);
    let found: Vec<AnswerRow> = sqlx::query_as(
        "SELECT a.call, a.user_id, a.idempotency_key, a.digest, a.outcome \
         FROM UNNEST($1::text[], $2::text[], $3::int[]) AS j (user_id, key, call) JOIN answers a \
         ON a.user_id = j.user_id AND a.idempotency_key = j.key AND a.call = j.call",
    )
    .bind(users)
    .bind(keys)
    .bind(calls)
    .fetch_all(tx)
    .await?;
    load::answers(book, found)
}

/// Loads source positions and parked notices.
async fn sources_and_notices(
    tx: &mut PgConnection,
    read_set: &ReadSet,
    book: &mut Book,
) -> Result<(), Error> {
    if !read_set.sources.is_empty() {
        let found: Vec<(String, i64, i64, i64)> = sqlx::query_as(
            "SELECT source, first_sequence, through_sequence, digest FROM sources WHERE source = ANY($1)",
        )
        .bind(texts(&read_set.sources))
        .fetch_all(&mut *tx)
        .await?;
        load::sources(book, found);
    }
    if !read_set.pending_receipts.is_empty() {
        let found: Vec<PendingReceiptRow> =
            sqlx::query_as("SELECT * FROM parked WHERE match_key = ANY($1)")
                .bind(texts(&read_set.pending_receipts))
                .fetch_all(tx)
                .await?;
        for row in found {
            book.pending_receipts
                .load(row.match_key.as_str().into(), row.into());
        }
    }
    Ok(())
}
