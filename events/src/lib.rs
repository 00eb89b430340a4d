//! Events between services: stored with their change, relayed in order, delivered at least once,
//! applied once.
//!
//! ```text
//! service: one transaction { change, outbox row }
//!     -> Relay -> Log (embedded or Kafka) -> consume
//!     -> one transaction { inbox row, effect }
//! ```
//!
//! An event exists if and only if its change is committed (R248): the outbox is a table of the
//! service's own database (SQLite or PostgreSQL). An event takes effect once: the inbox stores
//! `Event::id` in the transaction of the effect. Delivery is at least once and keeps the order of
//! each key (D25, D26).

pub mod audit;
pub mod calls;
pub mod consumer;
pub mod dlq;
pub mod embedded;
pub mod event;
pub mod files;
pub mod inbox;
pub mod kafka;
pub mod log;
pub mod migrations;
mod multi_row;
pub mod outbox;
pub mod pack;
pub mod postgres;
pub mod retention;
pub mod row;
pub mod seal;
pub mod sqlite;
mod store_url;
pub mod topics;

pub use consumer::{
    BatchResult, Failure, HandlerResult, Poison, RetryLater, RetryPolicy, Stopped, consume,
    consume_batches, consume_with,
};
pub use embedded::{Embedded, Retention};
pub use event::{Event, EventRef, Record};
pub use kafka::Kafka;
pub use log::{Delivery, Log, Position, Subscription, Waiting, report_health};
pub use multi_row::{MultiRow, Script, Values};
pub use pack::OutboxRow;
pub use postgres::Postgres;
pub use seal::{SealedStore, Sealing};
pub use sqlite::{
    Sqlite, Tx, WRITER_CACHE_KIB,
    direct::{Direct, DirectTx, Packed},
};
pub use store_url::StoreUrl;

/// Operational failures of outbox, inbox and event log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("store failed: {0}")]
    Store(#[from] sqlx::Error),
    #[error("store failed: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("migration failed: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("files of the store: {0}")]
    Files(#[from] std::io::Error),
    #[error("Kafka: {0}")]
    Kafka(#[from] rdkafka::error::KafkaError),
    #[error("record at {position} is not an event: {reason}")]
    Malformed { position: String, reason: String },
    /// Permanent: the same record is refused again.
    #[error("a record of {bytes} bytes for {topic} is refused: {reason}")]
    Refused {
        topic: String,
        bytes: usize,
        reason: String,
    },
    #[error("event log is closed")]
    Closed,
}

impl Error {
    /// Whether a store or the log is unavailable, so the same call may succeed later.
    pub fn is_away(&self) -> bool {
        match self {
            Error::Store(error) => is_away(error),
            Error::Sqlite(error) => sqlite::direct::is_away(error),
            Error::Files(_) | Error::Kafka(_) | Error::Closed => true,
            Error::Migrate(_) | Error::Malformed { .. } | Error::Refused { .. } => false,
        }
    }
}

/// Whether the database is unavailable, so the same statement may succeed later. False if the
/// statement or its result is at fault.
pub fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(_) if postgres::is_postgres(error) => postgres::is_away(error),
        sqlx::Error::Database(_) => sqlite::is_away(error),
        _ => sqlite::is_away(error) || postgres::is_away(error),
    }
}
