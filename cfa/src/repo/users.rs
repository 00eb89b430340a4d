//! Users' addresses on the chain.

use events::Event;

use super::Repo;
use crate::error::{Error, Refusal};

impl Repo {
    /// Stores a user's address. Returns whether its allow-list transaction was submitted already.
    ///
    /// # Errors
    /// `AddressTaken` if another user has the address (T14).
    pub async fn store_address(
        &self,
        user_id: &str,
        address: &str,
        now_us: i64,
    ) -> Result<bool, Error> {
        let known: Option<(String, bool)> =
            sqlx::query_as("SELECT address, registered FROM user_address WHERE user_id = $1")
                .bind(user_id)
                .fetch_optional(self.db.read())
                .await?;
        if let Some((known, registered)) = known {
            assert_eq!(
                known, address,
                "the address is a pure function of the user id"
            );
            return Ok(registered);
        }
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "INSERT INTO user_address (user_id, address, registered, created_at_us) \
             VALUES ($1, $2, 0, $3) ON CONFLICT DO NOTHING",
        )
        .bind(user_id)
        .bind(address)
        .bind(now_us)
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() == 0 {
            let owner: String =
                sqlx::query_scalar("SELECT user_id FROM user_address WHERE address = $1")
                    .bind(address)
                    .fetch_one(&mut *tx)
                    .await?;
            if owner != user_id {
                return Err(Refusal::AddressTaken.into());
            }
        }
        tx.commit().await?;
        Ok(false)
    }

    /// Marks system accounts as on the allow-list, without a transaction of their own.
    pub async fn mark_registered(&self, user_ids: &[&str]) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        for user_id in user_ids {
            sqlx::query("UPDATE user_address SET registered = 1 WHERE user_id = $1")
                .bind(user_id)
                .execute(&mut *tx)
                .await?;
        }
        Ok(tx.commit().await?)
    }

    /// Records the submitted allow-list transaction of these users, with its events.
    pub async fn mark_submitted(
        &self,
        user_ids: &[String],
        tx_hash: &str,
        correlation_id: &str,
        events: &[Event],
    ) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        for user_id in user_ids {
            sqlx::query(
                "UPDATE user_address SET registered = 1, tx_hash = $2, correlation_id = $3 \
                 WHERE user_id = $1",
            )
            .bind(user_id)
            .bind(tx_hash)
            .bind(correlation_id)
            .execute(&mut *tx)
            .await?;
        }
        self.publish_in_tx(&mut tx, events).await?;
        Ok(tx.commit().await?)
    }

    /// Users of an unconfirmed allow-list transaction, with the correlation ids of its request.
    pub async fn users_to_confirm(&self, tx_hash: &str) -> Result<Vec<(String, String)>, Error> {
        Ok(sqlx::query_as(
            "SELECT user_id, correlation_id FROM user_address WHERE tx_hash = $1 AND confirmed = 0 ORDER BY user_id",
        )
        .bind(tx_hash)
        .fetch_all(self.db.read())
        .await?)
    }

    /// Allow-list transactions without a confirmed receipt.
    pub async fn open_registrations(&self, limit: i64) -> Result<Vec<String>, Error> {
        Ok(sqlx::query_scalar(
            "SELECT DISTINCT tx_hash FROM user_address WHERE tx_hash IS NOT NULL AND confirmed = 0 LIMIT $1",
        )
        .bind(limit)
        .fetch_all(self.db.read())
        .await?)
    }

    /// Records the confirmation of an allow-list transaction, with its events. A repeat does
    /// nothing.
    pub async fn confirm_registered(&self, tx_hash: &str, events: &[Event]) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "UPDATE user_address SET confirmed = 1 WHERE tx_hash = $1 AND confirmed = 0",
        )
        .bind(tx_hash)
        .execute(&mut *tx)
        .await?;
        if done.rows_affected() > 0 {
            self.publish_in_tx(&mut tx, events).await?;
        }
        Ok(tx.commit().await?)
    }
}
