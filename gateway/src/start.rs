//! Puts the room together and takes it apart again.

use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use events::Sqlite;
use proto::market::v1::market_service_server::MarketServiceServer;
use replica::Replica;
use rpc::{Context, Health};
use sequencer::{Commit, Durable, Port};
use service_clients::{CfaClient, IdentityClient, LedgerClient};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use types::{NodeId, Sequence};

use crate::api::{self, Api};
use crate::dispatch::SESSIONS;
use crate::identity::Identity;
use crate::market::{Market, Parts, SOURCE};
use crate::projection::{self, Projection, repo};
use crate::quic::server::Server;
use crate::streams::Streams;
use crate::{Error, GatewayConfig, consumers, dispatch, guard, instruments, sweeper};

/// How long the workers together may take to stop.
const WORKERS_STOP: Duration = Duration::from_secs(3);
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
    /// Behind the journal that `port` writes.
    pub replica: Replica,
    /// Told how far the history has come.
    pub history: Durable,
}

/// The running room.
pub struct GatewayHandle {
    market: Arc<Market>,
    health: Health,
    address: SocketAddr,
    fingerprint: String,
    /// What takes orders, calls and events: ends with the token given.
    workers: Vec<JoinHandle<()>>,
    /// What tells how they went: ends behind the last of those.
    tellers: Vec<JoinHandle<()>>,
    telling: CancellationToken,
}

/// The schema, applied after that of outbox and inbox.
static MIGRATOR: std::sync::LazyLock<sqlx::migrate::Migrator> =
    events::migrations!("migrations/sqlite": "0001_market", "0002_lists");

/// Opens the store, catches up with the journal, takes the instruments over and begins to serve. Returns when sessions and calls are answered.
///
/// `shutdown` ends what comes in. The way back (sessions' messages, history, published events) goes on until [`GatewayHandle::stopped`]: a call that
/// is under way is answered out of the history, a session gets the reports of what it has sent.
///
/// # Errors
/// [`Error`].
pub fn start(
    config: GatewayConfig,
    deps: GatewayDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<GatewayHandle, Error>> {
    Box::pin(async move {
        let node = NodeId::new(config.node).ok_or(Error::Node(config.node))?;
        let db = Sqlite::open(config.data_dir.join("market.db"), &MIGRATOR).await?;
        let projection = Projection::open(db.clone(), deps.history).await?;
        let (streams, told) = deps.replica.follow(SESSIONS, Streams::new)?;
        deps.replica.sessions_have(told.position());
        let health = Health::new("market");
        let basis = config.trading_limit_basis;
        let market = Arc::new(Market::new(Parts {
            config,
            node,
            port: deps.port,
            commit: deps.commit,
            replica: deps.replica,
            streams,
            projection,
            ledger: LedgerClient::new(deps.ledger, SOURCE),
            identity: Identity::new(IdentityClient::new(deps.identity, SOURCE), basis),
            cfa: CfaClient::new(deps.cfa, SOURCE),
        }));
        let server = Server::bind(&market)?;
        let (address, fingerprint) = (server.address(), server.fingerprint().to_owned());

        let (mut workers, mut tellers) = (Vec::new(), Vec::new());
        let telling = CancellationToken::new();
        let dispatching = dispatch::run(market.clone(), told, telling.clone());
        tellers.push(guard::spawn(&health, SESSIONS, &telling, async {
            dispatching.await.map_err(Error::Replica)
        }));
        let (own, token, shown) = (market.clone(), telling.clone(), health.clone());
        tellers.push(guard::keep(&health, "history_task", &telling, move || {
            let history = own.projection.clone();
            let behind = own
                .replica
                .follow_behind(projection::PART, history.position());
            history.run(node, behind, shown.clone(), token.clone())
        }));
        let troubles = dispatch::watch_replica(market.clone(), health.clone(), telling.clone());
        tellers.push(guard::spawn(
            &health,
            "replica_watch",
            &telling,
            endless(troubles),
        ));
        catch_up(&market).await?;
        if let Err(error) = instruments::sync_all(&market, &Context::new("market")).await {
            tracing::warn!(%error, "the instrument registry is away: what was known is traded, the rest later");
            health.set_failing("instruments", error.to_string());
            workers.push(tokio::spawn(sync_later(
                market.clone(),
                health.clone(),
                shutdown.clone(),
            )));
        }

        let relay = events::outbox::Relay::run(db, deps.log.clone(), telling.clone());
        tellers.push(guard::spawn(&health, "outbox", &telling, endless(relay)));
        for (topic, part) in consumers::TOPICS {
            let (log, token) = (deps.log.clone(), shutdown.clone());
            let hearing = consumers::run(market.clone(), log, topic, token);
            workers.push(guard::spawn(&health, part, &shutdown, hearing));
        }
        let showing = consumers::show_events(deps.log.clone(), health.clone(), shutdown.clone());
        workers.push(guard::spawn(
            &health,
            "events_health",
            &shutdown,
            endless(showing),
        ));
        let sweeping = sweeper::run(market.clone(), shutdown.clone());
        workers.push(guard::spawn(
            &health,
            "sweeper",
            &shutdown,
            endless(sweeping),
        ));
        let gauges = dispatch::gauges(market.clone(), shutdown.clone());
        workers.push(guard::spawn(&health, "gauges", &shutdown, endless(gauges)));
        let path = dispatch::watch_path(market.clone(), health.clone(), shutdown.clone());
        workers.push(guard::spawn(
            &health,
            "trading_path_watch",
            &shutdown,
            endless(path),
        ));
        let serving = server.run(market.clone(), deps.auth, shutdown.clone());
        workers.push(guard::spawn(
            &health,
            "trading_sessions",
            &shutdown,
            endless(serving),
        ));
        tracing::info!(%address, fingerprint, "trading sessions over QUIC");
        Ok(GatewayHandle {
            market,
            health,
            address,
            fingerprint,
            workers,
            tellers,
            telling,
        })
    })
}

/// Last record of the journal that the history in this data folder holds; zero without one.
///
/// # Errors
/// The store cannot be opened.
pub fn told_through(data_dir: &Path) -> BoxFuture<'_, Result<Sequence, Error>> {
    Box::pin(async move {
        let file = data_dir.join("market.db");
        if !file.exists() {
            return Ok(Sequence::ZERO);
        }
        let db = Sqlite::open(file, &MIGRATOR).await?;
        let position = Projection::open(db.clone(), Durable::new(projection::PART)).await;
        db.close().await;
        position.map(|history| history.position())
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

/// Returns when the sessions have what was durable at the start.
async fn catch_up(market: &Market) -> Result<(), Error> {
    let told = market.told(market.commit.position()).await;
    told.map_err(|status| Error::Start(status.message().to_owned()))
}

/// Work that never fails.
async fn endless<T>(work: impl Future<Output = T>) -> Result<(), Error> {
    work.await;
    Ok(())
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
        // Behind a replica that has ended nothing comes any more.
        let _ = self.market.told(commit).await;
        let _ = self.market.written(commit).await;
    }

    /// Waits for every part to end after the shutdown token was cancelled, and closes the store. Whoever serves [`Self::service`] stops first: calls
    /// under way are answered until here.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut ended = Vec::new();
            let deadline = tokio::time::Instant::now() + WORKERS_STOP;
            for mut worker in self.workers {
                // One may wait for a journal that has no room: it is cut, as a crash would.
                match tokio::time::timeout_at(deadline, &mut worker).await {
                    Ok(joined) => ended.push(joined),
                    Err(_) => worker.abort(),
                }
            }
            self.telling.cancel();
            for teller in self.tellers {
                ended.push(teller.await);
            }
            if ended.iter().any(Result::is_err) {
                tracing::error!("a worker of the market ended with a panic");
            }
            self.market.projection.db.close().await;
        })
    }
}
