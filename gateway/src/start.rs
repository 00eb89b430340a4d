//! Puts the room together and takes it apart again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use events::Sqlite;
use proto::market::v1::market_service_server::MarketServiceServer;
use rpc::{Context, Health};
use sequencer::{Commit, Port, Reader};
use settlement::SettlementView;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use types::{NodeId, Sequence};

use crate::api::{self, Api};
use crate::calls::{Cfa, Identity, Ledger};
use crate::market::{Market, Parts};
use crate::projection::{Projection, repo};
use crate::quic::server::Server;
use crate::{Error, GatewayConfig, consumers, dispatch, instruments, sweeper};

/// How long to wait before the registry is asked again.
const REGISTRY_RETRY: Duration = Duration::from_secs(1);

/// What the room is given.
pub struct GatewayDeps {
    pub log: Arc<dyn events::Log>,
    pub auth: rpc::Authenticator,
    pub identity: rpc::Channel,
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    pub port: Port,
    pub commit: Commit,
    /// A reader of the journal, wherever it stands.
    pub reader: Reader,
    pub settlement: SettlementView,
}

/// The running room.
pub struct GatewayHandle {
    market: Arc<Market>,
    health: Health,
    address: SocketAddr,
    fingerprint: String,
    workers: Vec<JoinHandle<()>>,
}

/// Opens the store, catches up with the journal, takes the instruments over and begins to serve. Returns when sessions and calls are answered.
///
/// # Errors
/// [`Error`].
pub async fn start(
    config: GatewayConfig,
    deps: GatewayDeps,
    shutdown: CancellationToken,
) -> Result<GatewayHandle, Error> {
    let node = NodeId::new(config.node).ok_or(Error::Node(config.node))?;
    let migrator = sqlx::migrate!("migrations/sqlite");
    let db = Sqlite::open(config.data_dir.join("market.db"), &migrator).await?;
    let projection = Projection::open(db.clone()).await?;
    let health = Health::new("market");
    let basis = config.trading_limit_basis;
    let market = Arc::new(Market::new(Parts {
        config,
        node,
        port: deps.port,
        commit: deps.commit,
        reader: deps.reader,
        settlement: deps.settlement,
        projection: projection.clone(),
        ledger: Ledger::new(deps.ledger),
        identity: Identity::new(deps.identity, basis),
        cfa: Cfa::new(deps.cfa),
    }));
    let server = Server::bind(&market)?;
    let (address, fingerprint) = (server.address(), server.fingerprint().to_owned());

    let mut workers = Vec::new();
    let dispatching = dispatch::run(
        market.clone(),
        market.read_journal(Sequence::ZERO),
        shutdown.clone(),
    );
    workers.push(watch(health.clone(), "sessions", async {
        dispatching.await.map_err(Error::Journal)
    }));
    let projecting =
        projection
            .clone()
            .run(node, market.read_journal(Sequence::ZERO), shutdown.clone());
    workers.push(watch(health.clone(), "history", projecting));
    market.streams.wait(market.commit.position()).await;
    if let Err(error) = instruments::sync_all(&market, &Context::new("market")).await {
        tracing::warn!(%error, "the instrument registry is away: what was known is traded, the rest later");
        health.set_failing("instruments", error.to_string());
        workers.push(tokio::spawn(sync_later(
            market.clone(),
            health.clone(),
            shutdown.clone(),
        )));
    }

    workers.push(tokio::spawn(events::outbox::Relay::run(
        db,
        deps.log.clone(),
        shutdown.clone(),
    )));
    workers.push(tokio::spawn(consumers::run(
        market.clone(),
        deps.log,
        shutdown.clone(),
    )));
    workers.push(tokio::spawn(sweeper::run(market.clone(), shutdown.clone())));
    workers.push(tokio::spawn(dispatch::gauges(
        market.clone(),
        shutdown.clone(),
    )));
    workers.push(tokio::spawn(server.run(
        market.clone(),
        deps.auth,
        shutdown,
    )));
    tracing::info!(%address, fingerprint, "trading sessions over QUIC");
    Ok(GatewayHandle {
        market,
        health,
        address,
        fingerprint,
        workers,
    })
}

/// Asks the registry until it answers.
async fn sync_later(market: Arc<Market>, health: Health, shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(REGISTRY_RETRY) => {}
            () = shutdown.cancelled() => return,
        }
        match instruments::sync_all(&market, &Context::new("market")).await {
            Ok(()) => {
                health.set_ok("instruments");
                return;
            }
            Err(error) => health.set_failing("instruments", error.to_string()),
        }
    }
}

/// A worker whose failure the health read shows.
fn watch(
    health: Health,
    part: &'static str,
    work: impl Future<Output = Result<(), Error>> + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(error) = work.await {
            tracing::error!(part, %error, "a part of the market has stopped");
            health.set_failing(part, error.to_string());
        }
    })
}

impl GatewayHandle {
    /// RPC routes, diagnostic reads and health, to be served.
    pub fn service(&self) -> rpc::Service {
        let api = Api {
            market: self.market.clone(),
        };
        rpc::Service {
            name: "market",
            routes: Routes::new(rpc::grpc_server!(MarketServiceServer::new(api))),
            http: api::http::routes(self.market.clone()),
            health: self.health.clone(),
        }
    }

    /// Where trading sessions are taken.
    pub fn trading_address(&self) -> SocketAddr {
        self.address
    }

    /// SHA-256 of the trading certificate, 64 hexadecimal digits: what a client pins.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Sweeps the market's holds now instead of at the next turn.
    ///
    /// # Errors
    /// The ledger or the trading path cannot be asked.
    pub async fn sweep(&self) -> Result<(), tonic::Status> {
        sweeper::sweep(&self.market).await
    }

    /// What a user holds of an instrument, as the CFA service's events tell it (R159).
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn position(
        &self,
        user_id: &str,
        instrument_id: &str,
    ) -> Result<types::Decimal, Error> {
        repo::position_of(&self.market.projection.db, user_id, instrument_id).await
    }

    /// Returns when the history holds everything that is durable now.
    pub async fn caught_up(&self) {
        let commit = self.market.commit.position();
        self.market.streams.wait(commit).await;
        self.market.projection.wait(commit).await;
    }

    /// Waits for every part to end after the shutdown token was cancelled, and closes the store.
    pub async fn stopped(self) {
        for worker in self.workers {
            if worker.await.is_err() {
                tracing::error!("a worker of the market ended with a panic");
            }
        }
        self.market.projection.db.close().await;
    }
}
