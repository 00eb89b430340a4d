//! No space or file descriptor for the next segment: the log waits and continues by itself.
//!
//! The segment contains nothing yet, so nothing is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use journal::fault::MemoryStorage;
use journal::{Appender, Commit, Config, FrameKind, Journal, Room};

const CONFIG: Config = Config {
    segment_bytes: 16 << 10,
    pending_bytes_max: 64 << 10,
    recent_bytes: 64 << 10,
};
/// Far longer than any wait here: a timeout means a hang.
const HANG: Duration = Duration::from_secs(20);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("runtime")
}

fn open(storage: &Arc<MemoryStorage>) -> (Journal, u64) {
    let mut last = 0;
    let journal = Journal::open(Arc::new(storage.clone()), CONFIG, |frame| {
        assert_eq!(frame.sequence, last + 1, "gapless");
        last = frame.sequence;
        Ok(())
    });
    (journal.expect("opens"), last)
}

fn append(appender: &mut Appender, sequence: u64) {
    appender.append(FrameKind::Command, true, sequence, 1, &[7; 400]);
    appender.flush();
}

fn wait(commit: &Commit, sequence: u64) -> Result<(), journal::JournalFailed> {
    let waited =
        runtime().block_on(async { tokio::time::timeout(HANG, commit.wait(sequence)).await });
    waited.expect("commit wait timed out")
}

/// Appends until the writer waits for space; returns the last sequence.
fn fill(appender: &mut Appender, commit: &Commit) -> u64 {
    let (mut sequence, begun) = (commit.position(), Instant::now());
    while commit.stalled().is_none() {
        assert!(begun.elapsed() < HANG, "never stalled");
        if appender.room() == Room::Full {
            std::thread::yield_now();
        } else {
            sequence += 1;
            append(appender, sequence);
        }
    }
    sequence
}

/// Hands over what is due, also if the writer has the lock for a moment.
fn flush_batches(appender: &mut Appender) {
    let begun = Instant::now();
    while appender.has_local() {
        assert!(begun.elapsed() < HANG, "never handed over");
        appender.flush_batch();
    }
}

/// Switches a shortage on or off.
type Shortage = fn(&MemoryStorage, bool);

#[test]
fn log_waits_until_its_next_segment_can_be_created() {
    let no_room: Shortage = |storage, is_on| storage.create_finds_disk_full.store(is_on, SeqCst);
    let no_descriptor: Shortage =
        |storage, is_on| storage.open_fails_every.store(is_on.into(), SeqCst);
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    for shortage in [no_room, no_descriptor, no_room, no_descriptor] {
        shortage(&storage, true);
        let last = fill(&mut appender, &commit);
        let reason = commit.stalled().expect("it waits").to_string();
        assert!(reason.contains("cannot create or open"), "{reason}");
        assert!(appender.is_stalled() && !appender.is_failed());
        assert!(commit.failure().is_none() && commit.position() < last);
        shortage(&storage, false);
        wait(&commit, last).expect("durable once there is enough");
        assert!(commit.stalled().is_none() && !appender.is_stalled());
    }
    let last = commit.position();
    drop(appender);
    journal.close();
    storage.crash(1);
    assert_eq!(open(&storage).1, last);
}

#[test]
fn few_units_stay_with_the_appender_while_others_wait_for_the_writer() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    storage.create_finds_disk_full.store(true, SeqCst);
    let mut last = fill(&mut appender, &commit);
    let mut append_batch = |appender: &mut Appender| {
        last += 1;
        appender.append(FrameKind::Command, true, last, 1, &[7; 400]);
        appender.flush_batch();
        last
    };
    append_batch(&mut appender);
    // Now others wait in any case.
    appender.flush();
    for _ in 0..9 {
        append_batch(&mut appender);
        assert!(appender.has_local());
    }
    append_batch(&mut appender);
    flush_batches(&mut appender);
    let last = append_batch(&mut appender);
    assert!(appender.has_local());
    storage.create_finds_disk_full.store(false, SeqCst);
    wait(&commit, last - 1).expect("durable");
    // Nothing else waits.
    flush_batches(&mut appender);
    wait(&commit, last).expect("durable");
}

#[test]
fn the_last_eighth_of_the_room_is_a_reserve() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let mut appender = journal.appender();
    // Nothing is handed over, so the writer frees nothing meanwhile.
    for sequence in 1..=200 {
        let expected = match appender.local_bytes() {
            bytes if bytes <= CONFIG.pending_bytes_max / 8 * 7 => Room::Free,
            bytes if bytes <= CONFIG.pending_bytes_max => Room::Reserve,
            _ => Room::Full,
        };
        assert_eq!(appender.room(), expected, "{sequence}");
        appender.append(FrameKind::Command, true, sequence, 1, &[7; 400]);
    }
    assert_eq!(appender.room(), Room::Full);
}

#[test]
fn a_log_that_waits_for_room_has_a_bound_and_closes_at_once() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    storage.create_finds_disk_full.store(true, SeqCst);
    let mut last = fill(&mut appender, &commit);
    while appender.room() != Room::Full {
        last += 1;
        append(&mut appender, last);
    }
    let reported = commit.position();
    drop(appender);
    journal.close();
    let failed = wait(&commit, last).expect_err("never durable");
    assert!(!failed.to_string().is_empty());
    storage.create_finds_disk_full.store(false, SeqCst);
    // Everything reported durable is found, and nothing after it.
    assert_eq!(open(&storage).1, reported);
}

// A retry does not help: the disk itself fails.
#[test]
fn any_other_failure_to_make_a_segment_is_final() {
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    storage.create_finds_disk_full.store(true, SeqCst);
    appender.append(FrameKind::Command, true, 1, 1, &[7; 15_000]);
    appender.flush();
    wait(&commit, 1).expect("durable");
    storage.power_off_after(0);
    storage.create_finds_disk_full.store(false, SeqCst);
    appender.append(FrameKind::Command, true, 2, 1, &[7; 2_000]);
    appender.flush();
    wait(&commit, 2).expect_err("the power is off");
    assert!(commit.failure().is_some() && commit.stalled().is_none());
}
