//! Truncation of the journal while the node runs: only records that are not needed are removed.
//!
//! The rest restores the same node and is shown by `platform journal`.

mod desk;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use admission::Request;
use desk::{HANG, Time, done, in_time, open_desk};
use journal::Snapshots;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};
use sequencer::inspect::{Folder, SegmentLine};
use sequencer::{
    Backlog, CheckpointError, CheckpointKeeper, Checkpoints, Config, Durable, Retention,
    SequencerHandle, SnapshotConfig, StartError, UsableCheckpoints,
};
use types::{Sequence, Side};

fn config(dir: &Path) -> Config {
    let mut config = desk::config(&Time::new());
    config.dir = dir.join("journal");
    config.snapshot_dir = config.dir.join("snapshots");
    config.segment_bytes = 64 << 10;
    config.sync = false;
    config
}

fn every(commands: u64) -> SnapshotConfig {
    SnapshotConfig {
        every_commands: commands,
        every: Duration::from_secs(3_600),
        ..SnapshotConfig::default()
    }
}

fn start(dir: &Path) -> SequencerHandle {
    SequencerHandle::start(config(dir), Arc::new(Backlog::default())).expect("starts")
}

/// Keeps 64 KiB and the records that a consumer needs.
fn retention(follower: &Durable) -> Retention {
    let mut retention = Retention::new(64 << 10, vec![follower.clone()]);
    retention.every = Duration::from_millis(5);
    retention
}

async fn trade(handle: &SequencerHandle, desk: &desk::Desk, orders: u64) -> Sequence {
    let mut last = Sequence::ZERO;
    for at in 0..orders {
        let side = if at % 3 == 0 { Side::Buy } else { Side::Sell };
        let price = 10_000 + (at * 7 % 23) as i64;
        let order = desk.order(usize::from(at % 2 == 0), side, price, 5);
        last = done(&desk.port, Request::New(order)).await.command.sequence;
        // One write each, and so one block.
        handle.commit().wait(last).await.expect("durable");
    }
    last
}

/// State hash and open orders.
async fn state_of(handle: &SequencerHandle) -> (u64, usize) {
    let state = |core: &sequencer::Core| (core.state_hash(), core.admission().orders().count());
    handle.port().inspect(state).await.expect("inspected")
}

fn first(dir: &Path) -> u64 {
    let folder = Folder::new(&dir.join("journal"));
    folder.first().expect("readable")
}

/// Rounds of the retention threads, by follower: each round sets a gauge per follower.
struct Rounds(Mutex<BTreeMap<String, u64>>);

static ROUNDS: Rounds = Rounds(Mutex::new(BTreeMap::new()));

/// Follower whose gauge panics while [`IS_BROKEN`] is set.
const BROKEN: &str = "broken";
static IS_BROKEN: AtomicBool = AtomicBool::new(false);

impl metrics::Recorder for Rounds {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        if key.name() == "journal_consumer_position" {
            let is_broken = IS_BROKEN.load(Ordering::SeqCst);
            let mut followers = key.labels().map(metrics::Label::value);
            assert!(!is_broken || followers.all(|of| of != BROKEN), "on purpose");
            let mut rounds = self.0.lock().expect("no panic");
            for follower in key.labels() {
                *rounds.entry(follower.value().to_owned()).or_default() += 1;
            }
        }
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Starts truncation for a follower of that name.
fn start_retention(handle: &mut SequencerHandle, retention: Retention) {
    // The second test of the process finds it installed.
    let _ = metrics::set_global_recorder(&ROUNDS);
    handle.start_retention(retention).expect("a service");
}

/// Waits until the truncation for a follower has run a whole round.
fn wait_for_a_round(follower: &str) {
    let rounds = || {
        let rounds = ROUNDS.0.lock().expect("no panic");
        rounds.get(follower).copied().unwrap_or(0)
    };
    // A round sets the gauge once, or twice when it removes segments. Of four further settings the
    // first two may belong to a round that had begun.
    let enough = rounds() + 4;
    wait_until("rounds of truncation", || rounds() >= enough);
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < HANG, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes the node's state as its replica does.
async fn checkpoint(handle: &SequencerHandle, dir: &Path) -> Sequence {
    let read = |core: &sequencer::Core| (core.sequence(), core.image().encode());
    let (at, image) = handle.port().inspect(read).await.expect("inspected");
    let image = image.expect("encoded");
    snapshots(dir).write(at.get(), &image).expect("written");
    handle.replica_parts().usable.insert(at);
    at
}

fn snapshots(dir: &Path) -> Snapshots {
    Snapshots::new(&dir.join("journal/snapshots"))
}

/// Writes a whole file that counts as a usable checkpoint.
fn write_usable(at: u64, dir: &Path, usable: &UsableCheckpoints) {
    snapshots(dir).write(at, b"state").expect("written");
    usable.insert(Sequence(at));
}

// rows: R174 R180
#[tokio::test]
async fn r174_truncation_keeps_records_of_followers_and_restart() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let mut handle = start(dir);
    let desk = open_desk(handle.port(), 2).await;
    let follower = Durable::new("follower");
    start_retention(&mut handle, retention(&follower));
    trade(&handle, &desk, 300).await;
    follower.set(Sequence(u64::MAX));
    // No checkpoint, one, a damaged one besides, one unusable to this process: nothing is removed.
    let nothing_is_removed = |what: &str| {
        wait_for_a_round("follower");
        assert_eq!(first(dir), 1, "{what}");
    };
    nothing_is_removed("no checkpoint");
    let oldest = checkpoint(&handle, dir).await;
    nothing_is_removed("one");
    let file = dir.join(format!("journal/snapshots/{:020}.snap", 150));
    std::fs::write(&file, b"damaged").expect("written");
    handle.replica_parts().usable.insert(Sequence(150));
    nothing_is_removed("a damaged one");
    snapshots(dir).write(170, b"state").expect("written");
    nothing_is_removed("one of another process");
    for at in [150, 170] {
        let file = dir.join(format!("journal/snapshots/{at:020}.snap"));
        std::fs::remove_file(file).expect("removed");
    }
    // The consumer resumes from a checkpoint at or before its position: there is none.
    follower.set(Sequence(200));
    trade(&handle, &desk, 200).await;
    let older = checkpoint(&handle, dir).await;
    nothing_is_removed("no checkpoint for the follower");
    follower.set(oldest);
    wait_until("a segment is removed", || first(dir) > 200);
    let last = trade(&handle, &desk, 200).await;
    checkpoint(&handle, dir).await;
    wait_for_a_round("follower");
    assert!(first(dir) <= oldest.get() + 1, "{}", first(dir));
    follower.set(last);
    // As far as whole segments, of sixteen blocks each, are at or before the older of two.
    wait_until("more is removed", || first(dir) + 40 > older.get());
    assert!(first(dir) <= older.get() + 1);

    let live = state_of(&handle).await;
    handle.stop();
    let again = start(dir);
    assert_eq!(again.recovered(), last);
    assert_eq!(state_of(&again).await, live);
    again.stop();
    // From the older snapshot too.
    let newest = *snapshots(dir).good().expect("read").last().expect("three");
    std::fs::remove_file(dir.join(format!("journal/snapshots/{newest:020}.snap")))
        .expect("removed");
    let again = start(dir);
    assert_eq!((again.recovered(), state_of(&again).await), (last, live));
    again.stop();
    inspection_shows_the_rest(&dir.join("journal"), last, live.0);

    std::fs::remove_dir_all(dir.join("journal/snapshots")).expect("removed");
    let error = SequencerHandle::start(config(dir), Arc::default()).map(|_| ());
    let error = error.expect_err("nothing to start from");
    assert!(
        matches!(
            error,
            StartError::Journal(journal::JournalError::Removed { .. })
        ),
        "{error}"
    );
}

fn inspection_shows_the_rest(journal: &Path, last: Sequence, hash: u64) {
    let folder = Folder::new(journal);
    let first = folder.first().expect("readable");
    let listing = folder.list().expect("listed");
    assert_eq!(listing.segments[0].first, Some(first));
    let verified = folder.verify().expect("whole");
    assert_eq!((verified.first, verified.last), (first, last.get()));
    assert_eq!(verified.state_hash, format!("{hash:016x}"));
    let replayed = folder.state(None).expect("replayed");
    assert_eq!(replayed.state_hash, verified.state_hash);
    let mut next = first;
    let dumped = folder.dump(first..=u64::MAX, |line| {
        assert_eq!(line.command.sequence, Sequence(next));
        next += 1;
        Ok(())
    });
    dumped.expect("dumped");
    assert_eq!(next, last.get() + 1);
    let follow = |from: u64| {
        let mut last = 0;
        let seen = |line: sequencer::Record| {
            last = line.command.sequence.get();
            Ok(())
        };
        folder
            .follow(from..=u64::MAX, seen, || false)
            .map(|()| last)
    };
    assert!(follow(first).expect("followed") + 20 > last.get());
    let error = follow(1).expect_err("gone").to_string();
    assert!(error.contains(&format!("begins with {first}")), "{error}");
}

// The bytes kept can be resent from the checkpoint before them.
#[tokio::test]
async fn resends_keep_the_checkpoint_before_the_kept_bytes() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let mut handle = start(dir);
    let desk = open_desk(handle.port(), 2).await;
    trade(&handle, &desk, 700).await;
    let usable = handle.replica_parts().usable;
    for at in [70, 150, 560, 580] {
        write_usable(at, dir, &usable);
    }
    let listing = Folder::new(&dir.join("journal")).list().expect("listed");
    let late = |line: &&SegmentLine| line.first.is_some_and(|first| first > 350);
    let follower = Durable::new("one that resends");
    follower.set(Sequence(600));
    let mut retention = retention(&follower);
    retention.bytes = listing
        .segments
        .iter()
        .filter(late)
        .map(|line| line.bytes)
        .sum();
    start_retention(&mut handle, retention);
    wait_until("a segment is removed", || first(dir) > 100);
    wait_for_a_round("one that resends");
    assert!(first(dir) <= 151, "{}", first(dir));
    handle.stop();
}

/// A round that panics shows as trouble until another one has run: the thread goes on.
#[tokio::test]
async fn a_panic_of_a_round_of_truncation_is_reported_and_the_next_round_truncates() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let mut handle = start(dir);
    let desk = open_desk(handle.port(), 2).await;
    trade(&handle, &desk, 300).await;
    for at in [150, 290] {
        write_usable(at, dir, &handle.replica_parts().usable);
    }
    let follower = Durable::new(BROKEN);
    follower.set(Sequence(u64::MAX));
    assert!(handle.retention_trouble().is_none());
    IS_BROKEN.store(true, Ordering::SeqCst);
    start_retention(&mut handle, retention(&follower));
    let mut trouble = handle.retention_trouble().expect("a service");
    let failed = trouble.wait_for(Option::is_some);
    let failed = in_time("trouble", failed).await.expect("runs").clone();
    assert_eq!(failed.as_deref(), Some("journal not truncated: on purpose"));
    assert_eq!(first(dir), 1);
    IS_BROKEN.store(false, Ordering::SeqCst);
    let recovered = trouble.wait_for(Option::is_none);
    drop(
        in_time("the end of the trouble", recovered)
            .await
            .expect("runs"),
    );
    wait_until("a segment is removed", || first(dir) > 100);
    handle.stop();
}

/// The truncation position of a journal that is whole.
fn whole() -> std::io::Result<Sequence> {
    Ok(Sequence::ZERO)
}

// A hot thread closes the open sessions with records of its own. Missing records must be detected
// before that.
#[tokio::test]
async fn database_ahead_of_the_journal_fails_the_start() {
    let dir = tempfile::tempdir().expect("folder");
    let dir = dir.path();
    let handle = start(dir);
    let desk = open_desk(handle.port(), 2).await;
    let last = trade(&handle, &desk, 20).await;
    handle.stop();
    let ahead = Config {
        reach: last.next(),
        ..config(dir)
    };
    let error = SequencerHandle::start(ahead.clone(), Arc::default()).map(|_| ());
    match error.expect_err("records are missing") {
        StartError::Checkpoint(CheckpointError::Ahead { known, journal }) => {
            assert_eq!((known, journal), (last.next(), last));
        }
        other => panic!("{other}"),
    }
    // The files stay as they are, including the torn batch, which may still be repaired.
    let files = std::fs::read_dir(&ahead.dir).expect("listed");
    let mut files = files.map(|file| file.expect("listed").path());
    let segment = files.find(|path| path.extension().is_some_and(|end| end == "log"));
    let segment = segment.expect("one segment");
    let whole = std::fs::read(&segment).expect("read");
    let mut torn = whole.clone();
    let end = torn.iter().rposition(|byte| *byte != 0).expect("records");
    torn[end] ^= 1;
    std::fs::write(&segment, &torn).expect("written");
    let known = Config {
        reach: last,
        ..ahead.clone()
    };
    let error = SequencerHandle::start(known, Arc::default()).map(|_| ());
    let error = error.expect_err("the last batch is torn");
    assert!(matches!(error, StartError::Checkpoint(_)), "{error}");
    assert!(std::fs::read(&segment).expect("read") == torn);
    std::fs::write(&segment, &whole).expect("written");
    // Nothing was added: without a database ahead the node resumes where it was.
    let again = SequencerHandle::start(config(dir), Arc::default()).expect("starts");
    assert_eq!(again.recovered(), last);
    again.stop();
}

// A failing disk is retried, but not at once: encoding a state of many megabytes ten times a second
// would be too much.
#[test]
fn a_failed_checkpoint_is_retried_after_a_pause() {
    let dir = tempfile::tempdir().expect("folder");
    let file = dir.path().join("no folder");
    std::fs::write(&file, b"").expect("written");
    let usable = UsableCheckpoints::default();
    let mut config = every(1);
    let keeper =
        |config| CheckpointKeeper::new("reader", &file, config, Sequence::ZERO, usable.clone());
    let fail = |keeper: &mut CheckpointKeeper| {
        assert!(keeper.is_due(Sequence(5)));
        let (made, seen) = std::sync::mpsc::channel();
        keeper.write(Sequence(5), whole, move || {
            made.send(()).expect("heard");
            rkyv::to_bytes::<rkyv::rancor::Error>(&5)
        });
        seen.recv().expect("made");
    };
    let mut rare = keeper(config.clone());
    fail(&mut rare);
    for _ in 0..20 {
        assert!(!rare.is_due(Sequence(6)));
        std::thread::sleep(Duration::from_millis(5));
    }
    // Frequent checkpoints wait less.
    config.every = Duration::from_millis(20);
    let mut often = keeper(config);
    fail(&mut often);
    wait_until("retried", || often.is_due(Sequence(6)));
    std::fs::remove_file(&file).expect("removed");
    often.write(Sequence(6), whole, || {
        rkyv::to_bytes::<rkyv::rancor::Error>(&6)
    });
    drop(often);
    assert_eq!(Snapshots::new(&file).good().expect("read"), [6]);
}

// Few checkpoints for resends; at any record the next older one is at most about twice as far back.
#[test]
fn older_checkpoints_are_kept_at_growing_distances() {
    let dir = tempfile::tempdir().expect("folder");
    // Two consumers resume from checkpoints that the series alone would not keep.
    let followers = [Durable::new("slow"), Durable::new("slower")];
    followers[0].set(Sequence(181));
    followers[1].set(Sequence(97));
    let mut config = every(1);
    config.followers = followers.to_vec();
    let mut keeper = CheckpointKeeper::new(
        "reader",
        dir.path(),
        config,
        Sequence::ZERO,
        UsableCheckpoints::default(),
    );
    let found = || Snapshots::new(dir.path()).sequences().expect("listed");
    for at in 1..=300 {
        wait_until("written", || keeper.is_due(Sequence(at)));
        keeper.write(Sequence(at), whole, move || {
            rkyv::to_bytes::<rkyv::rancor::Error>(&at)
        });
    }
    drop(keeper);
    let all = found();
    assert!(all.len() <= 20, "{all:?}");
    assert!(all.contains(&181) && all.contains(&97), "{all:?}");
    assert_eq!(all[all.len() - 2..], [299, 300]);
    for pair in all.windows(2) {
        assert!(
            300 - pair[0] <= 2 * (300 - pair[1]) || pair[1] >= 299,
            "{all:?}"
        );
    }
    // Checkpoints before the journal's beginning are removed.
    let kept = Snapshots::new(dir.path());
    kept.write(301, b"state").expect("written");
    kept.thin(301, 250, &[], |_| true).expect("thinned");
    assert!(found().iter().all(|at| *at >= 250), "{:?}", found());
    // One that does not restore is skipped.
    let checkpoints = Checkpoints::new(dir.path());
    let mut tried = Vec::new();
    let newest = checkpoints.newest(Sequence(300), |sequence, _| {
        tried.push(sequence.get());
        match tried.len() {
            1 => Err("on purpose".to_owned()),
            _ => Ok(Some(sequence)),
        }
    });
    assert_eq!(newest.expect("read"), Some(Sequence(tried[1])));
}
