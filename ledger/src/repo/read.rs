//! Reads of committed rows, newest first, paged by key. Both databases use the same statements,
//! except for [`Dialect`].

use async_trait::async_trait;
use sqlx::{
    AssertSqlSafe, Database, Encode, Executor, FromRow, IntoArguments, Pool, QueryBuilder, Type,
};

use super::{
    audit::{LAST_RECORD, RecordFilter, RecordRow},
    dialect::Dialect,
    limits::Limits,
    rows::{self, AccountRow, HoldRow, OperationRow, PostingRow, SubAccountRow},
    statement::History,
};
use crate::{
    Error,
    model::{
        Account, Hold, HoldStatus, Id, Operation, OperationStatus, OperationType, Posting,
        SubAccount,
    },
};

/// A page of a list, newest first: at most `limit` rows strictly before this position.
pub struct PageBound<'a> {
    pub created_at_us: i64,
    pub id: &'a str,
    pub limit: i64,
}

/// Empty fields match everything.
pub struct SubAccountFilter<'a> {
    pub user_id: &'a str,
    pub instrument_id: &'a str,
    pub subaccount_ids: &'a [String],
}

/// Empty text and `None` match everything.
#[derive(Default)]
pub struct OperationFilter<'a> {
    pub user_id: &'a str,
    pub kind: Option<OperationType>,
    pub status: Option<OperationStatus>,
    pub idempotency_key: &'a str,
}

/// Empty text and `None` match everything.
#[derive(Default)]
pub struct HoldFilter<'a> {
    pub subaccount_id: &'a str,
    pub status: Option<HoldStatus>,
    pub owner: &'a str,
    pub parent_hold_id: &'a str,
    pub user_id: &'a str,
}

/// Sums of one instrument, in minor units.
#[derive(Debug, PartialEq, Eq)]
pub struct TrialBalance {
    pub instrument_id: String,
    pub decimals: u8,
    /// Over all sub-accounts; zero unless the ledger is corrupt.
    pub total: i128,
    pub reserve: i128,
    pub unsettled: i128,
    /// Remainder of active holds.
    pub active_holds: i128,
}

/// Number and hash of a block or an audit record.
pub type ChainEnd = (i64, Vec<u8>);

/// The reads of the storage contract.
#[async_trait]
pub trait Reads: History + Limits + Send + Sync {
    async fn account(&self, account_id: &str) -> Result<Option<Account>, Error>;
    async fn accounts(&self, user_id: &str, bound: PageBound<'_>) -> Result<Vec<Account>, Error>;
    async fn subaccount(&self, subaccount_id: &str) -> Result<Option<SubAccount>, Error>;
    async fn subaccounts(
        &self,
        filter: &SubAccountFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<SubAccount>, Error>;
    async fn operation(&self, operation_id: &str) -> Result<Option<Operation>, Error>;
    async fn postings(&self, operation_id: &str) -> Result<Vec<Posting>, Error>;
    async fn operations(
        &self,
        filter: &OperationFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<Operation>, Error>;
    async fn hold(&self, hold_id: &str) -> Result<Option<Hold>, Error>;
    async fn holds(
        &self,
        filter: &HoldFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<Hold>, Error>;
    /// Active holds that are due, in order of expiry, at most `limit`.
    async fn holds_due(&self, now_us: i64, limit: i64) -> Result<Vec<Id>, Error>;
    async fn holds_active(&self) -> Result<i64, Error>;
    /// Time of the last block in microseconds; 0 without a block.
    async fn last_sealed_us(&self) -> Result<i64, Error>;
    /// Number and hash of the last block, and of the last audit record, if there is one.
    async fn chain_head(&self) -> Result<(ChainEnd, Option<ChainEnd>), Error>;
    /// Last applied sequence of a source; 0 if none.
    async fn source_position(&self, source: &str) -> Result<u64, Error>;
    /// Sums per instrument, in one snapshot. An empty id selects all instruments.
    async fn trial_balance(&self, instrument_id: &str) -> Result<Vec<TrialBalance>, Error>;
    /// True if operations exist but no block. Every group that creates operations writes a block,
    /// so the blocks were deleted or another program wrote the operations.
    async fn is_audit_chain_missing(&self) -> Result<bool, Error>;
    /// Audit records with a sequence below `before`, newest first.
    async fn audit_records(
        &self,
        filter: &RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, Error>;
}

/// Columns of the trial balance. A sum is read as two 32-bit halves, which cannot overflow.
type TrialRow = (String, i32, i64, i64, i64, i64, i64, i64, i64, i64);

#[async_trait]
impl<DB> Reads for Pool<DB>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i32: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> (i64,): FromRow<'r, DB::Row>,
    for<'r> (String,): FromRow<'r, DB::Row>,
    for<'r> AccountRow: FromRow<'r, DB::Row>,
    for<'r> SubAccountRow: FromRow<'r, DB::Row>,
    for<'r> OperationRow: FromRow<'r, DB::Row>,
    for<'r> PostingRow: FromRow<'r, DB::Row>,
    for<'r> HoldRow: FromRow<'r, DB::Row>,
    for<'r> TrialRow: FromRow<'r, DB::Row>,
    for<'r> (bool,): FromRow<'r, DB::Row>,
    for<'r> RecordRow: FromRow<'r, DB::Row>,
    for<'r> ChainEnd: FromRow<'r, DB::Row>,
    Pool<DB>: History + Limits,
{
    async fn account(&self, account_id: &str) -> Result<Option<Account>, Error> {
        sqlx::query_as::<_, AccountRow>("SELECT * FROM accounts WHERE account_id = $1")
            .bind(account_id)
            .fetch_optional(self)
            .await?
            .map(Account::try_from)
            .transpose()
    }

    async fn accounts(&self, user_id: &str, bound: PageBound<'_>) -> Result<Vec<Account>, Error> {
        let mut query =
            QueryBuilder::new("SELECT * FROM accounts WHERE (created_at_us, account_id) < (");
        push_bound(&mut query, &bound);
        push_filter(&mut query, "user_id", user_id);
        push_order(&mut query, "account_id", &bound);
        let found: Vec<AccountRow> = query.build_query_as().fetch_all(self).await?;
        found.into_iter().map(Account::try_from).collect()
    }

    async fn subaccount(&self, subaccount_id: &str) -> Result<Option<SubAccount>, Error> {
        let sql = format!("{} WHERE s.subaccount_id = $1", rows::SUB_ACCOUNT);
        let found: Option<SubAccountRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(subaccount_id)
            .fetch_optional(self)
            .await?;
        Ok(found.map(SubAccount::from))
    }

    async fn subaccounts(
        &self,
        filter: &SubAccountFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<SubAccount>, Error> {
        let mut query = QueryBuilder::new(rows::SUB_ACCOUNT);
        query.push(" WHERE (s.created_at_us, s.subaccount_id) < (");
        push_bound(&mut query, &bound);
        push_filter(&mut query, "s.user_id", filter.user_id);
        push_filter(&mut query, "s.instrument_id", filter.instrument_id);
        if !filter.subaccount_ids.is_empty() {
            let (before, after) = DB::IN_LIST;
            query.push(" AND s.subaccount_id ").push(before);
            query.push_bind(serde_json::json!(filter.subaccount_ids).to_string());
            query.push(after);
        }
        query.push(" ORDER BY s.created_at_us DESC, s.subaccount_id DESC LIMIT ");
        query.push_bind(bound.limit);
        let found: Vec<SubAccountRow> = query.build_query_as().fetch_all(self).await?;
        Ok(found.into_iter().map(SubAccount::from).collect())
    }

    async fn operation(&self, operation_id: &str) -> Result<Option<Operation>, Error> {
        sqlx::query_as::<_, OperationRow>("SELECT * FROM operations WHERE operation_id = $1")
            .bind(operation_id)
            .fetch_optional(self)
            .await?
            .map(Operation::try_from)
            .transpose()
    }

    async fn postings(&self, operation_id: &str) -> Result<Vec<Posting>, Error> {
        let sql = format!(
            "{} WHERE p.operation_id = $1 ORDER BY p.ordinal",
            rows::POSTING
        );
        let found: Vec<PostingRow> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(operation_id)
            .fetch_all(self)
            .await?;
        Ok(found.into_iter().map(Posting::from).collect())
    }

    async fn operations(
        &self,
        filter: &OperationFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<Operation>, Error> {
        let mut query = QueryBuilder::new("");
        let narrow = |query: &mut QueryBuilder<DB>, of: &str| {
            query.push(format!("({of}.created_at_us, {of}.operation_id) < ("));
            push_bound(query, &bound);
            push_filter(query, "o.user_id", filter.user_id);
            push_filter(query, "o.idempotency_key", filter.idempotency_key);
            push_code_filter(query, "o.kind", filter.kind.map(OperationType::code));
            push_code_filter(query, "o.status", filter.status.map(OperationStatus::code));
            query.push(format!(
                " ORDER BY {of}.created_at_us DESC, {of}.operation_id DESC LIMIT "
            ));
            query.push_bind(bound.limit);
        };
        // The index on the key selects few operations even without the user.
        if filter.user_id.is_empty() || !filter.idempotency_key.is_empty() {
            query.push("SELECT o.* FROM operations o WHERE ");
            narrow(&mut query, "o");
        } else {
            let mut between = "SELECT * FROM (";
            for (find, of) in DB::OPERATIONS_OF_USER {
                query.push(between);
                query.push(find);
                query.push_bind(filter.user_id.to_owned());
                query.push(" AND ");
                narrow(&mut query, of);
                query.push(") f");
                between = " UNION ALL SELECT * FROM (";
            }
            push_order(&mut query, "operation_id", &bound);
        }
        let found: Vec<OperationRow> = query.build_query_as().fetch_all(self).await?;
        found.into_iter().map(Operation::try_from).collect()
    }

    async fn hold(&self, hold_id: &str) -> Result<Option<Hold>, Error> {
        let sql = format!("{} WHERE h.hold_id = $1", rows::HOLD);
        sqlx::query_as::<_, HoldRow>(AssertSqlSafe(sql))
            .bind(hold_id)
            .fetch_optional(self)
            .await?
            .map(Hold::try_from)
            .transpose()
    }

    async fn holds(
        &self,
        filter: &HoldFilter<'_>,
        bound: PageBound<'_>,
    ) -> Result<Vec<Hold>, Error> {
        let mut query = QueryBuilder::new(rows::HOLD);
        query.push(" WHERE (h.created_at_us, h.hold_id) < (");
        push_bound(&mut query, &bound);
        // A parent selects fewer holds than its sub-account, and both fewer than the user. `|| ''`
        // prevents the use of an index on the column.
        let has_parent = !filter.parent_hold_id.is_empty();
        let subaccount_id = match has_parent {
            true => "h.subaccount_id || ''",
            false => "h.subaccount_id",
        };
        push_filter(&mut query, subaccount_id, filter.subaccount_id);
        push_filter(&mut query, "h.owner", filter.owner);
        push_filter(&mut query, "h.parent_hold_id", filter.parent_hold_id);
        let user_id = match has_parent || !filter.subaccount_id.is_empty() {
            true => "h.user_id || ''",
            false => "h.user_id",
        };
        push_filter(&mut query, user_id, filter.user_id);
        match filter.status {
            // A literal: a bound value does not match the partial indexes of active holds.
            Some(HoldStatus::Active) => {
                query.push(" AND h.status = 1");
            }
            status => push_code_filter(&mut query, "h.status", status.map(HoldStatus::code)),
        }
        query.push(" ORDER BY h.created_at_us DESC, h.hold_id DESC LIMIT ");
        query.push_bind(bound.limit);
        let found: Vec<HoldRow> = query.build_query_as().fetch_all(self).await?;
        found.into_iter().map(Hold::try_from).collect()
    }

    async fn holds_due(&self, now_us: i64, limit: i64) -> Result<Vec<Id>, Error> {
        let found: Vec<String> = sqlx::query_scalar(
            "SELECT hold_id FROM holds WHERE status = 1 AND expires_at_us IS NOT NULL AND expires_at_us <= $1 \
             ORDER BY expires_at_us LIMIT $2",
        )
        .bind(now_us)
        .bind(limit)
        .fetch_all(self)
        .await?;
        Ok(found.into_iter().map(Id::from).collect())
    }

    async fn holds_active(&self) -> Result<i64, Error> {
        Ok(
            sqlx::query_scalar("SELECT COUNT(*) FROM holds WHERE status = 1")
                .fetch_one(self)
                .await?,
        )
    }

    async fn last_sealed_us(&self) -> Result<i64, Error> {
        let sql = "SELECT sealed_at_us FROM audit_blocks ORDER BY block DESC LIMIT 1";
        let found = sqlx::query_scalar(sql).fetch_optional(self).await?;
        Ok(found.unwrap_or(0))
    }

    async fn chain_head(&self) -> Result<(ChainEnd, Option<ChainEnd>), Error> {
        let block = "SELECT block, hash FROM audit_blocks WHERE block = (SELECT MAX(block) FROM audit_blocks)";
        let block: ChainEnd = sqlx::query_as(block).fetch_one(self).await?;
        let record = sqlx::query_as(LAST_RECORD).fetch_optional(self).await?;
        Ok((block, record))
    }

    async fn source_position(&self, source: &str) -> Result<u64, Error> {
        let found: Option<i64> =
            sqlx::query_scalar("SELECT through_sequence FROM sources WHERE source = $1")
                .bind(source)
                .fetch_optional(self)
                .await?;
        Ok(found.unwrap_or(0).unsigned_abs())
    }

    async fn trial_balance(&self, instrument_id: &str) -> Result<Vec<TrialBalance>, Error> {
        let found: Vec<TrialRow> = sqlx::query_as(
            "SELECT s.instrument_id, COALESCE(MAX(i.decimals), 0), \
             CAST(SUM(s.balance >> 32) AS BIGINT), CAST(SUM(s.balance & 4294967295) AS BIGINT), \
             CAST(SUM(CASE WHEN s.subaccount_id LIKE 'system:reserve:%' THEN s.balance >> 32 ELSE 0 END) AS BIGINT), \
             CAST(SUM(CASE WHEN s.subaccount_id LIKE 'system:reserve:%' THEN s.balance & 4294967295 ELSE 0 END) \
             AS BIGINT), \
             CAST(SUM(s.unsettled >> 32) AS BIGINT), CAST(SUM(s.unsettled & 4294967295) AS BIGINT), \
             COALESCE((SELECT CAST(SUM(h.remaining >> 32) AS BIGINT) FROM holds h \
             WHERE h.status = 1 AND h.instrument_id = s.instrument_id), 0), \
             COALESCE((SELECT CAST(SUM(h.remaining & 4294967295) AS BIGINT) FROM holds h \
             WHERE h.status = 1 AND h.instrument_id = s.instrument_id), 0) \
             FROM sub_accounts s LEFT JOIN instruments i ON i.instrument_id = s.instrument_id \
             WHERE $1 = '' OR s.instrument_id = $1 GROUP BY s.instrument_id ORDER BY s.instrument_id",
        )
        .bind(instrument_id)
        .fetch_all(self)
        .await?;
        Ok(found
            .into_iter()
            .map(|row| TrialBalance {
                instrument_id: row.0,
                decimals: u8::try_from(row.1).unwrap_or(u8::MAX),
                total: rows::wide(row.2, row.3),
                reserve: rows::wide(row.4, row.5),
                unsettled: rows::wide(row.6, row.7),
                active_holds: rows::wide(row.8, row.9),
            })
            .collect())
    }

    async fn is_audit_chain_missing(&self) -> Result<bool, Error> {
        Ok(sqlx::query_scalar::<DB, bool>(
            "SELECT EXISTS (SELECT 1 FROM operations) AND NOT EXISTS (SELECT 1 FROM audit_blocks WHERE block > 0)",
        )
        .fetch_one(self)
        .await?)
    }

    async fn audit_records(
        &self,
        filter: &RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, Error> {
        let mut query = QueryBuilder::<DB>::new("SELECT * FROM audit_records WHERE sequence < ");
        query.push_bind(before);
        push_filter(&mut query, "object_id", filter.object_id);
        push_filter(&mut query, "actor", filter.actor);
        query.push(" ORDER BY sequence DESC LIMIT ");
        query.push_bind(limit);
        Ok(query.build_query_as().fetch_all(self).await?)
    }
}

fn push_bound<DB: Database>(query: &mut QueryBuilder<DB>, bound: &PageBound<'_>)
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
{
    query.push_bind(bound.created_at_us);
    query.push(", ");
    query.push_bind(bound.id.to_owned());
    query.push(")");
}

fn push_order<DB: Database>(query: &mut QueryBuilder<DB>, id: &str, bound: &PageBound<'_>)
where
    for<'q> i64: Encode<'q, DB> + Type<DB>,
{
    query.push(format!(" ORDER BY created_at_us DESC, {id} DESC LIMIT "));
    query.push_bind(bound.limit);
}

fn push_filter<DB: Database>(query: &mut QueryBuilder<DB>, column: &str, value: &str)
where
    for<'q> String: Encode<'q, DB> + Type<DB>,
{
    if !value.is_empty() {
        query.push(format!(" AND {column} = "));
        query.push_bind(value.to_owned());
    }
}

fn push_code_filter<DB: Database>(query: &mut QueryBuilder<DB>, column: &str, value: Option<i32>)
where
    for<'q> i32: Encode<'q, DB> + Type<DB>,
{
    if let Some(value) = value {
        query.push(format!(" AND {column} = "));
        query.push_bind(value);
    }
}
