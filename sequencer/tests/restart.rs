//! Restarts on real files: a killed node, snapshots, replay, a second process on the folder.

mod desk;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::Request;
use desk::{Desk, Time, done, open_desk};
use journal::Snapshots;
use replica::LiveReplica;
use sequencer::recover::StartError;
use sequencer::{Backlog, Config, Record, SequencerHandle, SnapshotConfig, replay};
use types::{NodeId, Sequence, Side};

fn files(dir: &Path) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.to_path_buf();
    config.snapshot_dir = dir.join("snapshots");
    config
}

fn start(dir: &Path) -> Result<SequencerHandle, StartError> {
    SequencerHandle::start(files(dir), Arc::new(Backlog::default()))
}

/// Orders `range` of a flow that trades.
async fn trade(desk: &Desk, range: std::ops::Range<i64>) -> Vec<Record> {
    let mut records = Vec::new();
    for at in range {
        let side = if at % 3 == 0 { Side::Buy } else { Side::Sell };
        let order = desk.order(usize::from(at % 2 == 0), side, 10_000 + at * 7 % 23, 5);
        records.push(done(&desk.port, Request::New(order)).await);
    }
    records
}

/// A replica at the commit position that has written a checkpoint there.
async fn checkpoint(handle: &SequencerHandle, dir: &Path) -> (Sequence, u64) {
    let often = SnapshotConfig {
        every_commands: 1,
        every: Duration::from_millis(1),
        ..SnapshotConfig::default()
    };
    let (node, parts) = (NodeId::new(1).expect("a node"), handle.replica_parts());
    let live = LiveReplica::start(node, parts, Some(often)).expect("a replica");
    let replica = live.replica();
    let end = handle.commit().position();
    replica.wait(end).await.expect("follows");
    let checkpoints = Snapshots::new(&dir.join("snapshots"));
    let since = Instant::now();
    while checkpoints.sequences().expect("listed").last() != Some(&end.get()) {
        assert!(since.elapsed() < desk::HANG, "no checkpoint");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    replica.read(|state| (state.sequence(), state.core().state_hash()))
}

async fn hash(handle: &SequencerHandle) -> u64 {
    let hash = handle.port().inspect(|core| core.state_hash()).await;
    hash.expect("inspected")
}

// rows: R174 R180
#[tokio::test]
async fn r174_r180_a_snapshot_and_the_rest_of_the_journal_give_the_live_state() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path()).expect("starts");
    let desk = open_desk(handle.port(), 2).await;
    trade(&desk, 0..300).await;
    let middle = trade(&desk, 300..301).await[0].command.sequence;
    handle.commit().wait(middle).await.expect("durable");
    assert_eq!(
        checkpoint(&handle, dir.path()).await,
        (middle, hash(&handle).await),
        "the replica is where the node is"
    );

    let last = trade(&desk, 301..500)
        .await
        .last()
        .expect("some")
        .command
        .sequence;
    handle.commit().wait(last).await.expect("durable");
    let live = hash(&handle).await;
    handle.stop();

    let again = start(dir.path()).expect("starts");
    assert_eq!(again.recovered(), last);
    assert_eq!(hash(&again).await, live, "from the snapshot");
    // It keeps trading at the same prices, and another replica starts at the checkpoint.
    let more = trade(
        &Desk {
            port: again.port(),
            ..desk
        },
        500..600,
    )
    .await;
    let last = more.last().expect("some").command.sequence;
    again.commit().wait(last).await.expect("durable");
    let live = hash(&again).await;
    let followed = checkpoint(&again, dir.path()).await;
    again.stop();

    // And from the first record, without the snapshot.
    let replayed = replay(dir.path(), None).expect("replays");
    assert_eq!((replayed.sequence(), replayed.state_hash()), (last, live));
    assert_eq!(followed, (last, live));
    let earlier = replay(dir.path(), Some(middle)).expect("replays");
    assert_eq!(earlier.sequence(), middle);
    assert_ne!(earlier.state_hash(), live);
}

#[tokio::test]
async fn a_snapshot_of_records_that_the_journal_has_lost_stops_the_start() {
    let dir = tempfile::tempdir().expect("folder");
    let handle = start(dir.path()).expect("starts");
    let desk = open_desk(handle.port(), 1).await;
    let last = trade(&desk, 0..50)
        .await
        .last()
        .expect("some")
        .command
        .sequence;
    handle.commit().wait(last).await.expect("durable");
    checkpoint(&handle, dir.path()).await;
    handle.stop();
    // The last record is damaged. The journal alone would truncate it as a torn tail.
    let first = dir.path().join("0000000001.log");
    let whole = std::fs::read(&first).expect("read");
    let end = whole.iter().rposition(|byte| *byte != 0).expect("written");
    let mut damaged = whole.clone();
    damaged[end - 3..=end].fill(0);
    std::fs::write(&first, &damaged).expect("written");
    match start(dir.path()) {
        Err(StartError::SnapshotAhead { snapshot, journal }) => {
            assert_eq!((snapshot, journal.next()), (last, last));
        }
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("a lost record was not detected"),
    }
    assert_eq!(
        std::fs::read(&first).expect("read"),
        damaged,
        "nothing was truncated"
    );
    std::fs::write(&first, &whole).expect("repaired");
    start(dir.path()).expect("starts again").stop();

    for entry in std::fs::read_dir(dir.path()).expect("listed") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|extension| extension == "log") {
            std::fs::remove_file(path).expect("removed");
        }
    }
    match start(dir.path()) {
        Err(StartError::SnapshotAhead { snapshot, journal }) => {
            assert_eq!((snapshot, journal), (last, Sequence(0)));
        }
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("lost records were not detected"),
    }
}

#[tokio::test]
async fn a_folder_is_used_by_one_node_at_a_time_and_a_replay_only_reads() {
    let dir = tempfile::tempdir().expect("folder");
    let missing = dir.path().join("missing");
    assert!(replay(&missing, None).is_err());
    assert!(!missing.exists(), "a replay creates nothing");
    let handle = start(dir.path()).expect("starts");
    assert!(matches!(start(dir.path()), Err(StartError::InUse(_))));
    handle.stop();
    start(dir.path()).expect("free again").stop();
}
