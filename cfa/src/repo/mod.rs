//! The SQLite store: the only module with SQL. Rows have the types of `model`.
//!
//! Reads use the reader pool. Functions `*_in_tx` write in the caller's transaction, so a state,
//! its events and the inbox row of its cause commit together.

mod anchors;
mod batches;
mod breaks;
mod coupons;
mod decisions;
mod enforcement;
mod extracts;
mod instruments;
mod moves;
mod offers;
mod operations;
mod placements;
mod records;
mod redemptions;
mod registry;
mod trades;
mod users;

use std::path::Path;

use events::audit::{self, RecordFilter, RecordRow};
use events::calls::{self, Answered, CallKey};
use events::sqlite::Sqlite;
use events::{Event, Sealing, Tx};
use service_kit::audit::Act;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;
use types::Decimal;

use crate::api::publish::{self, Draft};
use crate::error::Error;
use crate::peers::SOURCE;

pub use breaks::{AcceptedDifference, ChainBreak, OpenOperations};
pub use enforcement::FreezeInsert;
pub use offers::OfferInsert;
pub use operations::{Inserted, OperationFilter};
pub use placements::Allotted;
pub use records::{OperationRecord, OperationRecords};
pub use registry::{Correction, HolderMove};

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/sqlite": "0001_cfa", "0002_retries", "0003_lookups", "0004_registry",
    "0005_moving", "0006_lists", "0007_limits", "0008_quarantine",
    "0009_subscriptions", "0010_offers", "0011_past_holders", "0012_placement", "0013_trades",
    "0014_chain_breaks", "0015_decisions", "0016_trades_by_batch", "0017_audit_records",
    "0018_coupons", "0019_redeemed_units", "0020_redemption_lines", "0021_token_moves"
);

const FROM_CHAIN: &str = "follows from the chain's events, and is compared with the chain";

/// Trades have no seals: their operations are compared with the ledger's, the registry with the
/// chain.
pub static SEALING: Sealing = Sealing {
    exempt: &[
        ("holding", FROM_CHAIN),
        ("holding_history", FROM_CHAIN),
        ("supply_history", FROM_CHAIN),
    ],
    partly: &[
        (
            "operation",
            "ROW.flow <> 6",
            "operations of trades are compared with the ledger's",
        ),
        (
            "batch",
            "ROW.status <> 1",
            "an open batch is compared with its transaction at its end",
        ),
        (
            "setting",
            "ROW.name <> 'registry_block'",
            "the position of the holder registry moves with each block",
        ),
    ],
    columns: &[],
    summed: &[("batch", "one per batch of trades")],
};

#[derive(Clone)]
pub struct Repo {
    db: Sqlite,
}

impl Repo {
    pub async fn open(path: &Path) -> Result<Self, Error> {
        Ok(Self {
            db: Sqlite::open_sealed(path, &MIGRATOR, &SEALING).await?,
        })
    }

    pub fn db(&self) -> Sqlite {
        self.db.clone()
    }

    pub async fn begin(&self) -> Result<Tx, Error> {
        Ok(self.db.write().await?)
    }

    /// Appends events to the outbox. Audit records among them are sealed first (D34).
    pub async fn publish_in_tx(&self, tx: &mut Tx, events: &[Event]) -> Result<(), Error> {
        let drafts: Vec<Draft> = events.iter().filter_map(publish::draft).collect();
        if drafts.is_empty() {
            return Ok(events::outbox::append_in_tx(tx, events).await?);
        }
        let acts: Vec<(i64, Act<'_>)> = drafts
            .iter()
            .map(|draft| (draft.at_us, draft.act()))
            .collect();
        let sealed = audit::seal_in_tx(tx, SOURCE, &acts, publish::sealed).await?;
        let mut sealed = sealed.into_iter();
        let published = events.iter().map(|event| match publish::is_draft(event) {
            true => sealed.next().expect("one record per draft"),
            false => event.clone(),
        });
        let published: Vec<Event> = published.collect();
        Ok(events::outbox::append_in_tx(tx, &published).await?)
    }

    /// Audit records with a sequence below `before`, newest first.
    pub async fn audit_records(
        &self,
        filter: RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, Error> {
        Ok(audit::list(self.db.read(), filter, before, limit).await?)
    }

    /// The answer to an earlier call with this key (D50).
    pub async fn answered_call(&self, key: &CallKey) -> Result<Option<Answered>, Error> {
        Ok(calls::find(self.db.read(), key).await?)
    }

    pub async fn store_call_in_tx(
        &self,
        tx: &mut Tx,
        key: &CallKey,
        answered: &Answered,
    ) -> Result<(), Error> {
        Ok(calls::store_in_tx(tx, key, answered).await?)
    }

    pub async fn setting(&self, name: &str) -> Result<Option<String>, Error> {
        Ok(
            sqlx::query_scalar("SELECT value FROM setting WHERE name = $1")
                .bind(name)
                .fetch_optional(self.db.read())
                .await?,
        )
    }

    pub async fn set_setting(&self, name: &str, value: &str) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO setting (name, value) VALUES ($1, $2) \
             ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        )
        .bind(name)
        .bind(value)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
    }
}

fn damaged(column: &str) -> Error {
    Error::Damaged(column.to_owned())
}

/// Refuses a row that violates an invariant, before a write and after a read.
fn refuse(contradiction: Option<&'static str>, id: &str) -> Result<(), Error> {
    match contradiction {
        None => Ok(()),
        Some(what) => Err(damaged(&format!("{what}: {id}"))),
    }
}

fn decimal(row: &SqliteRow, column: &str) -> Result<Decimal, Error> {
    row.try_get::<String, _>(column)?
        .parse()
        .map_err(|_| damaged(column))
}

fn optional_decimal(row: &SqliteRow, column: &str) -> Result<Option<Decimal>, Error> {
    let text: Option<String> = row.try_get(column)?;
    text.map(|text| text.parse().map_err(|_| damaged(column)))
        .transpose()
}

fn code<T>(row: &SqliteRow, column: &str, read: impl Fn(i32) -> Option<T>) -> Result<T, Error> {
    read(row.try_get::<i32, _>(column)?).ok_or_else(|| damaged(column))
}

fn optional_u64(row: &SqliteRow, column: &str) -> Result<Option<u64>, Error> {
    Ok(row
        .try_get::<Option<i64>, _>(column)?
        .map(|value| value as u64))
}
