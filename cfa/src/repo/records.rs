//! Operations read from the store's file, without a running service, to compare them with the
//! ledger.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use sqlx::{Connection, Row, SqliteConnection, sqlite::SqliteConnectOptions};
use types::{OperationType, derived};

use super::code;
use crate::error::Error;
use crate::model::{Flow, Status};
use crate::placement::Stage;

/// Operations of references: of an operation's id, or of a trade's.
const BY_REFERENCE: &str = "SELECT k.value AS reference, o.* FROM json_each($1) AS k \
     CROSS JOIN operation AS o ON o.operation_id = k.value \
     UNION ALL SELECT k.value AS reference, o.* FROM json_each($1) AS k \
     CROSS JOIN operation AS o ON o.kind = $2 AND o.external_ref = k.value \
     AND o.external_ref <> '' AND o.status NOT IN (8, 12) AND o.flow = 6";
/// Time of the last change of the newest operation.
const LAST_CHANGE: &str = "SELECT updated_at_us FROM operation \
     ORDER BY created_at_us DESC, operation_id DESC LIMIT 1";
/// A page of the trades that are not final: operation and trade. `+`: an index by flow would sort
/// all trades for each page.
const OPEN_TRADES: &str = "SELECT operation_id, external_ref FROM operation \
     WHERE operation_id > $1 AND +flow = 6 AND status <> 7 ORDER BY operation_id LIMIT 1000";
/// Transactions of batches among these.
const BATCHES: &str = "SELECT DISTINCT b.tx_hash FROM json_each($1) AS k \
     CROSS JOIN batch AS b ON b.tx_hash = k.value";

/// Pages of the rows that prove steps without an operation final, by key, and the steps of a row.
/// A distribution is FUNDED once its funding is final, and has a transaction only of a part.
const FINAL_STEPS: [(&str, fn(&str, i64) -> Vec<String>); 3] = [
    (
        "SELECT redemption_id, attempt FROM issue_redemption \
         WHERE (redemption_id, attempt) > ($1, $2) \
         AND (status IN (3, 4, 5) OR tx_hash IS NOT NULL) ORDER BY redemption_id LIMIT 1000",
        |id, _| vec![format!("{id}:fund")],
    ),
    (
        "SELECT instrument_id, number FROM coupon WHERE (instrument_id, number) > ($1, $2) \
         AND (status IN (3, 4, 5) OR tx_hash IS NOT NULL) \
         ORDER BY instrument_id, number LIMIT 1000",
        |id, number| vec![format!("{}:fund", derived::coupon(id, number as u32))],
    ),
    (
        "SELECT instrument_id, stage FROM placement WHERE (instrument_id, stage) > ($1, $2) \
         AND stage > 4 ORDER BY instrument_id LIMIT 1000",
        steps_below,
    ),
];

/// First ended batches with more final trades than they have settled, and final trades of no batch.
/// The batches are sealed, their trades are not. Missing trades are found from the ledger: a trade
/// that was final before is in an earlier batch.
const TRADES: &str = "SELECT * FROM (\
     SELECT 'batch' AS name, b.batch_id AS id FROM batch b WHERE b.status <> 1 AND \
     (SELECT COUNT(*) FROM operation o WHERE o.batch_id = b.batch_id AND o.flow = 6 \
     AND o.status = 7) > CASE b.status WHEN 2 THEN b.trades - json_array_length(b.failed) \
     ELSE 0 END \
     UNION ALL SELECT 'trade', operation_id FROM operation WHERE flow = 6 AND status = 7 \
     AND (batch_id IS NULL OR batch_id NOT IN (SELECT batch_id FROM batch))) LIMIT 100";

/// First contradictions among the tables of the holder registry: what differs, token, address or
/// block. A holder has the units and the time of the last row of its history, a block has one time,
/// and a supply is the sum of the holders' changes.
const CONTRADICTIONS: &str = "WITH ends AS (\
     SELECT token, address, MAX(block_number) AS block_number, MIN(time_us) AS since_us \
     FROM holding_history GROUP BY token, address), \
     last AS (SELECT e.token, e.address, h.units, h.time_us, e.block_number, e.since_us FROM ends e \
     JOIN holding_history h ON h.token = e.token AND h.address = e.address \
     AND h.block_number = e.block_number), \
     changes AS (SELECT token, block_number, time_us, \
     units - LAG(units, 1, 0) OVER (PARTITION BY token, address ORDER BY block_number) AS change \
     FROM holding_history), \
     blocks AS (SELECT token, block_number, MAX(time_us) AS time_us, MIN(time_us) AS other_us, \
     SUM(change) AS change FROM changes GROUP BY token, block_number), \
     supplies AS (SELECT token, block_number, time_us, change, SUM(change) \
     OVER (PARTITION BY token ORDER BY block_number) AS units FROM blocks), \
     supply AS (SELECT token, block_number, time_us, units FROM supplies WHERE change <> 0) \
     SELECT * FROM (\
     SELECT 'holding' AS name, g.token AS token, g.address AS place FROM holding g \
     LEFT JOIN last l ON l.token = g.token AND l.address = g.address \
     WHERE l.units IS NOT g.units OR l.since_us IS NOT g.since_us \
     OR l.block_number IS NOT g.block_number OR l.time_us IS NOT g.updated_at_us \
     UNION ALL SELECT 'holding_history', l.token, l.address FROM last l \
     WHERE NOT EXISTS (SELECT 1 FROM holding g WHERE g.token = l.token AND g.address = l.address) \
     UNION ALL SELECT 'holding_history', token, CAST(block_number AS TEXT) FROM blocks \
     WHERE other_us <> time_us \
     UNION ALL SELECT 'supply_history', token, CAST(block_number AS TEXT) FROM \
     (SELECT * FROM supply EXCEPT SELECT token, block_number, time_us, units FROM supply_history) \
     UNION ALL SELECT 'supply_history', token, CAST(block_number AS TEXT) FROM \
     (SELECT token, block_number, time_us, units FROM supply_history EXCEPT SELECT * FROM supply)) LIMIT 100";
const REGISTRY_ROWS: &str = "SELECT (SELECT COUNT(*) FROM holding) + \
     (SELECT COUNT(*) FROM holding_history) + (SELECT COUNT(*) FROM supply_history)";

/// Blocks of the holder registry, and the time that it has for each.
const BLOCK_TIMES: &str = "SELECT block_number, time_us FROM holding_history \
     UNION SELECT block_number, time_us FROM supply_history ORDER BY block_number, time_us";

/// A stored operation, as far as the ledger has the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationRecord {
    pub operation_id: String,
    /// Type of its operation in the ledger; of a trade the first of its types.
    pub kind: OperationType,
    pub is_final: bool,
    /// Time at which it became final, in microseconds; 0: it is not.
    pub finalized_at_us: i64,
    /// Empty: none.
    pub tx_hash: String,
    /// Of a trade in a batch; empty: none.
    pub batch_id: String,
    pub instrument_id: String,
    pub units_minor: i64,
    pub from_user_id: String,
    pub to_user_id: String,
    /// Kopecks.
    pub payment_minor: i64,
    pub fee_minor: i64,
    pub is_trade: bool,
    /// False: a trade whose transaction is not that of any batch.
    pub is_of_batch: bool,
}

/// The store's file, opened read-only.
pub struct OperationRecords {
    db: SqliteConnection,
}

impl OperationRecords {
    /// # Errors
    /// [`Error`]: the file cannot be opened.
    pub async fn open(path: &Path) -> Result<Self, Error> {
        let options = SqliteConnectOptions::new().filename(path).read_only(true);
        let db = SqliteConnection::connect_with(&options).await?;
        Ok(Self { db })
    }

    /// Makes all further reads see the rows of this moment. Returns the time of the last change of
    /// the newest operation, in microseconds; 0: there is none.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn hold_snapshot(&mut self) -> Result<i64, Error> {
        sqlx::query("BEGIN").execute(&mut self.db).await?;
        let last_change: Option<i64> = sqlx::query_scalar(LAST_CHANGE)
            .fetch_optional(&mut self.db)
            .await?;
        Ok(last_change.unwrap_or_default())
    }

    /// The operations of these references. References without one are missing.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn find(
        &mut self,
        references: &[&str],
    ) -> Result<HashMap<String, OperationRecord>, Error> {
        let references = serde_json::json!(references).to_string();
        let rows = sqlx::query(BY_REFERENCE)
            .bind(references)
            .bind(OperationType::P2pTransfer.code())
            .fetch_all(&mut self.db)
            .await?;
        let mut found = HashMap::with_capacity(rows.len());
        let mut of_trades = Vec::new();
        for row in &rows {
            let tx_hash: Option<String> = row.try_get("tx_hash")?;
            let tx_hash = tx_hash.unwrap_or_default();
            let flow = code(row, "flow", Flow::from_code)?;
            let is_trade = flow == Flow::Trade;
            if is_trade {
                of_trades.push(tx_hash.clone());
            }
            let finalized_at_us: Option<i64> = row.try_get("finalized_at_us")?;
            let batch_id: Option<String> = row.try_get("batch_id")?;
            let record = OperationRecord {
                operation_id: row.try_get("operation_id")?,
                kind: ledger_kind(flow),
                is_final: code(row, "status", Status::from_code)? == Status::Finalized,
                finalized_at_us: finalized_at_us.unwrap_or_default(),
                tx_hash,
                batch_id: batch_id.unwrap_or_default(),
                instrument_id: row.try_get("instrument_id")?,
                units_minor: row.try_get("units_minor")?,
                from_user_id: row.try_get("from_user_id")?,
                to_user_id: row.try_get("to_user_id")?,
                payment_minor: row.try_get("payment_minor")?,
                fee_minor: row.try_get("fee_minor")?,
                is_trade,
                is_of_batch: !is_trade,
            };
            found.insert(row.try_get("reference")?, record);
        }
        of_trades.sort();
        of_trades.dedup();
        let batches: Vec<String> = sqlx::query_scalar(BATCHES)
            .bind(serde_json::json!(of_trades).to_string())
            .fetch_all(&mut self.db)
            .await?;
        for record in found.values_mut() {
            record.is_of_batch |= batches.contains(&record.tx_hash);
        }
        Ok(found)
    }

    /// A page of the trades that are not final, by the ids of their operations: (operation, trade).
    /// `after`: the last operation of the page before.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn open_trades(&mut self, after: &str) -> Result<Vec<(String, String)>, Error> {
        let query = sqlx::query_as(OPEN_TRADES).bind(after);
        Ok(query.fetch_all(&mut self.db).await?)
    }

    /// Those of these ids that are steps which the tables of distributions and placements prove
    /// final: `<id>:fund` of a distribution, or any attempt at it `<id>:fund:try-<n>`, because all
    /// attempts have ended when one is final; `placement:<issue>:mint`, `:pay` and `:burn` below
    /// the stage of the placement.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn final_steps(&mut self, ids: &[String]) -> Result<Vec<String>, Error> {
        let mut found = Vec::new();
        if ids.is_empty() {
            return Ok(found);
        }
        for (sql, steps_of) in FINAL_STEPS {
            let mut after = (String::new(), 0_i64);
            loop {
                let page: Vec<(String, i64)> = sqlx::query_as(sql)
                    .bind(&after.0)
                    .bind(after.1)
                    .fetch_all(&mut self.db)
                    .await?;
                let Some(last) = page.last() else { break };
                after.clone_from(last);
                let steps = page.iter().flat_map(|(id, number)| steps_of(id, *number));
                let steps: HashSet<String> = steps.collect();
                let is_final = |id: &&String| steps.contains(without_attempt(id));
                found.extend(ids.iter().filter(is_final).cloned());
            }
        }
        Ok(found)
    }

    /// Checks the trades against their batches. Returns what contradicts: `batch` or `trade`, and
    /// its id.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn check_trades(&mut self) -> Result<Vec<(String, String)>, Error> {
        Ok(sqlx::query_as(TRADES).fetch_all(&mut self.db).await?)
    }

    /// Checks the tables of the holder registry against each other. Returns the number of their
    /// rows, and what contradicts: table, token, and holder or block.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn check_registry(&mut self) -> Result<(u64, Vec<(String, String, String)>), Error> {
        let rows: i64 = sqlx::query_scalar(REGISTRY_ROWS)
            .fetch_one(&mut self.db)
            .await?;
        let found = sqlx::query_as(CONTRADICTIONS)
            .fetch_all(&mut self.db)
            .await?;
        Ok((rows.unsigned_abs(), found))
    }

    /// The blocks of the holder registry with their times in microseconds, to compare them with the
    /// chain. A block with two times is there twice.
    ///
    /// # Errors
    /// [`Error`]: the file cannot be read.
    pub async fn block_times(&mut self) -> Result<Vec<(u64, i64)>, Error> {
        let rows: Vec<(i64, i64)> = sqlx::query_as(BLOCK_TIMES).fetch_all(&mut self.db).await?;
        let rows = rows.into_iter();
        Ok(rows
            .map(|(number, time_us)| (number.unsigned_abs(), time_us))
            .collect())
    }

    pub async fn close(self) -> Result<(), Error> {
        Ok(self.db.close().await?)
    }
}

/// The steps of a placement before this stage: final, or not needed and not in the ledger.
fn steps_below(instrument_id: &str, stage: i64) -> Vec<String> {
    let steps = [
        ("mint", Stage::Mint),
        ("pay", Stage::Pay),
        ("burn", Stage::Burn),
    ];
    let below = steps.iter().filter(|(_, of)| i64::from(of.code()) < stage);
    below
        .map(|(step, _)| format!("placement:{instrument_id}:{step}"))
        .collect()
}

/// The id of the first attempt at a step.
fn without_attempt(id: &str) -> &str {
    id.rsplit_once(":try-").map_or(id, |(first, _)| first)
}

/// Type of the ledger's operation. The ledger posts the issue of CFA-RUB as a deposit.
fn ledger_kind(flow: Flow) -> OperationType {
    match flow {
        Flow::IssueRub => OperationType::Deposit,
        Flow::Trade => OperationType::TradeBuy,
        flow => flow.kind(),
    }
}
