//! Sandbox bank and fast-payment system (specification 2.4).
//!
//! A plain HTTP server of the contract in `rail`, an account whose balance survives a `kill -9`,
//! and injectable faults.
//!
//! | module | content |
//! |---|---|
//! | `operations` | `Bank`: codes, payments, transfers, clearing |
//! | `repo` | the store |
//! | `http` | the bank's contract; verifies the gateway's signatures (R021) |
//! | `workers` | clearing, and signed webhooks with retries |
//! | `api` | `SandboxBankService`: simulates payers, injects faults, reads the state |
//! | `ca` | the certificate authority: banks issue their clients' certificates |

mod api;
mod ca;
mod http;
mod operations;
mod repo;
mod workers;

use futures::{FutureExt, future::BoxFuture};
use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

pub use ca::{Ca, CaError};
use proto::sandbox::v1::sandbox_bank_service_server::SandboxBankServiceServer;
use rail::{account, keys, purpose_code::Requisites};
use serde::{Deserialize, Serialize};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::Instrument;

/// Settings of the bank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BankConfig {
    /// Folder of `bank.db`.
    pub data_dir: PathBuf,
    /// Folder of the keys shared with the gateway, and of the certificate authority.
    pub keys_dir: PathBuf,
    /// Listening address; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Target of the webhooks.
    pub webhook_url: String,
    /// The platform's account at this bank.
    pub account_number: String,
    pub initial_balance_kopecks: i64,
    /// Member id in payment links, 12 digits.
    pub member_id: String,
    /// Check the control key of recipient accounts.
    pub control_key_check: bool,
    /// Delay before the first retry of a webhook; then it doubles.
    pub webhook_pause_first_ms: u64,
    /// Longest delay between two attempts of a webhook.
    pub webhook_pause_most_ms: u64,
    pub webhook_attempts_max: u32,
}

impl Default for BankConfig {
    fn default() -> Self {
        BankConfig {
            data_dir: "data/bank".into(),
            keys_dir: "data/keys".into(),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8086)),
            webhook_url: "http://127.0.0.1:8083/webhook".into(),
            account_number: Requisites::default().account_number,
            initial_balance_kopecks: 0,
            member_id: format!("100000000{}", &account::BIC[6..]),
            control_key_check: true,
            webhook_pause_first_ms: 500,
            webhook_pause_most_ms: 300_000,
            webhook_attempts_max: 20,
        }
    }
}

/// Why the bank cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("bank store: {0}")]
    Store(#[from] events::Error),
    #[error("bank store: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("bank keys: {0}")]
    Keys(#[from] keys::KeysError),
    #[error("bank: {0}")]
    Ca(#[from] CaError),
    #[error("bank cannot listen on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("bank's webhook client: {0}")]
    Client(#[from] reqwest::Error),
}

/// Maximum connections of the bank, from the platform's reserve of file descriptors.
const CONNECTIONS: usize = 64;

/// The running bank.
pub struct BankHandle {
    bank: Arc<operations::Bank>,
    ca: Arc<Ca>,
    address: SocketAddr,
    tasks: JoinSet<()>,
}

/// Opens the store, listens, clears transfers and sends webhooks, until `shutdown` is cancelled.
///
/// # Errors
/// [`Error`].
pub fn start(
    config: BankConfig,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<BankHandle, Error>> {
    // Separate from the platform's limits, so that the payment service reaches the bank while the
    // platform's ports are full.
    let limits = rpc::Limits {
        connections: rpc::ConnectionBudget::with_limits(CONNECTIONS, CONNECTIONS, CONNECTIONS),
        ..rpc::Limits::default()
    };
    start_within(config, limits, shutdown)
}

/// Like [`start`], with other port limits.
///
/// # Errors
/// As [`start`].
pub fn start_within(
    config: BankConfig,
    limits: rpc::Limits,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<BankHandle, Error>> {
    Box::pin(async move {
        let (gateway_key, secrets) = keys::load_bank_keys(&config.keys_dir)?;
        let ca = Arc::new(Ca::open(&config.keys_dir)?);
        let db = events::Sqlite::open(config.data_dir.join("bank.db"), &repo::MIGRATOR).await?;
        let listen_error = |source| Error::Listen {
            address: config.listen,
            source,
        };
        let listener = TcpListener::bind(config.listen)
            .await
            .map_err(listen_error)?;
        let address = listener.local_addr().map_err(listen_error)?;
        let webhook_sender = workers::WebhookSender::new(&config, secrets)?;
        let bank = Arc::new(operations::Bank::open(config, db).await?);

        let mut tasks = JoinSet::new();
        let span = || tracing::info_span!("worker", service_name = "bank");
        let http_state = http::HttpState {
            bank: bank.clone(),
            gateway_key: gateway_key.into(),
        };
        tasks.spawn(
            http::serve(listener, http_state, limits, shutdown.clone())
                .instrument(span())
                .boxed(),
        );
        tasks.spawn(
            workers::run_clearing(bank.clone(), shutdown.clone())
                .instrument(span())
                .boxed(),
        );
        tasks.spawn(
            webhook_sender
                .run(bank.clone(), shutdown)
                .instrument(span())
                .boxed(),
        );
        Ok(BankHandle {
            bank,
            ca,
            address,
            tasks,
        })
    })
}

impl BankHandle {
    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `SandboxBankService`. The bank's own contract is served only on [`BankHandle::address`].
    pub fn service(&self) -> rpc::Service {
        let server = SandboxBankServiceServer::new(api::Api {
            bank: self.bank.clone(),
            ca: self.ca.clone(),
        });
        rpc::Service {
            name: "sandbox",
            routes: Routes::new(rpc::grpc_server!(server)),
            http: axum::Router::new(),
            health: self.bank.health.clone(),
        }
    }

    /// Waits for all tasks to end and closes the store.
    pub fn stopped(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            while self.tasks.join_next().await.is_some() {}
            self.bank.db.close().await;
        })
    }
}
