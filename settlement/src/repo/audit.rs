//! Audit records of what operators do (D34), each stored in the transaction of its act.

use events::Tx;
use events::audit::{self, RecordFilter, RecordRow};
use events::calls::{self, Answered, CallKey};
use service_kit::audit::Act;

use super::{Repo, StoreError};
use crate::request::SOURCE;

/// Seals and publishes an act.
pub(super) async fn record_in_tx(tx: &mut Tx, now_us: i64, act: Act<'_>) -> Result<(), StoreError> {
    Ok(audit::append_in_tx(tx, SOURCE, now_us, act, rpc::audit::event).await?)
}

impl Repo {
    /// Records with a sequence below `before`, newest first.
    pub async fn audit_records(
        &self,
        filter: RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, StoreError> {
        Ok(audit::list(self.db.read(), filter, before, limit).await?)
    }

    /// Digest of the earlier call with this key.
    pub async fn earlier_call(&self, key: &CallKey) -> Result<Option<i64>, StoreError> {
        let found = calls::find(self.db.read(), key).await?;
        Ok(found.map(|answered| answered.digest))
    }

    /// Records a call that changes nothing in this store, once per key. Returns the digest of the
    /// earlier call with the key.
    pub async fn record_call(
        &self,
        key: &CallKey,
        digest: i64,
        now_us: i64,
        act: Act<'_>,
    ) -> Result<Option<i64>, StoreError> {
        let mut tx = self.db.write().await?;
        if let Some(earlier) = calls::find(&mut *tx, key).await? {
            return Ok(Some(earlier.digest));
        }
        let answered = Answered {
            digest,
            answer: Vec::new(),
        };
        calls::store_in_tx(&mut tx, key, &answered).await?;
        record_in_tx(&mut tx, now_us, act).await?;
        tx.commit().await?;
        Ok(None)
    }
}
