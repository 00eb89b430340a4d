//! Settings of an engine node.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use service_kit::clock;
use types::{NodeId, Sequence};

/// Nanoseconds since 1970, and whether they can be trusted. Injected, so that tests control it.
pub type Clock = Arc<dyn clock::Time>;

/// Which thread polls the engines (`design.md` 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The hot thread polls everything in turn: for machines with few cores.
    Fused,
    /// One thread polls all engines.
    Shared,
    /// One thread per engine, up to [`Config::engine_threads_max`]; each on its own core where
    /// [`Config::core`] is set.
    Pinned,
}

/// Number of cores from which engines have threads of their own.
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
/// Minimum of [`Config::pending_bytes_max`]: its last eighth, which is reserved, holds a thousand
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
    /// Last record that databases are known to have read. If the journal ends before it, the node
    /// does not start and leaves the journal as it is.
    pub reach: Sequence,
    /// Requests that may wait for the hot thread; one more is `BUSY`.
    pub queue_capacity: usize,
    /// Slots of an engine's command ring and of its report ring; a power of two.
    pub ring_capacity: usize,
    pub layout: Layout,
    /// Core to pin the hot thread to; engine threads take the cores after it. `None`: not pinned.
    pub core: Option<usize>,
    /// Most threads of layout `pinned`; with more engines, they share them in turn.
    pub engine_threads_max: usize,
    /// How long the hot thread spins after the last request before it parks.
    pub spin_us: u64,
    /// With a pinned hot thread: minimum microseconds from the start of a large journal write to
    /// the start of the next. Below three cores the journal competes with a front that spins, and
    /// few large writes take less of its time than many small ones. 0: no delay.
    pub gather_us: u64,
    /// Time between the end of a session and the cancel of its orders.
    pub grace_ms: u64,
    /// Syncs the journal. Off only where data loss is acceptable.
    pub sync: bool,
    pub segment_bytes: u64,
    /// Soft limit in bytes on what waits for the journal's disk; past it requests are `BUSY`.
    /// In-flight commands and the batch being written may exceed it.
    pub pending_bytes_max: usize,
    /// Bytes at the journal's end that are kept in memory for its readers.
    pub recent_bytes: usize,
    /// Default: the clock that all services of the process share.
    pub clock: Clock,
}

impl Config {
    /// `pending_bytes_max` in bytes for one second at `orders` per second.
    pub fn pending_bytes_for(orders: u32) -> usize {
        (orders as usize * COMMAND_BYTES).max(PENDING_BYTES_MIN)
    }

    /// Most engine threads beside the hot thread.
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
