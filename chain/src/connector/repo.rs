//! The connector's SQLite store: submissions, their signed attempts, and the blocks that were read.
//!
//! Invariants:
//!
//! - A submission's key and its first attempt's hash never change. Callers know it by these.
//! - A nonce belongs to at most one submission. All attempts of a nonce exclude each other: the
//!   chain accepts one.
//! - One transaction stores the events of a final block and advances the cursor.
//! - Writes that change an attempt apply only while no read block contains the submission.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use events::sqlite::{Sqlite, Tx};
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{Connection, Row, SqliteConnection};

use super::{ChainError, Receipt, ReceiptStatus, Submission};
use crate::TxHash;

/// A call submitted under a key.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub key: String,
    pub submission: Submission,
    /// `None`: parked. Another transaction used up the nonce for good.
    pub nonce: Option<u64>,
    /// Attempt that is sent.
    pub latest: TxHash,
    /// Attempt that a read block contains. The block may be unconfirmed.
    pub included: Option<TxHash>,
    /// A final block contains it.
    pub is_final: bool,
    /// Unknown for blocks that an older version read.
    pub block_hash: Option<TxHash>,
    /// Fingerprint of the call. `None`: it has none, or an older version stored it.
    pub call_digest: Option<i64>,
}

/// A signed transaction of a submission.
#[derive(Debug, Clone)]
pub(super) struct Attempt {
    pub tx_hash: TxHash,
    pub nonce: u64,
    /// Encoded as in EIP-2718; empty once the submission is final.
    pub raw: Vec<u8>,
    /// It does not execute the call: it only uses up the nonce.
    pub cancels: bool,
    /// Head of the chain when it was signed.
    pub signed_block: u64,
}

/// A transaction of this connector in a block.
#[derive(Debug, Clone)]
pub(super) struct Ours {
    pub key: String,
    /// Hash in the block.
    pub attempt: TxHash,
    /// Hash of the submission.
    pub submission: TxHash,
    pub cancels: bool,
}

impl Ours {
    /// Whether the call of a submission is executed. Otherwise only its nonce is used up.
    pub fn executes(&self) -> bool {
        !self.cancels
    }

    /// A filler has no call: it was only sent for its nonce. Its fee may have been raised.
    pub fn is_filler(&self) -> bool {
        is_filler_key(&self.key)
    }
}

/// What becomes of a submission whose attempt the node refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnRefusal {
    /// It is deleted: the caller learns of the refusal.
    Forget,
    /// It stays without a nonce and is tried again.
    Park,
}

/// Chain and account of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub chain_id: u64,
    pub genesis_hash: String,
    pub operator: String,
}

/// A read block: number and hash.
pub(super) type ReadBlock = (u64, TxHash);

/// Begins the keys of fillers. No caller's key begins with it.
const FILLER: &str = "filler:";

macro_rules! columns {
    () => {
        "submission.key, submission.nonce, submission.tx_hash, submission.contract, submission.latest, \
         submission.included, submission.block_number, submission.block_hash, \
         submission.call_digest"
    };
}

/// Which of these transactions the connector's file has as submissions. Read-only, with or without
/// a running connector.
///
/// # Errors
/// [`ChainError`]: the file cannot be read.
pub async fn known_transactions(
    file: &Path,
    tx_hashes: &[&str],
) -> Result<HashSet<String>, ChainError> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    let known: Vec<String> = sqlx::query_scalar(
        "SELECT s.tx_hash FROM json_each($1) AS k CROSS JOIN submission AS s ON s.tx_hash = k.value",
    )
    .bind(serde_json::json!(tx_hashes).to_string())
    .fetch_all(&mut db)
    .await?;
    db.close().await?;
    Ok(known.into_iter().collect())
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
        let highest: Option<i64> = sqlx::query_scalar("SELECT MAX(nonce) FROM attempt")
            .fetch_one(self.db.read())
            .await?;
        Ok(highest.map_or(0, |nonce| nonce as u64 + 1))
    }

    pub async fn by_key(&self, key: &str) -> Result<Option<Stored>, ChainError> {
        let row = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM submission WHERE key = $1"
        ))
        .bind(key)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The submission of an attempt.
    pub async fn by_hash(&self, tx_hash: &TxHash) -> Result<Option<Stored>, ChainError> {
        let row = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM attempt JOIN submission ON submission.key = attempt.key WHERE attempt.tx_hash = $1"
        ))
        .bind(tx_hash.to_string())
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn attempt(&self, tx_hash: &TxHash) -> Result<Attempt, ChainError> {
        let row = sqlx::query(
            "SELECT tx_hash AS attempt_hash, nonce AS attempt_nonce, raw, cancels, signed_block \
             FROM attempt WHERE tx_hash = $1",
        )
        .bind(tx_hash.to_string())
        .fetch_optional(self.db.read())
        .await?;
        let row = row.ok_or_else(|| ChainError::Corrupt(format!("no attempt {tx_hash}")))?;
        decode_attempt(&row)
    }

    /// Hashes of all attempts of a submission with this nonce.
    pub async fn attempts(&self, key: &str, nonce: u64) -> Result<Vec<TxHash>, ChainError> {
        let hashes: Vec<String> =
            sqlx::query_scalar("SELECT tx_hash FROM attempt WHERE key = $1 AND nonce = $2")
                .bind(key)
                .bind(nonce as i64)
                .fetch_all(self.db.read())
                .await?;
        hashes.iter().map(|hash| parse_hash(hash)).collect()
    }

    /// Returns those of the transactions that this connector signed, in the given order.
    pub async fn filter_ours(&self, tx_hashes: &[TxHash]) -> Result<Vec<Ours>, ChainError> {
        if tx_hashes.is_empty() {
            return Ok(Vec::new());
        }
        let texts: Vec<String> = tx_hashes.iter().map(TxHash::to_string).collect();
        let texts = serde_json::to_string(&texts)
            .map_err(|error| ChainError::Malformed(error.to_string()))?;
        let rows = sqlx::query(
            "SELECT attempt.tx_hash AS attempt_hash, attempt.key, attempt.cancels, submission.tx_hash \
             FROM attempt JOIN submission ON submission.key = attempt.key \
             WHERE attempt.tx_hash IN (SELECT value FROM json_each($1))",
        )
        .bind(texts)
        .fetch_all(self.db.read())
        .await?;
        let mut ours = HashMap::with_capacity(rows.len());
        for row in &rows {
            let attempt = parse_hash(row.get("attempt_hash"))?;
            let known = Ours {
                key: row.get("key"),
                attempt,
                submission: parse_hash(row.get("tx_hash"))?,
                cancels: row.get("cancels"),
            };
            ours.insert(attempt, known);
        }
        let found = tx_hashes.iter().filter_map(|hash| ours.remove(hash));
        Ok(found.collect())
    }

    /// Submissions with a nonce that are in no read block, and their latest attempts, ordered by
    /// nonce.
    pub async fn waiting(&self, limit: usize) -> Result<Vec<(Stored, Attempt)>, ChainError> {
        let rows = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            ", attempt.tx_hash AS attempt_hash, attempt.nonce AS attempt_nonce, attempt.raw, \
              attempt.cancels, attempt.signed_block \
             FROM submission JOIN attempt ON attempt.tx_hash = submission.latest \
             WHERE submission.block_number IS NULL AND submission.included_block IS NULL \
             AND submission.nonce >= 0 ORDER BY submission.nonce LIMIT $1",
        ))
        .bind(limit as i64)
        .fetch_all(self.db.read())
        .await?;
        let pair = |row: &SqliteRow| Ok::<_, ChainError>((decode(row)?, decode_attempt(row)?));
        rows.iter().map(pair).collect()
    }

    /// Submissions without a nonce, after a row. Each with the number of its row.
    pub async fn parked(&self, after: i64, limit: usize) -> Result<Vec<(i64, Stored)>, ChainError> {
        let rows = sqlx::query(concat!(
            "SELECT rowid AS number, ",
            columns!(),
            " FROM submission WHERE block_number IS NULL AND included_block IS NULL \
             AND nonce IS NULL AND rowid > $1 ORDER BY rowid LIMIT $2",
        ))
        .bind(after)
        .bind(limit as i64)
        .fetch_all(self.db.read())
        .await?;
        let numbered =
            |row: &SqliteRow| Ok::<(i64, Stored), ChainError>((row.get("number"), decode(row)?));
        rows.iter().map(numbered).collect()
    }

    /// Nonces of submissions in the range `from..to`.
    pub async fn nonces(&self, from: u64, to: u64) -> Result<Vec<u64>, ChainError> {
        let nonces: Vec<i64> =
            sqlx::query_scalar("SELECT nonce FROM submission WHERE nonce >= $1 AND nonce < $2")
                .bind(from as i64)
                .bind(to as i64)
                .fetch_all(self.db.read())
                .await?;
        Ok(nonces.into_iter().map(|nonce| nonce as u64).collect())
    }

    /// Stores a new submission with its first attempt.
    pub async fn insert(
        &self,
        key: &str,
        attempt: &Attempt,
        contract: &str,
        call_digest: Option<i64>,
    ) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        insert_in_tx(&mut tx, key, attempt, contract, call_digest).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Adds an attempt with the submission's nonce and makes it the latest. False: a block contains
    /// the submission, or its nonce has changed.
    pub async fn add_attempt(&self, key: &str, attempt: &Attempt) -> Result<bool, ChainError> {
        let mut tx = self.db.write().await?;
        let changed = sqlx::query(
            "UPDATE submission SET latest = $1 \
             WHERE key = $2 AND nonce = $3 AND included_block IS NULL AND block_number IS NULL",
        )
        .bind(attempt.tx_hash.to_string())
        .bind(key)
        .bind(attempt.nonce as i64)
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 0 {
            return Ok(false);
        }
        insert_attempt_in_tx(&mut tx, key, attempt).await?;
        tx.commit().await?;
        Ok(true)
    }

    /// Removes an attempt that the node refused; `previous` is the latest again.
    pub async fn drop_attempt(
        &self,
        key: &str,
        attempt: &TxHash,
        previous: &TxHash,
    ) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        let changed = sqlx::query(
            "UPDATE submission SET latest = $1 \
             WHERE key = $2 AND latest = $3 AND included_block IS NULL AND block_number IS NULL",
        )
        .bind(previous.to_string())
        .bind(key)
        .bind(attempt.to_string())
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 1 {
            delete_attempt_in_tx(&mut tx, attempt).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Takes a refused attempt and its nonce from a submission. A filler takes the nonce over if
    /// later ones are assigned. False: a block contains the submission; nothing has changed.
    pub async fn withdraw(
        &self,
        key: &str,
        attempt: &Attempt,
        on_refusal: OnRefusal,
        filler: Option<(&str, &Attempt)>,
    ) -> Result<bool, ChainError> {
        let mut tx = self.db.write().await?;
        let statement = match on_refusal {
            OnRefusal::Forget => {
                "DELETE FROM submission \
                 WHERE key = $1 AND nonce = $2 AND included_block IS NULL AND block_number IS NULL"
            }
            OnRefusal::Park => {
                "UPDATE submission SET nonce = NULL, latest = tx_hash \
                 WHERE key = $1 AND nonce = $2 AND included_block IS NULL AND block_number IS NULL"
            }
        };
        let changed = sqlx::query(statement)
            .bind(key)
            .bind(attempt.nonce as i64)
            .execute(&mut *tx)
            .await?;
        if changed.rows_affected() == 0 {
            return Ok(false);
        }
        match on_refusal {
            OnRefusal::Forget => {
                sqlx::query("DELETE FROM attempt WHERE key = $1")
                    .bind(key)
                    .execute(&mut *tx)
                    .await?;
            }
            OnRefusal::Park => delete_attempt_in_tx(&mut tx, &attempt.tx_hash).await?,
        }
        if let Some((key, filler)) = filler {
            insert_in_tx(&mut tx, key, filler, "", None).await?;
        }
        tx.commit().await?;
        Ok(true)
    }

    /// Gives a parked submission a new nonce. False: it is not parked any more.
    pub async fn renew(
        &self,
        key: &str,
        attempt: &Attempt,
        contract: &str,
    ) -> Result<bool, ChainError> {
        let mut tx = self.db.write().await?;
        let changed = sqlx::query(
            "UPDATE submission SET nonce = $1, latest = $2, contract = $3 \
             WHERE key = $4 AND nonce IS NULL AND block_number IS NULL",
        )
        .bind(attempt.nonce as i64)
        .bind(attempt.tx_hash.to_string())
        .bind(contract)
        .bind(key)
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 0 {
            return Ok(false);
        }
        insert_attempt_in_tx(&mut tx, key, attempt).await?;
        tx.commit().await?;
        Ok(true)
    }

    /// Takes the nonce from a submission after another program's transaction used it up. A filler
    /// is deleted.
    pub async fn park(&self, stored: &Stored, nonce: u64) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        let is_filler = is_filler_key(&stored.key);
        let statement = if is_filler {
            "DELETE FROM submission \
             WHERE key = $1 AND nonce = $2 AND included_block IS NULL AND block_number IS NULL"
        } else {
            "UPDATE submission SET nonce = NULL, latest = tx_hash \
             WHERE key = $1 AND nonce = $2 AND included_block IS NULL AND block_number IS NULL"
        };
        let changed = sqlx::query(statement)
            .bind(&stored.key)
            .bind(nonce as i64)
            .execute(&mut *tx)
            .await?;
        if is_filler && changed.rows_affected() == 1 {
            sqlx::query("DELETE FROM attempt WHERE key = $1")
                .bind(&stored.key)
                .execute(&mut *tx)
                .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Chain and account of the store; `None` before the first start.
    pub async fn identity(&self) -> Result<Option<Identity>, ChainError> {
        let row = sqlx::query("SELECT chain_id, genesis_hash, operator FROM chain WHERE id = 1")
            .fetch_optional(self.db.read())
            .await?;
        Ok(row.map(|row| Identity {
            chain_id: row.get::<i64, _>("chain_id") as u64,
            genesis_hash: row.get("genesis_hash"),
            operator: row.get("operator"),
        }))
    }

    pub async fn set_identity(&self, identity: &Identity) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        sqlx::query(
            "INSERT INTO chain (id, chain_id, genesis_hash, operator) VALUES (1, $1, $2, $3)",
        )
        .bind(identity.chain_id as i64)
        .bind(&identity.genesis_hash)
        .bind(&identity.operator)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// The last final block.
    pub async fn cursor(&self) -> Result<Option<ReadBlock>, ChainError> {
        let row = sqlx::query("SELECT block_number, block_hash FROM cursor WHERE id = 1")
            .fetch_optional(self.db.read())
            .await?;
        row.map(|row| {
            Ok::<_, ChainError>((
                row.get::<i64, _>("block_number") as u64,
                parse_hash(row.get("block_hash"))?,
            ))
        })
        .transpose()
    }

    /// Read blocks above the cursor, ascending. At most `confirmations` blocks.
    pub async fn unconfirmed(&self) -> Result<Vec<ReadBlock>, ChainError> {
        let rows =
            sqlx::query("SELECT number, hash FROM unconfirmed WHERE number >= 0 ORDER BY number")
                .fetch_all(self.db.read())
                .await?;
        rows.iter()
            .map(|row| {
                Ok::<_, ChainError>((
                    row.get::<i64, _>("number") as u64,
                    parse_hash(row.get("hash"))?,
                ))
            })
            .collect()
    }

    /// Stores an unconfirmed block and marks its submissions as included.
    pub async fn include_block(
        &self,
        number: u64,
        hash: &TxHash,
        ours: &[Ours],
    ) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        sqlx::query("INSERT INTO unconfirmed (number, hash) VALUES ($1, $2)")
            .bind(number as i64)
            .bind(hash.to_string())
            .execute(&mut *tx)
            .await?;
        for ours in ours {
            sqlx::query(
                "UPDATE submission SET included = $1, included_block = $2 \
                 WHERE key = $3 AND block_number IS NULL",
            )
            .bind(ours.attempt.to_string())
            .bind(number as i64)
            .bind(&ours.key)
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Undoes the unconfirmed blocks above `ancestor`; `None`: all of them. Returns how many
    /// submissions are in no block again.
    pub async fn unwind(&self, ancestor: Option<u64>) -> Result<u64, ChainError> {
        let ancestor = ancestor.map_or(-1, |number| number as i64);
        let mut tx = self.db.write().await?;
        sqlx::query("DELETE FROM unconfirmed WHERE number > $1")
            .bind(ancestor)
            .execute(&mut *tx)
            .await?;
        let changed = sqlx::query(
            "UPDATE submission SET included = NULL, included_block = NULL \
             WHERE block_number IS NULL AND included_block > $1",
        )
        .bind(ancestor)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(changed.rows_affected())
    }

    /// Marks the submissions of a final block, advances the cursor and appends events, in one
    /// transaction. A cancelled submission is parked.
    pub async fn record_final(
        &self,
        number: u64,
        hash: &TxHash,
        ours: &[(Ours, Receipt)],
        published: &[events::Event],
    ) -> Result<(), ChainError> {
        let mut tx = self.db.write().await?;
        for (ours, receipt) in ours {
            if ours.executes() || ours.is_filler() {
                finalise_in_tx(&mut tx, number, hash, ours, receipt).await?;
            } else {
                sqlx::query(
                    "UPDATE submission SET nonce = NULL, latest = tx_hash, included = NULL, \
                     included_block = NULL WHERE key = $1 AND block_number IS NULL",
                )
                .bind(&ours.key)
                .execute(&mut *tx)
                .await?;
            }
        }
        sqlx::query("DELETE FROM unconfirmed WHERE number <= $1")
            .bind(number as i64)
            .execute(&mut *tx)
            .await?;
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

/// Key of the transaction that fills a nonce without a submission.
pub(super) fn filler_key(nonce: u64) -> String {
    format!("{FILLER}{nonce}")
}

fn is_filler_key(key: &str) -> bool {
    key.starts_with(FILLER)
}

async fn finalise_in_tx(
    tx: &mut Tx,
    number: u64,
    hash: &TxHash,
    ours: &Ours,
    receipt: &Receipt,
) -> Result<(), ChainError> {
    sqlx::query(
        "UPDATE submission SET block_number = $1, block_hash = $2, success = $3, gas_used = $4, \
         included = $5, included_block = $1 WHERE key = $6",
    )
    .bind(number as i64)
    .bind(hash.to_string())
    .bind(receipt.status == ReceiptStatus::Success)
    .bind(receipt.gas_used as i64)
    .bind(ours.attempt.to_string())
    .bind(&ours.key)
    .execute(&mut **tx)
    .await?;
    // Never sent again: the chain has the bytes, which are the largest part of a batch here.
    sqlx::query("UPDATE attempt SET raw = x'' WHERE key = $1")
        .bind(&ours.key)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

async fn insert_in_tx(
    tx: &mut Tx,
    key: &str,
    attempt: &Attempt,
    contract: &str,
    call_digest: Option<i64>,
) -> Result<(), ChainError> {
    sqlx::query(
        "INSERT INTO submission (key, nonce, tx_hash, contract, submitted_us, latest, call_digest) \
         VALUES ($1, $2, $3, $4, $5, $3, $6)",
    )
    .bind(key)
    .bind(attempt.nonce as i64)
    .bind(attempt.tx_hash.to_string())
    .bind(contract)
    .bind(service_kit::clock::now_us())
    .bind(call_digest)
    .execute(&mut **tx)
    .await?;
    insert_attempt_in_tx(tx, key, attempt).await
}

async fn insert_attempt_in_tx(tx: &mut Tx, key: &str, attempt: &Attempt) -> Result<(), ChainError> {
    sqlx::query(
        "INSERT INTO attempt (tx_hash, key, nonce, raw, cancels, signed_block) \
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(attempt.tx_hash.to_string())
    .bind(key)
    .bind(attempt.nonce as i64)
    .bind(attempt.raw.as_slice())
    .bind(attempt.cancels)
    .bind(attempt.signed_block as i64)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

async fn delete_attempt_in_tx(tx: &mut Tx, tx_hash: &TxHash) -> Result<(), ChainError> {
    sqlx::query("DELETE FROM attempt WHERE tx_hash = $1")
        .bind(tx_hash.to_string())
        .execute(&mut **tx)
        .await?;
    Ok(())
}

fn corrupt() -> ChainError {
    ChainError::Corrupt("malformed submission row".into())
}

fn parse_hash(text: &str) -> Result<TxHash, ChainError> {
    text.parse().map_err(|_| corrupt())
}

fn decode(row: &SqliteRow) -> Result<Stored, ChainError> {
    let contract: String = row.get("contract");
    let nonce = row.get::<Option<i64>, _>("nonce").map(|nonce| nonce as u64);
    let hash = |column: &str| {
        let text: Option<String> = row.get(column);
        text.map(|text| parse_hash(&text)).transpose()
    };
    Ok(Stored {
        key: row.get("key"),
        submission: Submission {
            tx_hash: parse_hash(row.get("tx_hash"))?,
            nonce: nonce.unwrap_or_default(),
            contract: if contract.is_empty() {
                None
            } else {
                Some(contract.parse().map_err(|_| corrupt())?)
            },
        },
        nonce,
        latest: parse_hash(row.get("latest"))?,
        included: hash("included")?,
        is_final: row.get::<Option<i64>, _>("block_number").is_some(),
        block_hash: hash("block_hash")?,
        call_digest: row.get("call_digest"),
    })
}

fn decode_attempt(row: &SqliteRow) -> Result<Attempt, ChainError> {
    Ok(Attempt {
        tx_hash: parse_hash(row.get("attempt_hash"))?,
        nonce: row.get::<i64, _>("attempt_nonce") as u64,
        raw: row.get("raw"),
        cancels: row.get("cancels"),
        signed_block: row.get::<i64, _>("signed_block") as u64,
    })
}
