//! Accepted webhooks, and the receipts of bank transactions.

use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};

use super::{Filter, PageBound, check_read, check_write, page_query, parse_name};
use rail::{Rub, RubError};

use crate::receipt::{Receipt, ReceiptStatus};

/// Records a webhook. Returns false if the bank's event was accepted before (T25).
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

fn read(row: &SqliteRow) -> sqlx::Result<Receipt> {
    let reason: Option<String> = row.try_get("reason")?;
    let unmatched = reason.map(|reason| reason.parse()).transpose();
    let status: ReceiptStatus = parse_name(row, "status")?;
    let receipt = Receipt {
        receipt_id: row.try_get("receipt_id")?,
        bank_id: row.try_get("bank_id")?,
        transaction_id: row.try_get("transaction_id")?,
        payment_id: row.try_get("payment_id")?,
        amount: Rub::from_kopecks(row.try_get("amount_minor")?),
        unmatched: unmatched.map_err(|error: types::TextError| sqlx::Error::ColumnDecode {
            index: "reason".to_owned(),
            source: Box::new(error),
        })?,
        assigned: row.try_get("assigned_payment_id")?,
        refund: row.try_get("refund_payout_id")?,
        is_refunded: status == ReceiptStatus::Refunded,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
    };
    let is_other = receipt.status() != status;
    let found = receipt
        .contradiction()
        .or(is_other.then_some("receipt status does not match its reason"));
    check_read(found, &receipt.receipt_id)?;
    Ok(receipt)
}

/// Finds the stored receipt that a report of a payment is about.
///
/// With a transaction id: the receipt of the transaction, or else one of the payment without an id.
/// Without: one of the payment. A receipt of the payment counts only if it has the same amount, is
/// unmatched or was resolved by persons; a matched one has priority. So a correction without an id
/// never counts money again that persons have assigned or refunded.
pub async fn of_report_in_tx(
    tx: &mut SqliteConnection,
    bank_id: &str,
    transaction_id: Option<&str>,
    payment_id: &str,
    amount: Rub,
) -> sqlx::Result<Option<Receipt>> {
    let by_payment = match transaction_id {
        Some(transaction_id) => {
            let sql = "SELECT * FROM receipts WHERE bank_id = $1 AND transaction_id = $2";
            let by_id = sqlx::query(sql)
                .bind(bank_id)
                .bind(transaction_id)
                .fetch_optional(&mut *tx)
                .await?;
            if let Some(row) = by_id {
                return read(&row).map(Some);
            }
            "SELECT * FROM receipts INDEXED BY receipts_by_payment WHERE payment_id = $1 \
             AND bank_id = $2 AND (status <> 'MATCHED' OR amount_minor = $3 \
             OR assigned_payment_id IS NOT NULL) AND transaction_id IS NULL ORDER BY status, created_at_us DESC LIMIT 1"
        }
        None => {
            "SELECT * FROM receipts INDEXED BY receipts_by_payment WHERE payment_id = $1 \
             AND bank_id = $2 AND (status <> 'MATCHED' OR amount_minor = $3 \
             OR assigned_payment_id IS NOT NULL) ORDER BY status, created_at_us DESC LIMIT 1"
        }
    };
    let found = sqlx::query(by_payment)
        .bind(payment_id)
        .bind(bank_id)
        .bind(amount.kopecks())
        .fetch_optional(tx)
        .await?;
    found.as_ref().map(read).transpose()
}

/// Inserts a receipt, or updates the columns that a later report changes.
///
/// # Errors
/// The receipt violates an invariant; nothing is written.
pub async fn save_in_tx(tx: &mut SqliteConnection, receipt: &Receipt) -> sqlx::Result<()> {
    check_write(receipt.contradiction(), &receipt.receipt_id)?;
    sqlx::query(
        "INSERT INTO receipts (receipt_id, bank_id, transaction_id, payment_id, amount_minor, status, \
         reason, created_at_us, updated_at_us, assigned_payment_id, refund_payout_id) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) \
         ON CONFLICT (receipt_id) DO UPDATE SET transaction_id = excluded.transaction_id, \
         payment_id = excluded.payment_id, amount_minor = excluded.amount_minor, \
         status = excluded.status, reason = excluded.reason, \
         assigned_payment_id = excluded.assigned_payment_id, \
         refund_payout_id = excluded.refund_payout_id, \
         updated_at_us = excluded.updated_at_us",
    )
    .bind(&receipt.receipt_id)
    .bind(&receipt.bank_id)
    .bind(&receipt.transaction_id)
    .bind(&receipt.payment_id)
    .bind(receipt.amount.kopecks())
    .bind(receipt.status().as_str())
    .bind(receipt.unmatched.map(|reason| reason.as_str()))
    .bind(receipt.created_at_us)
    .bind(receipt.updated_at_us)
    .bind(&receipt.assigned)
    .bind(&receipt.refund)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn get(db: impl SqliteExecutor<'_>, receipt_id: &str) -> sqlx::Result<Option<Receipt>> {
    sqlx::query("SELECT * FROM receipts WHERE receipt_id = $1")
        .bind(receipt_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// Ends the refund of a receipt. A failed one leaves the receipt open.
pub async fn end_refund_in_tx(
    tx: &mut SqliteConnection,
    receipt_id: &str,
    payout_id: &str,
    is_executed: bool,
    now_us: i64,
) -> sqlx::Result<()> {
    let sql = match is_executed {
        true => {
            "UPDATE receipts SET status = 'REFUNDED', updated_at_us = $3 \
             WHERE receipt_id = $1 AND refund_payout_id = $2"
        }
        false => {
            "UPDATE receipts SET refund_payout_id = NULL, updated_at_us = $3 \
             WHERE receipt_id = $1 AND refund_payout_id = $2"
        }
    };
    let query = sqlx::query(sql).bind(receipt_id).bind(payout_id);
    query.bind(now_us).execute(tx).await?;
    Ok(())
}

pub async fn list(
    db: impl SqliteExecutor<'_>,
    status: &str,
    bound: PageBound<'_>,
) -> sqlx::Result<Vec<Receipt>> {
    let filter = Filter {
        user_id: "",
        status,
    };
    page_query("receipts", "receipt_id", filter, bound)
        .build()
        .fetch_all(db)
        .await?
        .iter()
        .map(read)
        .collect()
}

/// Sum of unmatched receipts. The cost is proportional to their number, not to all receipts.
pub async fn unmatched_total(db: impl SqliteExecutor<'_>) -> sqlx::Result<Rub> {
    let amounts: Vec<i64> = sqlx::query_scalar(
        "SELECT amount_minor FROM receipts INDEXED BY receipts_unmatched WHERE status = 'UNMATCHED'",
    )
    .fetch_all(db)
    .await?;
    amounts
        .into_iter()
        .try_fold(Rub::ZERO, |sum, amount| sum.plus(Rub::from_kopecks(amount)))
        .map_err(|error: RubError| sqlx::Error::Decode(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use sqlx::Connection;

    use super::*;
    use crate::receipt::UnmatchedReason;

    const EARLIER: [&str; 6] = [
        include_str!("../../migrations/sqlite/0001_payments.sql"),
        include_str!("../../migrations/sqlite/0002_report_keys.sql"),
        include_str!("../../migrations/sqlite/0003_payout_refunds.sql"),
        include_str!("../../migrations/sqlite/0004_payout_keys.sql"),
        include_str!("../../migrations/sqlite/0005_refunds.sql"),
        include_str!("../../migrations/sqlite/0006_lists.sql"),
    ];
    const RECEIPTS: &str = include_str!("../../migrations/sqlite/0007_receipts.sql");
    const RESOLVED: &str = include_str!("../../migrations/sqlite/0009_resolved_receipts.sql");

    // rows: R120
    #[tokio::test]
    async fn d51_earlier_payments_become_receipts() {
        let mut db = SqliteConnection::connect(":memory:").await.unwrap();
        for sql in EARLIER {
            sqlx::raw_sql(sql).execute(&mut db).await.unwrap();
        }
        let intent = |id: &str, status: &str, amount: i64| {
            format!(
                "INSERT INTO intents (payment_id, user_id, amount_minor, method, status, payment_url, \
                 qr_payload, idempotency_key, correlation_id, next_poll_at_us, created_at_us, \
                 expires_at_us, updated_at_us) VALUES ('{id}', 'u', {amount}, 'SBP_QR', '{status}', \
                 'url', '', '{id}', 'c', 9, 1, 2, 3);"
            )
        };
        let rows = [
            intent("paid", "SUCCESS", 1_000),
            intent("back", "REFUNDED", 2_000),
            intent("open", "PENDING", 3_000),
            intent("gone", "EXPIRED", 4_000),
        ];
        for sql in rows {
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
                .execute(&mut db)
                .await
                .unwrap();
        }
        let unmatched = "INSERT INTO unmatched_receipts VALUES \
             ('open', 2900, 'amount differs', 5, FALSE), ('paid', 900, 'amount differs', 5, TRUE), \
             ('unknown', 7, 'unknown payment', 6, FALSE)";
        sqlx::raw_sql(unmatched).execute(&mut db).await.unwrap();
        let webhook = r#"INSERT INTO webhooks VALUES ('w', 'back', 'SUCCESS',
             '{"type":"payment","transactionId":"t-back"}', 4)"#;
        sqlx::raw_sql(webhook).execute(&mut db).await.unwrap();
        sqlx::raw_sql(RECEIPTS).execute(&mut db).await.unwrap();
        sqlx::raw_sql(RESOLVED).execute(&mut db).await.unwrap();

        assert_eq!(
            unmatched_total(&mut db).await.unwrap(),
            Rub::from_kopecks(2_907)
        );
        let polled: Vec<String> = sqlx::query_scalar("SELECT payment_id FROM intents WHERE polled")
            .fetch_all(&mut db)
            .await
            .unwrap();
        assert_eq!(polled, ["open"]);
        let mut reported = async |transaction: Option<&str>, payment: &str, kopecks: i64| {
            let amount = Rub::from_kopecks(kopecks);
            let found = of_report_in_tx(&mut db, "bank", transaction, payment, amount).await;
            found
                .unwrap()
                .map(|receipt| (receipt.amount.kopecks(), receipt.unmatched))
        };
        // The first transaction named for a paid payment is the one that paid it.
        assert_eq!(
            reported(Some("t"), "paid", 1_000).await,
            Some((1_000, None))
        );
        assert_eq!(reported(Some("t"), "paid", 999).await, None);
        assert_eq!(reported(None, "back", 2_000).await, Some((2_000, None)));
        // The payment's transaction is known: another transaction is another receipt.
        assert_eq!(
            reported(Some("t-back"), "back", 2_000).await,
            Some((2_000, None))
        );
        assert_eq!(reported(Some("t"), "back", 2_000).await, None);
        let differs = Some((2_900, Some(UnmatchedReason::AmountDiffers)));
        assert_eq!(reported(Some("t"), "open", 3_000).await, differs);
        assert_eq!(reported(None, "gone", 4_000).await, None);
    }

    // rows: R120
    #[tokio::test]
    async fn r120_a_contradicting_receipt_is_neither_written_nor_read() {
        let mut db = SqliteConnection::connect(":memory:").await.unwrap();
        for sql in EARLIER.into_iter().chain([RECEIPTS, RESOLVED]) {
            sqlx::raw_sql(sql).execute(&mut db).await.unwrap();
        }
        let open = Receipt {
            receipt_id: "r".into(),
            bank_id: "bank".into(),
            transaction_id: Some("t".into()),
            payment_id: "p".into(),
            amount: Rub::from_kopecks(1_000),
            unmatched: Some(UnmatchedReason::SecondPayment),
            assigned: None,
            refund: None,
            is_refunded: false,
            created_at_us: 1,
            updated_at_us: 1,
        };
        let assigned = Receipt {
            assigned: Some("p2".into()),
            ..open.clone()
        };
        let refused = save_in_tx(&mut db, &assigned).await;
        assert!(matches!(refused, Err(sqlx::Error::Encode(_))));
        assert_eq!(get(&mut db, "r").await.unwrap(), None);
        save_in_tx(&mut db, &open).await.unwrap();
        assert_eq!(get(&mut db, "r").await.unwrap(), Some(open.clone()));

        // A file that was changed past the service.
        let unchecked = "PRAGMA ignore_check_constraints = ON";
        sqlx::raw_sql(unchecked).execute(&mut db).await.unwrap();
        for damage in [
            "UPDATE receipts SET amount_minor = 0",
            "UPDATE receipts SET status = 'REFUNDED'",
            "UPDATE receipts SET status = 'MATCHED'",
            "UPDATE receipts SET assigned_payment_id = 'p2'",
            "UPDATE receipts SET reason = NULL, refund_payout_id = 'po'",
        ] {
            save_in_tx(&mut db, &open).await.unwrap();
            sqlx::raw_sql(damage).execute(&mut db).await.unwrap();
            let damaged = get(&mut db, "r").await;
            assert!(matches!(damaged, Err(sqlx::Error::Decode(_))), "{damage}");
        }
    }
}
