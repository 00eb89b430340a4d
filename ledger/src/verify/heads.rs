//! Hashes of single blocks and audit records, for a comparison with an anchor outside the ledger.

use crate::{
    Error, LedgerConfig, audit,
    repo::{self, LedgerSnapshot},
};

/// Reads one snapshot of the ledger.
pub struct Heads(Box<dyn LedgerSnapshot>);

impl Heads {
    /// Opens a snapshot of the configured ledger, which may be in use.
    ///
    /// # Errors
    /// As [`super::verify`].
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        Ok(Heads(repo::snapshot(config).await?))
    }

    /// Hash of a block in hex; `None`: the ledger has no such block.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn block_hash(&mut self, block: u64) -> Result<Option<String>, Error> {
        let number = i64::try_from(block).unwrap_or(i64::MAX);
        let page = self.0.blocks(number.saturating_sub(1)).await?;
        let found = page.first().filter(|row| row.block == number);
        Ok(found.map(|row| audit::hex(&row.hash)))
    }

    /// Hash of an audit record in hex; `None`: the ledger has no such record.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn record_hash(&mut self, sequence: u64) -> Result<Option<String>, Error> {
        let number = i64::try_from(sequence).unwrap_or(i64::MAX);
        let page = self.0.audit_records(number.saturating_sub(1)).await?;
        let found = page.first().filter(|row| row.sequence == number);
        Ok(found.map(|row| audit::hex(&row.hash)))
    }

    /// # Errors
    /// [`Error::Store`].
    pub async fn close(self) -> Result<(), Error> {
        self.0.close().await
    }
}
