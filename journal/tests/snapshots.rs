//! Snapshots are whole or skipped; reading changes nothing.

use std::sync::Arc;

use journal::fault::MemoryStorage;
use journal::{Config, FrameKind, Journal, Snapshots, Storage, visit_frames};

#[test]
fn the_newest_good_snapshot_is_found_and_older_ones_are_pruned() {
    let dir = tempfile::tempdir().expect("folder");
    let snapshots = Snapshots::new(&dir.path().join("snapshots"));
    assert_eq!(
        snapshots
            .newest(u64::MAX)
            .expect("no folder is no snapshot"),
        None
    );
    for sequence in [5, 70, 600] {
        let payload = vec![sequence as u8; sequence as usize];
        snapshots.write(sequence, &payload).expect("written");
    }
    assert_eq!(snapshots.sequences().expect("listed"), [5, 70, 600]);
    assert_eq!(snapshots.prune(600, |_| true).expect("pruned"), [5]);
    assert_eq!(snapshots.sequences().expect("listed"), [70, 600]);
    let newest = |until| {
        snapshots
            .newest(until)
            .expect("read")
            .map(|found| found.sequence)
    };
    assert_eq!(newest(u64::MAX), Some(600));
    assert_eq!(newest(599), Some(70));
    assert_eq!(newest(69), None);
}

#[test]
fn pruning_keeps_the_callers_snapshot_and_counts_good_ones_only() {
    let dir = tempfile::tempdir().expect("folder");
    // 1 is raised to the minimum of 2.
    let snapshots = Snapshots::new(dir.path()).with_kept(1);
    for sequence in [10, 20, 30, 40, 50] {
        snapshots.write(sequence, &[7; 99]).expect("written");
    }
    let file = |sequence: u64| dir.path().join(format!("{sequence:020}.snap"));
    std::fs::write(file(30), b"noise").expect("written");
    std::fs::remove_file(file(20)).expect("removed");
    std::fs::create_dir(file(20)).expect("a folder is no snapshot");
    let left = dir.path().join("00000000000000000007-1-0.part");
    std::fs::write(&left, b"half").expect("written");
    assert_eq!(snapshots.good().expect("listed"), [10, 40, 50]);
    // 50 is later than `own`; 20 and 30 are bad.
    assert!(snapshots.prune(40, |_| true).expect("pruned").is_empty());
    assert_eq!(snapshots.sequences().expect("listed"), [10, 20, 30, 40, 50]);
    assert!(!left.exists(), "left by an earlier process");
    std::fs::remove_dir(file(20)).expect("removed");
    assert_eq!(snapshots.prune(50, |_| true).expect("pruned"), [30, 10]);
    assert_eq!(snapshots.sequences().expect("listed"), [40, 50]);
    // An unreadable snapshot is skipped.
    std::fs::remove_file(file(50)).expect("removed");
    std::fs::create_dir(file(50)).expect("a folder is no snapshot");
    let newest = snapshots
        .newest(u64::MAX)
        .expect("read")
        .expect("a good one");
    assert_eq!(newest.sequence, 40);
}

#[test]
fn a_snapshot_damaged_or_truncated_at_any_byte_is_skipped() {
    let dir = tempfile::tempdir().expect("folder");
    let snapshots = Snapshots::new(dir.path());
    snapshots.write(1, b"the older state").expect("written");
    let path = snapshots.write(2, b"the newer state").expect("written");
    let whole = std::fs::read(&path).expect("read");
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        for bytes in [&damaged, &whole[..at].to_vec()] {
            std::fs::write(&path, bytes).expect("damaged");
            let found = snapshots
                .newest(u64::MAX)
                .expect("read")
                .expect("the older one");
            assert_eq!(
                (found.sequence, found.payload.as_slice()),
                (1, &b"the older state"[..]),
                "byte {at}"
            );
        }
    }
    std::fs::write(&path, &whole).expect("repaired");
    assert_eq!(
        snapshots
            .newest(u64::MAX)
            .expect("read")
            .expect("newer")
            .sequence,
        2
    );
}

#[test]
fn a_scan_sees_what_an_opening_sees_and_changes_nothing() {
    let storage = Arc::new(MemoryStorage::default());
    assert_eq!(
        visit_frames(&storage, |_| Ok(())).expect("an empty storage"),
        0
    );
    assert!(
        storage.segments().expect("listed").is_empty(),
        "no segment was made"
    );
    let config = Config {
        segment_bytes: 4 << 10,
        pending_bytes_max: 1 << 20,
        recent_bytes: 64 << 10,
    };
    let journal = Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("opens");
    let mut appender = journal.appender();
    for sequence in 1..=100 {
        appender.append(FrameKind::Command, true, sequence, sequence, &[7; 100]);
    }
    appender.flush();
    drop(appender);
    journal.close();
    // The last frame is torn in its middle. The next segment may have been created already.
    let segments = storage.segments().expect("listed").into_iter();
    let is_written = |number: &u64| storage.bytes(*number).iter().any(|byte| *byte != 0);
    let last = segments.rev().find(is_written).expect("some");
    let bytes = storage.bytes(last);
    let end = bytes.iter().rposition(|byte| *byte != 0).expect("written");
    storage.corrupt(last, end - 20, &[0; 8]);
    let before = storage.bytes(last);
    let mut seen = 0;
    let sequence = visit_frames(&storage, |_| {
        seen += 1;
        Ok(())
    });
    assert_eq!((sequence.expect("a torn tail is skipped"), seen), (99, 99));
    assert_eq!(storage.bytes(last), before, "reading changes nothing");
}

#[test]
fn incomplete_files_of_an_earlier_process_are_removed() {
    let dir = tempfile::tempdir().expect("folder");
    let snapshots = Snapshots::new(dir.path());
    // Also of one with the same pid, as every process in a container has.
    let half = format!("{:020}-{}-0.part", 9, std::process::id());
    std::fs::write(dir.path().join(&half), b"half").expect("written");
    snapshots.write(10, b"state").expect("written");
    snapshots.prune(10, |_| true).expect("pruned");
    assert!(!dir.path().join(half).exists());
    assert_eq!(snapshots.good().expect("listed"), [10]);
}
