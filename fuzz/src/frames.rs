//! Journal frames, and a log whose first segment contains any bytes.

use std::sync::Arc;

use journal::aligned::Buffer;
use journal::fault::MemoryStorage;
use journal::frame::{self, Found};
use journal::{Config, Follower, FrameKind, Journal, Storage, list, visit_frames};

const BLOCK_BYTES: usize = 512;

/// Asserts that a decoded frame re-encodes to the same frame, that iterating and opening a log
/// agree on its end, and that an opened log opens again.
pub fn check(bytes: &[u8]) {
    if let Found::Frame(found) = frame::read(bytes) {
        let mut again = Buffer::default();
        frame::write(
            &mut again,
            found.kind,
            found.unit_end,
            found.sequence,
            found.time_ns,
            found.durable,
            &found.payload,
        );
        frame::add_checksums(again.bytes_mut(), found.prev);
        let Found::Frame(other) = frame::read(again.bytes()) else {
            panic!("a written frame decodes");
        };
        assert_eq!(
            frame::Frame {
                crc: found.crc,
                ..other
            },
            found
        );
    }
    let storage = Arc::new(MemoryStorage::default());
    let length = bytes.len().next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES);
    storage.create(1, length as u64).expect("segment created");
    storage.corrupt(1, 0, bytes);
    list(&storage).expect("listing does not need complete frames");
    let (mut units, mut frames) = (0, Vec::new());
    let visited = visit_frames(&storage, |frame| {
        units += u64::from(frame.unit_end);
        frames.push(frame.clone());
        Ok(())
    });
    follow(&storage, &frames);
    let config = Config {
        segment_bytes: length as u64,
        pending_bytes_max: 1 << 10,
        recent_bytes: 64 << 10,
    };
    let open = || Journal::open(Arc::new(storage.clone()), config, |_| Ok(()));
    match (visited, open()) {
        (Ok(end), Ok(journal)) => {
            assert_eq!(journal.commit().position(), end);
            assert!(units <= end || end == 0);
            journal.close();
            let again = open().expect("an opened log opens again");
            assert_eq!(again.commit().position(), end);
        }
        (Err(_), Err(_)) => {}
        (visited, opened) => panic!(
            "iterating returns {visited:?}, opening {:?}",
            opened.map(|journal| journal.commit().position())
        ),
    }
}

/// Asserts that a reader in another process returns a prefix of the same frames.
fn follow(storage: &Arc<MemoryStorage>, frames: &[frame::Frame]) {
    let mut follower = Follower::new(Arc::new(storage.clone()), 0);
    let mut expected = frames.iter();
    while let Ok(Some(found)) = follower.try_next() {
        if let Some(expected) = expected.next() {
            assert_eq!(found, *expected);
        } else {
            break;
        }
    }
}

/// Segments of a log: empty, complete, torn, damaged, of another version. The last seed is a single
/// frame.
pub fn seeds() -> Vec<Vec<u8>> {
    let three = log(&[1, 3, 2]);
    let mut torn = three.clone();
    let end = torn
        .iter()
        .rposition(|byte| *byte != 0)
        .expect("a non-zero byte");
    torn[end - 9..].fill(0);
    let mut hole = three.clone();
    hole[100] ^= 0x40;
    let mut version = three.clone();
    version[BLOCK_BYTES + 6] = 3;
    let frame = three[64..BLOCK_BYTES].to_vec();
    vec![
        Vec::new(),
        log(&[1]),
        log(&[40]),
        three,
        torn,
        hole,
        version,
        frame,
    ]
}

/// The first segment of a log with one batch per entry of `batches`, which is the batch's number of
/// commands.
fn log(batches: &[u64]) -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        segment_bytes: 8 << 10,
        pending_bytes_max: 1 << 16,
        recent_bytes: 64 << 10,
    };
    let mut sequence = 0;
    for commands in batches {
        // Closing the journal writes the appended frames as one batch.
        let journal =
            Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("journal opened");
        let mut appender = journal.appender();
        for _ in 0..*commands {
            sequence += 1;
            let payload = vec![sequence as u8; 30 + sequence as usize % 50];
            let events = sequence % 3;
            appender.append(FrameKind::Command, events == 0, sequence, 1, &payload);
            for event in 1..=events {
                appender.append(FrameKind::Event, event == events, sequence, 1, &payload);
            }
        }
        appender.flush();
        journal.close();
    }
    storage.bytes(1)
}
