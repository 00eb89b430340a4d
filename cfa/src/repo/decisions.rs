//! Decisions on issues: document, signature, activation.

use events::Tx;
use sqlx::Row;

use super::Repo;
use crate::error::Error;
use crate::model::{Instrument, IssueDecision};

impl Repo {
    /// The decision on an issue. `None` for an issue of an earlier version.
    pub async fn issue_decision(
        &self,
        instrument_id: &str,
    ) -> Result<Option<IssueDecision>, Error> {
        let row = sqlx::query("SELECT * FROM issue_decision WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(self.db.read())
            .await?;
        let Some(row) = row else {
            return Ok(None);
        };
        Ok(Some(IssueDecision {
            instrument_id: row.try_get("instrument_id")?,
            document: row.try_get("document")?,
            signature: row.try_get("signature")?,
            signer: row.try_get("signer")?,
            certificate_serial: row.try_get("certificate_serial")?,
            signed_by: row.try_get("signed_by")?,
            signed_at_us: row.try_get("signed_at_us")?,
            activated_by: row.try_get("activated_by")?,
            activated_at_us: row.try_get("activated_at_us")?,
        }))
    }

    pub async fn save_decision_in_tx(
        &self,
        tx: &mut Tx,
        decision: &IssueDecision,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO issue_decision (instrument_id, document, signature, signer, \
                certificate_serial, signed_by, signed_at_us, activated_by, activated_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
             ON CONFLICT (instrument_id) DO UPDATE SET signature = excluded.signature, \
                signer = excluded.signer, certificate_serial = excluded.certificate_serial, \
                signed_by = excluded.signed_by, signed_at_us = excluded.signed_at_us, \
                activated_by = excluded.activated_by, activated_at_us = excluded.activated_at_us",
        )
        .bind(&decision.instrument_id)
        .bind(&decision.document)
        .bind(&decision.signature)
        .bind(&decision.signer)
        .bind(&decision.certificate_serial)
        .bind(&decision.signed_by)
        .bind(decision.signed_at_us)
        .bind(&decision.activated_by)
        .bind(decision.activated_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Whether another issue of the same issuer has a signed decision with the same document.
    pub async fn is_decided_in_tx(
        &self,
        tx: &mut Tx,
        instrument: &Instrument,
    ) -> Result<bool, Error> {
        let is_decided = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM instrument INDEXED BY instrument_document \
                CROSS JOIN issue_decision d ON d.instrument_id = instrument.instrument_id \
                WHERE issuer_id = $1 AND document_hash = $2 AND document_hash <> '' \
                AND instrument.instrument_id <> $3 AND d.signed_at_us IS NOT NULL)",
        )
        .bind(&instrument.issuer_id)
        .bind(&instrument.document_hash)
        .bind(&instrument.instrument_id);
        Ok(is_decided.fetch_one(&mut **tx).await?)
    }

    /// Number of the issuer's drafts that are not activated.
    pub async fn count_drafts_in_tx(&self, tx: &mut Tx, issuer_id: &str) -> Result<i64, Error> {
        let count = sqlx::query_scalar(
            "SELECT COUNT(*) FROM instrument INDEXED BY instrument_of_issuer \
             WHERE issuer_id = $1 AND status = 1 AND activated = 0",
        )
        .bind(issuer_id);
        Ok(count.fetch_one(&mut **tx).await?)
    }
}
