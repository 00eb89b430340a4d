//! Approvals: calls that one person requests and another person approves (D32, `design.md` 10).
//!
//! ```text
//! RequestApproval -> PENDING -> Approve -> APPROVED -> the call -> EXECUTED or FAILED
//!                       +-----> REJECTED or EXPIRED
//! ```
//!
//! | module | content |
//! |---|---|
//! | `model` | the pure core: life of an approval, who may decide |
//! | `repo` | the store, on SQLite or PostgreSQL: all SQL of this crate |
//! | `service` | use cases: request, approve, reject, make the call |
//! | `worker` | background work: expiry, repeated calls |
//! | `api` | RPC, the only module with generated messages |
//! | `audit` | audit records |
//! | `failpoint` | places where tests kill the process |
//!
//! Architecture invariants:
//! - The approver's hash covers the exact bytes that are sent.
//! - Requester and approver are two named persons; both have a role for the method.
//! - The approval id is the idempotency key of the call, so a repeat after a crash acts once.
//! - Every change commits with its audit record in one transaction.

mod api;
mod audit;
mod config;
pub mod failpoint;
mod model;
mod repo;
mod service;
mod worker;

use std::{collections::HashMap, sync::Arc};

use futures::{FutureExt, future::BoxFuture};
use proto::approvals::v1::approval_service_server::ApprovalServiceServer;
use service_kit::Clock;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::Instrument;

pub use config::ApprovalsConfig;

use api::Api;
use repo::Store;
use service::Approvals;

/// Name of the service in logs, health and records.
const SOURCE: &str = "approvals";

/// Dependencies of the service.
pub struct ApprovalsDeps {
    pub log: Arc<dyn events::Log>,
    /// Services whose calls it makes, with its own credential, by the area of their package:
    /// `ledger` of `dfa.ledger.v1`.
    pub services: HashMap<&'static str, rpc::Channel>,
    pub clock: Clock,
}

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("approvals store: {0}")]
    Store(#[from] events::Error),
    #[error("approvals url {0}: must be empty (SQLite) or begin with postgres://")]
    Url(events::StoreUrl),
}

/// The running service.
pub struct ApprovalsHandle {
    approvals: Arc<Approvals>,
    workers: JoinSet<()>,
    relay: JoinSet<()>,
    relay_shutdown: CancellationToken,
}

/// The store on SQLite, all of whose rows have seals.
pub fn sealed_store(config: &ApprovalsConfig) -> events::SealedStore {
    events::SealedStore {
        name: SOURCE,
        path: config.data_dir.join("approvals.db"),
        sealing: &events::Sealing::ALL,
    }
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(config: &ApprovalsConfig) -> Result<events::audit::Verified, Error> {
    repo::verify_audit(config).await
}

/// Opens the store and starts the worker, which ends when `shutdown` is cancelled.
///
/// # Errors
/// [`Error`].
pub fn start(
    config: ApprovalsConfig,
    deps: ApprovalsDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<ApprovalsHandle, Error>> {
    Box::pin(async move {
        let store = Store::open(&config).await?;
        let relay_shutdown = CancellationToken::new();
        let span = || tracing::info_span!("worker", service_name = SOURCE);
        let mut relay = JoinSet::new();
        relay.spawn(
            store
                .clone()
                .relay(deps.log, relay_shutdown.clone())
                .instrument(span()),
        );
        let approvals = Approvals::new(config, store, deps.services, deps.clock, shutdown.clone());
        let approvals = Arc::new(approvals);
        let mut workers = JoinSet::new();
        workers.spawn(
            worker::run(approvals.clone(), shutdown)
                .instrument(span())
                .boxed(),
        );
        Ok(ApprovalsHandle {
            approvals,
            workers,
            relay,
            relay_shutdown,
        })
    })
}

impl ApprovalsHandle {
    /// RPC and HTTP of the service, for its server and its local slot.
    pub fn service(&self) -> rpc::Service {
        let server = ApprovalServiceServer::new(Api(self.approvals.clone()));
        rpc::Service {
            name: SOURCE,
            routes: Routes::new(rpc::grpc_server!(server)),
            http: api::http::router(self.approvals.clone()),
            health: self.approvals.health.clone(),
        }
    }

    /// Waits for the worker and the running calls to end after the shutdown passed to [`start`],
    /// publishes the rest of the outbox and closes the store. The next start repeats an unfinished
    /// call.
    pub fn stopped(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            while self.workers.join_next().await.is_some() {}
            self.approvals.calls_ended().await;
            self.relay_shutdown.cancel();
            while self.relay.join_next().await.is_some() {}
            self.approvals.store.close().await;
        })
    }
}
