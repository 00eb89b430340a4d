//! Settings of an engine node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use service_kit::clock;
use types::{NodeId, Sequence};

/// Clock: nanoseconds since 1970, and whether they can be trusted. Tests inject their own.
pub type Clock = Arc<dyn clock::Time>;

/// Which thread has the books (`design.md` 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The hot thread, without rings in between: for machines with few cores.
    Fused,
    /// One engine thread polls all engines.
    Shared,
    /// One thread per engine, up to [`Config::engine_threads_max`]. Each has its own core if
    /// [`Config::core`] is set.
    Pinned,
}

/// Minimum number of cores for engine threads.
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

/// Journal bytes of a command with its events, rounded up (`docs/measurements/recovery.md`).
const COMMAND_BYTES: usize = 192;
/// Minimum of [`Config::pending_bytes_max`]. Its last eighth, a reserve, has room for a thousand
/// cancels.
const PENDING_BYTES_MIN: usize = 4 << 20;

/// Settings of one node.
#[derive(Clone)]
pub struct Config {
    pub node: NodeId,
    /// Folder of the journal.
    pub dir: PathBuf,
    /// Folder of its snapshots.
    pub snapshot_dir: PathBuf,
    /// Last record that a database is known to have read. If the journal ends before it, the node
    /// does not start and leaves the journal unchanged.
    pub reach: Sequence,
    /// Maximum number of requests that wait in the queue; further ones are `BUSY`.
    pub queue_capacity: usize,
    /// Slots of an engine's command ring and of its report ring; a power of two.
    pub ring_capacity: usize,
    pub layout: Layout,
    /// Core of the hot thread; the engine threads have the cores after it. `None`: not pinned.
    pub core: Option<usize>,
    /// Core of the journal's threads, at real-time priority. `None`: if the hot thread is pinned,
    /// any but its core and those of the engines.
    pub journal_core: Option<usize>,
    /// Maximum number of engine threads in layout `pinned`. Further engines share them.
    pub engine_threads_max: usize,
    /// How long the hot thread spins after the last request before it parks.
    pub spin_us: u64,
    /// Minimum microseconds from the start of a large journal write to that of the next; 0: none.
    /// Applies if the hot thread is pinned. Below three cores the journal shares a core with a
    /// thread that spins, and few large writes take less of its time than many small ones.
    pub gather_us: u64,
    /// Grace period: time from the end of a session to the cancel of its orders.
    pub grace_ms: u64,
    /// Syncs the journal. Off only where data loss is acceptable.
    pub sync: bool,
    pub segment_bytes: u64,
    /// Soft limit of the bytes that wait for the journal's disk; above it requests are `BUSY`.
    /// Commands in flight and the batch being written come on top.
    pub pending_bytes_max: usize,
    /// Bytes of the last journal batches kept in memory for readers.
    pub recent_bytes: usize,
    /// By default the clock that all services of the process share.
    pub clock: Clock,
}

impl Config {
    /// `pending_bytes_max` in bytes for one second at `orders` per second.
    pub fn pending_bytes_for(orders: u32) -> usize {
        (orders as usize * COMMAND_BYTES).max(PENDING_BYTES_MIN)
    }

    /// Maximum number of engine threads besides the hot thread.
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
            ring_capacity: 512,
            layout: Layout::for_cores(cores),
            core: None,
            journal_core: None,
            // One core for the hot thread, one for all other threads.
            engine_threads_max: cores.saturating_sub(2).max(1),
            // With spare cores an idle hot thread spins; on a small machine other threads need its
            // core.
            spin_us: if cores < PINNED_CORES { 50 } else { 2_000 },
            gather_us: if cores < 3 { 1_000 } else { 0 },
            grace_ms: 10_000,
            sync: true,
            segment_bytes: 16 << 20,
            pending_bytes_max: Self::pending_bytes_for(200_000),
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
