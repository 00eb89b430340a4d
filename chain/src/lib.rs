//! The chain: contracts, connector, development chain. The only crate that depends on alloy and
//! revm.
//!
//! | module | content |
//! |---|---|
//! | `address` | addresses and hashes as own types |
//! | `contracts` | actions on the chain and their call data |
//! | `connector` | access to any node: submissions, reads, watcher |
//! | `publish` | published events |
//! | `dev` | in-process development chain: EVM, blocks, JSON-RPC |
//! | `api` | `ChainConnectorService` and its HTTP reads |
//!
//! `start_chain` opens the embedded chain or a remote node (`rpc_url`). Only the transport differs.

mod address;
mod api;
pub mod connector;
pub mod contracts;
#[cfg(test)]
mod contracts_tests;
mod dev;
mod publish;

use futures::future::BoxFuture;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use alloy::rpc::client::RpcClient;
use alloy::signers::local::PrivateKeySigner;
use axum::http::HeaderValue;
use events::files;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use address::{Address, ParseHexError, TxHash, keccak256};
pub use api::{block_not_found, chain_status};
pub use connector::{
    BlockInfo, ChainError, Connector, FailedTrade, Receipt, ReceiptStatus, Submission,
    TokenTransfer,
};
pub use contracts::{Action, Contracts, Payout, Trade};
pub use dev::StoreError;

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/connector": "0001_connector");

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChainConfig {
    /// Folder of the development chain, the connector's store and the operator's key.
    pub data_dir: PathBuf,
    /// Chain id of every signed transaction. The start fails if the node has another id.
    pub chain_id: u64,
    /// A remote node (`http://` or `https://`); unset: the embedded development chain.
    pub rpc_url: Option<String>,
    /// File with the operator's private key (hex). Unset: `operator.key` in `data_dir`, created on
    /// first start.
    pub operator_key_file: Option<PathBuf>,
    /// Development chain: minimum time between two blocks.
    pub seal_interval_ms: u64,
    /// Development chain: origins (`http://localhost:3000`) whose browser pages may read the
    /// JSON-RPC port. None by default: programs and wallet extensions need none.
    pub rpc_cors_origins: Vec<String>,
    /// Remote node: polling interval for new blocks.
    pub poll_interval_ms: u64,
    /// Remote node: deadline of one request.
    pub request_timeout_ms: u64,
    /// Number of later blocks that a block needs before it is read. Zero on a chain with immediate
    /// finality.
    pub confirmations: u64,
}

impl Default for ChainConfig {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data/chain"),
            chain_id: 31_337,
            rpc_url: None,
            operator_key_file: None,
            seal_interval_ms: 50,
            rpc_cors_origins: Vec::new(),
            poll_interval_ms: 500,
            request_timeout_ms: 10_000,
            confirmations: 0,
        }
    }
}

pub struct ChainDeps {
    pub log: Arc<dyn events::Log>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    DevChain(#[from] StoreError),
    #[error("chain folder: {0}")]
    Io(#[from] std::io::Error),
    #[error("operator key file {0} contains no private key")]
    Key(PathBuf),
    #[error("chain.rpc_url: {0}")]
    Url(String),
    #[error("chain.rpc_cors_origins: {0} is not an origin of the form http://host:port")]
    Origin(String),
    #[error("connector store: {0}")]
    Store(#[from] events::Error),
}

pub struct ChainHandle {
    connector: Connector,
    dev: Option<dev::DevChain>,
    cors_origins: Vec<HeaderValue>,
    health: rpc::Health,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

/// Opens the chain, loads the next nonce, and starts the watcher and the outbox relay. All tasks
/// stop on `shutdown`.
pub fn start_chain(
    config: ChainConfig,
    deps: ChainDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<ChainHandle, StartError>> {
    Box::pin(async move {
        let cors_origins = cors_origins(&config.rpc_cors_origins)?;
        std::fs::create_dir_all(&config.data_dir)?;
        let key_file = config
            .operator_key_file
            .clone()
            .unwrap_or_else(|| config.data_dir.join("operator.key"));
        let signer = load_or_create_key(&key_file)?;
        let tasks = TaskTracker::new();
        let health = rpc::Health::new("chain");
        let (client, dev) = match &config.rpc_url {
            Some(url) => (
                remote(url, Duration::from_millis(config.request_timeout_ms))?,
                None,
            ),
            None => {
                let dev_config = dev::DevChainConfig {
                    data_dir: config.data_dir.clone(),
                    chain_id: config.chain_id,
                    seal_interval: Duration::from_millis(config.seal_interval_ms),
                    funded: vec![signer.address()],
                };
                let (chain, sealer) = dev::DevChain::start(dev_config, shutdown.clone()).await?;
                tasks.spawn(async move {
                    if let Err(error) = sealer.await {
                        tracing::error!(%error, "sealer of the development chain panicked");
                    }
                });
                (RpcClient::new(chain.clone(), true), Some(chain))
            }
        };
        let db = events::sqlite::Sqlite::open(config.data_dir.join("connector.sqlite"), &MIGRATOR)
            .await?;
        let connector = Connector::connect(client, config.chain_id, signer, db.clone()).await?;
        let watcher = connector::Watcher {
            connector: connector.clone(),
            confirmations: config.confirmations,
            poll_interval: Duration::from_millis(config.poll_interval_ms),
            head: dev.as_ref().map(dev::DevChain::head),
        };
        tasks.spawn(watcher.run(health.clone(), shutdown.clone()));
        tasks.spawn(events::outbox::Relay::run(db, deps.log, shutdown.clone()));
        tasks.close();
        Ok(ChainHandle {
            connector,
            dev,
            cors_origins,
            health,
            tasks,
            shutdown,
        })
    })
}

impl ChainHandle {
    /// The connector, for services of this process.
    pub fn connector(&self) -> Connector {
        self.connector.clone()
    }

    /// `ChainConnectorService` and its HTTP reads, served under the name `chain`.
    pub fn service(&self) -> rpc::Service {
        api::service(self.connector.clone(), self.health.clone())
    }

    /// Serves the development chain's JSON-RPC until shutdown. Does nothing with a remote node.
    pub fn serve_json_rpc(&self, listener: TcpListener) {
        self.serve_json_rpc_within(listener, rpc::Limits::default());
    }

    /// Like [`Self::serve_json_rpc`], with other limits.
    pub fn serve_json_rpc_within(&self, listener: TcpListener, limits: rpc::Limits) {
        if let Some(dev) = &self.dev {
            let (origins, shutdown) = (self.cors_origins.clone(), self.shutdown.clone());
            let serving = dev::http::serve(dev.clone(), listener, origins, limits, shutdown);
            self.tasks.spawn(async move {
                if let Err(error) = serving.await {
                    tracing::error!(%error, "JSON-RPC server failed");
                }
            });
        }
    }

    /// Waits for all tasks to end after shutdown.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.tasks.wait().await;
        })
    }
}

fn remote(url: &str, timeout: Duration) -> Result<RpcClient, StartError> {
    let parsed = url
        .parse::<reqwest::Url>()
        .map_err(|error| StartError::Url(error.to_string()))?;
    let client = reqwest::Client::builder()
        .timeout(timeout)
        .build()
        .map_err(|error| StartError::Url(error.to_string()))?;
    let is_local = matches!(parsed.host_str(), Some("127.0.0.1" | "localhost" | "[::1]"));
    Ok(RpcClient::new(
        alloy::transports::http::Http::with_client(client, parsed),
        is_local,
    ))
}

/// Parses origins. Browsers compare origins as text, so only the canonical form is accepted.
fn cors_origins(texts: &[String]) -> Result<Vec<HeaderValue>, StartError> {
    let origin = |text: &String| {
        let url = text.parse::<reqwest::Url>().ok();
        url.filter(|url| url.origin().ascii_serialization() == *text)
            .and_then(|_| HeaderValue::from_str(text).ok())
            .ok_or_else(|| StartError::Origin(text.clone()))
    };
    texts.iter().map(origin).collect()
}

fn load_or_create_key(path: &Path) -> Result<PrivateKeySigner, StartError> {
    let bytes = files::read_or_create(path, files::PRIVATE, || {
        let key = PrivateKeySigner::random().to_bytes();
        Ok::<_, StartError>(format!("0x{}\n", hex::encode(key)).into_bytes())
    })?;
    let text = String::from_utf8_lossy(&bytes);
    let key = text.trim().parse();
    key.map_err(|_| StartError::Key(path.to_owned()))
}
