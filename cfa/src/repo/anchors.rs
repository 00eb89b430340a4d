//! Anchors of the ledger and of all audit records.

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::Repo;
use crate::anchor::StoredAnchor;
use crate::error::Error;

impl Repo {
    pub async fn last_anchor(&self) -> Result<Option<StoredAnchor>, Error> {
        Ok(self.anchors(i64::MAX, 1).await?.pop())
    }

    /// Anchors with a number below `before`, newest first.
    pub async fn anchors(&self, before: i64, limit: i64) -> Result<Vec<StoredAnchor>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM ledger_anchor WHERE number < $1 ORDER BY number DESC LIMIT $2",
        )
        .bind(before)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    pub async fn add_anchor(&self, anchor: &StoredAnchor) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO ledger_anchor (number, block, record, at_us, data, tx_hash) \
             VALUES ($1, $2, $3, $4, $5, '')",
        )
        .bind(anchor.number)
        .bind(anchor.block)
        .bind(anchor.record)
        .bind(anchor.at_us)
        .bind(&anchor.data)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    pub async fn anchor_submitted(&self, number: i64, tx_hash: &str) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query("UPDATE ledger_anchor SET tx_hash = $2 WHERE number = $1")
            .bind(number)
            .bind(tx_hash)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }
}

fn decode(row: &SqliteRow) -> Result<StoredAnchor, Error> {
    Ok(StoredAnchor {
        number: row.try_get("number")?,
        block: row.try_get("block")?,
        record: row.try_get("record")?,
        at_us: row.try_get("at_us")?,
        data: row.try_get("data")?,
        tx_hash: row.try_get("tx_hash")?,
    })
}
