//! The chain: contracts, connector, development chain. The only crate that depends on alloy and
//! revm.
//!
//! | module | content |
//! |---|---|
//! | `address` | addresses and hashes as own types |
//! | `contracts` | actions on the chain and their call data |
//! | `connector` | access to any node: submissions, reads, watcher |
//! | `nodes` | HTTP transport to one or two remote nodes |
//! | `publish` | published events |
//! | `dev` | in-process development chain: EVM, blocks, JSON-RPC |
//! | `api` | `ChainConnectorService` and its HTTP reads |
//!
//! `start_chain` opens the embedded chain or a remote node (`rpc_url`). Only the transport differs.

mod address;
mod api;
pub mod connector;
pub mod contracts;
mod dev;
mod nodes;
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
    BlockInfo, ChainError, Connector, FailedTrade, HolderState, Receipt, ReceiptStatus, Submission,
    TokenCode, TokenRights, TokenTransfer, known_transactions,
};
pub use contracts::{Action, Contracts, Grant, Payout, RoleSet, Terms, Trade, Version};
pub use dev::bare::{BareChain, BareTransaction};
pub use dev::{StoreError, block_times};

static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> = events::migrations!(
    "migrations/connector": "0001_connector", "0002_attempts", "0003_final_attempts",
    "0004_call_digest"
);

/// Maximum of `confirmations`: so long a chain of block hashes is compared in a reorganisation.
const CONFIRMATIONS_MAX: u64 = 256;
const WEI_PER_GWEI: u128 = 1_000_000_000;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChainConfig {
    /// Folder of the development chain, the connector's store and the operator's key.
    pub data_dir: PathBuf,
    /// Chain id of every signed transaction. The start fails if the node has another id.
    pub chain_id: u64,
    /// A remote node (`http://` or `https://`); unset: the embedded development chain.
    pub rpc_url: Option<String>,
    /// A second node of the same chain, used while the first one does not answer.
    pub rpc_fallback_url: Option<String>,
    /// File with the value of the header `Authorization` for both nodes: `Bearer TOKEN` or
    /// `Basic BASE64`. Unset: no header.
    pub rpc_auth_file: Option<PathBuf>,
    /// File with the operator's private key (hex). Unset: `operator.key` in `data_dir`. A missing
    /// one is created for the embedded chain; with a remote node the start fails.
    pub operator_key_file: Option<PathBuf>,
    /// A remote signer with the method `eth_signTransaction` (Web3Signer) instead of a key file.
    /// Requires `operator_address`.
    pub remote_signer_url: Option<String>,
    /// Account that the remote signer signs for.
    pub operator_address: Option<String>,
    /// Owner of the contracts that are deployed from now on: the account that sets their roles. A
    /// cold or multi-signature account. Unset: the operator.
    pub owner_address: Option<String>,
    /// Development chain: minimum time between two blocks.
    pub seal_interval_ms: u64,
    /// Development chain: origins (`http://localhost:3000`) whose browser pages may read the
    /// JSON-RPC port. None by default: programs and wallet extensions need none.
    pub rpc_cors_origins: Vec<String>,
    /// Remote node: polling interval for new blocks.
    pub poll_interval_ms: u64,
    /// Remote node and remote signer: deadline of one request.
    pub request_timeout_ms: u64,
    /// Remote node: number of later blocks that make a block final, at most 256. A reorganisation
    /// within them is undone. Zero declares the chain immediately final: every reorganisation is
    /// then a break that stops the chain steps.
    pub confirmations: u64,
    /// Pause between two rounds over the transactions that are in no read block.
    pub resend_interval_ms: u64,
    /// Remote node: read blocks without a transaction after which it is replaced with a higher fee.
    /// 0: never.
    pub replace_after_blocks: u64,
    /// Limit of a transaction's fee, in gwei per gas.
    pub max_fee_per_gas_gwei: u64,
}

impl Default for ChainConfig {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data/chain"),
            chain_id: 31_337,
            rpc_url: None,
            rpc_fallback_url: None,
            rpc_auth_file: None,
            operator_key_file: None,
            remote_signer_url: None,
            operator_address: None,
            owner_address: None,
            seal_interval_ms: 50,
            rpc_cors_origins: Vec::new(),
            poll_interval_ms: 500,
            request_timeout_ms: 10_000,
            confirmations: 0,
            resend_interval_ms: 2_000,
            replace_after_blocks: 10,
            max_fee_per_gas_gwei: 500,
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
    #[error(
        "operator key file {0} is missing or empty, and a new key would own nothing on a remote \
         chain: write the private key of the platform's account into it (64 hex digits), set \
         chain.operator_key_file, or set chain.remote_signer_url and chain.operator_address"
    )]
    NoKey(PathBuf),
    /// Does not contain the URL, which may contain a password.
    #[error("chain.rpc_url, rpc_fallback_url or remote_signer_url: {0}")]
    Url(String),
    #[error("chain.rpc_auth_file {0} contains neither `Bearer TOKEN` nor `Basic BASE64`")]
    Authorization(PathBuf),
    #[error("configuration: {0}")]
    Setting(&'static str),
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

/// The connector's store, with the tables whose rows have seals.
pub fn sealed_store(config: &ChainConfig) -> events::SealedStore {
    const READ_BLOCK: &str = "hashes of read blocks, compared with the chain at each block";
    static SEALING: events::Sealing = events::Sealing {
        exempt: &[
            (
                "attempt",
                "signed transactions: a changed one is invalid, and its hash another",
            ),
            ("cursor", READ_BLOCK),
            ("unconfirmed", READ_BLOCK),
        ],
        partly: &[],
        columns: &[],
        summed: &[("submission", "one per batch of trades")],
    };
    events::SealedStore {
        name: "chain",
        path: config.data_dir.join("connector.sqlite"),
        sealing: &SEALING,
    }
}

/// Opens the chain, loads the next nonce, and starts the watcher, the upkeep of transactions and
/// the outbox relay. All tasks stop on `shutdown`.
pub fn start_chain(
    config: ChainConfig,
    deps: ChainDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<ChainHandle, StartError>> {
    Box::pin(async move {
        let cors_origins = cors_origins(&config.rpc_cors_origins)?;
        check(&config)?;
        std::fs::create_dir_all(&config.data_dir)?;
        let (signer, key_name) = signer(&config)?;
        let tasks = TaskTracker::new();
        let health = rpc::Health::new("chain");
        let (client, nodes, dev) = match &config.rpc_url {
            Some(url) => {
                let urls = std::iter::once(url).chain(&config.rpc_fallback_url);
                let nodes = remote(&config, urls)?;
                (nodes.client(), Some(nodes), None)
            }
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
                (RpcClient::new(chain.clone(), true), None, Some(chain))
            }
        };
        let store = sealed_store(&config);
        let db = events::Sqlite::open_sealed(store.path, &MIGRATOR, store.sealing).await?;
        let settings = settings(&config)?;
        let (chain_id, nodes) = (config.chain_id, nodes.as_ref());
        let connector =
            Connector::connect(client, nodes, chain_id, signer, settings, db.clone()).await?;
        check_nodes(&config, &connector).await?;
        connector.preflight(&key_name).await;
        let watcher = connector::Watcher {
            connector: connector.clone(),
            // Blocks of the embedded chain are final, and none follows without a transaction.
            confirmations: dev.as_ref().map_or(config.confirmations, |_| 0),
            poll_interval: Duration::from_millis(config.poll_interval_ms),
            head: dev.as_ref().map(dev::DevChain::head),
        };
        tasks.spawn(watcher.run(health.clone(), shutdown.clone()));
        let pause = Duration::from_millis(config.resend_interval_ms.max(1));
        let upkeep = connector::Upkeep::new(connector.clone(), pause);
        tasks.spawn(upkeep.run(health.clone(), shutdown.clone()));
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

/// Checks settings that depend on each other or have a limit.
fn check(config: &ChainConfig) -> Result<(), StartError> {
    let needs_node = config.rpc_fallback_url.is_some() || config.rpc_auth_file.is_some();
    if needs_node && config.rpc_url.is_none() {
        let text = "chain.rpc_fallback_url and chain.rpc_auth_file need chain.rpc_url";
        return Err(StartError::Setting(text));
    }
    if config.confirmations > CONFIRMATIONS_MAX {
        let text = "chain.confirmations is above its maximum, 256";
        return Err(StartError::Setting(text));
    }
    if config.max_fee_per_gas_gwei == 0 {
        let text = "chain.max_fee_per_gas_gwei is 0: no transaction could pay for its gas";
        return Err(StartError::Setting(text));
    }
    Ok(())
}

fn settings(config: &ChainConfig) -> Result<connector::Settings, StartError> {
    const OWNER: &str = "chain.owner_address must be `0x` and 40 hex digits, not all zero";
    let owner = config.owner_address.as_deref().map(|text| {
        let address = text.parse::<Address>().ok();
        let address = address.filter(|address| !address.raw().is_zero());
        address.ok_or(StartError::Setting(OWNER))
    });
    Ok(connector::Settings {
        owner: owner.transpose()?,
        // The embedded chain takes the operator's transactions in turn, whatever their fees.
        replace_after_blocks: match config.rpc_url {
            Some(_) => config.replace_after_blocks,
            None => 0,
        },
        max_fee_per_gas: u128::from(config.max_fee_per_gas_gwei) * WEI_PER_GWEI,
    })
}

/// The signer, and where its key is.
fn signer(config: &ChainConfig) -> Result<(connector::Signer, String), StartError> {
    let Some(url) = &config.remote_signer_url else {
        let key_file = config
            .operator_key_file
            .clone()
            .unwrap_or_else(|| config.data_dir.join("operator.key"));
        let key = operator_key(&key_file, config.rpc_url.is_none())?;
        return Ok((connector::Signer::Key(key), key_file.display().to_string()));
    };
    let address = config.operator_address.as_deref().unwrap_or_default();
    let address: Address = address.parse().map_err(|_| {
        StartError::Setting(
            "chain.remote_signer_url needs chain.operator_address, `0x` and 40 hex digits",
        )
    })?;
    let timeout = Duration::from_millis(config.request_timeout_ms);
    let nodes = nodes::Nodes::new(&[url.as_str()], None, timeout)?;
    let signer = connector::Signer::Remote {
        client: nodes.client(),
        address: address.raw(),
    };
    Ok((signer, "remote signer".to_owned()))
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

/// Checks that both nodes have the chain of the store. One that is away is checked before its first
/// use.
async fn check_nodes(config: &ChainConfig, connector: &Connector) -> Result<(), StartError> {
    if let (Some(first), Some(second)) = (&config.rpc_url, &config.rpc_fallback_url) {
        for url in [first, second] {
            let client = remote(config, [url])?.client();
            connector.check_node(client).await?;
        }
    }
    Ok(())
}

fn remote<'a>(
    config: &ChainConfig,
    urls: impl IntoIterator<Item = &'a String>,
) -> Result<nodes::Nodes, StartError> {
    let authorization = config.rpc_auth_file.as_deref();
    let authorization = authorization.map(nodes::read_authorization).transpose()?;
    let timeout = Duration::from_millis(config.request_timeout_ms);
    let urls: Vec<&str> = urls.into_iter().map(String::as_str).collect();
    nodes::Nodes::new(&urls, authorization, timeout)
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

/// Reads the operator's key, or creates it for an embedded chain, which gives its account coins.
fn operator_key(path: &Path, is_embedded: bool) -> Result<PrivateKeySigner, StartError> {
    let bytes = files::read_or_create(path, files::PRIVATE, || {
        if !is_embedded {
            return Err(StartError::NoKey(path.to_owned()));
        }
        let key = PrivateKeySigner::random().to_bytes();
        Ok(format!("0x{}\n", hex::encode(key)).into_bytes())
    })?;
    let text = String::from_utf8_lossy(&bytes);
    let key = text.trim().parse();
    key.map_err(|_| StartError::Key(path.to_owned()))
}
