//! Truncation of the journal while the node runs: removes whole segments that are not needed.
//!
//! Runs on a thread of low priority. A segment is removed if it precedes
//!
//! - the last bytes of the log to be kept,
//! - the position of each consumer of the replica in its own store ([`Durable`]),
//! - the newest two usable checkpoints of the node, and
//! - a checkpoint at or before the kept bytes and these positions.
//!
//! A checkpoint is usable while its file is whole, and if this process has restored or written it
//! ([`UsableCheckpoints`]): a restart cannot use one of another version. With fewer than two usable
//! checkpoints nothing is removed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use journal::{JournalError, SegmentTruncator, Snapshots};
use tokio::sync::watch;
use types::Sequence;

use crate::checkpoint::UsableCheckpoints;
use crate::image::panic_text;
use crate::priority;

/// Usable checkpoints after a removed segment: the newest, and one in case that is damaged.
const CHECKPOINTS_MIN: usize = 2;

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
    /// Keeps at least `bytes`, and the records that these consumers need.
    pub fn new(bytes: u64, followers: Vec<Durable>) -> Self {
        Self {
            bytes,
            followers,
            every: Duration::from_secs(10),
        }
    }
}

/// Durable position of a consumer of the replica, which needs no record at or before it. Zero until
/// the consumer reports one.
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

    /// Sets the position: everything up to `sequence` is durable in the consumer's store.
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
    /// Why the last round failed, if it did.
    trouble: watch::Receiver<Option<String>>,
    thread: Option<JoinHandle<()>>,
}

impl RetentionService {
    /// `dir` and `usable` are the node's checkpoints.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub fn start(
        segments: SegmentTruncator,
        dir: &Path,
        usable: UsableCheckpoints,
        retention: Retention,
    ) -> std::io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let seen = is_stopping.clone();
        let (shown, trouble) = watch::channel(None);
        let mut truncator = Truncator {
            segments,
            retention,
            checkpoints: Snapshots::new(dir),
            usable,
            is_waiting: false,
        };
        let thread = std::thread::Builder::new()
            .name("retention".to_owned())
            .spawn(move || {
                priority::lower(priority::WRITING_CHECKPOINTS);
                while !seen.load(Ordering::Acquire) {
                    let now = truncator.round();
                    shown.send_if_modified(|before| {
                        let has_changed = *before != now;
                        *before = now;
                        has_changed
                    });
                    std::thread::park_timeout(truncator.retention.every);
                }
            })?;
        Ok(Self {
            is_stopping,
            trouble,
            thread: Some(thread),
        })
    }

    pub fn trouble(&self) -> watch::Receiver<Option<String>> {
        self.trouble.clone()
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
    usable: UsableCheckpoints,
    /// Nothing is removed for lack of checkpoints, which is logged once.
    is_waiting: bool,
}

impl Truncator {
    /// Removes what is not needed, and reports it. Returns why it failed, if it did.
    ///
    /// A panic fails the round, not the thread: without truncation the journal grows until its disk
    /// is low.
    fn round(&mut self) -> Option<String> {
        let removed = catch_unwind(AssertUnwindSafe(|| self.remove()));
        let reason = match removed {
            Ok(Ok(0)) => return None,
            Ok(Ok(segments)) => {
                let through = self.segments.removed_through().unwrap_or_default();
                metrics::counter!("journal_segments_removed_total").increment(segments as u64);
                metrics::gauge!("journal_removed_through").set(through as f64);
                tracing::info!(segments, through, "journal truncated");
                return None;
            }
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic_text(&*panic),
        };
        metrics::counter!("journal_retention_failures_total").increment(1);
        tracing::error!(reason, "journal not truncated; retried later");
        Some(format!("journal not truncated: {reason}"))
    }

    /// Removes the segments that are not needed; returns their number.
    fn remove(&mut self) -> Result<usize, JournalError> {
        let removed_through = self.segments.removed_through()?;
        let limit = self.segments.removable_above_bytes(self.retention.bytes)?;
        // The counted checkpoints stay until the segments are removed.
        let usable = self.usable.clone();
        let _held = usable.lock_removal();
        // By file names first: the files are read only if a segment would be removed.
        let floor = self.floor(limit, |_, _| true)?;
        if self.segments.removable_through(floor)? <= removed_through {
            return Ok(0);
        }
        let floor = self.floor(limit, Snapshots::is_good)?;
        let removed = self.segments.remove(floor)?;
        if removed > 0 {
            self.is_waiting = false;
        }
        Ok(removed)
    }

    /// Last record at or before `limit` that is not needed; 0 if all are.
    fn floor(
        &mut self,
        limit: u64,
        is_good: impl Fn(&Snapshots, u64) -> bool,
    ) -> Result<u64, JournalError> {
        let mut floor = limit;
        for follower in &self.retention.followers {
            let through = follower.through();
            metrics::gauge!("journal_consumer_position", "follower" => follower.name)
                .set(through as f64);
            floor = floor.min(through);
        }
        let mut sequences = self.checkpoints.sequences()?;
        let is_whole = |at: &u64| is_good(&self.checkpoints, *at);
        let newest_first = sequences.iter().rev();
        let mut usable = newest_first.filter(|at| self.usable.contains(**at) && is_whole(at));
        let Some(needed) = usable.nth(CHECKPOINTS_MIN - 1) else {
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
