//! Result of a verification.

use std::fmt;

use serde::Serialize;

/// Counts of verified records, and the first bad record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Blocks of the chain, except the empty block 0.
    pub blocks: u64,
    pub operations: u64,
    pub postings: u64,
    pub sub_accounts: u64,
    pub holds: u64,
    pub instruments: u64,
    pub audit_records: u64,
    /// Hash of the last verified block, in hex.
    pub head: String,
    /// `None`: all records are valid.
    pub fault: Option<Fault>,
}

/// The first bad record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fault {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub posting_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subaccount_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instrument_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit_record: Option<i64>,
    /// The differing property, as text.
    pub differs: String,
    /// Amounts in minor units.
    pub expected: String,
    pub found: String,
}

impl Fault {
    pub(super) fn new(
        differs: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Fault {
            differs: differs.into(),
            expected: expected.to_string(),
            found: found.to_string(),
            ..Fault::default()
        }
    }

    pub(super) fn in_block(
        block: i64,
        differs: &str,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Fault {
            block: Some(block),
            ..Fault::new(differs, expected, found)
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(block) = self.block {
            write!(f, "block {block}, ")?;
        }
        if let Some(record) = self.audit_record {
            write!(f, "audit record {record}, ")?;
        }
        for (name, id) in [
            ("operation", &self.operation_id),
            ("posting", &self.posting_id),
            ("sub-account", &self.subaccount_id),
            ("hold", &self.hold_id),
            ("instrument", &self.instrument_id),
        ] {
            if let Some(id) = id {
                write!(f, "{name} {id}, ")?;
            }
        }
        write!(
            f,
            "{}: expected {}, found {}",
            self.differs, self.expected, self.found
        )
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "blocks: {}", self.blocks)?;
        writeln!(f, "operations: {}", self.operations)?;
        writeln!(f, "postings: {}", self.postings)?;
        writeln!(f, "sub-accounts: {}", self.sub_accounts)?;
        writeln!(f, "holds: {}", self.holds)?;
        writeln!(f, "instruments: {}", self.instruments)?;
        writeln!(f, "audit records: {}", self.audit_records)?;
        writeln!(f, "head: {}", self.head)?;
        match &self.fault {
            Some(fault) => writeln!(f, "first bad record: {fault}"),
            None => writeln!(f, "all records verified"),
        }
    }
}
