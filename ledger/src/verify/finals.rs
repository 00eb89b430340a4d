//! Final operations with their transactions, page by page, for a comparison with the CFA service's.
//! The blocks seal neither status nor transaction.

use types::OperationType;

use crate::{
    Error, LedgerConfig,
    repo::{self, FinalRow, LedgerSnapshot},
};

/// A final operation that has a reference and a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinalOperation {
    pub operation_id: String,
    /// `None`: of a later version.
    pub kind: Option<OperationType>,
    pub user_id: String,
    /// Operation of the CFA service, or trade.
    pub reference: String,
    pub tx_hash: String,
    /// Instrument and amount of each posting, in minor units.
    pub amounts: Vec<(String, i64)>,
}

/// Reads the final operations of one snapshot of the ledger.
pub struct Finals {
    snapshot: Box<dyn LedgerSnapshot>,
    /// Block and place of the last operation that was read.
    after: (i64, i64),
}

impl Finals {
    /// Opens a snapshot of the configured ledger, which may be in use.
    ///
    /// # Errors
    /// As [`super::verify`].
    pub async fn open(config: &LedgerConfig) -> Result<Self, Error> {
        Ok(Finals {
            snapshot: repo::snapshot(config).await?,
            after: (0, -1),
        })
    }

    /// The next operations; empty after the last.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn next_page(&mut self) -> Result<Vec<FinalOperation>, Error> {
        let rows = self.snapshot.finalized(self.after).await?;
        if let Some(last) = rows.last() {
            self.after = (last.block, last.place);
        }
        let mut page: Vec<FinalOperation> = Vec::new();
        for row in rows {
            let amount = (row.instrument_id.clone(), row.amount);
            match page.last_mut() {
                Some(last) if last.operation_id == row.operation_id => last.amounts.push(amount),
                _ => page.push(operation(row, amount)),
            }
        }
        Ok(page)
    }

    /// # Errors
    /// [`Error::Store`].
    pub async fn close(self) -> Result<(), Error> {
        self.snapshot.close().await
    }
}

fn operation(row: FinalRow, amount: (String, i64)) -> FinalOperation {
    FinalOperation {
        operation_id: row.operation_id,
        kind: OperationType::from_code(row.kind),
        user_id: row.user_id,
        reference: row.external_ref,
        tx_hash: row.tx_hash,
        amounts: vec![amount],
    }
}
