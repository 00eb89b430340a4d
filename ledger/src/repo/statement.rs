//! History of a sub-account: versions by time, and postings as lines of a statement.
//!
//! Versions of a sub-account are gapless, and the times of its postings never decrease because the
//! ledger's time is monotonic. A version is therefore found by binary search over the time: some
//! twenty lookups in a million postings, without an index on time.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Encode, Executor, FromRow, IntoArguments, Pool, Type};
use types::Minor;

use super::{dialect::Dialect, rows};
use crate::{
    Error,
    model::{Id, OperationType, SubAccount},
};

/// A posting as seen from one of its sub-accounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub version: u64,
    pub posting_id: String,
    pub operation_id: String,
    pub kind: OperationType,
    pub counterparty: Id,
    /// Negative for a debit.
    pub amount: Minor,
    pub balance: Minor,
    pub created_at_us: i64,
}

events::row! {
    pub struct LineRow {
        version: i64,
        posting_id: String,
        operation_id: String,
        kind: i32,
        counterparty: String,
        amount: i64,
        balance: i64,
        created_at_us: i64,
    }
}

/// Reads of the history of sub-accounts.
#[async_trait]
pub trait History {
    /// The last version whose posting is at or before `at_us`; 0 if there is none.
    async fn version_through(&self, of: &SubAccount, at_us: i64) -> Result<u64, Error>;
    /// Balance after a version; zero for version 0.
    async fn balance_at(&self, of: &SubAccount, version: u64) -> Result<Minor, Error>;
    /// Sum of the credits of the versions after `from` through `to`, in minor units.
    async fn credited(&self, of: &SubAccount, from: u64, to: u64) -> Result<i128, Error>;
    /// The postings of the versions after `from` through `to`, in order, at most `limit`.
    async fn lines(
        &self,
        of: &SubAccount,
        from: u64,
        to: u64,
        limit: i64,
    ) -> Result<Vec<Line>, Error>;
}

#[async_trait]
impl<DB> History for Pool<DB>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
    for<'r> (Option<i64>, Option<i64>, i64): FromRow<'r, DB::Row>,
    for<'r> LineRow: FromRow<'r, DB::Row>,
{
    async fn version_through(&self, of: &SubAccount, at_us: i64) -> Result<u64, Error> {
        let mut reader = self.acquire().await?;
        version_through::<DB>(&mut reader, of, at_us).await
    }

    async fn balance_at(&self, of: &SubAccount, version: u64) -> Result<Minor, Error> {
        if version == 0 {
            return Ok(Minor::ZERO);
        }
        let sql = format!(
            "{} SELECT CASE WHEN is_debit THEN debit_balance_after ELSE credit_balance_after END FROM entries",
            DB::ENTRIES
        );
        let found: Option<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(&*of.terms.subaccount_id)
            .bind(version.cast_signed() - 1)
            .bind(version.cast_signed())
            .fetch_optional(self)
            .await?;
        found.map(Minor).ok_or_else(|| missing(of, version))
    }

    async fn credited(&self, of: &SubAccount, from: u64, to: u64) -> Result<i128, Error> {
        let sql = format!(
            "{} SELECT CAST(SUM(CASE WHEN NOT is_debit THEN amount >> 32 END) AS BIGINT), \
             CAST(SUM(CASE WHEN NOT is_debit THEN amount & 4294967295 END) AS BIGINT), COUNT(*) FROM entries",
            DB::ENTRIES
        );
        let (high, low, count): (Option<i64>, Option<i64>, i64) =
            sqlx::query_as(AssertSqlSafe(sql))
                .bind(&*of.terms.subaccount_id)
                .bind(from.cast_signed())
                .bind(to.cast_signed())
                .fetch_one(self)
                .await?;
        check_complete(of, from, to, count)?;
        Ok(rows::wide(high.unwrap_or(0), low.unwrap_or(0)))
    }

    async fn lines(
        &self,
        of: &SubAccount,
        from: u64,
        to: u64,
        limit: i64,
    ) -> Result<Vec<Line>, Error> {
        // Reads at most `limit` versions.
        let to = to.min(from.saturating_add(limit.unsigned_abs()));
        let sql = format!(
            "{} SELECT e.version, e.posting_id, e.operation_id, o.kind, \
             CASE WHEN e.is_debit THEN e.credit_subaccount_id ELSE e.debit_subaccount_id END AS counterparty, \
             CASE WHEN e.is_debit THEN -e.amount ELSE e.amount END AS amount, \
             CASE WHEN e.is_debit THEN e.debit_balance_after ELSE e.credit_balance_after END AS balance, \
             e.created_at_us \
             FROM entries e JOIN operations o ON o.operation_id = e.operation_id ORDER BY e.version",
            DB::ENTRIES
        );
        let found: Vec<LineRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(&*of.terms.subaccount_id)
            .bind(from.cast_signed())
            .bind(to.cast_signed())
            .fetch_all(self)
            .await?;
        check_complete(of, from, to, found.len() as i64)?;
        found.into_iter().map(Line::try_from).collect()
    }
}

impl TryFrom<LineRow> for Line {
    type Error = Error;

    fn try_from(row: LineRow) -> Result<Self, Error> {
        Ok(Line {
            version: row.version.unsigned_abs(),
            kind: OperationType::from_code(row.kind)
                .ok_or_else(|| rows::corrupt("operation", &row.operation_id))?,
            posting_id: row.posting_id,
            operation_id: row.operation_id,
            counterparty: row.counterparty.into(),
            amount: Minor(row.amount),
            balance: Minor(row.balance),
            created_at_us: row.created_at_us,
        })
    }
}

/// As [`History::version_through`], on a given connection.
pub async fn version_through<DB>(
    reader: &mut DB::Connection,
    of: &SubAccount,
    at_us: i64,
) -> Result<u64, Error>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
{
    let mut search = VersionSearch::through(of.version);
    while let Some(version) = search.next_probe() {
        let then_us = time_of::<DB>(&mut *reader, of, version).await?;
        search.narrow(version, then_us <= at_us);
    }
    Ok(search.result())
}

/// Binary search for the last version at or before a time.
struct VersionSearch {
    /// Versions through this one are at or before the time.
    low: u64,
    /// Versions after this one are later.
    high: u64,
    /// Distance of the next probe from the end. Most queries are for recent times, so the search
    /// starts at the end and its steps grow.
    step: u64,
}

impl VersionSearch {
    /// Searches the versions through `version`.
    fn through(version: u64) -> Self {
        VersionSearch {
            low: 0,
            high: version,
            step: 64,
        }
    }

    /// The next version whose time is needed; `None` when the search is done.
    fn next_probe(&self) -> Option<u64> {
        let left = self.high - self.low;
        match left {
            0 => None,
            _ if left > self.step => Some(self.aligned(self.high - self.step)),
            _ => Some(self.aligned(self.low + left.div_ceil(2))),
        }
    }

    /// Rounds down to an indexed version, from which SQLite follows no links
    /// ([`Dialect::ENTRIES`]). Returns `version` itself if that is not after `low`.
    fn aligned(&self, version: u64) -> u64 {
        let near = version & !31;
        if near > self.low { near } else { version }
    }

    /// Records whether the posting of `version` is at or before the time.
    fn narrow(&mut self, version: u64, is_through: bool) {
        if is_through {
            self.low = version;
            self.step = u64::MAX;
        } else {
            self.high = version - 1;
            self.step = self.step.saturating_mul(4);
        }
    }

    fn result(&self) -> u64 {
        self.low
    }
}

/// Statement for the time of the posting that produced a version, in microseconds. `$1`:
/// sub-account, `$2`: the previous version, `$3`: the version.
fn time_sql<DB: Dialect>() -> String {
    format!("{} SELECT created_at_us FROM entries", DB::ENTRIES)
}

async fn time_of<DB>(
    reader: &mut DB::Connection,
    of: &SubAccount,
    version: u64,
) -> Result<i64, Error>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
{
    sqlx::query_scalar::<DB, i64>(AssertSqlSafe(time_sql::<DB>()))
        .bind(&*of.terms.subaccount_id)
        .bind(version.cast_signed() - 1)
        .bind(version.cast_signed())
        .fetch_optional(reader)
        .await?
        .ok_or_else(|| missing(of, version))
}

/// Fails if postings are missing. Versions are gapless, so fewer postings than versions mean a
/// corrupt row.
fn check_complete(of: &SubAccount, from: u64, to: u64, found: i64) -> Result<(), Error> {
    if found.unsigned_abs() == to.saturating_sub(from) {
        Ok(())
    } else {
        Err(missing(of, to.saturating_sub(found.unsigned_abs())))
    }
}

/// The error of a version without a posting.
fn missing(of: &SubAccount, version: u64) -> Error {
    let what = format!("posting of version {version} of sub-account");
    rows::corrupt(&what, &of.terms.subaccount_id)
}
