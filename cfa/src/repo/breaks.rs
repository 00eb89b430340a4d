//! Breaks between chain and ledger, and what the comparison reads.

use std::collections::HashSet;

use events::{Event, Tx};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row};

use super::{Repo, damaged};
use crate::compare::Subject;
use crate::error::Error;
use crate::model::{Flow, RedemptionStatus};
use crate::placement::Stage;
use crate::saga::Chain;

/// Open operations that are read to tell who is in flight.
const OPEN_MAX: i64 = 10_000;

/// A stored break. Amounts in smallest units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainBreak {
    pub instrument_id: String,
    /// Empty: the supply.
    pub address: String,
    /// Empty: not an address of a user.
    pub user_id: String,
    pub chain_units: i128,
    pub ledger_units: i128,
    pub found_at_us: i64,
    pub cleared_at_us: Option<i64>,
}

/// Operations that may explain a difference.
#[derive(Clone, Debug, Default)]
pub struct OpenOperations {
    /// Their parties.
    pub users: HashSet<String>,
    pub instruments: HashSet<String>,
    /// There are more than were read.
    pub is_cut: bool,
}

/// The payment and burn of a holder in a part of a redemption or coupon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartMove {
    /// The address of a holder without a user id.
    pub user_id: String,
    /// The issue.
    pub instrument_id: String,
    /// 0 for a coupon.
    pub units_minor: i64,
    /// Kopecks.
    pub payment_minor: i64,
}

/// A difference of a holder or a supply that two persons have accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedDifference {
    pub instrument_id: String,
    /// Empty: the supply.
    pub address: String,
    /// Chain - ledger, in smallest units.
    pub units: i128,
    pub actor: String,
    pub reason: String,
    pub accepted_at_us: i64,
}

impl Repo {
    /// Open breaks, oldest first.
    pub async fn open_breaks(&self, limit: i64) -> Result<Vec<ChainBreak>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM chain_break WHERE cleared_at_us IS NULL \
             ORDER BY found_at_us, instrument_id, address LIMIT $1",
        )
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Instruments with open breaks: number, and time of the oldest in microseconds.
    pub async fn broken_instruments(&self) -> Result<Vec<(String, i64, i64)>, Error> {
        Ok(sqlx::query_as(
            "SELECT instrument_id, COUNT(*), MIN(found_at_us) FROM chain_break \
             WHERE cleared_at_us IS NULL GROUP BY instrument_id",
        )
        .fetch_all(self.db.read())
        .await?)
    }

    /// The open break of a holder or, without an address, of the supply.
    pub async fn open_break(
        &self,
        instrument_id: &str,
        address: &str,
    ) -> Result<Option<ChainBreak>, Error> {
        let row = sqlx::query(
            "SELECT * FROM chain_break WHERE instrument_id = $1 AND address = $2 \
             AND cleared_at_us IS NULL",
        )
        .bind(instrument_id)
        .bind(address)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    pub async fn accepted_differences(&self) -> Result<Vec<AcceptedDifference>, Error> {
        let rows = sqlx::query("SELECT * FROM accepted_difference")
            .fetch_all(self.db.read())
            .await?;
        let accepted = rows.iter().map(|row| {
            Ok(AcceptedDifference {
                instrument_id: row.try_get("instrument_id")?,
                address: row.try_get("address")?,
                units: wide(row, "units")?,
                actor: row.try_get("actor")?,
                reason: row.try_get("reason")?,
                accepted_at_us: row.try_get("accepted_at_us")?,
            })
        });
        accepted.collect()
    }

    /// The accepted difference of a holder or, without an address, of the supply.
    pub async fn accepted_difference(
        &self,
        instrument_id: &str,
        address: &str,
    ) -> Result<Option<i128>, Error> {
        let row = sqlx::query(
            "SELECT units FROM accepted_difference WHERE instrument_id = $1 AND address = $2",
        )
        .bind(instrument_id)
        .bind(address)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(|row| wide(row, "units")).transpose()
    }

    /// Accepts the difference of an open break, which ends it.
    pub async fn accept_difference_in_tx(
        &self,
        tx: &mut Tx,
        accepted: &AcceptedDifference,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO accepted_difference (instrument_id, address, units, actor, reason, accepted_at_us) \
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (instrument_id, address) DO UPDATE SET \
             units = excluded.units, actor = excluded.actor, reason = excluded.reason, \
             accepted_at_us = excluded.accepted_at_us",
        )
        .bind(&accepted.instrument_id)
        .bind(&accepted.address)
        .bind(accepted.units.to_string())
        .bind(&accepted.actor)
        .bind(&accepted.reason)
        .bind(accepted.accepted_at_us)
        .execute(&mut **tx)
        .await?;
        let (id, address) = (&accepted.instrument_id, &accepted.address);
        clear_in_tx(tx, id, address, accepted.accepted_at_us).await?;
        Ok(())
    }

    /// Ends the acceptance of a difference that has gone, with its events.
    pub async fn remove_accepted(
        &self,
        instrument_id: &str,
        address: &str,
        events: &[Event],
    ) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query("DELETE FROM accepted_difference WHERE instrument_id = $1 AND address = $2")
            .bind(instrument_id)
            .bind(address)
            .execute(&mut *tx)
            .await?;
        self.publish_in_tx(&mut tx, events).await?;
        Ok(tx.commit().await?)
    }

    pub async fn has_open_break(&self, instrument_id: &str) -> Result<bool, Error> {
        let found = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM chain_break WHERE instrument_id = $1 AND cleared_at_us IS NULL)",
        );
        Ok(found.bind(instrument_id).fetch_one(self.db.read()).await?)
    }

    /// Stores a break with its events, or the latest amounts of a known one. True: it is new.
    pub async fn save_break(&self, found: &ChainBreak, events: &[Event]) -> Result<bool, Error> {
        let known = self.open_break(&found.instrument_id, &found.address);
        let amounts = (found.chain_units, found.ledger_units);
        if (known.await?).is_some_and(|known| (known.chain_units, known.ledger_units) == amounts) {
            return Ok(false);
        }
        let mut tx = self.begin().await?;
        let known = sqlx::query(
            "UPDATE chain_break SET chain_units = $3, ledger_units = $4, compared_at_us = $5 \
             WHERE instrument_id = $1 AND address = $2 AND cleared_at_us IS NULL",
        )
        .bind(&found.instrument_id)
        .bind(&found.address)
        .bind(found.chain_units.to_string())
        .bind(found.ledger_units.to_string())
        .bind(found.found_at_us)
        .execute(&mut *tx)
        .await?;
        let is_new = known.rows_affected() == 0;
        if is_new {
            self.insert_break_in_tx(&mut tx, found).await?;
            self.publish_in_tx(&mut tx, events).await?;
        }
        tx.commit().await?;
        Ok(is_new)
    }

    async fn insert_break_in_tx(&self, tx: &mut Tx, found: &ChainBreak) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO chain_break (instrument_id, address, found_at_us, user_id, chain_units, \
             ledger_units, compared_at_us) VALUES ($1, $2, $3, $4, $5, $6, $3)",
        )
        .bind(&found.instrument_id)
        .bind(&found.address)
        .bind(found.found_at_us)
        .bind(&found.user_id)
        .bind(found.chain_units.to_string())
        .bind(found.ledger_units.to_string())
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Clears the open break of a holder or supply, with its events.
    pub async fn clear_break(
        &self,
        instrument_id: &str,
        address: &str,
        now_us: i64,
        events: &[Event],
    ) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        if clear_in_tx(&mut tx, instrument_id, address, now_us).await? {
            self.publish_in_tx(&mut tx, events).await?;
        }
        Ok(tx.commit().await?)
    }

    /// Breaks, newest first, strictly after the bound (time, instrument and address).
    pub async fn list_breaks(
        &self,
        instrument_id: &str,
        is_open: Option<bool>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<ChainBreak>, Error> {
        let (of, address) = bound.1.split_once('/').unwrap_or((bound.1, ""));
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("SELECT * FROM chain_break WHERE ");
        if !instrument_id.is_empty() {
            query.push("instrument_id = ").push_bind(instrument_id);
            query.push(" AND ");
        }
        match is_open {
            Some(true) => query.push("cleared_at_us IS NULL AND "),
            Some(false) => query.push("cleared_at_us IS NOT NULL AND "),
            None => &mut query,
        };
        query.push("(found_at_us, instrument_id, address) < (");
        query.push_bind(bound.0).push(", ").push_bind(of);
        query.push(", ").push_bind(address);
        query.push(") ORDER BY found_at_us DESC, instrument_id DESC, address DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(decode).collect()
    }

    /// The next holders in the order of token and address, whether they have units or not.
    pub async fn holders_in_turn(
        &self,
        after: &Subject,
        limit: i64,
    ) -> Result<Vec<Subject>, Error> {
        let rows: Vec<(String, String)> = sqlx::query_as(
            "SELECT token, address FROM holding WHERE (token, address) > ($1, $2) \
             ORDER BY token, address LIMIT $3",
        )
        .bind(&after.token)
        .bind(&after.address)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        let subject = |(token, address)| Subject { token, address };
        Ok(rows.into_iter().map(subject).collect())
    }

    /// Users of these addresses: (address, user).
    pub async fn users_of_addresses(
        &self,
        addresses: &[&str],
    ) -> Result<Vec<(String, String)>, Error> {
        Ok(sqlx::query_as(
            "SELECT u.address, u.user_id FROM json_each($1) AS k \
             CROSS JOIN user_address AS u ON u.address = k.value",
        )
        .bind(serde_json::json!(addresses).to_string())
        .fetch_all(self.db.read())
        .await?)
    }

    /// Fundings of redemptions and coupons that may be on their way: issuer and kopecks. Leaves out
    /// those that wait for the issuer's money.
    pub async fn fundings_in_flight(&self) -> Result<Vec<(String, i64)>, Error> {
        let mut found: Vec<(String, i64)> = sqlx::query_as(
            "SELECT i.issuer_id, r.total_minor FROM issue_redemption AS r INDEXED BY redemption_open \
             CROSS JOIN instrument AS i ON i.instrument_id = r.instrument_id \
             WHERE r.status NOT IN (5, 6) AND r.status = $1",
        )
        .bind(RedemptionStatus::Snapshot.code())
        .fetch_all(self.db.read())
        .await?;
        let coupons: Vec<(String, i64)> = sqlx::query_as(
            "SELECT i.issuer_id, c.total_minor FROM coupon AS c INDEXED BY coupon_open \
             CROSS JOIN instrument AS i ON i.instrument_id = c.instrument_id \
             WHERE c.status IN (1, 2, 3, 4, 6) AND c.status = $1",
        )
        .bind(RedemptionStatus::Snapshot.code())
        .fetch_all(self.db.read())
        .await?;
        found.extend(coupons);
        Ok(found)
    }

    /// Payments and burns of parts that are not final: one part per redemption or coupon at most.
    pub async fn parts_in_flight(&self) -> Result<Vec<PartMove>, Error> {
        let rows: Vec<(String, String, i64, i64)> = sqlx::query_as(
            "SELECT user_id, instrument_id, units_minor, payment_minor FROM operation \
             INDEXED BY operation_maturing WHERE flow IN (7, 10) AND status IN (1, 5, 6)",
        )
        .fetch_all(self.db.read())
        .await?;
        let part = |(user_id, instrument_id, units_minor, payment_minor)| PartMove {
            user_id,
            instrument_id,
            units_minor,
            payment_minor,
        };
        Ok(rows.into_iter().map(part).collect())
    }

    /// Issues whose placement issues, delivers or burns units.
    pub async fn placed_instruments(&self) -> Result<HashSet<String>, Error> {
        let query = sqlx::query_scalar(
            "SELECT instrument_id FROM placement INDEXED BY placement_open \
             WHERE stage < 8 AND stage >= $1",
        );
        let found: Vec<String> = query
            .bind(Stage::Mint.code())
            .fetch_all(self.db.read())
            .await?;
        Ok(found.into_iter().collect())
    }

    /// Kopecks that are burned on the chain and still in the ledger until the payout is made (T10),
    /// by user.
    pub async fn burned_redemptions(&self) -> Result<Vec<(String, i64)>, Error> {
        let query = sqlx::query_as(
            "SELECT user_id, units_minor FROM operation INDEXED BY operation_open \
             WHERE status NOT IN (7, 8, 9, 12) AND flow NOT IN (6, 7, 8, 10) AND flow = $1 \
             AND fact_chain = $2 AND fact_settled = 0 AND fact_minted_back = 0",
        );
        let found = query
            .bind(Flow::RedeemRub.code())
            .bind(Chain::Succeeded.code())
            .fetch_all(self.db.read());
        Ok(found.await?)
    }

    /// Open operations that are neither a trade nor part of a redemption, coupon or placement.
    /// Leaves out redemptions at rest: those that compliance has stopped (status 11), and those of
    /// [`Self::burned_redemptions`], unless a burn is on its way (`fact_chain` 1) or the payout has
    /// ended (`fact_payout` 3 and above).
    pub async fn operations_in_flight(&self) -> Result<OpenOperations, Error> {
        let rows: Vec<(String, String, String, String, String)> = sqlx::query_as(
            "SELECT o.user_id, o.from_user_id, o.to_user_id, i.issuer_id, o.instrument_id FROM operation AS o \
             INDEXED BY operation_open CROSS JOIN instrument AS i ON i.instrument_id = o.instrument_id \
             WHERE o.status NOT IN (7, 8, 9, 12) AND o.flow NOT IN (6, 7, 8, 10) \
             AND NOT (o.fact_payout < 3 AND o.fact_chain <> 1 AND ((o.status = 11 AND o.fact_refunding = 0) \
             OR (o.flow = $2 AND o.fact_chain = $3 AND o.fact_settled = 0 AND o.fact_minted_back = 0))) \
             LIMIT $1",
        )
        .bind(OPEN_MAX)
        .bind(Flow::RedeemRub.code())
        .bind(Chain::Succeeded.code())
        .fetch_all(self.db.read())
        .await?;
        let mut open = OpenOperations {
            is_cut: rows.len() as i64 == OPEN_MAX,
            ..OpenOperations::default()
        };
        for (user, from, to, issuer, instrument_id) in rows {
            open.users.extend([user, from, to, issuer]);
            open.instruments.insert(instrument_id);
        }
        // An operation without a second party.
        open.users.remove("");
        Ok(open)
    }
}

/// Clears the open break of a holder or supply. False: there is none.
async fn clear_in_tx(
    tx: &mut Tx,
    instrument_id: &str,
    address: &str,
    now_us: i64,
) -> Result<bool, Error> {
    let cleared = sqlx::query(
        "UPDATE chain_break SET cleared_at_us = $3 \
         WHERE instrument_id = $1 AND address = $2 AND cleared_at_us IS NULL",
    )
    .bind(instrument_id)
    .bind(address)
    .bind(now_us)
    .execute(&mut **tx)
    .await?;
    Ok(cleared.rows_affected() > 0)
}

/// An amount with up to 128 bits.
fn wide(row: &SqliteRow, column: &str) -> Result<i128, Error> {
    let text: String = row.try_get(column)?;
    text.parse().map_err(|_| damaged(column))
}

fn decode(row: &SqliteRow) -> Result<ChainBreak, Error> {
    let units = |column: &str| wide(row, column);
    Ok(ChainBreak {
        instrument_id: row.try_get("instrument_id")?,
        address: row.try_get("address")?,
        user_id: row.try_get("user_id")?,
        chain_units: units("chain_units")?,
        ledger_units: units("ledger_units")?,
        found_at_us: row.try_get("found_at_us")?,
        cleared_at_us: row.try_get("cleared_at_us")?,
    })
}
