//! The rows of the audit chain: its head and the next block.

use events::many::{Many, Script};
use sqlx::{FromRow, SqliteConnection};

use super::{Group, Store, rows};
use crate::{
    Error,
    audit::{Block, Hash, Head, OperationRecord, PostingRecord},
};

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
    /// Every operation is sealed with its group, so operations without any block were not made by a ledger, or their blocks were taken away.
    pub(super) async fn check_chain(&self) -> Result<(), Error> {
        let is_cut: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM operations) AND NOT EXISTS (SELECT 1 FROM audit_blocks WHERE block > 0)",
        )
        .fetch_one(self.db().read())
        .await?;
        match is_cut {
            true => Err(Error::Broken(
                "chain of blocks: operations without any".to_owned(),
            )),
            false => Ok(()),
        }
    }
}
