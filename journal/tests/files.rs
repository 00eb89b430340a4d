//! Real files, written directly and through the page cache.

use std::path::Path;
use std::sync::Arc;

use journal::reader::ReadError;
use journal::{
    Appender, Config, FileStorage, FrameKind, Journal, JournalError, Mode, Storage, list,
    visit_frames, visit_frames_after,
};

const CONFIG: Config = Config {
    segment_bytes: 64 << 10,
    pending_bytes_max: 1 << 20,
    recent_bytes: 0,
};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("runtime")
}

fn append(appender: &mut Appender, sequence: u64) {
    let payload = vec![sequence as u8 | 1; 100 + sequence as usize % 300];
    appender.append(FrameKind::Command, false, sequence, sequence, &payload);
    appender.append(FrameKind::Event, true, sequence, sequence, &payload);
}

fn open(dir: &Path, mode: Mode) -> (Journal, u64) {
    let storage = FileStorage::with_mode(dir, mode).expect("a folder");
    let mut last = 0;
    let journal = Journal::open(Arc::new(storage), CONFIG, |frame| {
        last = frame.sequence;
        Ok(())
    });
    (journal.expect("opens"), last)
}

/// Appends `range` in batches of at most seven records, each waited for.
fn fill(journal: &Journal, appender: &mut Appender, range: std::ops::RangeInclusive<u64>) {
    let (commit, runtime, end) = (journal.commit(), runtime(), *range.end());
    for sequence in range {
        append(appender, sequence);
        if sequence % 7 == 0 || sequence == end {
            appender.flush();
            runtime.block_on(commit.wait(sequence)).expect("durable");
        }
    }
}

/// A folder on disk, and one in memory where the system has `/dev/shm`.
fn folders() -> Vec<tempfile::TempDir> {
    let mut folders = vec![tempfile::tempdir().expect("folder")];
    if Path::new("/dev/shm").is_dir() {
        folders.extend(tempfile::tempdir_in("/dev/shm"));
    }
    folders
}

// rows: R174
#[test]
fn r174_what_was_written_in_one_mode_is_read_and_continued_in_the_other() {
    for folder in folders() {
        let dir = folder.path();
        let chosen = FileStorage::new(dir, true).expect("a folder").mode();
        let modes = if chosen == Mode::Direct {
            [Mode::Direct, Mode::Synced, Mode::Direct, Mode::Unsynced]
        } else {
            [chosen, Mode::Unsynced, chosen, chosen]
        };
        let mut last = 0;
        for mode in modes {
            let (journal, found) = open(dir, mode);
            assert_eq!(found, last);
            let stats = journal.stats();
            assert_eq!((stats.mode, stats.batches), (mode, 0));
            fill(&journal, &mut journal.appender(), last + 1..=last + 300);
            last += 300;
            let stats = journal.stats();
            assert!(stats.batches >= 43 && stats.written_bytes > stats.frame_bytes);
            assert_eq!(stats.written_bytes % stats.block_bytes as u64, 0);
            assert!(stats.segments > 2, "several segments were begun");
            let (mut reader, mut read) = (journal.reader(last - 300), 0);
            while let Some(frame) = reader.try_next().expect("readable") {
                assert_eq!(frame.payload[0], frame.sequence as u8 | 1);
                read += 1;
            }
            assert_eq!(read, 600);
            drop(reader);
            journal.close();
        }
        let storage = FileStorage::read_only(dir).expect("a folder");
        assert_eq!(visit_frames(&storage, |_| Ok(())).expect("whole"), last);
        let segments = list(&storage).expect("listed");
        let mut next = 1;
        for (first, last) in segments.iter().filter_map(|segment| segment.sequences) {
            assert_eq!(first, next);
            next = last + 1;
        }
        assert_eq!(next, last + 1);
        assert!(
            segments
                .iter()
                .all(|segment| segment.bytes == CONFIG.segment_bytes)
        );
        assert!(
            storage.create(99, 4096).is_err(),
            "the storage is read-only"
        );
    }
}

#[test]
fn incomplete_segments_are_removed_and_read_only_opening_creates_nothing() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("log");
    assert!(FileStorage::read_only(&dir).is_err());
    assert!(!dir.exists());
    FileStorage::new(&dir, true).expect("a folder");
    assert_eq!(std::fs::read_dir(&dir).expect("listed").count(), 0);
    std::fs::write(dir.join("0000000002.part"), b"half").expect("written");
    let (journal, _) = open(&dir, Mode::Synced);
    journal.close();
    let storage = FileStorage::read_only(&dir).expect("a folder");
    assert_eq!(storage.segments().expect("listed"), [1]);
    assert!(!dir.join("0000000002.part").exists());
}

// Segments archived by hand: the rest is readable from a snapshot on, earlier reads get an error.
#[test]
fn a_log_without_its_first_segments_is_read_from_its_new_beginning() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path();
    let (journal, _) = open(dir, Mode::Unsynced);
    let mut appender = journal.appender();
    fill(&journal, &mut appender, 1..=2_000);
    let storage = FileStorage::read_only(dir).expect("a folder");
    let segments = list(&storage).expect("listed");
    assert!(segments.len() > 8);
    let mut through = 0;
    for segment in &segments {
        match segment.sequences {
            Some((_, last)) if last <= 1_000 => {
                std::fs::remove_file(&segment.name).expect("removed");
                through = last;
            }
            _ => break,
        }
    }
    assert!(through > 0);
    assert_eq!(journal::removed_through(&storage).expect("read"), through);

    let mut reader = journal.reader(1_000);
    let frame = reader.try_next().expect("readable").expect("a frame");
    assert_eq!(frame.sequence, 1_001);
    let error = journal
        .reader(0)
        .try_next()
        .expect_err("removed")
        .to_string();
    assert!(error.contains(&through.to_string()), "{error}");
    drop(reader);
    fill(&journal, &mut appender, 2_001..=2_100);
    journal.close();

    let open_after = |after| {
        let storage = FileStorage::with_mode(dir, Mode::Unsynced).expect("a folder");
        let mut first = None;
        let journal = Journal::open_after(Arc::new(storage), CONFIG, after, |frame| {
            first.get_or_insert(frame.sequence);
            Ok(())
        });
        journal.map(|journal| (journal, first))
    };
    assert!(matches!(
        open_after(0).map(|_| ()),
        Err(JournalError::Removed { .. })
    ));
    let (journal, first) = open_after(1_500).expect("opens");
    let first = first.expect("frames");
    assert!(
        first > through && first <= 1_501,
        "earlier segments are not read"
    );
    assert_eq!(journal.commit().position(), 2_100);
    journal.close();
    assert_eq!(visit_frames(&storage, |_| Ok(())).expect("whole"), 2_100);
    assert_eq!(
        visit_frames_after(&storage, 1_500, |_| Ok(())).expect("whole"),
        2_100
    );
    assert!(visit_frames_after(&storage, 0, |_| Ok(())).is_err());
}

// Data lost below the commit position: a reader gets an error instead of waiting forever.
#[test]
fn zeros_below_the_commit_position_are_a_hole() {
    let folder = tempfile::tempdir().expect("folder");
    let (journal, _) = open(folder.path(), Mode::Synced);
    let mut appender = journal.appender();
    fill(&journal, &mut appender, 1..=7);
    let storage = FileStorage::with_mode(folder.path(), Mode::Synced).expect("a folder");
    let file = folder.path().join(storage.name(1));
    let file = std::fs::OpenOptions::new().write(true).open(file);
    let zeros = vec![0; CONFIG.segment_bytes as usize];
    std::os::unix::fs::FileExt::write_all_at(&file.expect("opens"), &zeros, 0).expect("written");
    let mut reader = journal.reader(0);
    match reader.try_next() {
        Err(ReadError::Log(JournalError::Hole {
            offset, sequence, ..
        })) => assert_eq!((offset, sequence), (0, 0)),
        other => panic!("{other:?}"),
    }
}
