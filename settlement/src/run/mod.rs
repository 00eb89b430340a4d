//! The workers around the pure part. One follows the replica and posts to the ledger. One submits
//! posted batches to the chain and finalizes them. One journals progress, one blocks of users.
//!
//! Invariants:
//! - A batch is stored before it is sent, and a step's result before the next step.
//! - Batches are posted and submitted in sealing order. The ledger posts a batch before the chain
//!   settles it. A trade that the ledger refuses therefore stops the later ones until an operator
//!   removes the cause or busts it (`withdraw`).
//! - Trades that an attempt on chain does not execute are submitted again after all earlier batches
//!   are final.
//! - If one worker ends, all end. After a failure all restart from the ledger's position, with
//!   growing pauses. Meanwhile the market accepts no orders.

mod chain;
mod check;
mod commands;
mod failure;
mod halt;
mod ledger;
mod operators;
mod poster;
mod recover;
mod retention;
mod retry;
mod withdraw;

use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use replica::Replica;
use rpc::Context;
use sequencer::{Backlog, Durable};
use service_clients::{CallError, CfaClient, LedgerClient, Policy};
use service_kit::backoff;
use service_kit::clock::{monotonic_ns, now_ns, now_us};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use types::{Id128, NodeId, Sequence, derived};

use crate::batch::{CHAIN_TRADES_MAX, ChainSize, Limits};
use crate::progress::{Progress, Stats, Suspension, Tracker};
use crate::repo::{BreakRow, Repo, StoreError};
use crate::request::SOURCE;
use commands::Commands;
pub use commands::{JournalPort, journal_port};
use failure::CurrentFailures;
pub use failure::WaitingStep;
use halt::Halt;
pub use operators::{BustRefusal, By, OpenBatch, Operators};

/// Settings of settlement.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SettlementConfig {
    pub data_dir: PathBuf,
    /// Engine node whose journal is settled.
    pub node: u8,
    /// Number of trades at which a batch is sealed; the chain accepts at most 500. A batch needs up
    /// to 150,000 gas per trade, and its transaction has at most the gas of a block: one without
    /// enough gas is settled in halves, and later ones are smaller.
    pub batch_trades_max: usize,
    /// Maximum ledger rows per batch.
    pub batch_rows_max: usize,
    /// Longest wait of a trade for more trades in a quiet market.
    pub linger_ms: u64,
    /// Longest wait of returned money, and the age at which an order gets its own holds. The age
    /// doubles while trades wait for a busy chain.
    pub wait_ms: u64,
    /// Maximum batches that are submitted to the chain and not final. The submission of the next
    /// ones overlaps with the blocks and the finality of these.
    pub chain_batches_max: usize,
    /// Maximum posted batches that wait for their submission, about 60 KB each. Above it the ledger
    /// waits too, and the backlog closes the market.
    pub posted_batches_max: usize,
    /// Batches that are not final from which one with trades fills up instead of being sealed at
    /// once: the chain is busy.
    pub chain_busy_batches: usize,
    /// Number of batches between two comparisons of touched trading holds with the ledger.
    pub check_batches: u64,
    /// How long a trading hold may be short of the journal before it is a break.
    pub short_ms: u64,
    /// How long a trading hold may have a surplus before it is a break. Funding may be in progress,
    /// or interrupted by a crash: the gateway resumes it after about a minute.
    pub surplus_ms: u64,
    /// Pause between attempts of a repeatedly refused step, in milliseconds.
    pub refused_retry_ms: u64,
    /// Days after which final batches are removed; 0: never.
    pub final_retention_days: u32,
}

impl Default for SettlementConfig {
    fn default() -> Self {
        Self {
            data_dir: PathBuf::from("data"),
            node: 1,
            batch_trades_max: 250,
            batch_rows_max: 1_500,
            linger_ms: 5,
            wait_ms: 1_000,
            chain_batches_max: 16,
            posted_batches_max: 1_024,
            chain_busy_batches: 4,
            check_batches: 64,
            short_ms: 3_000,
            surplus_ms: 300_000,
            refused_retry_ms: 30_000,
            final_retention_days: 30,
        }
    }
}

impl SettlementConfig {
    fn limits(&self) -> Limits {
        Limits {
            trades: self.batch_trades_max.clamp(1, CHAIN_TRADES_MAX),
            weight: self.batch_rows_max.max(1),
            linger_ns: self.linger_ms * 1_000_000,
            wait_ns: self.wait_ms * 1_000_000,
            ..Limits::default()
        }
    }
}

/// Dependencies of settlement.
pub struct SettlementDeps {
    pub replica: Replica,
    /// Receives the ledger's position: settlement never reads records at or before it again.
    pub durable: Durable,
    /// Settlement's backlog, which the sequencer checks before it accepts an order.
    pub backlog: Arc<Backlog>,
    /// Accepts settlement's commands: [`journal_port`] of a running node.
    pub journal: JournalPort,
    /// Carries a service credential, as does `cfa`.
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    /// Receives the audit records.
    pub log: Arc<dyn events::Log>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("node {0} is not 0 to 63")]
    Node(u8),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot read settlement's position from the ledger: {0}")]
    Ledger(CallError),
}

/// Pause before a restart of the workers: first and longest. The market reopens once the workers
/// have run for as long as the next pause would be.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Interval between two updates of the age of the oldest open difference.
const AGE_INTERVAL: Duration = Duration::from_secs(1);
/// Id in the health of a failed worker.
const ENDED: &str = "ended";

/// State that survives a restart of the workers.
struct SharedState {
    config: SettlementConfig,
    node: NodeId,
    repo: Repo,
    tracker: Tracker,
    chain_size: ChainSize,
    ledger: LedgerClient,
    cfa: CfaClient,
    failures: CurrentFailures,
    suspended: watch::Sender<BTreeMap<String, Suspension>>,
    /// Locked from the read of the store to the publication of its result.
    publishing: tokio::sync::Mutex<()>,
    /// When the oldest open difference was found; 0: there is none.
    oldest_break_us: AtomicI64,
    /// Makes the comparisons of open differences due at once.
    compare: tokio::sync::Notify,
    /// Trades of open batches that an operator wants bust, with the reason.
    requested: Mutex<BTreeMap<Id128, String>>,
}

/// State of one run of the workers.
struct Shared {
    state: Arc<SharedState>,
    /// Notified when the poster continues from the ledger's position.
    is_recovered: tokio::sync::Notify,
    /// Cancelled at shutdown or when a worker ends.
    shutdown: CancellationToken,
}

impl Deref for Shared {
    type Target = SharedState;

    fn deref(&self) -> &SharedState {
        &self.state
    }
}

impl Shared {
    /// Runs `work`; [`Halt::Stopped`] if shutdown comes first.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, Halt> {
        let ended = self.shutdown.run_until_cancelled(work).await;
        ended.ok_or(Halt::Stopped)
    }
}

/// Keeps the age of the oldest open difference current until shutdown.
///
/// # Errors
/// [`Halt::Stopped`].
async fn follow_break_age(shared: Arc<Shared>) -> Result<(), Halt> {
    loop {
        shared.show_break_age();
        let pause = tokio::time::sleep(AGE_INTERVAL);
        shared.unless_stopped(pause).await?;
    }
}

impl SharedState {
    /// Sets the age of the oldest open difference in the metrics.
    fn show_break_age(&self) {
        let age_us = match self.oldest_break_us.load(Ordering::Acquire) {
            0 => 0,
            found_at_us => (now_us() - found_at_us).max(0),
        };
        metrics::gauge!("settlement_break_age_seconds").set(age_us as f64 / 1e6);
    }

    /// Publishes the stored suspensions.
    async fn publish_suspensions(&self) -> Result<(), StoreError> {
        let _in_order = self.publishing.lock().await;
        let now = self.repo.suspensions().await?;
        let breaks = self.repo.breaks().await?;
        metrics::gauge!("settlement_breaks_open").set(breaks.len() as f64);
        let oldest_us = breaks.first().map_or(0, |oldest| oldest.found_at_us);
        self.oldest_break_us.store(oldest_us, Ordering::Release);
        self.show_break_age();
        let reason = breaks.first().map(|oldest| {
            let (name, hold) = (&oldest.name, &oldest.hold_id);
            let count = breaks.len();
            format!(
                "{count} differences between journal and ledger, the oldest {name} of hold {hold}"
            )
        });
        self.failures.show_breaks(reason.as_deref());
        let differing = now.values().filter(|s| **s == Suspension::Differs).count();
        metrics::gauge!("settlement_users_suspended").set(differing as f64);
        self.suspended.send_if_modified(|known| {
            let is_new = *known != now;
            *known = now;
            is_new
        });
        Ok(())
    }
}

impl SharedState {
    fn requested(&self) -> MutexGuard<'_, BTreeMap<Id128, String>> {
        let locked = self.requested.lock();
        locked.expect("no code panics while it holds the lock")
    }

    /// Ends requests to bust trades that are bust, or with the chain service.
    fn forget_requests(&self, trades: &[Id128]) {
        self.requested().retain(|trade, _| !trades.contains(trade));
    }
}

/// A running settlement.
pub struct SettlementHandle {
    state: Arc<SharedState>,
    operators: Operators,
    supervisor: JoinHandle<()>,
    /// Publishes the outbox.
    relay: JoinHandle<()>,
    relay_shutdown: CancellationToken,
}

/// Last record of a node's journal that is completely posted to a ledger.
///
/// # Errors
/// [`StartError::Node`], or the ledger does not answer.
pub fn settled_through(
    ledger: rpc::Channel,
    node: u8,
) -> BoxFuture<'static, Result<Sequence, StartError>> {
    Box::pin(async move {
        let source = derived::settlement_source(NodeId::new(node).ok_or(StartError::Node(node))?);
        let ledger = LedgerClient::new(ledger, SOURCE);
        let position = ledger.source_position(&Context::new(SOURCE), &source).await;
        Ok(Sequence(position.map_err(StartError::Ledger)?))
    })
}

/// The store, with the tables whose rows have seals.
pub fn sealed_store(config: &SettlementConfig) -> events::SealedStore {
    events::SealedStore {
        name: SOURCE,
        path: config.data_dir.join("settlement.db"),
        sealing: &crate::repo::SEALING,
    }
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`events::Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(
    config: &SettlementConfig,
) -> Result<events::audit::Verified, events::Error> {
    events::audit::verify(&sealed_store(config).path, SOURCE).await
}

/// Opens the store and starts the workers, which retry calls of ledger and chain without limit.
///
/// # Errors
/// [`StartError`].
pub fn start(
    config: SettlementConfig,
    deps: SettlementDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<SettlementHandle, StartError>> {
    Box::pin(async move {
        let node = NodeId::new(config.node).ok_or(StartError::Node(config.node))?;
        let repo = Repo::open(&sealed_store(&config).path).await?;
        let tracker = Tracker::new(deps.backlog.clone(), repo.bust_trades().await?);
        let requested = repo.requested_busts().await?;
        let chain_size = ChainSize::new(config.limits().trades);
        let state = Arc::new(SharedState {
            config,
            node,
            repo,
            tracker,
            chain_size,
            // The workers retry every step themselves.
            ledger: LedgerClient::new(deps.ledger.clone(), SOURCE).with_policy(Policy::once()),
            cfa: CfaClient::new(deps.cfa.clone(), SOURCE).with_policy(Policy::once()),
            failures: CurrentFailures::new(),
            suspended: watch::Sender::default(),
            publishing: tokio::sync::Mutex::default(),
            oldest_break_us: AtomicI64::new(0),
            compare: tokio::sync::Notify::new(),
            requested: Mutex::new(requested),
        });
        let operators = Operators::new(state.clone(), deps.replica.clone());
        state.publish_suspensions().await?;
        let first = begin(&state, &deps, &shutdown).await?;
        let relay_shutdown = CancellationToken::new();
        let (db, log) = (state.repo.db(), deps.log.clone());
        let relaying = events::outbox::Relay::run(db, log, relay_shutdown.clone());
        let relay = tokio::spawn(relaying);
        let supervisor = tokio::spawn(supervise(deps, shutdown, first));
        Ok(SettlementHandle {
            state,
            operators,
            supervisor,
            relay,
            relay_shutdown,
        })
    })
}

/// One run of the workers; each returns whether it failed.
struct Run {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<bool>>,
}

/// Starts the workers at the ledger's position.
async fn begin(
    state: &Arc<SharedState>,
    deps: &SettlementDeps,
    shutdown: &CancellationToken,
) -> Result<Run, StoreError> {
    let open = state.repo.open_batches().await?;
    let bust = state.repo.bust_trades().await?;
    let shared = Arc::new(Shared {
        state: state.clone(),
        is_recovered: tokio::sync::Notify::new(),
        shutdown: shutdown.child_token(),
    });
    let (posted, batches) = tokio::sync::mpsc::channel(state.config.posted_batches_max.max(1));
    let commands = Commands {
        shared: shared.clone(),
        replica: deps.replica.clone(),
        journal: deps.journal.clone(),
    };
    let (replica, durable) = (deps.replica.clone(), deps.durable.clone());
    let poster = poster::Poster::new(shared.clone(), replica, durable, posted);
    poster.register_open(bust, &open);
    let submitting = chain::run(shared.clone(), batches);
    let reporting = commands.clone().report_progress();
    let following = commands.follow_suspensions();
    let workers = vec![
        watched(&shared, failure::JOURNAL, poster.run(open)),
        watched(&shared, failure::CHAIN, submitting),
        watched(&shared, failure::JOURNAL, reporting),
        watched(&shared, failure::JOURNAL, following),
        watched(&shared, failure::STORE, retention::run(shared.clone())),
        watched(&shared, failure::STORE, follow_break_age(shared.clone())),
    ];
    Ok(Run { shared, workers })
}

/// Spawns a worker whose end stops the others: ledger and chain only progress together.
fn watched(
    shared: &Arc<Shared>,
    part: &'static str,
    work: impl Future<Output = Result<(), Halt>> + Send + 'static,
) -> JoinHandle<bool> {
    let shared = shared.clone();
    tokio::spawn(async move {
        let failed = match tokio::spawn(work).await {
            Ok(Ok(()) | Err(Halt::Stopped)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(panic.to_string()),
        };
        if let Some(reason) = &failed {
            tracing::error!(
                part,
                reason,
                severity = "critical",
                "settlement worker failed; restarting all workers, the market accepts no orders meanwhile"
            );
            shared.failures.note(part, ENDED, reason, true);
            shared.tracker.suspend();
        }
        shared.shutdown.cancel();
        failed.is_some()
    })
}

/// Restarts the workers after a failure, until shutdown. The market reopens once the poster has
/// continued from the ledger's position and all workers have then run for the next pause.
async fn supervise(deps: SettlementDeps, shutdown: CancellationToken, mut run: Run) {
    let mut failed = 0;
    loop {
        let Run { shared, workers } = run;
        let state = shared.state.clone();
        let pause = backoff::doubled(RETRY_FIRST, failed, RETRY_MAX);
        let steady = async {
            shared.is_recovered.notified().await;
            tokio::time::sleep(pause).await;
        };
        let mut ending = pin!(futures::future::join_all(workers));
        let ended = tokio::select! {
            biased;
            ended = &mut ending => ended,
            () = steady, if failed > 0 => {
                if state.tracker.resume() {
                    for part in [failure::JOURNAL, failure::CHAIN] {
                        state.failures.clear(part, ENDED);
                    }
                    failed = 0;
                }
                ending.await
            }
        };
        let has_failed = ended.iter().any(|failed| !matches!(failed, Ok(false)));
        if shutdown.is_cancelled() || !has_failed {
            return;
        }
        state.failures.reset(ENDED);
        run = loop {
            let pause = backoff::doubled(RETRY_FIRST, failed, RETRY_MAX);
            let pausing = shutdown.run_until_cancelled(tokio::time::sleep(pause));
            if pausing.await.is_none() {
                return;
            }
            failed += 1;
            match begin(&state, &deps, &shutdown).await {
                Ok(run) => break run,
                Err(error) => {
                    let reason = error.to_string();
                    tracing::error!(reason, "settlement cannot read its store; retrying");
                    state.failures.note(failure::STORE, ENDED, &reason, true);
                }
            }
        };
        state.failures.clear(failure::STORE, ENDED);
    }
}

impl SettlementHandle {
    /// The calls for operators. Their health has no parts: the market shows those of
    /// [`Self::health`].
    pub fn service(&self) -> rpc::Service {
        crate::api::service(self.operators.clone())
    }

    pub fn stats(&self) -> Stats {
        let state = &self.state;
        state.tracker.stats(state.failures.stuck())
    }

    /// Health of settlement, with the waiting id and the reason per part.
    ///
    /// Parts: `settlement-ledger`, `settlement-chain`, `settlement-journal`, `settlement-store`,
    /// `settlement-breaks`.
    pub fn health(&self) -> rpc::Health {
        self.state.failures.health()
    }

    /// Waits until the ledger has all postings up to `sequence`.
    pub async fn settled(&self, sequence: Sequence) {
        self.wait(|progress| progress.settled >= sequence).await;
    }

    /// Waits until every trade up to `sequence` is final, without limit if settlement has halted.
    pub async fn drained(&self, sequence: Sequence) {
        self.wait(|progress| progress.finalized >= sequence).await;
    }

    async fn wait(&self, until: impl FnMut(&Progress) -> bool) {
        let mut progress = self.state.tracker.watch();
        let reached = progress.wait_for(until).await;
        drop(reached.expect("the tracker outlives its handle"));
    }

    /// Uncleared differences between journal and ledger. Settlement clears a difference once both
    /// agree.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn breaks(&self) -> Result<Vec<BreakRow>, StoreError> {
        self.state.repo.breaks().await
    }

    /// Users to block or to unblock, by user id. Persistent until the unblock is in the journal.
    pub fn suspensions(&self) -> BTreeMap<String, Suspension> {
        self.state.suspended.borrow().clone()
    }

    /// Waits for the workers to end after shutdown. A restart resumes unfinished steps.
    pub fn stopped(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if self.supervisor.await.is_err() {
                tracing::error!("settlement's supervisor task panicked");
            }
            self.relay_shutdown.cancel();
            if self.relay.await.is_err() {
                tracing::error!("settlement's relay of events panicked");
            }
            self.state.repo.close().await;
        })
    }
}
