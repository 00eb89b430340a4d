//! Chain, ledger, CFA service and settlement over one folder, as in a platform, and a journal to
//! which the benchmark appends records. Identity is the sandbox's; payments is a double that has
//! the members' deposits. The market, whose commands settlement journals, is left out.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use journal::{Appender, Commit, FileStorage, Journal};
use replica::LiveReplica;
use sequencer::{
    Backlog, Durable, Reader, Record, ReplicaParts, SnapshotConfig, SubmitError, Volatile, record,
};
use settlement::{JournalPort, SettlementConfig, SettlementDeps, SettlementHandle, Stats};
use tokio_util::sync::CancellationToken;
use types::{NodeId, Sequence};

use super::flow;

/// Credential of the platform's own services.
const SERVICE: &str = "sandbox.service";
/// Records per journal write.
const WRITE_RECORDS: usize = 256;
/// Pause without progress after which a run has failed.
const STUCK: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_secs(5);
/// Roubles and units per member and day: above those that a member gets.
const DAILY: &str = "1000000000000";

/// A journal with a live replica and without a hot thread.
struct Journalled {
    live: LiveReplica,
    appender: Arc<Mutex<Appender>>,
    /// Replaces the hot thread, whose port the replica uses.
    _node: Volatile,
    journal: Journal,
}

impl Journalled {
    /// Blocks while the replica starts.
    fn open(folder: &Path, backlog: Arc<Backlog>) -> anyhow::Result<Self> {
        let storage = FileStorage::new(&folder.join("journal"), true)?;
        let config = journal::Config {
            segment_bytes: 16 << 20,
            pending_bytes_max: 4 << 20,
            recent_bytes: 32 << 20,
        };
        let removed = journal::removed_through(&storage)?;
        let journal = Journal::open_after(Arc::new(storage), config, removed, |_| Ok(()))?;
        let volatile = Volatile::start(sequencer::Config::new(folder), backlog.clone())?;
        let parts = ReplicaParts {
            reader: Reader::new(journal.reader(0)),
            dir: folder.join("snapshots"),
            limits: flow::limits(),
            usable: Default::default(),
            port: volatile.port(),
            stats: volatile.stats().clone(),
            backlog,
        };
        Ok(Self {
            live: LiveReplica::start(node()?, parts, Some(SnapshotConfig::default()))?,
            appender: Arc::new(Mutex::new(journal.appender())),
            _node: volatile,
            journal,
        })
    }
}

/// Appends records and waits until they are durable. Blocks.
fn append(appender: &Mutex<Appender>, commit: &Commit, records: &[Record]) {
    let mut appender = appender.lock().expect("no panic under the lock");
    for records in records.chunks(WRITE_RECORDS) {
        let mut last = 0;
        for record in records {
            record::append(&mut appender, &record.command, &record.events);
            last = record.command.sequence.get();
        }
        appender.flush();
        while commit.position() < last {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn node() -> anyhow::Result<NodeId> {
    NodeId::new(1).context("node number")
}

/// A channel to each service.
#[derive(Clone)]
pub struct Channels {
    pub ledger: rpc::Channel,
    pub cfa: rpc::Channel,
    pub identity: rpc::Channel,
}

/// The running services.
pub struct Platform {
    pub folder: PathBuf,
    pub channels: Channels,
    pub payments: Arc<testkit::ServiceDoubles>,
    /// The certificate authority of the issuers.
    pub ca: sandbox::bank::Ca,
    settlement: SettlementHandle,
    stop_settlement: CancellationToken,
    journal: Journalled,
    backlog: Arc<Backlog>,
    chain: chain::ChainHandle,
    ledger: ledger::LedgerHandle,
    cfa: cfa::CfaHandle,
    identity: sandbox::identity::IdentityHandle,
    slots: [rpc::LocalSlot; 4],
    log: events::Embedded,
    stop: CancellationToken,
}

/// Settlement over running services.
async fn start_settlement(
    folder: &Path,
    channels: &Channels,
    journal: &Journalled,
    log: &events::Embedded,
    backlog: Arc<Backlog>,
    stop: CancellationToken,
) -> anyhow::Result<SettlementHandle> {
    let accepts_all: JournalPort = Arc::new(|_| {
        Box::pin(std::future::ready(Ok::<Option<Sequence>, SubmitError>(
            None,
        )))
    });
    let config = SettlementConfig {
        data_dir: folder.join("settlement"),
        ..SettlementConfig::default()
    };
    let deps = SettlementDeps {
        replica: journal.live.replica(),
        durable: Durable::new("settlement"),
        backlog,
        journal: accepts_all,
        ledger: channels.ledger.clone(),
        cfa: channels.cfa.clone(),
        log: Arc::new(log.clone()),
    };
    Ok(settlement::start(config, deps, stop).await?)
}

async fn start_identity(
    folder: &Path,
    log: Arc<dyn events::Log>,
    stop: CancellationToken,
) -> anyhow::Result<sandbox::identity::IdentityHandle> {
    let config = sandbox::identity::IdentityConfig {
        data_dir: folder.join("identity"),
        deposit_daily: DAILY.to_owned(),
        trading_daily: DAILY.to_owned(),
        ..sandbox::identity::IdentityConfig::default()
    };
    let deps = sandbox::identity::IdentityDeps { log };
    Ok(sandbox::identity::start(config, deps, stop).await?)
}

async fn open_journal(folder: &Path, backlog: Arc<Backlog>) -> anyhow::Result<Journalled> {
    let folder = folder.to_owned();
    let opening = tokio::task::spawn_blocking(move || Journalled::open(&folder, backlog));
    opening.await?
}

impl Platform {
    /// Starts everything on a folder with or without data.
    ///
    /// # Errors
    /// A part does not start.
    pub async fn start(folder: &Path) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let auth = rpc::Authenticator::Sandbox;
        let embedded = events::Embedded::open(folder.join("events")).await?;
        let log: Arc<dyn events::Log> = Arc::new(embedded.clone());
        let slots: [rpc::LocalSlot; 4] = std::array::from_fn(|_| rpc::LocalSlot::new());
        let channel = |at: usize| rpc::Channel::local(&slots[at], SERVICE);
        let channels = Channels {
            ledger: channel(0),
            cfa: channel(1),
            identity: channel(2),
        };
        let chain_config = chain::ChainConfig {
            data_dir: folder.join("chain"),
            ..chain::ChainConfig::default()
        };
        let deps = chain::ChainDeps { log: log.clone() };
        let chain = chain::start_chain(chain_config, deps, stop.clone()).await?;
        let ledger_config = ledger::LedgerConfig {
            data_dir: folder.join("ledger"),
            ..ledger::LedgerConfig::default()
        };
        let deps = ledger::LedgerDeps::new(log.clone(), channels.cfa.clone());
        let ledger = ledger::start(ledger_config, deps, stop.clone()).await?;
        slots[0].fill(rpc::with_auth(ledger.service().routes, &auth));
        let identity = start_identity(folder, log.clone(), stop.clone()).await?;
        slots[2].fill(rpc::with_auth(identity.service().routes, &auth));
        let payments = Arc::new(testkit::ServiceDoubles::default());
        slots[3].fill(rpc::with_auth(payments.routes(), &auth));
        let deps = cfa::CfaDeps {
            log,
            ledger: channels.ledger.clone(),
            payments: channel(3),
            identity: channels.identity.clone(),
            market: rpc::Channel::local(&rpc::LocalSlot::new(), SERVICE),
            audited: Vec::new(),
            chain: chain.connector(),
            clock: cfa::Clock::default(),
        };
        let keys = folder.join("keys");
        let ca = sandbox::bank::Ca::open(&keys)?;
        let cfa_config = cfa::CfaConfig {
            data_dir: folder.join("cfa"),
            ca_file: Some(keys.join("ca.pem")),
            ..cfa::CfaConfig::default()
        };
        let cfa = cfa::start(cfa_config, deps, stop.clone()).await?;
        slots[1].fill(rpc::with_auth(cfa.service().routes, &auth));
        let backlog = Arc::<Backlog>::default();
        let journal = open_journal(folder, backlog.clone()).await?;
        let stop_settlement = CancellationToken::new();
        let token = stop_settlement.clone();
        let starting = start_settlement(
            folder,
            &channels,
            &journal,
            &embedded,
            backlog.clone(),
            token,
        );
        let settlement = starting.await?;
        Ok(Self {
            folder: folder.to_owned(),
            channels,
            payments,
            ca,
            settlement,
            stop_settlement,
            journal,
            backlog,
            chain,
            ledger,
            cfa,
            identity,
            slots,
            log: embedded,
            stop,
        })
    }

    /// Appends records to the journal and returns when they are durable.
    ///
    /// # Errors
    /// The journal has failed.
    pub async fn feed(&self, records: Arc<[Record]>) -> anyhow::Result<()> {
        let (appender, commit) = (self.journal.appender.clone(), self.journal.journal.commit());
        let feeding = tokio::task::spawn_blocking(move || append(&appender, &commit, &records));
        feeding.await.context("the journal")
    }

    /// Waits until every trade up to `sequence` is final.
    ///
    /// # Errors
    /// Settlement makes no progress.
    pub async fn drained(&self, sequence: Sequence) -> anyhow::Result<()> {
        let mut last = (self.stats(), Instant::now());
        loop {
            let draining = self.settlement.drained(sequence);
            if tokio::time::timeout(POLL, draining).await.is_ok() {
                return Ok(());
            }
            let now = self.stats();
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() > STUCK {
                bail!("settlement makes no progress: {now:?}");
            }
        }
    }

    pub fn stats(&self) -> Stats {
        self.settlement.stats()
    }

    /// Restarts settlement, which begins new statistics.
    ///
    /// # Errors
    /// Settlement does not start.
    pub async fn restart_settlement(self) -> anyhow::Result<Self> {
        self.stop_settlement.cancel();
        self.settlement.stopped().await;
        let stop_settlement = CancellationToken::new();
        let (token, backlog) = (stop_settlement.clone(), self.backlog.clone());
        let starting = start_settlement(
            &self.folder,
            &self.channels,
            &self.journal,
            &self.log,
            backlog,
            token,
        );
        let settlement = starting.await?;
        Ok(Self {
            settlement,
            stop_settlement,
            ..self
        })
    }

    /// Removes the records that the event log need not keep. In a platform the market reads the
    /// ledger's events; here its group counts as having read all.
    ///
    /// # Errors
    /// The log cannot be written.
    pub async fn archive(&self) -> anyhow::Result<()> {
        let all = events::Position {
            topic: events::topics::LEDGER.to_owned(),
            partition: 0,
            offset: i64::MAX,
        };
        events::Log::commit(&self.log, "market", &all).await?;
        let records = events::embedded::RETAIN_MIN;
        self.log.remove_all_but(records).await?;
        Ok(())
    }

    /// The proof of balances over ledger and chain.
    ///
    /// # Errors
    /// A service does not answer.
    pub async fn proof(&self) -> anyhow::Result<proof::Proof> {
        let deps = proof::ProofDeps {
            ledger: self.channels.ledger.clone(),
            cfa: self.channels.cfa.clone(),
            payments: None,
        };
        Ok(proof::prove(&deps, proof::ProofOptions::default()).await?)
    }

    /// Stops everything and closes the files.
    ///
    /// # Errors
    /// The trading path panicked.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.stop_settlement.cancel();
        self.settlement.stopped().await;
        let journal = self.journal;
        tokio::task::spawn_blocking(move || drop(journal)).await?;
        self.stop.cancel();
        self.cfa.stopped().await;
        self.identity.stopped().await;
        self.ledger.stopped().await;
        self.chain.stopped().await;
        self.slots.iter().for_each(rpc::LocalSlot::clear);
        self.log.close().await;
        Ok(())
    }
}
