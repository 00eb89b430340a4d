//! Removing the journal's beginning while the node runs: a thread of low priority that now and then takes away whole segments that nobody needs.
//!
//! A segment goes when all of these are behind it: so many bytes of the log as are to be kept; the newest two good snapshots of the node; the newest two good
//! checkpoints of everybody who reads the journal, and for one who is asked about the past a checkpoint at or before what is kept. Who has less than
//! two keeps everything. What stands in the folders decides, not what somebody says: it is what the next start finds.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use journal::{Front, JournalError, Snapshots};

use crate::snapshots::lower_priority;

/// States that stand behind a segment that goes: the newest, and one in case it is damaged.
const STATES: usize = 2;

/// What is kept of the journal.
#[derive(Clone, Debug)]
pub struct Retention {
    /// Bytes kept at least.
    pub bytes: u64,
    /// Everybody who reads the journal at a start.
    pub readers: Vec<JournalReader>,
    /// Time between two looks.
    pub every: Duration,
}

impl Retention {
    /// So many bytes kept for these readers.
    pub fn new(bytes: u64, readers: Vec<JournalReader>) -> Self {
        Self {
            bytes,
            readers,
            every: Duration::from_secs(10),
        }
    }
}

/// Somebody with a state of his own behind the journal.
#[derive(Clone, Debug)]
pub struct JournalReader {
    pub name: &'static str,
    /// Folder of his checkpoints.
    pub dir: PathBuf,
    /// He reads again what is behind an older checkpoint.
    pub tells_past: bool,
}

/// The running service; stops when it is dropped.
pub(crate) struct RetentionService {
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RetentionService {
    /// `snapshot_dir`: of the node's own snapshots.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(
        front: Front,
        snapshot_dir: PathBuf,
        retention: Retention,
    ) -> std::io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let seen = is_stopping.clone();
        let node = JournalReader {
            name: "node",
            dir: snapshot_dir,
            tells_past: false,
        };
        let mut readers = retention.readers;
        readers.push(node);
        let mut keeper = Keeper {
            front,
            bytes: retention.bytes,
            readers,
            waits_for: None,
        };
        let thread = std::thread::Builder::new()
            .name("retention".to_owned())
            .spawn(move || {
                lower_priority();
                while !seen.load(Ordering::Acquire) {
                    keeper.round();
                    std::thread::park_timeout(retention.every);
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
                tracing::error!("the retention's thread ended with a panic");
            }
        }
    }
}

struct Keeper {
    front: Front,
    bytes: u64,
    readers: Vec<JournalReader>,
    /// Who keeps everything: said once.
    waits_for: Option<&'static str>,
}

impl Keeper {
    fn round(&mut self) {
        match self.remove() {
            Ok(0) => {}
            Ok(segments) => {
                let through = self.front.removed_through().unwrap_or_default();
                metrics::counter!("journal_segments_removed_total").increment(segments as u64);
                metrics::gauge!("journal_removed_through").set(through as f64);
                tracing::info!(segments, through, "the journal's beginning was removed");
            }
            Err(error) => {
                metrics::counter!("journal_retention_failures_total").increment(1);
                tracing::error!(%error, "the journal's beginning stays; tried again later");
            }
        }
    }

    /// Gives the number of segments removed.
    fn remove(&mut self) -> Result<usize, JournalError> {
        let gone = self.front.removed_through()?;
        let limit = self.front.beyond(self.bytes)?;
        // By names first: only what would go is worth reading whole files for.
        if limit == gone || self.floor(limit, Snapshots::sequences)? <= gone {
            return Ok(0);
        }
        let floor = self.floor(limit, Snapshots::good)?;
        self.front.remove(floor)
    }

    /// Last record that nobody needs, at or before `limit`.
    fn floor(
        &mut self,
        limit: u64,
        states: impl Fn(&Snapshots) -> std::io::Result<Vec<u64>>,
    ) -> Result<u64, JournalError> {
        let mut floor = limit;
        for reader in &self.readers {
            let found = states(&Snapshots::new(&reader.dir))?;
            let newest = found.len().checked_sub(STATES).map(|at| found[at]);
            let past = found.iter().rev().find(|sequence| **sequence <= limit);
            let needed = match reader.tells_past {
                true => newest.and(past.copied()),
                false => newest,
            };
            let Some(needed) = needed else {
                if self.waits_for != Some(reader.name) {
                    let reader = reader.name;
                    tracing::info!(
                        reader,
                        "nothing of the journal is removed before there are checkpoints"
                    );
                }
                self.waits_for = Some(reader.name);
                return Ok(0);
            };
            floor = floor.min(needed).min(newest.unwrap_or(0));
        }
        self.waits_for = None;
        Ok(floor)
    }
}
