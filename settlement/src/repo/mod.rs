//! Settlement's store: the state of each batch, so a restart repeats the interrupted step. The
//! ledger, not this store, is authoritative for money.

mod audit;
mod cases;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use events::Sqlite;
use service_clients::cfa::TradeBatch;
use service_kit::audit::Act;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{Connection, QueryBuilder, Row, SqliteConnection};
use types::command::Bust;
use types::{Id128, derived};

use crate::bust;
use crate::progress::Suspension;
use crate::saga::{Saga, State};

pub use cases::{Case, Closed, NewCase};

/// The store cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Events(#[from] events::Error),
    #[error("settlement store: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("settlement store contains an unreadable batch: {0}")]
    Saga(#[from] serde_json::Error),
    #[error("settlement store contains an unreadable bust trade: {0}")]
    Bust(String),
    #[error("settlement store contains an unreadable case: {0}")]
    Case(String),
}

/// A stored batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub number: i64,
    pub batch_id: String,
    pub source: String,
    pub first: u64,
    pub through: u64,
    pub covers: u64,
    pub saga: Saga,
    pub trades: u32,
    /// The encoded ledger request, until it is posted.
    pub request: Vec<u8>,
    /// The encoded chain request, until the batch is final.
    pub legs: Vec<u8>,
    /// Execution times, nanoseconds, one per trade.
    pub executed_ns: Vec<u64>,
    /// `Bust` commands, one per trade.
    pub busts: Vec<Bust>,
}

impl Stored {
    /// The trades, in the order of the saga's indices; none if the stored ones are unreadable or
    /// the batch is final.
    pub fn trade_ids(&self) -> Vec<Id128> {
        let trades = TradeBatch::from_bytes(&self.legs).map_or_else(Vec::new, |of| of.trades);
        trades.iter().map(|trade| trade.trade_id).collect()
    }
}

/// A difference between journal and ledger, as stored and listed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BreakRow {
    pub name: String,
    pub hold_id: String,
    pub user_id: String,
    /// Empty, with zero decimals, in a row of an older release.
    pub instrument_id: String,
    pub decimals: u8,
    pub sequence: u64,
    /// Minor units, as `found`.
    pub expected: i64,
    pub found: i64,
    pub found_at_us: i64,
    /// Time at which both sides agreed again.
    pub cleared_at_us: Option<i64>,
}

/// Selects differences.
#[derive(Clone, Copy, Debug)]
pub struct BreakFilter<'a> {
    /// Empty: of every instrument.
    pub instrument_id: &'a str,
    /// Open, cleared, or both.
    pub is_open: Option<bool>,
    /// Found at or before this time.
    pub found_until_us: i64,
}

/// A request of an operator to bust a trade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedBust {
    pub trade_id: Id128,
    pub batch_id: String,
    pub actor: String,
    pub reason: String,
    /// Fingerprint of the call.
    pub digest: i64,
}

/// The schema, applied after outbox and inbox.
static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/sqlite": "0001_settlement", "0002_lifted_breaks", "0003_breaks",
    "0004_bust_commands", "0005_operators", "0006_cases", "0007_audit_records"
);

/// Rows without a seal: open batches, whose trades the ledger has in its blocks.
pub static SEALING: events::Sealing = events::Sealing {
    exempt: &[],
    partly: &[(
        "batches",
        "ROW.state = 'FINAL'",
        "an open batch is compared with ledger and chain at each step",
    )],
    columns: &[],
    summed: &[("batches", "one per batch of trades")],
};

/// The batches that are not final, under the ids that the chain service has for their attempts. An
/// attempt is stored before it is submitted. Reads the store's file, with or without a running
/// settlement.
///
/// # Errors
/// [`StoreError`]: the file cannot be read.
pub async fn open_batch_ids(file: &Path) -> Result<HashSet<String>, StoreError> {
    let mut db = connect(file).await?;
    let sql = "SELECT batch_id, saga FROM batches WHERE state <> 'FINAL' ORDER BY number";
    let open: Vec<(String, String)> = sqlx::query_as(sql).fetch_all(&mut db).await?;
    db.close().await?;
    let mut ids = HashSet::new();
    for (id, saga) in &open {
        let saga: Saga = serde_json::from_str(saga)?;
        ids.extend((1..=saga.attempt).map(|attempt| derived::attempt_id(id, attempt)));
    }
    Ok(ids)
}

/// Those of these trades that are bust, or in a batch that is not final. The ledger may have no
/// operation of such a trade. Reads the store's file, with or without a running settlement.
///
/// # Errors
/// [`StoreError`]: the file cannot be read.
pub async fn bust_or_open(file: &Path, trades: &[&str]) -> Result<HashSet<String>, StoreError> {
    let mut db = connect(file).await?;
    // Before the bust trades: a trade becomes one with the end of its batch.
    let sql =
        "SELECT legs FROM batches WHERE state <> 'FINAL' AND legs IS NOT NULL ORDER BY number";
    let open: Vec<Vec<u8>> = sqlx::query_scalar(sql).fetch_all(&mut db).await?;
    let sql = "SELECT b.trade_id FROM json_each($1) AS k \
         CROSS JOIN bust_trades AS b ON b.trade_id = k.value";
    let bust: Vec<String> = sqlx::query_scalar(sql)
        .bind(serde_json::json!(trades).to_string())
        .fetch_all(&mut db)
        .await?;
    db.close().await?;
    let mut found: HashSet<String> = bust.into_iter().collect();
    let batches = open.iter().filter_map(|legs| TradeBatch::from_bytes(legs));
    let in_batches = batches.flat_map(|batch| batch.trades);
    found.extend(
        in_batches
            .map(|trade| trade.trade_id.to_string())
            .filter(|id| trades.contains(&id.as_str())),
    );
    Ok(found)
}

async fn connect(file: &Path) -> Result<SqliteConnection, StoreError> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    Ok(SqliteConnection::connect_with(&options).await?)
}

/// Settlement's SQLite store.
#[derive(Clone)]
pub struct Repo {
    db: Sqlite,
}

impl Repo {
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let db = Sqlite::open_sealed(path, &MIGRATOR, &SEALING).await?;
        Ok(Self { db })
    }

    pub async fn close(&self) {
        self.db.close().await;
    }

    /// The database, for its outbox.
    pub fn db(&self) -> Sqlite {
        self.db.clone()
    }

    /// Stores sealed batches in one transaction and sets their numbers. Idempotent: a repeat reads
    /// the numbers of rows that an earlier attempt committed.
    pub async fn insert(&self, rows: &mut [Stored], now_us: i64) -> Result<(), StoreError> {
        let mut tx = self.db.write().await?;
        for row in rows.iter_mut() {
            let executed: Vec<u8> = row
                .executed_ns
                .iter()
                .flat_map(|ns| ns.to_le_bytes())
                .collect();
            let mut busts = Vec::with_capacity(row.busts.len() * bust::LEN);
            row.busts
                .iter()
                .for_each(|bust| bust::append(bust, &mut busts));
            let number = sqlx::query(
                "INSERT INTO batches (
                     batch_id, source, first_sequence, through_sequence, covers, state, saga, trades,
                     request, legs, executed, busts, sealed_at_us, changed_at_us
                 ) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13)
                 ON CONFLICT (batch_id) DO UPDATE SET changed_at_us = excluded.changed_at_us
                 WHERE batches.request = excluded.request AND batches.saga = excluded.saga
                 RETURNING number",
            )
            .bind(&row.batch_id)
            .bind(&row.source)
            .bind(row.first.cast_signed())
            .bind(row.through.cast_signed())
            .bind(row.covers.cast_signed())
            .bind(row.saga.state.as_str())
            .bind(serde_json::to_string(&row.saga)?)
            .bind(row.trades)
            .bind(&row.request)
            .bind(&row.legs)
            .bind(executed)
            .bind(busts)
            .bind(now_us)
            .fetch_one(&mut *tx)
            .await?;
            row.number = number.try_get(0)?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Stores a batch's state and, until it is posted, its request; drops data that no later step
    /// needs, and adds bust trades with their cases.
    pub async fn advance(
        &self,
        row: &Stored,
        bust: &[Bust],
        cases: &[NewCase],
        now_us: i64,
    ) -> Result<(), StoreError> {
        let mut tx = self.db.write().await?;
        sqlx::query(
            "UPDATE batches SET state = $2, saga = $3, tx_hash = COALESCE($4, tx_hash), changed_at_us = $5,
             request = CASE WHEN $2 = 'SEALED' THEN $6 END,
             legs = CASE WHEN $2 = 'FINAL' THEN NULL ELSE legs END,
             executed = CASE WHEN $2 = 'FINAL' THEN NULL ELSE executed END,
             busts = CASE WHEN $2 = 'FINAL' THEN NULL ELSE busts END
             WHERE number = $1",
        )
        .bind(row.number)
        .bind(row.saga.state.as_str())
        .bind(serde_json::to_string(&row.saga)?)
        .bind(row.saga.tx_hash.as_deref())
        .bind(now_us)
        .bind(&row.request)
        .execute(&mut *tx)
        .await?;
        for trade in bust {
            let mut command = Vec::with_capacity(bust::LEN);
            bust::append(trade, &mut command);
            sqlx::query(
                "INSERT INTO bust_trades (trade_id, batch_id, bust_at_us, command) VALUES ($1, $2, $3, $4)
                 ON CONFLICT (trade_id) DO NOTHING",
            )
            .bind(trade.trade.to_string())
            .bind(&row.batch_id)
            .bind(now_us)
            .bind(command)
            .execute(&mut *tx)
            .await?;
        }
        for case in cases {
            cases::open_in_tx(&mut tx, case, &row.batch_id, now_us).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Batches that are not final, oldest first.
    pub async fn open_batches(&self) -> Result<Vec<Stored>, StoreError> {
        sqlx::query("SELECT * FROM batches WHERE state <> 'FINAL' ORDER BY number")
            .fetch_all(self.db.read())
            .await?
            .iter()
            .map(row_of)
            .collect()
    }

    /// Trades that failed on chain and whose operations are reversed. Excludes those of open
    /// batches: the tracker adds these when the batch is final.
    pub async fn bust_trades(&self) -> Result<Vec<Bust>, StoreError> {
        let rows = sqlx::query(
            "SELECT trade_id, command FROM bust_trades WHERE batch_id NOT IN \
             (SELECT batch_id FROM batches WHERE state <> 'FINAL')",
        )
        .fetch_all(self.db.read())
        .await?;
        let command = |row: &SqliteRow| {
            let (id, command): (String, Option<Vec<u8>>) = (row.try_get(0)?, row.try_get(1)?);
            let read = bust::read_all(&command.unwrap_or_default());
            let trade = Id128::parse(&id);
            let is_same = |found: &&Bust| Some(found.trade) == trade;
            let found = read.as_deref().and_then(<[Bust]>::first).filter(is_same);
            found.copied().ok_or(StoreError::Bust(id))
        };
        rows.iter().map(command).collect()
    }

    /// Stores a difference: one open row per hold.
    pub async fn add_break(&self, found: &BreakRow) -> Result<(), StoreError> {
        let mut tx = self.db.write().await?;
        let known = sqlx::query(
            "UPDATE breaks SET sequence = $2, expected = $3, found = $4 \
             WHERE hold_id = $1 AND cleared_at_us IS NULL",
        )
        .bind(&found.hold_id)
        .bind(found.sequence.cast_signed())
        .bind(found.expected)
        .bind(found.found)
        .execute(&mut *tx)
        .await?
        .rows_affected();
        if known == 0 {
            sqlx::query(
                "INSERT INTO breaks \
                 (name, hold_id, user_id, sequence, expected, found, found_at_us, instrument_id, decimals) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            )
            .bind(&found.name)
            .bind(&found.hold_id)
            .bind(&found.user_id)
            .bind(found.sequence.cast_signed())
            .bind(found.expected)
            .bind(found.found)
            .bind(found.found_at_us)
            .bind(&found.instrument_id)
            .bind(found.decimals)
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Uncleared differences, oldest first.
    pub async fn breaks(&self) -> Result<Vec<BreakRow>, StoreError> {
        let rows = sqlx::query(
            "SELECT * FROM breaks WHERE cleared_at_us IS NULL ORDER BY found_at_us, hold_id",
        )
        .fetch_all(self.db.read())
        .await?;
        rows.iter().map(break_of).collect()
    }

    /// Differences, newest first, strictly after the bound.
    pub async fn list_breaks(
        &self,
        filter: &BreakFilter<'_>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<BreakRow>, StoreError> {
        let (time_us, hold_id) = match bound.0 > filter.found_until_us {
            true => (filter.found_until_us, LAST_ID),
            false => bound,
        };
        let mut query = QueryBuilder::<sqlx::Sqlite>::new("SELECT * FROM breaks WHERE ");
        if !filter.instrument_id.is_empty() {
            query
                .push("instrument_id = ")
                .push_bind(filter.instrument_id);
            query.push(" AND ");
        }
        match filter.is_open {
            Some(true) => query.push("cleared_at_us IS NULL AND "),
            Some(false) => query.push("cleared_at_us IS NOT NULL AND "),
            None => &mut query,
        };
        query.push("(found_at_us, hold_id) < (").push_bind(time_us);
        query.push(", ").push_bind(hold_id);
        query.push(") ORDER BY found_at_us DESC, hold_id DESC LIMIT ");
        query.push_bind(limit);
        let rows = query.build().fetch_all(self.db.read()).await?;
        rows.iter().map(break_of).collect()
    }

    /// Batches that are not final with a number below `before`, newest first, each with the times
    /// at which it was sealed and last changed.
    pub async fn list_open_batches(
        &self,
        before: i64,
        limit: i64,
    ) -> Result<Vec<(Stored, i64, i64)>, StoreError> {
        let rows = sqlx::query(
            "SELECT * FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' AND number < $1 \
             ORDER BY number DESC LIMIT $2",
        )
        .bind(before)
        .bind(limit)
        .fetch_all(self.db.read())
        .await?;
        rows.iter()
            .map(|row| {
                let sealed_at_us = row.try_get("sealed_at_us")?;
                Ok((row_of(row)?, sealed_at_us, row.try_get("changed_at_us")?))
            })
            .collect()
    }

    /// Time at which the oldest batch that is not final was sealed.
    pub async fn oldest_open_at(&self) -> Result<Option<i64>, StoreError> {
        Ok(sqlx::query_scalar(
            "SELECT sealed_at_us FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' \
             ORDER BY number LIMIT 1",
        )
        .fetch_optional(self.db.read())
        .await?)
    }

    /// The oldest batch in a state.
    pub async fn first_in(&self, state: State) -> Result<Option<Stored>, StoreError> {
        let row = sqlx::query(
            "SELECT * FROM batches INDEXED BY batches_open WHERE state <> 'FINAL' AND state = $1 \
             ORDER BY number LIMIT 1",
        )
        .bind(state.as_str())
        .fetch_optional(self.db.read())
        .await?;
        row.as_ref().map(row_of).transpose()
    }

    /// A batch that is not removed.
    pub async fn batch(&self, batch_id: &str) -> Result<Option<Stored>, StoreError> {
        let row = sqlx::query("SELECT * FROM batches WHERE batch_id = $1")
            .bind(batch_id)
            .fetch_optional(self.db.read())
            .await?;
        row.as_ref().map(row_of).transpose()
    }

    /// The stored request to bust a trade: its batch and digest.
    pub async fn requested_bust(&self, trade: Id128) -> Result<Option<(String, i64)>, StoreError> {
        let query =
            sqlx::query_as("SELECT batch_id, digest FROM requested_busts WHERE trade_id = $1");
        let query = query.bind(trade.to_string());
        Ok(query.fetch_optional(self.db.read()).await?)
    }

    /// Stores a request to bust a trade with its audit record, once per trade.
    pub async fn request_bust(
        &self,
        new: &RequestedBust,
        now_us: i64,
        act: Act<'_>,
    ) -> Result<(), StoreError> {
        let mut tx = self.db.write().await?;
        let stored = sqlx::query(
            "INSERT INTO requested_busts (trade_id, batch_id, actor, reason, digest, requested_at_us) \
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (trade_id) DO NOTHING",
        )
        .bind(new.trade_id.to_string())
        .bind(&new.batch_id)
        .bind(&new.actor)
        .bind(&new.reason)
        .bind(new.digest)
        .bind(now_us)
        .execute(&mut *tx)
        .await?;
        if stored.rows_affected() == 1 {
            audit::record_in_tx(&mut tx, now_us, act).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Trades of open batches that an operator wants bust, with the reason.
    pub async fn requested_busts(&self) -> Result<BTreeMap<Id128, String>, StoreError> {
        let rows: Vec<(String, String)> = sqlx::query_as(
            "SELECT trade_id, reason FROM batches b INDEXED BY batches_open \
             CROSS JOIN requested_busts r ON r.batch_id = b.batch_id WHERE b.state <> 'FINAL'",
        )
        .fetch_all(self.db.read())
        .await?;
        let request = |(id, reason): (String, String)| match Id128::parse(&id) {
            Some(trade) => Ok((trade, reason)),
            None => Err(StoreError::Bust(id)),
        };
        rows.into_iter().map(request).collect()
    }

    /// Clears the difference of a hold.
    pub async fn clear_break(&self, hold_id: &str, now_us: i64) -> Result<(), StoreError> {
        const CLEAR: &str =
            "UPDATE breaks SET cleared_at_us = $2 WHERE hold_id = $1 AND cleared_at_us IS NULL";
        self.stamp(CLEAR, hold_id, now_us).await
    }

    /// Users to block, and users to unblock because all their differences have cleared.
    pub async fn suspensions(&self) -> Result<BTreeMap<String, Suspension>, StoreError> {
        let rows = sqlx::query(
            "SELECT user_id, MAX(cleared_at_us IS NULL) FROM breaks WHERE lifted_at_us IS NULL GROUP BY user_id",
        )
        .fetch_all(self.db.read())
        .await?;
        rows.iter()
            .map(|row| {
                let suspension = if row.try_get::<i64, _>(1)? == 0 {
                    Suspension::Agrees
                } else {
                    Suspension::Differs
                };
                Ok((row.try_get(0)?, suspension))
            })
            .collect()
    }

    /// Records that the market has unblocked a user.
    pub async fn mark_lifted(&self, user_id: &str, now_us: i64) -> Result<(), StoreError> {
        const LIFT: &str = "UPDATE breaks SET lifted_at_us = $2 \
             WHERE user_id = $1 AND cleared_at_us IS NOT NULL AND lifted_at_us IS NULL";
        self.stamp(LIFT, user_id, now_us).await
    }

    /// Runs `sql` with a row key and a time.
    async fn stamp(&self, sql: &'static str, id: &str, now_us: i64) -> Result<(), StoreError> {
        let mut tx = self.db.write().await?;
        sqlx::query(sql)
            .bind(id)
            .bind(now_us)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }
}

/// Follows every id in the order of texts.
const LAST_ID: &str = "\u{10FFFF}";

fn break_of(row: &SqliteRow) -> Result<BreakRow, StoreError> {
    Ok(BreakRow {
        name: row.try_get("name")?,
        hold_id: row.try_get("hold_id")?,
        user_id: row.try_get("user_id")?,
        instrument_id: row.try_get("instrument_id")?,
        decimals: row.try_get("decimals")?,
        sequence: row.try_get::<i64, _>("sequence")?.cast_unsigned(),
        expected: row.try_get("expected")?,
        found: row.try_get("found")?,
        found_at_us: row.try_get("found_at_us")?,
        cleared_at_us: row.try_get("cleared_at_us")?,
    })
}

fn row_of(row: &SqliteRow) -> Result<Stored, StoreError> {
    let count = |name: &str| -> Result<u64, StoreError> {
        Ok(row.try_get::<i64, _>(name)?.cast_unsigned())
    };
    let bytes = |name: &str| -> Result<Vec<u8>, StoreError> {
        Ok(row.try_get::<Option<Vec<u8>>, _>(name)?.unwrap_or_default())
    };
    let saga: String = row.try_get("saga")?;
    let busts = bust::read_all(&bytes("busts")?);
    Ok(Stored {
        number: row.try_get("number")?,
        batch_id: row.try_get("batch_id")?,
        source: row.try_get("source")?,
        first: count("first_sequence")?,
        through: count("through_sequence")?,
        covers: count("covers")?,
        saga: serde_json::from_str(&saga)?,
        trades: row.try_get("trades")?,
        request: bytes("request")?,
        legs: bytes("legs")?,
        executed_ns: bytes("executed")?
            .chunks_exact(8)
            .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("chunks of eight")))
            .collect(),
        // `BatchDriver::new` refuses a batch with missing commands.
        busts: busts.unwrap_or_default(),
    })
}
