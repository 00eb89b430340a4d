//! Payouts, and the users whose payouts are blocked.

use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};

use super::{Filter, PageBound, page_query, parse_name};
use rail::Rub;

use crate::payout::Payout;

fn read(row: &SqliteRow) -> sqlx::Result<Payout> {
    let payout = Payout {
        payout_id: row.try_get("payout_id")?,
        user_id: row.try_get("user_id")?,
        amount: Rub::from_kopecks(row.try_get("amount_minor")?),
        bank_account: row.try_get("bank_account")?,
        refunds: row.try_get("refunds")?,
        refunds_receipt: row.try_get("refunds_receipt")?,
        status: parse_name(row, "status")?,
        released_at_us: row.try_get("released_at_us")?,
        ordered_at_us: row.try_get("ordered_at_us")?,
        stopped: row.try_get("stopped")?,
        bank_transfer_id: row.try_get("bank_transfer_id")?,
        failure_code: row.try_get("failure_code")?,
        failure_message: row.try_get("failure_message")?,
        attempts: row.try_get("attempts")?,
        next_attempt_at_us: row.try_get("next_attempt_at_us")?,
        idempotency_key: row.try_get("idempotency_key")?,
        correlation_id: row.try_get("correlation_id")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    };
    match payout.contradiction() {
        None => Ok(payout),
        Some(what) => Err(sqlx::Error::Decode(
            format!("{what}: {}", payout.payout_id).into(),
        )),
    }
}

/// Inserts a payout, or updates the columns that change during its life.
///
/// # Panics
/// The payout violates an invariant: the service could pay money that it must not.
pub async fn save_in_tx(tx: &mut SqliteConnection, payout: &Payout) -> sqlx::Result<()> {
    let contradiction = payout.contradiction();
    assert!(contradiction.is_none(), "{contradiction:?}: {payout:?}");
    sqlx::query(
        "INSERT INTO payouts (payout_id, user_id, amount_minor, bank_account, status, \
         released_at_us, ordered_at_us, stopped, bank_transfer_id, failure_code, failure_message, \
         attempts, next_attempt_at_us, correlation_id, created_at_us, updated_at_us, refunds, \
         idempotency_key, refunds_receipt) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, \
         $13, $14, $15, $16, $17, $18, $19) \
         ON CONFLICT (payout_id) DO UPDATE SET status = excluded.status, \
         released_at_us = excluded.released_at_us, ordered_at_us = excluded.ordered_at_us, \
         stopped = excluded.stopped, bank_transfer_id = excluded.bank_transfer_id, \
         failure_code = excluded.failure_code, failure_message = excluded.failure_message, \
         attempts = excluded.attempts, \
         next_attempt_at_us = excluded.next_attempt_at_us, updated_at_us = excluded.updated_at_us",
    )
    .bind(&payout.payout_id)
    .bind(&payout.user_id)
    .bind(payout.amount.kopecks())
    .bind(&payout.bank_account)
    .bind(payout.status.as_str())
    .bind(payout.released_at_us)
    .bind(payout.ordered_at_us)
    .bind(&payout.stopped)
    .bind(&payout.bank_transfer_id)
    .bind(&payout.failure_code)
    .bind(&payout.failure_message)
    .bind(payout.attempts)
    .bind(payout.next_attempt_at_us)
    .bind(&payout.correlation_id)
    .bind(payout.created_at_us)
    .bind(payout.updated_at_us)
    .bind(&payout.refunds)
    .bind(&payout.idempotency_key)
    .bind(&payout.refunds_receipt)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn get(db: impl SqliteExecutor<'_>, payout_id: &str) -> sqlx::Result<Option<Payout>> {
    sqlx::query("SELECT * FROM payouts WHERE payout_id = $1")
        .bind(payout_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// The payout recorded with this key, or else with this payout id (T12).
pub async fn recorded(
    db: impl SqliteExecutor<'_>,
    user_id: &str,
    idempotency_key: &str,
    payout_id: &str,
) -> sqlx::Result<Option<Payout>> {
    sqlx::query(
        "SELECT * FROM payouts WHERE (user_id = $1 AND idempotency_key = $2) OR payout_id = $3 \
         ORDER BY (user_id = $1 AND idempotency_key = $2) DESC LIMIT 1",
    )
    .bind(user_id)
    .bind(idempotency_key)
    .bind(payout_id)
    .fetch_optional(db)
    .await?
    .as_ref()
    .map(read)
    .transpose()
}

pub async fn list(
    db: impl SqliteExecutor<'_>,
    filter: Filter<'_>,
    bound: PageBound<'_>,
) -> sqlx::Result<Vec<Payout>> {
    page_query("payouts", "payout_id", filter, bound)
        .build()
        .fetch_all(db)
        .await?
        .iter()
        .map(read)
        .collect()
}

/// Released payouts whose next action is due.
pub async fn due(
    db: impl SqliteExecutor<'_>,
    now_us: i64,
    limit: i64,
) -> sqlx::Result<Vec<Payout>> {
    sqlx::query(
        "SELECT * FROM payouts INDEXED BY payouts_open \
         WHERE status = 'PENDING' AND released_at_us IS NOT NULL AND next_attempt_at_us <= $1 \
         AND (stopped IS NULL OR ordered_at_us IS NOT NULL) ORDER BY next_attempt_at_us LIMIT $2",
    )
    .bind(now_us)
    .bind(limit)
    .fetch_all(db)
    .await?
    .iter()
    .map(read)
    .collect()
}

/// Time of the first due action after `now_us` in microseconds, if a payout waits for one.
pub async fn next_due_us(db: impl SqliteExecutor<'_>, now_us: i64) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(
        "SELECT MIN(next_attempt_at_us) FROM payouts INDEXED BY payouts_open \
         WHERE status = 'PENDING' AND released_at_us IS NOT NULL AND next_attempt_at_us > $1 \
         AND (stopped IS NULL OR ordered_at_us IS NOT NULL)",
    )
    .bind(now_us)
    .fetch_one(db)
    .await
}

/// Payouts that reconciliation still has to check.
pub async fn unsettled(db: impl SqliteExecutor<'_>) -> sqlx::Result<Vec<Payout>> {
    sqlx::query("SELECT * FROM payouts WHERE NOT settled")
        .fetch_all(db)
        .await?
        .iter()
        .map(read)
        .collect()
}

/// Whether another payout refunds the deposit, or has refunded it.
pub async fn is_refunded_by_another(
    db: impl SqliteExecutor<'_>,
    payment_id: &str,
    payout_id: &str,
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM payouts WHERE refunds = $1 AND payout_id <> $2 \
         AND released_at_us IS NOT NULL AND status <> 'FAILED')",
    )
    .bind(payment_id)
    .bind(payout_id)
    .fetch_one(db)
    .await
}

pub async fn mark_settled_in_tx(tx: &mut SqliteConnection, payout_id: &str) -> sqlx::Result<()> {
    sqlx::query("UPDATE payouts SET settled = TRUE WHERE payout_id = $1")
        .bind(payout_id)
        .execute(tx)
        .await?;
    Ok(())
}

pub async fn blocked_reason(
    db: impl SqliteExecutor<'_>,
    user_id: &str,
) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("SELECT reason FROM blocked_users WHERE user_id = $1")
        .bind(user_id)
        .fetch_optional(db)
        .await
}

/// Blocks a user: stops the payouts that are not ordered yet, and all new ones (T48).
pub async fn block_user_in_tx(
    tx: &mut SqliteConnection,
    user_id: &str,
    reason: &str,
    now_us: i64,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO blocked_users (user_id, reason, at_us) VALUES ($1, $2, $3) ON CONFLICT (user_id) DO NOTHING",
    )
    .bind(user_id)
    .bind(reason)
    .bind(now_us)
    .execute(&mut *tx)
    .await?;
    sqlx::query(
        "UPDATE payouts INDEXED BY payouts_by_user SET stopped = $2, updated_at_us = $3 \
         WHERE user_id = $1 AND status = 'PENDING' AND ordered_at_us IS NULL",
    )
    .bind(user_id)
    .bind(reason)
    .bind(now_us)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn unblock_user_in_tx(
    tx: &mut SqliteConnection,
    user_id: &str,
    now_us: i64,
) -> sqlx::Result<()> {
    sqlx::query("DELETE FROM blocked_users WHERE user_id = $1")
        .bind(user_id)
        .execute(&mut *tx)
        .await?;
    resume_user_in_tx(tx, user_id, now_us).await
}

/// Resumes the user's stopped payouts, unless the user is blocked.
pub async fn resume_user_in_tx(
    tx: &mut SqliteConnection,
    user_id: &str,
    now_us: i64,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE payouts INDEXED BY payouts_by_user \
         SET stopped = NULL, next_attempt_at_us = $2, updated_at_us = $2 \
         WHERE user_id = $1 AND status = 'PENDING' \
         AND stopped IS NOT NULL AND NOT EXISTS (SELECT 1 FROM blocked_users WHERE user_id = $1)",
    )
    .bind(user_id)
    .bind(now_us)
    .execute(tx)
    .await?;
    Ok(())
}
