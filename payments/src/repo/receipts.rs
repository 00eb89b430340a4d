//! Accepted webhooks, and received money without a matching intent.

use sqlx::{SqliteConnection, SqliteExecutor};

use rail::{Rub, RubError};

/// False if the bank's event was accepted before (T25).
pub async fn note_webhook_in_tx(
    tx: &mut SqliteConnection,
    event_id: &str,
    subject_id: &str,
    status: &str,
    body: &[u8],
    now_us: i64,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "INSERT INTO webhooks (event_id, subject_id, status, body, received_at_us) \
         VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
    )
    .bind(event_id)
    .bind(subject_id)
    .bind(status)
    .bind(body)
    .bind(now_us)
    .execute(tx)
    .await?;
    Ok(done.rows_affected() == 1)
}

/// Stores money reported for a payment that does not match. The latest report counts.
pub async fn note_unmatched_in_tx(
    tx: &mut SqliteConnection,
    payment_id: &str,
    amount: Rub,
    reason: &str,
    now_us: i64,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO unmatched_receipts (payment_id, amount_minor, reason, received_at_us) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (payment_id) DO UPDATE SET amount_minor = excluded.amount_minor, reason = excluded.reason, \
         received_at_us = excluded.received_at_us, resolved = FALSE",
    )
    .bind(payment_id)
    .bind(amount.kopecks())
    .bind(reason)
    .bind(now_us)
    .execute(tx)
    .await?;
    Ok(())
}

/// Marks the payment as matched.
pub async fn resolve_unmatched_in_tx(
    tx: &mut SqliteConnection,
    payment_id: &str,
) -> sqlx::Result<()> {
    sqlx::query("UPDATE unmatched_receipts SET resolved = TRUE WHERE payment_id = $1")
        .bind(payment_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// Sum of unmatched receipts.
pub async fn unmatched_total(db: impl SqliteExecutor<'_>) -> sqlx::Result<Rub> {
    let amounts: Vec<i64> =
        sqlx::query_scalar("SELECT amount_minor FROM unmatched_receipts WHERE NOT resolved")
            .fetch_all(db)
            .await?;
    amounts
        .into_iter()
        .try_fold(Rub::ZERO, |sum, amount| sum.plus(Rub::from_kopecks(amount)))
        .map_err(|error: RubError| sqlx::Error::Decode(Box::new(error)))
}
