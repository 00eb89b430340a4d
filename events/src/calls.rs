//! Answers of calls by idempotency key, stored in the database and transaction of their effect
//! (D50).
//!
//! Used for changes of settings and states. An object's own row can store only the key of its last
//! call, so a repeat of an earlier call would act again (block, unblock, the first block repeated).
//! A row is kept for at least [`RETENTION_US`].

use async_recursion::async_recursion as boxed;
use sqlx::{Row, SqliteConnection, SqliteExecutor};

use crate::Error;

/// Minimum retention of a key, in microseconds: 30 days.
pub const RETENTION_US: i64 = 30 * 24 * 3_600 * 1_000_000;

/// Expired rows deleted per new row. More than one, so expired rows never accumulate.
const EXPIRED_PER_CALL: i64 = 8;

/// Scope and idempotency key of a call (T12).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallKey {
    pub call: &'static str,
    /// Subject of the caller's credential.
    pub subject: String,
    pub key: String,
}

/// A call that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Fingerprint of the request's content.
    pub digest: i64,
    pub answer: Vec<u8>,
}

/// The answer to an earlier call with this key.
///
/// # Errors
/// [`Error::Store`].
pub async fn find(db: impl SqliteExecutor<'_>, key: &CallKey) -> Result<Option<Answered>, Error> {
    let row = sqlx::query(
        "SELECT digest, answer FROM calls WHERE call = $1 AND subject = $2 AND key = $3",
    )
    .bind(key.call)
    .bind(&key.subject)
    .bind(&key.key)
    .fetch_optional(db)
    .await?;
    let read = |row: sqlx::sqlite::SqliteRow| {
        Ok(Answered {
            digest: row.try_get("digest")?,
            answer: row.try_get("answer")?,
        })
    };
    row.map(read).transpose()
}

/// Stores a call's answer in the transaction of its effect, and deletes some expired answers.
///
/// # Errors
/// [`Error::Store`], also for a key that is stored already.
#[boxed]
pub async fn store_in_tx(
    tx: &mut SqliteConnection,
    key: &CallKey,
    answered: &Answered,
) -> Result<(), Error> {
    let now_us = service_kit::clock::now_us();
    sqlx::query(
        "DELETE FROM calls WHERE rowid IN (SELECT rowid FROM calls WHERE at_us < $1 ORDER BY at_us LIMIT $2)",
    )
    .bind(now_us - RETENTION_US)
    .bind(EXPIRED_PER_CALL)
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "INSERT INTO calls (call, subject, key, digest, answer, at_us) VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(key.call)
    .bind(&key.subject)
    .bind(&key.key)
    .bind(answered.digest)
    .bind(&answered.answer)
    .bind(now_us)
    .execute(tx)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use sqlx::Connection;

    use super::*;

    fn key(key: &str) -> CallKey {
        CallKey {
            call: "BlockUser",
            subject: "sandbox.operator.anna".into(),
            key: key.into(),
        }
    }

    #[tokio::test]
    async fn a_key_is_stored_once_and_deleted_after_its_retention() {
        let mut db = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(crate::migrations::SQL)
            .execute(&mut db)
            .await
            .unwrap();
        let answered = |number: u8| Answered {
            digest: -i64::from(number),
            answer: vec![number],
        };
        for number in 0..20 {
            let key = key(&number.to_string());
            store_in_tx(&mut db, &key, &answered(number)).await.unwrap();
        }
        assert_eq!(find(&mut db, &key("7")).await.unwrap(), Some(answered(7)));
        assert_eq!(find(&mut db, &key("20")).await.unwrap(), None);
        let other = CallKey {
            call: "UnblockUser",
            ..key("7")
        };
        assert_eq!(find(&mut db, &other).await.unwrap(), None);
        assert!(store_in_tx(&mut db, &key("7"), &answered(1)).await.is_err());

        let past = service_kit::clock::now_us() - RETENTION_US - 1;
        sqlx::query("UPDATE calls SET at_us = $1")
            .bind(past)
            .execute(&mut db)
            .await
            .unwrap();
        let count = async |db: &mut SqliteConnection| -> i64 {
            let count = sqlx::query_scalar("SELECT COUNT(*) FROM calls");
            count.fetch_one(db).await.unwrap()
        };
        for (number, left) in [(21, 13), (22, 6), (23, 3)] {
            let key = key(&number.to_string());
            store_in_tx(&mut db, &key, &answered(number)).await.unwrap();
            assert_eq!(count(&mut db).await, left);
        }
    }
}
