//! Reads for `verify`. One connection and one read-only transaction: all pages belong to one
//! snapshot while the node keeps writing. Every result is a page of bounded size. Both databases
//! use the same statements, except for [`Dialect`]. A sum is read as two 32-bit halves
//! (`*_sum_high`, `*_sum_low`), which cannot overflow.

use std::collections::HashMap;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Connection, Database, Encode, Executor, FromRow, IntoArguments, Type};

use super::{
    audit::{RecordRow, SealedOperation, SealedPosting},
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
    /// The posting that produced one version of a sub-account.
    pub struct VersionPosting {
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
        held_sum_high: i64,
        held_sum_low: i64,
        unsettled_sum_high: i64,
        unsettled_sum_low: i64,
    }
}

impl SubAccountState {
    /// Version and balance of the last posting.
    pub fn last_posting(&self) -> (i64, i64) {
        (self.last_version, self.last_balance)
    }

    /// Remaining amounts of the active holds.
    pub fn active_holds_total(&self) -> i128 {
        rows::wide(self.held_sum_high, self.held_sum_low)
    }

    /// Unsettled credits of open operations.
    pub fn open_unsettled_total(&self) -> i128 {
        rows::wide(self.unsettled_sum_high, self.unsettled_sum_low)
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
        terms_agree: i32,
        postings_sum_high: i64,
        postings_sum_low: i64,
    }
}

impl HoldState {
    /// Whether user and instrument are those of its sub-account, and the terms of a child those of
    /// its parent.
    pub fn terms_agree(&self) -> bool {
        self.terms_agree == 1
    }

    pub fn postings_total(&self) -> i128 {
        rows::wide(self.postings_sum_high, self.postings_sum_low)
    }
}

events::row! {
    /// A posting of an operation that has a reference.
    pub struct ReferencedRow {
        pub operation_id: String,
        pub kind: i32,
        pub status: i32,
        pub user_id: String,
        pub external_ref: String,
        pub tx_hash: Option<String>,
        pub block: i64,
        pub place: i64,
        pub instrument_id: String,
        pub amount: i64,
    }
}

/// Selects the first operation with a contradiction. Status: 5 PROCESSING, 6 ONCHAIN_SUBMITTED, 7
/// FINALIZED, 9 FAILED, 10 SETTLED. A reversal fails an open operation; a final one stays final.
const CONTRADICTORY_OPERATION: &str = "SELECT operation_id, differs, CAST(status AS BIGINT) FROM (\
     SELECT o.operation_id, o.status, o.created_at_us, CASE \
     WHEN o.status NOT IN (5, 6, 7, 9, 10) THEN 'status that no operation has' \
     WHEN (o.status = 7) <> (o.finalized_at_us IS NOT NULL) THEN 'status and time of finality' \
     WHEN o.finalized_at_us < o.created_at_us THEN 'time of finality before the creation' \
     WHEN o.status = 10 AND o.awaits_chain THEN 'status and chain step' \
     WHEN o.status IN (5, 6) AND NOT o.awaits_chain THEN 'status and chain step' \
     WHEN o.status = 5 AND o.tx_hash IS NOT NULL THEN 'status and transaction' \
     WHEN o.status = 6 AND o.tx_hash IS NULL THEN 'status and transaction' \
     WHEN o.status = 9 AND o.reversed_by IS NULL THEN 'status and reversing operation' \
     WHEN o.status IN (5, 6, 10) AND o.reversed_by IS NOT NULL THEN 'status and reversing operation' \
     WHEN o.reversed_by IS NOT NULL AND (r.reverses IS NULL OR r.reverses <> o.operation_id) \
     THEN 'reversed and reversing operation' \
     WHEN o.reverses IS NOT NULL AND (f.reversed_by IS NULL OR f.reversed_by <> o.operation_id) \
     THEN 'reversed and reversing operation' \
     END AS differs FROM operations o \
     LEFT JOIN operations r ON r.operation_id = o.reversed_by \
     LEFT JOIN operations f ON f.operation_id = o.reverses) checked \
     WHERE differs IS NOT NULL ORDER BY created_at_us, operation_id LIMIT 1";

/// (operation, posting, sub-account). Operation and posting are `None` if the wrong link is
/// `sub_accounts.last_posting`.
pub type BrokenLink = (Option<String>, Option<String>, String);

/// A snapshot of all rows of a ledger.
#[async_trait]
pub trait LedgerSnapshot: Send {
    /// Blocks after `after`.
    async fn blocks(&mut self, after: i64) -> Result<Vec<BlockRow>, Error>;
    /// Sealed operations after position `after` = (block, place), up to block `through`, with their
    /// postings.
    async fn operations(
        &mut self,
        after: (i64, i64),
        through: i64,
    ) -> Result<Vec<(SealedOperation, Vec<SealedPosting>)>, Error>;
    /// The posting that produced `version`.
    async fn version_posting(
        &mut self,
        subaccount_id: &str,
        version: i64,
    ) -> Result<Option<VersionPosting>, Error>;
    /// The first operation without a block, or with a block outside 1 to the last block of
    /// `audit_blocks`: (operation, block).
    async fn operation_without_block(&mut self) -> Result<Option<(String, Option<i64>)>, Error>;
    /// The first operation whose mutable columns contradict one another, or the operation that it
    /// reverses or that reverses it: (operation, what contradicts, status).
    async fn contradictory_operation(&mut self) -> Result<Option<(String, String, i64)>, Error>;
    /// The first posting that references a missing row: (operation, posting, id of the missing
    /// sub-account or hold, or `operation`).
    async fn dangling_posting(&mut self) -> Result<Option<(String, String, String)>, Error>;
    /// Sub-accounts after `after`.
    async fn subaccounts(&mut self, after: &str) -> Result<Vec<SubAccountState>, Error>;
    /// The first posting or sub-account whose link does not name the previous posting: (operation,
    /// posting, sub-account).
    async fn broken_link(&mut self) -> Result<Option<BrokenLink>, Error>;
    /// The first wrong entry of the user index: (operation, user).
    async fn unindexed_operation(&mut self) -> Result<Option<(String, String)>, Error>;
    /// Fills the temporary tables that [`Self::subaccounts`] and [`Self::holds`] join: postings per
    /// hold, unsettled credits per sub-account, last posting per sub-account. The caller runs it
    /// once before them.
    async fn fill_temp_tables(&mut self) -> Result<(), Error>;
    /// Holds after `after`.
    async fn holds(&mut self, after: &str) -> Result<Vec<HoldState>, Error>;
    /// Audit records after `after`.
    async fn audit_records(&mut self, after: i64) -> Result<Vec<RecordRow>, Error>;
    /// Postings of the operations with a reference, of a page of operations after position `after`
    /// = (block, place), in order.
    async fn referenced(&mut self, after: (i64, i64)) -> Result<Vec<ReferencedRow>, Error>;
    /// Operations of a type with one of these references, a JSON array: (reference, operation).
    async fn with_references(
        &mut self,
        kind: i64,
        references: &str,
    ) -> Result<Vec<(String, String)>, Error>;
    /// Sequence through which a source is applied. `None`: the source is unknown.
    async fn applied(&mut self, source: &str) -> Result<Option<i64>, Error>;
    /// Sum of all balances per instrument, in minor units.
    async fn sums(&mut self) -> Result<Vec<(String, i128)>, Error>;

    async fn close(self: Box<Self>) -> Result<(), Error>;
}

/// Implements [`LedgerSnapshot`] on a connection whose transaction is open and whose
/// [`TEMP_TABLES`] exist.
pub struct Reader<DB: Database>(pub DB::Connection);

/// Created before the transaction, because a read-only transaction cannot create tables.
pub const TEMP_TABLES: [&str; 3] = [
    "CREATE TEMPORARY TABLE last_postings (subaccount_id TEXT PRIMARY KEY, version BIGINT NOT NULL, \
     balance BIGINT NOT NULL)",
    "CREATE TEMPORARY TABLE postings_of_holds (hold_id TEXT PRIMARY KEY, high BIGINT NOT NULL, low BIGINT NOT NULL)",
    "CREATE TEMPORARY TABLE open_unsettled (subaccount_id TEXT PRIMARY KEY, high BIGINT NOT NULL, low BIGINT NOT NULL)",
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
impl<DB> LedgerSnapshot for Reader<DB>
where
    DB: Dialect,
    DB::Arguments: IntoArguments<DB>,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'q> &'q str: Encode<'q, DB> + Type<DB>,
    for<'q> i64: Encode<'q, DB> + Type<DB>,
    for<'r> BlockRow: FromRow<'r, DB::Row>,
    for<'r> SealedOperation: FromRow<'r, DB::Row>,
    for<'r> SealedPosting: FromRow<'r, DB::Row>,
    for<'r> VersionPosting: FromRow<'r, DB::Row>,
    for<'r> (String, Option<i64>): FromRow<'r, DB::Row>,
    for<'r> (String, String, String): FromRow<'r, DB::Row>,
    for<'r> BrokenLink: FromRow<'r, DB::Row>,
    for<'r> (String, String): FromRow<'r, DB::Row>,
    for<'r> SubAccountState: FromRow<'r, DB::Row>,
    for<'r> HoldState: FromRow<'r, DB::Row>,
    for<'r> (String, i64, i64): FromRow<'r, DB::Row>,
    for<'r> (String, String, i64): FromRow<'r, DB::Row>,
    for<'r> RecordRow: FromRow<'r, DB::Row>,
    for<'r> ReferencedRow: FromRow<'r, DB::Row>,
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

    async fn version_posting(
        &mut self,
        subaccount_id: &str,
        version: i64,
    ) -> Result<Option<VersionPosting>, Error> {
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

    async fn operation_without_block(&mut self) -> Result<Option<(String, Option<i64>)>, Error> {
        Ok(sqlx::query_as(
            "SELECT o.operation_id, o.block FROM operations o \
             WHERE o.block IS NULL OR o.block < 1 OR o.block > (SELECT MAX(block) FROM audit_blocks) \
             ORDER BY o.created_at_us, o.operation_id LIMIT 1",
        )
        .fetch_optional(&mut self.0)
        .await?)
    }

    async fn contradictory_operation(&mut self) -> Result<Option<(String, String, i64)>, Error> {
        let query = sqlx::query_as(CONTRADICTORY_OPERATION);
        Ok(query.fetch_optional(&mut self.0).await?)
    }

    async fn dangling_posting(&mut self) -> Result<Option<(String, String, String)>, Error> {
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

    async fn broken_link(&mut self) -> Result<Option<BrokenLink>, Error> {
        match DB::BROKEN_LINK {
            Some(sql) => Ok(sqlx::query_as(sql).fetch_optional(&mut self.0).await?),
            None => Ok(None),
        }
    }

    async fn unindexed_operation(&mut self) -> Result<Option<(String, String)>, Error> {
        match DB::UNINDEXED_OPERATION {
            Some(sql) => Ok(sqlx::query_as(sql).fetch_optional(&mut self.0).await?),
            None => Ok(None),
        }
    }

    async fn subaccounts(&mut self, after: &str) -> Result<Vec<SubAccountState>, Error> {
        Ok(sqlx::query_as(
            "SELECT s.subaccount_id, s.balance, s.held, s.unsettled, s.version, \
             COALESCE(n.version, 0) AS last_version, COALESCE(n.balance, 0) AS last_balance, \
             COALESCE((SELECT CAST(SUM(h.remaining >> 32) AS BIGINT) FROM holds h \
             WHERE h.subaccount_id = s.subaccount_id AND h.status = 1), 0) AS held_sum_high, \
             COALESCE((SELECT CAST(SUM(h.remaining & 4294967295) AS BIGINT) FROM holds h \
             WHERE h.subaccount_id = s.subaccount_id AND h.status = 1), 0) AS held_sum_low, \
             COALESCE(u.high, 0) AS unsettled_sum_high, COALESCE(u.low, 0) AS unsettled_sum_low \
             FROM sub_accounts s LEFT JOIN open_unsettled u ON u.subaccount_id = s.subaccount_id \
             LEFT JOIN last_postings n ON n.subaccount_id = s.subaccount_id WHERE s.subaccount_id > $1 \
             ORDER BY s.subaccount_id LIMIT $2",
        )
        .bind(after)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn fill_temp_tables(&mut self) -> Result<(), Error> {
        sqlx::query(DB::FILL_LAST_POSTINGS)
            .execute(&mut self.0)
            .await?;
        sqlx::query(
            "INSERT INTO postings_of_holds SELECT hold_id, CAST(SUM(amount >> 32) AS BIGINT), \
             CAST(SUM(amount & 4294967295) AS BIGINT) FROM postings \
             WHERE hold_id IS NOT NULL GROUP BY hold_id",
        )
        .execute(&mut self.0)
        .await?;
        // Open operations: PROCESSING, ONCHAIN_SUBMITTED, SETTLED.
        sqlx::query(
            "INSERT INTO open_unsettled SELECT p.credit_subaccount_id, \
             CAST(SUM(p.amount >> 32) AS BIGINT), \
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
             h.status, h.destination_subaccount_id, \
             CASE WHEN s.user_id = h.user_id AND s.instrument_id = h.instrument_id \
             AND (h.parent_hold_id IS NULL OR (parent.subaccount_id = h.subaccount_id AND parent.owner = h.owner \
             AND COALESCE(parent.expires_at_us, 0) = COALESCE(h.expires_at_us, 0) \
             AND h.destination_subaccount_id IS NULL)) THEN 1 ELSE 0 END AS terms_agree, \
             COALESCE(p.high, 0) AS postings_sum_high, COALESCE(p.low, 0) AS postings_sum_low \
             FROM holds h LEFT JOIN postings_of_holds p ON p.hold_id = h.hold_id \
             LEFT JOIN sub_accounts s ON s.subaccount_id = h.subaccount_id \
             LEFT JOIN holds parent ON parent.hold_id = h.parent_hold_id \
             WHERE h.hold_id > $1 ORDER BY h.hold_id LIMIT $2",
        )
        .bind(after)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn audit_records(&mut self, after: i64) -> Result<Vec<RecordRow>, Error> {
        let sql = "SELECT * FROM audit_records WHERE sequence > $1 ORDER BY sequence LIMIT $2";
        let query = sqlx::query_as(sql).bind(after).bind(PAGE);
        Ok(query.fetch_all(&mut self.0).await?)
    }

    async fn referenced(&mut self, after: (i64, i64)) -> Result<Vec<ReferencedRow>, Error> {
        Ok(sqlx::query_as(
            "SELECT o.operation_id, o.kind, o.status, o.user_id, o.external_ref, o.tx_hash, o.block, \
             o.place, p.instrument_id, p.amount FROM (\
             SELECT operation_id, kind, status, user_id, external_ref, tx_hash, block, place \
             FROM operations WHERE (block, place) > ($1, $2) AND external_ref IS NOT NULL \
             ORDER BY block, place LIMIT $3) o \
             JOIN postings p ON p.operation_id = o.operation_id ORDER BY o.block, o.place, p.ordinal",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(PAGE)
        .fetch_all(&mut self.0)
        .await?)
    }

    async fn with_references(
        &mut self,
        kind: i64,
        references: &str,
    ) -> Result<Vec<(String, String)>, Error> {
        let (before, after) = DB::IN_LIST;
        let sql = format!(
            "SELECT external_ref, operation_id FROM operations \
             WHERE kind = $1 AND external_ref IS NOT NULL AND external_ref {before}$2{after}"
        );
        Ok(sqlx::query_as(AssertSqlSafe(sql))
            .bind(kind)
            .bind(references)
            .fetch_all(&mut self.0)
            .await?)
    }

    async fn applied(&mut self, source: &str) -> Result<Option<i64>, Error> {
        let sql = "SELECT source, first_sequence, through_sequence FROM sources WHERE source = $1";
        let found: Option<(String, i64, i64)> = sqlx::query_as(sql)
            .bind(source)
            .fetch_optional(&mut self.0)
            .await?;
        Ok(found.map(|(_, _, through)| through))
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
