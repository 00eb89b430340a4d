//! Who is who on chain.

use super::Repo;
use crate::error::{Error, Refusal};

impl Repo {
    /// Notes a user's address; refuses one that another user has. Returns whether the allow-list transaction was ordered already.
    pub async fn note_address(
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
        let done = sqlx::query("INSERT INTO user_address (user_id, address, registered, created_at_us) VALUES ($1, $2, 0, $3) ON CONFLICT DO NOTHING")
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

    pub async fn mark_registered(&self, user_ids: &[String]) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        for user_id in user_ids {
            sqlx::query("UPDATE user_address SET registered = 1 WHERE user_id = $1")
                .bind(user_id)
                .execute(&mut *tx)
                .await?;
        }
        Ok(tx.commit().await?)
    }
}
