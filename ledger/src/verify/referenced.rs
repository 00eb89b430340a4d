//! Operations with a reference, page by page, for a comparison with the CFA service's. The blocks
//! seal neither status nor transaction.

use std::collections::HashSet;

use types::OperationType;

use crate::{
    Error, LedgerConfig,
    model::OperationStatus,
    repo::{self, LedgerSnapshot, ReferencedRow},
};

/// An operation that has a reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferencedOperation {
    pub operation_id: String,
    /// `None`: of a later version.
    pub kind: Option<OperationType>,
    pub is_final: bool,
    /// Reversed before it was final.
    pub is_failed: bool,
    pub user_id: String,
    /// Operation of the CFA service, trade, or what the caller named.
    pub reference: String,
    /// Empty: none.
    pub tx_hash: String,
    /// Instrument and amount of each posting, in minor units.
    pub amounts: Vec<(String, i64)>,
}

/// Reads the operations with a reference, of one snapshot of the ledger.
pub struct ReferencedOperations {
    snapshot: Box<dyn LedgerSnapshot>,
    /// Block and place of the last operation that was read.
    after: (i64, i64),
}

impl ReferencedOperations {
    /// Opens a snapshot of the configured ledger, which may be in use.
    ///
    /// # Errors
    /// As [`super::verify`].
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        Ok(ReferencedOperations {
            snapshot: repo::snapshot(config).await?,
            after: (0, -1),
        })
    }

    /// The next operations; empty after the last.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn next_page(&mut self) -> Result<Vec<ReferencedOperation>, Error> {
        let rows = self.snapshot.referenced(self.after).await?;
        if let Some(last) = rows.last() {
            self.after = (last.block, last.place);
        }
        let mut page: Vec<ReferencedOperation> = Vec::new();
        for row in rows {
            let amount = (row.instrument_id.clone(), row.amount);
            match page.last_mut() {
                Some(last) if last.operation_id == row.operation_id => last.amounts.push(amount),
                _ => page.push(operation(row, amount)),
            }
        }
        Ok(page)
    }

    /// Those of these references that an operation of this type has.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn known(
        &mut self,
        kind: OperationType,
        references: &[&str],
    ) -> Result<HashSet<String>, Error> {
        let references = serde_json::json!(references).to_string();
        let found = self
            .snapshot
            .with_references(i64::from(kind.code()), &references)
            .await?;
        Ok(found.into_iter().map(|(reference, _)| reference).collect())
    }

    /// Sequence through which a source is applied; 0: none.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn applied_through(&mut self, source: &str) -> Result<u64, Error> {
        let through = self.snapshot.applied(source).await?;
        Ok(through.unwrap_or_default().unsigned_abs())
    }

    /// # Errors
    /// [`Error::Store`].
    pub async fn close(self) -> Result<(), Error> {
        self.snapshot.close().await
    }
}

fn operation(row: ReferencedRow, amount: (String, i64)) -> ReferencedOperation {
    ReferencedOperation {
        operation_id: row.operation_id,
        kind: OperationType::from_code(row.kind),
        is_final: row.status == OperationStatus::Finalized.code(),
        is_failed: row.status == OperationStatus::Failed.code(),
        user_id: row.user_id,
        reference: row.external_ref,
        tx_hash: row.tx_hash.unwrap_or_default(),
        amounts: vec![amount],
    }
}
