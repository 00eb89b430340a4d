//! Starts and stops the gateway.

use admission::Request;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proto::market::v1::market_service_server::MarketServiceServer;
use replica::Replica;
use rpc::{Context, Health};
use sequencer::{Commit, Durable, Port, SubmitError};
use service_clients::{CfaClient, IdentityClient, LedgerClient};
use service_kit::KeyedMutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use types::command::{BoundsOf, OrderBounds, SetOrderBounds};
use types::{Id128, Lots, Minor, NodeId, RejectReason, Sequence};

use crate::acts::{self, Acts};
use crate::api::{self, Api};
use crate::budget::{self, Budgets};
use crate::feed::Feed;
use crate::front::server::{Bound, parker};
use crate::front::{FrontQueue, balances, compare};
use crate::identity::Identity;
use crate::market::{Market, SOURCE};
use crate::projection::{self, Projection, repo};
use crate::resend_source::SCANS_MAX;
use crate::{
    Error, GatewayConfig, consumers, dispatch, guard, idle_sessions, instruments,
    request_retention, sweeper,
};

/// The gateway's store in its data folder.
pub const FILE: &str = "market.db";
/// Time limit for all workers together to stop.
const WORKERS_STOP: Duration = Duration::from_secs(3);
/// Pause between attempts to import the instrument registry.
const REGISTRY_RETRY: Duration = Duration::from_secs(1);

/// Dependencies of the gateway.
pub struct GatewayDeps {
    pub log: Arc<dyn events::Log>,
    pub auth: rpc::Authenticator,
    pub identity: rpc::Channel,
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    pub port: Port,
    pub commit: Commit,
    /// Follows the journal that `port` writes.
    pub replica: Replica,
    /// Positions of the history and the feed. Journal retention reads them.
    pub history: Durable,
    pub feed: Durable,
}

/// The running gateway.
pub struct GatewayHandle {
    market: Arc<Market>,
    health: Health,
    address: SocketAddr,
    fingerprint: String,
    /// Tasks that handle orders, calls and events. The shutdown token ends them.
    workers: Vec<JoinHandle<()>>,
    /// History and feed. They stop after the workers, so that both contain the last orders.
    publishers: Vec<JoinHandle<()>>,
    publishers_token: CancellationToken,
}

/// Opens the store, catches up with the journal, imports the instruments and starts the tasks.
/// Returns once trading sessions are served. The caller serves the RPC routes
/// ([`GatewayHandle::service`]).
///
/// `shutdown` ends the intake of requests. History and feed continue until
/// [`GatewayHandle::stopped`], so that calls in progress are answered and sessions receive the
/// reports of their requests.
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
        let file = config.data_dir.join(FILE);
        let projection = Projection::open(file, node, deps.history).await?;
        let db = projection.db.clone();
        // Reports the feed's position to `deps.feed` before the journal may be truncated.
        Feed::open(db.clone(), node, deps.log.clone(), deps.feed.clone()).await?;
        let acts = Acts::open(&config).await?;
        let bound = Bound::bind(&config)?;
        let (address, fingerprint) = (bound.address(), bound.fingerprint().to_owned());
        let front = FrontQueue::new(parker(&deps.port));
        let health = Health::new("market");
        let basis = config.trading_limit_basis;
        let market = Arc::new(Market {
            config,
            node,
            port: deps.port,
            commit: deps.commit,
            replica: deps.replica,
            front: front.clone(),
            balances: Default::default(),
            projection,
            acts,
            ledger: LedgerClient::new(deps.ledger, SOURCE),
            identity: Identity::new(IdentityClient::new(deps.identity, SOURCE), basis),
            cfa: CfaClient::new(deps.cfa, SOURCE),
            budgets: Budgets::default(),
            limits: KeyedMutex::default(),
            funding: KeyedMutex::default(),
            scans: Arc::new(Semaphore::new(SCANS_MAX)),
            releases: KeyedMutex::default(),
        });
        let mut publishers = Tasks::of(&health, CancellationToken::new());
        publishers.spawn_publishers(&market, &deps.log, &deps.feed);
        catch_up(&market).await?;
        set_order_bounds(&market).await?;
        let mut workers = Tasks::of(&health, shutdown);
        if let Err(error) = instruments::sync_all(&market, &Context::new("market")).await {
            tracing::warn!(%error, "instrument registry unavailable: trading known instruments, retrying");
            health.set_failing("instruments", error.to_string());
            let later = sync_later(market.clone(), health.clone(), workers.token.clone());
            workers.running.push(tokio::spawn(later));
        }
        workers.spawn_workers(&market, &deps.log);
        let token = workers.token.clone();
        let serving = bound.run(market.clone(), deps.auth, front, token);
        workers.spawn("trading_sessions", serving);
        tracing::info!(%address, fingerprint, "trading sessions over QUIC");
        Ok(GatewayHandle {
            market,
            health,
            address,
            fingerprint,
            workers: workers.running,
            publishers_token: publishers.token,
            publishers: publishers.running,
        })
    })
}

/// Journals the configured default bounds, unless they are already in force.
async fn set_order_bounds(market: &Market) -> Result<(), Error> {
    let config = &market.config;
    let none = OrderBounds::NONE;
    let bounds = OrderBounds {
        per_user: config.open_orders_per_user,
        per_instrument: config.open_orders_per_instrument,
        lots_per_order: match config.lots_per_order {
            0 => none.lots_per_order,
            lots => Lots(lots),
        },
        value_per_order: match config.roubles_per_order {
            0 => none.value_per_order,
            roubles => Minor(i64::from(roubles) * 100),
        },
        journal_bytes_per_minute: OrderBounds::journal_mib(config.journal_mib_per_minute),
        messages_per_trade: match config.order_messages_per_trade {
            0 => none.messages_per_trade,
            messages => messages,
        },
        sessions: config.sessions_per_user_max,
        session_rate: config.throttle_per_s,
        user_rate: config.user_throttle_per_s,
        group_rate: config.group_throttle_per_s,
    };
    let most = market.open_orders_per_user_max();
    let least = bounds.per_instrument.min(bounds.sessions);
    if !(1..=most).contains(&bounds.per_user) || least == 0 {
        return Err(Error::Settings(format!(
            "open_orders_per_user = {} must be 1 to {most}; \
             open_orders_per_instrument = {} and sessions_per_user_max = {} must be at least 1",
            bounds.per_user, bounds.per_instrument, bounds.sessions
        )));
    }
    let request = Request::SetOrderBounds(SetOrderBounds {
        of: BoundsOf::Node,
        bounds: Some(bounds),
        key_hash: Id128::NONE,
    });
    match market.submit(request).await {
        Ok(_) => Ok(()),
        Err(SubmitError::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            Ok(())
        }
        Err(error) => Err(Error::Refused(format!("{error}"))),
    }
}

/// Tasks that share a shutdown token.
struct Tasks {
    health: Health,
    token: CancellationToken,
    running: Vec<JoinHandle<()>>,
}

impl Tasks {
    fn of(health: &Health, token: CancellationToken) -> Self {
        Self {
            health: health.clone(),
            token,
            running: Vec::new(),
        }
    }

    fn spawn(
        &mut self,
        part: &'static str,
        work: impl Future<Output = Result<(), Error>> + Send + 'static,
    ) {
        let spawned = guard::spawn(&self.health, part, &self.token, work);
        self.running.push(spawned);
    }

    /// Spawns work that returns no error.
    fn spawn_infallible(
        &mut self,
        part: &'static str,
        work: impl Future<Output: Send> + Send + 'static,
    ) {
        self.spawn(part, async {
            work.await;
            Ok(())
        });
    }

    /// Spawns history and feed, and the relay of audit records. A failed history or feed is
    /// restarted.
    fn spawn_publishers(
        &mut self,
        market: &Arc<Market>,
        log: &Arc<dyn events::Log>,
        fed: &Durable,
    ) {
        let troubles =
            dispatch::watch_replica(market.clone(), self.health.clone(), self.token.clone());
        self.spawn_infallible("replica_watch", troubles);

        let (own, token, shown) = (market.clone(), self.token.clone(), self.health.clone());
        let history =
            guard::spawn_restarting(&self.health, "history_task", &self.token, move || {
                let history = own.projection.clone();
                let behind = own
                    .replica
                    .follow_detached(projection::PART, history.position());
                history.run(behind, shown.clone(), token.clone())
            });
        let (own, token, shown) = (market.clone(), self.token.clone(), self.health.clone());
        let (log, fed, relayed) = (log.clone(), fed.clone(), log.clone());
        let feed = guard::spawn_restarting(&self.health, "feed_task", &self.token, move || {
            let db = own.projection.db.clone();
            let feed = Feed::open(db, own.node, log.clone(), fed.clone());
            let (own, shown, token) = (own.clone(), shown.clone(), token.clone());
            async move {
                let feed = feed.await?;
                feed.run(own.replica.clone(), shown, token).await
            }
        });
        self.running.extend([history, feed]);
        let acts = market.acts.db.clone();
        let relaying = events::outbox::Relay::run(acts, relayed, self.token.clone());
        self.spawn_infallible("acts_relay", relaying);
    }

    /// Spawns the event consumers, the health and gauge tasks and the maintenance tasks.
    fn spawn_workers(&mut self, market: &Arc<Market>, log: &Arc<dyn events::Log>) {
        let token = || self.token.clone();
        let (health, own) = (self.health.clone(), || market.clone());
        let showing = consumers::show_events(log.clone(), health.clone(), token());
        let (sweeping, gauges) = (
            sweeper::run(own(), token()),
            dispatch::gauges(own(), token()),
        );
        let forgetting = idle_sessions::run(own(), token());
        let resolving = acts::run(own(), token());
        let resetting = budget::run(own(), token());
        let path = dispatch::watch_path(own(), health.clone(), token());
        let comparing = compare::run(own(), health, token());
        let sending_balances = balances::run(own(), token());
        // A relay removes old ids from the inbox of its store. `market.db` has none.
        let file = market.projection.db.file.clone();
        let inbox = events::inbox::retain(file, log.clone(), token());
        let requests = request_retention::run(own(), token());
        self.spawn("message_samples", comparing);
        for (topic, part) in consumers::TOPICS {
            let consuming = consumers::run(own(), log.clone(), topic, self.token.clone());
            self.spawn(part, consuming);
        }
        self.spawn_infallible("inbox_retention", inbox);
        self.spawn_infallible("request_retention", requests);
        self.spawn_infallible("events_health", showing);
        self.spawn_infallible("balances", sending_balances);
        self.spawn_infallible("sweeper", sweeping);
        self.spawn_infallible("idle_sessions", forgetting);
        self.spawn_infallible("acts", resolving);
        self.spawn_infallible("budgets", resetting);
        self.spawn_infallible("gauges", gauges);
        self.spawn_infallible("trading_path_watch", path);
    }
}

/// The higher of the positions of history and feed; zero without a store.
///
/// # Errors
/// The store cannot be opened.
pub fn published_through(data_dir: &Path) -> BoxFuture<'_, Result<Sequence, Error>> {
    Box::pin(async move {
        let file = data_dir.join(FILE);
        if !file.exists() {
            return Ok(Sequence::ZERO);
        }
        // Positions do not depend on the node.
        let history =
            Projection::open(file, NodeId::default(), Durable::new(projection::PART)).await?;
        let feed = repo::feed_position(&history.db).await;
        history.db.file.close().await;
        feed.map(|feed| feed.max(history.position()))
    })
}

/// Retries the import of the instruments until it succeeds.
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

/// Returns when the replica has applied every record that is durable now.
async fn catch_up(market: &Market) -> Result<(), Error> {
    let passed = market.await_applied(market.commit.position()).await;
    passed.map_err(|status| {
        let reason = status.message();
        Error::Start(format!("the replica did not catch up: {reason}"))
    })
}

impl GatewayHandle {
    /// RPC routes, diagnostic reads and health.
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

    /// Address of the trading sessions.
    pub fn trading_address(&self) -> SocketAddr {
        self.address
    }

    /// SHA-256 of the trading certificate, 64 hexadecimal digits. Clients pin it.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Sweeps the market's holds now instead of at the next interval.
    ///
    /// # Errors
    /// The ledger or the trading path is unavailable.
    pub async fn sweep(&self) -> Result<(), tonic::Status> {
        sweeper::sweep(&self.market).await
    }

    /// Returns when the history contains every record that is durable now, or the replica has
    /// ended.
    pub async fn caught_up(&self) {
        let commit = self.market.commit.position();
        // Both waits fail once the replica has ended: the history then does not advance.
        let _ = self.market.await_applied(commit).await;
        let written = self.market.projection.wait(commit);
        let _ = self.market.unless_ended(written).await;
    }

    /// Waits for every task to end after the shutdown token is cancelled, and closes the store.
    /// Stop the server of [`Self::service`] first: its calls in progress need the history.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut ended = Vec::new();
            let deadline = tokio::time::Instant::now() + WORKERS_STOP;
            for mut worker in self.workers {
                // A worker may wait for a full journal. Aborting it has the effect of a crash.
                match tokio::time::timeout_at(deadline, &mut worker).await {
                    Ok(joined) => ended.push(joined),
                    Err(_) => worker.abort(),
                }
            }
            self.publishers_token.cancel();
            for publisher in self.publishers {
                ended.push(publisher.await);
            }
            if ended.iter().any(Result::is_err) {
                tracing::error!("a market task panicked");
            }
            self.market.acts.close().await;
            self.market.projection.db.file.close().await;
        })
    }
}
