//! Chain of audit records (D34): what a caller did, each record hashed with the one before it.
//! Pure.
//!
//! A hash is SHA-256 over the hash of the record before it, `<service>-record-1`, the sequence and
//! the time as big-endian numbers, and each text as its length (`u32`) and its bytes. Different
//! records have different bytes, and a record does not fit into the chain of another service.

use sha2::{Digest, Sha256};

pub type Hash = [u8; 32];

/// Where a chain begins: no record, and the hash before the first one.
pub const BEGINNING: (i64, Hash) = (0, [0; 32]);

/// Last part of the content's first bytes; identifies the encoding.
const TAG: &str = "-record-1";

/// What a caller did.
#[derive(Clone, Copy, Debug)]
pub struct Act<'a> {
    /// For example `user.blocked`.
    pub action: &'a str,
    /// Subject of the credential; for an approved call both persons and the approval.
    pub actor: &'a str,
    pub object_id: &'a str,
    /// State before and after; empty: none.
    pub before: &'a str,
    pub after: &'a str,
    pub reason: &'a str,
    pub request_id: &'a str,
    pub correlation_id: &'a str,
}

/// An audit record, as stored.
#[derive(Clone, Copy, Debug)]
pub struct AuditRecord<'a> {
    /// Dense, from 1.
    pub sequence: i64,
    /// Microseconds since the epoch.
    pub at_us: i64,
    pub act: Act<'a>,
}

impl AuditRecord<'_> {
    /// Hash of this record of a service after the record with the hash `previous`.
    pub fn hash(&self, service: &str, previous: &Hash) -> Hash {
        let mut hasher = Sha256::new();
        hasher.update(previous);
        hasher.update(service);
        hasher.update(TAG);
        hasher.update(self.sequence.to_be_bytes());
        hasher.update(self.at_us.to_be_bytes());
        let act = &self.act;
        for text in [
            act.actor,
            act.action,
            act.object_id,
            act.before,
            act.after,
            act.reason,
            act.request_id,
            act.correlation_id,
        ] {
            let length = u32::try_from(text.len()).expect("a text is shorter than 4 GiB");
            hasher.update(length.to_be_bytes());
            hasher.update(text);
        }
        hasher.finalize().into()
    }

    /// Checks that the record follows the one before it (sequence, hash) and has its stored hashes.
    pub fn check(
        &self,
        service: &str,
        (last, previous): (i64, Hash),
        stored_previous: &[u8],
        stored: &[u8],
    ) -> Option<Broken> {
        let sequence = last + 1;
        let broken = |differs: &'static str, expected: String, found: String| {
            Some(Broken {
                sequence,
                differs,
                expected,
                found,
            })
        };
        if self.sequence != sequence {
            return broken("audit record", sequence.to_string(), "none".to_owned());
        }
        if stored_previous != previous {
            return broken("previous hash", hex(&previous), hex(stored_previous));
        }
        let hash = self.hash(service, &previous);
        if stored != hash {
            return broken("hash (the record was changed)", hex(stored), hex(&hash));
        }
        None
    }
}

/// The first record that does not continue its chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub sequence: i64,
    /// The differing property.
    pub differs: &'static str,
    pub expected: String,
    pub found: String,
}

/// Formats a hash as lower-case hex.
pub fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record<'a>() -> AuditRecord<'a> {
        AuditRecord {
            sequence: 3,
            at_us: 10,
            act: Act {
                action: "limit.set",
                actor: "operator",
                object_id: "l1",
                before: "",
                after: "5",
                reason: "r",
                request_id: "q",
                correlation_id: "c",
            },
        }
    }

    // rows: R215
    /// Expected bytes, written out field by field.
    #[test]
    fn r215_an_audit_record_has_the_hash_of_the_written_encoding() {
        let mut bytes: Vec<u8> = vec![7; 32];
        bytes.extend(b"ledger-record-1");
        bytes.extend([3i64.to_be_bytes(), 10i64.to_be_bytes()].concat());
        bytes.extend(b"\0\0\0\x08operator\0\0\0\x09limit.set\0\0\0\x02l1\0\0\0\0");
        bytes.extend(b"\0\0\0\x015\0\0\0\x01r\0\0\0\x01q\0\0\0\x01c");
        let hash = record().hash("ledger", &[7; 32]);
        assert_eq!(hex(&hash), hex(&Sha256::digest(&bytes)));
    }

    // rows: R215
    #[test]
    fn r215_a_record_continues_one_chain_only() {
        let (last, hash) = ((2, [7; 32]), record().hash("ledger", &[7; 32]));
        let check = |service, last, previous: &[u8], stored: &[u8]| {
            let broken = record().check(service, last, previous, stored);
            broken.map(|broken| (broken.sequence, broken.differs))
        };
        assert_eq!(check("ledger", last, &[7; 32], &hash), None);
        let changed = Some((3, "hash (the record was changed)"));
        assert_eq!(check("payments", last, &[7; 32], &hash), changed);
        assert_eq!(check("ledger", last, &[7; 32], &[0; 32]), changed);
        let previous = Some((3, "previous hash"));
        assert_eq!(check("ledger", last, &[8; 32], &hash), previous);
        let missing = Some((2, "audit record"));
        assert_eq!(check("ledger", (1, [7; 32]), &[7; 32], &hash), missing);
    }
}
