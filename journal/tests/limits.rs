//! Units at and above the size of a segment, and waiters after the writer has panicked.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use journal::aligned::Blocks;
use journal::fault::MemoryStorage;
use journal::{Appender, Config, FrameKind, Journal, Mode, Room, Storage};

const SEGMENT_BYTES: u64 = 4 << 10;
const CONFIG: Config = Config {
    segment_bytes: SEGMENT_BYTES,
    pending_bytes_max: 1 << 20,
    recent_bytes: 64 << 10,
};
/// Far longer than any write here takes: a timeout means a hang.
const HANG: Duration = Duration::from_secs(20);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("runtime")
}

/// A command with `events` events of 64 bytes: 104 bytes per frame.
fn append(appender: &mut Appender, sequence: u64, events: u64) {
    let payload = [sequence as u8; 64];
    appender.append(FrameKind::Command, events == 0, sequence, 1, &payload);
    for index in 1..=events {
        appender.append(FrameKind::Event, index == events, sequence, 1, &payload);
    }
}

fn open(storage: &Arc<MemoryStorage>) -> (Journal, Vec<u64>) {
    let mut sequences = Vec::new();
    let journal = Journal::open(Arc::new(storage.clone()), CONFIG, |frame| {
        if frame.unit_end {
            sequences.push(frame.sequence);
        }
        Ok(())
    })
    .expect("opens");
    (journal, sequences)
}

#[test]
fn a_unit_larger_than_a_segment_gets_a_segment_of_its_own_size() {
    // Below a segment's size with its mark, the first one above it, and far above it; as the first
    // unit of the log and after others.
    for events in [36, 37, 38, 39, 400] {
        for before in [0, 3] {
            let storage = Arc::new(MemoryStorage::default());
            let (journal, _) = open(&storage);
            let (mut appender, commit) = (journal.appender(), journal.commit());
            for sequence in 1..=before {
                append(&mut appender, sequence, 1);
            }
            append(&mut appender, before + 1, events);
            append(&mut appender, before + 2, 1);
            appender.flush();
            runtime()
                .block_on(async { tokio::time::timeout(HANG, commit.wait(before + 2)).await })
                .expect("commit wait timed out")
                .expect("durable");
            let mut reader = journal.reader(0);
            let mut frames = 0;
            while reader.try_next().expect("readable").is_some() {
                frames += 1;
            }
            assert_eq!(frames, 2 * before + 1 + events + 2);
            drop((reader, appender));
            journal.close();

            let (journal, sequences) = open(&storage);
            assert_eq!(sequences, (1..=before + 2).collect::<Vec<_>>());
            // The log continues after it.
            let (mut appender, commit) = (journal.appender(), journal.commit());
            append(&mut appender, before + 3, 2);
            appender.flush();
            runtime()
                .block_on(async { tokio::time::timeout(HANG, commit.wait(before + 3)).await })
                .expect("commit wait timed out")
                .expect("durable");
            drop(appender);
            journal.close();
            assert_eq!(open(&storage).1.last(), Some(&(before + 3)));
        }
    }
}

#[test]
fn batches_that_end_anywhere_in_their_block_are_read_and_scanned() {
    // A mark of 64 bytes and a frame with a header of 40 leave every gap from none to more than a
    // header before the block's end.
    let storage = Arc::new(MemoryStorage::default());
    let (journal, _) = open(&storage);
    let (mut appender, commit) = (journal.appender(), journal.commit());
    let runtime = runtime();
    let mut early = journal.reader(0);
    for (length, sequence) in (512 - 104 - 80..=512 - 104 + 8).zip(1..) {
        appender.append(FrameKind::Command, true, sequence, 1, &vec![3; length]);
        appender.flush();
        runtime.block_on(commit.wait(sequence)).expect("durable");
        let frame = early.try_next().expect("readable").expect("the frame");
        assert_eq!((frame.sequence, frame.payload.len()), (sequence, length));
        assert!(early.try_next().expect("readable").is_none());
    }
    let last = commit.position();
    let mut late = journal.reader(0);
    for sequence in 1..=last {
        let frame = late.try_next().expect("readable").expect("a frame");
        assert_eq!(frame.sequence, sequence);
    }
    drop(appender);
    journal.close();
    assert_eq!(open(&storage).1, (1..=last).collect::<Vec<_>>());
}

/// A storage whose writes panic.
struct Panics(Arc<MemoryStorage>);

impl Storage for Panics {
    fn segments(&self) -> io::Result<Vec<u64>> {
        self.0.segments()
    }
    fn create(&self, segment: u64, bytes: u64) -> io::Result<()> {
        self.0.create(segment, bytes)
    }
    fn remove(&self, segment: u64) -> io::Result<()> {
        self.0.remove(segment)
    }
    fn size(&self, segment: u64) -> io::Result<u64> {
        self.0.size(segment)
    }
    fn write(&self, _: u64, _: u64, _: Blocks<'_>) -> io::Result<()> {
        panic!("on purpose")
    }
    fn sync(&self, segment: u64) -> io::Result<()> {
        self.0.sync(segment)
    }
    fn make_durable(&self, segment: u64) -> io::Result<()> {
        self.0.make_durable(segment)
    }
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }
    fn mode(&self) -> Mode {
        self.0.mode()
    }
    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(segment, offset, into)
    }
    fn name(&self, segment: u64) -> String {
        self.0.name(segment)
    }
}

#[test]
fn a_writer_panic_fails_the_log_and_wakes_the_waiters() {
    let storage = Panics(Arc::new(MemoryStorage::default()));
    let journal = Journal::open(Arc::new(storage), CONFIG, |_| Ok(())).expect("opens");
    let (mut appender, commit) = (journal.appender(), journal.commit());
    append(&mut appender, 1, 0);
    appender.flush();
    runtime()
        .block_on(async { tokio::time::timeout(HANG, commit.wait(1)).await })
        .expect("commit wait timed out")
        .expect_err("nothing was written");
    assert!(appender.is_failed());
    assert_eq!(commit.position(), 0);
}

/// Minor page faults of the calling thread: field 10 of `proc_pid_stat(5)`.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("thread stat is readable");
    let (_, after_name) = stat.rsplit_once(')').expect("the name is in parentheses");
    let minor = after_name.split_ascii_whitespace().nth(7);
    minor
        .and_then(|count| count.parse().ok())
        .expect("a number")
}

#[test]
fn appending_while_the_disk_stalls_touches_no_new_memory() {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        pending_bytes_max: 8 << 20,
        ..CONFIG
    };
    let journal = Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("opens");
    let mut appender = journal.appender();
    append(&mut appender, 1, 1);
    appender.flush();
    runtime()
        .block_on(journal.commit().wait(1))
        .expect("durable");
    storage.stall(true);
    let before = page_faults();
    let mut sequence = 1;
    while appender.room() != Room::Full {
        sequence += 1;
        append(&mut appender, sequence, 1);
        appender.flush();
    }
    let faults = page_faults() - before;
    storage.stall(false);
    // Two thousand pages were written; these few are the test's own.
    assert!(faults < 64, "{faults} page faults");
}
