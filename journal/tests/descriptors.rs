//! The file descriptor limit is reached. One test, since the limit applies to the whole process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use journal::{Config, FileStorage, FrameKind, Journal, Mode, Snapshots, is_out_of_descriptors};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_lack_of_file_descriptors_is_a_transient_error() {
    let folder = tempfile::tempdir().expect("folder");
    let storage = FileStorage::with_mode(folder.path(), Mode::Unsynced).expect("a folder");
    let opened = Journal::open(Arc::new(storage), Config::default(), |_| Ok(()));
    let journal = opened.expect("opens");
    let mut appender = journal.appender();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("runtime");
    let mut write = |sequences: std::ops::RangeInclusive<u64>| {
        let last = *sequences.end();
        for sequence in sequences {
            appender.append(FrameKind::Command, true, sequence, 1, &[7; 40]);
        }
        appender.flush();
        let durable = journal.commit();
        runtime.block_on(durable.wait(last)).expect("durable");
    };
    write(1..=3);
    let snapshots = Snapshots::new(&folder.path().join("snapshots"));
    for sequence in [1, 2] {
        snapshots.write(sequence, b"state").expect("written");
    }
    let mut reader = journal.reader(0);

    let before = getrlimit(Resource::Nofile);
    let limit = |current| {
        let limit = Rlimit { current, ..before };
        setrlimit(Resource::Nofile, limit).expect("a lower limit");
    };
    limit(Some(0));
    let (removed, read) = (reader.removed_through(), reader.try_next());
    limit(before.current);
    assert!(removed.is_err_and(|error| error.is_transient()));
    assert!(read.is_err_and(|error| error.is_transient()));
    for sequence in 1..=3 {
        let frame = reader.try_next().expect("read").expect("there");
        assert_eq!(frame.sequence, sequence);
    }

    // A reader that has begun keeps its file open (`design.md` 6).
    write(4..=4);
    limit(Some(0));
    let read = reader.try_next();
    limit(before.current);
    assert!(matches!(read, Ok(Some(frame)) if frame.sequence == 4));

    // The limit hits between the folder list and the read of a file: no older snapshot is returned.
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                limit(Some(0));
                limit(before.current);
            }
        });
        let wrong = (0..5_000).find_map(|_| match snapshots.newest(2) {
            Ok(Some(found)) if found.sequence == 2 => None,
            Err(error) if is_out_of_descriptors(&error) => None,
            found => Some(format!("{found:?}")),
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(wrong, None);
    });
}
