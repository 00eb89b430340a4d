//! Snapshots of a running node: bad ones are skipped, good ones replace removed records.

mod desk;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{CancelRequest, OrderRef, Request};
use desk::{Desk, HANG, Time, done, open_desk};
use journal::{FileStorage, Snapshots};
use replica::LiveReplica;
use sequencer::{
    Backlog, CheckpointKeeper, Config, Layout, SequencerHandle, SnapshotConfig, UsableCheckpoints,
    replay,
};
use types::{CancelReason, Handle, Id128, NodeId, Sequence, SessionIx, Side, UserIx};

fn files(dir: &Path, layout: Layout) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config.layout = layout;
    config.ring_capacity = 64;
    config
}

fn start(dir: &Path, layout: Layout) -> SequencerHandle {
    SequencerHandle::start(files(dir, layout), Arc::new(Backlog::default())).expect("starts")
}

fn every(commands: u64) -> SnapshotConfig {
    SnapshotConfig {
        every_commands: commands,
        every: Duration::from_secs(3_600),
        ..SnapshotConfig::default()
    }
}

fn follow(handle: &SequencerHandle, config: SnapshotConfig) -> LiveReplica {
    let node = NodeId::new(1).expect("a node");
    LiveReplica::start(node, handle.replica_parts(), Some(config)).expect("a replica")
}

/// Sends seeded orders and cancels; returns the last sequence.
async fn trade(desk: &Desk, seed: u64, count: u64) -> Sequence {
    let mut state = seed;
    let mut below = |bound: u64| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (z ^ (z >> 27)) % bound
    };
    let mut last = Sequence::ZERO;
    for _ in 0..count {
        let request = if below(4) == 0 {
            Request::Cancel(CancelRequest {
                order: OrderRef::Handle(Handle {
                    slot: u32::try_from(below(60)).expect("small"),
                    generation: 1,
                }),
                user: UserIx::NONE,
                session: SessionIx::NONE,
                client_seq: 0,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            })
        } else {
            let side = if below(2) == 0 { Side::Buy } else { Side::Sell };
            let price = 10_000 + i64::try_from(below(23)).expect("small");
            let user = usize::try_from(below(2)).expect("small");
            let mut order = desk.order(user, side, price, below(9) + 1);
            order.instrument = desk.instruments[below(desk.instruments.len() as u64) as usize];
            Request::New(order)
        };
        if let Ok(record) = desk.port.call(request).await {
            last = record.command.sequence;
        }
    }
    last
}

async fn hash(handle: &SequencerHandle) -> u64 {
    let hash = handle.port().inspect(|core| core.state_hash()).await;
    hash.expect("inspected")
}

/// Waits for a snapshot at or after `sequence`.
fn wait_for_snapshot(dir: &Path, sequence: Sequence) -> Vec<u64> {
    let snapshots = Snapshots::new(&dir.join("snapshots"));
    let since = Instant::now();
    loop {
        let found = snapshots.sequences().expect("listed");
        if found.last().is_some_and(|last| *last >= sequence.get()) {
            return found;
        }
        assert!(since.elapsed() < HANG, "no snapshot: {found:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

// rows: R174 R180
#[tokio::test]
async fn r174_r180_all_layouts_recover_the_same_state() {
    for (seed, layout) in [(1, Layout::Fused), (2, Layout::Shared), (3, Layout::Pinned)] {
        let dir = tempfile::tempdir().expect("folder");
        let handle = start(dir.path(), layout);
        let desk = open_desk(handle.port(), 3).await;
        let replica = follow(&handle, every(500));
        let last = trade(&desk, seed, 1_800).await;
        handle.commit().wait(last).await.expect("durable");
        let found = wait_for_snapshot(dir.path(), Sequence(last.get() - 500));
        assert!(found.iter().all(|sequence| *sequence <= last.get()));
        let live = hash(&handle).await;
        drop(replica);
        handle.stop();

        // From the newest snapshot, in another layout than the one that wrote it.
        for other in [Layout::Pinned, Layout::Fused, Layout::Shared] {
            let again = start(dir.path(), other);
            assert_eq!(again.recovered(), last, "{layout:?} {other:?}");
            assert_eq!(hash(&again).await, live, "{layout:?} {other:?}");
            again.stop();
        }
        // From the first record.
        let replayed = replay(dir.path(), None).expect("replays");
        assert_eq!((replayed.sequence(), replayed.state_hash()), (last, live));
        std::fs::remove_dir_all(dir.path().join("snapshots")).expect("removed");
        let again = start(dir.path(), layout);
        assert_eq!((again.recovered(), hash(&again).await), (last, live));
    }
}

#[tokio::test]
async fn a_bad_snapshot_is_skipped_for_the_one_before_it() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path(), Layout::Fused);
    let desk = open_desk(handle.port(), 1).await;
    let service = SnapshotConfig {
        kept: 3,
        ..every(200)
    };
    let replica = follow(&handle, service);
    let mut last = Sequence::ZERO;
    for round in 0..4 {
        // More than 200 commands, so that each round has a snapshot of its own.
        last = trade(&desk, 7 + round, 300).await;
        handle.commit().wait(last).await.expect("durable");
        wait_for_snapshot(dir.path(), Sequence(last.get() - 200));
    }
    let live = hash(&handle).await;
    drop(replica);
    handle.stop();
    let folder = dir.path().join("snapshots");
    let found = Snapshots::new(&folder).sequences().expect("listed");
    let found = found[found.len() - 3..].to_vec();

    // The newest is damaged on disk; the next one is whole but does not restore.
    let newest = folder.join(format!("{:020}.snap", found[2]));
    let mut bytes = std::fs::read(&newest).expect("read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&newest, bytes).expect("written");
    let keep_all = Snapshots::new(&folder).with_kept(9);
    keep_all
        .write(found[1], &[0x5a; 4_096])
        .expect("a snapshot of nonsense");
    let again = start(dir.path(), Layout::Fused);
    assert_eq!((again.recovered(), hash(&again).await), (last, live));
    let limits = admission::AdmissionConfig::default();
    let restored = sequencer::image::load(&folder, Sequence(u64::MAX), limits);
    let restored = restored.expect("read").expect("one is good");
    assert_eq!(
        restored.sequence(),
        Sequence(found[0]),
        "the oldest is good"
    );
    again.stop();

    // Whole, and of this version, but an invalid state.
    let good = Snapshots::new(&folder).newest(found[0]).expect("read");
    let good = good.expect("the oldest is good");
    assert_eq!(good.sequence, found[0]);
    let mut broken = 0;
    for at in (0..good.payload.len()).step_by(good.payload.len() / 40) {
        let mut payload = good.payload.clone();
        payload[at] ^= 0x21;
        keep_all.write(found[0], &payload).expect("written");
        // A state or none, but never a panic.
        let restored = sequencer::image::load(
            &folder,
            Sequence(found[0]),
            admission::AdmissionConfig::default(),
        );
        // Skipped for an older one, where the thinning series has one.
        let restored = restored.expect("read");
        broken += usize::from(restored.is_none_or(|core| core.sequence() != Sequence(found[0])));
    }
    assert!(broken > 0, "some of it is detected");

    // With all of them bad the journal alone is enough.
    for at in keep_all.sequences().expect("listed") {
        keep_all.write(at, &[1; 64]).expect("nonsense");
    }
    let again = start(dir.path(), Layout::Fused);
    assert_eq!((again.recovered(), hash(&again).await), (last, live));
}

#[tokio::test]
async fn a_journal_whose_beginning_is_gone_starts_from_its_snapshots() {
    let dir = tempfile::tempdir().expect("folder");
    let mut config = files(dir.path(), Layout::Fused);
    config.segment_bytes = 64 << 10;
    let begin = |config: &Config| {
        SequencerHandle::start(config.clone(), Arc::new(Backlog::default())).expect("starts")
    };
    let handle = begin(&config);
    let desk = open_desk(handle.port(), 1).await;
    let replica = follow(&handle, every(200));
    let mut last = Sequence::ZERO;
    for seed in 0..4 {
        last = trade(&desk, seed, 300).await.max(last);
        handle.commit().wait(last).await.expect("durable");
        wait_for_snapshot(dir.path(), Sequence(last.get() - 200));
    }
    let live = hash(&handle).await;
    drop(replica);
    handle.stop();
    let snapshots = Snapshots::new(&dir.path().join("snapshots"));
    let good = snapshots.good().expect("listed");
    let oldest = good[good.len() - 2];
    let storage = FileStorage::read_only(dir.path()).expect("a folder");
    let mut removed = 0;
    for segment in journal::list(&storage).expect("listed") {
        if segment.sequences.is_some_and(|(_, last)| last <= oldest) {
            std::fs::remove_file(&segment.name).expect("removed");
            removed += 1;
        }
    }
    assert!(removed > 0);
    let again = begin(&config);
    assert_eq!((again.recovered(), hash(&again).await), (last, live));
    // It keeps running.
    let desk = Desk {
        port: again.port(),
        ..desk
    };
    done(&desk.port, Request::New(desk.order(0, Side::Buy, 9_000, 1))).await;
    again.stop();
    let replayed = replay(dir.path(), Some(last)).expect("from a snapshot");
    assert_eq!((replayed.sequence(), replayed.state_hash()), (last, live));
    // Without a snapshot the rest is not enough, and the error names the truncation.
    std::fs::remove_dir_all(dir.path().join("snapshots")).expect("removed");
    let error = replay(dir.path(), None).err().expect("records are missing");
    assert!(error.to_string().contains("truncated"), "{error}");
}

#[tokio::test]
async fn a_quiet_node_gets_its_snapshot_by_time() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path(), Layout::Fused);
    let desk = open_desk(handle.port(), 1).await;
    let service = SnapshotConfig {
        every: Duration::from_millis(100),
        ..every(1_000_000)
    };
    let replica = follow(&handle, service);
    let last = trade(&desk, 5, 40).await;
    let found = wait_for_snapshot(dir.path(), last);
    assert_eq!(found.last(), Some(&last.get()));
    // No further one while there is no command, however much time passes.
    let always = SnapshotConfig {
        every: Duration::ZERO,
        ..every(1_000_000)
    };
    let (folder, usable) = (dir.path().join("snapshots"), UsableCheckpoints::default());
    let mut keeper = CheckpointKeeper::new("reader", &folder, always, last, usable);
    assert!(!keeper.is_due(last) && keeper.is_due(last.next()));
    // A second replica replaces the first.
    drop(replica);
    let replica = follow(&handle, every(10));
    let last = trade(&desk, 6, 40).await;
    wait_for_snapshot(dir.path(), Sequence(last.get() - 10));
    drop(replica);
    handle.stop();
}
