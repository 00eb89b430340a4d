//! A node with thousands of instruments: files and threads do not grow with their number, and an
//! idle instrument takes little memory.
//!
//! One test, since it counts the files, threads and memory of the process.

mod desk;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{NewRequest, Request};
use desk::{HANG, Time, done, in_time, list, open_desk};
use replica::{LiveReplica, Replica};
use sequencer::{Backlog, Config, Layout, SequencerHandle};
use types::{NodeId, Side};

const FEW: usize = 4;
const MANY: usize = 3_000;
/// KiB of resident memory per idle instrument: book and tables, both rings of its engine, and book
/// and tables of the replica.
const IDLE_KIB_MAX: usize = 256;

fn start(dir: &Path, layout: Layout) -> SequencerHandle {
    let mut config: Config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config.sync = false;
    // At most two segments of either market.
    config.segment_bytes = 16 << 20;
    config.layout = layout;
    // As many as the smaller market has instruments.
    config.engine_threads_max = FEW;
    SequencerHandle::start(config, Arc::new(Backlog::default())).expect("starts")
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("procfs").count()
}

/// Resident memory of the process.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.and_then(|text| text.parse().ok()).expect("VmRSS")
}

/// Waits until all threads of the nodes that have stopped have ended: a stop does not wait for
/// those that prepare price windows.
fn wait_for_ended_threads() {
    let of_nodes = ["hot", "journal", "engine-", "price-windows"];
    let is_of_a_node = |thread: std::io::Result<std::fs::DirEntry>| {
        // A thread that ends meanwhile has no name.
        let name = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("comm")));
        name.is_ok_and(|name| of_nodes.iter().any(|of_node| name.starts_with(of_node)))
    };
    let since = Instant::now();
    while std::fs::read_dir("/proc/self/task")
        .expect("procfs")
        .any(is_of_a_node)
    {
        assert!(since.elapsed() < HANG, "threads of a stopped node stay");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Resident memory once the replica has every command, and the number of its books.
async fn followed_kib(replica: &Replica) -> (usize, usize) {
    let caught_up = replica.wait(replica.assigned());
    in_time("the replica", caught_up).await.expect("follows");
    let books = replica.read(|state| state.core().books().count());
    (resident_kib(), books)
}

/// Files and threads of the process after the start of the market in `dir`.
async fn opened(dir: &Path, layout: Layout, instruments: usize) -> [usize; 2] {
    wait_for_ended_threads();
    let handle = start(dir, layout);
    let books = handle.port().inspect(|core| core.books().count()).await;
    assert_eq!(books, Ok(instruments));
    let opened = ["/proc/self/fd", "/proc/self/task"].map(entries);
    handle.stop();
    opened
}

#[tokio::test]
async fn three_thousand_instruments_open_as_little_as_four_and_take_little_memory() {
    let folders = [FEW, MANY].map(|_| tempfile::tempdir().expect("a folder"));
    let [few, many] = [folders[0].path(), folders[1].path()];
    for (dir, instruments) in [(few, FEW), (many, MANY)] {
        // With rings.
        let handle = start(dir, Layout::Shared);
        let (node, parts) = (NodeId::new(1).expect("a node"), handle.replica_parts());
        let live = LiveReplica::start(node, parts, None).expect("a replica");
        let replica = live.replica();
        let desk = open_desk(handle.port(), 1).await;
        let mut last = desk.instruments[0];
        let (before, _) = followed_kib(&replica).await;
        for at in 1..instruments {
            last = list(&desk.port, at).await;
        }
        let (after, books) = followed_kib(&replica).await;
        assert_eq!(books, instruments);
        if instruments == MANY {
            let each = after.saturating_sub(before) / MANY;
            assert!(each <= IDLE_KIB_MAX, "{each} KiB per idle instrument");
        }
        let order = NewRequest {
            instrument: last,
            ..desk.order(0, Side::Buy, 10_000, 1)
        };
        let placed = done(&desk.port, Request::New(order)).await.command.sequence;
        handle.commit().wait(placed).await.expect("durable");
        drop(live);
        handle.stop();
    }
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let [files, threads] = opened(few, layout, FEW).await;
        let [more_files, more_threads] = opened(many, layout, MANY).await;
        // The journal may have begun its second segment.
        assert!(more_files <= files + 1, "{more_files} files in {layout:?}");
        assert_eq!(more_threads, threads, "threads in {layout:?}");
    }
}
