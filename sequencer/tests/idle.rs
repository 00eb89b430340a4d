//! An idle node uses no core, in every layout, with its journal and its replica running.
#![cfg(target_os = "linux")]

mod desk;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use admission::Request;
use desk::{Time, config, done, open_desk};
use replica::LiveReplica;
use sequencer::{Backlog, Layout, SequencerHandle, SnapshotConfig};
use types::{NodeId, Side};

/// CPU time in nanoseconds of each thread of the node, by name and id.
fn cpu_ns() -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc/self/task").expect("tasks") {
        let path = entry.expect("entry").path();
        let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
        let name = read("comm").trim().to_owned();
        let is_ours =
            ["hot", "journal", "replica"].contains(&name.as_str()) || name.starts_with("engine-");
        let ns = read("schedstat")
            .split_whitespace()
            .next()
            .and_then(|text| text.parse().ok());
        if let (true, Some(ns)) = (is_ours, ns) {
            found.insert(format!("{name} {}", path.display()), ns);
        }
    }
    found
}

#[tokio::test]
async fn an_idle_node_burns_no_core() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let dir = tempfile::tempdir().expect("folder");
        let mut config = config(&Time::new());
        config.dir = dir.path().to_path_buf();
        config.snapshot_dir = dir.path().join("snapshots");
        config.layout = layout;
        config.spin_us = 2_000;
        let handle = SequencerHandle::start(config, Arc::new(Backlog::default())).expect("starts");
        let (node, parts) = (NodeId::new(1).expect("a node"), handle.replica_parts());
        let checkpoints = Some(SnapshotConfig::default());
        let _replica = LiveReplica::start(node, parts, checkpoints).expect("a replica");
        let desk = open_desk(handle.port(), 3).await;
        let mut front = desk.port.rings(64, Arc::default()).expect("rings");
        let order = Request::New(desk.order(0, Side::Sell, 100, 1));
        front
            .submit(sequencer::Submission::default(), &order)
            .expect("room");
        done(&desk.port, order).await;
        let threads = match layout {
            Layout::Fused => 3,
            Layout::Shared => 4,
            Layout::Pinned => 6,
        };
        // Two quiet seconds in a row: the threads have stopped spinning, and the replica compares
        // itself with the quiet node once.
        let (mut quiet, mut busy) = (0, Vec::new());
        for _ in 0..15 {
            let before = cpu_ns();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let after = cpu_ns();
            assert_eq!(after.len(), threads, "{layout:?}: {after:?}");
            let used_ns = |thread: &str| after[thread] - before.get(thread).unwrap_or(&0);
            let used = after.keys().map(|thread| (thread.clone(), used_ns(thread)));
            busy = used.filter(|(_, used_ns)| *used_ns >= 50_000_000).collect();
            quiet = if busy.is_empty() { quiet + 1 } else { 0 };
            if quiet == 2 {
                break;
            }
        }
        assert_eq!(quiet, 2, "{layout:?}: ns of the last second: {busy:?}");
        // Parked threads wake at once.
        done(&desk.port, order).await;
    }
}
