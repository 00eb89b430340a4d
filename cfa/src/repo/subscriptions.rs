//! Investors' subscriptions to issues.

use events::Tx;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};

use super::{Repo, code};
use crate::error::Error;
use crate::model::{Operation, Subscription, SubscriptionStatus};

/// Result of `insert_subscription`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubscriptionInsert {
    Stored,
    KeyUsed,
    TooMany,
}

impl Repo {
    pub async fn subscription(&self, id: &str) -> Result<Option<Subscription>, Error> {
        let row = sqlx::query("SELECT * FROM subscription WHERE subscription_id = $1")
            .bind(id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn subscription_by_key(
        &self,
        investor_id: &str,
        key: &str,
    ) -> Result<Option<Subscription>, Error> {
        let row = sqlx::query(
            "SELECT * FROM subscription WHERE investor_id = $1 AND idempotency_key = $2",
        )
        .bind(investor_id)
        .bind(key)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The investor's oldest active subscription for exactly the units and the payment of an issue.
    pub async fn subscription_for_in_tx(
        &self,
        tx: &mut Tx,
        issue: &Operation,
        now_us: i64,
    ) -> Result<Option<Subscription>, Error> {
        let row = sqlx::query(
            "SELECT * FROM subscription INDEXED BY subscription_active \
             WHERE investor_id = $1 AND instrument_id = $2 AND status = 2
               AND units_minor = $3 AND payment_minor = $4 AND expires_at_us > $5
             ORDER BY created_at_us, subscription_id LIMIT 1",
        )
        .bind(&issue.user_id)
        .bind(&issue.instrument_id)
        .bind(issue.units_minor)
        .bind(issue.payment_minor)
        .bind(now_us)
        .fetch_optional(&mut **tx)
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Stores a subscription, unless its key exists or the investor would have more than `live_max`
    /// that are pending, active or not released yet.
    pub async fn insert_subscription(
        &self,
        new: &Subscription,
        live_max: i64,
    ) -> Result<SubscriptionInsert, Error> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "INSERT INTO subscription (subscription_id, instrument_id, investor_id, units_minor, \
                payment_minor, status, step, idempotency_key, correlation_id, expires_at_us, \
                created_at_us, updated_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, 1, $7, $8, $9, $10, $10) ON CONFLICT DO NOTHING",
        )
        .bind(&new.subscription_id)
        .bind(&new.instrument_id)
        .bind(&new.investor_id)
        .bind(new.units_minor)
        .bind(new.payment_minor)
        .bind(new.status.code())
        .bind(&new.idempotency_key)
        .bind(&new.correlation_id)
        .bind(new.expires_at_us)
        .bind(new.created_at_us)
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            return Ok(SubscriptionInsert::KeyUsed);
        }
        let live: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM subscription INDEXED BY subscription_live \
             WHERE investor_id = $1 AND (status < 3 OR step > 0)",
        )
        .bind(&new.investor_id)
        .fetch_one(&mut *tx)
        .await?;
        if live > live_max {
            // Dropping the transaction rolls the insert back.
            return Ok(SubscriptionInsert::TooMany);
        }
        tx.commit().await?;
        Ok(SubscriptionInsert::Stored)
    }

    /// Deletes a subscription whose payment the ledger refused to hold.
    pub async fn delete_pending_subscription(&self, id: &str) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM subscription WHERE subscription_id = $1 AND status = 1")
            .bind(id)
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// Stores the status, and whether a step is left. False if the stored status is not `before`.
    pub async fn save_subscription_in_tx(
        &self,
        tx: &mut Tx,
        subscription: &Subscription,
        before: SubscriptionStatus,
        has_step: bool,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE subscription SET status = $2, step = $3, updated_at_us = $4 \
             WHERE subscription_id = $1 AND status = $5",
        )
        .bind(&subscription.subscription_id)
        .bind(subscription.status.code())
        .bind(has_step)
        .bind(subscription.updated_at_us)
        .bind(before.code())
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Uses an active subscription for an issue. False if it is not active any more.
    pub async fn use_subscription_in_tx(
        &self,
        tx: &mut Tx,
        id: &str,
        issue: &Operation,
    ) -> Result<bool, Error> {
        let done = sqlx::query(
            "UPDATE subscription SET status = 3, operation_id = $2, updated_at_us = $3
             WHERE subscription_id = $1 AND status = 2",
        )
        .bind(id)
        .bind(&issue.operation_id)
        .bind(issue.created_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Reactivates the subscription of an issue that was deleted before it had effects. Returns its
    /// id.
    pub async fn restore_subscription_in_tx(
        &self,
        tx: &mut Tx,
        operation_id: &str,
        now_us: i64,
    ) -> Result<Option<String>, Error> {
        let restored = sqlx::query_scalar(
            "UPDATE subscription SET status = 2, operation_id = '', updated_at_us = $2
             WHERE operation_id = $1 AND operation_id <> '' AND status = 3 \
             RETURNING subscription_id",
        )
        .bind(operation_id)
        .bind(now_us)
        .fetch_optional(&mut **tx);
        Ok(restored.await?)
    }

    /// Moves a subscription whose step failed to the end of the queue. False if it has no step
    /// left.
    pub async fn postpone_subscription(&self, id: &str, now_us: i64) -> Result<bool, Error> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "UPDATE subscription SET step = 2, updated_at_us = $2 \
             WHERE subscription_id = $1 AND step > 0",
        )
        .bind(id)
        .bind(now_us)
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    /// Subscriptions with a step left and not changed since `before_us`, oldest first.
    pub async fn open_subscriptions(
        &self,
        before_us: i64,
        limit: i64,
    ) -> Result<Vec<Subscription>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM subscription WHERE step > 0 AND updated_at_us < $1 \
             ORDER BY updated_at_us LIMIT $2",
        )
        .bind(before_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Id of the oldest subscription whose last step failed.
    pub async fn failed_subscription(&self) -> Result<Option<String>, Error> {
        let found = sqlx::query_scalar(
            "SELECT subscription_id FROM subscription INDEXED BY subscription_failed \
             WHERE step = 2 ORDER BY updated_at_us LIMIT 1",
        )
        .fetch_optional(self.db.read());
        Ok(found.await?)
    }

    /// Pending and active subscriptions past their expiry.
    pub async fn expired_subscriptions(
        &self,
        now_us: i64,
        limit: i64,
    ) -> Result<Vec<Subscription>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM subscription WHERE status < 3 AND expires_at_us <= $1 \
             ORDER BY expires_at_us LIMIT $2",
        )
        .bind(now_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// A page of an investor's or an issue's subscriptions, newest first, strictly after the bound.
    pub async fn subscriptions(
        &self,
        investor_id: &str,
        instrument_id: &str,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Subscription>, Error> {
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("SELECT * FROM subscription WHERE ");
        if investor_id.is_empty() {
            query.push("instrument_id = ").push_bind(instrument_id);
        } else {
            query.push("investor_id = ").push_bind(investor_id);
            if !instrument_id.is_empty() {
                query.push(" AND instrument_id = ").push_bind(instrument_id);
            }
        }
        query.push(" AND (created_at_us, subscription_id) < (");
        query.push_bind(bound.0).push(", ").push_bind(bound.1);
        query.push(") ORDER BY created_at_us DESC, subscription_id DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }
}

fn decode(row: &SqliteRow) -> Result<Subscription, Error> {
    Ok(Subscription {
        subscription_id: row.try_get("subscription_id")?,
        instrument_id: row.try_get("instrument_id")?,
        investor_id: row.try_get("investor_id")?,
        units_minor: row.try_get("units_minor")?,
        payment_minor: row.try_get("payment_minor")?,
        status: code(row, "status", SubscriptionStatus::from_code)?,
        operation_id: row.try_get("operation_id")?,
        idempotency_key: row.try_get("idempotency_key")?,
        correlation_id: row.try_get("correlation_id")?,
        expires_at_us: row.try_get("expires_at_us")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    })
}
