//! Removing the journal's beginning while the node runs: a thread of low priority that now and then takes away whole segments that nobody needs.
//!
//! A segment goes when all of these are behind it: so many bytes of the log as are to be kept; what everybody who follows the replica has in a store of his own; the newest
//! two good checkpoints of the node, and one at or before what is kept and what a follower still needs. A state counts
//! while its file is whole and if this process has gone on from it or has written it ([`Proven`]): one of another version, or ahead of a database that was put
//! back, is no state that a start can use. Who has less than two keeps everything.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use journal::{Front, JournalError, Snapshots};
use types::Sequence;

use crate::checkpoint::{Proven, lower_priority};

/// States that stand behind a segment that goes: the newest, and one in case it is damaged.
const STATES: usize = 2;

/// What is kept of the journal.
#[derive(Clone, Debug)]
pub struct Retention {
    /// Bytes kept at least.
    pub bytes: u64,
    /// Everybody who reads the journal at a start.
    pub readers: Vec<JournalReader>,
    /// How far everybody has come who follows the replica.
    pub followers: Vec<Durable>,
    /// Time between two looks.
    pub every: Duration,
}

impl Retention {
    /// So many bytes kept for these readers.
    pub fn new(bytes: u64, readers: Vec<JournalReader>) -> Self {
        Self {
            bytes,
            readers,
            followers: Vec::new(),
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
    /// The same as he was given.
    pub proven: Proven,
    /// He reads again what is behind an older checkpoint.
    pub tells_past: bool,
}

/// Last record that a follower of the replica has in a store of its own, and will not ask for again; zero until it has said so.
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

    /// Everything up to here is durable elsewhere.
    pub fn set(&self, sequence: Sequence) {
        self.through.store(sequence.get(), Ordering::Release);
    }
}

/// The running service; stops when it is dropped.
pub(crate) struct RetentionService {
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RetentionService {
    /// `node`: its own snapshots.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(front: Front, node: JournalReader, retention: Retention) -> std::io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let seen = is_stopping.clone();
        let mut readers = retention.readers;
        readers.push(node);
        let mut keeper = Keeper {
            front,
            bytes: retention.bytes,
            readers,
            followers: retention.followers,
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
    followers: Vec<Durable>,
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
        // What is counted on stays until the segments are gone.
        let proven: Vec<_> = self.readers.iter().map(|r| r.proven.clone()).collect();
        let _held: Vec<_> = proven.iter().map(Proven::hold).collect();
        // By names first: whole files are worth reading only for a segment that would go.
        let floor = self.floor(limit, |_, _| true)?;
        if self.front.boundary(floor)? <= gone {
            return Ok(0);
        }
        let floor = self.floor(limit, Snapshots::is_good)?;
        let removed = self.front.remove(floor)?;
        if removed > 0 {
            self.waits_for = None;
        }
        Ok(removed)
    }

    /// Last record that nobody needs, at or before `limit`; 0 when somebody needs all.
    fn floor(
        &mut self,
        limit: u64,
        is_good: impl Fn(&Snapshots, u64) -> bool,
    ) -> Result<u64, JournalError> {
        let mut floor = limit;
        for follower in &self.followers {
            let through = follower.through.load(Ordering::Acquire);
            metrics::gauge!("journal_needed_behind", "follower" => follower.name)
                .set(through as f64);
            floor = floor.min(through);
        }
        for reader in &self.readers {
            let states = Snapshots::new(&reader.dir);
            let found = states.sequences()?;
            let newest_first = found.into_iter().rev();
            let mut usable =
                newest_first.filter(|at| reader.proven.has(*at) && is_good(&states, *at));
            let Some(needed) = usable.nth(STATES - 1) else {
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
            floor = floor.min(needed);
        }
        // What is kept has to be told from somewhere.
        for reader in self.readers.iter().filter(|reader| reader.tells_past) {
            let states = Snapshots::new(&reader.dir);
            let found = states.sequences()?;
            let mut before = found.into_iter().rev().filter(|at| *at <= floor);
            floor = before.find(|at| is_good(&states, *at)).unwrap_or(0);
        }
        Ok(floor)
    }
}
