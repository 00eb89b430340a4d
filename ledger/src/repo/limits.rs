//! Velocity limits: their rows, and the usage of each as a sum of postings.
//!
//! Cost of a group while limits exist: one statement for the limits. On SQLite one statement per
//! limit and affected sub-account, which follows the links from the last posting back to the
//! window's start. On PostgreSQL at most one statement per limit; for each sub-account with at
//! least [`SEARCH_POSTINGS_MIN`] postings one more per step of the binary search for the window's
//! start. Without limits: none. Known limitation: a limit on every user costs thousands of
//! statements in a group of thousands of accounts.

use std::collections::BTreeSet;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Database, Encode, Executor, FromRow, IntoArguments, Pool, Type};
use types::Minor;

use super::{dialect::Dialect, read::PageBound, rows, statement};
use crate::{
    Error,
    book::Book,
    fold::{Command, CommandKind, ReadSet},
    limit::{OperationTypes, Side, VelocityLimit},
    model::{AccountType, Id, SubAccount},
    names::SubAccountName,
};

pub const SELECT_LIMITS: &str = "SELECT l.*, COALESCE(i.decimals, 0) AS decimals FROM velocity_limits l \
     LEFT JOIN instruments i ON i.instrument_id = l.instrument_id";

/// Postings from which the window's start is searched; with fewer all of them are read.
const SEARCH_POSTINGS_MIN: u64 = 64;

events::row! {
    /// A velocity limit. Also its format in a stored answer.
    #[derive(serde::Serialize, serde::Deserialize)]
    pub struct LimitRow {
        pub limit_id: String,
        pub user_id: String,
        pub account_kind: i32,
        pub instrument_id: String,
        pub(super) decimals: u8 as i32,
        pub side: i32,
        pub window_s: i64,
        pub amount: i64,
        pub kinds: i64,
        pub created_at_us: i64,
        pub updated_at_us: i64,
    }
}

impl TryFrom<LimitRow> for VelocityLimit {
    type Error = Error;

    fn try_from(row: LimitRow) -> Result<Self, Error> {
        Ok(VelocityLimit {
            side: Side::from_code(row.side)
                .ok_or_else(|| rows::corrupt("velocity limit", &row.limit_id))?,
            limit_id: row.limit_id.into(),
            user_id: row.user_id.into(),
            account_kind: AccountType::from_code(row.account_kind),
            instrument_id: row.instrument_id.into(),
            decimals: row.decimals,
            window_s: row.window_s,
            amount: Minor(row.amount),
            kinds: OperationTypes(row.kinds),
            created_at_us: row.created_at_us,
            updated_at_us: row.updated_at_us,
        })
    }
}

impl From<&VelocityLimit> for LimitRow {
    fn from(limit: &VelocityLimit) -> Self {
        LimitRow {
            limit_id: limit.limit_id.to_string(),
            user_id: limit.user_id.to_string(),
            account_kind: limit.account_kind.map_or(0, AccountType::code),
            instrument_id: limit.instrument_id.to_string(),
            decimals: limit.decimals,
            side: limit.side.code(),
            window_s: limit.window_s,
            amount: limit.amount.0,
            kinds: limit.kinds.0,
            created_at_us: limit.created_at_us,
            updated_at_us: limit.updated_at_us,
        }
    }
}

/// Reads of velocity limits.
#[async_trait]
pub trait Limits {
    /// Limits of an instrument that apply to a user, including those of every user, newest first.
    /// An empty text matches everything.
    async fn limits(
        &self,
        user_id: &str,
        instrument_id: &str,
        bound: PageBound<'_>,
    ) -> Result<Vec<VelocityLimit>, Error>;
}

#[async_trait]
impl<DB> Limits for Pool<DB>
where
    DB: Database,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> LimitRow: FromRow<'r, DB::Row>,
{
    async fn limits(
        &self,
        user_id: &str,
        instrument_id: &str,
        bound: PageBound<'_>,
    ) -> Result<Vec<VelocityLimit>, Error> {
        let sql = format!(
            "{SELECT_LIMITS} WHERE (l.created_at_us, l.limit_id) < ($1, $2) \
             AND ($3 = '' OR l.user_id = $3 OR l.user_id = '') \
             AND ($4 = '' OR l.instrument_id = $4) ORDER BY l.created_at_us DESC, l.limit_id DESC LIMIT $5"
        );
        let found: Vec<LimitRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(bound.created_at_us)
            .bind(bound.id)
            .bind(user_id)
            .bind(instrument_id)
            .bind(bound.limit)
            .fetch_all(self)
            .await?;
        found.into_iter().map(VelocityLimit::try_from).collect()
    }
}

/// Scope of the limits to read: rows of the working set, and rows that its commands may create.
pub struct LimitScope {
    pub instruments: BTreeSet<Id>,
    pub users: BTreeSet<Id>,
    /// Limits named by commands.
    pub named: BTreeSet<Id>,
}

impl LimitScope {
    pub fn of(commands: &[&Command], book: &Book) -> Self {
        let mut read_set = ReadSet::default();
        let mut named = BTreeSet::new();
        for command in commands {
            read_set.add(command);
            match &command.kind {
                CommandKind::SetLimit { limit, .. } => named.insert(limit.limit_id.clone()),
                CommandKind::RemoveLimit { limit_id, .. } => named.insert(limit_id.clone()),
                _ => false,
            };
        }
        let mut scope = LimitScope {
            instruments: book.scales.keys().cloned().collect(),
            users: book.users.keys().cloned().collect(),
            named,
        };
        for row in book.subaccounts.values() {
            scope.instruments.insert(row.terms.instrument_id.clone());
            scope.users.insert(row.terms.user_id.clone());
        }
        for name in (read_set.subaccount_ids.iter()).filter_map(|id| SubAccountName::parse(id)) {
            scope.instruments.insert(name.instrument_id.into());
            scope.users.insert(name.user_id.into());
        }
        scope
    }
}

/// The sub-accounts of the working set in the scope of a limit.
pub fn limited_subaccounts<'a>(
    limit: &'a VelocityLimit,
    book: &'a Book,
) -> impl Iterator<Item = &'a SubAccount> {
    (book.subaccounts.values()).filter(|row| limit.applies_to(&row.terms.subaccount_id))
}

/// True if all postings are read, without a search for the window's start.
pub fn is_small(of: &SubAccount) -> bool {
    of.version < SEARCH_POSTINGS_MIN
}

/// The sub-accounts of [`limited_subaccounts`], each with a version at or before the window's
/// start. The sum itself selects postings by time.
pub async fn window_starts<DB>(
    tx: &mut DB::Connection,
    limit: &VelocityLimit,
    book: &Book,
) -> Result<Vec<(Id, i64)>, Error>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
{
    let rows: Vec<&SubAccount> = limited_subaccounts(limit, book).collect();
    let since_us = limit.since_us(book.now_us);
    let mut starts = Vec::with_capacity(rows.len());
    for row in rows {
        let from = if is_small(row) {
            0
        } else {
            statement::version_through::<DB>(tx, row, since_us).await?
        };
        starts.push((row.terms.subaccount_id.clone(), from.cast_signed()));
    }
    Ok(starts)
}

/// PostgreSQL statement for the usage of a window per sub-account, in minor units and two halves.
/// No row means zero. `$1`: start of the window, `$2`: operation types. `from_sql` joins the
/// sub-accounts with their postings; `SIDE` in it is replaced by the side's column prefix.
pub fn usage_sql(side: Side, from_sql: &str) -> String {
    let column = match side {
        Side::Debit => "debit",
        Side::Credit => "credit",
    };
    let from = from_sql.replace("SIDE", column);
    format!(
        "SELECT p.{column}_subaccount_id, CAST(SUM(p.amount >> 32) AS BIGINT), \
         CAST(SUM(p.amount & 4294967295) AS BIGINT) FROM {from} \
         JOIN operations o ON o.operation_id = p.operation_id \
         WHERE p.created_at_us > $1 AND o.reverses IS NULL AND o.reversed_by IS NULL \
         AND ($2 = 0 OR (($2 >> o.kind) & 1) = 1) \
         GROUP BY p.{column}_subaccount_id"
    )
}

/// Loads a limit and its usage into the working set.
pub fn load_limit(book: &mut Book, limit: VelocityLimit, used: Vec<(String, i64, i64)>) {
    for (subaccount_id, high, low) in used {
        book.used.load(
            (limit.limit_id.clone(), subaccount_id.into()),
            rows::wide(high, low),
        );
    }
    book.limits.load(limit.limit_id.clone(), limit);
}
