//! Files of a platform: copies, used bytes, figures of its stores.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rusqlite::Connection;

/// A SQLite store of a platform.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    pub name: &'static str,
    pub file: &'static str,
    /// Whether bare statements write its rows. The chain's are in the floor of the chain, and the
    /// event log is no step of settlement.
    pub is_in_floor: bool,
}

const fn store(name: &'static str, file: &'static str, is_in_floor: bool) -> Store {
    Store {
        name,
        file,
        is_in_floor,
    }
}

/// The stores that settling a trade writes.
pub const STORES: [Store; 6] = [
    store("settlement", "settlement/settlement.db", true),
    store("ledger", "ledger/ledger.sqlite", true),
    store("cfa", "cfa/cfa.sqlite", true),
    store("connector", "chain/connector.sqlite", false),
    store("chain", "chain/chain.sqlite", false),
    store("events", "events/log.db", false),
];

/// Without a commit for so long, relays and consumers are idle.
const QUIET: Duration = Duration::from_millis(300);
const QUIET_MAX: Duration = Duration::from_secs(120);

/// Opens a store of a platform, which may run.
///
/// # Errors
/// The file is missing.
pub fn open(folder: &Path, store: &Store) -> anyhow::Result<Connection> {
    let path = folder.join(store.file);
    anyhow::ensure!(path.exists(), "{} is missing", path.display());
    let db = Connection::open(path)?;
    db.busy_timeout(Duration::from_secs(30))?;
    Ok(db)
}

/// Copies the folder of a stopped platform.
///
/// # Errors
/// A file cannot be copied.
pub fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => {
                let copied = std::fs::copy(entry.path(), &target);
                copied.with_context(|| format!("copy of {}", entry.path().display()))?;
            }
        }
    }
    Ok(())
}

/// Used bytes of each store, without free pages.
///
/// # Errors
/// A store cannot be read.
pub fn used_bytes(folder: &Path) -> anyhow::Result<Vec<(&'static str, i64)>> {
    let used = STORES.iter().map(|store| {
        let sql = "SELECT (page_count - freelist_count) * page_size \
             FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        let bytes: i64 = open(folder, store)?.query_row(sql, [], |row| row.get(0))?;
        Ok::<_, anyhow::Error>((store.name, bytes))
    });
    used.collect()
}

/// Figures of a platform's stores.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    pub ledger_operations: i64,
    pub chain_txs: i64,
    /// Trades and gas of these transactions.
    pub trades: i64,
    pub gas: i64,
}

/// # Errors
/// A store cannot be read.
pub fn figures(folder: &Path) -> anyhow::Result<Figures> {
    let db = |name: &str| {
        let store = STORES.iter().find(|store| store.name == name);
        open(folder, store.context("a known store")?)
    };
    let sql = "SELECT COUNT(*), COALESCE(SUM(trades), 0), COALESCE(SUM(gas_used), 0) \
         FROM batch WHERE status = 2";
    let (chain_txs, trades, gas) =
        db("cfa")?.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    let sql = "SELECT COUNT(*) FROM operations";
    Ok(Figures {
        ledger_operations: db("ledger")?.query_row(sql, [], |row| row.get(0))?,
        chain_txs,
        trades,
        gas,
    })
}

/// Waits until no store is written any more. Returns the time until the last commit.
///
/// # Errors
/// A store cannot be read, or is still written after two minutes.
pub async fn quiet(folder: &Path) -> anyhow::Result<Duration> {
    let folder: PathBuf = folder.to_owned();
    let waiting = tokio::task::spawn_blocking(move || {
        let stores = STORES.iter().map(|store| open(&folder, store));
        let stores = stores.collect::<anyhow::Result<Vec<Connection>>>()?;
        let began = Instant::now();
        let mut last = (Vec::new(), began);
        while last.1.elapsed() < QUIET {
            anyhow::ensure!(began.elapsed() < QUIET_MAX, "the stores are still written");
            let versions = stores.iter().map(data_version);
            let versions = versions.collect::<rusqlite::Result<Vec<i64>>>()?;
            if versions != last.0 {
                last = (versions, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(last.1 - began)
    });
    waiting.await?
}

/// Changes with every commit of another connection.
pub(super) fn data_version(db: &Connection) -> rusqlite::Result<i64> {
    let mut statement = db.prepare_cached("PRAGMA data_version")?;
    statement.query_row([], |row| row.get(0))
}
