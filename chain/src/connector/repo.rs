//! The connector's SQLite store: submissions and the cursor of read blocks.
//!
//! One transaction stores the events of a block and advances the cursor.

use std::collections::HashSet;

use events::sqlite::Sqlite;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{ChainError, Receipt, ReceiptStatus, Submission};
use crate::TxHash;

/// A signed transaction.
pub(super) struct StoredTransaction {
    pub submission: Submission,
    /// Encoded as in EIP-2718.
    pub raw: Vec<u8>,
    /// A read block contains it.
    pub included: bool,
}

pub(super) struct Repo {
    db: Sqlite,
}

impl Repo {
    pub fn new(db: Sqlite) -> Self {
        Self { db }
    }

    /// One above the highest assigned nonce.
    pub async fn next_nonce(&self) -> Result<u64, ChainError> {
        let highest: Option<i64> = sqlx::query_scalar("SELECT MAX(nonce) FROM submission")
            .fetch_one(self.db.read())
            .await?;
        Ok(highest.map_or(0, |nonce| nonce as u64 + 1))
    }

    pub async fn by_key(&self, key: &str) -> Result<Option<StoredTransaction>, ChainError> {
        let row = sqlx::query(
            "SELECT nonce, tx_hash, raw, contract, block_number FROM submission WHERE key = $1",
        )
        .bind(key)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Returns those of the transactions that this connector submitted, in the given order.
    pub async fn filter_submitted(&self, tx_hashes: &[TxHash]) -> Result<Vec<TxHash>, ChainError> {
        let texts: Vec<String> = tx_hashes.iter().map(TxHash::to_string).collect();
        let texts = serde_json::to_string(&texts)
            .map_err(|error| ChainError::Malformed(error.to_string()))?;
        let known: HashSet<String> = sqlx::query_scalar(
            "SELECT tx_hash FROM submission WHERE tx_hash IN (SELECT value FROM json_each($1))",
        )
        .bind(texts)
        .fetch_all(self.db.read())
        .await?
        .into_iter()
        .collect();
        let hashes = tx_hashes.iter().copied();
        Ok(hashes
            .filter(|tx_hash| known.contains(&tx_hash.to_string()))
            .collect())
    }

    /// Stored transactions that are in no read block, ordered by nonce.
    pub async fn not_included(&self) -> Result<Vec<StoredTransaction>, ChainError> {
        let rows = sqlx::query(
            "SELECT nonce, tx_hash, raw, contract, block_number FROM submission \
             WHERE block_number IS NULL ORDER BY nonce",
        )
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    pub async fn insert(&self, key: &str, stored: &StoredTransaction) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        sqlx::query(
            "INSERT INTO submission (key, nonce, tx_hash, raw, contract, submitted_us) \
             VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(key)
        .bind(stored.submission.nonce as i64)
        .bind(stored.submission.tx_hash.to_string())
        .bind(stored.raw.as_slice())
        .bind(
            stored
                .submission
                .contract
                .map(|address| address.to_string())
                .unwrap_or_default(),
        )
        .bind(service_kit::clock::now_us())
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    pub async fn delete(&self, key: &str) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        sqlx::query("DELETE FROM submission WHERE key = $1 AND block_number IS NULL")
            .bind(key)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Number and hash of the last read block.
    pub async fn cursor(&self) -> Result<Option<(u64, String)>, ChainError> {
        let row = sqlx::query("SELECT block_number, block_hash FROM cursor WHERE id = 1")
            .fetch_optional(self.db.read())
            .await?;
        Ok(row.map(|row| {
            (
                row.get::<i64, _>("block_number") as u64,
                row.get("block_hash"),
            )
        }))
    }

    /// Marks included submissions, advances the cursor and appends events, in one transaction.
    pub async fn record_block(
        &self,
        number: u64,
        hash: &TxHash,
        receipts: &[Receipt],
        published: &[events::Event],
    ) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        for receipt in receipts {
            sqlx::query("UPDATE submission SET block_number = $1, success = $2, gas_used = $3 WHERE tx_hash = $4")
                .bind(number as i64)
                .bind(receipt.status == ReceiptStatus::Success)
                .bind(receipt.gas_used as i64)
                .bind(receipt.tx_hash.to_string())
                .execute(&mut *tx)
                .await?;
        }
        sqlx::query(
            "INSERT INTO cursor (id, block_number, block_hash) VALUES (1, $1, $2)
             ON CONFLICT (id) DO UPDATE SET block_number = excluded.block_number, block_hash = excluded.block_hash",
        )
        .bind(number as i64)
        .bind(hash.to_string())
        .execute(&mut *tx)
        .await?;
        events::outbox::append_in_tx(&mut tx, published).await?;
        tx.commit().await?;
        Ok(())
    }
}

fn decode(row: &SqliteRow) -> Result<StoredTransaction, ChainError> {
    let tx_hash: String = row.get("tx_hash");
    let contract: String = row.get("contract");
    let corrupt = |_| ChainError::Corrupt("malformed submission row".into());
    Ok(StoredTransaction {
        submission: Submission {
            tx_hash: tx_hash.parse().map_err(corrupt)?,
            nonce: row.get::<i64, _>("nonce") as u64,
            contract: if contract.is_empty() {
                None
            } else {
                Some(contract.parse().map_err(corrupt)?)
            },
        },
        raw: row.get("raw"),
        included: row.get::<Option<i64>, _>("block_number").is_some(),
    })
}
