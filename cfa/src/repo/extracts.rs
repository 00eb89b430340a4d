//! Signed extracts from the register, and what they state.

use events::Tx;
use sqlx::Row;

use super::{Repo, code};
use crate::error::Error;
use crate::model::{EnforcementAct, Extract, ExtractFormat, ExtractRecipient};

impl Repo {
    pub async fn extract(&self, extract_id: &str) -> Result<Option<Extract>, Error> {
        let row = sqlx::query("SELECT * FROM extract WHERE extract_id = $1")
            .bind(extract_id)
            .fetch_optional(self.db.read())
            .await?;
        let Some(row) = row else {
            return Ok(None);
        };
        Ok(Some(Extract {
            extract_id: row.try_get("extract_id")?,
            instrument_id: row.try_get("instrument_id")?,
            holder_id: row.try_get("holder_id")?,
            as_of_us: row.try_get("as_of_us")?,
            format: code(&row, "format", ExtractFormat::from_code)?,
            recipient: code(&row, "recipient", ExtractRecipient::from_code)?,
            document: row.try_get("document")?,
            content: row.try_get("content")?,
            signature: row.try_get("signature")?,
            signer: row.try_get("signer")?,
            actor: row.try_get("actor")?,
            issued_at_us: row.try_get("issued_at_us")?,
        }))
    }

    pub async fn insert_extract_in_tx(&self, tx: &mut Tx, extract: &Extract) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO extract (extract_id, instrument_id, holder_id, as_of_us, format, \
                recipient, document, content, signature, signer, actor, issued_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        )
        .bind(&extract.extract_id)
        .bind(&extract.instrument_id)
        .bind(&extract.holder_id)
        .bind(extract.as_of_us)
        .bind(extract.format.code())
        .bind(extract.recipient.code())
        .bind(&extract.document)
        .bind(&extract.content)
        .bind(&extract.signature)
        .bind(&extract.signer)
        .bind(&extract.actor)
        .bind(extract.issued_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Number of extracts that the caller has got since a time.
    pub async fn count_extracts_in_tx(
        &self,
        tx: &mut Tx,
        actor: &str,
        since_us: i64,
    ) -> Result<i64, Error> {
        let count = sqlx::query_scalar(
            "SELECT COUNT(*) FROM extract INDEXED BY extract_of_actor \
             WHERE actor = $1 AND issued_at_us > $2",
        )
        .bind(actor)
        .bind(since_us);
        Ok(count.fetch_one(&mut **tx).await?)
    }

    /// Units of an address at a time, and the block that made them so.
    pub async fn units_at(
        &self,
        token: &str,
        address: &str,
        at_us: i64,
    ) -> Result<(i64, u64), Error> {
        let found: Option<(i64, i64)> = sqlx::query_as(
            "SELECT units, block_number FROM holding_history INDEXED BY holding_history_at \
             WHERE token = $1 AND address = $2 AND time_us <= $3 \
             ORDER BY time_us DESC, block_number DESC LIMIT 1",
        )
        .bind(token)
        .bind(address)
        .bind(at_us)
        .fetch_optional(self.db.read())
        .await?;
        let (units, block) = found.unwrap_or_default();
        Ok((units, block as u64))
    }

    /// Freezes of a holder's units that were ordered by a time, newest first.
    pub async fn freezes_of(
        &self,
        holder_id: &str,
        instrument_id: &str,
        by_us: i64,
        limit: i64,
    ) -> Result<Vec<EnforcementAct>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM enforcement_act INDEXED BY act_freezes \
             WHERE kind = 1 AND holder_id = $1 AND instrument_id = $2 AND created_at_us <= $3 \
             ORDER BY created_at_us DESC LIMIT $4",
        )
        .bind(holder_id)
        .bind(instrument_id)
        .bind(by_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(super::enforcement::decode).collect()
    }
}
