//! Database of a benchmark ledger on SQLite or PostgreSQL, and its folder.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::{
    baseline,
    capture::{self, Captured},
    flow::Request,
    node::Node,
    postgres::{self, PostgresDatabase},
};

/// Store of a ledger.
pub struct Database {
    /// Folder of the event log and, on SQLite, of the store.
    pub folder: PathBuf,
    postgres: Option<PostgresDatabase>,
}

impl Database {
    /// Creates an empty ledger: on the PostgreSQL server with this URL, on SQLite without one.
    ///
    /// # Errors
    /// The server cannot create a database.
    pub async fn new(folder: PathBuf, server: Option<&str>, name: &str) -> anyhow::Result<Self> {
        let postgres = match server {
            Some(server) => Some(PostgresDatabase::create(server, name, None).await?),
            None => None,
        };
        Ok(Self { folder, postgres })
    }

    /// Copies a closed ledger.
    ///
    /// # Errors
    /// The copy fails.
    pub async fn copy(
        &self,
        folder: PathBuf,
        server: Option<&str>,
        name: &str,
    ) -> anyhow::Result<Self> {
        let postgres = match (&self.postgres, server) {
            (Some(of), Some(server)) => {
                Some(PostgresDatabase::create(server, name, Some(of)).await?)
            }
            _ => {
                copy_file(&self.folder, &folder)?;
                None
            }
        };
        Ok(Self { folder, postgres })
    }

    /// Starts a ledger on this database.
    ///
    /// # Errors
    /// Store or log cannot be opened.
    pub async fn start(&self) -> anyhow::Result<Node> {
        let url = self
            .postgres
            .as_ref()
            .map_or_else(String::new, PostgresDatabase::url);
        Node::start(&self.folder, &url).await
    }

    /// Runs the statement of the store in use, which returns one number.
    ///
    /// # Errors
    /// The query fails.
    pub async fn number(&self, sqlite: &str, postgres: &str) -> anyhow::Result<i64> {
        match &self.postgres {
            Some(database) => database.number(postgres).await,
            None => {
                let db = rusqlite::Connection::open(self.folder.join("ledger.sqlite"))?;
                db.busy_timeout(Duration::from_secs(5))?;
                Ok(db.query_row(sqlite, [], |row| row.get(0))?)
            }
        }
    }

    /// Waits up to `at_most` until the relay has drained the outbox. Returns the number of events
    /// in it at the call and the time taken.
    ///
    /// # Errors
    /// The query fails.
    pub async fn drain(&self, at_most: Duration) -> anyhow::Result<(i64, Duration)> {
        let left = async || {
            self.number(
                "SELECT COALESCE(SUM(count), 0) FROM outbox",
                "SELECT COUNT(*) FROM outbox",
            )
            .await
        };
        let first = left().await?;
        let began = Instant::now();
        while left().await? > 0 && began.elapsed() < at_most {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok((first, began.elapsed()))
    }

    /// Captures the rows that these requests write within `limit`.
    ///
    /// # Errors
    /// The ledger refuses a request, or its rows cannot be read.
    pub async fn capture(
        &self,
        requests: Vec<Request>,
        limit: Duration,
    ) -> anyhow::Result<Captured> {
        match &self.postgres {
            Some(database) => postgres::capture(database, &self.folder, requests, limit).await,
            None => capture::capture(&self.folder, requests, limit).await,
        }
    }

    /// Prepares bare statements that write the captured rows, `merge` requests per transaction.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub async fn baseline(&self, captured: Captured, merge: usize) -> anyhow::Result<Baseline> {
        Ok(match &self.postgres {
            Some(database) => {
                Baseline::Postgres(postgres::Baseline::new(database, captured, merge).await?)
            }
            None => Baseline::Sqlite(baseline::Baseline::new(&self.folder, captured, merge)?),
        })
    }

    /// Drops the PostgreSQL database. The caller removes the folder.
    ///
    /// # Errors
    /// The server refuses.
    pub async fn drop(self) -> anyhow::Result<()> {
        match self.postgres {
            Some(database) => database.drop().await,
            None => Ok(()),
        }
    }
}

/// The baseline of either store.
#[allow(clippy::large_enum_variant, reason = "only one instance exists")]
pub enum Baseline {
    Sqlite(baseline::Baseline),
    Postgres(postgres::Baseline),
}

impl Baseline {
    /// Number of transactions that have not run.
    pub fn remaining(&self) -> usize {
        match self {
            Baseline::Sqlite(baseline) => baseline.remaining(),
            Baseline::Postgres(baseline) => baseline.remaining(),
        }
    }

    /// Runs up to `transactions` transactions within `limit`. Returns operations and time.
    ///
    /// # Errors
    /// The store rejects a row.
    pub async fn run(
        &mut self,
        transactions: usize,
        limit: Duration,
    ) -> anyhow::Result<(f64, Duration)> {
        match self {
            Baseline::Sqlite(baseline) => baseline.run(transactions, limit),
            Baseline::Postgres(baseline) => baseline.run(transactions, limit).await,
        }
    }
}

fn copy_file(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    let file = "ledger.sqlite";
    std::fs::copy(from.join(file), to.join(file)).context("cannot copy the seeded ledger")?;
    Ok(())
}
