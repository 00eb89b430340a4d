//! The store in a PostgreSQL database, which several ledgers may share.
//!
//! Groups of different ledgers run concurrently at READ COMMITTED. [`load`] takes all row locks of
//! a group before it reads the rows that the fold depends on. A row that does not exist cannot be
//! locked, so its key protects it: new rows are inserted, never upserted. The second of two ledgers
//! fails and is retried on the rows of the first. The end of the audit chain is locked last, before
//! any insert that may conflict with another ledger. From there to the commit, groups that create
//! operations wait for one another; so do groups with audit records, from the lock of their chain.

mod limits;
mod load;
mod save;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use events::{Event, Postgres, postgres};
use sqlx::{Connection, PgConnection};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    Events, RetryKind, Writes,
    verify::{Reader, TEMP_TABLES},
};
use crate::{Error, book::Book, fold::Command};

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/postgres":
    "0001_ledger",
    "0002_limits_audit",
    "0003_end_of_chain",
    "0004_locked_reads",
    "0005_fewer_trips",
    "0006_lists",
    "0007_lists_and_keys",
    "0008_operation_types",
    "0009_audit_records",
    "0010_smaller_indexes"
);

/// SQLSTATE of a conflict with another session: unique violation, serialization failure, deadlock,
/// lock not available.
const CONTENTION_SQLSTATES: [&str; 4] = ["23505", "40001", "40P01", "55P03"];

/// A connection whose server does not answer within this time counts as lost, even if it is open.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

async fn with_timeout<T>(
    request: impl Future<Output = Result<T, Error>> + Send,
) -> Result<T, Error> {
    match tokio::time::timeout(RESPONSE_TIMEOUT, request).await {
        Ok(answer) => answer,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into()),
    }
}

/// Connects and migrates the schema. Returns the reads and the writes of the contract.
pub async fn open(url: &str) -> Result<(sqlx::PgPool, impl Writes + use<>), Error> {
    let db = Postgres::open(url, &MIGRATOR).await?;
    Ok((db.read().clone(), Writer { db }))
}

/// Opens a snapshot of the ledger's rows.
pub async fn snapshot(url: &str) -> Result<Reader<sqlx::Postgres>, Error> {
    let mut db = PgConnection::connect(url).await?;
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY";
    for sql in TEMP_TABLES.into_iter().chain([begin]) {
        sqlx::query(sql).execute(&mut db).await?;
    }
    Ok(Reader(db))
}

struct Writer {
    db: Postgres,
}

#[async_trait]
impl Writes for Writer {
    async fn begin(&self) -> Result<Box<dyn super::Group>, Error> {
        let tx = with_timeout(async { Ok(self.db.write().await?) }).await?;
        Ok(Box::new(Group { tx }))
    }

    /// Does nothing: no work is deferred.
    async fn run_deferred(&self) -> Result<(), Error> {
        Ok(())
    }

    async fn relay(&self, log: Arc<dyn events::Log>, shutdown: CancellationToken) {
        events::outbox::Relay::run(self.db.clone(), log, shutdown).await;
    }

    fn retry_kind(&self, error: &Error) -> RetryKind {
        let error = match error {
            Error::Store(error) | Error::Events(events::Error::Store(error)) => error,
            Error::Conflict => return RetryKind::Contention,
            _ => return RetryKind::Never,
        };
        let code = match error {
            sqlx::Error::Database(error) => error.code(),
            _ => None,
        };
        if code.is_some_and(|code| CONTENTION_SQLSTATES.contains(&&*code)) {
            RetryKind::Contention
        } else if postgres::is_lost(error) {
            RetryKind::Lost
        } else {
            RetryKind::Never
        }
    }

    async fn close(&self) {
        self.db.close().await;
    }
}

struct Group {
    tx: postgres::Tx,
}

#[async_trait]
impl super::Group for Group {
    async fn accept(&mut self, consumer: &str, event_ids: &[Uuid]) -> Result<Vec<bool>, Error> {
        let accepted = postgres::outbox::accept_many_in_tx(&mut self.tx, consumer, event_ids);
        with_timeout(async { Ok(accepted.await?) }).await
    }

    async fn load(&mut self, commands: &[&Command], clock_us: i64) -> Result<Book, Error> {
        with_timeout(load::load(&mut self.tx, commands, clock_us)).await
    }

    async fn save(&mut self, book: &Book, events: &Events<'_>) -> Result<(), Error> {
        let mut emitted: Vec<Event> = Vec::with_capacity(book.effects.len());
        events(book, &mut |event| emitted.push(event.to_event()));
        with_timeout(async {
            save::save(&mut self.tx, book).await?;
            Ok(postgres::outbox::append_in_tx(&mut self.tx, &emitted).await?)
        })
        .await
    }

    async fn run_maintenance(&mut self, command: &Command) -> Result<(), Error> {
        with_timeout(save::run_maintenance(&mut self.tx, command)).await
    }

    async fn commit(self: Box<Self>) -> Result<(), Error> {
        with_timeout(async { Ok(self.tx.commit().await?) }).await
    }
}
