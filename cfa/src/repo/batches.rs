//! Batches of trades.

use events::Tx;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{Repo, code, damaged, optional_u64};
use crate::error::Error;
use crate::model::{Batch, BatchStatus};

impl Repo {
    /// Read often: without the payload, tens of kilobytes.
    pub async fn batch(&self, batch_id: &str) -> Result<Option<Batch>, Error> {
        let query = sqlx::query(
            "SELECT batch_id, status, tx_hash, block_number, trades, failed, gas_used FROM batch \
             WHERE batch_id = $1",
        );
        let row = query.bind(batch_id).fetch_optional(self.db.read()).await?;
        row.as_ref().map(decode).transpose()
    }

    /// The batch of a transaction, an open one first. A batch whose trades an earlier batch settled
    /// is final and has the transaction of the earlier one.
    pub async fn batch_by_tx(&self, tx_hash: &str) -> Result<Option<Batch>, Error> {
        let query = sqlx::query(
            "SELECT batch_id, status, tx_hash, block_number, trades, failed, gas_used FROM batch \
             WHERE tx_hash = $1 ORDER BY status LIMIT 1",
        );
        let row = query.bind(tx_hash).fetch_optional(self.db.read()).await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn open_batches(&self) -> Result<Vec<Batch>, Error> {
        let rows = sqlx::query("SELECT * FROM batch WHERE status = 1 ORDER BY created_at_us")
            .fetch_all(self.db.read())
            .await?;
        rows.iter().map(decode).collect()
    }

    /// The batch's stored chain payload.
    pub async fn batch_payload(&self, batch_id: &str) -> Result<String, Error> {
        Ok(
            sqlx::query_scalar("SELECT payload FROM batch WHERE batch_id = $1")
                .bind(batch_id)
                .fetch_one(self.db.read())
                .await?,
        )
    }

    /// Stores a batch; false if its id exists.
    pub async fn insert_batch_in_tx(
        &self,
        tx: &mut Tx,
        batch: &Batch,
        payload: &str,
        now_us: i64,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "INSERT INTO batch (batch_id, status, tx_hash, block_number, trades, failed, gas_used, \
                payload, created_at_us)
             VALUES ($1, $2, $7, NULL, $3, $4, 0, $5, $6) ON CONFLICT (batch_id) DO NOTHING",
        )
        .bind(&batch.batch_id)
        .bind(batch.status.code())
        .bind(i64::from(batch.trades))
        .bind(failed_text(batch)?)
        .bind(payload)
        .bind(now_us)
        .bind(&batch.tx_hash)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Saves a batch. One that has ended keeps no payload. Its row stays, to answer a repeat: the
    /// chain answers its key with the first transaction, whatever the repeat contains.
    pub async fn save_batch_in_tx(&self, tx: &mut Tx, batch: &Batch) -> Result<(), Error> {
        sqlx::query(
            "UPDATE batch SET status = $2, tx_hash = $3, block_number = $4, failed = $5, \
             gas_used = $6, payload = CASE WHEN $2 = 1 THEN payload ELSE '' END WHERE batch_id = $1",
        )
        .bind(&batch.batch_id)
        .bind(batch.status.code())
        .bind(&batch.tx_hash)
        .bind(batch.block_number.map(|number| number as i64))
        .bind(failed_text(batch)?)
        .bind(batch.gas_used as i64)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Marks the batch's operations as submitted.
    pub async fn submit_batch_operations_in_tx(
        &self,
        tx: &mut Tx,
        batch: &Batch,
        now_us: i64,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE operation SET status = 6, tx_hash = $2, fact_chain = 1, \
             updated_at_us = $3 WHERE batch_id = $1 AND status = 5",
        )
        .bind(&batch.batch_id)
        .bind(&batch.tx_hash)
        .bind(now_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }
}

fn failed_text(batch: &Batch) -> Result<String, Error> {
    serde_json::to_string(&batch.failed_trade_ids)
        .map_err(|error| Error::Damaged(error.to_string()))
}

fn decode(row: &SqliteRow) -> Result<Batch, Error> {
    Ok(Batch {
        batch_id: row.try_get("batch_id")?,
        status: code(row, "status", BatchStatus::from_code)?,
        tx_hash: row.try_get("tx_hash")?,
        block_number: optional_u64(row, "block_number")?,
        trades: row.try_get::<i64, _>("trades")? as u32,
        failed_trade_ids: serde_json::from_str(&row.try_get::<String, _>("failed")?)
            .map_err(|_| damaged("failed"))?,
        gas_used: row.try_get::<i64, _>("gas_used")? as u64,
    })
}
