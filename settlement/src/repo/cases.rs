//! Cases: bust trades that an operator settles with their members.

use events::Tx;
use service_kit::audit::Act;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};
use types::{Decimal, Id128};

use super::{Repo, StoreError, audit};

/// A bust trade, as it would have been settled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewCase {
    pub trade_id: Id128,
    pub instrument_id: String,
    pub buyer_id: String,
    pub seller_id: String,
    pub quantity: Decimal,
    pub payment: Decimal,
    pub fee: Decimal,
    pub reason: String,
}

/// The end of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    pub at_us: i64,
    /// Subject of the operator's credential.
    pub by: String,
    pub note: String,
    /// Fingerprint of the call.
    pub digest: i64,
}

/// A stored case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub trade: NewCase,
    pub batch_id: String,
    pub opened_at_us: i64,
    pub closed: Option<Closed>,
}

/// Opens the case of a trade, once.
pub(super) async fn open_in_tx(
    tx: &mut Tx,
    new: &NewCase,
    batch_id: &str,
    now_us: i64,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO cases (trade_id, batch_id, instrument_id, buyer_id, seller_id, quantity, \
             payment, fee, reason, opened_at_us) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (trade_id) DO NOTHING",
    )
    .bind(new.trade_id.to_string())
    .bind(batch_id)
    .bind(&new.instrument_id)
    .bind(&new.buyer_id)
    .bind(&new.seller_id)
    .bind(new.quantity.to_string())
    .bind(new.payment.to_string())
    .bind(new.fee.to_string())
    .bind(&new.reason)
    .bind(now_us)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

impl Repo {
    /// Cases, newest first, strictly after the bound. `is_open`: open, closed, or both.
    pub async fn list_cases(
        &self,
        is_open: Option<bool>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Case>, StoreError> {
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("SELECT * FROM cases WHERE ");
        match is_open {
            Some(true) => query.push("closed_at_us IS NULL AND "),
            Some(false) => query.push("closed_at_us IS NOT NULL AND "),
            None => &mut query,
        };
        query
            .push("(opened_at_us, trade_id) < (")
            .push_bind(bound.0);
        query.push(", ").push_bind(bound.1);
        query.push(") ORDER BY opened_at_us DESC, trade_id DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(case_of).collect()
    }

    /// Number of open cases.
    pub async fn open_cases(&self) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM cases INDEXED BY cases_listed_open WHERE closed_at_us IS NULL",
        )
        .fetch_one(self.db.read())
        .await?;
        Ok(count.cast_unsigned())
    }

    /// Closes the case of a trade with its audit record, unless it is closed. Returns it as stored,
    /// and whether this call closed it; `None`: the trade has no case.
    pub async fn close_case(
        &self,
        trade_id: Id128,
        closed: &Closed,
        act: Act<'_>,
    ) -> Result<Option<(Case, bool)>, StoreError> {
        let id = trade_id.to_string();
        let mut tx = self.db.write().await?;
        let done = sqlx::query(
            "UPDATE cases SET closed_at_us = $2, closed_by = $3, note = $4, digest = $5 \
             WHERE trade_id = $1 AND closed_at_us IS NULL",
        )
        .bind(&id)
        .bind(closed.at_us)
        .bind(&closed.by)
        .bind(&closed.note)
        .bind(closed.digest)
        .execute(&mut *tx)
        .await?;
        let row = sqlx::query("SELECT * FROM cases WHERE trade_id = $1")
            .bind(&id)
            .fetch_optional(&mut *tx)
            .await?;
        if done.rows_affected() == 1 {
            audit::record_in_tx(&mut tx, closed.at_us, act).await?;
        }
        tx.commit().await?;
        let case = row.as_ref().map(case_of).transpose()?;
        Ok(case.map(|case| (case, done.rows_affected() == 1)))
    }

    /// Removes up to `limit` batches that have been final since before `before_us`. Returns how
    /// many.
    pub async fn remove_final(&self, before_us: i64, limit: i64) -> Result<u64, StoreError> {
        let mut tx = self.db.write().await?;
        let removed = sqlx::query(
            "DELETE FROM batches WHERE number IN \
             (SELECT number FROM batches INDEXED BY batches_final \
              WHERE state = 'FINAL' AND changed_at_us < $1 ORDER BY changed_at_us LIMIT $2)",
        )
        .bind(before_us)
        .bind(limit)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(removed.rows_affected())
    }
}

fn case_of(row: &SqliteRow) -> Result<Case, StoreError> {
    let id: String = row.try_get("trade_id")?;
    let damaged = || StoreError::Case(id.clone());
    let decimal = |column: &str| -> Result<Decimal, StoreError> {
        let text: String = row.try_get(column)?;
        text.parse().map_err(|_| damaged())
    };
    let closed_at_us: Option<i64> = row.try_get("closed_at_us")?;
    let closed = match closed_at_us {
        None => None,
        Some(at_us) => Some(Closed {
            at_us,
            by: row.try_get("closed_by")?,
            note: row.try_get("note")?,
            digest: row.try_get("digest")?,
        }),
    };
    Ok(Case {
        trade: NewCase {
            trade_id: Id128::parse(&id).ok_or_else(damaged)?,
            instrument_id: row.try_get("instrument_id")?,
            buyer_id: row.try_get("buyer_id")?,
            seller_id: row.try_get("seller_id")?,
            quantity: decimal("quantity")?,
            payment: decimal("payment")?,
            fee: decimal("fee")?,
            reason: row.try_get("reason")?,
        },
        batch_id: row.try_get("batch_id")?,
        opened_at_us: row.try_get("opened_at_us")?,
        closed,
    })
}
