//! The platform in one process: started in numbered steps, stopped in reverse order.
//!
//! Services call each other over the contract in `proto`, served in memory: a service gets
//! channels, not the handle of another service. A channel resolves its service at each call, so the
//! order below matters only for calls made during a start.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use cfa::AuditedService;
use replica::LiveReplica;
use rpc::{Authenticator, Channel, LocalSlot, MetricsHandle, Service};
use sequencer::{Backlog, Durable, SequencerHandle, priority};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use types::{NodeId, Sequence};

use crate::config::{Config, Listen};
use crate::disk;
use crate::manifest::Manifest;

/// Credential of the platform's own services.
const SERVICE: &str = "sandbox.service";
/// Credential of the approvals service.
const APPROVALS: &str = "sandbox.service.approvals";

/// Listening addresses.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Addresses {
    pub all: SocketAddr,
    pub ledger: SocketAddr,
    pub cfa: SocketAddr,
    pub payments: SocketAddr,
    pub market: SocketAddr,
    pub identity: SocketAddr,
    pub approvals: SocketAddr,
    pub bank: SocketAddr,
    pub chain: SocketAddr,
    pub chain_rpc: SocketAddr,
    pub trading: SocketAddr,
}

impl Addresses {
    /// Name, purpose and address of each port, for the console.
    pub fn lines(&self) -> Vec<(&'static str, &'static str, String)> {
        let http = |address: SocketAddr| format!("http://{address}");
        vec![
            (
                "all",
                "every RPC (gRPC, gRPC-Web, Connect) with reflection",
                http(self.all),
            ),
            ("ledger", "LedgerService", http(self.ledger)),
            ("cfa", "CfaRegistryService", http(self.cfa)),
            (
                "payments",
                "PaymentsService, POST /webhook",
                http(self.payments),
            ),
            ("market", "MarketService", http(self.market)),
            ("identity", "IdentityService (sandbox)", http(self.identity)),
            ("approvals", "ApprovalService", http(self.approvals)),
            ("bank", "bank and fast payments (sandbox)", http(self.bank)),
            ("chain", "ChainConnectorService", http(self.chain)),
            (
                "chain_rpc",
                "JSON-RPC of the development chain",
                http(self.chain_rpc),
            ),
            (
                "trading",
                "trading sessions over QUIC",
                format!("quic://{}", self.trading),
            ),
        ]
    }
}

/// Sockets bound before anything starts: a port conflict fails early, and services know all
/// addresses.
struct Sockets {
    all: TcpListener,
    ledger: TcpListener,
    cfa: TcpListener,
    payments: TcpListener,
    market: TcpListener,
    identity: TcpListener,
    approvals: TcpListener,
    chain: TcpListener,
    chain_rpc: TcpListener,
}

impl Sockets {
    async fn bind(listen: &Listen) -> anyhow::Result<Self> {
        Ok(Self {
            all: bind("all", listen.all).await?,
            ledger: bind("ledger", listen.ledger).await?,
            cfa: bind("cfa", listen.cfa).await?,
            payments: bind("payments", listen.payments).await?,
            market: bind("market", listen.market).await?,
            identity: bind("identity", listen.identity).await?,
            approvals: bind("approvals", listen.approvals).await?,
            chain: bind("chain", listen.chain).await?,
            chain_rpc: bind("chain_rpc", listen.chain_rpc).await?,
        })
    }

    fn addresses(&self, bank: SocketAddr, trading: SocketAddr) -> std::io::Result<Addresses> {
        Ok(Addresses {
            all: self.all.local_addr()?,
            ledger: self.ledger.local_addr()?,
            cfa: self.cfa.local_addr()?,
            payments: self.payments.local_addr()?,
            market: self.market.local_addr()?,
            identity: self.identity.local_addr()?,
            approvals: self.approvals.local_addr()?,
            bank,
            chain: self.chain.local_addr()?,
            chain_rpc: self.chain_rpc.local_addr()?,
            trading,
        })
    }
}

async fn bind(name: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("listen.{name} = {address}"))
}

/// In-memory endpoints of the services.
#[derive(Default)]
struct LocalEndpoints {
    ledger: LocalSlot,
    cfa: LocalSlot,
    chain: LocalSlot,
    payments: LocalSlot,
    identity: LocalSlot,
    market: LocalSlot,
    settlement: LocalSlot,
    approvals: LocalSlot,
}

impl LocalEndpoints {
    fn ledger(&self) -> Channel {
        Channel::local(&self.ledger, SERVICE)
    }

    fn cfa(&self) -> Channel {
        Channel::local(&self.cfa, SERVICE)
    }

    fn chain(&self) -> Channel {
        Channel::local(&self.chain, SERVICE)
    }

    fn payments(&self) -> Channel {
        Channel::local(&self.payments, SERVICE)
    }

    fn identity(&self) -> Channel {
        Channel::local(&self.identity, SERVICE)
    }

    fn market(&self) -> Channel {
        Channel::local(&self.market, SERVICE)
    }

    /// The services with calls that take an approval, by the area of their package.
    fn approvable(&self) -> HashMap<&'static str, Channel> {
        let slots = [
            ("ledger", &self.ledger),
            ("cfa", &self.cfa),
            ("payments", &self.payments),
            ("identity", &self.identity),
            ("market", &self.market),
            ("settlement", &self.settlement),
        ];
        HashMap::from(slots.map(|(area, slot)| (area, Channel::local(slot, APPROVALS))))
    }

    /// The services whose audit records the CFA service anchors, besides those of the ledger and
    /// its own.
    fn audited(&self) -> Vec<(AuditedService, Channel)> {
        let slots = [
            (AuditedService::Approvals, &self.approvals),
            (AuditedService::Identity, &self.identity),
            (AuditedService::Market, &self.market),
            (AuditedService::Payments, &self.payments),
            (AuditedService::Settlement, &self.settlement),
        ];
        Vec::from(slots.map(|(service, slot)| (service, Channel::local(slot, SERVICE))))
    }

    fn clear(&self) {
        for slot in [
            &self.ledger,
            &self.cfa,
            &self.chain,
            &self.payments,
            &self.identity,
            &self.market,
            &self.settlement,
            &self.approvals,
        ] {
            slot.clear();
        }
    }
}

/// Shutdown tokens, one per stage.
#[derive(Default)]
struct Stages {
    /// Listeners and sessions. The gateway's handle ends after them: it answers their last orders.
    edge: CancellationToken,
    settlement: CancellationToken,
    /// Payments, CFA life cycle, identity, bank.
    services: CancellationToken,
    ledger: CancellationToken,
    chain: CancellationToken,
}

/// A running platform.
pub struct Platform {
    addresses: Addresses,
    local: LocalEndpoints,
    stages: Stages,
    listeners: JoinSet<Result<(), rpc::Error>>,
    gateway: gateway::GatewayHandle,
    replica: LiveReplica,
    sequencer: SequencerHandle,
    settlement: settlement::SettlementHandle,
    payments: payments::PaymentsHandle,
    cfa: cfa::CfaHandle,
    approvals: approvals::ApprovalsHandle,
    identity: sandbox::identity::IdentityHandle,
    bank: sandbox::bank::BankHandle,
    ledger: ledger::LedgerHandle,
    chain: chain::ChainHandle,
    embedded: Option<events::Embedded>,
    /// Held while the platform runs.
    lock: std::fs::File,
}

/// The public RPC ports. A caller's call rate applies to all ports together.
struct Ports {
    listeners: JoinSet<Result<(), rpc::Error>>,
    limits: rpc::Limits,
    auth: Authenticator,
    metrics: MetricsHandle,
    shutdown: CancellationToken,
}

impl Ports {
    fn new(
        calls: rpc::CallRateConfig,
        auth: Authenticator,
        metrics: MetricsHandle,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            listeners: JoinSet::new(),
            limits: rpc::Limits {
                rates: rpc::CallRates::new(calls),
                ..rpc::Limits::default()
            },
            auth,
            metrics,
            shutdown,
        }
    }

    fn serve(&mut self, listener: TcpListener, services: Vec<Service>) {
        self.listeners.spawn(rpc::serve::serve_within(
            listener,
            services,
            self.auth.clone(),
            self.metrics.clone(),
            self.limits.clone(),
            self.shutdown.clone(),
        ));
    }
}

impl Platform {
    /// Starts everything; returns when every port answers.
    ///
    /// # Errors
    /// A part cannot start; the error names it and the reason.
    pub async fn start(mut config: Config) -> anyhow::Result<Self> {
        anyhow::ensure!(
            config.sandbox.enabled,
            "sandbox.enabled = false: real identity and bank connections are not part of this version"
        );
        let metrics = rpc::metrics_init();
        keep_threads()?;

        // Before the first port is bound: connection limits derive from the descriptor limit.
        match rpc::connections::raise_descriptor_limit() {
            Ok(limit) => tracing::info!(limit, "limit of open files"),
            Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
        }

        // 1. Lock and check the data folder, bind all ports.
        let lock = lock_folder(&config.data_dir)?;
        let manifest = Manifest::check(&config)?;
        let sockets = Sockets::bind(&config.listen).await?;
        config.listen.payments = sockets.payments.local_addr()?;
        config.set_addresses();

        // 2. The event log.
        let stages = Stages::default();
        let (log, embedded) = open_log(&config, &stages.edge).await?;
        let mut start = Start {
            config,
            log,
            auth: Authenticator::Sandbox,
            stages,
            local: LocalEndpoints::default(),
        };

        // 3. The chain and its connector, then the ledger.
        let chain = start.chain().await?;
        let ledger = start.ledger().await?;
        // 4. External systems: identity and bank.
        let identity = start.identity().await?;
        let bank = start.bank().await?;
        // 5. The CFA life cycle and payments, which call each other, and the approvals.
        let cfa = start.cfa(&chain).await?;
        let payments = start.payments().await?;
        let approvals = start.approvals().await?;
        // 6. The trading path: journal, books, settlement, gateway.
        let trading = start.trading().await?;
        // All stores exist. From now on a missing store is a lost one.
        manifest.complete()?;

        let ports = Ports::new(
            start.config.calls,
            start.auth,
            metrics,
            start.stages.edge.clone(),
        );
        let mut platform = Self {
            addresses: sockets.addresses(bank.address(), trading.gateway.trading_address())?,
            local: start.local,
            stages: start.stages,
            listeners: JoinSet::new(),
            gateway: trading.gateway,
            replica: trading.replica,
            sequencer: trading.sequencer,
            settlement: trading.settlement,
            payments,
            cfa,
            approvals,
            identity,
            bank,
            ledger,
            chain,
            embedded,
            lock,
        };
        // 7. Public listeners: a port per service, and one for all.
        platform.serve(sockets, ports);
        Ok(platform)
    }

    fn serve(&mut self, sockets: Sockets, mut ports: Ports) {
        self.chain.serve_json_rpc(sockets.chain_rpc);
        let mut serve = |listener, services| ports.serve(listener, services);
        serve(sockets.ledger, vec![self.ledger.service()]);
        serve(sockets.cfa, vec![self.cfa.service()]);
        serve(sockets.payments, vec![self.payments.service()]);
        serve(sockets.market, vec![self.gateway.service()]);
        serve(sockets.identity, vec![self.identity.service()]);
        serve(sockets.approvals, vec![self.approvals.service()]);
        serve(sockets.chain, vec![self.chain.service()]);
        serve(
            sockets.all,
            vec![
                self.ledger.service(),
                self.cfa.service(),
                self.payments.service(),
                self.gateway.service(),
                self.identity.service(),
                self.approvals.service(),
                self.chain.service(),
                self.settlement.service(),
                self.bank.service(),
            ],
        );
        self.listeners = ports.listeners;
    }

    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Stops accepting orders, drains and flushes. The next start resumes work in progress on chain
    /// or at the bank.
    ///
    /// # Errors
    /// A listener had failed, or the trading path panicked while stopping.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        // Reverse order of the start.
        self.stages.edge.cancel();
        let mut failure = None;
        // The gateway ends after the listeners: it answers their running calls from the journal.
        while let Some(ended) = self.listeners.join_next().await {
            match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failure = Some(anyhow::Error::from(error)),
                Err(error) => failure = Some(anyhow::Error::from(error)),
            }
        }
        self.gateway.stopped().await;
        self.stages.settlement.cancel();
        self.settlement.stopped().await;
        let (replica, sequencer) = (self.replica, self.sequencer);
        let ending = move || {
            drop(replica);
            sequencer.stop();
        };
        tokio::task::spawn_blocking(ending)
            .await
            .context("the trading path")?;
        self.stages.services.cancel();
        self.approvals.stopped().await;
        self.payments.stopped().await;
        self.cfa.stopped().await;
        self.identity.stopped().await;
        self.bank.stopped().await;
        self.stages.ledger.cancel();
        self.ledger.stopped().await;
        self.stages.chain.cancel();
        self.chain.stopped().await;
        self.local.clear();
        if let Some(embedded) = self.embedded {
            embedded.close().await;
        }
        drop(self.lock);
        match failure {
            Some(error) => Err(error.context("a listener failed")),
            None => Ok(()),
        }
    }
}

/// Reports the health of settlement and of the journal's truncation in the market's, and closes the
/// market to new orders on a low disk.
fn watch_market(
    config: &Config,
    settlement: &settlement::SettlementHandle,
    gateway: &gateway::GatewayHandle,
    sequencer: &SequencerHandle,
    until: &CancellationToken,
) {
    let (settlement, market) = (settlement.health(), gateway.service().health);
    // Settlement has no port of its own: the market's health includes it, and the port `all` serves
    // its calls.
    tokio::spawn(mirror_health(settlement, market.clone(), until.clone()));
    if let Some(trouble) = sequencer.retention_trouble() {
        tokio::spawn(show_retention(trouble, market.clone(), until.clone()));
    }
    if config.disk.reserve_mib > 0 {
        let (folder, reserve) = (
            config.data_dir.clone(),
            u64::from(config.disk.reserve_mib) << 20,
        );
        let backlog = sequencer.backlog().clone();
        tokio::spawn(disk::watch(folder, reserve, backlog, market, until.clone()));
    }
}

/// Shows in the health read why the journal is not truncated, until shutdown.
async fn show_retention(
    mut trouble: tokio::sync::watch::Receiver<Option<String>>,
    health: rpc::Health,
    until: CancellationToken,
) {
    const PART: &str = "journal_retention";
    loop {
        health.set(PART, trouble.borrow_and_update().as_deref());
        tokio::select! {
            changed = trouble.changed() => if changed.is_err() {
                health.set_failing(PART, "the thread that truncates the journal has ended");
                return;
            },
            () = until.cancelled() => return,
        }
    }
}

/// Mirrors one service's health parts in another's.
async fn mirror_health(from: rpc::Health, into: rpc::Health, until: CancellationToken) {
    let (mut failing, mut findings) = (from.watch(), from.watch_findings());
    let mut mirrored = rpc::health::Failing::new();
    let mut found = rpc::health::Failing::new();
    loop {
        let now = findings.borrow_and_update().clone();
        for (kind, reason) in &now {
            into.set_finding(kind, Some(reason));
        }
        for kind in found.keys().filter(|kind| !now.contains_key(*kind)) {
            into.set_finding(kind, None);
        }
        found = now;
        let now = failing.borrow_and_update().clone();
        for (part, reason) in &now {
            into.set_failing(part, reason);
        }
        for part in mirrored.keys().filter(|part| !now.contains_key(*part)) {
            into.set_ok(part);
        }
        mirrored = now;
        tokio::select! {
            changed = failing.changed() => if changed.is_err() { return },
            changed = findings.changed() => if changed.is_err() { return },
            () = until.cancelled() => return,
        }
    }
}

/// Creates the data folder if it is missing, and locks it. The lock ends with the returned file.
///
/// # Errors
/// The folder cannot be created, or another platform runs in it.
pub(crate) fn lock_folder(dir: &std::path::Path) -> anyhow::Result<std::fs::File> {
    let place = || format!("data folder {}", dir.display());
    std::fs::create_dir_all(dir).with_context(place)?;
    let file = std::fs::File::create(dir.join("platform.lock")).with_context(place)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            anyhow::bail!("{} is in use by another platform", place())
        }
        Err(std::fs::TryLockError::Error(error)) => Err(error).with_context(place),
    }
}

/// `until`: cancelled before the log is closed.
async fn open_log(
    config: &Config,
    until: &CancellationToken,
) -> anyhow::Result<(Arc<dyn events::Log>, Option<events::Embedded>)> {
    if let Some(brokers) = &config.events.kafka_brokers {
        let kafka = events::Kafka::connect(brokers, &HashMap::new()).context("Kafka")?;
        kafka.ensure_topics().await.context("topics of Kafka")?;
        let requests = ledger::request_and_reply_topics();
        kafka
            .create_topics(&requests)
            .await
            .context("request topics of Kafka")?;
        if let Some(age) = config.events.kafka_retention() {
            kafka.set_retention(age);
        }
        return Ok((Arc::new(kafka), None));
    }
    let embedded = events::Embedded::open(config.data_dir.join("events"))
        .await
        .context("event log")?;
    let retention = config.events.retention();
    tokio::spawn(embedded.clone().retain(retention, until.clone()));
    Ok((Arc::new(embedded.clone()), Some(embedded)))
}

/// What the parts of a platform need to start.
struct Start {
    config: Config,
    log: Arc<dyn events::Log>,
    auth: Authenticator,
    stages: Stages,
    local: LocalEndpoints,
}

/// The parts of the trading path.
struct Trading {
    gateway: gateway::GatewayHandle,
    replica: LiveReplica,
    sequencer: SequencerHandle,
    settlement: settlement::SettlementHandle,
}

impl Start {
    fn fill(&self, slot: &LocalSlot, service: Service) {
        slot.fill(rpc::with_auth(service.routes, &self.auth));
    }

    async fn chain(&self) -> anyhow::Result<chain::ChainHandle> {
        let deps = chain::ChainDeps {
            log: self.log.clone(),
        };
        let (config, shutdown) = (self.config.chain.clone(), self.stages.chain.clone());
        let started = chain::start_chain(config, deps, shutdown).await;
        let chain = started.context("chain")?;
        self.fill(&self.local.chain, chain.service());
        Ok(chain)
    }

    async fn ledger(&self) -> anyhow::Result<ledger::LedgerHandle> {
        let deps = ledger::LedgerDeps::new(self.log.clone(), self.local.cfa());
        let (config, shutdown) = (self.config.ledger.clone(), self.stages.ledger.clone());
        let started = ledger::start(config, deps, shutdown).await;
        let ledger = started.context("ledger")?;
        self.fill(&self.local.ledger, ledger.service());
        Ok(ledger)
    }

    async fn identity(&self) -> anyhow::Result<sandbox::identity::IdentityHandle> {
        let deps = sandbox::identity::IdentityDeps {
            log: self.log.clone(),
        };
        let (config, shutdown) = (self.config.identity.clone(), self.stages.services.clone());
        let started = sandbox::identity::start(config, deps, shutdown).await;
        let identity = started.context("identity")?;
        self.fill(&self.local.identity, identity.service());
        Ok(identity)
    }

    /// Starts the bank and sets its address in the configuration of its callers.
    async fn bank(&mut self) -> anyhow::Result<sandbox::bank::BankHandle> {
        let shutdown = self.stages.services.clone();
        let started = sandbox::bank::start(self.config.bank.clone(), shutdown).await;
        let bank = started.context("bank")?;
        self.config.listen.bank = bank.address();
        self.config.set_addresses();
        Ok(bank)
    }

    async fn cfa(&self, chain: &chain::ChainHandle) -> anyhow::Result<cfa::CfaHandle> {
        let deps = cfa::CfaDeps {
            log: self.log.clone(),
            ledger: self.local.ledger(),
            payments: self.local.payments(),
            identity: self.local.identity(),
            market: self.local.market(),
            audited: self.local.audited(),
            chain: chain.connector(),
            clock: cfa::Clock::default(),
        };
        let (config, shutdown) = (self.config.cfa.clone(), self.stages.services.clone());
        let cfa = cfa::start(config, deps, shutdown).await.context("cfa")?;
        self.fill(&self.local.cfa, cfa.service());
        Ok(cfa)
    }

    async fn payments(&self) -> anyhow::Result<payments::PaymentsHandle> {
        let deps = payments::PaymentsDeps {
            log: self.log.clone(),
            identity: self.local.identity(),
            cfa: self.local.cfa(),
            chain: self.local.chain(),
            alerts: self.config.alerts.sinks(),
        };
        let (config, shutdown) = (self.config.payments.clone(), self.stages.services.clone());
        let started = payments::start(config, deps, shutdown).await;
        let payments = started.context("payments")?;
        self.fill(&self.local.payments, payments.service());
        Ok(payments)
    }

    /// Starts the approvals service. It makes approved calls of the other services.
    async fn approvals(&self) -> anyhow::Result<approvals::ApprovalsHandle> {
        let deps = approvals::ApprovalsDeps {
            log: self.log.clone(),
            services: self.local.approvable(),
            clock: service_kit::Clock::default(),
        };
        let (config, shutdown) = (self.config.approvals.clone(), self.stages.services.clone());
        let started = approvals::start(config, deps, shutdown).await;
        let approvals = started.context("approvals")?;
        self.fill(&self.local.approvals, approvals.service());
        Ok(approvals)
    }

    async fn trading(&self) -> anyhow::Result<Trading> {
        let (config, local) = (&self.config, &self.local);
        let backlog = Arc::new(Backlog::new(config.trading.bounds));
        let [history, feed, settled] = ["history", "feed", "settlement"].map(Durable::new);
        let followers = vec![history.clone(), feed.clone(), settled.clone()];
        let reach = journal_reach(config, local.ledger()).await?;
        let (sequencer, replica) =
            start_sequencer(config, followers, reach, backlog.clone()).await?;
        let deps = settlement::SettlementDeps {
            replica: replica.replica(),
            durable: settled,
            backlog,
            journal: settlement::journal_port(sequencer.port()),
            ledger: local.ledger(),
            cfa: local.cfa(),
            log: self.log.clone(),
        };
        let shutdown = self.stages.settlement.clone();
        let started = settlement::start(config.settlement.clone(), deps, shutdown).await;
        let settlement = started.context("settlement")?;
        let deps = gateway::GatewayDeps {
            log: self.log.clone(),
            auth: self.auth.clone(),
            identity: local.identity(),
            ledger: local.ledger(),
            cfa: local.cfa(),
            port: sequencer.port(),
            commit: sequencer.commit(),
            replica: replica.replica(),
            history,
            feed,
        };
        let edge = &self.stages.edge;
        let started = gateway::start(config.market.clone(), deps, edge.clone()).await;
        let gateway = started.context("market")?;
        self.fill(&local.market, gateway.service());
        self.fill(&local.settlement, settlement.service());
        watch_market(config, &settlement, &gateway, &sequencer, edge);
        Ok(Trading {
            gateway,
            replica,
            sequencer,
            settlement,
        })
    }
}

/// Sequence of the last journal record that the databases contain.
async fn journal_reach(config: &Config, ledger: Channel) -> anyhow::Result<Sequence> {
    let published = gateway::published_through(&config.market.data_dir).await;
    let settled = settlement::settled_through(ledger, config.settlement.node).await;
    let published = published.context("position of the market's history")?;
    Ok(published.max(settled.context("settlement's position in the ledger")?))
}

/// Starts the clock's thread before any code reads the time, and lowers the priority of this
/// thread: threads that it starts serve calls. The trading path starts its threads from another
/// one.
fn keep_threads() -> anyhow::Result<()> {
    service_kit::clock::start_discipline().context("clock")?;
    priority::keep().context("threads")?;
    priority::lower(priority::SERVING);
    Ok(())
}

async fn start_sequencer(
    config: &Config,
    followers: Vec<Durable>,
    reach: Sequence,
    backlog: Arc<Backlog>,
) -> anyhow::Result<(SequencerHandle, LiveReplica)> {
    let mut settings = config.trading.settings(&config.journal_dir());
    settings.segment_bytes = config.journal.segment_bytes;
    settings.reach = reach;
    tracing::info!(
        layout = ?settings.layout,
        core = settings.core,
        spin_us = settings.spin_us,
        "threads of the trading path"
    );
    let node = NodeId::new(config.market.node).context("node number")?;
    let checkpoints = config.snapshots.settings(followers.clone());
    let retention = config.retention(followers);
    let start = move || {
        let mut sequencer = SequencerHandle::start(settings, backlog)?;
        let replica = LiveReplica::start(node, sequencer.replica_parts(), checkpoints)?;
        if let Some(retention) = retention {
            sequencer.start_retention(retention)?;
        }
        anyhow::Ok((sequencer, replica))
    };
    // The threads of the trading path inherit the priority of the thread that starts them.
    let (sender, receiver) = tokio::sync::oneshot::channel();
    priority::spawn("start", move || drop(sender.send(start())))?;
    receiver
        .await
        .context("the trading path")?
        .context("the trading path")
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R333
    #[test]
    fn d32_the_approvals_service_reaches_every_service_whose_calls_take_two_persons() {
        let services = LocalEndpoints::default().approvable();
        for row in rpc::roles::APPROVALS {
            let area = row.method.split('.').nth(1).unwrap();
            assert!(services.contains_key(area), "{}", row.method);
        }
    }

    /// The check of the anchors finds a service's records by its name.
    // rows: R215
    #[test]
    fn r215_each_anchored_service_has_a_store_of_its_name() {
        let config = Config::default();
        let mut stores: Vec<_> = crate::check::sealed_stores(&config)
            .iter()
            .map(|store| store.name)
            .filter(|name| !["chain", "ledger", "cfa"].contains(name))
            .collect();
        stores.sort_unstable();
        let audited = LocalEndpoints::default().audited();
        let audited: Vec<_> = audited.iter().map(|(service, _)| service.name()).collect();
        assert_eq!(audited, stores);
    }

    #[tokio::test]
    async fn the_markets_health_shows_what_settlement_waits_for() {
        let (settlement, market) = (rpc::Health::new("settlement"), rpc::Health::new("market"));
        let until = CancellationToken::new();
        market.set_failing("history", "away");
        let mirroring = tokio::spawn(mirror_health(
            settlement.clone(),
            market.clone(),
            until.clone(),
        ));
        let mut seen = market.watch();
        settlement.set_failing("settlement-ledger", "1:1-5: refused");
        let failing = seen.wait_for(|f| f.len() == 2).await.unwrap().clone();
        assert_eq!(failing["settlement-ledger"], "1:1-5: refused");
        settlement.set_ok("settlement-ledger");
        let failing = seen.wait_for(|f| f.len() == 1).await.unwrap().clone();
        assert_eq!(failing["history"], "away");
        until.cancel();
        mirroring.await.unwrap();
    }

    #[tokio::test]
    async fn the_markets_health_shows_why_the_journal_is_not_truncated() {
        let (market, until) = (rpc::Health::new("market"), CancellationToken::new());
        let (troubles, trouble) = tokio::sync::watch::channel(None);
        let showing = tokio::spawn(show_retention(trouble, market.clone(), until.clone()));
        let mut seen = market.watch();
        troubles.send_replace(Some("no descriptor".to_owned()));
        let failing = seen.wait_for(|f| !f.is_empty()).await.unwrap().clone();
        assert_eq!(failing["journal_retention"], "no descriptor");
        troubles.send_replace(None);
        drop(seen.wait_for(|f| f.is_empty()).await.unwrap());
        // The thread has ended before the shutdown.
        drop(troubles);
        drop(seen.wait_for(|f| !f.is_empty()).await.unwrap());
        showing.await.unwrap();
    }
}
