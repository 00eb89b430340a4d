//! Instruments.

use events::Tx;
use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;
use types::Decimal;

use super::{Repo, code, damaged, decimal, optional_decimal};
use crate::error::Error;
use crate::model::{Coupon, Instrument, InstrumentStatus, InstrumentType};

#[derive(Serialize, Deserialize)]
struct CouponRow {
    pays_at_us: i64,
    amount: String,
}

impl Repo {
    pub async fn instrument(&self, instrument_id: &str) -> Result<Option<Instrument>, Error> {
        let row = sqlx::query("SELECT * FROM instrument WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn instrument_by_key(
        &self,
        issuer_id: &str,
        key: &str,
    ) -> Result<Option<Instrument>, Error> {
        let row =
            sqlx::query("SELECT * FROM instrument WHERE issuer_id = $1 AND idempotency_key = $2")
                .bind(issuer_id)
                .bind(key)
                .fetch_optional(self.db.read())
                .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn instruments(
        &self,
        status: Option<i32>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Instrument>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM instrument WHERE (registered_at_us, instrument_id) < ($1, $2) AND ($3 IS NULL OR status = $3)
             ORDER BY registered_at_us DESC, instrument_id DESC LIMIT $4",
        )
        .bind(bound.0)
        .bind(bound.1)
        .bind(status)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// The instrument of a token contract.
    pub async fn instrument_by_token(&self, token: &str) -> Result<Option<Instrument>, Error> {
        let row = sqlx::query("SELECT * FROM instrument WHERE contract_address = $1")
            .bind(token)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Activated instruments whose contract deployment is not confirmed.
    pub async fn draft_instruments(&self) -> Result<Vec<Instrument>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM instrument WHERE status = 1 AND activated = 1 ORDER BY registered_at_us",
        )
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Number of reverted deployments of the instrument's contract.
    pub async fn deploy_attempts(&self, instrument_id: &str) -> Result<u32, Error> {
        let attempts: i64 =
            sqlx::query_scalar("SELECT deploy_attempts FROM instrument WHERE instrument_id = $1")
                .bind(instrument_id)
                .fetch_one(self.db.read())
                .await?;
        Ok(attempts as u32)
    }

    pub async fn set_deploy_attempts(
        &self,
        instrument_id: &str,
        attempts: u32,
    ) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query("UPDATE instrument SET deploy_attempts = $2 WHERE instrument_id = $1")
            .bind(instrument_id)
            .bind(i64::from(attempts))
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// ACTIVE, HALTED and MATURED instruments past maturity without a recorded redemption.
    pub async fn due_instruments(&self, now_us: i64) -> Result<Vec<Instrument>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM instrument WHERE status IN (2, 3, 4) AND matures_at_us <= $1
             AND NOT EXISTS (SELECT 1 FROM issue_redemption \
                WHERE issue_redemption.instrument_id = instrument.instrument_id)
             ORDER BY matures_at_us",
        )
        .bind(now_us)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Ids of MATURED instruments without a recorded redemption that are not in `due_instruments`.
    pub async fn unrecorded_redemptions(&self, now_us: i64) -> Result<Vec<String>, Error> {
        let ids = sqlx::query_scalar(
            "SELECT instrument_id FROM instrument INDEXED BY instrument_matured \
             WHERE status = 4 AND (matures_at_us IS NULL OR matures_at_us > $1)
             AND NOT EXISTS (SELECT 1 FROM issue_redemption \
                WHERE issue_redemption.instrument_id = instrument.instrument_id)",
        )
        .bind(now_us);
        Ok(ids.fetch_all(self.db.read()).await?)
    }

    /// Stores an instrument; false if its id exists.
    pub async fn insert_instrument_in_tx(
        &self,
        tx: &mut Tx,
        instrument: &Instrument,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "INSERT INTO instrument (instrument_id, name, kind, decimals, issuer_id, \
                contract_address, currency_code, status, issue_limit_minor,
                issued_minor, nominal, coupons, issued_at_us, matures_at_us, tick_size, lot_size, \
                price_band_low, price_band_high, document_hash,
                document_uri, idempotency_key, registered_at_us, updated_at_us, activated)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, \
                $18, $19, $20, $21, $22, $23, $24)
             ON CONFLICT (instrument_id) DO NOTHING",
        )
        .bind(&instrument.instrument_id)
        .bind(&instrument.name)
        .bind(instrument.kind.code())
        .bind(i64::from(instrument.decimals))
        .bind(&instrument.issuer_id)
        .bind(&instrument.contract_address)
        .bind(&instrument.currency_code)
        .bind(instrument.status.code())
        .bind(instrument.issue_limit_minor)
        .bind(instrument.issued_minor)
        .bind(instrument.nominal.map(|number| number.to_string()))
        .bind(coupons_text(&instrument.coupons)?)
        .bind(instrument.issued_at_us)
        .bind(instrument.matures_at_us)
        .bind(instrument.tick_size.to_string())
        .bind(instrument.lot_size.to_string())
        .bind(instrument.price_band_low.map(|number| number.to_string()))
        .bind(instrument.price_band_high.map(|number| number.to_string()))
        .bind(&instrument.document_hash)
        .bind(&instrument.document_uri)
        .bind(&instrument.idempotency_key)
        .bind(instrument.registered_at_us)
        .bind(instrument.updated_at_us)
        .bind(instrument.activated)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Updates the mutable columns, except the issued units.
    pub async fn save_instrument_in_tx(
        &self,
        tx: &mut Tx,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE instrument SET name = $2, contract_address = $3, status = $4, \
                issue_limit_minor = $5, matures_at_us = $6, price_band_low = $7,
                price_band_high = $8, document_hash = $9, document_uri = $10, updated_at_us = $11, \
                activated = $12
             WHERE instrument_id = $1",
        )
        .bind(&instrument.instrument_id)
        .bind(&instrument.name)
        .bind(&instrument.contract_address)
        .bind(instrument.status.code())
        .bind(instrument.issue_limit_minor)
        .bind(instrument.matures_at_us)
        .bind(instrument.price_band_low.map(|number| number.to_string()))
        .bind(instrument.price_band_high.map(|number| number.to_string()))
        .bind(&instrument.document_hash)
        .bind(&instrument.document_uri)
        .bind(instrument.updated_at_us)
        .bind(instrument.activated)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Reserves units of the issue's limit, without one of 64 bits; false if they exceed it. Safe
    /// under concurrency, because the store has one writer (R027).
    pub async fn reserve_issue_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
        units_minor: i64,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE instrument SET issued_minor = issued_minor + $2
             WHERE instrument_id = $1
             AND issued_minor <= COALESCE(issue_limit_minor, 9223372036854775807) - $2",
        )
        .bind(instrument_id)
        .bind(units_minor)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Returns units of a failed issue to the limit.
    pub async fn unreserve_issue_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
        units_minor: i64,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE instrument SET issued_minor = issued_minor - $2 WHERE instrument_id = $1",
        )
        .bind(instrument_id)
        .bind(units_minor)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }
}

fn coupons_text(coupons: &[Coupon]) -> Result<String, Error> {
    let rows: Vec<_> = coupons
        .iter()
        .map(|coupon| CouponRow {
            pays_at_us: coupon.pays_at_us,
            amount: coupon.amount.to_string(),
        })
        .collect();
    serde_json::to_string(&rows).map_err(|error| Error::Damaged(error.to_string()))
}

fn decode(row: &SqliteRow) -> Result<Instrument, Error> {
    let coupons: Vec<CouponRow> = serde_json::from_str(&row.try_get::<String, _>("coupons")?)
        .map_err(|_| damaged("coupons"))?;
    let coupons = coupons
        .into_iter()
        .map(|coupon| {
            Ok(Coupon {
                pays_at_us: coupon.pays_at_us,
                amount: coupon
                    .amount
                    .parse::<Decimal>()
                    .map_err(|_| damaged("coupons"))?,
            })
        })
        .collect::<Result<_, Error>>()?;
    Ok(Instrument {
        instrument_id: row.try_get("instrument_id")?,
        name: row.try_get("name")?,
        kind: code(row, "kind", InstrumentType::from_code)?,
        decimals: u8::try_from(row.try_get::<i64, _>("decimals")?)
            .map_err(|_| damaged("decimals"))?,
        issuer_id: row.try_get("issuer_id")?,
        contract_address: row.try_get("contract_address")?,
        currency_code: row.try_get("currency_code")?,
        status: code(row, "status", InstrumentStatus::from_code)?,
        issue_limit_minor: row.try_get("issue_limit_minor")?,
        issued_minor: row.try_get("issued_minor")?,
        nominal: optional_decimal(row, "nominal")?,
        coupons,
        issued_at_us: row.try_get("issued_at_us")?,
        matures_at_us: row.try_get("matures_at_us")?,
        tick_size: decimal(row, "tick_size")?,
        lot_size: decimal(row, "lot_size")?,
        price_band_low: optional_decimal(row, "price_band_low")?,
        price_band_high: optional_decimal(row, "price_band_high")?,
        document_hash: row.try_get("document_hash")?,
        document_uri: row.try_get("document_uri")?,
        idempotency_key: row.try_get("idempotency_key")?,
        registered_at_us: row.try_get("registered_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
        activated: row.try_get("activated")?,
    })
}
