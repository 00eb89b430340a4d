//! Moves of all holders of an issue to a new token, and the tokens that issues had before.

use std::collections::BTreeMap;

use events::Tx;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{Repo, code, damaged};
use crate::error::{Error, Refusal};
use crate::model::{MoveStep, TokenMove};

impl Repo {
    pub async fn token_move(&self, move_id: &str) -> Result<Option<TokenMove>, Error> {
        let row = sqlx::query("SELECT * FROM token_move WHERE move_id = $1")
            .bind(move_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The latest move of an issue's holders.
    pub async fn latest_move(&self, instrument_id: &str) -> Result<Option<TokenMove>, Error> {
        let row = sqlx::query(
            "SELECT * FROM token_move INDEXED BY token_move_of WHERE instrument_id = $1 \
             ORDER BY created_at_us DESC LIMIT 1",
        )
        .bind(instrument_id)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// The move under way of an issue's holders.
    pub async fn open_move(&self, instrument_id: &str) -> Result<Option<TokenMove>, Error> {
        let row = sqlx::query(
            "SELECT * FROM token_move INDEXED BY token_move_open \
             WHERE instrument_id = $1 AND finished_at_us IS NULL",
        )
        .bind(instrument_id)
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(decode).transpose()
    }

    /// Moves under way, of all issues.
    pub async fn open_moves(&self) -> Result<Vec<TokenMove>, Error> {
        let rows = sqlx::query(
            "SELECT * FROM token_move INDEXED BY token_move_open WHERE finished_at_us IS NULL",
        )
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(decode).collect()
    }

    /// Checks, in the transaction that stores a move, that nothing else may change the token: no
    /// write that is excluded during a move ([`Self::require_movable_in_tx`]) is under way.
    ///
    /// # Errors
    /// The refusal that names the obstacle.
    pub async fn require_at_rest_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
    ) -> Result<(), Error> {
        let obstacles = [
            (
                "SELECT EXISTS (SELECT 1 FROM token_move INDEXED BY token_move_open \
                    WHERE instrument_id = $1 AND finished_at_us IS NULL)",
                Refusal::HoldersMoving,
            ),
            (
                "SELECT NOT EXISTS (SELECT 1 FROM instrument \
                    WHERE instrument_id = $1 AND status = 3)",
                Refusal::TokenInUse("trading is not halted"),
            ),
            (
                "SELECT EXISTS (SELECT 1 FROM instrument CROSS JOIN registry_quarantine \
                    ON token = contract_address WHERE instrument_id = $1)",
                Refusal::TokenQuarantined,
            ),
            (
                "SELECT EXISTS (SELECT 1 FROM chain_break \
                    WHERE instrument_id = $1 AND cleared_at_us IS NULL)",
                Refusal::BreakOpen,
            ),
            (
                "SELECT EXISTS (SELECT 1 FROM placement WHERE instrument_id = $1 AND stage < 8)",
                Refusal::PlacementUnderWay,
            ),
            (
                "SELECT EXISTS (SELECT 1 FROM operation INDEXED BY operation_moving \
                    WHERE instrument_id = $1 AND status NOT IN (7, 8, 9, 11, 12) \
                    AND flow NOT IN (7, 10))",
                Refusal::OperationsOpen,
            ),
            // Also a failed one: its restart continues its parts with the token of the first.
            (
                "SELECT EXISTS (SELECT 1 FROM coupon \
                    WHERE instrument_id = $1 AND status IN (1, 2, 3, 4, 6))",
                Refusal::TokenInUse("a coupon is not paid yet"),
            ),
            (
                "SELECT EXISTS (SELECT 1 FROM enforcement_act INDEXED BY act_open \
                    WHERE kind = 1 AND status IN (1, 4) AND instrument_id = $1)",
                Refusal::TokenInUse("a freeze is not complete yet"),
            ),
        ];
        for (question, refusal) in obstacles {
            let is_so: bool = sqlx::query_scalar(question)
                .bind(instrument_id)
                .fetch_one(&mut **tx)
                .await?;
            if is_so {
                return Err(refusal.into());
            }
        }
        Ok(())
    }

    pub async fn insert_move_in_tx(&self, tx: &mut Tx, new: &TokenMove) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO token_move (move_id, instrument_id, reason, actor, correlation_id, \
                old_token, new_token, migration, new_block, last_block, supply_minor, step, \
                attempts, parts_done, part, listed_through, tx_hash, moved_at_us, created_at_us, \
                updated_at_us, finished_at_us)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, \
                $18, $19, $20, $21)",
        )
        .bind(&new.move_id)
        .bind(&new.instrument_id)
        .bind(&new.reason)
        .bind(&new.actor)
        .bind(&new.correlation_id)
        .bind(&new.old_token)
        .bind(&new.new_token)
        .bind(&new.migration)
        .bind(new.new_block as i64)
        .bind(new.last_block as i64)
        .bind(new.supply_minor)
        .bind(new.step.code())
        .bind(new.attempts)
        .bind(new.parts_done as i64)
        .bind(serde_json::json!(new.part).to_string())
        .bind(&new.listed_through)
        .bind(&new.tx_hash)
        .bind(new.moved_at_us)
        .bind(new.created_at_us)
        .bind(new.updated_at_us)
        .bind(new.finished_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Stores the mutable columns.
    pub async fn save_move_in_tx(&self, tx: &mut Tx, of: &TokenMove) -> Result<(), Error> {
        sqlx::query(
            "UPDATE token_move SET new_token = $2, migration = $3, new_block = $4, \
                last_block = $5, supply_minor = $6, step = $7, attempts = $8, parts_done = $9, \
                part = $10, listed_through = $11, tx_hash = $12, moved_at_us = $13, \
                updated_at_us = $14, finished_at_us = $15
             WHERE move_id = $1",
        )
        .bind(&of.move_id)
        .bind(&of.new_token)
        .bind(&of.migration)
        .bind(of.new_block as i64)
        .bind(of.last_block as i64)
        .bind(of.supply_minor)
        .bind(of.step.code())
        .bind(of.attempts)
        .bind(of.parts_done as i64)
        .bind(serde_json::json!(of.part).to_string())
        .bind(&of.listed_through)
        .bind(&of.tx_hash)
        .bind(of.moved_at_us)
        .bind(of.updated_at_us)
        .bind(of.finished_at_us)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Whether a move of the holders is under way.
    pub async fn is_moving(&self, instrument_id: &str) -> Result<bool, Error> {
        let is_moving = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM token_move INDEXED BY token_move_open \
                WHERE instrument_id = $1 AND finished_at_us IS NULL)",
        )
        .bind(instrument_id);
        Ok(is_moving.fetch_one(self.db.read()).await?)
    }

    /// Refuses an operation of a MATURED or REDEEMED issue, and of one whose holders are being
    /// moved to a new token. Called in the transaction that stores the operation. So none is added
    /// after `count_moving`, or after [`Self::require_at_rest_in_tx`].
    ///
    /// # Errors
    /// `InstrumentNotActive`, `HoldersMoving`.
    pub async fn require_movable_in_tx(
        &self,
        tx: &mut Tx,
        instrument_id: &str,
    ) -> Result<(), Error> {
        let found: Option<(bool, bool)> = sqlx::query_as(
            "SELECT status IN (4, 5), EXISTS (SELECT 1 FROM token_move INDEXED BY token_move_open \
                WHERE token_move.instrument_id = $1 AND finished_at_us IS NULL) \
             FROM instrument WHERE instrument_id = $1",
        )
        .bind(instrument_id)
        .fetch_optional(&mut **tx)
        .await?;
        match found.unwrap_or_default() {
            (true, _) => Err(Refusal::InstrumentNotActive.into()),
            (_, true) => Err(Refusal::HoldersMoving.into()),
            (false, false) => Ok(()),
        }
    }

    /// Checks, in the transaction that stores a batch of trades, that the instruments still have
    /// these tokens and that their holders are not being moved. `tokens`: by instrument.
    ///
    /// # Errors
    /// `Unavailable`: the batch is sent again.
    pub async fn require_tokens_in_tx(
        &self,
        tx: &mut Tx,
        tokens: &BTreeMap<&str, &str>,
    ) -> Result<(), Error> {
        let is_changing: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM json_each($1) AS v \
             WHERE EXISTS (SELECT 1 FROM token_move INDEXED BY token_move_open \
                WHERE instrument_id = v.key AND finished_at_us IS NULL) \
             OR NOT EXISTS (SELECT 1 FROM instrument \
                WHERE instrument_id = v.key AND contract_address = v.value))",
        )
        .bind(serde_json::json!(tokens).to_string())
        .fetch_one(&mut **tx)
        .await?;
        match is_changing {
            true => Err(Error::Unavailable("Token whose holders move")),
            false => Ok(()),
        }
    }

    /// The token that had the holders at a time.
    pub async fn token_at(&self, instrument_id: &str, at_us: i64) -> Result<String, Error> {
        let token: Option<String> = sqlx::query_scalar(
            "SELECT COALESCE((SELECT old_token FROM token_move INDEXED BY token_move_past \
                WHERE token_move.instrument_id = $1 AND finished_at_us IS NOT NULL \
                AND moved_at_us > $2 ORDER BY moved_at_us LIMIT 1), contract_address) \
             FROM instrument WHERE instrument_id = $1",
        )
        .bind(instrument_id)
        .bind(at_us)
        .fetch_optional(self.db.read())
        .await?;
        Ok(token.ok_or(Refusal::InstrumentNotFound)?)
    }

    /// The token to which the holders of a token are, or were, moved, once it is deployed.
    pub async fn token_after(
        &self,
        instrument_id: &str,
        token: &str,
    ) -> Result<Option<String>, Error> {
        let next = sqlx::query_scalar(
            "SELECT new_token FROM token_move INDEXED BY token_move_of \
             WHERE instrument_id = $1 AND old_token = $2 AND new_token <> ''",
        )
        .bind(instrument_id)
        .bind(token);
        Ok(next.fetch_optional(self.db.read()).await?)
    }

    /// Instrument, old and new token of all moves whose new token is deployed. Leaves out the
    /// instruments of quarantined tokens.
    pub async fn moved_tokens(&self) -> Result<Vec<(String, String, String)>, Error> {
        Ok(sqlx::query_as(
            "SELECT m.instrument_id, m.old_token, m.new_token FROM token_move AS m \
             CROSS JOIN instrument AS i ON i.instrument_id = m.instrument_id \
             WHERE m.new_token <> '' \
               AND i.contract_address NOT IN (SELECT token FROM registry_quarantine)",
        )
        .fetch_all(self.db.read())
        .await?)
    }

    /// Addresses with units of a token, in their order, after the given one.
    pub async fn holder_addresses(
        &self,
        token: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<String>, Error> {
        // `+` leaves out the index of holders by time, whose rows would be sorted for each page.
        let addresses = sqlx::query_scalar(
            "SELECT address FROM holding WHERE token = $1 AND address > $2 AND +units <> 0 \
             ORDER BY address LIMIT $3",
        )
        .bind(token)
        .bind(after)
        .bind(limit);
        Ok(addresses.fetch_all(self.db.read()).await?)
    }

    /// Users all of whose units of an issue are frozen, in their order, after the given one.
    pub async fn frozen_holders(
        &self,
        instrument_id: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<String>, Error> {
        let users = sqlx::query_scalar(
            "SELECT holder_id FROM enforcement_act INDEXED BY act_whole_of \
             WHERE kind = 1 AND units_minor = 0 AND status IN (1, 2, 4) \
               AND instrument_id = $1 AND holder_id > $2 ORDER BY holder_id LIMIT $3",
        )
        .bind(instrument_id)
        .bind(after)
        .bind(limit);
        Ok(users.fetch_all(self.db.read()).await?)
    }
}

fn decode(row: &SqliteRow) -> Result<TokenMove, Error> {
    let part: String = row.try_get("part")?;
    Ok(TokenMove {
        move_id: row.try_get("move_id")?,
        instrument_id: row.try_get("instrument_id")?,
        reason: row.try_get("reason")?,
        actor: row.try_get("actor")?,
        correlation_id: row.try_get("correlation_id")?,
        old_token: row.try_get("old_token")?,
        new_token: row.try_get("new_token")?,
        migration: row.try_get("migration")?,
        new_block: row.try_get::<i64, _>("new_block")? as u64,
        last_block: row.try_get::<i64, _>("last_block")? as u64,
        supply_minor: row.try_get("supply_minor")?,
        step: code(row, "step", MoveStep::from_code)?,
        attempts: row.try_get("attempts")?,
        parts_done: row.try_get::<i64, _>("parts_done")? as u64,
        part: serde_json::from_str(&part).map_err(|_| damaged("part"))?,
        listed_through: row.try_get("listed_through")?,
        tx_hash: row.try_get("tx_hash")?,
        moved_at_us: row.try_get("moved_at_us")?,
        created_at_us: row.try_get("created_at_us")?,
        updated_at_us: row.try_get("updated_at_us")?,
        finished_at_us: row.try_get("finished_at_us")?,
    })
}
