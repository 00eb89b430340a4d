//! CFA lifecycle service: issues, redeems and transfers digital financial assets on the chain, and
//! keeps the list of instruments and the registry of holders.
//!
//! | module | content |
//! |---|---|
//! | `saga`, `plan`, `placement`, `extract`, `model` | the rules as pure functions and types |
//! | `anchor` | signed ends of the hash chains of the ledger and of all audit records, pure |
//! | `compare` | when a difference between chain and ledger is a break, pure |
//! | `service` | the use cases: execute the saga's steps and store the results |
//! | `peers` | calls to other services |
//! | `api` | the RPC service, HTTP reads, consumed and published events |
//! | `repo` | SQL |
//! | `signing` | keys and certificates for documents, verification of signatures |
//! | `failpoint` | places where tests kill the process |
//!
//! Chain actions go through [`chain::Connector`], in that crate's types.
//!
//! Architecture invariants:
//!
//! - The ledger reserves or posts money and units before the chain moves them, and finalizes them
//!   after. Only the mint of a deposit comes first: the ledger posts it from this service's events.
//! - A chain submission is stored before it is sent, under a key derived from its operation.
//! - An operation that counts against a day limit reserves the limit before its chain submission.
//! - A state commits with its events in one transaction.

pub mod anchor;
mod api;
mod compare;
pub mod error;
mod extract;
pub mod failpoint;
pub mod model;
mod peers;
pub mod placement;
pub mod plan;
mod repo;
pub mod saga;
mod service;
mod signing;

use futures::future::BoxFuture;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use error::Error;
pub use repo::{OperationRecord, OperationRecords};
pub use service_clients::AuditedService;
pub use service_kit::Clock;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CfaConfig {
    pub data_dir: PathBuf,
    /// Pause between two sweeps over open operations.
    pub sweep_interval_ms: u64,
    /// Attempts of a chain submission that the node refuses before its operation ends: FAILED, a
    /// deposit REJECTED. Also the limit of reverted deployments of a token, and the number of
    /// refused releases after which health reports a payout.
    pub submit_attempts_max: u32,
    /// Limit of trades per batch, at least `BATCH_TRADES`.
    pub batch_trades_max: usize,
    /// Pause between two rounds of the comparison of chain and ledger.
    pub compare_interval_ms: u64,
    /// How long a difference between chain and ledger may last, out of flight, before it is a
    /// break.
    pub compare_window_ms: u64,
    /// Interval of the anchors of the ledger and of all audit records on the chain. 0: none.
    pub anchor_interval_s: u64,
    /// Certificates of the authorities (PEM) that issue the issuers' certificates. `None`: no issue
    /// decision can be signed. The sandbox has its own.
    pub ca_file: Option<PathBuf>,
    /// Program and arguments of the software that verifies the signatures of issue decisions, for
    /// example for GOST R 34.10. Empty: the platform verifies ECDSA P-256 and RSA itself. The
    /// arguments `{content}`, `{signature}`, `{certificate}` and `{ca}`, each needed, are replaced
    /// by names of files: what was signed, the signature (DER), the signer's certificate (PEM) and
    /// `ca_file`. Exit status 0: valid; 126 and 127: it cannot run.
    pub signature_command: Vec<String>,
    /// Time after which the command is killed, at most 7,000.
    pub signature_timeout_ms: u64,
    /// The operator's key (PKCS#8, DER) for extracts from the register. `None`: none can be made.
    pub extract_key_file: Option<PathBuf>,
    /// The certificate (DER) of that key.
    pub extract_certificate_file: Option<PathBuf>,
}

/// Largest batch that settlement sends.
const BATCH_TRADES: usize = 500;

impl Default for CfaConfig {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data/cfa"),
            sweep_interval_ms: 1_000,
            submit_attempts_max: 60,
            batch_trades_max: BATCH_TRADES,
            compare_interval_ms: 1_000,
            compare_window_ms: 60_000,
            anchor_interval_s: 24 * 3_600,
            ca_file: None,
            signature_command: Vec::new(),
            signature_timeout_ms: 5_000,
            extract_key_file: None,
            extract_certificate_file: None,
        }
    }
}

/// Dependencies of the service. The channels need the role `service`.
pub struct CfaDeps {
    pub log: Arc<dyn events::Log>,
    pub ledger: rpc::Channel,
    pub payments: rpc::Channel,
    pub identity: rpc::Channel,
    /// May start later than this service.
    pub market: rpc::Channel,
    /// Services whose audit records are anchored with those of the ledger and this service. They
    /// may start later.
    pub audited: Vec<(AuditedService, rpc::Channel)>,
    pub chain: chain::Connector,
    pub clock: Clock,
}

pub struct CfaHandle {
    service: Arc<service::Service>,
    health: rpc::Health,
    tasks: TaskTracker,
}

/// The store, with the tables whose rows have seals.
pub fn sealed_store(config: &CfaConfig) -> events::SealedStore {
    events::SealedStore {
        name: "cfa",
        path: config.data_dir.join("cfa.sqlite"),
        sealing: &repo::SEALING,
    }
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`events::Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(config: &CfaConfig) -> Result<events::audit::Verified, events::Error> {
    events::audit::verify(&sealed_store(config).path, peers::SOURCE).await
}

/// Opens the store, deploys the platform's contracts on the first start, and starts consumers,
/// relay and sweeps. Calls no other service before it returns. Stops when `shutdown` is cancelled.
pub fn start(
    config: CfaConfig,
    deps: CfaDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<CfaHandle, Error>> {
    Box::pin(async move {
        if config.batch_trades_max < BATCH_TRADES {
            return Err(Error::Config(format!(
                "cfa.batch_trades_max must be at least {BATCH_TRADES}, the largest batch of settlement"
            )));
        }
        let health = rpc::Health::new("cfa");
        let signing = signing::Signing::open(&config, &health)?;
        let repo = repo::Repo::open(&sealed_store(&config).path).await?;
        let contracts = service::bootstrap::contracts(&repo, &deps.chain).await?;
        service::bootstrap::money_instrument(&repo, &contracts, service_kit::clock::now_us())
            .await?;
        let peers = peers::Peers::new(
            deps.ledger,
            deps.payments,
            deps.identity,
            deps.market,
            deps.audited,
        );
        let db = repo.db();
        let service = Arc::new(service::Service::new(
            repo,
            deps.chain,
            peers,
            contracts,
            deps.clock,
            config,
            signing,
            health.clone(),
        ));
        service.load_breaks().await?;
        let anchor_key = anchor::Key::load_or_create(&service.config.data_dir)?;
        let tasks = TaskTracker::new();
        tasks.spawn(service::compare::run(service.clone(), shutdown.clone()));
        let anchoring = service::anchor::run(service.clone(), anchor_key, shutdown.clone());
        tasks.spawn(anchoring);
        tasks.spawn(events::outbox::Relay::run(
            db,
            deps.log.clone(),
            shutdown.clone(),
        ));
        api::consumers::spawn(&service, &deps.log, &tasks, &shutdown);
        tasks.spawn(api::consumers::report_consumer_health(
            deps.log,
            health.clone(),
            shutdown.clone(),
        ));
        tasks.spawn(service::workers::follow_chain(
            service.clone(),
            shutdown.clone(),
        ));
        tasks.spawn(service::workers::sweep(
            service.clone(),
            health.clone(),
            shutdown,
        ));
        tasks.close();
        Ok(CfaHandle {
            service,
            health,
            tasks,
        })
    })
}

impl CfaHandle {
    /// `CfaRegistryService` and its HTTP reads, served under the name `cfa`.
    pub fn service(&self) -> rpc::Service {
        api::service(self.service.clone(), self.health.clone())
    }

    /// Runs one sweep over all open operations. For tests and for the sandbox's clock.
    pub async fn sweep(&self) -> Result<(), Error> {
        self.service.sweep_once(true, true).await
    }

    /// Waits for all tasks to end after shutdown.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.tasks.wait().await;
        })
    }
}
