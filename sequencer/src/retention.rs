//! Truncation of the journal while the node runs: removes whole segments that are not needed.
//!
//! Runs on a thread of low priority. A segment is removed when all of these are after it: the bytes
//! of the log to be kept; the position that each consumer of the replica has in its own store
//! ([`Durable`]); the newest two usable checkpoints of the node, and one at or before what is kept
//! and what a consumer still needs. Of the newest two, a checkpoint is usable while its file is
//! whole and if this process has restored or written it ([`UsableCheckpoints`]): a restart cannot
//! use one of another version. With fewer than two everything is kept.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use journal::{JournalError, SegmentTruncator, Snapshots};
use types::Sequence;

use crate::checkpoint::UsableCheckpoints;
use crate::priority;

/// Checkpoints after a removed segment: the newest, and a spare in case it is damaged.
const STATES: usize = 2;

/// What is kept of the journal.
#[derive(Clone, Debug)]
pub struct Retention {
    /// Minimum number of bytes kept.
    pub bytes: u64,
    /// Durable positions of the replica's consumers.
    pub followers: Vec<Durable>,
    /// Time between two checks.
    pub every: Duration,
}

impl Retention {
    /// Keeps at least `bytes`, and what these consumers need.
    pub fn new(bytes: u64, followers: Vec<Durable>) -> Self {
        Self {
            bytes,
            followers,
            every: Duration::from_secs(10),
        }
    }
}

/// Last record that a consumer of the replica has in its own store and will not ask for again; zero
/// until it has reported one.
#[derive(Clone, Debug)]
pub struct Durable {
    name: &'static str,
    through: Arc<AtomicU64>,
}

impl Durable {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            through: Arc::default(),
        }
    }

    /// Everything up to `sequence` is durable in the consumer's store.
    pub fn set(&self, sequence: Sequence) {
        self.through.store(sequence.get(), Ordering::Release);
    }

    pub(crate) fn through(&self) -> u64 {
        self.through.load(Ordering::Acquire)
    }
}

/// The running service; stops when it is dropped.
pub(crate) struct RetentionService {
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RetentionService {
    /// `dir`, `proven`: the node's checkpoints.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub fn start(
        segments: SegmentTruncator,
        dir: &Path,
        proven: UsableCheckpoints,
        retention: Retention,
    ) -> std::io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let seen = is_stopping.clone();
        let mut keeper = Truncator {
            segments,
            retention,
            checkpoints: Snapshots::new(dir),
            proven,
            is_waiting: false,
        };
        let thread = std::thread::Builder::new()
            .name("retention".to_owned())
            .spawn(move || {
                priority::lower(priority::WRITING_CHECKPOINTS);
                while !seen.load(Ordering::Acquire) {
                    keeper.round();
                    std::thread::park_timeout(keeper.retention.every);
                }
            })?;
        Ok(Self {
            is_stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for RetentionService {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the retention thread panicked");
            }
        }
    }
}

struct Truncator {
    segments: SegmentTruncator,
    retention: Retention,
    checkpoints: Snapshots,
    proven: UsableCheckpoints,
    /// Everything is kept for lack of checkpoints: logged once.
    is_waiting: bool,
}

impl Truncator {
    fn round(&mut self) {
        match self.remove() {
            Ok(0) => {}
            Ok(segments) => {
                let through = self.segments.removed_through().unwrap_or_default();
                metrics::counter!("journal_segments_removed_total").increment(segments as u64);
                metrics::gauge!("journal_removed_through").set(through as f64);
                tracing::info!(segments, through, "journal truncated");
            }
            Err(error) => {
                metrics::counter!("journal_retention_failures_total").increment(1);
                tracing::error!(%error, "journal not truncated; retried later");
            }
        }
    }

    /// Returns the number of segments removed.
    fn remove(&mut self) -> Result<usize, JournalError> {
        let gone = self.segments.removed_through()?;
        let limit = self.segments.removable_above_bytes(self.retention.bytes)?;
        // The checkpoints counted on stay until the segments are gone.
        let proven = self.proven.clone();
        let _held = proven.hold();
        // By names first: whole files are worth reading only for a segment that would be removed.
        let floor = self.floor(limit, |_, _| true)?;
        if self.segments.removable_through(floor)? <= gone {
            return Ok(0);
        }
        let floor = self.floor(limit, Snapshots::is_good)?;
        let removed = self.segments.remove(floor)?;
        if removed > 0 {
            self.is_waiting = false;
        }
        Ok(removed)
    }

    /// Last record that is not needed, at or before `limit`; 0 when all are needed.
    fn floor(
        &mut self,
        limit: u64,
        is_good: impl Fn(&Snapshots, u64) -> bool,
    ) -> Result<u64, JournalError> {
        let mut floor = limit;
        for follower in &self.retention.followers {
            let through = follower.through();
            metrics::gauge!("journal_needed_behind", "follower" => follower.name)
                .set(through as f64);
            floor = floor.min(through);
        }
        let mut sequences = self.checkpoints.sequences()?;
        let is_whole = |at: &u64| is_good(&self.checkpoints, *at);
        let newest_first = sequences.iter().rev();
        let mut usable = newest_first.filter(|at| self.proven.has(**at) && is_whole(at));
        let Some(needed) = usable.nth(STATES - 1) else {
            if !self.is_waiting {
                tracing::info!("journal not truncated: it needs two usable checkpoints");
            }
            self.is_waiting = true;
            return Ok(0);
        };
        let floor = floor.min(*needed);
        // Consumers and resends begin at a checkpoint at or before what they need.
        sequences.retain(|at| *at <= floor);
        Ok(sequences.into_iter().rfind(is_whole).unwrap_or(0))
    }
}
