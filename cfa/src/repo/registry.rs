//! The holder registry as the chain's own events tell it: current units and their history by block.

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::Repo;
use crate::error::Error;
use crate::model::Holder;

const CURSOR: &str = "registry_block";

/// Units that came to (or, negative, left) an address in a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderMove {
    pub token: String,
    pub address: String,
    pub units: i64,
    pub block_number: u64,
    pub time_us: i64,
}

impl Repo {
    /// The last block whose moves are in the registry.
    pub async fn registry_block(&self) -> Result<Option<u64>, Error> {
        let text = self.setting(CURSOR).await?;
        text.map(|text| text.parse().map_err(|_| super::damaged(CURSOR)))
            .transpose()
    }

    /// Applies moves in the order given and notes that everything up to `through` is in.
    pub async fn apply_moves(&self, moves: &[HolderMove], through: u64) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        for change in moves {
            sqlx::query(
                "INSERT INTO holding (token, address, units, since_us, block_number, updated_at_us) VALUES ($1, $2, $3, $4, $5, $4)
                 ON CONFLICT (token, address) DO UPDATE SET units = units + excluded.units, block_number = excluded.block_number,
                    updated_at_us = excluded.updated_at_us",
            )
            .bind(&change.token)
            .bind(&change.address)
            .bind(change.units)
            .bind(change.time_us)
            .bind(change.block_number as i64)
            .execute(&mut *tx)
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
            .execute(&mut *tx)
            .await?;
        }
        sqlx::query("INSERT INTO setting (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value")
            .bind(CURSOR)
            .bind(through.to_string())
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    /// Sum of all holders' units: the supply as the registry knows it.
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
             WHERE token = $1 AND units <> 0 AND (since_us, address) < ($2, $3) ORDER BY since_us DESC, address DESC LIMIT $4",
        )
        .bind(token)
        .bind(bound.0)
        .bind(bound.1)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        Ok(rows.iter().map(decode).collect())
    }

    /// Holders with units at an instant: by the last block sealed at or before it.
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
               AND h.block_number = (SELECT MAX(block_number) FROM holding_history p WHERE p.token = h.token AND p.address = h.address AND p.time_us <= $4)
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
