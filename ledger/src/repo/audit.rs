//! Rows of the audit chain: its last block and the sealed rows. Audit records have the rows of
//! every service.

pub use events::audit::{INSERT_RECORD, LAST_RECORD, RecordFilter, RecordRow};

use super::rows;
use crate::{
    Error,
    audit::{Hash, Head, OperationRecord, PostingRecord},
};

/// A stored hash.
pub fn hash_of(sequence: i64, bytes: &[u8]) -> Result<Hash, Error> {
    let corrupt = |_| rows::corrupt("hash of audit record", &sequence.to_string());
    Hash::try_from(bytes).map_err(corrupt)
}

events::row! {
    /// State at the start of a group: the last block, and whether limits or parked notices exist.
    pub struct Start {
        pub(super) block: i64,
        pub(super) hash: Vec<u8>,
        pub(super) sealed_at_us: i64,
        pub has_limits: bool,
        pub has_news: bool,
    }
}

impl Start {
    pub const SQL: &str = "SELECT block, hash, sealed_at_us, EXISTS (SELECT 1 FROM velocity_limits) AS has_limits, \
         EXISTS (SELECT 1 FROM parked) AS has_news FROM audit_blocks ORDER BY block DESC LIMIT 1";

    pub fn head(&self) -> Result<Head, Error> {
        let hash = Hash::try_from(self.hash.as_slice());
        Ok(Head {
            block: self.block.unsigned_abs(),
            hash: hash.map_err(|_| rows::corrupt("hash of block", &self.block.to_string()))?,
            sealed_at_us: self.sealed_at_us,
        })
    }
}

events::row! {
    /// An operation row with its sealed columns.
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
}

impl SealedOperation {
    pub const COLUMNS: &str = "o.operation_id, o.scope, o.kind, o.user_id, o.idempotency_key, o.external_ref, \
         o.awaits_chain, o.reverses, o.digest, o.created_at_us, o.block, o.place";

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

events::row! {
    /// A posting row with its sealed columns.
    pub struct SealedPosting {
        pub operation_id: String,
        pub ordinal: i32,
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
}

impl SealedPosting {
    pub const COLUMNS: &str = "p.operation_id, p.ordinal, p.posting_id, p.debit_subaccount_id, \
         p.credit_subaccount_id, p.instrument_id, p.amount, p.hold_id, p.unsettled, p.debit_balance_after, \
         p.debit_version, p.credit_balance_after, p.credit_version, p.created_at_us";

    pub fn record(&self) -> PostingRecord<'_> {
        PostingRecord {
            ordinal: i64::from(self.ordinal),
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
