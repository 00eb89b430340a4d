//! Reads of the `verify` module: rows over one connection in one read-only transaction, which is a
//! snapshot even beside a running node. Every result is a page of bounded size. The same statements
//! for both databases, except for [`Dialect`].

use std::collections::HashMap;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Connection, Database, Encode, Executor, FromRow, IntoArguments, Type};

use super::{
    audit::{SealedOperation, SealedPosting},
    dialect::Dialect,
    rows,
};
use crate::Error;

/// Rows per page.
const PAGE: i64 = 1_000;

events::row! {
    pub struct BlockRow {
        pub block: i64,
        pub previous_hash: Vec<u8>,
        pub hash: Vec<u8>,
        pub operations: i64,
        pub postings: i64,
        pub sealed_at_us: i64,
    }
}

events::row! {
    /// The posting that made a version of a sub-account, for comparison with the next one.
    pub struct Predecessor {
        pub balance: i64,
        pub block: Option<i64>,
        pub place: Option<i64>,
        pub ordinal: i32,
    }
}

events::row! {
    /// A sub-account, with the sums of its postings and holds.
    pub struct SubAccountState {
        pub subaccount_id: String,
        pub balance: i64,
        pub held: i64,
        pub unsettled: i64,
        pub version: i64,
        last_version: i64,
        last_balance: i64,
        held_high: i64,
        held_low: i64,
        pending_high: i64,
        pending_low: i64,
    }
}

impl SubAccountState {
    /// Version and balance of the last posting.
    pub fn last_posting(&self) -> (i64, i64) {
        (self.last_version, self.last_balance)
    }

    pub fn active_holds(&self) -> i128 {
        rows::wide(self.held_high, self.held_low)
    }

    /// Unsettled credits of open operations.
    pub fn pending(&self) -> i128 {
        rows::wide(self.pending_high, self.pending_low)
    }
}

events::row! {
    /// A hold, with the sum of the postings that name it.
    pub struct HoldState {
        pub hold_id: String,
        pub amount: i64,
        pub remaining: i64,
        pub split_off: i64,
        pub consumed: i64,
        pub released: i64,
        pub returned_by_children: i64,
        pub status: i32,
        pub destination_subaccount_id: Option<String>,
        paid_high: i64,
        paid_low: i64,
    }
}

impl HoldState {
    pub fn paid(&self) -> i128 {
        rows::wide(self.paid_high, self.paid_low)
    }
}

/// (operation, posting, sub-account); the first two are empty for a link of the sub-account itself.
pub type LooseLink = (Option<String>, Option<String>, String);

/// A snapshot of all rows of a ledger.
#[async_trait]
pub trait Evidence: Send {
    /// Blocks after `after`.
    async fn blocks(&mut self, after: i64) -> Result<Vec<BlockRow>, Error>;
    /// Sealed operations after `after`, through block `through`, each with its postings.
    async fn operations(
        &mut self,
        after: (i64, i64),
        through: i64,
    ) -> Result<Vec<(SealedOperation, Vec<SealedPosting>)>, Error>;
    /// The posting that made `version`.
    async fn predecessor(
        &mut self,
        subaccount_id: &str,
        version: i64,
    ) -> Result<Option<Predecessor>, Error>;
    /// The first operation whose block does not exist, with that block.
    async fn loose_operation(&mut self) -> Result<Option<(String, Option<i64>)>, Error>;
    /// The first posting without its operation, sub-accounts or hold: (operation, posting, missing
    /// row).
    async fn loose_posting(&mut self) -> Result<Option<(String, String, String)>, Error>;
    /// Sub-accounts after `after`.
    async fn subaccounts(&mut self, after: &str) -> Result<Vec<SubAccountState>, Error>;
    /// The first posting or sub-account whose link does not name the previous posting: (operation,
    /// posting, sub-account).
    async fn loose_link(&mut self) -> Result<Option<LooseLink>, Error>;
    /// The first operation missing from the list of its user: (operation, user).
    async fn unlisted_operation(&mut self) -> Result<Option<(String, String)>, Error>;
    /// Sums once, into temporary tables, the postings per hold and the unsettled credits per
    /// sub-account, and finds the last posting of each sub-account, for [`Self::subaccounts`] and
    /// [`Self::holds`].
    async fn sum_aside(&mut self) -> Result<(), Error>;
    /// Holds after `after`.
    async fn holds(&mut self, after: &str) -> Result<Vec<HoldState>, Error>;
    /// Sum of all balances per instrument, in minor units.
    async fn sums(&mut self) -> Result<Vec<(String, i128)>, Error>;

    async fn close(self: Box<Self>) -> Result<(), Error>;
}

/// [`Evidence`] over a connection inside its transaction, with the temporary tables of [`ASIDE`].
pub struct Reader<DB: Database>(pub DB::Connection);

/// Created before the transaction begins, since that may be read-only.
pub const ASIDE: [&str; 3] = [
    "CREATE TEMPORARY TABLE newest (subaccount_id TEXT PRIMARY KEY, version BIGINT NOT NULL, balance BIGINT NOT NULL)",
    "CREATE TEMPORARY TABLE paid (hold_id TEXT PRIMARY KEY, high BIGINT NOT NULL, low BIGINT NOT NULL)",
    "CREATE TEMPORARY TABLE pending (subaccount_id TEXT PRIMARY KEY, high BIGINT NOT NULL, low BIGINT NOT NULL)",
];

impl<DB> Reader<DB>
where
    DB: Database,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> SealedPosting: FromRow<'r, DB::Row>,
{
    /// The postings of a page of operations, ordered within each operation.
    async fn postings_of(
        &mut self,
        after: (i64, i64),
        operations: &[SealedOperation],
    ) -> Result<HashMap<String, Vec<SealedPosting>>, Error> {
        let mut by_operation = HashMap::<String, Vec<SealedPosting>>::new();
        let Some(last) = operations.last() else {
            return Ok(by_operation);
        };
        let sql = format!(
            "SELECT {} FROM operations o JOIN postings p ON p.operation_id = o.operation_id \
             WHERE (o.block, o.place) > ($1, $2) AND (o.block, o.place) <= ($3, $4) \
             ORDER BY o.block, o.place, p.ordinal",
            SealedPosting::COLUMNS
        );
        let found: Vec<SealedPosting> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(after.0)
            .bind(after.1)
            .bind(last.block.unwrap_or(i64::MAX))
            .bind(last.place.unwrap_or(i64::MAX))
            .fetch_all(&mut self.0)
            .await?;
        for posting in found {
            by_operation
                .entry(posting.operation_id.clone())
                .or_default()
                .push(posting);
        }
        Ok(by_operation)
    }
}

#[async_trait]
impl<DB> Evidence for Reader<DB>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> BlockRow: FromRow<'r, DB::Row>,
    for<'r> SealedOperation: FromRow<'r, DB::Row>,
    for<'r> SealedPosting: FromRow<'r, DB::Row>,
    for<'r> Predecessor: FromRow<'r, DB::Row>,
    for<'r> (String, Option<i64>): FromRow<'r, DB::Row>,
    for<'r> (String, String, String): FromRow<'r, DB::Row>,
    for<'r> LooseLink: FromRow<'r, DB::Row>,
    for<'r> (String, String): FromRow<'r, DB::Row>,
    for<'r> SubAccountState: FromRow<'r, DB::Row>,
    for<'r> HoldState: FromRow<'r, DB::Row>,
    for<'r> (String, i64, i64): FromRow<'r, DB::Row>,
{
    async fn blocks(&mut self, after: i64) -> Result<Vec<BlockRow>, Error> {
        Ok(sqlx::query_as(
            "SELECT block, previous_hash, hash, operations, postings, sealed_at_us FROM audit_blocks \
             WHERE block > $1 ORDER BY block LIMIT $2",
        )
        .bind(after)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn operations(
        &mut self,
        after: (i64, i64),
        through: i64,
    ) -> Result<Vec<(SealedOperation, Vec<SealedPosting>)>, Error> {
        let sql = format!(
            "SELECT {} FROM operations o WHERE (o.block, o.place) > ($1, $2) AND o.block <= $3 \
             ORDER BY o.block, o.place LIMIT $4",
            SealedOperation::COLUMNS
        );
        let found: Vec<SealedOperation> = sqlx::query_as(AssertSqlSafe(sql))
            .bind(after.0)
            .bind(after.1)
            .bind(through)
            .bind(PAGE)
            .fetch_all(&mut self.0)
            .await?;
        let mut postings = self.postings_of(after, &found).await?;
        Ok(found
            .into_iter()
            .map(|operation| {
                let own = postings.remove(&operation.operation_id).unwrap_or_default();
                (operation, own)
            })
            .collect())
    }

    async fn predecessor(
        &mut self,
        subaccount_id: &str,
        version: i64,
    ) -> Result<Option<Predecessor>, Error> {
        let sql = format!(
            "{} SELECT CASE WHEN e.is_debit THEN e.debit_balance_after ELSE e.credit_balance_after END AS balance, \
             o.block, o.place, e.ordinal \
             FROM entries e LEFT JOIN operations o ON o.operation_id = e.operation_id",
            DB::ENTRIES
        );
        Ok(sqlx::query_as(AssertSqlSafe(sql))
            .bind(subaccount_id)
            .bind(version - 1)
            .bind(version)
            .fetch_optional(&mut self.0)
            .await?)
    }

    async fn loose_operation(&mut self) -> Result<Option<(String, Option<i64>)>, Error> {
        Ok(sqlx::query_as(
            "SELECT o.operation_id, o.block FROM operations o \
             WHERE o.block IS NULL OR o.block < 1 OR o.block > (SELECT MAX(block) FROM audit_blocks) \
             ORDER BY o.created_at_us, o.operation_id LIMIT 1",
        )
        .fetch_optional(&mut self.0)
        .await?)
    }

    async fn loose_posting(&mut self) -> Result<Option<(String, String, String)>, Error> {
        Ok(sqlx::query_as(
            "SELECT p.operation_id, p.posting_id, CASE WHEN o.operation_id IS NULL THEN 'operation' \
             WHEN d.subaccount_id IS NULL THEN p.debit_subaccount_id \
             WHEN c.subaccount_id IS NULL THEN p.credit_subaccount_id \
             ELSE p.hold_id END \
             FROM postings p LEFT JOIN operations o ON o.operation_id = p.operation_id \
             LEFT JOIN sub_accounts d ON d.subaccount_id = p.debit_subaccount_id \
             LEFT JOIN sub_accounts c ON c.subaccount_id = p.credit_subaccount_id \
             LEFT JOIN holds h ON h.hold_id = p.hold_id \
             WHERE o.operation_id IS NULL OR d.subaccount_id IS NULL OR c.subaccount_id IS NULL \
             OR (p.hold_id IS NOT NULL AND h.hold_id IS NULL) \
             ORDER BY p.created_at_us, p.operation_id, p.ordinal LIMIT 1",
        )
        .fetch_optional(&mut self.0)
        .await?)
    }

    async fn loose_link(&mut self) -> Result<Option<LooseLink>, Error> {
        match DB::LOOSE_LINK {
            Some(sql) => Ok(sqlx::query_as(sql).fetch_optional(&mut self.0).await?),
            None => Ok(None),
        }
    }

    async fn unlisted_operation(&mut self) -> Result<Option<(String, String)>, Error> {
        match DB::UNLISTED {
            Some(sql) => Ok(sqlx::query_as(sql).fetch_optional(&mut self.0).await?),
            None => Ok(None),
        }
    }

    async fn subaccounts(&mut self, after: &str) -> Result<Vec<SubAccountState>, Error> {
        Ok(sqlx::query_as(
            "SELECT s.subaccount_id, s.balance, s.held, s.unsettled, s.version, \
             COALESCE(n.version, 0) AS last_version, COALESCE(n.balance, 0) AS last_balance, \
             COALESCE((SELECT CAST(SUM(h.remaining >> 32) AS BIGINT) FROM holds h \
             WHERE h.subaccount_id = s.subaccount_id AND h.status = 1), 0) AS held_high, \
             COALESCE((SELECT CAST(SUM(h.remaining & 4294967295) AS BIGINT) FROM holds h \
             WHERE h.subaccount_id = s.subaccount_id AND h.status = 1), 0) AS held_low, \
             COALESCE(u.high, 0) AS pending_high, COALESCE(u.low, 0) AS pending_low \
             FROM sub_accounts s LEFT JOIN pending u ON u.subaccount_id = s.subaccount_id \
             LEFT JOIN newest n ON n.subaccount_id = s.subaccount_id WHERE s.subaccount_id > $1 \
             ORDER BY s.subaccount_id LIMIT $2",
        )
        .bind(after)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn sum_aside(&mut self) -> Result<(), Error> {
        sqlx::query(DB::NEWEST).execute(&mut self.0).await?;
        sqlx::query(
            "INSERT INTO paid SELECT hold_id, CAST(SUM(amount >> 32) AS BIGINT), \
             CAST(SUM(amount & 4294967295) AS BIGINT) FROM postings \
             WHERE hold_id IS NOT NULL GROUP BY hold_id",
        )
        .execute(&mut self.0)
        .await?;
        // Open operations: PROCESSING, ONCHAIN_SUBMITTED, SETTLED.
        sqlx::query(
            "INSERT INTO pending SELECT p.credit_subaccount_id, CAST(SUM(p.amount >> 32) AS BIGINT), \
             CAST(SUM(p.amount & 4294967295) AS BIGINT) \
             FROM postings p JOIN operations o ON o.operation_id = p.operation_id \
             WHERE p.unsettled AND o.status IN (5, 6, 10) GROUP BY p.credit_subaccount_id",
        )
        .execute(&mut self.0)
        .await?;
        Ok(())
    }

    async fn holds(&mut self, after: &str) -> Result<Vec<HoldState>, Error> {
        Ok(sqlx::query_as(
            "SELECT h.hold_id, h.amount, h.remaining, h.split_off, h.consumed, h.released, h.returned_by_children, \
             h.status, h.destination_subaccount_id, COALESCE(p.high, 0) AS paid_high, COALESCE(p.low, 0) AS paid_low \
             FROM holds h LEFT JOIN paid p ON p.hold_id = h.hold_id WHERE h.hold_id > $1 ORDER BY h.hold_id LIMIT $2",
        )
        .bind(after)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn sums(&mut self) -> Result<Vec<(String, i128)>, Error> {
        let found: Vec<(String, i64, i64)> = sqlx::query_as(
            "SELECT instrument_id, CAST(SUM(balance >> 32) AS BIGINT), CAST(SUM(balance & 4294967295) AS BIGINT) \
             FROM sub_accounts \
             GROUP BY instrument_id ORDER BY instrument_id",
        )
        .fetch_all(&mut self.0)
        .await?;
        Ok(found
            .into_iter()
            .map(|(id, high, low)| (id, rows::wide(high, low)))
            .collect())
    }

    async fn close(self: Box<Self>) -> Result<(), Error> {
        Ok(self.0.close().await?)
    }
}
