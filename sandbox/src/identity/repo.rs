//! Identity's store: all of its SQL.

use sqlx::{Row, SqliteConnection, SqliteExecutor, sqlite::SqliteRow};
use types::{BusinessDay, Decimal, LimitType};

use super::rules::{Limit, ReservationState, Standing};

pub static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/identity": "0001_identity", "0002_reservations", "0003_audit_records"
);

/// A stored user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub user_id: String,
    /// Number of `KycStatus`; a higher one is a higher level.
    pub kyc_level: i32,
    pub bank_account: String,
    /// Reason of the block, if the user is blocked.
    pub blocked: Option<String>,
    pub qualified_investor: bool,
    pub sanctioned: bool,
    /// EIP-55 mixed case.
    pub onchain_address: String,
    pub full_name_hash: String,
    pub idempotency_key: String,
    /// Whether identity generated the id. Otherwise the caller set it.
    pub generated: bool,
    /// Fingerprint of the content of CreateUser; 0 for users from before it was stored.
    pub created_with: i64,
    pub created_at_us: i64,
}

impl User {
    /// Describes the user in an audit record.
    pub fn audit_text(&self) -> String {
        let state = self.blocked.as_ref().map_or_else(
            || "active".to_owned(),
            |reason| format!("blocked ({reason})"),
        );
        format!(
            "KYC level {}, account {}, {state}, qualified {}, sanctioned {}",
            self.kyc_level, self.bank_account, self.qualified_investor, self.sanctioned
        )
    }

    pub fn standing(&self) -> Standing {
        Standing {
            blocked: self.blocked.is_some(),
            sanctioned: self.sanctioned,
            qualified: self.qualified_investor,
        }
    }
}

fn read(row: &SqliteRow) -> sqlx::Result<User> {
    Ok(User {
        user_id: row.try_get("user_id")?,
        kyc_level: row.try_get("kyc_level")?,
        bank_account: row.try_get("bank_account")?,
        blocked: row.try_get("blocked")?,
        qualified_investor: row.try_get("qualified_investor")?,
        sanctioned: row.try_get("sanctioned")?,
        onchain_address: row.try_get("onchain_address")?,
        full_name_hash: row.try_get("full_name_hash")?,
        idempotency_key: row.try_get("idempotency_key")?,
        generated: row.try_get("generated")?,
        created_with: row.try_get("created_with")?,
        created_at_us: row.try_get("created_at_us")?,
    })
}

fn amount(text: &str) -> sqlx::Result<Decimal> {
    text.parse()
        .map_err(|error: types::DecimalError| sqlx::Error::Decode(Box::new(error)))
}

pub async fn get(db: impl SqliteExecutor<'_>, user_id: &str) -> sqlx::Result<Option<User>> {
    sqlx::query("SELECT * FROM users WHERE user_id = $1")
        .bind(user_id)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

/// The user whose id was generated for this key.
pub async fn generated_by(db: impl SqliteExecutor<'_>, key: &str) -> sqlx::Result<Option<User>> {
    sqlx::query("SELECT * FROM users WHERE idempotency_key = $1 AND generated")
        .bind(key)
        .fetch_optional(db)
        .await?
        .as_ref()
        .map(read)
        .transpose()
}

pub async fn is_address_taken(db: impl SqliteExecutor<'_>, address: &str) -> sqlx::Result<bool> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM users WHERE onchain_address = $1)")
        .bind(address)
        .fetch_one(db)
        .await
}

/// Inserts a user, or updates the columns that change.
pub async fn save_in_tx(tx: &mut SqliteConnection, user: &User) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO users (user_id, kyc_level, bank_account, blocked, qualified_investor, \
         sanctioned, onchain_address, full_name_hash, idempotency_key, generated, created_at_us, \
         created_with) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) \
         ON CONFLICT (user_id) DO UPDATE SET kyc_level = excluded.kyc_level, \
         bank_account = excluded.bank_account, blocked = excluded.blocked, \
         qualified_investor = excluded.qualified_investor, sanctioned = excluded.sanctioned",
    )
    .bind(&user.user_id)
    .bind(user.kyc_level)
    .bind(&user.bank_account)
    .bind(&user.blocked)
    .bind(user.qualified_investor)
    .bind(user.sanctioned)
    .bind(&user.onchain_address)
    .bind(&user.full_name_hash)
    .bind(&user.idempotency_key)
    .bind(user.generated)
    .bind(user.created_at_us)
    .bind(user.created_with)
    .execute(tx)
    .await?;
    Ok(())
}

/// Users strictly before a position in (created, id) order.
pub async fn list(
    db: impl SqliteExecutor<'_>,
    created_at_us: i64,
    user_id: &str,
    limit: i64,
) -> sqlx::Result<Vec<User>> {
    sqlx::query(
        "SELECT * FROM users WHERE (created_at_us, user_id) < ($1, $2) \
         ORDER BY created_at_us DESC, user_id DESC LIMIT $3",
    )
    .bind(created_at_us)
    .bind(user_id)
    .bind(limit)
    .fetch_all(db)
    .await?
    .iter()
    .map(read)
    .collect()
}

/// The user's own limit, if set.
pub async fn limit(
    db: impl SqliteExecutor<'_>,
    user_id: &str,
    limit_type: LimitType,
) -> sqlx::Result<Option<Limit>> {
    let row =
        sqlx::query("SELECT daily, refuse_with FROM limits WHERE user_id = $1 AND limit_type = $2")
            .bind(user_id)
            .bind(limit_type.as_str())
            .fetch_optional(db)
            .await?;
    row.map(|row| {
        Ok(Limit {
            daily: amount(row.try_get("daily")?)?,
            refuse_with: row.try_get("refuse_with")?,
        })
    })
    .transpose()
}

pub async fn set_limit_in_tx(
    tx: &mut SqliteConnection,
    user_id: &str,
    limit_type: LimitType,
    limit: &Limit,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO limits (user_id, limit_type, daily, refuse_with) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (user_id, limit_type) DO UPDATE SET daily = excluded.daily, refuse_with = excluded.refuse_with",
    )
    .bind(user_id)
    .bind(limit_type.as_str())
    .bind(limit.daily.to_string())
    .bind(&limit.refuse_with)
    .execute(tx)
    .await?;
    Ok(())
}

/// The user's limit use in the period that begins on that day.
pub async fn used(
    db: impl SqliteExecutor<'_>,
    user_id: &str,
    day: BusinessDay,
    limit_type: LimitType,
) -> sqlx::Result<Decimal> {
    let text: Option<String> = sqlx::query_scalar(
        "SELECT used FROM uses WHERE user_id = $1 AND business_day = $2 AND limit_type = $3",
    )
    .bind(user_id)
    .bind(day.number())
    .bind(limit_type.as_str())
    .fetch_optional(db)
    .await?;
    text.map_or(Ok(Decimal::ZERO), |text| amount(&text))
}

pub async fn add_use_in_tx(
    tx: &mut SqliteConnection,
    user_id: &str,
    day: BusinessDay,
    limit_type: LimitType,
    more: Decimal,
) -> sqlx::Result<()> {
    let sum = used(&mut *tx, user_id, day, limit_type)
        .await?
        .checked_add(more)
        .map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
    sqlx::query(
        "INSERT INTO uses (user_id, business_day, limit_type, used) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (user_id, business_day, limit_type) DO UPDATE SET used = excluded.used",
    )
    .bind(user_id)
    .bind(day.number())
    .bind(limit_type.as_str())
    .bind(sum.to_string())
    .execute(tx)
    .await?;
    Ok(())
}

/// An operation's reservation of a limit, or its refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub reservation_id: String,
    pub user_id: String,
    pub limit_type: LimitType,
    /// First day of the limit's period.
    pub day: BusinessDay,
    pub amount: Decimal,
    pub state: ReservationState,
    /// Why it was refused.
    pub reason: String,
}

pub async fn reservation(
    db: impl SqliteExecutor<'_>,
    reservation_id: &str,
) -> sqlx::Result<Option<Reservation>> {
    let row = sqlx::query("SELECT * FROM reservations WHERE reservation_id = $1")
        .bind(reservation_id)
        .fetch_optional(db)
        .await?;
    let unknown = |error: types::TextError| sqlx::Error::Decode(Box::new(error));
    row.map(|row| {
        Ok(Reservation {
            reservation_id: row.try_get("reservation_id")?,
            user_id: row.try_get("user_id")?,
            limit_type: row
                .try_get::<&str, _>("limit_type")?
                .parse()
                .map_err(unknown)?,
            day: BusinessDay::from_number(row.try_get("business_day")?),
            amount: amount(row.try_get("amount")?)?,
            state: row.try_get::<&str, _>("state")?.parse().map_err(unknown)?,
            reason: row.try_get("reason")?,
        })
    })
    .transpose()
}

/// Stores the reservation, or its new state and amount.
pub async fn save_reservation_in_tx(
    tx: &mut SqliteConnection,
    reservation: &Reservation,
) -> sqlx::Result<()> {
    sqlx::query(
        "INSERT INTO reservations (reservation_id, user_id, limit_type, business_day, amount, state, reason) \
         VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (reservation_id) DO UPDATE SET \
         state = excluded.state, amount = excluded.amount",
    )
    .bind(&reservation.reservation_id)
    .bind(&reservation.user_id)
    .bind(reservation.limit_type.as_str())
    .bind(reservation.day.number())
    .bind(reservation.amount.to_string())
    .bind(reservation.state.as_str())
    .bind(&reservation.reason)
    .execute(tx)
    .await?;
    Ok(())
}

/// Whether the operation's amount is part of the user's limit use already.
pub async fn is_counted_in_tx(tx: &mut SqliteConnection, operation_id: &str) -> sqlx::Result<bool> {
    use ReservationState::{Confirmed, Reserved};
    let reservation = reservation(tx, operation_id).await?;
    Ok(reservation.is_some_and(|stored| matches!(stored.state, Reserved | Confirmed)))
}
