//! Enforcement acts: freezes and forced transfers.

use events::Tx;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};

use super::{Repo, code};
use crate::error::Error;
use crate::model::{ActBasis, ActKind, ActStatus, EnforcementAct};

/// Result of `insert_freeze`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreezeInsert {
    Stored,
    /// All units of the holder are frozen by another act.
    Frozen,
    TooMany,
}

impl Repo {
    pub async fn act(&self, act_id: &str) -> Result<Option<EnforcementAct>, Error> {
        let row = sqlx::query("SELECT * FROM enforcement_act WHERE act_id = $1")
            .bind(act_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Acts on a holder, or all, strictly before the key `bound`, newest first.
    pub async fn acts(
        &self,
        holder_id: &str,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<EnforcementAct>, Error> {
        let index = match holder_id.is_empty() {
            true => "act_listed",
            false => "act_of_holder",
        };
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(format!(
            "SELECT * FROM enforcement_act INDEXED BY {index} WHERE (created_at_us, act_id) < ("
        ));
        query
            .push_bind(bound.0)
            .push(", ")
            .push_bind(bound.1.to_owned())
            .push(")");
        if !holder_id.is_empty() {
            query
                .push(" AND holder_id = ")
                .push_bind(holder_id.to_owned());
        }
        query
            .push(" ORDER BY created_at_us DESC, act_id DESC LIMIT ")
            .push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Stores an act; false if its key or its freeze of all units exists.
    pub async fn insert_act_in_tx(&self, tx: &mut Tx, act: &EnforcementAct) -> Result<bool, Error> {
        let done = sqlx::query(
            "INSERT INTO enforcement_act (act_id, kind, basis, instrument_id, holder_id, \
                to_user_id, units_minor, left_minor, document, freeze_id, status, \
                idempotency_key, actor, correlation_id, created_at_us, updated_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) \
             ON CONFLICT DO NOTHING",
        )
        .bind(&act.act_id)
        .bind(act.kind.code())
        .bind(act.basis.code())
        .bind(&act.instrument_id)
        .bind(&act.holder_id)
        .bind(&act.to_user_id)
        .bind(act.units_minor)
        .bind(act.left_minor)
        .bind(&act.document)
        .bind(&act.freeze_id)
        .bind(act.status.code())
        .bind(&act.idempotency_key)
        .bind(&act.actor)
        .bind(&act.correlation_id)
        .bind(act.created_at_us)
        .bind(act.updated_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Stores a freeze, unless all units are frozen already or the holder has `holder_max` live
    /// freezes. The caller rolls back unless it is `Stored`.
    pub async fn insert_freeze_in_tx(
        &self,
        tx: &mut Tx,
        act: &EnforcementAct,
        holder_max: i64,
    ) -> Result<FreezeInsert, Error> {
        if !self.insert_act_in_tx(tx, act).await? {
            return Ok(FreezeInsert::Frozen);
        }
        let live: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM enforcement_act INDEXED BY act_live \
             WHERE holder_id = $1 AND kind = 1 AND status IN (1, 2, 4)",
        )
        .bind(&act.holder_id)
        .fetch_one(&mut **tx)
        .await?;
        Ok(match live > holder_max {
            true => FreezeInsert::TooMany,
            false => FreezeInsert::Stored,
        })
    }

    /// Stores the mutable columns, except the units of a freeze.
    pub async fn save_act_in_tx(&self, tx: &mut Tx, act: &EnforcementAct) -> Result<(), Error> {
        sqlx::query(
            "UPDATE enforcement_act SET status = $2, held = $3, frozen = $4, attempts = $5, \
                tx_hash = $6, lift_document = $7, updated_at_us = $8 WHERE act_id = $1",
        )
        .bind(&act.act_id)
        .bind(act.status.code())
        .bind(act.held)
        .bind(act.frozen)
        .bind(act.attempts)
        .bind(&act.tx_hash)
        .bind(&act.lift_document)
        .bind(act.updated_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// The freeze of a call.
    pub async fn freeze_by_key(
        &self,
        actor: &str,
        key: &str,
    ) -> Result<Option<EnforcementAct>, Error> {
        let row = sqlx::query(
            "SELECT * FROM enforcement_act WHERE kind = 1 AND actor = $1 AND idempotency_key = $2",
        )
        .bind(actor)
        .bind(key)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Takes units out of an active freeze for a forced transfer. False if it has fewer.
    pub async fn take_frozen_in_tx(
        &self,
        tx: &mut Tx,
        transfer: &EnforcementAct,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE enforcement_act SET left_minor = left_minor - $2, \
                status = CASE left_minor WHEN $2 THEN 3 ELSE 2 END, updated_at_us = $3
             WHERE act_id = $1 AND kind = 1 AND status = 2 AND left_minor >= $2 \
                AND holder_id = $4 AND instrument_id = $5",
        )
        .bind(&transfer.freeze_id)
        .bind(transfer.units_minor)
        .bind(transfer.created_at_us)
        .bind(&transfer.holder_id)
        .bind(&transfer.instrument_id)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Returns the units of a forced transfer that the ledger refused to its freeze.
    pub async fn return_frozen_in_tx(
        &self,
        tx: &mut Tx,
        transfer: &EnforcementAct,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE enforcement_act SET left_minor = left_minor + $2, status = 2, \
                updated_at_us = $3 WHERE act_id = $1 AND kind = 1 AND status IN (2, 3)",
        )
        .bind(&transfer.freeze_id)
        .bind(transfer.units_minor)
        .bind(transfer.updated_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    pub async fn delete_act_in_tx(&self, tx: &mut Tx, act_id: &str) -> Result<(), Error> {
        sqlx::query("DELETE FROM enforcement_act WHERE act_id = $1")
            .bind(act_id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    /// Whether a forced transfer out of this freeze is open.
    pub async fn is_freeze_in_use(&self, freeze_id: &str) -> Result<bool, Error> {
        let is_in_use = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM enforcement_act INDEXED BY act_of_freeze \
                WHERE freeze_id = $1 AND kind = 2 AND status = 1)",
        )
        .bind(freeze_id);
        Ok(is_in_use.fetch_one(self.db.read()).await?)
    }

    /// Freezes of these holders' units of an issue that are neither used nor lifted, oldest first.
    pub async fn live_freezes(
        &self,
        instrument_id: &str,
        holder_ids: &[&str],
    ) -> Result<Vec<EnforcementAct>, Error> {
        if holder_ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(
            "SELECT * FROM enforcement_act INDEXED BY act_live \
             WHERE kind = 1 AND status IN (1, 2, 4) AND instrument_id = ",
        );
        query
            .push_bind(instrument_id.to_owned())
            .push(" AND holder_id IN (");
        let mut listed = query.separated(", ");
        for holder_id in holder_ids {
            listed.push_bind((*holder_id).to_owned());
        }
        query.push(") ORDER BY created_at_us, act_id");
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Stores the end of a freeze whose units were redeemed.
    pub async fn end_freeze_in_tx(&self, tx: &mut Tx, act: &EnforcementAct) -> Result<(), Error> {
        sqlx::query(
            "UPDATE enforcement_act SET left_minor = $2, status = $3, updated_at_us = $4 \
             WHERE act_id = $1 AND kind = 1",
        )
        .bind(&act.act_id)
        .bind(act.left_minor)
        .bind(act.status.code())
        .bind(act.updated_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Freezes that are not complete, not changed since `before_us`, oldest change first.
    pub async fn open_freezes(
        &self,
        before_us: i64,
        limit: i64,
    ) -> Result<Vec<EnforcementAct>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM enforcement_act INDEXED BY act_open \
             WHERE kind = 1 AND status IN (1, 4) AND updated_at_us < $1 \
             ORDER BY updated_at_us LIMIT $2",
        )
        .bind(before_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }
}

pub(super) fn decode(row: &SqliteRow) -> Result<EnforcementAct, Error> {
    Ok(EnforcementAct {
        act_id: row.try_get("act_id")?,
        kind: code(row, "kind", ActKind::from_code)?,
        basis: code(row, "basis", ActBasis::from_code)?,
        instrument_id: row.try_get("instrument_id")?,
        holder_id: row.try_get("holder_id")?,
        to_user_id: row.try_get("to_user_id")?,
        units_minor: row.try_get("units_minor")?,
        left_minor: row.try_get("left_minor")?,
        document: row.try_get("document")?,
        lift_document: row.try_get("lift_document")?,
        freeze_id: row.try_get("freeze_id")?,
        status: code(row, "status", ActStatus::from_code)?,
        held: row.try_get("held")?,
        frozen: row.try_get("frozen")?,
        attempts: row.try_get("attempts")?,
        tx_hash: row.try_get("tx_hash")?,
        idempotency_key: row.try_get("idempotency_key")?,
        actor: row.try_get("actor")?,
        correlation_id: row.try_get("correlation_id")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    })
}
