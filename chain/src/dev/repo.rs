//! The development chain's SQLite store.
//!
//! `append` writes a block and its state changes in one transaction with `synchronous = FULL`,
//! before the block is visible. So a restart after a kill loses no visible block.
//!
//! The transactions of the last blocks stay in memory, decoded: the connector reads each block
//! several times after it was sealed, and a batch of trades has a thousand logs.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use alloy::consensus::Header;
use alloy::primitives::{Address, B256, Bytes, KECCAK256_EMPTY, U256};
use alloy::rlp::{Decodable, Encodable};
use alloy::rpc::types::TransactionReceipt;
use events::{MultiRow, Script};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use revm::database::{CacheDB, EmptyDB};
use revm::state::{AccountInfo, Bytecode};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqliteRow, SqliteSynchronous,
};
use sqlx::{Connection, Row, SqliteConnection};

use super::receipts;
use super::state::StateDiff;

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/devchain": "0001_chain");

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("development chain store: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("development chain store: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("development chain store is damaged: {0}")]
    Corrupt(String),
    #[error(
        "the chain in the data directory has chain id {stored}, but chain.chain_id is {configured}"
    )]
    OtherChain { stored: u64, configured: u64 },
}

impl StoreError {
    /// Whether a retry may succeed: the store is temporarily not writable.
    pub fn is_transient(&self) -> bool {
        matches!(self, StoreError::Sql(error) if events::is_away(error))
    }
}

/// A stored transaction: the signed bytes and the receipt.
#[derive(Debug, Clone)]
pub struct StoredTransaction {
    pub raw: Bytes,
    pub receipt: TransactionReceipt,
}

/// Blocks whose transactions stay in memory, and their logs: about 20 MB.
const RECENT_BLOCKS: usize = 32;
const RECENT_LOGS: usize = 40_000;

/// The transactions of the last blocks. Blocks are consecutive; the last one is the chain's last.
#[derive(Debug, Default)]
struct Recent {
    blocks: VecDeque<(u64, Vec<Arc<StoredTransaction>>)>,
    logs: usize,
}

fn logs_of(transactions: &[Arc<StoredTransaction>]) -> usize {
    let logs = transactions
        .iter()
        .map(|stored| stored.receipt.logs().len());
    logs.sum()
}

impl Recent {
    /// Adds the block after the last one.
    fn push(&mut self, number: u64, transactions: &[Arc<StoredTransaction>]) {
        if self
            .blocks
            .back()
            .is_some_and(|(last, _)| last + 1 != number)
        {
            *self = Self::default();
        }
        self.logs += logs_of(transactions);
        self.blocks.push_back((number, transactions.to_vec()));
        while self.blocks.len() > RECENT_BLOCKS
            || (self.logs > RECENT_LOGS && self.blocks.len() > 1)
        {
            if let Some((_, removed)) = self.blocks.pop_front() {
                self.logs -= logs_of(&removed);
            }
        }
    }

    /// Transactions of the blocks from..=to in chain order; `None` if an earlier block is asked for
    /// or no block is known.
    fn transactions(&self, from: u64, to: u64) -> Option<Vec<Arc<StoredTransaction>>> {
        let (first, _) = self.blocks.front()?;
        if from < *first {
            return None;
        }
        let blocks = self.blocks.iter();
        let wanted = blocks.filter(|(number, _)| (from..=to).contains(number));
        let transactions = wanted.flat_map(|(_, transactions)| transactions);
        Some(transactions.cloned().collect())
    }

    fn transaction(&self, tx_hash: B256) -> Option<Arc<StoredTransaction>> {
        let blocks = self.blocks.iter().rev();
        let mut transactions = blocks.flat_map(|(_, transactions)| transactions);
        let found = transactions.find(|stored| stored.receipt.transaction_hash == tx_hash);
        found.cloned()
    }
}

#[derive(Debug, Clone)]
pub struct Store {
    pool: SqlitePool,
    recent: Arc<Mutex<Recent>>,
}

impl Store {
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(std::time::Duration::from_secs(10));
        let pool = events::sqlite::pool_options()
            .max_connections(4)
            .connect_with(options)
            .await?;
        MIGRATOR.run(&pool).await?;
        Ok(Self {
            pool,
            recent: Arc::default(),
        })
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// Id of the stored chain.
    pub async fn chain_id(&self) -> Result<u64, StoreError> {
        let stored: Option<String> =
            sqlx::query_scalar("SELECT value FROM setting WHERE name = 'chain_id'")
                .fetch_optional(&self.pool)
                .await?;
        let id = stored.and_then(|id| id.parse().ok());
        id.ok_or_else(|| StoreError::Corrupt("chain_id".into()))
    }

    /// The last block and the whole state; `None` if the store is new.
    pub async fn load(
        &self,
        chain_id: u64,
    ) -> Result<Option<(Header, CacheDB<EmptyDB>)>, StoreError> {
        let Some(row) = sqlx::query("SELECT header FROM block ORDER BY number DESC LIMIT 1")
            .fetch_optional(&self.pool)
            .await?
        else {
            return Ok(None);
        };
        let stored = self.chain_id().await?;
        if stored != chain_id {
            return Err(StoreError::OtherChain {
                stored,
                configured: chain_id,
            });
        }
        let header = decode_header(&row)?;
        let mut db = CacheDB::new(EmptyDB::default());
        for row in sqlx::query("SELECT hash, bytecode FROM code")
            .fetch_all(&self.pool)
            .await?
        {
            db.cache.contracts.insert(
                hash(&row, "hash")?,
                Bytecode::new_raw(Bytes::from(row.get::<Vec<u8>, _>("bytecode"))),
            );
        }
        for row in sqlx::query("SELECT address, nonce, balance, code_hash FROM account")
            .fetch_all(&self.pool)
            .await?
        {
            let nonce: i64 = row.get("nonce");
            let info = AccountInfo {
                balance: word(&row, "balance")?,
                nonce: u64::try_from(nonce).map_err(|_| StoreError::Corrupt("nonce".into()))?,
                code_hash: hash(&row, "code_hash")?,
                code: None,
                ..AccountInfo::default()
            };
            db.insert_account_info(address(&row)?, info);
        }
        for row in sqlx::query("SELECT address, key, value FROM slot")
            .fetch_all(&self.pool)
            .await?
        {
            let entry = db.cache.accounts.entry(address(&row)?).or_default();
            entry
                .storage
                .insert(word(&row, "key")?, word(&row, "value")?);
        }
        Ok(Some((header, db)))
    }

    /// Stores a block with its transactions and state changes.
    pub async fn append(
        &self,
        chain_id: u64,
        header: &Header,
        block_hash: B256,
        transactions: &[Arc<StoredTransaction>],
        diff: &StateDiff,
    ) -> Result<(), StoreError> {
        let mut encoded = Vec::new();
        header.encode(&mut encoded);
        let number = header.number as i64;
        let mut tx = self.pool.begin().await?;
        if number == 0 {
            sqlx::query("INSERT INTO setting (name, value) VALUES ('chain_id', $1)")
                .bind(chain_id.to_string())
                .execute(&mut *tx)
                .await?;
        }
        sqlx::query("INSERT INTO block (number, hash, header) VALUES ($1, $2, $3)")
            .bind(number)
            .bind(block_hash.as_slice())
            .bind(encoded)
            .execute(&mut *tx)
            .await?;
        for (position, stored) in transactions.iter().enumerate() {
            let receipt = receipts::encode(&stored.receipt).map_err(StoreError::Corrupt)?;
            sqlx::query(
                "INSERT INTO transaction_ (hash, block_number, position, raw, receipt) \
                 VALUES ($1, $2, $3, $4, $5)",
            )
            .bind(stored.receipt.transaction_hash.as_slice())
            .bind(number)
            .bind(position as i64)
            .bind(stored.raw.as_ref())
            .bind(receipt)
            .execute(&mut *tx)
            .await?;
        }
        put_state(&mut tx, diff).await?;
        tx.commit().await?;
        self.recent().push(header.number, transactions);
        Ok(())
    }

    pub async fn header_by_number(&self, number: u64) -> Result<Option<Header>, StoreError> {
        let row = sqlx::query("SELECT header FROM block WHERE number = $1")
            .bind(number as i64)
            .fetch_optional(&self.pool)
            .await?;
        row.as_ref().map(decode_header).transpose()
    }

    pub async fn header_by_hash(&self, block_hash: B256) -> Result<Option<Header>, StoreError> {
        let row = sqlx::query("SELECT header FROM block WHERE hash = $1")
            .bind(block_hash.as_slice())
            .fetch_optional(&self.pool)
            .await?;
        row.as_ref().map(decode_header).transpose()
    }

    /// Hashes of the transactions of a block, in its order.
    pub async fn hashes(&self, block: u64) -> Result<Vec<B256>, StoreError> {
        let recent = self.recent().transactions(block, block);
        if let Some(recent) = recent {
            let hashes = recent.iter().map(|stored| stored.receipt.transaction_hash);
            return Ok(hashes.collect());
        }
        let rows =
            sqlx::query("SELECT hash FROM transaction_ WHERE block_number = $1 ORDER BY position")
                .bind(block as i64)
                .fetch_all(&self.pool)
                .await?;
        rows.iter().map(|row| hash(row, "hash")).collect()
    }

    /// Transactions of the blocks from..=to, in chain order.
    pub fn transactions(
        &self,
        from: u64,
        to: u64,
    ) -> BoxStream<'_, Result<Arc<StoredTransaction>, StoreError>> {
        let recent = self.recent().transactions(from, to);
        if let Some(recent) = recent {
            return stream::iter(recent.into_iter().map(Ok)).boxed();
        }
        let rows = sqlx::query(
            "SELECT raw, receipt FROM transaction_ \
             WHERE block_number BETWEEN $1 AND $2 ORDER BY block_number, position",
        )
        .bind(from as i64)
        .bind(to.min(i64::MAX as u64) as i64)
        .fetch(&self.pool);
        rows.map(|row| decode_transaction(&row?).map(Arc::new))
            .boxed()
    }

    pub async fn transaction(
        &self,
        tx_hash: B256,
    ) -> Result<Option<Arc<StoredTransaction>>, StoreError> {
        let recent = self.recent().transaction(tx_hash);
        if recent.is_some() {
            return Ok(recent);
        }
        let row = sqlx::query("SELECT raw, receipt FROM transaction_ WHERE hash = $1")
            .bind(tx_hash.as_slice())
            .fetch_optional(&self.pool)
            .await?;
        let stored = row.as_ref().map(decode_transaction).transpose()?;
        Ok(stored.map(Arc::new))
    }
}

static SLOTS: MultiRow = MultiRow::new(
    "INSERT INTO slot (address, key, value) SELECT * FROM (VALUES ",
    3,
    ") WHERE true LIMIT +? ON CONFLICT (address, key) DO UPDATE SET value = excluded.value",
);

/// Writes code, accounts and storage that a block changed.
async fn put_state(
    tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>,
    diff: &StateDiff,
) -> Result<(), StoreError> {
    for (code_hash, code) in &diff.codes {
        sqlx::query(
            "INSERT INTO code (hash, bytecode) VALUES ($1, $2) ON CONFLICT (hash) DO NOTHING",
        )
        .bind(code_hash.as_slice())
        .bind(code.as_ref())
        .execute(&mut **tx)
        .await?;
    }
    for (address, info) in &diff.accounts {
        let code_hash = if info.code_hash.is_zero() {
            KECCAK256_EMPTY
        } else {
            info.code_hash
        };
        sqlx::query(
            "INSERT INTO account (address, nonce, balance, code_hash) VALUES ($1, $2, $3, $4)
             ON CONFLICT (address) DO UPDATE SET nonce = excluded.nonce, \
             balance = excluded.balance, code_hash = excluded.code_hash",
        )
        .bind(address.as_slice())
        .bind(info.nonce as i64)
        .bind(info.balance.to_be_bytes::<32>().as_slice())
        .bind(code_hash.as_slice())
        .execute(&mut **tx)
        .await?;
    }
    let slots: Vec<_> = diff.slots.iter().collect();
    let mut script = Script::default();
    script
        .add(tx, &SLOTS, &slots, |((address, key), value), row| {
            row.put(address.as_slice());
            row.put(key.to_be_bytes::<32>().as_slice());
            row.put(value.to_be_bytes::<32>().as_slice());
        })
        .await?;
    Ok(script.run(tx).await?)
}

/// Times of these blocks in the file of a development chain, in seconds, by number. A block that
/// the file does not have is missing. Read-only, with or without a running chain.
pub(super) async fn block_times(
    file: &Path,
    numbers: &[u64],
) -> Result<HashMap<u64, u64>, StoreError> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    let mut db = SqliteConnection::connect_with(&options).await?;
    let rows = sqlx::query(
        "SELECT b.header FROM json_each($1) AS k CROSS JOIN block AS b ON b.number = k.value",
    )
    .bind(serde_json::json!(numbers).to_string())
    .fetch_all(&mut db)
    .await?;
    db.close().await?;
    let time = |row: &SqliteRow| {
        let header = decode_header(row)?;
        Ok((header.number, header.timestamp))
    };
    rows.iter().map(time).collect()
}

fn decode_header(row: &SqliteRow) -> Result<Header, StoreError> {
    let bytes: Vec<u8> = row.get("header");
    Header::decode(&mut bytes.as_slice()).map_err(|error| StoreError::Corrupt(error.to_string()))
}

fn decode_transaction(row: &SqliteRow) -> Result<StoredTransaction, StoreError> {
    // Of type BLOB; TEXT in a row of an older release.
    let receipt: Vec<u8> = row.get("receipt");
    let receipt = receipts::decode(&receipt);
    Ok(StoredTransaction {
        raw: Bytes::from(row.get::<Vec<u8>, _>("raw")),
        receipt: receipt.ok_or_else(|| StoreError::Corrupt("receipt".into()))?,
    })
}

fn address(row: &SqliteRow) -> Result<Address, StoreError> {
    let bytes: Vec<u8> = row.get("address");
    Address::try_from(bytes.as_slice()).map_err(|_| StoreError::Corrupt("address".into()))
}

fn hash(row: &SqliteRow, column: &'static str) -> Result<B256, StoreError> {
    let bytes: Vec<u8> = row.get(column);
    B256::try_from(bytes.as_slice()).map_err(|_| StoreError::Corrupt(column.into()))
}

fn word(row: &SqliteRow, column: &'static str) -> Result<U256, StoreError> {
    Ok(U256::from_be_bytes(hash(row, column)?.0))
}

#[cfg(test)]
mod tests {
    use alloy::consensus::{Eip658Value, Receipt, ReceiptEnvelope, ReceiptWithBloom};
    use alloy::primitives::Bloom;

    use super::*;

    fn stored(number: u8) -> Arc<StoredTransaction> {
        let receipt = ReceiptWithBloom {
            receipt: Receipt {
                status: Eip658Value::Eip658(true),
                cumulative_gas_used: 0,
                logs: Vec::new(),
            },
            logs_bloom: Bloom::ZERO,
        };
        Arc::new(StoredTransaction {
            raw: Bytes::new(),
            receipt: TransactionReceipt {
                inner: ReceiptEnvelope::Eip1559(receipt),
                transaction_hash: B256::with_last_byte(number),
                transaction_index: Some(0),
                block_hash: None,
                block_number: Some(number.into()),
                gas_used: 0,
                effective_gas_price: 0,
                blob_gas_used: None,
                blob_gas_price: None,
                from: Address::ZERO,
                to: None,
                contract_address: None,
            },
        })
    }

    #[test]
    fn only_blocks_in_memory_are_answered_from_it() {
        let mut recent = Recent::default();
        assert!(recent.transactions(0, u64::MAX).is_none());
        for number in 1..=40 {
            recent.push(number.into(), &[stored(number)]);
        }
        assert_eq!(recent.blocks.len(), RECENT_BLOCKS);
        assert!(recent.transactions(8, 9).is_none(), "block 8 is removed");
        let hashes = |from, to| -> Vec<u8> {
            let found = recent.transactions(from, to).expect("in memory");
            let hashes = found.iter().map(|stored| stored.receipt.transaction_hash);
            hashes.map(|hash| hash[31]).collect()
        };
        assert_eq!(hashes(9, 11), [9, 10, 11]);
        assert_eq!(hashes(40, u64::MAX), [40]);
        assert!(hashes(41, 50).is_empty());
        assert!(recent.transaction(B256::with_last_byte(8)).is_none());
        assert!(recent.transaction(B256::with_last_byte(9)).is_some());
        // A gap: the blocks before it would be taken for consecutive ones.
        recent.push(50, &[stored(50)]);
        assert_eq!(recent.blocks.len(), 1);
    }
}
