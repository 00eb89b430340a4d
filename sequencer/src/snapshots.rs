//! Snapshots while the node runs: a thread of low priority with a [`Shadow`] that follows the journal and writes the state down now and then. No live
//! engine stops for a snapshot (`design.md` 6).
//!
//! On the way every event of the journal is compared with what the shadow computes, and whenever the node has been quiet for a moment the state hash of
//! the live machine with the shadow's: for that the hot thread lends its books for a look, some milliseconds in which nobody had anything to do. A difference is the end of the service, not of the market: it is said aloud and no further snapshot is made, so
//! that the last good one and the log behind it stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use journal::Snapshots;
use types::Sequence;

use crate::checkpoint::Proven;
use crate::image::{Shadow, ShadowError};
use crate::port::Port;
use crate::stats::Stats;

/// Records followed between two looks at the clock and at the stop.
const STEP_RECORDS: usize = 4_096;
/// Sleep at the commit position.
const IDLE: Duration = Duration::from_millis(200);
/// The node counts as quiet when nothing has been journalled for so long.
const QUIET: Duration = Duration::from_secs(1);
/// With more open orders the live hash is not asked for: the hot thread would be away for more than a few milliseconds.
const COMPARE_ORDERS_MAX: usize = 50_000;
/// How long the hot thread may take for a look.
const LOOK_WAIT: Duration = Duration::from_secs(5);
/// Pause after a snapshot that could not be written.
pub(crate) const RETRY: Duration = Duration::from_secs(10);
/// Niceness of the thread: the hot thread and the journal go first.
const NICE: i32 = 10;

/// When a snapshot is made and what is kept.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotConfig {
    /// Commands from one snapshot to the next: what a restart replays at most.
    pub every_commands: u64,
    /// Time from one snapshot to the next, if there was any command.
    pub every: Duration,
    /// Good snapshots kept, 2 at least.
    pub kept: usize,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self {
            every_commands: 1_000_000,
            every: Duration::from_secs(60),
            kept: 2,
        }
    }
}

/// The running service; stops when it is dropped.
pub(crate) struct SnapshotService {
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread works with.
pub(crate) struct Parts {
    pub config: SnapshotConfig,
    pub shadow: Shadow,
    pub snapshots: Snapshots,
    pub proven: Proven,
    pub port: Port,
    pub stats: Arc<Stats>,
}

impl SnapshotService {
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(parts: Parts) -> std::io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let seen = is_stopping.clone();
        let thread = std::thread::Builder::new()
            .name("snapshots".to_owned())
            .spawn(move || {
                lower_priority();
                Service::new(parts, seen).run();
            })?;
        Ok(Self {
            is_stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for SnapshotService {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the snapshots' thread ended with a panic");
            }
        }
    }
}

/// Lets the hot thread and the journal go before this thread.
pub(crate) fn lower_priority() {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), NICE) {
        tracing::warn!(%error, "a thread that writes states down keeps the priority of the others");
    }
}

struct Service {
    parts: Parts,
    is_stopping: Arc<AtomicBool>,
    /// Where the last snapshot stands, and when it was made or the service started.
    saved: Sequence,
    saved_at: Instant,
    /// When the last one failed, if it did.
    failed_at: Option<Instant>,
    /// Since when the shadow has stood at the commit position.
    quiet_since: Option<Instant>,
    /// Where the live machine was last compared.
    compared: Sequence,
}

impl Service {
    fn new(parts: Parts, is_stopping: Arc<AtomicBool>) -> Self {
        Self {
            saved: parts.shadow.core().sequence(),
            compared: Sequence::ZERO,
            parts,
            is_stopping,
            saved_at: Instant::now(),
            failed_at: None,
            quiet_since: None,
        }
    }

    fn run(mut self) {
        while !self.is_stopping.load(Ordering::Acquire) {
            match self.round() {
                Ok(true) => {}
                Ok(false) => std::thread::park_timeout(IDLE),
                Err(error @ ShadowError::Image(_)) => {
                    tracing::error!(%error, "no snapshot was written; tried again later");
                    metrics::counter!("snapshot_failures_total").increment(1);
                    self.failed_at = Some(Instant::now());
                }
                Err(ShadowError::Read(error)) if error.is_transient() => {
                    if self.failed_at.is_none() {
                        tracing::warn!(%error, "the shadow cannot read the journal; tried again");
                    }
                    self.failed_at = Some(Instant::now());
                    std::thread::park_timeout(IDLE);
                }
                Err(error) => {
                    tracing::error!(%error, "the shadow stops; no further snapshot is made");
                    metrics::counter!("snapshot_failures_total").increment(1);
                    return;
                }
            }
        }
    }

    /// Follows a step; true when there may be more at once.
    fn round(&mut self) -> Result<bool, ShadowError> {
        let is_behind = self.parts.shadow.step(STEP_RECORDS)?;
        let sequence = self.parts.shadow.core().sequence();
        let lag = self.parts.stats.sequence.load(Ordering::Relaxed);
        metrics::gauge!("snapshot_shadow_lag_commands")
            .set(lag.saturating_sub(sequence.get()) as f64);
        let new_commands = sequence.get() - self.saved.get();
        if self.is_due(new_commands) {
            self.save()?;
        }
        if is_behind {
            self.quiet_since = None;
        } else if self.quiet_since.get_or_insert_with(Instant::now).elapsed() >= QUIET
            && self.compared < sequence
        {
            self.compare()?;
        }
        Ok(is_behind)
    }

    /// As for checkpoints: one that failed is tried again after a pause, in which the shadow goes on.
    fn is_due(&self, new_commands: u64) -> bool {
        let config = &self.parts.config;
        if let Some(failed_at) = self.failed_at {
            return new_commands > 0 && failed_at.elapsed() >= RETRY.min(config.every);
        }
        new_commands >= config.every_commands
            || (new_commands > 0 && self.saved_at.elapsed() >= config.every)
    }

    fn save(&mut self) -> Result<(), ShadowError> {
        let began = Instant::now();
        let bytes = self.parts.shadow.save_in(&self.parts.snapshots)?;
        let sequence = self.parts.shadow.core().sequence();
        (self.saved, self.saved_at) = (sequence, Instant::now());
        self.failed_at = None;
        self.parts.proven.note(sequence);
        let seconds = began.elapsed().as_secs_f64();
        metrics::counter!("snapshots_total").increment(1);
        metrics::gauge!("snapshot_sequence").set(sequence.get() as f64);
        metrics::gauge!("snapshot_bytes").set(bytes as f64);
        metrics::histogram!("snapshot_seconds").record(seconds);
        tracing::info!(
            sequence = sequence.get(),
            bytes,
            seconds,
            "a snapshot is written"
        );
        let proven = &self.parts.proven;
        let _held = proven.hold();
        let removed = self
            .parts
            .snapshots
            .prune(sequence.get(), |at| proven.has(at));
        match removed {
            Ok(removed) => proven.forget(&removed),
            // The new one is there: what cannot be removed now is removed another time.
            Err(error) => tracing::warn!(%error, "older snapshots stay"),
        }
        Ok(())
    }

    /// Compares with the live machine, which has nothing to do at the moment.
    fn compare(&mut self) -> Result<(), ShadowError> {
        let core = self.parts.shadow.core();
        self.compared = core.sequence();
        if core.admission().orders().count() > COMPARE_ORDERS_MAX {
            return Ok(());
        }
        let (tell, told) = mpsc::sync_channel(1);
        let asked = self.parts.port.look(Box::new(move |live| {
            // Nobody waits any more when the service has ended.
            let _ = tell.try_send((live.sequence(), live.state_hash()));
        }));
        if asked.is_err() {
            return Ok(());
        }
        match told.recv_timeout(LOOK_WAIT) {
            // Traffic came in between: another time.
            Ok((sequence, _)) if sequence != core.sequence() => Ok(()),
            Ok((_, hash)) if hash == core.state_hash() => {
                metrics::counter!("snapshot_comparisons_total").increment(1);
                Ok(())
            }
            Ok((sequence, _)) => Err(ShadowError::Hash(sequence)),
            Err(_) => Ok(()),
        }
    }
}
