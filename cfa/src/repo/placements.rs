//! Placements of issues.

use events::Tx;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{Repo, code, damaged, decimal};
use crate::error::{Error, Refusal};
use crate::model::Offer;
use crate::placement::{Allotment, Placement, PlacementTerms, Stage};

/// An allotment of a subscription.
#[derive(Debug, Clone)]
pub struct Allotted {
    pub offer_id: String,
    pub units_minor: i64,
    pub payment_minor: i64,
    /// From 1.
    pub number: i64,
}

/// Allotments per statement.
const ALLOTTED_AT_ONCE: usize = 1_000;

impl Repo {
    pub async fn placement(&self, instrument_id: &str) -> Result<Option<Placement>, Error> {
        let row = sqlx::query("SELECT * FROM placement WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The placements of these issues. Issues without one are left out.
    pub async fn placements(&self, instrument_ids: &[&str]) -> Result<Vec<Placement>, Error> {
        let ids = serde_json::to_string(instrument_ids)
            .map_err(|error| Error::Damaged(error.to_string()))?;
        let rows = sqlx::query(
            "SELECT * FROM placement WHERE instrument_id IN (SELECT value FROM json_each($1))",
        )
        .bind(ids)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Issues whose placement period has ended and whose placement has not.
    pub async fn due_placements(&self, now_us: i64) -> Result<Vec<String>, Error> {
        let due = sqlx::query_scalar(
            "SELECT instrument_id FROM placement INDEXED BY placement_open \
             WHERE stage < 8 AND closes_at_us <= $1 ORDER BY closes_at_us",
        )
        .bind(now_us);
        Ok(due.fetch_all(self.db.read()).await?)
    }

    pub async fn insert_placement_in_tx(
        &self,
        tx: &mut Tx,
        placement: &Placement,
    ) -> Result<(), Error> {
        let terms = &placement.terms;
        sqlx::query(
            "INSERT INTO placement (instrument_id, opens_at_us, closes_at_us, price, \
                minimum_minor, investor_min_minor, investor_max_minor, allotment, stage)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        )
        .bind(&placement.instrument_id)
        .bind(terms.opens_at_us)
        .bind(terms.closes_at_us)
        .bind(terms.price.to_string())
        .bind(terms.minimum_minor)
        .bind(terms.investor_min_minor)
        .bind(terms.investor_max_minor)
        .bind(terms.allotment.code())
        .bind(placement.stage.code())
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Checks a subscription that was just inserted against its placement: it accepts
    /// subscriptions, has at most `live_max`, the sum of their units fits 64 bits, and the
    /// investor's most units are kept.
    ///
    /// # Errors
    /// `PlacementNotOpen`, `TooManySubscriptions`, the field `amount`.
    pub async fn require_placeable_in_tx(
        &self,
        tx: &mut Tx,
        offer: &Offer,
        live_max: i64,
    ) -> Result<(), Error> {
        // The store turns a sum beyond 64 bits into a floating-point number.
        let row = sqlx::query(
            "SELECT *, typeof(subscribed_minor) = 'integer' AS fits \
             FROM placement WHERE instrument_id = $1",
        )
        .bind(&offer.instrument_id)
        .fetch_one(&mut **tx)
        .await?;
        if !row.try_get::<bool, _>("fits")? {
            return Err(Refusal::TooManySubscriptions.into());
        }
        let placement = decode(&row)?;
        if placement.stage != Stage::Subscribe {
            return Err(Refusal::PlacementNotOpen.into());
        }
        if placement.live > live_max {
            return Err(Refusal::TooManySubscriptions.into());
        }
        let most_minor = placement.terms.investor_max_minor;
        if most_minor == 0 {
            return Ok(());
        }
        let subscribed: i64 = sqlx::query_scalar(
            "SELECT COALESCE(SUM(units_minor), 0) FROM offer INDEXED BY offer_live \
             WHERE user_id = $1 AND side = 1 AND (status < 3 OR step > 0)
               AND instrument_id = $2 AND status < 3",
        )
        .bind(&offer.user_id)
        .bind(&offer.instrument_id)
        .fetch_one(&mut **tx)
        .await?;
        match subscribed <= most_minor {
            true => Ok(()),
            false => {
                let why = "is above the most units of an investor in the placement";
                Err(Refusal::field("amount.amount", why).into())
            }
        }
    }

    /// Stores the progress. False if the stored stage is not `before`.
    pub async fn save_placement_in_tx(
        &self,
        tx: &mut Tx,
        placement: &Placement,
        before: Stage,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE placement SET stage = $2, failed = $3, screened_through = $4, \
                allotted_count = $5, allotted_minor = $6, parts_done = $7, issued_minor = $8, \
                raised_minor = $9, attempts = $10, closed_at_us = $11
             WHERE instrument_id = $1 AND stage = $12",
        )
        .bind(&placement.instrument_id)
        .bind(placement.stage.code())
        .bind(placement.failed)
        .bind(&placement.screened_through)
        .bind(placement.allotted_count)
        .bind(placement.allotted_minor)
        .bind(placement.parts_done)
        .bind(placement.issued_minor)
        .bind(placement.raised_minor)
        .bind(i64::from(placement.attempts))
        .bind(placement.closed_at_us)
        .bind(before.code())
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Pending and active subscriptions of an issue in the order of their ids, after the given one.
    pub async fn live_subscriptions(
        &self,
        instrument_id: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_live_of_issue \
             WHERE instrument_id = $1 AND side = 1 AND offer_id > $2 AND (status < 3 OR step > 0)
               AND status < 3
             ORDER BY offer_id LIMIT $3",
        )
        .bind(instrument_id)
        .bind(after)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(super::offers::decode).collect()
    }

    /// Subscriptions of an issue without an allotment whose payment is not released yet, in the
    /// order of their ids, after the given one.
    pub async fn unreleased_subscriptions(
        &self,
        instrument_id: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_live_of_issue \
             WHERE instrument_id = $1 AND side = 1 AND offer_id > $2 AND (status < 3 OR step > 0)
               AND status = 6
             ORDER BY offer_id LIMIT $3",
        )
        .bind(instrument_id)
        .bind(after)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(super::offers::decode).collect()
    }

    /// Id, units and status of all pending and active subscriptions that have not expired, in the
    /// order of their ids.
    pub async fn asked_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
        now_us: i64,
    ) -> Result<Vec<(String, i64, i32)>, Error> {
        let asked = sqlx::query_as(
            "SELECT offer_id, units_minor, status FROM offer INDEXED BY offer_live_of_issue \
             WHERE instrument_id = $1 AND side = 1 AND offer_id > '' AND (status < 3 OR step > 0)
               AND status < 3 AND expires_at_us > $2
             ORDER BY offer_id",
        )
        .bind(instrument_id)
        .bind(now_us);
        Ok(asked.fetch_all(&mut **tx).await?)
    }

    /// Stores allotments. Their subscriptions are used: they can neither be cancelled nor expire.
    ///
    /// # Errors
    /// `Damaged` if one of the subscriptions is not active, or asks for less than its allotment.
    pub async fn allot_in_tx(
        &self,
        tx: &mut Tx,
        allotted: &[Allotted],
        now_us: i64,
    ) -> Result<(), Error> {
        for rows in allotted.chunks(ALLOTTED_AT_ONCE) {
            let values: Vec<_> = rows
                .iter()
                .map(|row| {
                    (
                        &row.offer_id,
                        row.units_minor,
                        row.payment_minor,
                        row.number,
                    )
                })
                .collect();
            let values = serde_json::to_string(&values)
                .map_err(|error| Error::Damaged(error.to_string()))?;
            let done = sqlx::query(
                "UPDATE offer SET status = 3, updated_at_us = $2, \
                    allotted_minor = row.value ->> 1, allotted_payment_minor = row.value ->> 2, \
                    allotted_number = row.value ->> 3
                 FROM json_each($1) AS row
                 WHERE offer.offer_id = row.value ->> 0 AND offer.status = 2
                   AND (row.value ->> 1) BETWEEN 1 AND offer.units_minor
                   AND (row.value ->> 2) BETWEEN 1 AND offer.payment_minor
                   AND (row.value ->> 3) > 0",
            )
            .bind(values)
            .bind(now_us)
            .execute(&mut **tx)
            .await?;
            if done.rows_affected() != rows.len() as u64 {
                return Err(Error::Damaged(
                    "allotment of an inactive offer, or beyond it".into(),
                ));
            }
        }
        Ok(())
    }

    /// Ends all active subscriptions of an issue without an allotment. Their payments are to be
    /// released and their reservations to be cancelled. Expired ones are left to the sweep.
    pub async fn end_unallotted_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
        now_us: i64,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE offer INDEXED BY offer_live_of_issue SET status = 6, step = 1, \
                updated_at_us = $2, limit_state = CASE limit_state WHEN 1 THEN 3 ELSE limit_state END
             WHERE instrument_id = $1 AND side = 1 AND offer_id > '' AND (status < 3 OR step > 0)
               AND status < 3 AND expires_at_us > $2",
        )
        .bind(instrument_id)
        .bind(now_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Records that the payments of these ended subscriptions are released.
    pub async fn release_offers_in_tx(
        &self,
        tx: &mut Tx,
        offers: &[Offer],
        now_us: i64,
    ) -> Result<(), Error> {
        let ids: Vec<_> = offers.iter().map(|offer| &offer.offer_id).collect();
        let ids = serde_json::to_string(&ids).map_err(|error| Error::Damaged(error.to_string()))?;
        sqlx::query(
            "UPDATE offer SET step = 0, updated_at_us = $2 \
             WHERE offer_id IN (SELECT value FROM json_each($1)) AND status = 6",
        )
        .bind(ids)
        .bind(now_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// The allotted subscriptions with numbers above `after` up to `through`, in order.
    pub async fn allotted(
        &self,
        instrument_id: &str,
        after: i64,
        through: i64,
    ) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_allotted WHERE allotted_number > 0 \
             AND instrument_id = $1 AND allotted_number > $2 AND allotted_number <= $3 \
             ORDER BY allotted_number",
        )
        .bind(instrument_id)
        .bind(after)
        .bind(through)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(super::offers::decode).collect()
    }
}

fn decode(row: &SqliteRow) -> Result<Placement, Error> {
    Ok(Placement {
        instrument_id: row.try_get("instrument_id")?,
        terms: PlacementTerms {
            opens_at_us: row.try_get("opens_at_us")?,
            closes_at_us: row.try_get("closes_at_us")?,
            price: decimal(row, "price")?,
            minimum_minor: row.try_get("minimum_minor")?,
            investor_min_minor: row.try_get("investor_min_minor")?,
            investor_max_minor: row.try_get("investor_max_minor")?,
            allotment: code(row, "allotment", Allotment::from_code)?,
        },
        stage: code(row, "stage", Stage::from_code)?,
        failed: row.try_get("failed")?,
        live: row.try_get("live")?,
        subscribed_minor: row.try_get("subscribed_minor")?,
        screened_through: row.try_get("screened_through")?,
        allotted_count: row.try_get("allotted_count")?,
        allotted_minor: row.try_get("allotted_minor")?,
        parts_done: row.try_get("parts_done")?,
        issued_minor: row.try_get("issued_minor")?,
        raised_minor: row.try_get("raised_minor")?,
        attempts: u32::try_from(row.try_get::<i64, _>("attempts")?)
            .map_err(|_| damaged("attempts"))?,
        closed_at_us: row.try_get("closed_at_us")?,
    })
}
