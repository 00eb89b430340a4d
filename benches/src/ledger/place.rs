//! Location of a benchmark ledger: a folder with its SQLite file, or a folder for its event log and
//! a PostgreSQL database.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::{
    bare,
    capture::{self, Captured},
    flow::Ask,
    node::Node,
    postgres::{self, Database},
};

pub struct Place {
    pub folder: PathBuf,
    database: Option<Database>,
}

impl Place {
    /// An empty ledger. `server`: a URL of PostgreSQL; none: SQLite.
    ///
    /// # Errors
    /// The server cannot create a database.
    pub async fn new(folder: PathBuf, server: Option<&str>, name: &str) -> anyhow::Result<Self> {
        let database = match server {
            Some(server) => Some(Database::create(server, name, None).await?),
            None => None,
        };
        Ok(Self { folder, database })
    }

    /// A copy of a closed ledger.
    ///
    /// # Errors
    /// The copy fails.
    pub async fn copy(
        &self,
        folder: PathBuf,
        server: Option<&str>,
        name: &str,
    ) -> anyhow::Result<Self> {
        let database = match (&self.database, server) {
            (Some(of), Some(server)) => Some(Database::create(server, name, Some(of)).await?),
            _ => {
                copy_file(&self.folder, &folder)?;
                None
            }
        };
        Ok(Self { folder, database })
    }

    /// Starts a ledger at this location.
    ///
    /// # Errors
    /// Store or log cannot be opened.
    pub async fn start(&self) -> anyhow::Result<Node> {
        let url = self
            .database
            .as_ref()
            .map_or_else(String::new, Database::url);
        Node::start(&self.folder, &url).await
    }

    /// Runs a query for one number: the statement of either database.
    ///
    /// # Errors
    /// The query fails.
    pub async fn number(&self, sqlite: &str, postgres: &str) -> anyhow::Result<i64> {
        match &self.database {
            Some(database) => database.number(postgres).await,
            None => {
                let db = rusqlite::Connection::open(self.folder.join("ledger.sqlite"))?;
                db.busy_timeout(Duration::from_secs(5))?;
                Ok(db.query_row(sqlite, [], |row| row.get(0))?)
            }
        }
    }

    /// Waits until the relay has drained the outbox, at most `at_most`; returns the events left
    /// before and the time taken.
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

    /// Captures the rows that these requests write.
    ///
    /// # Errors
    /// The ledger refuses a request, or its rows cannot be read.
    pub async fn capture(&self, asks: Vec<Ask>, limit: Duration) -> anyhow::Result<Captured> {
        match &self.database {
            Some(database) => postgres::capture(database, &self.folder, asks, limit).await,
            None => capture::capture(&self.folder, asks, limit).await,
        }
    }

    /// Bare statements that write such rows, `merge` requests per transaction.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub async fn bare(&self, captured: Captured, merge: usize) -> anyhow::Result<Bare> {
        Ok(match &self.database {
            Some(database) => Bare::Postgres(postgres::Bare::new(database, captured, merge).await?),
            None => Bare::Sqlite(bare::Bare::new(&self.folder, captured, merge)?),
        })
    }

    /// Removes the server's database; the owner removes the folder.
    ///
    /// # Errors
    /// The server refuses.
    pub async fn drop(self) -> anyhow::Result<()> {
        match self.database {
            Some(database) => database.drop().await,
            None => Ok(()),
        }
    }
}

/// The floor of either store.
#[allow(clippy::large_enum_variant, reason = "only one instance exists")]
pub enum Bare {
    Sqlite(bare::Bare),
    Postgres(postgres::Bare),
}

impl Bare {
    /// Transactions not yet run.
    pub fn left(&self) -> usize {
        match self {
            Bare::Sqlite(bare) => bare.left(),
            Bare::Postgres(bare) => bare.left(),
        }
    }

    /// Runs this many transactions, or as many as `limit` allows; returns operations and time.
    ///
    /// # Errors
    /// The store rejects a row.
    pub async fn run(
        &mut self,
        transactions: usize,
        limit: Duration,
    ) -> anyhow::Result<(f64, Duration)> {
        match self {
            Bare::Sqlite(bare) => bare.run(transactions, limit),
            Bare::Postgres(bare) => bare.run(transactions, limit).await,
        }
    }
}

fn copy_file(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    let file = "ledger.sqlite";
    std::fs::copy(from.join(file), to.join(file)).context("the seeded ledger")?;
    Ok(())
}
