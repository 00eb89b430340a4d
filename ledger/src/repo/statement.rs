//! What a sub-account was: its versions by time, and its postings as a statement shows them.
//!
//! Versions of a sub-account are gapless and its postings' times never fall (the ledger's time stands still rather than go back), so a moment
//! is found by halving: some twenty look-ups by index in a million postings, and no index on time to keep.

use async_trait::async_trait;
use sqlx::{Database, Encode, Executor, FromRow, IntoArguments, Pool, Type};
use types::Minor;

use super::rows;
use crate::{
    Error,
    model::{Id, OperationType, SubAccount},
};

/// A posting as one of its sub-accounts sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub version: u64,
    pub posting_id: String,
    pub operation_id: String,
    pub kind: OperationType,
    pub counterparty: Id,
    /// Negative when debited.
    pub amount: Minor,
    pub balance: Minor,
    pub created_at_us: i64,
}

#[derive(FromRow)]
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

/// What sub-accounts were.
#[async_trait]
pub trait History {
    /// The last version whose posting is at or before the moment; 0 when there is none.
    async fn version_through(&self, of: &SubAccount, at_us: i64) -> Result<u64, Error>;
    /// Running balance after a version; zero before the first one.
    async fn balance_at(&self, of: &SubAccount, version: u64) -> Result<Minor, Error>;
    /// Minor units credited by the versions after `from` through `to`.
    async fn credited(&self, of: &SubAccount, from: u64, to: u64) -> Result<i128, Error>;
    /// The postings of the versions after `from` through `to`, in their order, at most `limit`.
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
    DB: Database,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
    for<'r> (Option<i64>, Option<i64>): FromRow<'r, DB::Row>,
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
        let found: Option<i64> = sqlx::query_scalar(
            "SELECT debit_balance_after FROM postings WHERE debit_subaccount_id = $1 AND debit_version = $2 \
             UNION ALL SELECT credit_balance_after FROM postings WHERE credit_subaccount_id = $1 AND credit_version = $2",
        )
        .bind(&*of.terms.subaccount_id)
        .bind(version as i64)
        .fetch_optional(self)
        .await?;
        found.map(Minor).ok_or_else(|| missing(of, version))
    }

    async fn credited(&self, of: &SubAccount, from: u64, to: u64) -> Result<i128, Error> {
        let (high, low): (Option<i64>, Option<i64>) = sqlx::query_as(
            "SELECT CAST(SUM(amount >> 32) AS BIGINT), CAST(SUM(amount & 4294967295) AS BIGINT) FROM postings \
             WHERE credit_subaccount_id = $1 AND credit_version > $2 AND credit_version <= $3",
        )
        .bind(&*of.terms.subaccount_id)
        .bind(from as i64)
        .bind(to as i64)
        .fetch_one(self)
        .await?;
        Ok(rows::wide(high.unwrap_or(0), low.unwrap_or(0)))
    }

    async fn lines(
        &self,
        of: &SubAccount,
        from: u64,
        to: u64,
        limit: i64,
    ) -> Result<Vec<Line>, Error> {
        // No more versions than lines: neither half reads further than the answer goes.
        let to = to.min(from.saturating_add(limit.unsigned_abs()));
        let found: Vec<LineRow> = sqlx::query_as(
            "SELECT p.debit_version AS version, p.posting_id, p.operation_id, o.kind, p.credit_subaccount_id AS counterparty, \
             -p.amount AS amount, p.debit_balance_after AS balance, p.created_at_us \
             FROM postings p JOIN operations o ON o.operation_id = p.operation_id \
             WHERE p.debit_subaccount_id = $1 AND p.debit_version > $2 AND p.debit_version <= $3 \
             UNION ALL \
             SELECT p.credit_version, p.posting_id, p.operation_id, o.kind, p.debit_subaccount_id, \
             p.amount, p.credit_balance_after, p.created_at_us \
             FROM postings p JOIN operations o ON o.operation_id = p.operation_id \
             WHERE p.credit_subaccount_id = $1 AND p.credit_version > $2 AND p.credit_version <= $3 \
             ORDER BY 1",
        )
        .bind(&*of.terms.subaccount_id)
        .bind(from as i64)
        .bind(to as i64)
        .fetch_all(self)
        .await?;
        found.into_iter().map(Line::try_from).collect()
    }
}

impl TryFrom<LineRow> for Line {
    type Error = Error;

    fn try_from(row: LineRow) -> Result<Self, Error> {
        Ok(Line {
            version: row.version.unsigned_abs(),
            kind: OperationType::from_code(row.kind)
                .ok_or_else(|| rows::broken("operation", &row.operation_id))?,
            posting_id: row.posting_id,
            operation_id: row.operation_id,
            counterparty: row.counterparty.into(),
            amount: Minor(row.amount),
            balance: Minor(row.balance),
            created_at_us: row.created_at_us,
        })
    }
}

/// As [`History::version_through`], over any connection.
pub async fn version_through<DB>(
    reader: &mut DB::Connection,
    of: &SubAccount,
    at_us: i64,
) -> Result<u64, Error>
where
    DB: Database,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
{
    let mut halving = Halving::to(of.version);
    while let Some(version) = halving.asks() {
        let then_us = time_of::<DB>(&mut *reader, of, version).await?;
        halving.hears(version, then_us <= at_us);
    }
    Ok(halving.found())
}

/// The last version at or before a moment, found by asking for the times of some.
pub struct Halving {
    /// Versions up to this one are not later than the moment.
    low: u64,
    /// Versions past this one are.
    high: u64,
    /// Most moments asked about are recent: steps back from the end, each longer than the one before, come first.
    step: u64,
}

impl Halving {
    /// Among the versions up to this one.
    pub fn to(version: u64) -> Self {
        Halving {
            low: 0,
            high: version,
            step: 64,
        }
    }

    /// The version whose time is to be told; `None`: it is found.
    pub fn asks(&self) -> Option<u64> {
        let left = self.high - self.low;
        match left {
            0 => None,
            _ if left > self.step => Some(self.high - self.step),
            _ => Some(self.low + left.div_ceil(2)),
        }
    }

    pub fn hears(&mut self, version: u64, is_through: bool) {
        if is_through {
            self.low = version;
            self.step = u64::MAX;
        } else {
            self.high = version - 1;
            self.step = self.step.saturating_mul(4);
        }
    }

    pub fn found(&self) -> u64 {
        self.low
    }
}

/// Time of the posting that made a version, in microseconds. `$1`: sub-account, `$2`: version.
pub const TIME_OF: &str = "SELECT created_at_us FROM postings WHERE debit_subaccount_id = $1 AND debit_version = $2 \
     UNION ALL SELECT created_at_us FROM postings WHERE credit_subaccount_id = $1 AND credit_version = $2";

async fn time_of<DB>(
    reader: &mut DB::Connection,
    of: &SubAccount,
    version: u64,
) -> Result<i64, Error>
where
    DB: Database,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
{
    sqlx::query_scalar::<DB, i64>(TIME_OF)
        .bind(&*of.terms.subaccount_id)
        .bind(version as i64)
        .fetch_optional(reader)
        .await?
        .ok_or_else(|| missing(of, version))
}

/// A version without its posting.
pub fn missing(of: &SubAccount, version: u64) -> Error {
    let what = format!("posting of version {version} of sub-account");
    rows::broken(&what, &of.terms.subaccount_id)
}
