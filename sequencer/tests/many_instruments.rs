//! A node with thousands of instruments: what its start opens does not grow with their number.
//!
//! One test alone in its binary, since it counts the files and threads of the process.

mod desk;

use std::path::Path;
use std::sync::Arc;

use admission::{NewRequest, Request};
use desk::{Time, done, list, open_desk};
use sequencer::{Backlog, Config, Layout, SequencerHandle};
use types::Side;

const FEW: usize = 4;
const MANY: usize = 3_000;

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

/// Files and threads of the process after the start of the market in `dir`.
async fn opened(dir: &Path, layout: Layout, instruments: usize) -> [usize; 2] {
    let handle = start(dir, layout);
    let books = handle.port().inspect(|core| core.books().count()).await;
    assert_eq!(books, Ok(instruments));
    let opened = ["/proc/self/fd", "/proc/self/task"].map(entries);
    handle.stop();
    opened
}

#[tokio::test]
async fn a_start_with_3000_instruments_opens_no_more_than_one_with_4() {
    let folders = [FEW, MANY].map(|_| tempfile::tempdir().expect("a folder"));
    let [few, many] = [folders[0].path(), folders[1].path()];
    for (dir, instruments) in [(few, FEW), (many, MANY)] {
        let handle = start(dir, Layout::Fused);
        let desk = open_desk(handle.port(), 1).await;
        let mut last = desk.instruments[0];
        for at in 1..instruments {
            last = list(&desk.port, at).await;
        }
        let order = NewRequest {
            instrument: last,
            ..desk.order(0, Side::Buy, 10_000, 1)
        };
        let placed = done(&desk.port, Request::New(order)).await.command.sequence;
        handle.commit().wait(placed).await.expect("durable");
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
