//! Operations and suspended deposits.

use std::collections::{HashMap, HashSet};

use events::Tx;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};
use types::OperationType;

use super::{Repo, code, damaged, decimal, optional_u64};
use crate::error::Error;
use crate::model::{Flow, Holder, Operation, Rejection, Status, SuspendedDeposit};
use crate::saga::{Chain, LimitReservation, Payout, SagaProgress};

/// Result of `insert_operation_in_tx`.
#[derive(Debug)]
pub enum Inserted {
    Done,
    /// This stored operation has the same idempotency scope or external reference.
    Exists(Box<Operation>),
}

#[derive(Debug, Default, Clone)]
pub struct OperationFilter {
    /// Empty: all users.
    pub user_id: String,
    pub kind: Option<i32>,
    pub status: Option<i32>,
    pub external_ref: String,
    /// Empty: any transaction or none.
    pub tx_hashes: Vec<String>,
    pub exclude_trades: bool,
}

pub(super) const COLUMNS: &str = "operation_id, flow, status, status_before_block, user_id, hold_id, \
     amount, units_minor, currency_code, idempotency_key, \
     external_ref, tx_hash, rejection, rejection_message, finalized_at_us, instrument_id, \
     from_user_id, to_user_id, trade_id, bookbuilding_id, \
     payment_minor, fee_minor, created_at_us, updated_at_us, block_number, attempts, \
     correlation_id, fact_gated, fact_chain, fact_payout, \
     fact_settled, fact_minted_back, fact_undone, fact_blocked, fact_limit, fact_refunding";

/// Conditions of the partial indexes `operation_reference` and `operation_refused`. SQLite uses a
/// partial index only if the statement repeats its condition.
pub(super) const NOT_REFUSED: &str = "external_ref <> '' AND status NOT IN (8, 12)";
pub(super) const REFUSED: &str = "external_ref <> '' AND status IN (8, 12)";

/// Indexes of a user's operations with their conditions. Together they contain each operation once.
/// A page is merged from one page per index.
const OF_USER: [(&str, &str); 3] = [
    ("operation_of_user", "user_id"),
    (
        "operation_from_user",
        "from_user_id <> user_id AND from_user_id <> '' AND from_user_id",
    ),
    (
        "operation_to_user",
        "to_user_id <> user_id AND to_user_id <> from_user_id AND to_user_id <> '' AND to_user_id",
    ),
];

const ORDER: &str = " ORDER BY created_at_us DESC, operation_id DESC LIMIT ";

impl OperationFilter {
    /// Appends all conditions except the user's.
    fn push_to(&self, query: &mut QueryBuilder<sqlx::Sqlite>) {
        if let Some(kind) = self.kind {
            query.push(" AND kind = ").push_bind(kind);
        }
        if let Some(status) = self.status {
            query.push(" AND status = ").push_bind(status);
        }
        if !self.external_ref.is_empty() {
            for (opening, rows) in [(" AND ((", NOT_REFUSED), (" OR (", REFUSED)] {
                query
                    .push(opening)
                    .push("kind IN (3, 5, 6, 10) AND external_ref = ")
                    .push_bind(self.external_ref.clone())
                    .push(format!(" AND {rows})"));
            }
            query.push(")");
        }
        if !self.tx_hashes.is_empty() {
            query.push(" AND ");
            self.push_hashes_to(query);
        }
        if self.exclude_trades {
            // As in the condition of `operation_tx_other`.
            query.push(format!(" AND flow <> {}", Flow::Trade.code()));
        }
    }

    fn push_hashes_to(&self, query: &mut QueryBuilder<sqlx::Sqlite>) {
        query.push("tx_hash IN (");
        let mut hashes = query.separated(", ");
        for tx_hash in &self.tx_hashes {
            hashes.push_bind(tx_hash.clone());
        }
        query.push(")");
    }
}

fn select(condition: &str) -> QueryBuilder<sqlx::Sqlite> {
    QueryBuilder::new(format!("SELECT {COLUMNS} FROM operation WHERE {condition}"))
}

impl Repo {
    pub async fn operation(&self, operation_id: &str) -> Result<Option<Operation>, Error> {
        let row = select("operation_id = ")
            .push_bind(operation_id)
            .build()
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn operation_by_key(
        &self,
        flow: Flow,
        user_id: &str,
        key: &str,
    ) -> Result<Option<Operation>, Error> {
        let mut query = select("flow = ");
        query
            .push_bind(flow.code())
            .push(" AND user_id = ")
            .push_bind(user_id)
            .push(" AND idempotency_key = ")
            .push_bind(key);
        let row = query.build().fetch_optional(self.db.read()).await?;
        row.as_ref().map(decode).transpose()
    }

    /// The operation of a payment, payout or trade, unless it was rejected or refunded.
    pub async fn operation_by_reference(
        &self,
        kind: OperationType,
        external_ref: &str,
    ) -> Result<Option<Operation>, Error> {
        let mut query = select("kind = ");
        query
            .push_bind(kind.code())
            .push(" AND external_ref = ")
            .push_bind(external_ref)
            .push(format!(" AND {NOT_REFUSED}"));
        let row = query.build().fetch_optional(self.db.read()).await?;
        row.as_ref().map(decode).transpose()
    }

    /// The operation of a trade in any status. A batch reuses the row of a rejected one.
    pub async fn operation_of_trade(&self, trade_id: &str) -> Result<Option<Operation>, Error> {
        let found = self.operation_by_reference(OperationType::P2pTransfer, trade_id);
        if let Some(found) = found.await? {
            return Ok(Some(found));
        }
        let mut query = select("kind = ");
        query
            .push_bind(OperationType::P2pTransfer.code())
            .push(" AND external_ref = ")
            .push_bind(trade_id)
            .push(format!(
                " AND {REFUSED} ORDER BY created_at_us DESC LIMIT 1"
            ));
        let row = query.build().fetch_optional(self.db.read()).await?;
        row.as_ref().map(decode).transpose()
    }

    /// Operations of a transaction, without trades: their batch has the transaction.
    pub async fn operations_by_tx(&self, tx_hash: &str) -> Result<Vec<Operation>, Error> {
        let rows = select("tx_hash = ")
            .push_bind(tx_hash)
            .push(format!(" AND flow <> {}", Flow::Trade.code()))
            .build()
            .fetch_all(self.db.read())
            .await?;
        rows.iter().map(decode).collect()
    }

    pub async fn operations_of_batch(&self, batch_id: &str) -> Result<Vec<Operation>, Error> {
        let rows = select("batch_id = ")
            .push_bind(batch_id)
            .build()
            .fetch_all(self.db.read())
            .await?;
        rows.iter().map(decode).collect()
    }

    /// Open operations of the holders of a redemption or coupon, ordered by address.
    pub async fn open_part_operations(&self, redemption_id: &str) -> Result<Vec<Operation>, Error> {
        let (first, end) = holder_references(redemption_id);
        // The index has the open operations alone, so a part costs what it contains.
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(format!(
            "SELECT {COLUMNS} FROM operation INDEXED BY operation_maturing \
             WHERE flow IN (7, 10) AND status IN (1, 5, 6) AND external_ref >= "
        ));
        query
            .push_bind(first)
            .push(" AND external_ref < ")
            .push_bind(end)
            .push(" ORDER BY external_ref");
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// References of the holders of a redemption or coupon whose operations, of this kind, are open
    /// or were executed.
    pub async fn served_holders(
        &self,
        kind: OperationType,
        redemption_id: &str,
    ) -> Result<HashSet<String>, Error> {
        let (first, end) = holder_references(redemption_id);
        let mut query =
            QueryBuilder::<sqlx::Sqlite>::new("SELECT external_ref FROM operation WHERE kind = ");
        query
            .push_bind(kind.code())
            .push(" AND external_ref >= ")
            .push_bind(first)
            .push(" AND external_ref < ")
            .push_bind(end)
            .push(format!(" AND {NOT_REFUSED} AND flow IN (7, 10)"));
        let served = query.build_query_scalar().fetch_all(self.db.read()).await?;
        Ok(served.into_iter().collect())
    }

    /// Open operations not changed since `before_us`, oldest first, strictly after the key `after`.
    /// Excludes trades, which their batch drives, operations of a redemption or coupon, which those
    /// drive, and those of a placement.
    pub async fn open_operations(
        &self,
        before_us: i64,
        after: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Operation>, Error> {
        let mut query = select(
            "status NOT IN (7, 8, 9, 12) AND flow NOT IN (6, 7, 8, 10) AND updated_at_us < ",
        );
        query.push_bind(before_us);
        query
            .push(" AND (updated_at_us, operation_id) > (")
            .push_bind(after.0)
            .push(", ")
            .push_bind(after.1.to_owned());
        query
            .push(") ORDER BY updated_at_us, operation_id LIMIT ")
            .push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Ended operations whose limit reservation is still open, oldest first.
    pub async fn unended_limits(&self, limit: i64) -> Result<Vec<Operation>, Error> {
        let mut query = select("fact_limit = 1 AND status IN (7, 8, 9, 12) ORDER BY updated_at_us");
        query.push(" LIMIT ").push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Records that the operations' limit reservations are confirmed or cancelled.
    pub async fn end_limits(&self, operation_ids: &[String]) -> Result<(), Error> {
        if operation_ids.is_empty() {
            return Ok(());
        }
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("UPDATE operation SET fact_limit = ");
        query.push_bind(LimitReservation::Ended.code());
        query.push(" WHERE operation_id IN (");
        let mut ids = query.separated(", ");
        for operation_id in operation_ids {
            ids.push_bind(operation_id);
        }
        query.push(")");
        let mut tx = self.begin().await?;
        query.build().execute(&mut *tx).await?;
        Ok(tx.commit().await?)
    }

    /// Number of open operations that may move units of the instrument.
    pub async fn count_moving(&self, instrument_id: &str) -> Result<i64, Error> {
        let count = sqlx::query_scalar(
            "SELECT COUNT(*) FROM operation WHERE instrument_id = $1 \
             AND status NOT IN (7, 8, 9, 11, 12) AND flow NOT IN (7, 10)",
        )
        .bind(instrument_id);
        Ok(count.fetch_one(self.db.read()).await?)
    }

    /// Units that redemptions of single units burned after each holder's `as_of_block`, by user.
    /// Cost: the holders, and the redemptions found.
    pub async fn redeemed_after(
        &self,
        instrument_id: &str,
        holders: &[Holder],
    ) -> Result<HashMap<String, i64>, Error> {
        let after = holders
            .iter()
            .map(|holder| (holder.user_id.as_str(), holder.as_of_block));
        let after: Vec<(&str, u64)> = after.collect();
        // The outer loop is over the holders: each is a search by the index.
        let rows: Vec<(String, i64)> = sqlx::query_as(
            "SELECT o.user_id, SUM(o.units_minor) FROM json_each($2) AS v \
             CROSS JOIN operation AS o INDEXED BY operation_redeemed \
             WHERE o.flow = 4 AND o.status = 7 AND o.instrument_id = $1 \
               AND o.user_id = json_extract(v.value, '$[0]') \
               AND o.block_number > json_extract(v.value, '$[1]') GROUP BY o.user_id",
        )
        .bind(instrument_id)
        .bind(serde_json::json!(after).to_string())
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.into_iter().collect())
    }

    /// Number of payouts whose release was refused at least `attempts` times, and the payout id of
    /// the oldest.
    pub async fn refused_releases(&self, attempts: u32) -> Result<Option<(i64, String)>, Error> {
        let found = sqlx::query_as(
            "SELECT COUNT(*), external_ref, MIN(created_at_us) FROM operation INDEXED BY operation_unreleased
             WHERE fact_payout = 1 AND fact_chain = 2 AND status NOT IN (7, 8, 9, 11, 12) AND attempts >= $1",
        )
        .bind(i64::from(attempts));
        let (count, oldest, _): (i64, Option<String>, Option<i64>) =
            found.fetch_one(self.db.read()).await?;
        Ok(oldest.map(|oldest| (count, oldest)))
    }

    /// A page of operations, newest first, strictly after the bound (D04).
    pub async fn list_operations(
        &self,
        filter: &OperationFilter,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Operation>, Error> {
        let push_conditions = |query: &mut QueryBuilder<sqlx::Sqlite>| {
            query.push("(created_at_us, operation_id) < (");
            query.push_bind(bound.0).push(", ");
            query.push_bind(bound.1.to_owned()).push(")");
            filter.push_to(query);
            query.push(ORDER).push_bind(limit);
        };
        // `IN` over three columns uses no index of the user: a reference or a transaction selects
        // fewer operations than a user.
        let push_selected = |query: &mut QueryBuilder<sqlx::Sqlite>| {
            if !filter.user_id.is_empty() {
                query.push_bind(filter.user_id.clone());
                query.push(" IN (user_id, from_user_id, to_user_id) AND ");
            }
            push_conditions(query);
        };
        let mut query = if !filter.tx_hashes.is_empty() {
            let trade = Flow::Trade.code();
            let mut query = QueryBuilder::new(format!(
                "SELECT * FROM (SELECT {COLUMNS} FROM operation INDEXED BY operation_tx_other \
                 WHERE flow <> {trade} AND "
            ));
            push_selected(&mut query);
            if !filter.exclude_trades {
                query.push(format!(
                    ") UNION ALL SELECT * FROM (SELECT {COLUMNS} FROM operation \
                     INDEXED BY operation_of_batch WHERE flow = {trade} AND batch_id IN \
                     (SELECT batch_id FROM batch WHERE "
                ));
                filter.push_hashes_to(&mut query);
                query.push(") AND ");
                push_selected(&mut query);
            }
            query.push(")").push(ORDER).push_bind(limit);
            query
        } else if filter.user_id.is_empty() || !filter.external_ref.is_empty() {
            let mut query = select("");
            push_selected(&mut query);
            query
        } else {
            let mut query = QueryBuilder::new("");
            let mut between = "SELECT * FROM (";
            for (index, condition) in OF_USER {
                query.push(between).push(format!(
                    "SELECT {COLUMNS} FROM operation INDEXED BY {index} WHERE {condition} = "
                ));
                query.push_bind(filter.user_id.clone()).push(" AND ");
                push_conditions(&mut query);
                between = ") UNION ALL SELECT * FROM (";
            }
            query.push(")").push(ORDER).push_bind(limit);
            query
        };
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Inserts the operation unless its idempotency scope or external reference exists.
    pub async fn insert_operation_in_tx(
        &self,
        tx: &mut Tx,
        operation: &Operation,
    ) -> Result<Inserted, Error> {
        operation.assert_consistent();
        let mut same_request = select("(flow = ");
        same_request
            .push_bind(operation.flow.code())
            .push(" AND user_id = ")
            .push_bind(&operation.user_id);
        same_request
            .push(" AND idempotency_key = ")
            .push_bind(&operation.idempotency_key)
            .push(")");
        if !operation.external_ref.is_empty() {
            same_request
                .push(" OR (kind = ")
                .push_bind(operation.flow.kind().code())
                .push(" AND external_ref = ")
                .push_bind(&operation.external_ref)
                .push(format!(" AND {NOT_REFUSED})"));
        }
        if let Some(row) = same_request.build().fetch_optional(&mut **tx).await? {
            return Ok(Inserted::Exists(Box::new(decode(&row)?)));
        }
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(format!(
            "INSERT INTO operation (kind, {COLUMNS}) VALUES ("
        ));
        let mut values = query.separated(", ");
        values.push_bind(operation.flow.kind().code());
        values.push_bind(&operation.operation_id);
        values.push_bind(operation.flow.code());
        values.push_bind(operation.status.code());
        values.push_bind(operation.status_before_block.map(Status::code));
        values.push_bind(&operation.user_id);
        values.push_bind(&operation.hold_id);
        values.push_bind(operation.amount.to_string());
        values.push_bind(operation.units_minor);
        values.push_bind(&operation.currency_code);
        values.push_bind(&operation.idempotency_key);
        values.push_bind(&operation.external_ref);
        values.push_bind(&operation.tx_hash);
        values.push_bind(
            operation
                .rejection
                .as_ref()
                .map(|(reason, _)| reason.code()),
        );
        values.push_bind(operation.rejection.as_ref().map(|(_, message)| message));
        values.push_bind(operation.finalized_at_us);
        values.push_bind(&operation.instrument_id);
        values.push_bind(&operation.from_user_id);
        values.push_bind(&operation.to_user_id);
        values.push_bind(&operation.trade_id);
        values.push_bind(&operation.bookbuilding_id);
        values.push_bind(operation.payment_minor);
        values.push_bind(operation.fee_minor);
        values.push_bind(operation.created_at_us);
        values.push_bind(operation.updated_at_us);
        values.push_bind(operation.block_number.map(|number| number as i64));
        values.push_bind(i64::from(operation.attempts));
        values.push_bind(&operation.correlation_id);
        values.push_bind(operation.progress.gated);
        values.push_bind(operation.progress.chain.code());
        values.push_bind(operation.progress.payout.code());
        values.push_bind(operation.progress.settled);
        values.push_bind(operation.progress.minted_back);
        values.push_bind(operation.progress.undone);
        values.push_bind(operation.progress.blocked);
        values.push_bind(operation.progress.limit.code());
        values.push_bind(operation.progress.refunding);
        values.push_unseparated(")");
        query.build().execute(&mut **tx).await?;
        Ok(Inserted::Done)
    }

    /// Updates all mutable columns of an operation.
    pub async fn save_operation_in_tx(
        &self,
        tx: &mut Tx,
        operation: &Operation,
    ) -> Result<(), Error> {
        operation.assert_consistent();
        let progress = &operation.progress;
        let done = sqlx::query(
            "UPDATE operation SET status = $2, status_before_block = $3, hold_id = $4, \
                tx_hash = $5, rejection = $6, rejection_message = $7,
                finalized_at_us = $8, updated_at_us = $9, block_number = $10, attempts = $11, \
                fact_gated = $12, fact_chain = $13, fact_payout = $14,
                fact_settled = $15, fact_minted_back = $16, fact_undone = $17, fact_blocked = $18, \
                fact_limit = $19, fact_refunding = $20
             WHERE operation_id = $1",
        )
        .bind(&operation.operation_id)
        .bind(operation.status.code())
        .bind(operation.status_before_block.map(Status::code))
        .bind(&operation.hold_id)
        .bind(&operation.tx_hash)
        .bind(
            operation
                .rejection
                .as_ref()
                .map(|(reason, _)| reason.code()),
        )
        .bind(operation.rejection.as_ref().map(|(_, message)| message))
        .bind(operation.finalized_at_us)
        .bind(operation.updated_at_us)
        .bind(operation.block_number.map(|number| number as i64))
        .bind(i64::from(operation.attempts))
        .bind(progress.gated)
        .bind(progress.chain.code())
        .bind(progress.payout.code())
        .bind(progress.settled)
        .bind(progress.minted_back)
        .bind(progress.undone)
        .bind(progress.blocked)
        .bind(progress.limit.code())
        .bind(progress.refunding)
        .execute(&mut **tx)
        .await?;
        assert_eq!(
            done.rows_affected(),
            1,
            "the operation to save is not in the store"
        );
        Ok(())
    }

    pub async fn save_operation(&self, operation: &Operation) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        self.save_operation_in_tx(&mut tx, operation).await?;
        Ok(tx.commit().await?)
    }

    /// Deletes an operation that has had no effect; false if it has advanced or is deleted already.
    pub async fn delete_created_operation_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "DELETE FROM operation WHERE operation_id = $1 AND status = 1 AND fact_gated = 0",
        )
        .bind(operation_id)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    // ---- suspended deposits (T24)

    /// Stores a suspended deposit, or reopens it after another failed issue.
    pub async fn suspend_deposit_in_tx(
        &self,
        tx: &mut Tx,
        deposit: &SuspendedDeposit,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO suspended_deposit (payment_id, user_id, amount_minor, operation_id, \
                reason, created_at_us, resolved)
             VALUES ($1, $2, $3, $4, $5, $6, 0)
             ON CONFLICT (payment_id) DO UPDATE SET resolved = 0, \
                amount_minor = excluded.amount_minor, operation_id = excluded.operation_id, \
                reason = excluded.reason",
        )
        .bind(&deposit.payment_id)
        .bind(&deposit.user_id)
        .bind(deposit.amount_minor)
        .bind(&deposit.operation_id)
        .bind(&deposit.reason)
        .bind(deposit.created_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    pub async fn resolve_deposit_in_tx(&self, tx: &mut Tx, payment_id: &str) -> Result<(), Error> {
        sqlx::query("UPDATE suspended_deposit SET resolved = 1 WHERE payment_id = $1")
            .bind(payment_id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    /// Whether the deposit was refused and then resolved.
    pub async fn is_resolved_in_tx(&self, tx: &mut Tx, payment_id: &str) -> Result<bool, Error> {
        let resolved: Option<bool> =
            sqlx::query_scalar("SELECT resolved FROM suspended_deposit WHERE payment_id = $1")
                .bind(payment_id)
                .fetch_optional(&mut **tx)
                .await?;
        Ok(resolved.unwrap_or(false))
    }

    pub async fn reopen_deposit_in_tx(&self, tx: &mut Tx, payment_id: &str) -> Result<(), Error> {
        sqlx::query("UPDATE suspended_deposit SET resolved = 0 WHERE payment_id = $1")
            .bind(payment_id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    pub async fn suspended_deposit(
        &self,
        payment_id: &str,
    ) -> Result<Option<SuspendedDeposit>, Error> {
        let row = sqlx::query("SELECT * FROM suspended_deposit WHERE payment_id = $1")
            .bind(payment_id)
            .fetch_optional(self.db.read())
            .await?;
        Ok(row.as_ref().map(decode_deposit))
    }

    pub async fn list_suspended(
        &self,
        include_resolved: bool,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<SuspendedDeposit>, Error> {
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(
            "SELECT * FROM suspended_deposit WHERE (created_at_us, payment_id) < (",
        );
        query.push_bind(bound.0).push(", ");
        query.push_bind(bound.1).push(")");
        if !include_resolved {
            query.push(" AND resolved = 0");
        }
        query.push(" ORDER BY created_at_us DESC, payment_id DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        Ok(rows.iter().map(decode_deposit).collect())
    }
}

/// The half-open range of the references `<redemption>:<address>`.
fn holder_references(redemption_id: &str) -> (String, String) {
    // `;` is the character after `:`.
    (format!("{redemption_id}:"), format!("{redemption_id};"))
}

fn decode_deposit(row: &SqliteRow) -> SuspendedDeposit {
    SuspendedDeposit {
        payment_id: row.get("payment_id"),
        user_id: row.get("user_id"),
        amount_minor: row.get("amount_minor"),
        operation_id: row.get("operation_id"),
        reason: row.get("reason"),
        created_at_us: row.get("created_at_us"),
        resolved: row.get("resolved"),
    }
}

pub(super) fn decode(row: &SqliteRow) -> Result<Operation, Error> {
    let rejection = match row.try_get::<Option<i32>, _>("rejection")? {
        Some(reason) => Some((
            Rejection::from_code(reason).ok_or_else(|| damaged("rejection"))?,
            row.try_get::<Option<String>, _>("rejection_message")?
                .unwrap_or_default(),
        )),
        None => None,
    };
    let before_block = row.try_get::<Option<i32>, _>("status_before_block")?;
    let operation = Operation {
        operation_id: row.try_get("operation_id")?,
        flow: code(row, "flow", Flow::from_code)?,
        status: code(row, "status", Status::from_code)?,
        status_before_block: before_block
            .map(|status| Status::from_code(status).ok_or_else(|| damaged("status_before_block")))
            .transpose()?,
        user_id: row.try_get("user_id")?,
        hold_id: row.try_get("hold_id")?,
        amount: decimal(row, "amount")?,
        units_minor: row.try_get("units_minor")?,
        currency_code: row.try_get("currency_code")?,
        idempotency_key: row.try_get("idempotency_key")?,
        external_ref: row.try_get("external_ref")?,
        tx_hash: row.try_get("tx_hash")?,
        rejection,
        finalized_at_us: row.try_get("finalized_at_us")?,
        instrument_id: row.try_get("instrument_id")?,
        from_user_id: row.try_get("from_user_id")?,
        to_user_id: row.try_get("to_user_id")?,
        trade_id: row.try_get("trade_id")?,
        bookbuilding_id: row.try_get("bookbuilding_id")?,
        payment_minor: row.try_get("payment_minor")?,
        fee_minor: row.try_get("fee_minor")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
        block_number: optional_u64(row, "block_number")?,
        attempts: row.try_get::<i64, _>("attempts")? as u32,
        correlation_id: row.try_get("correlation_id")?,
        progress: SagaProgress {
            gated: row.try_get("fact_gated")?,
            chain: Chain::from_code(row.try_get("fact_chain")?)
                .ok_or_else(|| damaged("fact_chain"))?,
            payout: Payout::from_code(row.try_get("fact_payout")?)
                .ok_or_else(|| damaged("fact_payout"))?,
            settled: row.try_get("fact_settled")?,
            minted_back: row.try_get("fact_minted_back")?,
            undone: row.try_get("fact_undone")?,
            blocked: row.try_get("fact_blocked")?,
            refunding: row.try_get("fact_refunding")?,
            limit: LimitReservation::from_code(row.try_get("fact_limit")?)
                .ok_or_else(|| damaged("fact_limit"))?,
        },
    };
    match operation.inconsistency() {
        Some(what) => Err(damaged(what)),
        None => Ok(operation),
    }
}
