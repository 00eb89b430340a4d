//! The bank's store: all of its SQL.

use rail::Rub;
use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};
use std::str::FromStr;

use super::operations::{Code, Fault, Transfer};

pub static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/bank": "0001_bank", "0002_calls");

fn parse_name<T: FromStr>(row: &SqliteRow, column: &str) -> sqlx::Result<T> {
    let text: String = row.try_get(column)?;
    text.parse()
        .map_err(|_| sqlx::Error::Decode(format!("{column} `{text}` is not a known name").into()))
}

pub async fn open_account_in_tx(
    tx: &mut SqliteConnection,
    account_number: &str,
    balance: Rub,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO account (account_number, balance_minor) VALUES ($1, $2) ON CONFLICT DO NOTHING",
    )
    .bind(account_number)
    .bind(balance.kopecks())
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn balance(db: impl SqliteExecutor<'_>, account_number: &str) -> sqlx::Result<Rub> {
    sqlx::query_scalar("SELECT balance_minor FROM account WHERE account_number = $1")
        .bind(account_number)
        .fetch_one(db)
        .await
        .map(Rub::from_kopecks)
}

/// Credits the account; a negative amount debits it. The schema refuses an overdraft.
pub async fn move_money_in_tx(
    tx: &mut SqliteConnection,
    account_number: &str,
    amount: Rub,
) -> sqlx::Result<()> {
    sqlx::query("UPDATE account SET balance_minor = balance_minor + $2 WHERE account_number = $1")
        .bind(account_number)
        .bind(amount.kopecks())
        .execute(tx)
        .await?;
    Ok(())
}

fn code(row: &SqliteRow) -> sqlx::Result<Code> {
    let paid: Option<i64> = row.try_get("paid_minor")?;
    Ok(Code {
        payment_id: row.try_get("payment_id")?,
        payload: row.try_get("payload")?,
        amount: Rub::from_kopecks(row.try_get("amount_minor")?),
        purpose: row.try_get("purpose")?,
        status: parse_name(row, "status")?,
        paid: paid.map(Rub::from_kopecks),
        transaction_id: row.try_get("transaction_id")?,
        created_at_us: row.try_get("created_at_us")?,
        expires_at_us: row.try_get("expires_at_us")?,
    })
}

pub async fn code_of(db: impl SqliteExecutor<'_>, payment_id: &str) -> sqlx::Result<Option<Code>> {
    sqlx::query("SELECT * FROM codes WHERE payment_id = $1")
        .bind(payment_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(code)
        .transpose()
}

pub async fn code_by_payload(
    db: impl SqliteExecutor<'_>,
    payload: &str,
) -> sqlx::Result<Option<Code>> {
    sqlx::query("SELECT * FROM codes WHERE payload = $1")
        .bind(payload)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(code)
        .transpose()
}

/// Inserts a code, or updates the columns that change during its life.
pub async fn save_code_in_tx(tx: &mut SqliteConnection, code: &Code) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO codes (payment_id, payload, amount_minor, purpose, status, paid_minor, \
         transaction_id, created_at_us, expires_at_us) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) \
         ON CONFLICT (payment_id) DO UPDATE SET status = excluded.status, \
         paid_minor = excluded.paid_minor, transaction_id = excluded.transaction_id",
    )
    .bind(&code.payment_id)
    .bind(&code.payload)
    .bind(code.amount.kopecks())
    .bind(&code.purpose)
    .bind(code.status.as_str())
    .bind(code.paid.map(Rub::kopecks))
    .bind(&code.transaction_id)
    .bind(code.created_at_us)
    .bind(code.expires_at_us)
    .execute(tx)
    .await?;
    Ok(())
}

fn transfer(row: &SqliteRow) -> sqlx::Result<Transfer> {
    Ok(Transfer {
        transfer_id: row.try_get("transfer_id")?,
        request_id: row.try_get("request_id")?,
        recipient_account: row.try_get("recipient_account")?,
        amount: Rub::from_kopecks(row.try_get("amount_minor")?),
        purpose: row.try_get("purpose")?,
        status: parse_name(row, "status")?,
        error_code: row.try_get("error_code")?,
        error_message: row.try_get("error_message")?,
        created_at_us: row.try_get("created_at_us")?,
    })
}

pub async fn transfer_of_request(
    db: impl SqliteExecutor<'_>,
    request_id: &str,
) -> sqlx::Result<Option<Transfer>> {
    sqlx::query("SELECT * FROM transfers WHERE request_id = $1")
        .bind(request_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(transfer)
        .transpose()
}

pub async fn transfer_of(
    db: impl SqliteExecutor<'_>,
    transfer_id: &str,
) -> sqlx::Result<Option<Transfer>> {
    sqlx::query("SELECT * FROM transfers WHERE transfer_id = $1")
        .bind(transfer_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(transfer)
        .transpose()
}

pub async fn save_transfer_in_tx(
    tx: &mut SqliteConnection,
    transfer: &Transfer,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO transfers (transfer_id, request_id, recipient_account, amount_minor, purpose, \
         status, error_code, error_message, created_at_us) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) \
         ON CONFLICT (transfer_id) DO UPDATE SET status = excluded.status, \
         error_code = excluded.error_code, error_message = excluded.error_message",
    )
    .bind(&transfer.transfer_id)
    .bind(&transfer.request_id)
    .bind(&transfer.recipient_account)
    .bind(transfer.amount.kopecks())
    .bind(&transfer.purpose)
    .bind(transfer.status.as_str())
    .bind(&transfer.error_code)
    .bind(&transfer.error_message)
    .bind(transfer.created_at_us)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn open_transfers(db: impl SqliteExecutor<'_>) -> sqlx::Result<Vec<Transfer>> {
    sqlx::query("SELECT * FROM transfers WHERE status = 'PENDING' ORDER BY created_at_us")
        .fetch_all(db)
        .await?
        .iter()
        .map(transfer)
        .collect()
}

/// Sum of accepted transfers that are not executed.
pub async fn reserved(db: impl SqliteExecutor<'_>) -> sqlx::Result<Rub> {
    sqlx::query_scalar(
        "SELECT CAST(COALESCE(SUM(amount_minor), 0) AS BIGINT) FROM transfers WHERE status = 'PENDING'",
    )
    .fetch_one(db)
    .await
    .map(Rub::from_kopecks)
}

/// Transfers strictly before a position in (created, id) order.
pub async fn list_transfers(
    db: impl SqliteExecutor<'_>,
    created_at_us: i64,
    transfer_id: &str,
    limit: i64,
) -> sqlx::Result<Vec<Transfer>> {
    sqlx::query(
        "SELECT * FROM transfers WHERE (created_at_us, transfer_id) < ($1, $2) \
         ORDER BY created_at_us DESC, transfer_id DESC LIMIT $3",
    )
    .bind(created_at_us)
    .bind(transfer_id)
    .bind(limit)
    .fetch_all(db)
    .await?
    .iter()
    .map(transfer)
    .collect()
}

/// A queued webhook.
pub struct Queued {
    pub webhook_id: String,
    pub body: Vec<u8>,
    pub attempts: u32,
}

pub async fn queue_webhook_in_tx(
    tx: &mut SqliteConnection,
    webhook_id: &str,
    body: &[u8],
    now_us: i64,
) -> sqlx::Result<()> {
    sqlx::query("INSERT INTO webhooks (webhook_id, body, next_attempt_at_us) VALUES ($1, $2, $3)")
        .bind(webhook_id)
        .bind(body)
        .bind(now_us)
        .execute(tx)
        .await?;
    Ok(())
}

/// Uses the partial index of queued webhooks, because delivered ones stay in the table.
const DUE_WEBHOOKS: &str = "SELECT * FROM webhooks WHERE state = 'QUEUED' AND next_attempt_at_us <= $1 \
    ORDER BY next_attempt_at_us, position LIMIT $2";

pub async fn due_webhooks(
    db: impl SqliteExecutor<'_>,
    now_us: i64,
    limit: i64,
) -> sqlx::Result<Vec<Queued>> {
    sqlx::query(DUE_WEBHOOKS)
        .bind(now_us)
        .bind(limit)
        .fetch_all(db)
        .await?
        .iter()
        .map(|row| {
            Ok(Queued {
                webhook_id: row.try_get("webhook_id")?,
                body: row.try_get("body")?,
                attempts: row.try_get("attempts")?,
            })
        })
        .collect()
}

pub async fn end_attempt_in_tx(
    tx: &mut SqliteConnection,
    webhook_id: &str,
    state: &str,
    next_attempt_at_us: i64,
) -> sqlx::Result<()> {
    sqlx::query(
        "UPDATE webhooks SET state = $2, attempts = attempts + 1, next_attempt_at_us = $3 WHERE webhook_id = $1",
    )
    .bind(webhook_id)
    .bind(state)
    .bind(next_attempt_at_us)
    .execute(tx)
    .await?;
    Ok(())
}

/// Sets a fault. `None` clears the faults of the account, or all faults if the account is empty.
pub async fn set_fault_in_tx(
    tx: &mut SqliteConnection,
    account: &str,
    fault: Option<Fault>,
) -> sqlx::Result<()> {
    match fault {
        Some(fault) => {
            sqlx::query(
                "INSERT INTO faults (account, fault) VALUES ($1, $2) ON CONFLICT DO NOTHING",
            )
            .bind(account)
            .bind(fault.as_str())
            .execute(tx)
            .await?;
        }
        None => {
            sqlx::query("DELETE FROM faults WHERE $1 = '' OR account = $1")
                .bind(account)
                .execute(tx)
                .await?;
        }
    }
    Ok(())
}

/// Whether the fault is set for all accounts or for this one.
pub async fn has_fault(
    db: impl SqliteExecutor<'_>,
    fault: Fault,
    account: &str,
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM faults WHERE fault = $1 AND account IN ('', $2))",
    )
    .bind(fault.as_str())
    .bind(account)
    .fetch_one(db)
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn due_webhooks_are_found_by_index_not_by_scanning_delivered_ones() {
        let folder = tempfile::tempdir().expect("folder");
        let db = events::Sqlite::open(folder.path().join("bank.db"), &MIGRATOR)
            .await
            .expect("opens");
        let mut tx = db.write().await.expect("begins");
        for number in 0..100 {
            let webhook_id = number.to_string();
            queue_webhook_in_tx(&mut tx, &webhook_id, b"{}", number)
                .await
                .expect("queued");
            let state = if number < 98 { "DELIVERED" } else { "QUEUED" };
            end_attempt_in_tx(&mut tx, &webhook_id, state, number)
                .await
                .expect("ended");
        }
        tx.commit().await.expect("commits");
        let due = due_webhooks(db.read(), 100, 10).await.expect("read");
        let ids: Vec<_> = due.iter().map(|due| due.webhook_id.as_str()).collect();
        assert_eq!(ids, ["98", "99"]);
        let explain = format!("EXPLAIN QUERY PLAN {DUE_WEBHOOKS}");
        let plan = sqlx::query(sqlx::AssertSqlSafe(explain))
            .fetch_all(db.read())
            .await
            .expect("explained");
        let plan: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
        assert_eq!(
            plan,
            ["SEARCH webhooks USING INDEX webhooks_queued (next_attempt_at_us<?)"]
        );
    }
}
