//! A platform around the market in one folder. Tests can stop and restart it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::{Connection, LoginOptions, Report, Reports, Trust};
use events::Log;
use gateway::{GatewayConfig, GatewayDeps, GatewayHandle};
use journal::fault::MemoryStorage;
use proto::cfa::v1::{Instrument, InstrumentStatus};
use proto::common::v1::{Decimal, InstrumentType, MonetaryAmount, OperationType};
use proto::ledger::v1 as books;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use proto::market::v1::market_service_client::MarketServiceClient;
use proto::market::v1::*;
use replica::LiveReplica;
use rpc::{Authenticator, Channel, LocalSlot};
use sequencer::{Backlog, Config, Durable, Layout, Retention, SequencerHandle, SnapshotConfig};
use service_kit::Clock;
use service_kit::clock::Disciplined;
use settlement::{SettlementConfig, SettlementDeps, SettlementHandle};
use testkit::{PATIENCE, Registry, ServiceDoubles};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use types::{NodeId, Sequence, Side};
use wire::ServerMessage;

use crate::doubles::{ReleaseLatch, UnavailableLog};

pub use testkit::messages::{context, decimal, fresh as unique};

pub const BOND: &str = "BOND-1";

/// Settings that tests change.
pub struct Settings {
    pub gateway: GatewayConfig,
    /// Time from a lost session to the cancel of its orders.
    pub grace_ms: u64,
    /// Time that settlement waits to batch trades.
    pub linger_ms: u64,
    /// Time that settlement waits to batch records without trades.
    pub settle_wait_ms: u64,
    /// Checkpoint schedule; `None` = no checkpoints.
    pub checkpoints: Option<SnapshotConfig>,
    /// Bytes per segment of the journal.
    pub segment_bytes: u64,
    /// Bytes of the journal to keep; `None` = all.
    pub retain_bytes: Option<u64>,
    /// Threads of the trading path; `None` = those for this machine.
    pub layout: Option<Layout>,
    /// While true, the log refuses the market's events.
    pub log_is_unavailable: Arc<AtomicBool>,
    pub log_hangs: bool,
    /// Delays the release of a hold in the ledger.
    pub release_latch: ReleaseLatch,
    /// Clock of ledger and trading path; `None` = the process clock.
    pub clock: Option<Arc<Disciplined>>,
    /// Storage of the journal; `None` = files in the folder.
    pub journal: Option<Arc<MemoryStorage>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gateway: GatewayConfig {
                quic_listen: ([127, 0, 0, 1], 0).into(),
                gauge_interval_ms: 20,
                // A slow disk must not fail a test.
                replica_wait_ms: 60_000,
                read_wait_ms: 60_000,
                ..GatewayConfig::default()
            },
            grace_ms: 50,
            linger_ms: 0,
            settle_wait_ms: 20,
            checkpoints: None,
            segment_bytes: 16 << 20,
            retain_bytes: None,
            layout: None,
            log_is_unavailable: Arc::default(),
            log_hangs: false,
            release_latch: ReleaseLatch::default(),
            clock: None,
            journal: None,
        }
    }
}

impl Settings {
    /// Settles nothing while a test runs. Sessions get no settlement messages.
    pub fn unsettled() -> Self {
        Self {
            linger_ms: 600_000,
            settle_wait_ms: 600_000,
            ..Self::default()
        }
    }

    /// The front runs on the hot thread, whose parks can be counted, without message rates. Clients
    /// that read nothing are disconnected after this time, and need no heartbeats before.
    pub fn for_unread(unread_timeout_ms: u64) -> Self {
        let mut settings = Self::unthrottled();
        settings.layout = Some(Layout::Fused);
        settings.gateway.unread_timeout_ms = unread_timeout_ms;
        settings.gateway.heartbeat_ms = 60_000;
        settings
    }

    /// No message rates.
    pub fn unthrottled() -> Self {
        let mut settings = Self::default();
        settings.gateway.throttle_per_s = 0;
        settings.gateway.user_throttle_per_s = 0;
        settings
    }
}

pub struct World {
    pub folder: PathBuf,
    pub identity: Arc<ServiceDoubles>,
    pub registry: Arc<Registry>,
    pub log: Arc<dyn Log>,
    pub ledger: LedgerServiceClient<Channel>,
    pub gateway: GatewayHandle,
    pub settlement: SettlementHandle,
    pub market: LocalSlot,
    embedded: events::Embedded,
    /// `None` after [`World::stop_trading_path`].
    replica: Option<LiveReplica>,
    sequencer: Option<SequencerHandle>,
    ledger_handle: ledger::LedgerHandle,
    slots: Vec<LocalSlot>,
    stop_gateway: CancellationToken,
    stop_rest: CancellationToken,
}

impl World {
    /// A fresh platform with one bond and no users.
    pub async fn new(folder: &Path) -> Self {
        Self::with(folder, Settings::default()).await
    }

    /// A fresh platform with these settings.
    pub async fn with(folder: &Path, settings: Settings) -> Self {
        let registry = Arc::new(Registry::default());
        registry.list(bond(BOND));
        Self::start(folder, settings, Arc::default(), registry).await
    }

    /// Starts with the existing data of the folder.
    pub async fn start(
        folder: &Path,
        settings: Settings,
        identity: Arc<ServiceDoubles>,
        registry: Arc<Registry>,
    ) -> Self {
        let auth = Authenticator::Sandbox;
        let (stop_gateway, stop_rest) = (CancellationToken::new(), CancellationToken::new());
        let embedded = events::Embedded::open(folder.join("events")).await.unwrap();
        let log: Arc<dyn Log> = Arc::new(embedded.clone());
        let slots: Vec<LocalSlot> = (0..4).map(|_| LocalSlot::new()).collect();
        let service = |at: usize| Channel::local(&slots[at], "sandbox.service");

        let ledger_config = ledger::LedgerConfig {
            data_dir: folder.join("ledger"),
            ..Default::default()
        };
        let mut ledger_deps = ledger::LedgerDeps::new(log.clone(), service(2));
        if let Some(clock) = &settings.clock {
            ledger_deps.clock = Clock::Custom(clock.clone());
        }
        let ledger_handle = ledger::start(ledger_config, ledger_deps, stop_rest.clone())
            .await
            .unwrap();
        let ledger_routes = settings
            .release_latch
            .before(ledger_handle.service().routes);
        slots[0].fill(rpc::with_auth(ledger_routes, &auth));
        slots[1].fill(rpc::with_auth(identity.routes(), &auth));
        slots[2].fill(rpc::with_auth(registry.routes(), &auth));

        let backlog = Arc::new(Backlog::default());
        let mut config = Config::new(&folder.join("journal"));
        config.grace_ms = settings.grace_ms;
        config.sync = false;
        config.segment_bytes = settings.segment_bytes;
        config.layout = settings.layout.unwrap_or(config.layout);
        if let Some(clock) = settings.clock {
            config.clock = clock;
        }
        let [history, feed, settled] = ["history", "feed", "settlement"].map(Durable::new);
        let shared = backlog.clone();
        let journal = settings.journal;
        if journal.is_some() {
            // No record is cached in memory: every read reaches the storage under test.
            config.recent_bytes = 0;
        }
        let start = move || match journal {
            Some(storage) => SequencerHandle::start_on(config, shared, Arc::new(storage)),
            None => SequencerHandle::start(config, shared),
        };
        let mut sequencer = tokio::task::spawn_blocking(start).await.unwrap().unwrap();
        let (node, parts) = (NodeId::new(1).unwrap(), sequencer.replica_parts());
        let live = move || LiveReplica::start(node, parts, settings.checkpoints);
        let replica = tokio::task::spawn_blocking(live).await.unwrap().unwrap();
        if let Some(bytes) = settings.retain_bytes {
            let followers = vec![history.clone(), feed.clone(), settled.clone()];
            let mut retention = Retention::new(bytes, followers);
            retention.every = Duration::from_millis(20);
            sequencer.start_retention(retention).unwrap();
        }
        let settlement_config = SettlementConfig {
            data_dir: folder.join("settlement"),
            linger_ms: settings.linger_ms,
            wait_ms: settings.settle_wait_ms,
            ..SettlementConfig::default()
        };
        let settlement_deps = SettlementDeps {
            replica: replica.replica(),
            durable: settled,
            backlog,
            journal: settlement::journal_port(sequencer.port()),
            ledger: service(0),
            cfa: service(2),
            log: log.clone(),
        };
        let settlement = settlement::start(settlement_config, settlement_deps, stop_rest.clone())
            .await
            .unwrap();
        let gateway_config = GatewayConfig {
            data_dir: folder.join("gateway"),
            ..settings.gateway
        };
        let gateway_deps = GatewayDeps {
            log: Arc::new(UnavailableLog {
                log: log.clone(),
                is_unavailable: settings.log_is_unavailable,
                hangs: settings.log_hangs,
            }),
            auth: auth.clone(),
            identity: service(1),
            ledger: service(0),
            cfa: service(2),
            port: sequencer.port(),
            commit: sequencer.commit(),
            replica: replica.replica(),
            history,
            feed,
        };
        let gateway = gateway::start(gateway_config, gateway_deps, stop_gateway.clone())
            .await
            .unwrap();
        slots[3].fill(rpc::with_auth(gateway.service().routes, &auth));
        Self {
            folder: folder.to_owned(),
            identity,
            registry,
            ledger: LedgerServiceClient::new(service(0)),
            market: slots[3].clone(),
            log,
            gateway,
            settlement,
            embedded,
            replica: Some(replica),
            sequencer: Some(sequencer),
            ledger_handle,
            slots,
            stop_gateway,
            stop_rest,
        }
    }

    /// Ends identity: every call of it is refused as unavailable.
    pub fn end_identity(&self) {
        self.slots[1].clear();
    }

    /// Begins the shutdown: order intake ends. [`Self::stop`] completes it.
    pub fn begin_shutdown(&self) {
        self.stop_gateway.cancel();
    }

    /// Stops all services in shutdown order.
    pub async fn stop(self) -> (PathBuf, Arc<ServiceDoubles>, Arc<Registry>) {
        self.stop_gateway.cancel();
        self.gateway.stopped().await;
        let (replica, sequencer) = (self.replica, self.sequencer);
        let ending = move || {
            drop(replica);
            sequencer.map(SequencerHandle::stop)
        };
        tokio::task::spawn_blocking(ending).await.unwrap();
        self.stop_rest.cancel();
        self.settlement.stopped().await;
        self.ledger_handle.stopped().await;
        self.slots.iter().for_each(LocalSlot::clear);
        drop(self.log);
        self.embedded.close().await;
        (self.folder, self.identity, self.registry)
    }

    /// Stops replica and sequencer. The gateway continues.
    pub async fn stop_trading_path(&mut self) {
        let (replica, sequencer) = (self.replica.take(), self.sequencer.take());
        let ending = move || {
            drop(replica);
            sequencer.map(SequencerHandle::stop)
        };
        tokio::task::spawn_blocking(ending).await.unwrap();
    }

    /// Stops, and starts again with the same folder.
    pub async fn restart(self, settings: Settings) -> Self {
        let (folder, identity, registry) = self.stop().await;
        Self::start(&folder, settings, identity, registry).await
    }

    /// Client of MarketService with this credential.
    pub fn as_caller(&self, token: &str) -> MarketServiceClient<Channel> {
        MarketServiceClient::new(Channel::local(&self.market, token))
    }

    pub fn trader(&self, user_id: &str) -> MarketServiceClient<Channel> {
        self.as_caller(&format!("sandbox.trader.{user_id}"))
    }

    /// The user's position in the bond.
    pub async fn position(&self, user_id: &str) -> String {
        let request = GetPositionRequest {
            context: None,
            user_id: user_id.to_owned(),
            instrument_id: BOND.to_owned(),
        };
        let position = self.operator().get_position(request).await.unwrap();
        position.into_inner().quantity.unwrap().value
    }

    pub fn operator(&self) -> MarketServiceClient<Channel> {
        self.as_caller("sandbox.operator")
    }

    /// A client as the approvals service, which makes the calls that take two persons.
    pub fn approved(&self) -> MarketServiceClient<Channel> {
        self.as_caller(testkit::APPROVED)
    }

    /// Creates a user with KYC that owns roubles and bonds.
    pub async fn user(&mut self, user_id: &str, roubles: &str, bonds: &str) {
        self.identity.upsert_user(user_id, |_| {});
        self.deposit(user_id, "CFA-RUB", roubles).await;
        self.deposit(user_id, BOND, bonds).await;
    }

    /// Deposits an amount to a user; no effect if it is "0".
    pub async fn deposit(&mut self, user_id: &str, instrument_id: &str, amount: &str) {
        if amount == "0" {
            return;
        }
        let request = books::CreateOperationRequest {
            context: context(&format!("deposit-{user_id}-{instrument_id}-{}", unique())),
            operation: Some(books::Operation {
                r#type: OperationType::Deposit.into(),
                user_id: user_id.to_owned(),
                ..Default::default()
            }),
            postings: vec![books::Posting {
                debit_subaccount_id: format!("system:reserve:{instrument_id}"),
                credit_subaccount_id: format!("{user_id}:{instrument_id}"),
                amount: Some(MonetaryAmount {
                    currency_code: instrument_id.to_owned(),
                    amount: decimal(amount),
                }),
                ..Default::default()
            }],
            instrument_scales: match instrument_id {
                "CFA-RUB" => vec![],
                id => vec![books::InstrumentScale {
                    instrument_id: id.to_owned(),
                    decimals: 0,
                }],
            },
        };
        self.ledger.create_operation(request).await.unwrap();
    }

    /// (balance, held, available) of a sub-account.
    pub async fn balance(
        &mut self,
        user_id: &str,
        instrument_id: &str,
    ) -> (String, String, String) {
        let request = books::GetBalanceRequest {
            context: None,
            subaccount_id: format!("{user_id}:{instrument_id}"),
            as_of: None,
        };
        let answer = self.ledger.get_balance(request).await.unwrap().into_inner();
        let text = |value: Option<Decimal>| value.unwrap().value;
        (
            text(answer.balance),
            text(answer.held),
            text(answer.available),
        )
    }

    /// Journals a command of settlement.
    pub async fn journal(&self, command: types::Command) {
        let port = self.sequencer.as_ref().expect("the trading path").port();
        let journalled = port.settlement(command).await;
        assert!(journalled.expect("the node runs").is_some(), "{command:?}");
    }

    pub fn port(&self) -> sequencer::Port {
        self.sequencer.as_ref().expect("the trading path").port()
    }

    /// How many times the hot thread has parked.
    pub fn parks(&self) -> u64 {
        let sequencer = self.sequencer.as_ref().expect("the trading path");
        sequencer.stats().parks.load(Ordering::Relaxed)
    }

    pub fn replica(&self) -> replica::Replica {
        self.replica.as_ref().expect("the trading path").replica()
    }

    /// Waits until settlement has processed every durable record and the market has its position.
    /// The released holds are then in the ledger.
    pub async fn settled(&self) {
        let last = Sequence(self.status().await.commit_sequence);
        let replica = self.replica();
        let drained = async {
            self.settlement.drained(last).await;
            while replica.settlement().finalized < last {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, drained).await;
        waited.unwrap_or_else(|_| {
            let failing = self.settlement.health().failing();
            panic!("not settled: {:?}, {failing:?}", self.settlement.stats())
        });
    }

    pub async fn status(&self) -> GetMarketStatusResponse {
        let request = GetMarketStatusRequest { context: None };
        self.operator()
            .get_market_status(request)
            .await
            .unwrap()
            .into_inner()
    }

    pub async fn holds(&mut self, user_id: &str, instrument_id: &str) -> Vec<books::Hold> {
        let request = books::ListHoldsRequest {
            subaccount_id: format!("{user_id}:{instrument_id}"),
            ..Default::default()
        };
        self.ledger
            .list_holds(request)
            .await
            .unwrap()
            .into_inner()
            .holds
    }

    /// The trading holds of a user.
    pub async fn trading_holds(&self, user_id: &str) -> Vec<TradingHold> {
        let request = ListTradingHoldsRequest {
            user_id: user_id.to_owned(),
            ..Default::default()
        };
        let answer = self.trader(user_id).list_trading_holds(request).await;
        answer.unwrap().into_inner().trading_holds
    }

    /// Opens a trading hold.
    pub async fn open_hold(&self, user_id: &str, instrument_id: &str, amount: &str) -> TradingHold {
        let request = OpenTradingHoldRequest {
            context: context(&format!("open-{user_id}-{instrument_id}")),
            user_id: user_id.to_owned(),
            instrument_id: instrument_id.to_owned(),
            amount: decimal(amount),
        };
        let answer = self
            .trader(user_id)
            .open_trading_hold(request)
            .await
            .unwrap();
        answer.into_inner().trading_hold.unwrap()
    }

    pub async fn place(&self, order: Order) -> Result<Order, Status> {
        let user_id = order.user_id.clone();
        self.place_with(&user_id, &unique(), order).await
    }

    pub async fn place_with(
        &self,
        user_id: &str,
        key: &str,
        order: Order,
    ) -> Result<Order, Status> {
        let request = PlaceOrderRequest {
            context: context(key),
            order: Some(order),
        };
        let answer = self.trader(user_id).place_order(request).await?;
        Ok(answer.into_inner().order.unwrap())
    }

    pub async fn cancel(&self, user_id: &str, order_id: &str) -> Result<Order, Status> {
        let request = CancelOrderRequest {
            context: context(&unique()),
            order_id: order_id.to_owned(),
        };
        let answer = self.trader(user_id).cancel_order(request).await?;
        Ok(answer.into_inner().order.unwrap())
    }

    pub async fn order(&self, order_id: &str) -> Result<Order, Status> {
        let request = GetOrderRequest {
            context: None,
            order_id: order_id.to_owned(),
        };
        let answer = self.operator().get_order(request).await?;
        Ok(answer.into_inner().order.unwrap())
    }

    /// Waits until an order is no longer open.
    pub async fn until_ended(&self, order: &Order) {
        until_true("the order ends", async || {
            let order = self.order(&order.order_id).await.unwrap();
            order.status() != OrderStatus::Open
        })
        .await;
    }

    /// Price and quantity of each bid level and ask level, best first.
    pub async fn book(&self) -> (Vec<(String, String)>, Vec<(String, String)>) {
        let request = GetOrderBookRequest {
            context: None,
            instrument_id: BOND.to_owned(),
            depth: 0,
        };
        let answer = self.operator().get_order_book(request).await.unwrap();
        let snapshot = answer.into_inner().snapshot.unwrap();
        let side = |levels: Vec<OrderBookLevel>| {
            let text = |value: Option<Decimal>| value.unwrap().value;
            levels
                .into_iter()
                .map(|level| (text(level.price), text(level.quantity)))
                .collect()
        };
        (side(snapshot.bids), side(snapshot.asks))
    }

    /// Trades of a user, newest first.
    pub async fn trades(&self, user_id: &str) -> Vec<Trade> {
        let request = ListTradesRequest {
            user_id: user_id.to_owned(),
            ..Default::default()
        };
        let answer = self.trader(user_id).list_trades(request).await.unwrap();
        answer.into_inner().trades
    }

    /// Connects a session on channel 0.
    pub async fn session(&self, options: LoginOptions) -> (Connection, Reports) {
        let (connection, reports) = self.connect().await;
        let logged_in = in_time("the login is answered", connection.login(0, options));
        logged_in.await.unwrap();
        (connection, reports)
    }

    pub async fn connect(&self) -> (Connection, Reports) {
        let trust: Trust = self.gateway.fingerprint().parse().unwrap();
        Connection::connect(self.gateway.trading_address(), trust)
            .await
            .unwrap()
    }

    /// Events of a topic from its beginning, until `count` of them satisfy `wanted`.
    pub async fn events(
        &self,
        topic: &str,
        count: usize,
        wanted: impl Fn(&events::Event) -> bool,
    ) -> Vec<events::Event> {
        let mut subscription = self.log.subscribe(&unique(), &[topic]).await.unwrap();
        let mut found = Vec::new();
        while found.len() < count {
            let what = format!("event {} of {count} on {topic}", found.len() + 1);
            let delivery = in_time(&what, subscription.next()).await.unwrap();
            if wanted(&delivery.record.event) {
                found.push(delivery.record.event);
            }
        }
        found
    }
}

/// Waits for a future, at most [`PATIENCE`]. `what` names it in the panic.
pub async fn in_time<T>(what: &str, waiting: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(PATIENCE, waiting).await;
    waited.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

/// Polls a condition until it is true.
pub async fn until_true(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let polling = async {
        while !is_true().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    in_time(what, polling).await;
}

/// Publishes an event in the name of another service.
pub async fn publish(world: &World, topic: &str, key: &str, type_name: &str, payload: Vec<u8>) {
    let event = event(topic, key, type_name, payload);
    world.log.publish(&[event]).await.unwrap();
}

pub fn event(topic: &str, key: &str, type_name: &str, payload: Vec<u8>) -> events::Event {
    events::Event {
        id: uuid::Uuid::now_v7(),
        topic: topic.into(),
        key: key.into(),
        type_name: type_name.into(),
        subject: key.into(),
        source: "test".into(),
        correlation_id: "c".into(),
        occurred_at_us: 1,
        payload,
    }
}

/// A bond with a tick of 0.01 roubles and a lot of 1.
pub fn bond(id: &str) -> Instrument {
    Instrument {
        instrument_id: id.to_owned(),
        symbol: id.to_owned(),
        name: "A bond".to_owned(),
        r#type: InstrumentType::CfaBond.into(),
        status: InstrumentStatus::Active.into(),
        tick_size: decimal("0.01"),
        lot_size: decimal("1"),
        price_band_low: decimal("1"),
        price_band_high: decimal("100000"),
        ..Instrument::default()
    }
}

/// A limit order, good till cancelled.
pub fn limit(user_id: &str, side: OrderSide, price: &str, quantity: &str) -> Order {
    Order {
        user_id: user_id.to_owned(),
        instrument_id: BOND.to_owned(),
        side: side.into(),
        r#type: OrderType::Limit.into(),
        time_in_force: TimeInForce::Gtc.into(),
        price: decimal(price),
        quantity: decimal(quantity),
        ..Order::default()
    }
}

pub fn buy(user_id: &str, price: &str, quantity: &str) -> Order {
    limit(user_id, OrderSide::Buy, price, quantity)
}

pub fn sell(user_id: &str, price: &str, quantity: &str) -> Order {
    limit(user_id, OrderSide::Sell, price, quantity)
}

/// A limit order of the binary protocol on the bond.
pub fn wire_order(
    client_order_id: u64,
    side: Side,
    price_ticks: i64,
    quantity_lots: u64,
) -> wire::NewOrder {
    wire::NewOrder::limit(client_order_id, 0, side, price_ticks, quantity_lots)
}

pub fn login(user_id: &str, name: &str) -> LoginOptions {
    LoginOptions::new(&format!("sandbox.trader.{user_id}"), name)
}

/// A login that opens a money hold of 50,000 roubles.
pub fn with_money(user_id: &str, name: &str) -> LoginOptions {
    LoginOptions {
        money_hold_minor: 5_000_000,
        ..login(user_id, name)
    }
}

/// Closes the connection and waits for the error of its reports.
pub async fn cut(connection: &Connection, reports: &mut Reports) {
    connection.cut();
    let ended = async { while reports.recv().await.expect("the loss is reported").is_ok() {} };
    in_time("the loss of the connection", ended).await;
}

pub async fn next_report(reports: &mut Reports) -> Report {
    let report = in_time("a report", reports.recv()).await;
    report
        .expect("the connection exists")
        .expect("the connection is open")
}

/// The next numbered report.
pub async fn next_numbered(reports: &mut Reports) -> Report {
    let reading = async {
        loop {
            let report = next_report(reports).await;
            if report.sequence != 0 {
                return report;
            }
        }
    };
    in_time("a numbered report", reading).await
}

pub fn ack(message: &ServerMessage) -> Option<wire::OrderAck> {
    match message {
        ServerMessage::OrderAck(ack) => Some(*ack),
        _ => None,
    }
}

pub fn fill(message: &ServerMessage) -> Option<wire::Fill> {
    match message {
        ServerMessage::Fill(fill) => Some(*fill),
        _ => None,
    }
}

pub fn cancelled(message: &ServerMessage) -> Option<wire::Cancelled> {
    match message {
        ServerMessage::Cancelled(cancelled) => Some(*cancelled),
        _ => None,
    }
}

pub fn rejected(message: &ServerMessage) -> Option<wire::Rejected> {
    match message {
        ServerMessage::Rejected(rejected) => Some(*rejected),
        _ => None,
    }
}

/// Reads reports until `pick` returns a value.
pub async fn until<T>(reports: &mut Reports, pick: impl Fn(&ServerMessage) -> Option<T>) -> T {
    let reading = async {
        loop {
            if let Some(found) = pick(&next_report(reports).await.message) {
                return found;
            }
        }
    };
    in_time("the wanted report", reading).await
}

/// Code, text and reason of a refusal.
pub fn refused(status: Status) -> (tonic::Code, String, String) {
    (
        status.code(),
        status.message().to_owned(),
        rpc::status::reason(&status).unwrap_or_default(),
    )
}
