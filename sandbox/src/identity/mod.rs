//! Sandbox identity (specification 4.1, D33, D44, F35): profiles, KYC, limits, sanctions, blocks.
//!
//! | module | content |
//! |---|---|
//! | `rules` | the pure core: results of checks |
//! | `repo` | the store |
//! | `api` | `IdentityService` and the HTTP reads |
//! | `api/records` | audit records of changes of users |
//! | `api/reservations` | amounts reserved for operations |
//! | `api/uses` | limit use without a reservation, counted from the platform's events |
//! | `publish` | events about users |

mod api;
mod publish;
mod repo;
mod rules;

use futures::future::BoxFuture;
use std::{path::PathBuf, sync::Arc};

use proto::identity::v1::identity_service_server::IdentityServiceServer;
use serde::{Deserialize, Serialize};
use service_kit::Clock;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::Instrument;

pub use rules::TradingBasis;

/// Settings of identity. Limits are roubles as decimal text, per day (D33) or per year.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdentityConfig {
    /// Folder of `identity.db`.
    pub data_dir: PathBuf,
    pub deposit_daily: String,
    pub withdrawal_daily: String,
    pub trading_daily: String,
    /// Purchases of investment CFAs per calendar year by a user who is not a qualified investor
    /// (F35). The default is that of the law.
    pub investment_yearly: String,
    /// Which amount counts against the trading limit: quantity (the specification's wording) or
    /// value (T23).
    pub trading_limit_basis: TradingBasis,
}

impl Default for IdentityConfig {
    fn default() -> Self {
        IdentityConfig {
            data_dir: "data/identity".into(),
            deposit_daily: "600000".into(),
            withdrawal_daily: "600000".into(),
            trading_daily: "5000000".into(),
            investment_yearly: "600000".into(),
            trading_limit_basis: TradingBasis::Quantity,
        }
    }
}

/// Dependencies of identity.
pub struct IdentityDeps {
    pub log: Arc<dyn events::Log>,
}

/// Why identity cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("identity store: {0}")]
    Store(#[from] events::Error),
    #[error("identity setting {setting}: `{value}` is not an amount")]
    Setting {
        setting: &'static str,
        value: String,
    },
}

fn file(config: &IdentityConfig) -> PathBuf {
    config.data_dir.join("identity.db")
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`events::Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(
    config: &IdentityConfig,
) -> Result<events::audit::Verified, events::Error> {
    events::audit::verify(&file(config), api::SOURCE).await
}

/// The running service.
pub struct IdentityHandle {
    api: api::Api,
    workers: JoinSet<()>,
    relay: JoinSet<()>,
    relay_shutdown: CancellationToken,
}

/// The store, all of whose rows have seals.
pub fn sealed_store(config: &IdentityConfig) -> events::SealedStore {
    events::SealedStore {
        name: "identity",
        path: file(config),
        sealing: &events::Sealing::ALL,
    }
}

/// Opens the store and starts counting limit use. Stops when `shutdown` is cancelled.
///
/// # Errors
/// [`Error`].
pub fn start(
    config: IdentityConfig,
    deps: IdentityDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<IdentityHandle, Error>> {
    start_with_clock(config, deps, Clock::System, shutdown)
}

/// Like [`start`], with another clock, which determines the day of each limit.
///
/// # Errors
/// As [`start`].
pub fn start_with_clock(
    config: IdentityConfig,
    deps: IdentityDeps,
    clock: Clock,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<IdentityHandle, Error>> {
    Box::pin(async move {
        let defaults = rules::Defaults::read(&config)?;
        let store = sealed_store(&config);
        let opened = events::Sqlite::open_sealed(store.path, &repo::MIGRATOR, store.sealing);
        let db = opened.await?;
        let api = api::Api::new(db.clone(), defaults, config.trading_limit_basis, clock);
        let span = || tracing::info_span!("worker", service_name = "identity");
        let basis = config.trading_limit_basis;
        let mut workers = JoinSet::new();
        workers.spawn(
            api::uses::run(db.clone(), deps.log.clone(), basis, shutdown).instrument(span()),
        );
        let relay_shutdown = CancellationToken::new();
        let mut relay = JoinSet::new();
        relay.spawn(
            events::outbox::Relay::run(db, deps.log, relay_shutdown.clone()).instrument(span()),
        );
        Ok(IdentityHandle {
            api,
            workers,
            relay,
            relay_shutdown,
        })
    })
}

impl IdentityHandle {
    /// RPC and HTTP of the service.
    pub fn service(&self) -> rpc::Service {
        let server = IdentityServiceServer::new(self.api.clone());
        rpc::Service {
            name: "identity",
            routes: Routes::new(rpc::grpc_server!(server)),
            http: self.api.http(),
            health: self.api.health(),
        }
    }

    /// Waits for the workers to end, publishes the rest of the outbox and closes the store.
    pub fn stopped(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            while self.workers.join_next().await.is_some() {}
            self.relay_shutdown.cancel();
            while self.relay.join_next().await.is_some() {}
            self.api.close().await;
        })
    }
}
