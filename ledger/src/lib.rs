//! The ledger: accounts, operations with their postings, holds; exact double entry with an audit
//! chain (specification 1.4, 2.6, 3.3, 4.4).
//!
//! ```text
//! RPC, topics, events, sweeper -> Command -> committer -> load -> fold (pure)
//!     -> save + outbox, one transaction -> answers
//! reads see committed rows only
//! ```
//!
//! Architecture invariants:
//! - Money changes only in [`fold`], which uses no clock, file or wire format.
//! - Only [`committer`] writes.
//! - SQL is only in [`repo`], prost types only in `api` and `publish`.
//! - Per instrument the sum over all sub-accounts is always zero.

mod api;
mod audit;
mod book;
mod committer;
mod effects;
mod fold;
mod ids;
mod limit;
mod model;
mod names;
mod publish;
mod reconcile;
mod refusal;
mod repo;
mod soundness;
mod sweeper;
mod url;
mod verify;

use futures::{FutureExt, future::BoxFuture};
use std::{path::PathBuf, sync::Arc, time::Duration};

use proto::ledger::v1::ledger_service_server::LedgerServiceServer;
use serde::{Deserialize, Serialize};
use service_clients::CfaClient;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;

pub use api::topics::{
    CORRELATION as CORRELATION_HEADER, TOPICS as REQUEST_TOPICS, all as request_and_reply_topics,
};
pub use repo::sealed_store;
pub use service_kit::Clock;
pub use url::StoreUrl;
pub use verify::{Fault, Heads, ReferencedOperation, ReferencedOperations, Verified, verify};

use api::{Api, consumers, topics};
use committer::Committer;
use reconcile::Reconciler;
use repo::Store;
use sweeper::Sweeper;

/// Settings of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LedgerConfig {
    /// Folder of `ledger.sqlite`, when `url` is empty.
    pub data_dir: PathBuf,
    /// `postgres://user:password@host:5432/database`; empty: SQLite. Several ledgers may share one
    /// database if they also share the event log: each relays the events of all.
    pub url: StoreUrl,
    /// Interval of the sweep for expired holds, in milliseconds.
    pub hold_sweep_interval_ms: u64,
    /// How long a notice for an operation that does not exist yet is kept, in hours.
    pub parked_retention_h: u32,
    /// Delay from the event of a chain block to the search for its missed operations, in
    /// milliseconds.
    pub reconcile_after_ms: u64,
}

impl Default for LedgerConfig {
    fn default() -> Self {
        LedgerConfig {
            data_dir: PathBuf::from("data/ledger"),
            url: StoreUrl::default(),
            hold_sweep_interval_ms: 1_000,
            parked_retention_h: 72,
            reconcile_after_ms: 2_000,
        }
    }
}

/// External dependencies of the ledger.
#[derive(Clone)]
pub struct LedgerDeps {
    pub log: Arc<dyn events::Log>,
    /// The CFA service, called with a service credential for the contents of chain blocks.
    pub cfa: rpc::Channel,
    pub clock: Clock,
}

impl LedgerDeps {
    pub fn new(log: Arc<dyn events::Log>, cfa: rpc::Channel) -> Self {
        LedgerDeps {
            log,
            cfa,
            clock: Clock::System,
        }
    }
}

/// Operational failures of the ledger, as opposed to refusals.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("ledger store: {0}")]
    Store(#[from] sqlx::Error),
    #[error("ledger store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("ledger events: {0}")]
    Events(#[from] events::Error),
    #[error("ledger invariant violated: {0}")]
    Invariant(String),
    #[error("write not committed: {text}")]
    Commit { text: String, is_away: bool },
    #[error("serialization conflict: retries exhausted")]
    Conflict,
    #[error("store url {0}: must be empty (SQLite) or begin with postgres://")]
    Url(String),
    #[error("ledger is stopping")]
    Closed,
    #[error("there is no ledger in {}", .0.display())]
    NoLedger(PathBuf),
    #[error(
        "the ledger in {} was written by an older release: start this release on it once to migrate it",
        .0.display()
    )]
    OldSchema(PathBuf),
}

impl Error {
    /// True if the store is unavailable and the write may succeed later; false if it never can.
    fn is_away(&self) -> bool {
        match self {
            Error::Store(error) => events::is_away(error),
            Error::Sqlite(error) => events::sqlite::direct::is_away(error),
            Error::Events(error) => error.is_away(),
            Error::Invariant(_) | Error::Url(_) | Error::NoLedger(_) | Error::OldSchema(_) => false,
            Error::Conflict => true,
            Error::Commit { is_away, .. } => *is_away,
            Error::Closed => true,
        }
    }
}

/// Opens the store and spawns the committer, the outbox relay, the consumers, the reconciler and
/// the sweeper. All end when `shutdown` is cancelled.
///
/// # Errors
/// [`Error::Url`], [`Error::Invariant`]: the store has a wrong URL or no audit chain. Other errors:
/// the store cannot be opened, migrated or read.
pub fn start(
    config: LedgerConfig,
    deps: LedgerDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<LedgerHandle, Error>> {
    Box::pin(async move {
        let store = Store::open(&config).await?;
        metrics::gauge!("ledger_holds_total").set(store.holds_active().await? as f64);
        deps.clock.check_stored_us(store.last_sealed_us().await?);
        let health = rpc::Health::new("ledger");
        let tasks = TaskTracker::new();
        let (committer, writer) = Committer::spawn(
            store.clone(),
            deps.clock.clone(),
            health.clone(),
            shutdown.clone(),
        )?;
        let api = Arc::new(Api {
            store: store.clone(),
            committer: committer.clone(),
            clock: deps.clock.clone(),
        });
        let clock = show_clock(deps.clock.clone(), health.clone(), shutdown.clone());
        tasks.spawn(clock.boxed());
        let sweeper = Sweeper {
            store: store.clone(),
            committer: committer.clone(),
            clock: deps.clock,
            parked_retention_h: config.parked_retention_h,
        };
        let reconciler = Reconciler {
            cfa: CfaClient::new(deps.cfa, "ledger"),
            committer: committer.clone(),
            after: Duration::from_millis(config.reconcile_after_ms),
            shutdown: shutdown.clone(),
            open: Default::default(),
        };
        tasks.spawn(sweeper.clone().run(config, shutdown.clone()).boxed());
        let (log, relay_shutdown) = (deps.log.clone(), shutdown.clone());
        tasks.spawn(async move { store.relay(log, relay_shutdown).await }.boxed());
        consumers::spawn(&deps.log, &committer, &tasks, &shutdown);
        consumers::spawn_reconciler(deps.log.clone(), reconciler, &tasks, shutdown.clone());
        topics::spawn(&deps.log, &api, &tasks, &shutdown);
        tasks.spawn(show_events(deps.log, health.clone(), shutdown).boxed());
        tasks.close();
        Ok(LedgerHandle {
            api,
            sweeper,
            health,
            tasks,
            writer,
        })
    })
}

/// Reports failures of the event log in the ledger's health.
async fn show_events(log: Arc<dyn events::Log>, health: rpc::Health, shutdown: CancellationToken) {
    let set_health = |part: &str, reason: Option<&str>| health.set(part, reason);
    events::report_health(log, &consumers::GROUPS, set_health, shutdown).await;
}

/// Interval at which the clock's state is polled.
const CLOCK_EVERY: Duration = Duration::from_millis(250);

/// Reports an untrusted clock and its recovery in the ledger's health. Polls, because an idle
/// ledger does not read its clock.
async fn show_clock(clock: Clock, health: rpc::Health, shutdown: CancellationToken) {
    loop {
        health.set("clock", clock.state().operator_message().as_deref());
        tokio::select! {
            () = tokio::time::sleep(CLOCK_EVERY) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// A running ledger.
pub struct LedgerHandle {
    api: Arc<Api>,
    sweeper: Sweeper,
    health: rpc::Health,
    tasks: TaskTracker,
    writer: tokio::sync::oneshot::Receiver<()>,
}

impl LedgerHandle {
    /// The services: RPC, HTTP reads, health.
    pub fn service(&self) -> rpc::Service {
        rpc::Service {
            name: "ledger",
            routes: Routes::new(rpc::grpc_server!(LedgerServiceServer::from_arc(
                self.api.clone()
            ))),
            http: api::http::router(self.api.clone()),
            health: self.health.clone(),
        }
    }

    /// Expires all due holds. Returns how many were due.
    ///
    /// # Errors
    /// [`Error`] of the store.
    pub async fn sweep(&self) -> Result<usize, Error> {
        self.sweeper.sweep().await
    }

    /// Waits for all tasks to end and closes the store. Cancel the token given to [`start`] first.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.tasks.wait().await;
            if self.writer.await.is_err() {
                tracing::error!("ledger committer stopped by a failed assertion");
            }
            self.api.store.close().await;
        })
    }
}
