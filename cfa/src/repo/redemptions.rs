//! Redemptions of whole issues.

use events::{MultiRow, Script, Tx};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{Repo, code, refuse};
use crate::error::Error;
use crate::model::{IssueRedemption, RedemptionLine, RedemptionReason, RedemptionStatus};

static LINES: MultiRow = MultiRow::new(
    "INSERT INTO redemption_line (redemption_id, position, user_id, address, units_minor, \
     payment_minor) SELECT * FROM (VALUES ",
    6,
    ") LIMIT +?",
);

impl Repo {
    /// A redemption without its lines.
    pub async fn redemption_head(
        &self,
        redemption_id: &str,
    ) -> Result<Option<IssueRedemption>, Error> {
        let row = sqlx::query("SELECT * FROM issue_redemption WHERE redemption_id = $1")
            .bind(redemption_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The redemption of an issue without its lines.
    pub async fn redemption_of_instrument(
        &self,
        instrument_id: &str,
    ) -> Result<Option<IssueRedemption>, Error> {
        let row = sqlx::query("SELECT * FROM issue_redemption WHERE instrument_id = $1")
            .bind(instrument_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Reads all lines of a redemption, or of a coupon's payment.
    ///
    /// # Errors
    /// `Damaged` for lines that violate an invariant.
    pub async fn read_lines(&self, redemption: &mut IssueRedemption) -> Result<(), Error> {
        let lines = if redemption.is_coupon() {
            sqlx::query(
                "SELECT * FROM coupon_line WHERE instrument_id = $1 AND number = $2 ORDER BY position",
            )
            .bind(&redemption.instrument_id)
            .bind(i64::from(redemption.coupon_number))
        } else {
            sqlx::query("SELECT * FROM redemption_line WHERE redemption_id = $1 ORDER BY position")
                .bind(&redemption.redemption_id)
        };
        let rows = lines.fetch_all(self.db.read()).await?;
        redemption.lines = rows.iter().map(decode_line).collect();
        refuse(redemption.contradiction(), &redemption.redemption_id)
    }

    /// Lines of a redemption with their positions, in order, strictly after a position.
    pub async fn redemption_lines(
        &self,
        redemption_id: &str,
        after: i64,
        limit: i64,
    ) -> Result<Vec<(i64, RedemptionLine)>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM redemption_line WHERE redemption_id = $1 AND position > $2 \
             ORDER BY position LIMIT $3",
        )
        .bind(redemption_id)
        .bind(after)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(placed_line).collect()
    }

    /// Like [`Repo::redemption_lines`], of one holder.
    pub async fn redemption_lines_of(
        &self,
        redemption_id: &str,
        user_id: &str,
        after: i64,
        limit: i64,
    ) -> Result<Vec<(i64, RedemptionLine)>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM redemption_line INDEXED BY redemption_line_of_user \
             WHERE redemption_id = $1 AND user_id = $2 AND position > $3 \
             ORDER BY position LIMIT $4",
        )
        .bind(redemption_id)
        .bind(user_id)
        .bind(after)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(placed_line).collect()
    }

    pub async fn open_redemption_ids(&self) -> Result<Vec<String>, Error> {
        let rows = sqlx::query_scalar(
            "SELECT redemption_id FROM issue_redemption WHERE status NOT IN (5, 6) ORDER BY created_at_us",
        );
        Ok(rows.fetch_all(self.db.read()).await?)
    }

    /// Issues whose redemption waits for the issuer's money.
    pub async fn underfunded_redemptions(&self) -> Result<Vec<String>, Error> {
        let ids = sqlx::query_scalar(
            "SELECT instrument_id FROM issue_redemption WHERE status NOT IN (5, 6) AND status = 2",
        );
        Ok(ids.fetch_all(self.db.read()).await?)
    }

    /// Stores a redemption with its lines; false if the issue has one already.
    ///
    /// # Errors
    /// `Damaged` for lines that violate an invariant.
    pub async fn insert_redemption_in_tx(
        &self,
        tx: &mut Tx,
        redemption: &IssueRedemption,
    ) -> Result<bool, Error> {
        refuse(redemption.contradiction(), &redemption.redemption_id)?;
        let done = sqlx::query(
            "INSERT INTO issue_redemption (redemption_id, instrument_id, reason, status, \
                record_date_us, total_minor, parts_done, tx_hash,
                idempotency_key, created_at_us, finalized_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, 0, NULL, $7, $8, NULL) ON CONFLICT DO NOTHING",
        )
        .bind(&redemption.redemption_id)
        .bind(&redemption.instrument_id)
        .bind(redemption.reason.code())
        .bind(redemption.status.code())
        .bind(redemption.record_date_us)
        .bind(redemption.total_minor)
        .bind(&redemption.idempotency_key)
        .bind(redemption.created_at_us)
        .execute(&mut **tx)
        .await?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        let lines: Vec<(usize, &RedemptionLine)> = redemption.lines.iter().enumerate().collect();
        let mut script = Script::default();
        script
            .add(tx, &LINES, &lines, |(position, line), values| {
                values.put(&redemption.redemption_id);
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

    /// Restarts a failed redemption under a new key; false if it is no longer failed.
    pub async fn restart_redemption_in_tx(
        &self,
        tx: &mut Tx,
        redemption: &IssueRedemption,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE issue_redemption SET status = $2, idempotency_key = $3, attempt = $4 \
             WHERE redemption_id = $1 AND status = 6",
        )
        .bind(&redemption.redemption_id)
        .bind(redemption.status.code())
        .bind(&redemption.idempotency_key)
        .bind(i64::from(redemption.attempt))
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Updates the mutable columns of a redemption, or of a coupon's payment.
    pub async fn save_redemption_in_tx(
        &self,
        tx: &mut Tx,
        redemption: &IssueRedemption,
    ) -> Result<(), Error> {
        if redemption.is_coupon() {
            return self.save_coupon_in_tx(tx, redemption).await;
        }
        sqlx::query(
            "UPDATE issue_redemption SET status = $2, parts_done = $3, tx_hash = $4, \
             finalized_at_us = $5 WHERE redemption_id = $1",
        )
        .bind(&redemption.redemption_id)
        .bind(redemption.status.code())
        .bind(redemption.parts_done as i64)
        .bind(&redemption.tx_hash)
        .bind(redemption.finalized_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }
}

fn decode_line(row: &SqliteRow) -> RedemptionLine {
    RedemptionLine {
        user_id: row.get("user_id"),
        address: row.get("address"),
        units_minor: row.get("units_minor"),
        payment_minor: row.get("payment_minor"),
    }
}

fn placed_line(row: &SqliteRow) -> Result<(i64, RedemptionLine), Error> {
    let (position, line) = (row.get("position"), decode_line(row));
    refuse(line.contradiction(), &format!("line {position}"))?;
    Ok((position, line))
}

fn decode(row: &SqliteRow) -> Result<IssueRedemption, Error> {
    Ok(IssueRedemption {
        redemption_id: row.try_get("redemption_id")?,
        instrument_id: row.try_get("instrument_id")?,
        reason: code(row, "reason", RedemptionReason::from_code)?,
        status: code(row, "status", RedemptionStatus::from_code)?,
        record_date_us: row.try_get("record_date_us")?,
        total_minor: row.try_get("total_minor")?,
        lines: Vec::new(),
        parts_done: row.try_get::<i64, _>("parts_done")? as u64,
        attempt: row.try_get::<i64, _>("attempt")? as u32,
        coupon_number: 0,
        tx_hash: row.try_get("tx_hash")?,
        idempotency_key: row.try_get("idempotency_key")?,
        created_at_us: row.try_get("created_at_us")?,
        finalized_at_us: row.try_get("finalized_at_us")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(user_id: &str, units_minor: i64, payment_minor: i64) -> RedemptionLine {
        RedemptionLine {
            user_id: user_id.into(),
            address: format!("0x{user_id}"),
            units_minor,
            payment_minor,
        }
    }

    fn redemption(total_minor: i64, lines: Vec<RedemptionLine>) -> IssueRedemption {
        IssueRedemption {
            redemption_id: "r-1".into(),
            instrument_id: "BOND-1".into(),
            reason: RedemptionReason::Maturity,
            status: RedemptionStatus::Snapshot,
            record_date_us: 1,
            total_minor,
            lines,
            parts_done: 0,
            attempt: 0,
            coupon_number: 0,
            tx_hash: None,
            idempotency_key: "k".into(),
            created_at_us: 2,
            finalized_at_us: None,
        }
    }

    // rows: R098
    #[tokio::test]
    async fn r098_contradicting_lines_are_neither_written_nor_read() {
        let folder = tempfile::tempdir().expect("folder");
        let repo = Repo::open(&folder.path().join("cfa.sqlite")).await;
        let repo = repo.expect("store");
        for refused in [
            redemption(1_500, vec![line("alice", 9, 1_000)]),
            redemption(0, vec![line("alice", 9, 1_000), line("bob", 1, -1_000)]),
            redemption(1_000, vec![line("alice", 9, 1_000), line("bob", 0, 0)]),
        ] {
            let mut tx = repo.begin().await.expect("transaction");
            let inserted = repo.insert_redemption_in_tx(&mut tx, &refused).await;
            assert!(matches!(inserted, Err(Error::Damaged(_))), "{inserted:?}");
        }
        // A payment that rounds to zero is legal.
        let whole = redemption(1_000, vec![line("alice", 9, 1_000), line("bob", 1, 0)]);
        let mut tx = repo.begin().await.expect("transaction");
        let inserted = repo.insert_redemption_in_tx(&mut tx, &whole).await;
        assert!(inserted.expect("inserted"));
        tx.commit().await.expect("committed");
        let head = repo.redemption_head("r-1").await.expect("read");
        let mut read = head.expect("stored");
        repo.read_lines(&mut read).await.expect("read");
        assert_eq!(read, whole);

        // A file that was changed past the service.
        let mut tx = repo.begin().await.expect("transaction");
        let raised = "UPDATE redemption_line SET payment_minor = payment_minor + 1";
        let done = sqlx::query(raised).execute(&mut *tx).await;
        done.expect("changed");
        tx.commit().await.expect("committed");
        let damaged = repo.read_lines(&mut read).await;
        assert!(matches!(damaged, Err(Error::Damaged(_))), "{damaged:?}");
    }
}
