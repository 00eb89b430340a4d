//! Settings of an engine node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use service_kit::clock;
use types::{NodeId, Sequence};

/// Nanoseconds since 1970, and whether they can be trusted. Passed in, so that a test or a simulator can hold it.
pub type Clock = Arc<dyn clock::Time>;

/// Which thread polls the engines (`design.md` 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The hot thread polls everything in turn: for machines with few cores.
    Fused,
    /// One thread polls all engines.
    Shared,
    /// One thread for each engine, as long as there are [`Config::engine_threads_max`]; each on its own core
    /// where [`Config::core`] says so.
    Pinned,
}

/// From so many cores on engines have threads of their own.
const PINNED_CORES: usize = 4;

impl Layout {
    /// The layout for a machine of which `cores` are free.
    pub fn for_cores(cores: usize) -> Self {
        if cores < PINNED_CORES {
            Self::Fused
        } else {
            Self::Pinned
        }
    }
}

/// See the fields.
#[derive(Clone)]
pub struct Config {
    pub node: NodeId,
    /// Folder of the journal.
    pub dir: PathBuf,
    /// Folder of its snapshots.
    pub snapshot_dir: PathBuf,
    /// Last record that others, databases, are known to have read. The node does not start, and
    /// leaves the journal as it is, when that ends before it.
    pub reach: Sequence,
    /// Requests waiting for the hot thread; one more is `BUSY`.
    pub queue_capacity: usize,
    /// Commands, and reports, in the rings of an engine; a power of two.
    pub ring_capacity: usize,
    pub layout: Layout,
    /// Core to pin the hot thread to; engine threads take the cores behind it. `None`: the scheduler chooses.
    pub core: Option<usize>,
    /// Most threads of layout `pinned`; with more engines, they share them in turn.
    pub engine_threads_max: usize,
    /// How long the hot thread spins after the last request before it parks.
    pub spin_us: u64,
    /// With a pinned hot thread: microseconds from the beginning of a journal's write that carried much to that
    /// of the next. Below three cores the journal takes its time from a front that spins, and few large writes
    /// take less of it than many small ones; 0 leaves it to the disk.
    pub gather_us: u64,
    /// Time between the end of a session and the cancel of its orders.
    pub grace_ms: u64,
    /// Sync the journal; off only where losing it does not matter.
    pub sync: bool,
    pub segment_bytes: u64,
    /// Bytes that may wait for the journal's disk; past it requests are `BUSY`. What the commands under way
    /// still cause comes on top, and so does the batch that is being written.
    pub pending_bytes_max: usize,
    /// Bytes at the journal's end that stay in memory for its readers.
    pub recent_bytes: usize,
    /// Unless given: the clock that all services of the process share.
    pub clock: Clock,
}

impl Config {
    /// Most threads that poll engines beside the hot thread.
    pub(crate) fn engine_threads(&self) -> usize {
        match self.layout {
            Layout::Fused => 0,
            Layout::Shared => 1,
            Layout::Pinned => self.engine_threads_max.max(1),
        }
    }

    pub fn new(dir: &Path) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            node: NodeId::new(1).expect("1 is a node number"),
            dir: dir.to_path_buf(),
            snapshot_dir: dir.join("snapshots"),
            reach: Sequence::ZERO,
            queue_capacity: 65_536,
            ring_capacity: 1_024,
            layout: Layout::for_cores(cores),
            core: None,
            // One for the hot thread, one for everybody else.
            engine_threads_max: cores.saturating_sub(2).max(1),
            // With cores to spare the hot thread waits for traffic awake; on a small machine they belong to everybody.
            spin_us: if cores < PINNED_CORES { 50 } else { 2_000 },
            gather_us: if cores < 3 { 1_000 } else { 0 },
            grace_ms: 10_000,
            sync: true,
            segment_bytes: 16 << 20,
            pending_bytes_max: 32 << 20,
            recent_bytes: 16 << 20,
            clock: clock::process().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_cores_are_fused() {
        for (cores, layout) in [
            (1, Layout::Fused),
            (2, Layout::Fused),
            (3, Layout::Fused),
            (4, Layout::Pinned),
            (64, Layout::Pinned),
        ] {
            assert_eq!(Layout::for_cores(cores), layout, "{cores}");
        }
    }
}
