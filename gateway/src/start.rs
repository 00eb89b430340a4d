//! Puts the room together and takes it apart again.

use admission::Request;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proto::market::v1::market_service_server::MarketServiceServer;
use replica::Replica;
use rpc::{Context, Health};
use sequencer::{Commit, Durable, NotTaken, Port};
use service_clients::{CfaClient, IdentityClient, LedgerClient};
use service_kit::KeyedMutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use types::command::{BoundsOf, OrderBounds, SetOrderBounds};
use types::{Id128, Lots, Minor, NodeId, RejectReason, Sequence};

use crate::api::{self, Api};
use crate::budget::Budgets;
use crate::feed::Feed;
use crate::front::server::{Bound, parker};
use crate::front::{Orders, balances, compare};
use crate::identity::Identity;
use crate::market::{Market, SOURCE};
use crate::past::SCANS_MAX;
use crate::projection::{self, Projection, repo};
use crate::{Error, GatewayConfig, consumers, dispatch, guard, instruments, sweeper};

/// The room's store in its data folder.
const FILE: &str = "market.db";
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
    /// Told how far the history and the feed of market events have come.
    pub history: Durable,
    pub feed: Durable,
}

/// The running room.
pub struct GatewayHandle {
    market: Arc<Market>,
    health: Health,
    address: SocketAddr,
    fingerprint: String,
    /// What takes orders, calls and events: ends with the token given.
    workers: Vec<JoinHandle<()>>,
    /// History and published events. They stop after the workers, so that the last orders are in both.
    publishers: Vec<JoinHandle<()>>,
    publishers_token: CancellationToken,
}

/// Opens the store, catches up with the journal, takes the instruments over and begins to serve. Returns when
/// sessions and calls are answered.
///
/// `shutdown` ends what comes in. The way back (sessions' messages, history, published events) goes on until
/// [`GatewayHandle::stopped`]: a call that is under way is answered out of the history, a session gets the
/// reports of what it has sent.
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
        // Known before the journal's beginning may go.
        Feed::open(db.clone(), node, deps.log.clone(), deps.feed.clone()).await?;
        let bound = Bound::bind(&config)?;
        let (address, fingerprint) = (bound.address(), bound.fingerprint().to_owned());
        let orders = Orders::new(parker(&deps.port));
        let health = Health::new("market");
        let basis = config.trading_limit_basis;
        let market = Arc::new(Market {
            config,
            node,
            port: deps.port,
            commit: deps.commit,
            replica: deps.replica,
            orders: orders.clone(),
            balances: Default::default(),
            projection,
            ledger: LedgerClient::new(deps.ledger, SOURCE),
            identity: Identity::new(IdentityClient::new(deps.identity, SOURCE), basis),
            cfa: CfaClient::new(deps.cfa, SOURCE),
            budgets: Budgets::default(),
            funding: KeyedMutex::default(),
            scans: Arc::new(Semaphore::new(SCANS_MAX)),
            giving: tokio::sync::Mutex::default(),
        });
        let mut publishers = Tasks::of(&health, CancellationToken::new());
        publishers.keep_publishing(&market, &deps.log, &deps.feed);
        catch_up(&market).await?;
        set_order_bounds(&market).await?;
        let mut workers = Tasks::of(&health, shutdown);
        if let Err(error) = instruments::sync_all(&market, &Context::new("market")).await {
            tracing::warn!(%error, "the instrument registry is away: what was known is traded, the rest later");
            health.set_failing("instruments", error.to_string());
            let later = sync_later(market.clone(), health.clone(), workers.token.clone());
            workers.running.push(tokio::spawn(later));
        }
        workers.begin(&market, &deps.log);
        let token = workers.token.clone();
        let serving = bound.run(market.clone(), deps.auth, orders, token);
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

/// Journals what a user without other bounds may take, if that is not what the journal says.
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
    };
    let most = market.open_orders_most();
    if !(1..=most).contains(&bounds.per_user) || bounds.per_instrument == 0 {
        return Err(Error::Settings(format!(
            "open_orders_per_user is {}, 1 to {most}; open_orders_per_instrument is {}, at least 1",
            bounds.per_user, bounds.per_instrument
        )));
    }
    let request = Request::SetOrderBounds(SetOrderBounds {
        of: BoundsOf::Node,
        bounds: Some(bounds),
        key_hash: Id128::NONE,
    });
    match market.ask(request).await {
        Ok(_) => Ok(()),
        Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => Ok(()),
        Err(error) => Err(Error::Refused(format!("{error}"))),
    }
}

/// Parts that one token ends.
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

    /// Work that never fails.
    fn endless(&mut self, part: &'static str, work: impl Future<Output: Send> + Send + 'static) {
        self.spawn(part, async {
            work.await;
            Ok(())
        });
    }

    /// History and market events: each is restarted when it fails.
    fn keep_publishing(&mut self, market: &Arc<Market>, log: &Arc<dyn events::Log>, fed: &Durable) {
        let troubles =
            dispatch::watch_replica(market.clone(), self.health.clone(), self.token.clone());
        self.endless("replica_watch", troubles);

        let (own, token, shown) = (market.clone(), self.token.clone(), self.health.clone());
        let history = guard::keep(&self.health, "history_task", &self.token, move || {
            let history = own.projection.clone();
            let behind = own
                .replica
                .follow_behind(projection::PART, history.position());
            history.run(behind, shown.clone(), token.clone())
        });
        let (own, token, shown) = (market.clone(), self.token.clone(), self.health.clone());
        let (log, fed) = (log.clone(), fed.clone());
        let feed = guard::keep(&self.health, "feed_task", &self.token, move || {
            let db = own.projection.db.clone();
            let feed = Feed::open(db, own.node, log.clone(), fed.clone());
            let (own, shown, token) = (own.clone(), shown.clone(), token.clone());
            async move {
                let feed = feed.await?;
                feed.run(own.replica.clone(), shown, token).await
            }
        });
        self.running.extend([history, feed]);
    }

    /// What takes other services' events, and what looks after the market.
    fn begin(&mut self, market: &Arc<Market>, log: &Arc<dyn events::Log>) {
        let token = || self.token.clone();
        let (health, own) = (self.health.clone(), || market.clone());
        let showing = consumers::show_events(log.clone(), health.clone(), token());
        let (sweeping, gauges) = (
            sweeper::run(own(), token()),
            dispatch::gauges(own(), token()),
        );
        let path = dispatch::watch_path(own(), health.clone(), token());
        let comparing = compare::run(own(), health, token());
        let sending_balances = balances::run(own(), token());
        self.spawn("message_samples", comparing);
        for (topic, part) in consumers::TOPICS {
            let hearing = consumers::run(own(), log.clone(), topic, self.token.clone());
            self.spawn(part, hearing);
        }
        self.endless("events_health", showing);
        self.endless("balances", sending_balances);
        self.endless("sweeper", sweeping);
        self.endless("gauges", gauges);
        self.endless("trading_path_watch", path);
    }
}

/// Last record of the journal that the history in this data folder holds, or that its feed has
/// published; zero without one.
///
/// # Errors
/// The store cannot be opened.
pub fn told_through(data_dir: &Path) -> BoxFuture<'_, Result<Sequence, Error>> {
    Box::pin(async move {
        let file = data_dir.join(FILE);
        if !file.exists() {
            return Ok(Sequence::ZERO);
        }
        // Positions are of no node.
        let history =
            Projection::open(file, NodeId::default(), Durable::new(projection::PART)).await?;
        let fed = repo::fed(&history.db).await;
        history.db.file.close().await;
        fed.map(|fed| fed.max(history.position()))
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

/// Returns when the replica has what was durable at the start.
async fn catch_up(market: &Market) -> Result<(), Error> {
    let passed = market.passed(market.commit.position()).await;
    passed.map_err(|status| Error::Start(status.message().to_owned()))
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
        let _ = self.market.passed(commit).await;
        let _ = self.market.written(commit).await;
    }

    /// Waits for every part to end after the shutdown token was cancelled, and closes the store. Whoever serves
    /// [`Self::service`] stops first: calls under way are answered until here.
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
            self.publishers_token.cancel();
            for publisher in self.publishers {
                ended.push(publisher.await);
            }
            if ended.iter().any(Result::is_err) {
                tracing::error!("a worker of the market ended with a panic");
            }
            self.market.projection.db.file.close().await;
        })
    }
}
