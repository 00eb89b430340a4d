//! A running engine node.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use admission::AdmissionConfig;
use journal::{FileStorage, Journal, JournalError, JournalFailed, Storage};
use service_kit::discipline::Stored;
use tokio::sync::watch;
use types::Sequence;

use crate::backlog::Backlog;
use crate::checkpoint::{CheckpointError, Checkpoints, UsableCheckpoints};
use crate::config::Config;
use crate::core::Core;
use crate::hot::Hot;
use crate::image;
use crate::park::Parker;
use crate::port::{Gate, Port};
use crate::reader::Reader;
use crate::recover::{self, StartError};
use crate::retention::{Retention, RetentionService};
use crate::sink::JournalSink;
use crate::stats::Stats;

/// The commit position: records at or before it survive a power loss.
#[derive(Clone)]
pub struct Commit(journal::Commit);

impl Commit {
    pub fn position(&self) -> Sequence {
        Sequence(self.0.position())
    }

    /// Waits until `sequence` is durable.
    ///
    /// # Errors
    /// The journal failed before that. A restart may find the command or not.
    pub async fn wait(&self, sequence: Sequence) -> Result<(), JournalFailed> {
        self.0.wait(sequence.get()).await
    }

    /// Wakes a front at each advance of the position, and when the journal fails.
    pub fn wake(&self, front: Arc<Parker>) {
        self.0.listen(Box::new(move || front.unpark()));
    }

    pub fn failure(&self) -> Option<JournalFailed> {
        self.0.failure()
    }

    /// Why no record becomes durable at present, if so. The journal retries.
    pub fn stalled(&self) -> Option<Arc<str>> {
        self.0.stalled()
    }
}

/// What a replica of the node needs.
pub struct ReplicaParts {
    /// Any reader of the journal.
    pub reader: Reader,
    /// Folder of the node's checkpoints.
    pub dir: PathBuf,
    pub limits: AdmissionConfig,
    /// Checkpoints that a restart can use.
    pub usable: UsableCheckpoints,
    pub port: Port,
    pub stats: Arc<Stats>,
    pub backlog: Arc<Backlog>,
}

/// A running hot thread. Drop waits until the thread has served the waiting requests and ended.
struct HotThread {
    port: Port,
    thread: Option<JoinHandle<()>>,
}

impl HotThread {
    fn start(hot: Hot, port: Port) -> Result<Self, StartError> {
        let thread = std::thread::Builder::new()
            .name("hot".to_owned())
            .spawn(move || hot.run())
            .map_err(StartError::Thread)?;
        Ok(Self {
            port,
            thread: Some(thread),
        })
    }
}

impl Drop for HotThread {
    fn drop(&mut self) {
        self.port.gate.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the hot thread panicked");
        }
    }
}

/// A running node: owns the hot thread and the journal.
///
/// Fields drop in order: the hot thread appends to the journal until it ends.
pub struct SequencerHandle {
    hot: Option<HotThread>,
    retention: Option<RetentionService>,
    journal: Journal,
    port: Port,
    recovered: Sequence,
    stats: Arc<Stats>,
    backlog: Arc<Backlog>,
    limits: AdmissionConfig,
    snapshot_dir: PathBuf,
    usable: UsableCheckpoints,
    /// Held until the journal is closed.
    lock: Option<File>,
}

impl SequencerHandle {
    /// Recovers from the journal in `config.dir` and starts the threads. Blocks while it recovers.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config, backlog: Arc<Backlog>) -> Result<Self, StartError> {
        let (hot, handle) = prepare(config, backlog)?;
        handle.run(hot)
    }

    /// As [`SequencerHandle::start`], on the given storage.
    pub fn start_on(
        config: Config,
        backlog: Arc<Backlog>,
        storage: Arc<dyn Storage>,
    ) -> Result<Self, StartError> {
        let (hot, handle) = prepare_on(config, backlog, storage)?;
        handle.run(hot)
    }

    fn run(mut self, hot: Hot) -> Result<Self, StartError> {
        self.hot = Some(HotThread::start(hot, self.port())?);
        Ok(self)
    }

    pub fn port(&self) -> Port {
        self.port.clone()
    }

    pub fn commit(&self) -> Commit {
        Commit(self.journal.commit())
    }

    /// Records of commands after `after`; `Sequence(0)` reads from the beginning.
    pub fn reader(&self, after: Sequence) -> Reader {
        Reader::new(self.journal.reader(after.get()))
    }

    /// Last command that the start has recovered.
    pub fn recovered(&self) -> Sequence {
        self.recovered
    }

    /// What a replica of this node needs.
    pub fn replica_parts(&self) -> ReplicaParts {
        ReplicaParts {
            reader: self.reader(Sequence::ZERO),
            dir: self.snapshot_dir.clone(),
            limits: self.limits,
            usable: self.usable.clone(),
            port: self.port(),
            stats: self.stats.clone(),
            backlog: self.backlog.clone(),
        }
    }

    /// Truncates the journal in the background, on a thread of its own, until the node stops.
    ///
    /// Removes nothing while there are no checkpoints. A second call replaces the first.
    ///
    /// # Errors
    /// [`StartError::Thread`].
    pub fn start_retention(&mut self, retention: Retention) -> Result<(), StartError> {
        // The previous service ends before the new one starts.
        self.retention = None;
        let (segments, usable) = (self.journal.truncator(), self.usable.clone());
        let started = RetentionService::start(segments, &self.snapshot_dir, usable, retention);
        self.retention = Some(started.map_err(StartError::Thread)?);
        Ok(())
    }

    /// Why the last round of truncation failed, if it did. The thread retries. `None` before
    /// [`SequencerHandle::start_retention`].
    pub fn retention_trouble(&self) -> Option<watch::Receiver<Option<String>>> {
        self.retention.as_ref().map(RetentionService::trouble)
    }

    /// What restricts the intake of orders.
    pub fn backlog(&self) -> &Arc<Backlog> {
        &self.backlog
    }

    /// Counters of the hot thread.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Counters of the journal's writer.
    pub fn journal_stats(&self) -> journal::Stats {
        self.journal.stats()
    }

    /// Refuses new requests, serves the waiting ones, flushes the journal, ends the threads.
    /// Blocks.
    pub fn stop(self) {
        drop(self);
    }
}

/// Recovers from the journal in `config.dir`; the caller starts the hot thread.
pub(crate) fn prepare(
    config: Config,
    backlog: Arc<Backlog>,
) -> Result<(Hot, SequencerHandle), StartError> {
    let lock = recover::lock(&config.dir)?;
    let storage = FileStorage::new(&config.dir, config.sync).map_err(JournalError::Io)?;
    let (hot, mut handle) = prepare_on(config, backlog, Arc::new(storage))?;
    handle.lock = Some(lock);
    Ok((hot, handle))
}

fn prepare_on(
    config: Config,
    backlog: Arc<Backlog>,
    storage: Arc<dyn Storage>,
) -> Result<(Hot, SequencerHandle), StartError> {
    let sizes = journal::Config {
        segment_bytes: config.segment_bytes,
        pending_bytes_max: config.pending_bytes_max,
        recent_bytes: config.recent_bytes,
    };
    let limits = crate::limits::limits();
    let snapshot_dir = config.snapshot_dir.clone();
    let core = image::load(&snapshot_dir, Sequence(u64::MAX), limits)?
        .unwrap_or_else(|| Core::new(limits));
    let usable = UsableCheckpoints::default();
    // Sequence 0 is usable too: a node without a snapshot starts there, without a file.
    usable.insert(core.sequence());
    // Checked before the journal is truncated or appended to. Snapshots that do not restore count
    // too: their records were durable.
    let newest = Checkpoints::new(&snapshot_dir).newest_sequence();
    let reach = config.reach.max(newest.map_err(CheckpointError::Io)?);
    let (journal, core) = recover::open(storage, sizes, core, reach)?;
    match (config.journal_core, config.core) {
        (Some(core), _) => journal.keep_on(core),
        (None, Some(first)) => {
            journal.keep_off(first..first.saturating_add(1 + config.engine_threads()))
        }
        (None, None) => {}
    }
    if config.core.is_some() {
        journal.gather(Duration::from_micros(config.gather_us));
    }
    let recovered = core.sequence();
    let known = core.admission().clock();
    config.clock.check_stored(Stored {
        last_ns: core.time_ns(),
        confirmed_ns: known.confirmed_ns,
        suspect_ns: known.offset_ns,
    });
    let gate = Arc::new(Gate::new(&config));
    let stats = Arc::new(Stats::default());
    let hot = Hot::new(
        config,
        core,
        gate.clone(),
        JournalSink::File(journal.appender()),
        backlog.clone(),
        stats.clone(),
    );
    let handle = SequencerHandle {
        hot: None,
        retention: None,
        journal,
        port: Port { gate },
        recovered,
        stats,
        backlog,
        limits,
        snapshot_dir,
        usable,
        lock: None,
    };
    Ok((hot, handle))
}

/// A node without a journal. For benchmarks and simulation only: its state is lost when it stops.
pub struct Volatile {
    hot: HotThread,
    stats: Arc<Stats>,
}

impl Volatile {
    /// Starts with empty books; the folders in `config` are not touched.
    ///
    /// # Errors
    /// [`StartError::Thread`].
    pub fn start(config: Config, backlog: Arc<Backlog>) -> Result<Self, StartError> {
        let (hot, port, stats) = prepare_volatile(config, backlog);
        let hot = HotThread::start(hot, port)?;
        Ok(Self { hot, stats })
    }

    pub fn port(&self) -> Port {
        self.hot.port.clone()
    }

    /// Counters of the hot thread.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }
}

/// Prepares a node with empty books and no journal; the caller starts the hot thread.
pub(crate) fn prepare_volatile(config: Config, backlog: Arc<Backlog>) -> (Hot, Port, Arc<Stats>) {
    let core = Core::new(crate::limits::limits());
    let gate = Arc::new(Gate::new(&config));
    let stats = Arc::new(Stats::default());
    let hot = Hot::new(
        config,
        core,
        gate.clone(),
        JournalSink::Null,
        backlog,
        stats.clone(),
    );
    (hot, Port { gate }, stats)
}
