//! Payment intents.

use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};

use super::{Filter, PageBound, check_read, check_write, page_query, parse_name};
use rail::Rub;
use types::PaymentStatus;

use crate::intent::{Intent, late_contradiction};

fn read(row: &SqliteRow) -> sqlx::Result<Intent> {
    let intent = Intent {
        payment_id: row.try_get("payment_id")?,
        user_id: row.try_get("user_id")?,
        amount: Rub::from_kopecks(row.try_get("amount_minor")?),
        method: parse_name(row, "method")?,
        status: parse_name(row, "status")?,
        payment_url: row.try_get("payment_url")?,
        qr_payload: row.try_get("qr_payload")?,
        idempotency_key: row.try_get("idempotency_key")?,
        correlation_id: row.try_get("correlation_id")?,
        late: row.try_get("late")?,
        created_at_us: row.try_get("created_at_us")?,
        expires_at_us: row.try_get("expires_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    };
    check_read(intent.contradiction(), &intent.payment_id)?;
    Ok(intent)
}

/// Inserts an intent, which is polled if it is pending. Returns false if the user's key exists: a
/// concurrent call was first.
///
/// # Errors
/// The intent violates an invariant; nothing is written.
pub async fn insert_in_tx(
    tx: &mut SqliteConnection,
    intent: &Intent,
    next_poll_at_us: i64,
) -> sqlx::Result<bool> {
    check_write(intent.contradiction(), &intent.payment_id)?;
    let done = sqlx::query(
        "INSERT INTO intents (payment_id, user_id, amount_minor, method, status, payment_url, \
         qr_payload, idempotency_key, correlation_id, next_poll_at_us, created_at_us, \
         expires_at_us, updated_at_us, polled) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $5 = 'PENDING') \
         ON CONFLICT (user_id, idempotency_key) DO NOTHING",
    )
    .bind(&intent.payment_id)
    .bind(&intent.user_id)
    .bind(intent.amount.kopecks())
    .bind(intent.method.as_str())
    .bind(intent.status.as_str())
    .bind(&intent.payment_url)
    .bind(&intent.qr_payload)
    .bind(&intent.idempotency_key)
    .bind(&intent.correlation_id)
    .bind(next_poll_at_us)
    .bind(intent.created_at_us)
    .bind(intent.expires_at_us)
    .bind(intent.updated_at_us)
    .execute(tx)
    .await?;
    Ok(done.rows_affected() == 1)
}

pub async fn get(db: impl SqliteExecutor<'_>, payment_id: &str) -> sqlx::Result<Option<Intent>> {
    sqlx::query("SELECT * FROM intents WHERE payment_id = $1")
        .bind(payment_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

pub async fn by_key(
    db: impl SqliteExecutor<'_>,
    user_id: &str,
    idempotency_key: &str,
) -> sqlx::Result<Option<Intent>> {
    sqlx::query("SELECT * FROM intents WHERE user_id = $1 AND idempotency_key = $2")
        .bind(user_id)
        .bind(idempotency_key)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// A user's intents that are polled: the number of pending ones, and of all.
pub async fn count_polled(db: impl SqliteExecutor<'_>, user_id: &str) -> sqlx::Result<(i64, i64)> {
    sqlx::query_as(
        "SELECT COUNT(*) FILTER (WHERE status = 'PENDING'), COUNT(*) \
         FROM intents INDEXED BY intents_polled_of_user WHERE user_id = $1 AND polled",
    )
    .bind(user_id)
    .fetch_one(db)
    .await
}

pub async fn list(
    db: impl SqliteExecutor<'_>,
    filter: Filter<'_>,
    bound: PageBound<'_>,
) -> sqlx::Result<Vec<Intent>> {
    page_query("intents", "payment_id", filter, bound)
        .build()
        .fetch_all(db)
        .await?
        .iter()
        .map(read)
        .collect()
}

/// Stores a status transition. A successful or refunded intent is not polled any more.
///
/// # Errors
/// The transition violates an invariant of the intent; nothing is written.
pub async fn set_status_in_tx(
    tx: &mut SqliteConnection,
    payment_id: &str,
    status: PaymentStatus,
    late: bool,
    now_us: i64,
) -> sqlx::Result<()> {
    check_write(late_contradiction(status, late), payment_id)?;
    let is_final = matches!(status, PaymentStatus::Success | PaymentStatus::Refunded);
    sqlx::query(
        "UPDATE intents SET status = $2, late = late OR $3, updated_at_us = $4, \
         polled = polled AND NOT $5 WHERE payment_id = $1",
    )
    .bind(payment_id)
    .bind(status.as_str())
    .bind(late)
    .bind(now_us)
    .bind(is_final)
    .execute(tx)
    .await?;
    Ok(())
}

/// Intents with a due poll, each with its number of polls.
pub async fn due(
    db: impl SqliteExecutor<'_>,
    now_us: i64,
    limit: i64,
) -> sqlx::Result<Vec<(Intent, u32)>> {
    sqlx::query(
        "SELECT * FROM intents INDEXED BY intents_polled \
         WHERE polled AND next_poll_at_us <= $1 ORDER BY next_poll_at_us LIMIT $2",
    )
    .bind(now_us)
    .bind(limit)
    .fetch_all(db)
    .await?
    .iter()
    .map(read_polled)
    .collect()
}

/// Pending intents, each with its number of polls, earliest next poll first.
pub async fn pending(db: impl SqliteExecutor<'_>, limit: i64) -> sqlx::Result<Vec<(Intent, u32)>> {
    sqlx::query(
        "SELECT * FROM intents INDEXED BY intents_pending \
         WHERE status = 'PENDING' ORDER BY next_poll_at_us LIMIT $1",
    )
    .bind(limit)
    .fetch_all(db)
    .await?
    .iter()
    .map(read_polled)
    .collect()
}

fn read_polled(row: &SqliteRow) -> sqlx::Result<(Intent, u32)> {
    Ok((read(row)?, row.try_get("polls")?))
}

/// Time of the first due poll after `now_us` in microseconds, if an intent waits for one.
pub async fn next_due_us(db: impl SqliteExecutor<'_>, now_us: i64) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(
        "SELECT MIN(next_poll_at_us) FROM intents INDEXED BY intents_polled \
         WHERE polled AND next_poll_at_us > $1",
    )
    .bind(now_us)
    .fetch_one(db)
    .await
}

/// Counts a poll and schedules the next one; `None` ends the polls.
pub async fn schedule_in_tx(
    tx: &mut SqliteConnection,
    payment_id: &str,
    next_poll_at_us: Option<i64>,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE intents SET polls = polls + 1, \
         polled = $2 IS NOT NULL AND status NOT IN ('SUCCESS', 'REFUNDED'), \
         next_poll_at_us = coalesce($2, next_poll_at_us) WHERE payment_id = $1",
    )
    .bind(payment_id)
    .bind(next_poll_at_us)
    .execute(tx)
    .await?;
    Ok(())
}

/// Paid deposits whose tokens are not known to be in the supply.
pub async fn unsettled(db: impl SqliteExecutor<'_>) -> sqlx::Result<Vec<Intent>> {
    sqlx::query("SELECT * FROM intents INDEXED BY intents_unsettled WHERE status = 'SUCCESS' AND NOT settled")
        .fetch_all(db)
        .await?
        .iter()
        .map(read)
        .collect()
}

pub async fn mark_settled_in_tx(tx: &mut SqliteConnection, payment_id: &str) -> sqlx::Result<()> {
    sqlx::query("UPDATE intents SET settled = TRUE WHERE payment_id = $1")
        .bind(payment_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// Whether any intent was created before this time.
pub async fn any_before(db: impl SqliteExecutor<'_>, time_us: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM intents WHERE created_at_us < $1)")
        .bind(time_us)
        .fetch_one(db)
        .await
}

#[cfg(test)]
mod tests {
    use sqlx::Connection;

    use super::*;
    use crate::intent::PaymentMethod;

    const SCHEMA: [&str; 2] = [
        include_str!("../../migrations/sqlite/0001_payments.sql"),
        include_str!("../../migrations/sqlite/0007_receipts.sql"),
    ];

    #[tokio::test]
    async fn a_contradicting_intent_is_neither_written_nor_read() {
        let mut db = SqliteConnection::connect(":memory:").await.unwrap();
        for sql in SCHEMA {
            sqlx::raw_sql(sql).execute(&mut db).await.unwrap();
        }
        let whole = Intent {
            payment_id: "p".into(),
            user_id: "u".into(),
            amount: Rub::from_kopecks(1_000),
            method: PaymentMethod::SbpQr,
            status: PaymentStatus::Pending,
            payment_url: "url".into(),
            qr_payload: String::new(),
            idempotency_key: "k".into(),
            correlation_id: "c".into(),
            late: false,
            created_at_us: 1,
            expires_at_us: 2,
            updated_at_us: 1,
        };
        let late = Intent {
            late: true,
            ..whole.clone()
        };
        let free = Intent {
            amount: Rub::ZERO,
            ..whole.clone()
        };
        for intent in [&late, &free] {
            let refused = insert_in_tx(&mut db, intent, 9).await;
            assert!(matches!(refused, Err(sqlx::Error::Encode(_))), "{intent:?}");
        }
        assert_eq!(get(&mut db, "p").await.unwrap(), None);
        assert!(insert_in_tx(&mut db, &whole, 9).await.unwrap());
        let refused = set_status_in_tx(&mut db, "p", PaymentStatus::Failed, true, 3).await;
        assert!(matches!(refused, Err(sqlx::Error::Encode(_))));
        assert_eq!(get(&mut db, "p").await.unwrap(), Some(whole));

        let damage = "UPDATE intents SET late = TRUE WHERE payment_id = 'p'";
        sqlx::raw_sql(damage).execute(&mut db).await.unwrap();
        let damaged = get(&mut db, "p").await;
        assert!(matches!(damaged, Err(sqlx::Error::Decode(_))));
        let paid = set_status_in_tx(&mut db, "p", PaymentStatus::Success, true, 4).await;
        paid.unwrap();
        assert!(get(&mut db, "p").await.unwrap().unwrap().late);
    }
}
