//! Velocity limits: their rows, and what of each is used, summed from the postings.
//!
//! Cost of a group while there are limits: one statement for the limits, one or two for each limit that is about a sub-account of the group, and for
//! each such sub-account with more than a few postings one for each halving on the way to the window's beginning. Without limits: none.
//! Known limitation: in a group of thousands of accounts under a limit on every user that is thousands of statements.

use std::collections::{BTreeSet, HashMap};

use sqlx::{FromRow, SqliteConnection};
use types::Minor;

use super::{Group, Store, read::Before, rows, statement};
use crate::{
    Error,
    book::Book,
    fold::{Act, Command, Wanted},
    limit::{Kinds, Side, VelocityLimit},
    model::{AccountType, Id, SubAccount},
    names::SubAccountName,
};

const LIMIT: &str = "SELECT l.*, COALESCE(i.decimals, 0) AS decimals FROM velocity_limits l \
     LEFT JOIN instruments i ON i.instrument_id = l.instrument_id";

/// Sub-accounts with fewer postings than this are summed without looking for where the window begins.
const FEW: u64 = 64;

/// Also the form in which a stored answer keeps a limit.
#[derive(FromRow, serde::Serialize, serde::Deserialize)]
pub struct LimitRow {
    limit_id: String,
    user_id: String,
    account_kind: i32,
    instrument_id: String,
    decimals: u8,
    side: i32,
    window_s: i64,
    amount: i64,
    kinds: i64,
    created_at_us: i64,
    updated_at_us: i64,
}

impl TryFrom<LimitRow> for VelocityLimit {
    type Error = Error;

    fn try_from(row: LimitRow) -> Result<Self, Error> {
        Ok(VelocityLimit {
            side: Side::from_code(row.side)
                .ok_or_else(|| rows::broken("velocity limit", &row.limit_id))?,
            limit_id: row.limit_id.into(),
            user_id: row.user_id.into(),
            account_kind: AccountType::from_code(row.account_kind),
            instrument_id: row.instrument_id.into(),
            decimals: row.decimals,
            window_s: row.window_s,
            amount: Minor(row.amount),
            kinds: Kinds(row.kinds),
            created_at_us: row.created_at_us,
            updated_at_us: row.updated_at_us,
        })
    }
}

impl From<&VelocityLimit> for LimitRow {
    fn from(limit: &VelocityLimit) -> Self {
        LimitRow {
            limit_id: limit.limit_id.to_string(),
            user_id: limit.user_id.to_string(),
            account_kind: limit.account_kind.map_or(0, AccountType::code),
            instrument_id: limit.instrument_id.to_string(),
            decimals: limit.decimals,
            side: limit.side.code(),
            window_s: limit.window_s,
            amount: limit.amount.0,
            kinds: limit.kinds.0,
            created_at_us: limit.created_at_us,
            updated_at_us: limit.updated_at_us,
        }
    }
}

impl Store {
    /// Limits about a user (his own and those of every user) and an instrument, newest first; empty text matches everything.
    pub async fn limits(
        &self,
        user_id: &str,
        instrument_id: &str,
        before: Before<'_>,
    ) -> Result<Vec<VelocityLimit>, Error> {
        let sql = format!(
            "{LIMIT} WHERE (l.created_at_us, l.limit_id) < ($1, $2) AND ($3 = '' OR l.user_id = $3 OR l.user_id = '') \
             AND ($4 = '' OR l.instrument_id = $4) ORDER BY l.created_at_us DESC, l.limit_id DESC LIMIT $5"
        );
        let found: Vec<LimitRow> = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(before.created_at_us)
            .bind(before.id)
            .bind(user_id)
            .bind(instrument_id)
            .bind(before.limit)
            .fetch_all(self.db().read())
            .await?;
        found.into_iter().map(VelocityLimit::try_from).collect()
    }
}

impl Group {
    /// Adds the limits that may be about this working set, and what is used of each.
    pub async fn load_limits(
        &mut self,
        commands: &[&Command],
        book: &mut Book,
    ) -> Result<(), Error> {
        let tx = &mut *self.tx;
        let named = commands.iter().filter_map(|command| match &command.act {
            Act::SetLimit { limit, .. } => Some(&limit.limit_id),
            Act::RemoveLimit { limit_id, .. } => Some(limit_id),
            _ => None,
        });
        let sql = format!(
            "{LIMIT} WHERE l.instrument_id IN (SELECT value FROM json_each($1)) \
             AND (l.user_id = '' OR l.user_id IN (SELECT value FROM json_each($2))) \
             UNION {LIMIT} WHERE l.limit_id IN (SELECT value FROM json_each($3))"
        );
        let mut wanted = Wanted::default();
        for command in commands {
            wanted.add(command);
        }
        let names = || {
            wanted
                .subaccount_ids
                .iter()
                .filter_map(|id| SubAccountName::parse(id))
        };
        let made: Vec<(Id, Id)> = names()
            .map(|name| (name.instrument_id.into(), name.user_id.into()))
            .collect();
        // Of what is there and of what may have to be made.
        let terms = || book.subaccounts.values().map(|row| &row.terms);
        let instruments = terms().map(|terms| &terms.instrument_id);
        let instruments: BTreeSet<&Id> = instruments
            .chain(made.iter().map(|(instrument, _)| instrument))
            .chain(book.scales.keys())
            .collect();
        let users = terms().map(|terms| &terms.user_id);
        let users: BTreeSet<&Id> = users
            .chain(made.iter().map(|(_, user)| user))
            .chain(book.users.keys())
            .collect();
        let found: Vec<LimitRow> = sqlx::query_as(sqlx::AssertSqlSafe(sql))
            .bind(rows::ids(instruments))
            .bind(rows::ids(users))
            .bind(rows::ids(named))
            .fetch_all(&mut *tx)
            .await?;
        for row in found {
            let limit = VelocityLimit::try_from(row)?;
            let about: Vec<SubAccount> = book
                .subaccounts
                .values()
                .filter(|row| limit.is_about(&row.terms.subaccount_id))
                .cloned()
                .collect();
            for (subaccount_id, used) in used(tx, &limit, &about, book.now_us).await? {
                book.used
                    .load((limit.limit_id.clone(), subaccount_id.into()), used);
            }
            book.limits.load(limit.limit_id.clone(), limit);
        }
        Ok(())
    }

    pub(super) async fn save_limits(&mut self, book: &Book) -> Result<(), Error> {
        for change in book.limits.changes() {
            let Some(limit) = change.after else {
                sqlx::query("DELETE FROM velocity_limits WHERE limit_id = $1")
                    .bind(&**change.key)
                    .execute(&mut *self.tx)
                    .await?;
                continue;
            };
            let row = LimitRow::from(limit);
            sqlx::query(
                "INSERT INTO velocity_limits (limit_id, user_id, account_kind, instrument_id, side, window_s, amount, kinds, \
                 created_at_us, updated_at_us) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) \
                 ON CONFLICT (limit_id) DO UPDATE SET user_id = excluded.user_id, account_kind = excluded.account_kind, \
                 instrument_id = excluded.instrument_id, side = excluded.side, window_s = excluded.window_s, \
                 amount = excluded.amount, kinds = excluded.kinds, updated_at_us = excluded.updated_at_us",
            )
            .bind(row.limit_id)
            .bind(row.user_id)
            .bind(row.account_kind)
            .bind(row.instrument_id)
            .bind(row.side)
            .bind(row.window_s)
            .bind(row.amount)
            .bind(row.kinds)
            .bind(row.created_at_us)
            .bind(row.updated_at_us)
            .execute(&mut *self.tx)
            .await?;
        }
        Ok(())
    }
}

/// Minor units that the window of a limit holds, per sub-account; one that is left out has used nothing.
async fn used(
    tx: &mut SqliteConnection,
    limit: &VelocityLimit,
    about: &[SubAccount],
    now_us: i64,
) -> Result<HashMap<String, i128>, Error> {
    if about.is_empty() {
        return Ok(HashMap::new());
    }
    let since_us = limit.since_us(now_us);
    let mut places = Vec::with_capacity(about.len());
    for row in about {
        // A version at or before the beginning of the window; the time below is what decides.
        let from = if row.version < FEW {
            0
        } else {
            statement::version_through(&mut *tx, row, since_us).await?
        };
        places.push(serde_json::json!([&*row.terms.subaccount_id, from]));
    }
    let sql = match limit.side {
        Side::Debit => {
            "SELECT p.debit_subaccount_id, SUM(p.amount >> 32), SUM(p.amount & 4294967295) FROM json_each($1) j \
             CROSS JOIN postings p ON p.debit_subaccount_id = j.value->>0 AND p.debit_version > j.value->>1 \
             JOIN operations o ON o.operation_id = p.operation_id \
             WHERE p.created_at_us > $2 AND o.reverses IS NULL AND o.reversed_by IS NULL AND ($3 = 0 OR (($3 >> o.kind) & 1) = 1) \
             GROUP BY p.debit_subaccount_id"
        }
        Side::Credit => {
            "SELECT p.credit_subaccount_id, SUM(p.amount >> 32), SUM(p.amount & 4294967295) FROM json_each($1) j \
             CROSS JOIN postings p ON p.credit_subaccount_id = j.value->>0 AND p.credit_version > j.value->>1 \
             JOIN operations o ON o.operation_id = p.operation_id \
             WHERE p.created_at_us > $2 AND o.reverses IS NULL AND o.reversed_by IS NULL AND ($3 = 0 OR (($3 >> o.kind) & 1) = 1) \
             GROUP BY p.credit_subaccount_id"
        }
    };
    let found: Vec<(String, i64, i64)> = sqlx::query_as(sql)
        .bind(serde_json::Value::Array(places).to_string())
        .bind(since_us)
        .bind(limit.kinds.0)
        .fetch_all(tx)
        .await?;
    Ok(found
        .into_iter()
        .map(|(id, high, low)| (id, rows::wide(high, low)))
        .collect())
}
