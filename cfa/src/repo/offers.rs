//! Offers of users to buy units of an issue, or to sell them back to its issuer.

use events::Tx;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};

use super::{Repo, code, refuse};
use crate::error::Error;
use crate::model::{Offer, OfferLimit, OfferSide, OfferStatus, Operation};

/// Result of `insert_offer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfferInsert {
    Stored,
    KeyUsed,
    TooMany,
}

impl Repo {
    pub async fn offer(&self, id: &str) -> Result<Option<Offer>, Error> {
        let row = sqlx::query("SELECT * FROM offer WHERE offer_id = $1")
            .bind(id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn offer_by_key(
        &self,
        side: OfferSide,
        user_id: &str,
        key: &str,
    ) -> Result<Option<Offer>, Error> {
        let row = sqlx::query(
            "SELECT * FROM offer WHERE user_id = $1 AND side = $2 AND idempotency_key = $3",
        )
        .bind(user_id)
        .bind(side.code())
        .bind(key)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The user's oldest active offer for exactly the units of an operation. Its payment is that of
    /// the operation; an offer to sell may ask for less.
    pub async fn offer_for_in_tx(
        &self,
        tx: &mut Tx,
        side: OfferSide,
        operation: &Operation,
        now_us: i64,
    ) -> Result<Option<Offer>, Error> {
        let row = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_active \
             WHERE user_id = $1 AND instrument_id = $2 AND side = $3 AND status = 2
               AND units_minor = $4 AND (payment_minor = $5 OR side = 2 AND payment_minor < $5)
               AND expires_at_us > $6
             ORDER BY created_at_us, offer_id LIMIT 1",
        )
        .bind(&operation.user_id)
        .bind(&operation.instrument_id)
        .bind(side.code())
        .bind(operation.units_minor)
        .bind(operation.payment_minor)
        .bind(now_us)
        .fetch_optional(&mut **tx)
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Stores an offer unless its key exists, or more would be pending, active or not released yet
    /// than `user_max` of the user or `issue_max` of the issue, each on this side. A subscription
    /// to a placement is counted by its pending and active ones.
    ///
    /// # Errors
    /// `InstrumentNotActive` for a MATURED or REDEEMED issue; the refusals of
    /// `require_placeable_in_tx`; `Damaged` for an offer that violates an invariant.
    pub async fn insert_offer(
        &self,
        new: &Offer,
        user_max: i64,
        issue_max: Option<i64>,
    ) -> Result<OfferInsert, Error> {
        refuse(new.contradiction(), &new.offer_id)?;
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "INSERT INTO offer (offer_id, side, instrument_id, user_id, units_minor, \
                payment_minor, status, step, idempotency_key, correlation_id, expires_at_us, \
                created_at_us, updated_at_us, in_placement, limit_state)
             VALUES ($1, $2, $3, $4, $5, $6, $7, 1, $8, $9, $10, $11, $11, $12, $13) \
             ON CONFLICT DO NOTHING",
        )
        .bind(&new.offer_id)
        .bind(new.side.code())
        .bind(&new.instrument_id)
        .bind(&new.user_id)
        .bind(new.units_minor)
        .bind(new.payment_minor)
        .bind(new.status.code())
        .bind(&new.idempotency_key)
        .bind(&new.correlation_id)
        .bind(new.expires_at_us)
        .bind(new.created_at_us)
        .bind(new.in_placement)
        .bind(new.limit.code())
        .execute(&mut *tx)
        .await?;
        // Dropping the transaction rolls the insert back.
        if done.rows_affected() == 0 {
            return Ok(OfferInsert::KeyUsed);
        }
        self.require_movable_in_tx(&mut tx, &new.instrument_id)
            .await?;
        let of_user: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM offer INDEXED BY offer_live \
             WHERE user_id = $1 AND side = $2 AND (status < 3 OR step > 0)",
        )
        .bind(&new.user_id)
        .bind(new.side.code())
        .fetch_one(&mut *tx)
        .await?;
        let mut is_above = of_user > user_max;
        if new.in_placement {
            self.require_placeable_in_tx(&mut tx, new, issue_max.unwrap_or(i64::MAX))
                .await?;
        } else if let Some(issue_max) = issue_max {
            let of_issue: i64 = sqlx::query_scalar(
                "SELECT COUNT(*) FROM offer INDEXED BY offer_live_of_issue \
                 WHERE instrument_id = $1 AND side = $2 AND (status < 3 OR step > 0)",
            )
            .bind(&new.instrument_id)
            .bind(new.side.code())
            .fetch_one(&mut *tx)
            .await?;
            is_above |= of_issue > issue_max;
        }
        if is_above {
            return Ok(OfferInsert::TooMany);
        }
        tx.commit().await?;
        Ok(OfferInsert::Stored)
    }

    /// Deletes an offer whose money or units the ledger refused to hold.
    pub async fn delete_pending_offer(&self, id: &str) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM offer WHERE offer_id = $1 AND status = 1")
            .bind(id)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// Stores the status, and whether a step is left. The end of an offer ends its reservation of
    /// limits. False if the stored status is not `before`.
    ///
    /// # Errors
    /// `Damaged` for an offer that violates an invariant.
    pub async fn save_offer_in_tx(
        &self,
        tx: &mut Tx,
        offer: &Offer,
        before: OfferStatus,
        has_step: bool,
    ) -> Result<bool, Error> {
        refuse(offer.contradiction(), &offer.offer_id)?;
        let done = sqlx::query(
            "UPDATE offer SET status = $2, step = $3, updated_at_us = $4, limit_state = \
                CASE WHEN limit_state = 1 AND $2 IN (4, 5, 6) THEN 3 ELSE limit_state END
             WHERE offer_id = $1 AND status = $5",
        )
        .bind(&offer.offer_id)
        .bind(offer.status.code())
        .bind(has_step)
        .bind(offer.updated_at_us)
        .bind(before.code())
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Uses an active offer for an operation. False if it is not active any more.
    pub async fn use_offer_in_tx(
        &self,
        tx: &mut Tx,
        id: &str,
        operation: &Operation,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE offer SET status = 3, operation_id = $2, updated_at_us = $3
             WHERE offer_id = $1 AND status = 2",
        )
        .bind(id)
        .bind(&operation.operation_id)
        .bind(operation.created_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Reactivates and returns the offer of an operation that was deleted before it had effects.
    pub async fn restore_offer_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
        now_us: i64,
    ) -> Result<Option<Offer>, Error> {
        let row = sqlx::query(
            "UPDATE offer SET status = 2, operation_id = '', updated_at_us = $2
             WHERE operation_id = $1 AND operation_id <> '' AND status = 3 RETURNING *",
        )
        .bind(operation_id)
        .bind(now_us)
        .fetch_optional(&mut **tx)
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Assigns an operation to an allotted subscription.
    pub async fn assign_operation_in_tx(
        &self,
        tx: &mut Tx,
        id: &str,
        operation_id: &str,
    ) -> Result<(), Error> {
        sqlx::query("UPDATE offer SET operation_id = $2 WHERE offer_id = $1 AND status = 3")
            .bind(id)
            .bind(operation_id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    /// Ends an allotted subscription whose operation was not done. `is_held`: its payment is to be
    /// released.
    pub async fn return_allotted_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
        is_held: bool,
        now_us: i64,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE offer SET status = 6, step = $3, updated_at_us = $2
             WHERE operation_id = $1 AND operation_id <> '' AND status = 3",
        )
        .bind(operation_id)
        .bind(now_us)
        .bind(is_held)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Orders the end of the limit reservation of the offer that an operation has used.
    pub async fn end_limit_of_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
        end: OfferLimit,
    ) -> Result<(), Error> {
        sqlx::query(
            "UPDATE offer SET limit_state = $2 \
             WHERE operation_id = $1 AND operation_id <> '' AND limit_state = 1",
        )
        .bind(operation_id)
        .bind(end.code())
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Offers whose limit reservation is to be confirmed or cancelled, oldest first.
    pub async fn unended_offer_limits(&self, limit: i64) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_limit WHERE limit_state IN (2, 3) \
             ORDER BY updated_at_us LIMIT $1",
        )
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Records that the limit reservations of these offers have ended.
    pub async fn end_offer_limits(&self, ids: &[String]) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        let ids = serde_json::to_string(ids).map_err(|error| Error::Damaged(error.to_string()))?;
        let mut tx = self.begin().await?;
        sqlx::query(
            "UPDATE offer SET limit_state = 0 \
             WHERE offer_id IN (SELECT value FROM json_each($1)) AND limit_state IN (2, 3)",
        )
        .bind(ids)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    /// Moves an offer whose step failed to the end of the queue. False if it has no step left.
    pub async fn postpone_offer(&self, id: &str, now_us: i64) -> Result<bool, Error> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "UPDATE offer SET step = 2, updated_at_us = $2 WHERE offer_id = $1 AND step > 0",
        )
        .bind(id)
        .bind(now_us)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    /// Offers with a step left and not changed since `before_us`, oldest first.
    pub async fn open_offers(&self, before_us: i64, limit: i64) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer WHERE step > 0 AND updated_at_us < $1 \
             ORDER BY updated_at_us LIMIT $2",
        )
        .bind(before_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Id of the oldest offer of a side whose last step failed.
    pub async fn failed_offer(&self, side: OfferSide) -> Result<Option<String>, Error> {
        let found = sqlx::query_scalar(
            "SELECT offer_id FROM offer INDEXED BY offer_failed \
             WHERE side = $1 AND step = 2 ORDER BY updated_at_us LIMIT 1",
        )
        .bind(side.code())
        .fetch_optional(self.db.read());
        Ok(found.await?)
    }

    /// Pending and active offers past their expiry.
    pub async fn expired_offers(&self, now_us: i64, limit: i64) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer WHERE status < 3 AND expires_at_us <= $1 \
             ORDER BY expires_at_us LIMIT $2",
        )
        .bind(now_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Offers to sell units of an issue that are pending, active or not released yet, in the order
    /// of their ids, after the given one.
    pub async fn live_sales(
        &self,
        instrument_id: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<Offer>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM offer INDEXED BY offer_live_of_issue \
             WHERE instrument_id = $1 AND side = 2 AND offer_id > $2 AND (status < 3 OR step > 0)
             ORDER BY offer_id LIMIT $3",
        )
        .bind(instrument_id)
        .bind(after)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// A page of a user's or an issue's offers, newest first, strictly after the bound.
    pub async fn offers(
        &self,
        side: OfferSide,
        user_id: &str,
        instrument_id: &str,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Offer>, Error> {
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("SELECT * FROM offer WHERE ");
        if user_id.is_empty() {
            query.push("instrument_id = ").push_bind(instrument_id);
        } else {
            query.push("user_id = ").push_bind(user_id);
            if !instrument_id.is_empty() {
                query.push(" AND instrument_id = ").push_bind(instrument_id);
            }
        }
        query.push(" AND side = ").push_bind(side.code());
        query.push(" AND (created_at_us, offer_id) < (");
        query.push_bind(bound.0).push(", ").push_bind(bound.1);
        query.push(") ORDER BY created_at_us DESC, offer_id DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }
}

pub(super) fn decode(row: &SqliteRow) -> Result<Offer, Error> {
    let offer = Offer {
        offer_id: row.try_get("offer_id")?,
        side: code(row, "side", OfferSide::from_code)?,
        instrument_id: row.try_get("instrument_id")?,
        user_id: row.try_get("user_id")?,
        units_minor: row.try_get("units_minor")?,
        payment_minor: row.try_get("payment_minor")?,
        status: code(row, "status", OfferStatus::from_code)?,
        operation_id: row.try_get("operation_id")?,
        idempotency_key: row.try_get("idempotency_key")?,
        correlation_id: row.try_get("correlation_id")?,
        expires_at_us: row.try_get("expires_at_us")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
        in_placement: row.try_get("in_placement")?,
        limit: code(row, "limit_state", OfferLimit::from_code)?,
        allotted_minor: row.try_get("allotted_minor")?,
        allotted_payment_minor: row.try_get("allotted_payment_minor")?,
        allotted_number: row.try_get("allotted_number")?,
    };
    refuse(offer.contradiction(), &offer.offer_id)?;
    Ok(offer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            offer_id: "o-1".into(),
            side: OfferSide::Buy,
            instrument_id: "BOND-1".into(),
            user_id: "alice".into(),
            units_minor: 10,
            payment_minor: 1_000,
            status: OfferStatus::Pending,
            operation_id: String::new(),
            idempotency_key: "k".into(),
            correlation_id: "c".into(),
            expires_at_us: 9,
            created_at_us: 1,
            updated_at_us: 1,
            in_placement: false,
            limit: OfferLimit::Reserved,
            allotted_minor: 0,
            allotted_payment_minor: 0,
            allotted_number: 0,
        }
    }

    fn allotted() -> Offer {
        Offer {
            status: OfferStatus::Used,
            allotted_minor: 5,
            allotted_payment_minor: 500,
            allotted_number: 1,
            ..offer()
        }
    }

    #[test]
    fn d46_violated_invariants_of_an_offer_are_detected() {
        let of = |base: Offer, change: fn(&mut Offer)| {
            let mut offer = base;
            change(&mut offer);
            offer.contradiction()
        };
        let use_it = |o: &mut Offer| {
            o.status = OfferStatus::Used;
            o.operation_id = "op".into();
        };
        assert_eq!(of(offer(), |_| {}), None);
        assert_eq!(of(offer(), use_it), None);
        assert_eq!(of(allotted(), |_| {}), None);
        assert_eq!(of(allotted(), use_it), None);
        // Without an allotment, and with one whose delivery failed.
        let end = |o: &mut Offer| o.status = OfferStatus::NotAllotted;
        assert_eq!(of(offer(), end), None);
        assert_eq!(of(allotted(), end), None);
        let nothing = Some("units or payment of an offer not positive");
        assert_eq!(of(offer(), |o| o.units_minor = 0), nothing);
        assert_eq!(of(offer(), |o| o.payment_minor = -1), nothing);
        let unfit = Some("an allotment that does not fit its offer");
        assert_eq!(of(allotted(), |o| o.allotted_minor = 11), unfit);
        assert_eq!(of(allotted(), |o| o.allotted_payment_minor = 1_001), unfit);
        assert_eq!(of(allotted(), |o| o.allotted_payment_minor = 0), unfit);
        assert_eq!(of(allotted(), |o| o.allotted_number = 0), unfit);
        let sale = of(offer(), |o| o.side = OfferSide::Sell);
        assert_eq!(sale, Some("a sale with an allotment or a limit"));
        let unused = Some("an operation or allotment of an offer that is not used");
        let cancelled = of(offer(), |o| {
            o.status = OfferStatus::Cancelled;
            o.operation_id = "op".into();
        });
        assert_eq!(cancelled, unused);
        assert_eq!(of(allotted(), |o| o.status = OfferStatus::Active), unused);
        let alone = of(offer(), |o| o.status = OfferStatus::Used);
        assert_eq!(alone, Some("a used offer without its operation"));
    }

    #[tokio::test]
    async fn d46_a_contradicting_offer_is_neither_written_nor_read() {
        let folder = tempfile::tempdir().expect("folder");
        let repo = Repo::open(&folder.path().join("cfa.sqlite")).await;
        let repo = repo.expect("store");
        let whole = offer();
        let free = Offer {
            payment_minor: 0,
            ..whole.clone()
        };
        let refused = repo.insert_offer(&free, 9, None).await;
        assert!(matches!(refused, Err(Error::Damaged(_))), "{refused:?}");
        let stored = repo.insert_offer(&whole, 9, None).await;
        assert_eq!(stored.expect("stored"), OfferInsert::Stored);

        let unused = Offer {
            status: OfferStatus::Used,
            ..whole.clone()
        };
        let mut tx = repo.begin().await.expect("transaction");
        let refused = repo
            .save_offer_in_tx(&mut tx, &unused, whole.status, false)
            .await;
        assert!(matches!(refused, Err(Error::Damaged(_))), "{refused:?}");
        drop(tx);
        let stored = repo.offer("o-1").await.expect("read");
        assert_eq!(stored, Some(whole));

        // A file that was changed past the service.
        let mut tx = repo.begin().await.expect("transaction");
        let done = sqlx::query("UPDATE offer SET operation_id = 'op'")
            .execute(&mut *tx)
            .await;
        done.expect("changed");
        tx.commit().await.expect("committed");
        let damaged = repo.offer("o-1").await;
        assert!(matches!(damaged, Err(Error::Damaged(_))), "{damaged:?}");
    }
}
