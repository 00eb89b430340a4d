//! The queryable history: orders, trades and answers in SQLite, derived from the replica's records.
//!
//! One transaction per batch of records writes the rows and the position, so that a crash leaves no
//! partial batch. A lost file is rebuilt from the journal if the journal was not truncated. A
//! reader that must see its own write waits for the position ([`Projection::wait`]).
//!
//! Cost: one write per batch for each order that the batch changes, and no read. A batch is written
//! on one thread with a prepared statement per row, without copies of orders or texts.

pub mod batch;
pub mod repo;
pub mod rows;
pub mod verify;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use replica::{Batch, Follower, Names};
use rpc::Health;
use sequencer::Durable;
use tokio_util::sync::CancellationToken;
use types::{NodeId, Sequence};

use crate::Error;
use crate::market::now_us;
use crate::retry::Retry;
use batch::Rows;
use repo::Store;
use repo::writer::{BatchCounts, Writer};

/// Number of records after which a transaction takes no more batches. A database page that several
/// of them change is written once. Half of the records that the replica keeps in memory.
pub const BATCH_RECORDS: usize = 8_192;
/// Name in the health read.
pub const PART: &str = "history";

/// The history as its readers see it.
#[derive(Clone)]
pub struct Projection {
    pub db: Store,
    durable: Durable,
}

impl Projection {
    /// Opens or creates the file. Sets `durable` to the position.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub async fn open(path: PathBuf, node: NodeId, durable: Durable) -> Result<Self, Error> {
        let db = Store::open(path, node).await?;
        durable.set(*db.position.borrow());
        Ok(Self { db, durable })
    }

    /// Last record in the tables.
    pub fn position(&self) -> Sequence {
        *self.db.position.borrow()
    }

    /// Returns when the tables contain every record through `sequence`.
    pub async fn wait(&self, sequence: Sequence) {
        let mut position = self.db.position.subscribe();
        position
            .wait_for(|position| *position >= sequence)
            .await
            .expect("the sender lives in self");
    }

    /// Writes the replica's records until shutdown. `follower` begins after the stored position.
    ///
    /// # Errors
    /// The replica has ended, or the store fails for good.
    pub async fn run(
        self,
        mut follower: Follower,
        health: Health,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let writer = self.writer(follower.names().clone());
        loop {
            let first = tokio::select! {
                batch = follower.next() => batch?,
                () = shutdown.cancelled() => return Ok(()),
            };
            let mut records = first.len();
            let mut batches = vec![first];
            while records < BATCH_RECORDS
                && let Some(more) = follower.try_next()
            {
                records += more.len();
                batches.push(more);
            }
            let batches: Arc<[Batch]> = batches.into();
            let mut retry = Retry::new(PART, &health, &shutdown);
            while let Err(error) = writer.write(batches.clone()).await {
                follower.release_permit();
                retry.wait(error).await?;
            }
        }
    }

    /// A writer of the history. Use only one at a time.
    pub fn writer(&self, names: Arc<Names>) -> HistoryWriter {
        HistoryWriter {
            projection: self.clone(),
            names: names.clone(),
            writer: Arc::new(Mutex::new(Writer::new(names))),
        }
    }
}

/// Writes batches of records.
pub struct HistoryWriter {
    projection: Projection,
    names: Arc<Names>,
    writer: Arc<Mutex<Writer>>,
}

impl HistoryWriter {
    /// Writes consecutive records after the position in one transaction, and advances the position.
    ///
    /// # Errors
    /// The store fails. The same batch may be retried.
    ///
    /// # Panics
    /// `batches` is empty.
    pub async fn write(&self, batches: Arc<[Batch]>) -> Result<(), Error> {
        let through = batches.last().expect("a batch").last();
        let writer = self.writer.clone();
        let write = move |tx: &events::DirectTx| {
            let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
            writer.write(tx, &Rows::of(&batches), through)
        };
        let Projection { db, durable } = &self.projection;
        match db.file.transact(write).await {
            Ok(counts) => {
                durable.set(through);
                db.position.send_replace(through);
                record_metrics(&self.names, &counts);
                Ok(())
            }
            Err(error) => {
                let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
                writer.clear_cache();
                Err(error)
            }
        }
    }
}

/// Metrics of specification 1.6, updated after the write.
fn record_metrics(names: &Names, counts: &BatchCounts) {
    for ((instrument, side), orders) in &counts.orders {
        metrics::counter!(
            "orders_placed_total",
            "instrument_id" => names.instrument(*instrument).id.to_string(),
            "side" => side.as_str()
        )
        .increment(*orders);
    }
    let now_us = now_us();
    let taken = metrics::histogram!("trade_execution_duration_seconds");
    for (instrument, times_us) in &counts.trades {
        let instrument_id = names.instrument(*instrument).id.to_string();
        metrics::counter!("trades_executed_total", "instrument_id" => instrument_id)
            .increment(times_us.len() as u64);
        for executed_us in times_us {
            taken.record(now_us.saturating_sub(*executed_us).max(0) as f64 / 1e6);
        }
    }
}

/// Microseconds of a time in nanoseconds.
pub(crate) fn micros(time_ns: u64) -> i64 {
    i64::try_from(time_ns / 1_000).expect("nanoseconds of 64 bits fit as microseconds")
}
