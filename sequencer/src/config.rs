//! Settings of an engine node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use types::NodeId;

/// Nanoseconds since 1970. Passed in, so that a test or a simulator can hold it.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Which thread polls the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// The hot thread polls everything in turn: for machines with few cores.
    #[default]
    Fused,
    /// One thread polls all engines.
    Shared,
    /// One thread for each engine, each on its own core: for four free cores or more.
    Pinned,
}

/// See the fields.
#[derive(Clone)]
pub struct Config {
    pub node: NodeId,
    /// Folder of the journal.
    pub dir: PathBuf,
    /// Folder of its snapshots.
    pub snapshot_dir: PathBuf,
    /// Requests waiting for the hot thread; one more is `BUSY`.
    pub queue_capacity: usize,
    /// Commands, and reports, in the rings of an engine; a power of two.
    pub ring_capacity: usize,
    pub layout: Layout,
    /// Core to pin the hot thread to; engine threads take the cores behind it.
    pub core: Option<usize>,
    /// How long the hot thread spins after the last request before it parks.
    pub spin_us: u64,
    /// Time between the end of a session and the cancel of its orders.
    pub grace_ms: u64,
    /// Sync the journal; off only where losing it does not matter.
    pub sync: bool,
    pub segment_bytes: u64,
    /// Most bytes that may wait for the journal's disk; past it requests are `BUSY`.
    pub pending_bytes_max: usize,
    pub clock: Clock,
}

impl Config {
    pub fn new(dir: &Path) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            node: NodeId::new(1).expect("1 is a node number"),
            dir: dir.to_path_buf(),
            snapshot_dir: dir.join("snapshots"),
            queue_capacity: 65_536,
            ring_capacity: 1_024,
            layout: Layout::default(),
            core: None,
            // With cores to spare the hot thread waits for traffic awake; on a small machine they belong to everybody.
            spin_us: if cores >= 4 { 2_000 } else { 50 },
            grace_ms: 10_000,
            sync: true,
            segment_bytes: 16 << 20,
            pending_bytes_max: 32 << 20,
            clock: Arc::new(|| {
                let since = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default();
                u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
            }),
        }
    }
}
