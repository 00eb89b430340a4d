//! A second process follows a log while it is written: all durable records in order.
//!
//! The log's end is no damage, and a follower of removed records gets an error.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use journal::fault::MemoryStorage;
use journal::reader::ReadError;
use journal::{
    Appender, Config, FileStorage, Follower, Frame, FrameKind, Journal, JournalError, Mode,
    Storage, visit_frames,
};

/// Far longer than anything here takes: reaching it means that something hangs.
const HANG: Duration = Duration::from_secs(60);

const CONFIG: Config = Config {
    segment_bytes: 64 << 10,
    pending_bytes_max: 1 << 20,
    recent_bytes: 0,
};

fn append(appender: &mut Appender, sequence: u64) {
    let events = sequence % 5;
    let payload = vec![sequence as u8; 24 + (sequence * 37 % 300) as usize];
    appender.append(FrameKind::Command, events == 0, sequence, 1, &payload);
    for index in 1..=events {
        appender.append(FrameKind::Event, index == events, sequence, 1, &payload);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("runtime")
}

fn open(dir: &Path, after: u64) -> Journal {
    let storage = FileStorage::with_mode(dir, Mode::Unsynced).expect("a folder");
    Journal::open_after(Arc::new(storage), CONFIG, after, |_| Ok(())).expect("opens")
}

fn write(journal: &Journal, appender: &mut Appender, records: std::ops::RangeInclusive<u64>) {
    let (runtime, last) = (runtime(), *records.end());
    for sequence in records {
        append(appender, sequence);
        // Batches of one and of several records.
        if sequence % 7 < 3 || sequence == last {
            appender.flush();
            let commit = journal.commit();
            runtime.block_on(commit.wait(sequence)).expect("durable");
        }
    }
}

fn follower(dir: &Path, after: u64) -> Follower {
    let storage = FileStorage::read_only(dir).expect("a folder");
    Follower::new(Arc::new(storage), after)
}

/// Reads to the end and updates `last`: every frame is in order, every unit whole.
fn read(follower: &mut Follower, last: &mut u64) -> Result<(), JournalError> {
    let mut index = 0;
    while let Some(frame) = follower.try_next()? {
        if index == 0 {
            assert_eq!(
                (frame.sequence, frame.kind),
                (*last + 1, FrameKind::Command)
            );
        } else {
            assert_eq!((frame.sequence, frame.kind), (*last + 1, FrameKind::Event));
        }
        assert_eq!(frame.payload[0], frame.sequence as u8);
        index += 1;
        if frame.unit_end {
            assert_eq!(index, 1 + frame.sequence % 5);
            (*last, index) = (frame.sequence, 0);
        }
    }
    assert_eq!(index, 0, "whole units only");
    Ok(())
}

#[test]
fn a_follower_during_writes_gets_every_durable_record() {
    const LAST: u64 = 6_000;
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path();
    let journal = open(dir, 0);
    let mut appender = journal.appender();
    let durable = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for from in [0, 2_500] {
            let durable = &durable;
            scope.spawn(move || {
                let (mut follower, mut last) = (follower(dir, from), from);
                // The last batch is known to be durable only when another one follows.
                let since = Instant::now();
                while last < LAST {
                    assert!(since.elapsed() < HANG, "the follower stays at {last}");
                    read(&mut follower, &mut last).expect("no end is damage");
                    assert!(last <= durable.load(Ordering::Acquire).max(from) + 7);
                    std::thread::yield_now();
                }
            });
        }
        let mut next = 1;
        while next <= LAST + 1 {
            // Set before the write, so that frames returned by the follower never exceed it.
            durable.store(next + 99, Ordering::Release);
            let end = (next + 99).min(LAST + 1);
            write(&journal, &mut appender, next..=end);
            next = end + 1;
        }
    });
    drop(appender);
    journal.close();
}

#[test]
fn records_not_known_to_be_durable_are_not_returned() {
    let folder = tempfile::tempdir().expect("folder");
    let journal = open(folder.path(), 0);
    let (mut follower, mut last) = (follower(folder.path(), 0), 0);
    read(&mut follower, &mut last).expect("an empty log");
    let mut appender = journal.appender();
    for sequence in 1..=50 {
        append(&mut appender, sequence);
        appender.flush();
        let commit = journal.commit();
        runtime().block_on(commit.wait(sequence)).expect("durable");
        read(&mut follower, &mut last).expect("no damage");
        assert_eq!(
            last,
            sequence - 1,
            "a mark proves the batch before it durable"
        );
    }
    drop(appender);
    journal.close();
}

/// Checksums of the frames, each over that of the frame before, and the number of failed reads.
fn crcs<E: std::fmt::Debug>(
    storage: &MemoryStorage,
    mut try_next: impl FnMut() -> Result<Option<Frame>, E>,
    is_transient: impl Fn(&E) -> bool,
) -> (Vec<u32>, usize) {
    let (mut crcs, mut failed) = (Vec::new(), 0);
    for attempt in 0.. {
        // No open fails, all, every second, every third: each read of a call fails in some attempt.
        storage
            .open_fails_every
            .store(attempt % 4, Ordering::SeqCst);
        match try_next() {
            Ok(Some(frame)) => crcs.push(frame.crc),
            Ok(None) => break,
            Err(error) => {
                assert!(is_transient(&error), "{error:?}");
                failed += 1;
            }
        }
    }
    storage.open_fails_every.store(0, Ordering::SeqCst);
    (crcs, failed)
}

#[test]
fn read_without_descriptors_is_retried_without_loss() {
    const LAST: u64 = 600;
    let storage = Arc::new(MemoryStorage::default());
    let opened = Journal::open(Arc::new(storage.clone()), CONFIG, |_| Ok(()));
    let journal = opened.expect("opens");
    let mut appender = journal.appender();
    write(&journal, &mut appender, 1..=LAST);
    let mut written = Vec::new();
    visit_frames(&storage, |frame| {
        written.push(frame.crc);
        Ok(())
    })
    .expect("whole");

    let mut reader = journal.reader(0);
    let (read, failed) = crcs(&storage, || reader.try_next(), ReadError::is_transient);
    assert!(failed > 0 && read == written);

    let mut follower = Follower::new(Arc::new(storage.clone()), 0);
    let (read, failed) = crcs(&storage, || follower.try_next(), JournalError::is_transient);
    // The last batch is not known to be durable.
    assert!(failed > 0 && !read.is_empty() && written.starts_with(&read));
    drop(appender);
    journal.close();
}

// The next opening rewrites a torn end. The follower must not have read it.
#[test]
fn a_follower_continues_across_restarts_of_the_writer() {
    for seed in 0..60 {
        let storage = Arc::new(MemoryStorage::default());
        let mut follower = Follower::new(Arc::new(storage.clone()), 0);
        let (mut followed, mut written) = (0, 0);
        for life in 0..6 {
            let opened = Journal::open(Arc::new(storage.clone()), CONFIG, |_| Ok(()));
            let journal = opened.expect("opens");
            written = journal.commit().position().min(written);
            assert!(followed <= journal.commit().position());
            written = written.max(journal.commit().position());
            let mut appender = journal.appender();
            if life < 5 {
                storage.power_off_after((seed * 7 + life * 3) % 17);
            }
            for _ in 0..12 {
                for _ in 0..=(seed + life) % 5 {
                    written += 1;
                    append(&mut appender, written);
                }
                appender.flush();
                if runtime().block_on(journal.commit().wait(written)).is_err() {
                    break;
                }
                read(&mut follower, &mut followed).expect("no damage");
            }
            drop((appender, journal));
            read(&mut follower, &mut followed).expect("no damage");
            match (seed + life) % 3 {
                0 => storage.revive(),
                other => storage.crash(seed * 31 + other),
            }
        }
        assert!(followed > 0 && followed <= written);
    }
}

#[test]
fn a_follower_of_removed_records_gets_an_error_with_the_logs_beginning() {
    let folder = tempfile::tempdir().expect("folder");
    let journal = open(folder.path(), 0);
    let mut appender = journal.appender();
    let (mut late, mut last) = (follower(folder.path(), 0), 0);
    write(&journal, &mut appender, 1..=20);
    read(&mut late, &mut last).expect("no damage");
    assert!(last > 0);
    write(&journal, &mut appender, 21..=2_000);
    let truncator = journal.truncator();
    let limit = truncator
        .removable_above_bytes(CONFIG.segment_bytes)
        .expect("read");
    truncator.remove(limit).expect("removed");
    assert!(limit > 1_000);

    let assert_removed = |error: JournalError, after: u64| {
        let text = error.to_string();
        assert!(
            matches!(error, JournalError::Removed { through, after: a } if (through, a) == (limit, after)),
            "{text}"
        );
        assert!(
            text.contains(&format!("begins with {}", limit + 1)),
            "{text}"
        );
    };
    let seen = last;
    let error = read(&mut late, &mut last).expect_err("too late");
    assert!(last >= seen);
    assert_removed(error, last);
    let mut new = follower(folder.path(), 5);
    assert_removed(new.try_next().expect_err("removed"), 5);
    let mut last = limit;
    read(&mut follower(folder.path(), limit), &mut last).expect("the rest is there");
    assert!(last > 1_990);
    drop(appender);
    journal.close();
}

// Half of a segment is lost, and later segments are whole: the follower must not wait there.
#[test]
fn lost_durable_data_is_a_hole() {
    let storage = Arc::new(MemoryStorage::default());
    let journal = Journal::open(Arc::new(storage.clone()), CONFIG, |_| Ok(())).expect("opens");
    let mut appender = journal.appender();
    write(&journal, &mut appender, 1..=2_000);
    drop(appender);
    journal.close();
    assert!(storage.segments().expect("listed").len() > 4);
    let bytes = storage.bytes(2).len();
    storage.corrupt(2, bytes / 2, &vec![0; bytes / 2]);
    let mut follower = Follower::new(Arc::new(storage.clone()), 0);
    let mut last = 0;
    match read(&mut follower, &mut last) {
        Err(JournalError::Hole { sequence, .. }) => assert!(sequence >= last && last > 0),
        other => panic!("{other:?}"),
    }
}
