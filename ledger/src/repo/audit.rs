//! The rows of the audit chain: its head, the next block, and the rows of before the chain, which are sealed when the store is first opened.

use events::many::{Many, Script};
use sqlx::{FromRow, SqliteConnection};

use super::{Group, Store, rows};
use crate::{
    Error,
    audit::{Block, Hash, Head, OperationRecord, PostingRecord, Sealer},
};

/// Operations that one block takes of what was there before the chain.
const OLD_OPERATIONS: i64 = 8_192;

/// Where a group begins.
pub struct Start {
    pub head: Head,
    /// Whether any velocity limit exists.
    pub has_limits: bool,
}

impl Group {
    /// The end of the chain, and whether limits have to be loaded: one statement.
    pub async fn start(&mut self) -> Result<Start, Error> {
        start(&mut self.tx).await
    }
}

async fn start(tx: &mut SqliteConnection) -> Result<Start, Error> {
    let (block, hash, sealed_at_us, has_limits): (i64, Vec<u8>, i64, bool) = sqlx::query_as(
        "SELECT block, hash, sealed_at_us, EXISTS (SELECT 1 FROM velocity_limits) FROM audit_blocks ORDER BY block DESC LIMIT 1",
    )
    .fetch_one(tx)
    .await?;
    let head = Head {
        block: block.unsigned_abs(),
        hash: to_hash(&hash, block)?,
        sealed_at_us,
    };
    Ok(Start { head, has_limits })
}

static BLOCKS: Many = Many::new(
    "INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) SELECT * FROM (VALUES ",
    6,
    ") LIMIT +?",
);

/// Writes the block of a group, if it has one.
pub async fn save_block(
    script: &mut Script,
    tx: &mut SqliteConnection,
    block: Option<&Block>,
) -> Result<(), sqlx::Error> {
    let block: Vec<&Block> = block.into_iter().collect();
    script
        .add(tx, &BLOCKS, &block, |block, row| {
            row.put(block.block.cast_signed());
            row.put(block.previous_hash.to_vec());
            row.put(block.hash.to_vec());
            row.put(block.operations as i64);
            row.put(block.postings as i64);
            row.put(block.sealed_at_us);
        })
        .await
}

async fn insert(tx: &mut SqliteConnection, block: &Block) -> Result<(), Error> {
    sqlx::query(
        "INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(block.block as i64)
    .bind(block.previous_hash.as_slice())
    .bind(block.hash.as_slice())
    .bind(block.operations as i64)
    .bind(block.postings as i64)
    .bind(block.sealed_at_us)
    .execute(tx)
    .await?;
    Ok(())
}

fn to_hash(bytes: &[u8], block: i64) -> Result<Hash, Error> {
    Hash::try_from(bytes).map_err(|_| rows::broken("hash of block", &block.to_string()))
}

/// Operation row as it is sealed.
#[derive(FromRow)]
pub struct SealedOperation {
    pub operation_id: String,
    scope: i32,
    kind: i32,
    user_id: String,
    idempotency_key: String,
    external_ref: Option<String>,
    awaits_chain: bool,
    reverses: Option<String>,
    digest: i64,
    created_at_us: i64,
    pub block: Option<i64>,
    pub place: Option<i64>,
}

impl SealedOperation {
    pub const COLUMNS: &str = "o.operation_id, o.scope, o.kind, o.user_id, o.idempotency_key, o.external_ref, o.awaits_chain, \
         o.reverses, o.digest, o.created_at_us, o.block, o.place";

    pub fn record(&self) -> OperationRecord<'_> {
        OperationRecord {
            operation_id: &self.operation_id,
            scope: self.scope,
            kind: self.kind,
            user_id: &self.user_id,
            idempotency_key: &self.idempotency_key,
            external_ref: self.external_ref.as_deref(),
            awaits_chain: self.awaits_chain,
            reverses: self.reverses.as_deref(),
            digest: self.digest,
            created_at_us: self.created_at_us,
        }
    }
}

/// Posting row as it is sealed.
#[derive(FromRow)]
pub struct SealedPosting {
    pub operation_id: String,
    pub ordinal: i64,
    pub posting_id: String,
    pub debit_subaccount_id: String,
    pub credit_subaccount_id: String,
    pub instrument_id: String,
    pub amount: i64,
    pub hold_id: Option<String>,
    unsettled: bool,
    pub debit_balance_after: i64,
    pub debit_version: i64,
    pub credit_balance_after: i64,
    pub credit_version: i64,
    pub created_at_us: i64,
}

impl SealedPosting {
    pub const COLUMNS: &str = "p.operation_id, p.ordinal, p.posting_id, p.debit_subaccount_id, p.credit_subaccount_id, p.instrument_id, \
         p.amount, p.hold_id, p.unsettled, p.debit_balance_after, p.debit_version, p.credit_balance_after, p.credit_version, p.created_at_us";

    pub fn record(&self) -> PostingRecord<'_> {
        PostingRecord {
            ordinal: self.ordinal,
            posting_id: &self.posting_id,
            debit_subaccount_id: &self.debit_subaccount_id,
            credit_subaccount_id: &self.credit_subaccount_id,
            instrument_id: &self.instrument_id,
            amount: self.amount,
            hold_id: self.hold_id.as_deref(),
            unsettled: self.unsettled,
            debit_balance_after: self.debit_balance_after,
            debit_version: self.debit_version,
            credit_balance_after: self.credit_balance_after,
            credit_version: self.credit_version,
            created_at_us: self.created_at_us,
        }
    }
}

/// The postings of some operations, each operation's in their order.
pub async fn postings_of(
    reader: &mut SqliteConnection,
    operations: &[SealedOperation],
) -> Result<std::collections::HashMap<String, Vec<SealedPosting>>, Error> {
    let sql = format!(
        "SELECT {} FROM postings p WHERE p.operation_id IN (SELECT value FROM json_each($1)) ORDER BY p.operation_id, p.ordinal",
        SealedPosting::COLUMNS
    );
    let ids: Vec<&str> = operations
        .iter()
        .map(|operation| operation.operation_id.as_str())
        .collect();
    let ids = serde_json::to_string(&ids).expect("texts have a JSON form");
    let found: Vec<SealedPosting> = sqlx::query_as(sqlx::AssertSqlSafe(sql))
        .bind(ids)
        .fetch_all(reader)
        .await?;
    let mut by_operation = std::collections::HashMap::<String, Vec<SealedPosting>>::new();
    for posting in found {
        by_operation
            .entry(posting.operation_id.clone())
            .or_default()
            .push(posting);
    }
    Ok(by_operation)
}

impl Store {
    /// Seals what was posted before there was a chain. Does so only while the chain is empty: an operation without a block is never taken
    /// in later, it is a break that `verify` names.
    pub(super) async fn seal_old(&self, now_us: i64) -> Result<(), Error> {
        let mut tx = self.db().write().await?;
        let mut head = start(&mut tx).await?.head;
        if head.block > 0 {
            return Ok(());
        }
        let sql = format!(
            "SELECT {} FROM operations o WHERE o.block IS NULL ORDER BY o.created_at_us, o.operation_id LIMIT $1",
            SealedOperation::COLUMNS
        );
        loop {
            let old: Vec<SealedOperation> = sqlx::query_as(sqlx::AssertSqlSafe(sql.clone()))
                .bind(OLD_OPERATIONS)
                .fetch_all(&mut *tx)
                .await?;
            if old.is_empty() {
                break;
            }
            let postings = postings_of(&mut tx, &old).await?;
            let mut sealer = Sealer::after(&head, now_us.max(head.sealed_at_us));
            for (place, operation) in old.iter().enumerate() {
                sealer.operation(&operation.record());
                for posting in postings.get(&operation.operation_id).into_iter().flatten() {
                    sealer.posting(&posting.record());
                }
                sqlx::query("UPDATE operations SET block = $1, place = $2 WHERE operation_id = $3")
                    .bind((head.block + 1) as i64)
                    .bind(place as i64)
                    .bind(&operation.operation_id)
                    .execute(&mut *tx)
                    .await?;
            }
            let block = sealer.seal();
            insert(&mut tx, &block).await?;
            tracing::info!(
                block = block.block,
                operations = block.operations,
                "older operations sealed"
            );
            head = Head {
                block: block.block,
                hash: block.hash,
                sealed_at_us: block.sealed_at_us,
            };
        }
        Ok(tx.commit().await?)
    }
}
