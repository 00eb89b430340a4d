//! Reconciliation reports.

use rail::Rub;
use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};
use types::BusinessDay;

use crate::reconcile::{Assessment, Explained};

/// A stored report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub report_id: String,
    pub day: BusinessDay,
    pub assessment: Assessment,
    pub created_at_us: i64,
}

fn read(row: &SqliteRow) -> sqlx::Result<Report> {
    let rub = |column: &str| row.try_get(column).map(Rub::from_kopecks);
    Ok(Report {
        report_id: row.try_get("report_id")?,
        day: BusinessDay::from_number(row.try_get("business_day")?),
        assessment: Assessment {
            bank_balance: rub("bank_balance_minor")?,
            token_supply: rub("token_supply_minor")?,
            explained: Explained {
                in_flight_deposits: rub("in_flight_deposits_minor")?,
                in_flight_payouts: rub("in_flight_payouts_minor")?,
                suspense: rub("suspense_minor")?,
            },
            unexplained: rub("unexplained_minor")?,
        },
        created_at_us: row.try_get("created_at_us")?,
    })
}

pub async fn insert_in_tx(
    tx: &mut SqliteConnection,
    report: &Report,
    idempotency_key: Option<&str>,
) -> sqlx::Result<()> {
    let assessment = &report.assessment;
    sqlx::query(
        "INSERT INTO reports (report_id, business_day, bank_balance_minor, token_supply_minor, \
         in_flight_deposits_minor, in_flight_payouts_minor, suspense_minor, unexplained_minor, \
         created_at_us, idempotency_key) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(&report.report_id)
    .bind(report.day.number())
    .bind(assessment.bank_balance.kopecks())
    .bind(assessment.token_supply.kopecks())
    .bind(assessment.explained.in_flight_deposits.kopecks())
    .bind(assessment.explained.in_flight_payouts.kopecks())
    .bind(assessment.explained.suspense.kopecks())
    .bind(assessment.unexplained.kopecks())
    .bind(report.created_at_us)
    .bind(idempotency_key)
    .execute(tx)
    .await?;
    Ok(())
}

pub async fn latest(db: impl SqliteExecutor<'_>) -> sqlx::Result<Option<Report>> {
    sqlx::query("SELECT * FROM reports ORDER BY created_at_us DESC, report_id DESC LIMIT 1")
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// Time in microseconds of the first report with an unexplained difference since the last one
/// without. `None`: the latest report has none, or there is no report.
pub async fn unexplained_since_us(db: impl SqliteExecutor<'_>) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(
        "SELECT created_at_us FROM reports INDEXED BY reports_by_time WHERE created_at_us > \
         COALESCE((SELECT created_at_us FROM reports INDEXED BY reports_explained \
         WHERE unexplained_minor = 0 ORDER BY created_at_us DESC LIMIT 1), -1) \
         ORDER BY created_at_us LIMIT 1",
    )
    .fetch_optional(db)
    .await
}

pub async fn by_key(db: impl SqliteExecutor<'_>, key: &str) -> sqlx::Result<Option<Report>> {
    sqlx::query("SELECT * FROM reports WHERE idempotency_key = $1")
        .bind(key)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// Whether the day was reconciled at or after its cut-off.
pub async fn is_closed(db: impl SqliteExecutor<'_>, day: BusinessDay) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM reports WHERE business_day = $1 AND created_at_us >= $2)",
    )
    .bind(day.number())
    .bind(day.end_us())
    .fetch_one(db)
    .await
}
