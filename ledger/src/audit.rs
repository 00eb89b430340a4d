//! The audit chain: content of a sealed block and its hash; and the audit records (D34) of a group,
//! sealed as those of every service ([`service_kit::audit`]). Pure.
//!
//! A block's hash is SHA-256 over the previous hash, the block's number and time, the immutable
//! terms of its operations in order, the postings of each in order, and the two counts. Each field
//! has exactly one encoding, so different contents have different bytes. A number is big-endian at
//! fixed width. A text is its length (`u32`) and its bytes. An optional value is `0`, or `1` and
//! the value. Mutable fields (status, transaction hash, reversing operation) are not sealed. Cost:
//! one hash pass over some 500 bytes per operation.

use service_kit::audit::{self as chain, AuditRecord, BEGINNING};
pub use service_kit::audit::{Hash, hex};
use sha2::{Digest, Sha256};

use crate::{
    book::Book,
    effects::Effect,
    model::{Id, OperationTerms, Posting},
};

/// First bytes of every block's content; identifies the encoding.
const TAG: &[u8] = b"ledger-block-1";

/// Name of this service in its audit records.
pub const SERVICE: &str = "ledger";

/// The last block of the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub block: u64,
    pub hash: Hash,
    pub sealed_at_us: i64,
}

/// A block to write. Block 0 contains no operations; its hash is all zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub block: u64,
    pub previous_hash: Hash,
    pub hash: Hash,
    pub operations: u64,
    pub postings: u64,
    pub sealed_at_us: i64,
}

/// The immutable fields of an operation, as stored.
pub struct OperationRecord<'a> {
    pub operation_id: &'a str,
    pub scope: i32,
    pub kind: i32,
    pub user_id: &'a str,
    pub idempotency_key: &'a str,
    pub external_ref: Option<&'a str>,
    pub awaits_chain: bool,
    pub reverses: Option<&'a str>,
    pub digest: i64,
    pub created_at_us: i64,
}

/// A posting, as stored.
pub struct PostingRecord<'a> {
    pub ordinal: i64,
    pub posting_id: &'a str,
    pub debit_subaccount_id: &'a str,
    pub credit_subaccount_id: &'a str,
    pub instrument_id: &'a str,
    /// Minor units.
    pub amount: i64,
    pub hold_id: Option<&'a str>,
    pub unsettled: bool,
    pub debit_balance_after: i64,
    pub debit_version: i64,
    pub credit_balance_after: i64,
    pub credit_version: i64,
    pub created_at_us: i64,
}

/// Hashes the content of one block, operation by operation.
pub struct Sealer {
    hasher: Sha256,
    block: Block,
}

impl Sealer {
    /// Begins the block that follows `head`.
    pub fn after(head: &Head, sealed_at_us: i64) -> Self {
        let block = Block {
            block: head.block + 1,
            previous_hash: head.hash,
            hash: [0; 32],
            operations: 0,
            postings: 0,
            sealed_at_us,
        };
        let mut sealer = Sealer {
            hasher: Sha256::new(),
            block,
        };
        sealer.hasher.update(head.hash);
        sealer.hasher.update(TAG);
        sealer.hasher.update((head.block + 1).to_be_bytes());
        sealer.int(sealed_at_us);
        sealer
    }

    /// Adds an operation. The caller adds its postings next.
    pub fn operation(&mut self, of: &OperationRecord) {
        self.block.operations += 1;
        self.hasher.update(b"O");
        self.text(of.operation_id);
        self.int(i64::from(of.scope));
        self.int(i64::from(of.kind));
        self.text(of.user_id);
        self.text(of.idempotency_key);
        self.optional(of.external_ref);
        self.int(i64::from(of.awaits_chain));
        self.optional(of.reverses);
        self.int(of.digest);
        self.int(of.created_at_us);
    }

    /// Adds a posting of the last operation.
    pub fn posting(&mut self, of: &PostingRecord) {
        self.block.postings += 1;
        self.hasher.update(b"P");
        self.int(of.ordinal);
        self.text(of.posting_id);
        self.text(of.debit_subaccount_id);
        self.text(of.credit_subaccount_id);
        self.text(of.instrument_id);
        self.int(of.amount);
        self.optional(of.hold_id);
        self.int(i64::from(of.unsettled));
        self.int(of.debit_balance_after);
        self.int(of.debit_version);
        self.int(of.credit_balance_after);
        self.int(of.credit_version);
        self.int(of.created_at_us);
    }

    /// Returns the block with its hash.
    pub fn seal(mut self) -> Block {
        self.hasher.update(b"E");
        self.hasher.update(self.block.operations.to_be_bytes());
        self.hasher.update(self.block.postings.to_be_bytes());
        self.block.hash = self.hasher.finalize().into();
        self.block
    }

    fn int(&mut self, value: i64) {
        self.hasher.update(value.to_be_bytes());
    }

    fn text(&mut self, text: &str) {
        let length = u32::try_from(text.len()).expect("a text is shorter than 4 GiB");
        self.hasher.update(length.to_be_bytes());
        self.hasher.update(text);
    }

    fn optional(&mut self, text: Option<&str>) {
        self.hasher.update([u8::from(text.is_some())]);
        if let Some(text) = text {
            self.text(text);
        }
    }
}

/// What a caller did (D34).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Act {
    /// For example `limit.set`.
    pub action: &'static str,
    /// Subject of the credential.
    pub actor: String,
    pub object_id: Id,
    /// State before and after; empty: none.
    pub before: String,
    pub after: String,
    pub reason: String,
    pub request_id: String,
    pub correlation_id: String,
}

impl Act {
    fn as_record(&self) -> chain::Act<'_> {
        chain::Act {
            action: self.action,
            actor: &self.actor,
            object_id: &self.object_id,
            before: &self.before,
            after: &self.after,
            reason: &self.reason,
            request_id: &self.request_id,
            correlation_id: &self.correlation_id,
        }
    }
}

/// An audit record to write.
pub struct SealedRecord<'a> {
    pub record: AuditRecord<'a>,
    pub previous_hash: Hash,
    pub hash: Hash,
}

/// True if a group has audit records.
pub fn has_records(book: &Book) -> bool {
    let mut effects = book.effects.iter();
    effects.any(|(_, effect)| matches!(effect, Effect::ActRecorded(_)))
}

/// Seals the audit records of a group after the last stored one (sequence, hash); `None`: there is
/// none.
pub fn seal_records(last: Option<(i64, Hash)>, book: &Book) -> Vec<SealedRecord<'_>> {
    let (mut sequence, mut previous) = last.unwrap_or(BEGINNING);
    let acts = book.effects.iter().filter_map(|(_, effect)| match effect {
        Effect::ActRecorded(act) => Some(act),
        _ => None,
    });
    let mut sealed = Vec::new();
    for act in acts {
        sequence += 1;
        let record = AuditRecord {
            sequence,
            at_us: book.now_us,
            act: act.as_record(),
        };
        let hash = record.hash(SERVICE, &previous);
        sealed.push(SealedRecord {
            record,
            previous_hash: previous,
            hash,
        });
        previous = hash;
    }
    sealed
}

/// True if a group created an operation.
pub fn has_new_operations(book: &Book) -> bool {
    let mut changes = book.operations.changes();
    changes.any(|change| change.before.is_none() && change.after.is_some())
}

/// Seals a group. `None` if it created no operation. The block has the group's time, or that of the
/// last block if another ledger's clock is ahead.
pub fn seal(head: &Head, book: &Book) -> Option<Block> {
    let mut sealer = Sealer::after(head, book.now_us.max(head.sealed_at_us));
    for change in book.operations.changes() {
        let Some(new) = change.after.filter(|_| change.before.is_none()) else {
            continue;
        };
        sealer.operation(&OperationRecord::from(&*new.terms));
        for posting in book.postings_of(&new.terms.operation_id) {
            sealer.posting(&PostingRecord::from(posting));
        }
    }
    (sealer.block.operations > 0).then(|| sealer.seal())
}

impl<'a> From<&'a OperationTerms> for OperationRecord<'a> {
    fn from(terms: &'a OperationTerms) -> Self {
        OperationRecord {
            operation_id: &terms.operation_id,
            scope: terms.scope.code(),
            kind: terms.kind.code(),
            user_id: &terms.user_id,
            idempotency_key: &terms.idempotency_key,
            external_ref: terms.external_ref.as_deref(),
            awaits_chain: terms.awaits_chain,
            reverses: terms.reverses.as_deref(),
            digest: terms.digest,
            created_at_us: terms.created_at_us,
        }
    }
}

impl<'a> From<&'a Posting> for PostingRecord<'a> {
    fn from(posting: &'a Posting) -> Self {
        PostingRecord {
            ordinal: i64::from(posting.ordinal),
            posting_id: &posting.posting_id,
            debit_subaccount_id: &posting.debit_subaccount_id,
            credit_subaccount_id: &posting.credit_subaccount_id,
            instrument_id: &posting.amount.instrument_id,
            amount: posting.amount.minor.0,
            hold_id: posting.hold_id.as_deref(),
            unsettled: posting.unsettled,
            debit_balance_after: posting.debit_balance_after.0,
            debit_version: posting.debit_version as i64,
            credit_balance_after: posting.credit_balance_after.0,
            credit_version: posting.credit_version as i64,
            created_at_us: posting.created_at_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head {
            block: 6,
            hash: [7; 32],
            sealed_at_us: 1,
        }
    }

    fn operation<'a>() -> OperationRecord<'a> {
        OperationRecord {
            operation_id: "op",
            scope: 1,
            kind: 4,
            user_id: "u1",
            idempotency_key: "k",
            external_ref: Some("x"),
            awaits_chain: true,
            reverses: None,
            digest: -2,
            created_at_us: 9,
        }
    }

    fn posting<'a>() -> PostingRecord<'a> {
        PostingRecord {
            ordinal: 0,
            posting_id: "p",
            debit_subaccount_id: "a",
            credit_subaccount_id: "b",
            instrument_id: "I",
            amount: 5,
            hold_id: None,
            unsettled: false,
            debit_balance_after: -5,
            debit_version: 1,
            credit_balance_after: 5,
            credit_version: 2,
            created_at_us: 9,
        }
    }

    // rows: R215
    /// Expected bytes, written out field by field.
    #[test]
    fn r215_the_hash_is_that_of_the_written_encoding() {
        let int = |value: i64| value.to_be_bytes();
        let mut bytes: Vec<u8> = vec![7; 32];
        bytes.extend(b"ledger-block-1\0\0\0\0\0\0\0\x07");
        bytes.extend(int(10));
        bytes.extend(b"O\0\0\0\x02op");
        bytes.extend([int(1), int(4)].concat());
        bytes.extend(b"\0\0\0\x02u1\0\0\0\x01k\x01\0\0\0\x01x");
        bytes.extend(int(1));
        bytes.extend(b"\0");
        bytes.extend([int(-2), int(9)].concat());
        bytes.extend(b"P");
        bytes.extend(int(0));
        bytes.extend(b"\0\0\0\x01p\0\0\0\x01a\0\0\0\x01b\0\0\0\x01I");
        bytes.extend(int(5));
        bytes.extend(b"\0");
        bytes.extend([int(0), int(-5), int(1), int(5), int(2), int(9)].concat());
        bytes.extend(b"E");
        bytes.extend([int(1), int(1)].concat());

        let mut sealer = Sealer::after(&head(), 10);
        sealer.operation(&operation());
        sealer.posting(&posting());
        let block = sealer.seal();
        assert_eq!(hex(&block.hash), hex(&Sha256::digest(&bytes)));
        // Computed from the same bytes by an independent SHA-256 program.
        assert_eq!(
            hex(&block.hash),
            "36f02afac0bb8882b36b246cb9cb3bff7b3051683b06e381042b6cb0fae2d635"
        );
        assert_eq!((block.block, block.operations, block.postings), (7, 1, 1));
    }

    // rows: R215
    #[test]
    fn r215_different_fields_have_different_encodings() {
        let hash = |change: &dyn Fn(&mut OperationRecord)| {
            let mut record = operation();
            change(&mut record);
            let mut sealer = Sealer::after(&head(), 10);
            sealer.operation(&record);
            sealer.seal().hash
        };
        let seen: std::collections::BTreeSet<Hash> = [
            hash(&|_| {}),
            hash(&|of| (of.user_id, of.idempotency_key) = ("u1k", "")),
            hash(&|of| (of.user_id, of.idempotency_key) = ("u", "1k")),
            hash(&|of| of.external_ref = None),
            hash(&|of| of.external_ref = Some("")),
            hash(&|of| (of.external_ref, of.reverses) = (None, Some("x"))),
        ]
        .into();
        assert_eq!(seen.len(), 6);
    }
}
