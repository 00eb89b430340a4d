//! Coupons of activated issues and their payments.

use events::{MultiRow, Script, Tx};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};
use types::derived;

use super::{Repo, code, decimal, refuse};
use crate::error::Error;
use crate::model::{
    Coupon, CouponPayment, CouponStatus, Instrument, IssueRedemption, RedemptionLine,
    RedemptionReason, RedemptionStatus,
};

static COUPONS: MultiRow = MultiRow::new(
    "INSERT INTO coupon (instrument_id, number, pays_at_us, amount, status) \
     SELECT * FROM (VALUES ",
    5,
    ") LIMIT +?",
);

static LINES: MultiRow = MultiRow::new(
    "INSERT INTO coupon_line (instrument_id, number, position, user_id, address, units_minor, \
     payment_minor) SELECT * FROM (VALUES ",
    7,
    ") LIMIT +?",
);

impl Repo {
    /// Stores the calendar of an issue that is activated, numbered by payment day.
    pub async fn insert_coupons_in_tx(
        &self,
        tx: &mut Tx,
        instrument: &Instrument,
    ) -> Result<(), Error> {
        if instrument.coupons.is_empty() {
            return Ok(());
        }
        let mut coupons: Vec<&Coupon> = instrument.coupons.iter().collect();
        // Stable: coupons of one time keep their order.
        coupons.sort_by_key(|coupon| coupon.pays_at_us);
        let rows: Vec<(i64, &Coupon)> = (1i64..).zip(coupons).collect();
        let mut script = Script::default();
        script
            .add(tx, &COUPONS, &rows, |(number, coupon), values| {
                values.put(&instrument.instrument_id);
                values.put(*number);
                values.put(coupon.pays_at_us);
                values.put(coupon.amount.to_string());
                values.put(i64::from(CouponStatus::Scheduled.code()));
            })
            .await?;
        script.run(tx).await?;
        Ok(())
    }

    pub async fn coupon(
        &self,
        instrument_id: &str,
        number: u32,
    ) -> Result<Option<CouponPayment>, Error> {
        let row = sqlx::query("SELECT * FROM coupon WHERE instrument_id = $1 AND number = $2")
            .bind(instrument_id)
            .bind(i64::from(number))
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Coupons of an issue with a number below `before`, last first.
    pub async fn coupons_of(
        &self,
        instrument_id: &str,
        before: i64,
        limit: i64,
    ) -> Result<Vec<CouponPayment>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM coupon WHERE instrument_id = $1 AND number < $2 \
             ORDER BY number DESC LIMIT $3",
        )
        .bind(instrument_id)
        .bind(before)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Coupons of all issues strictly before the bound (payment time, issue, number), latest first.
    pub async fn coupons(
        &self,
        bound: (i64, &str, i64),
        limit: i64,
    ) -> Result<Vec<CouponPayment>, Error> {
        let mut query = QueryBuilder::<sqlx::Sqlite>::new(
            "SELECT * FROM coupon INDEXED BY coupon_listed \
             WHERE (pays_at_us, instrument_id, number) < (",
        );
        query
            .push_bind(bound.0)
            .push(", ")
            .push_bind(bound.1.to_owned())
            .push(", ")
            .push_bind(bound.2)
            .push(") ORDER BY pays_at_us DESC, instrument_id DESC, number DESC LIMIT ")
            .push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// Scheduled coupons with a payment time up to `through_us`, oldest first, strictly after the
    /// key `after` (payment time, issue, number).
    pub async fn due_coupons(
        &self,
        through_us: i64,
        after: (i64, &str, i64),
        limit: i64,
    ) -> Result<Vec<CouponPayment>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM coupon INDEXED BY coupon_due WHERE status = 7 AND pays_at_us <= $1 \
             AND (pays_at_us, instrument_id, number) > ($2, $3, $4) \
             ORDER BY pays_at_us, instrument_id, number LIMIT $5",
        )
        .bind(through_us)
        .bind(after.0)
        .bind(after.1)
        .bind(after.2)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Coupons whose payment has begun and has not ended, failed ones included, oldest first,
    /// strictly after the key `after` (time of the snapshot, issue, number).
    pub async fn open_coupons(
        &self,
        after: (i64, &str, i64),
        limit: i64,
    ) -> Result<Vec<CouponPayment>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM coupon INDEXED BY coupon_open WHERE status IN (1, 2, 3, 4, 6) \
             AND (recorded_at_us, instrument_id, number) > ($1, $2, $3) \
             ORDER BY recorded_at_us, instrument_id, number LIMIT $4",
        )
        .bind(after.0)
        .bind(after.1)
        .bind(after.2)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// The distribution of a coupon whose snapshot is recorded, without its lines.
    pub async fn coupon_run(
        &self,
        instrument_id: &str,
        number: u32,
    ) -> Result<Option<IssueRedemption>, Error> {
        let row = sqlx::query(
            "SELECT * FROM coupon WHERE instrument_id = $1 AND number = $2 AND status <= 6",
        )
        .bind(instrument_id)
        .bind(i64::from(number))
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode_run).transpose()
    }

    /// Records the snapshot of a scheduled coupon with its lines; false if it is not scheduled, or
    /// while the issue's holders are being moved: all parts of a distribution are of one token.
    ///
    /// # Errors
    /// `Damaged` for lines that violate an invariant.
    pub async fn record_coupon_in_tx(
        &self,
        tx: &mut Tx,
        run: &IssueRedemption,
    ) -> Result<bool, Error> {
        refuse(run.contradiction(), &run.redemption_id)?;
        let done = sqlx::query(
            "UPDATE coupon SET status = $3, total_minor = $4, recorded_at_us = $5 \
             WHERE instrument_id = $1 AND number = $2 AND status = 7 \
             AND NOT EXISTS (SELECT 1 FROM token_move INDEXED BY token_move_open \
                WHERE token_move.instrument_id = $1 AND finished_at_us IS NULL)",
        )
        .bind(&run.instrument_id)
        .bind(i64::from(run.coupon_number))
        .bind(run.status.code())
        .bind(run.total_minor)
        .bind(run.created_at_us)
        .execute(&mut **tx)
        .await?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        let lines: Vec<(usize, &RedemptionLine)> = run.lines.iter().enumerate().collect();
        if lines.is_empty() {
            return Ok(true);
        }
        let mut script = Script::default();
        script
            .add(tx, &LINES, &lines, |(position, line), values| {
                values.put(&run.instrument_id);
                values.put(i64::from(run.coupon_number));
                values.put(*position as i64);
                values.put(&line.user_id);
                values.put(&line.address);
                values.put(line.units_minor);
                values.put(line.payment_minor);
            })
            .await?;
        script.run(tx).await?;
        Ok(true)
    }

    /// Updates the mutable columns of a coupon's payment.
    pub(super) async fn save_coupon_in_tx(
        &self,
        tx: &mut Tx,
        run: &IssueRedemption,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE coupon SET status = $3, parts_done = $4, tx_hash = $5, finalized_at_us = $6, \
             attempt = $7 WHERE instrument_id = $1 AND number = $2",
        )
        .bind(&run.instrument_id)
        .bind(i64::from(run.coupon_number))
        .bind(run.status.code())
        .bind(run.parts_done as i64)
        .bind(&run.tx_hash)
        .bind(run.finalized_at_us)
        .bind(i64::from(run.attempt))
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Ends the scheduled coupons of an issue whose redemption is recorded: those of its record
    /// day, `first_us..=last_us`, are paid with it, later ones are cancelled. Earlier ones stay.
    /// False, and the caller rolls back, if one of the day has a payment of its own already.
    pub async fn end_coupons_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
        first_us: i64,
        last_us: i64,
    ) -> Result<bool, Error> {
        let has_begun = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM coupon WHERE instrument_id = $1 \
             AND pays_at_us BETWEEN $2 AND $3 AND status <> 7)",
        )
        .bind(instrument_id)
        .bind(first_us)
        .bind(last_us);
        if has_begun.fetch_one(&mut **tx).await? {
            return Ok(false);
        }
        sqlx::query(
            "UPDATE coupon SET status = CASE WHEN pays_at_us <= $3 THEN 8 ELSE 9 END \
             WHERE instrument_id = $1 AND pays_at_us >= $2 AND status = 7",
        )
        .bind(instrument_id)
        .bind(first_us)
        .bind(last_us)
        .execute(&mut **tx)
        .await?;
        Ok(true)
    }
}

fn decode(row: &SqliteRow) -> Result<CouponPayment, Error> {
    Ok(CouponPayment {
        instrument_id: row.try_get("instrument_id")?,
        number: row.try_get::<i64, _>("number")? as u32,
        pays_at_us: row.try_get("pays_at_us")?,
        amount: decimal(row, "amount")?,
        status: code(row, "status", CouponStatus::from_code)?,
        total_minor: row.try_get("total_minor")?,
        tx_hash: row.try_get("tx_hash")?,
        recorded_at_us: row.try_get("recorded_at_us")?,
        finalized_at_us: row.try_get("finalized_at_us")?,
    })
}

fn decode_run(row: &SqliteRow) -> Result<IssueRedemption, Error> {
    let coupon = decode(row)?;
    Ok(IssueRedemption {
        redemption_id: derived::coupon(&coupon.instrument_id, coupon.number).to_string(),
        instrument_id: coupon.instrument_id,
        reason: RedemptionReason::Coupon,
        status: code(row, "status", RedemptionStatus::from_code)?,
        record_date_us: coupon.pays_at_us,
        total_minor: coupon.total_minor,
        lines: Vec::new(),
        parts_done: row.try_get::<i64, _>("parts_done")? as u64,
        attempt: row.try_get::<i64, _>("attempt")? as u32,
        coupon_number: coupon.number,
        tx_hash: coupon.tx_hash,
        idempotency_key: String::new(),
        created_at_us: coupon.recorded_at_us.unwrap_or_default(),
        finalized_at_us: coupon.finalized_at_us,
    })
}
