//! The holder registry, built from the chain's events: current units and their history by block.

use events::Tx;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::Repo;
use crate::error::Error;
use crate::model::{Holder, InstrumentStatus};

const CURSOR: &str = "registry_block";

/// Units received (or, negative, sent) by an address in a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderMove {
    pub token: String,
    pub address: String,
    pub units: i64,
    pub block_number: u64,
    pub time_us: i64,
}

impl Repo {
    /// The last block applied to the registry.
    pub async fn registry_block(&self) -> Result<Option<u64>, Error> {
        let text = self.setting(CURSOR).await?;
        text.map(|text| text.parse().map_err(|_| super::damaged(CURSOR)))
            .transpose()
    }

    /// Token contracts of all instruments except drafts. The block, if set, is the first whose
    /// events are not in the registry yet. Activation stores the block of the token's first event;
    /// with a draft's events included they would count twice.
    pub async fn tokens(&self) -> Result<Vec<(String, Option<u64>)>, Error> {
        let rows: Vec<(String, Option<i64>)> = sqlx::query_as(
            "SELECT contract_address, from_block FROM instrument LEFT JOIN registry_backlog ON token = contract_address
             WHERE contract_address > '' AND status <> $1 ORDER BY contract_address",
        )
        .bind(InstrumentStatus::Draft.code())
        .fetch_all(self.db.read())
        .await?;
        let block = |number: i64| number as u64;
        let rows = rows.into_iter();
        Ok(rows
            .map(|(token, from_block)| (token, from_block.map(block)))
            .collect())
    }

    /// Registers a new token whose first event may be in this block.
    pub async fn note_token_in_tx(
        &self,
        tx: &mut Tx,
        token: &str,
        from_block: u64,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO registry_backlog (token, from_block) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        )
        .bind(token)
        .bind(from_block as i64)
        .execute(&mut **tx)
        .await?;
        Ok(())
    }

    /// Applies moves of one new token and stores the next block to read, or that none is left.
    pub async fn apply_backlog(
        &self,
        token: &str,
        moves: &[HolderMove],
        next_block: Option<u64>,
    ) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        self.apply_in_tx(&mut tx, moves).await?;
        match next_block {
            Some(block) => {
                sqlx::query("UPDATE registry_backlog SET from_block = $2 WHERE token = $1")
                    .bind(token)
                    .bind(block as i64)
                    .execute(&mut *tx)
                    .await?
            }
            None => {
                sqlx::query("DELETE FROM registry_backlog WHERE token = $1")
                    .bind(token)
                    .execute(&mut *tx)
                    .await?
            }
        };
        Ok(tx.commit().await?)
    }

    /// Applies moves in order and stores `through` as the last applied block.
    pub async fn apply_moves(&self, moves: &[HolderMove], through: u64) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        self.apply_in_tx(&mut tx, moves).await?;
        sqlx::query(
            "INSERT INTO setting (name, value) VALUES ($1, $2) \
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(CURSOR)
        .bind(through.to_string())
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }

    async fn apply_in_tx(&self, tx: &mut Tx, moves: &[HolderMove]) -> Result<(), Error> {
        for change in moves {
            sqlx::query(
                "INSERT INTO holding (token, address, units, since_us, block_number, updated_at_us) \
                 VALUES ($1, $2, $3, $4, $5, $4)
                 ON CONFLICT (token, address) DO UPDATE SET units = units + excluded.units, \
                    block_number = excluded.block_number,
                    updated_at_us = excluded.updated_at_us",
            )
            .bind(&change.token)
            .bind(&change.address)
            .bind(change.units)
            .bind(change.time_us)
            .bind(change.block_number as i64)
            .execute(&mut **tx)
            .await?;
            sqlx::query(
                "INSERT INTO holding_history (token, address, block_number, time_us, units)
                 SELECT token, address, $3, $4, units FROM holding WHERE token = $1 AND address = $2
                 ON CONFLICT (token, address, block_number) DO UPDATE SET units = excluded.units",
            )
            .bind(&change.token)
            .bind(&change.address)
            .bind(change.block_number as i64)
            .bind(change.time_us)
            .execute(&mut **tx)
            .await?;
        }
        Ok(())
    }

    /// Sum of all holders' units: the supply in the registry.
    pub async fn registry_supply(&self, token: &str) -> Result<i64, Error> {
        let sum: Option<i64> =
            sqlx::query_scalar("SELECT CAST(SUM(units) AS BIGINT) FROM holding WHERE token = $1")
                .bind(token)
                .fetch_one(self.db.read())
                .await?;
        Ok(sum.unwrap_or_default())
    }

    /// Holders with units now, newest holder first, strictly after the bound.
    pub async fn holders(
        &self,
        token: &str,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Holder>, Error> {
        let rows = sqlx::query(
            "SELECT holding.*, user_id FROM holding LEFT JOIN user_address USING (address)
             WHERE token = $1 AND units <> 0 AND (since_us, address) < ($2, $3) \
             ORDER BY since_us DESC, address DESC LIMIT $4",
        )
        .bind(token)
        .bind(bound.0)
        .bind(bound.1)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.iter().map(decode).collect())
    }

    /// Holders with units at a time: by the last block sealed at or before it.
    pub async fn holders_at(
        &self,
        token: &str,
        at_us: i64,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Holder>, Error> {
        let rows = sqlx::query(
            "SELECT h.token, h.address, h.units, h.block_number, h.time_us AS updated_at_us, holding.since_us, user_id
             FROM holding_history h JOIN holding USING (token, address) LEFT JOIN user_address USING (address)
             WHERE h.token = $1 AND h.units <> 0 AND (since_us, h.address) < ($2, $3)
               AND h.block_number = (SELECT MAX(block_number) FROM holding_history p \
                WHERE p.token = h.token AND p.address = h.address AND p.time_us <= $4)
             ORDER BY since_us DESC, h.address DESC LIMIT $5",
        )
        .bind(token)
        .bind(bound.0)
        .bind(bound.1)
        .bind(at_us)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.iter().map(decode).collect())
    }
}

fn decode(row: &SqliteRow) -> Holder {
    Holder {
        user_id: row.get::<Option<String>, _>("user_id").unwrap_or_default(),
        address: row.get("address"),
        units_minor: row.get("units"),
        since_us: row.get("since_us"),
        as_of_block: row.get::<i64, _>("block_number") as u64,
        updated_at_us: row.get("updated_at_us"),
    }
}
