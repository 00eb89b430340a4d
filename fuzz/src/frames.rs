//! Journal frames, and a log whose first segment has any bytes.

use std::sync::Arc;

use journal::aligned::Buffer;
use journal::fault::MemoryStorage;
use journal::frame::{self, Found};
use journal::{Config, Follower, FrameKind, Journal, Storage, list, walk};

const BLOCK_BYTES: usize = 512;

/// Panics when the bytes do: a frame that is read is written the same again, a walk sees what an
/// opening sees, and what was opened once opens again.
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
            found.prev,
            &found.payload,
        );
        let Found::Frame(other) = frame::read(again.bytes()) else {
            panic!("what was written is a frame");
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
    storage.create(1, length as u64).expect("made");
    storage.damage(1, 0, bytes);
    list(&storage).expect("a list needs no whole frames");
    let (mut units, mut frames) = (0, Vec::new());
    let walked = walk(&storage, |frame| {
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
    match (walked, open()) {
        (Ok(end), Ok(journal)) => {
            assert_eq!(journal.commit().position(), end);
            assert!(units <= end || end == 0);
            journal.close();
            let again = open().expect("a tail is cut once");
            assert_eq!(again.commit().position(), end);
        }
        (Err(_), Err(_)) => {}
        (walked, opened) => panic!(
            "a walk gives {walked:?}, an opening {:?}",
            opened.map(|journal| journal.commit().position())
        ),
    }
}

/// A reader in another process gives a beginning of the same frames.
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

/// Logs of one segment: whole, torn, damaged, of another version; a lone frame.
pub fn seeds() -> Vec<Vec<u8>> {
    let three = log(&[1, 3, 2]);
    let mut torn = three.clone();
    let end = torn.iter().rposition(|byte| *byte != 0).expect("written");
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

/// A batch for each number of commands.
fn log(batches: &[u64]) -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        segment_bytes: 8 << 10,
        pending_bytes_max: 1 << 16,
        recent_bytes: 64 << 10,
    };
    let mut sequence = 0;
    for commands in batches {
        // Closing writes what was appended: each opening has a batch of its own.
        let journal = Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("opens");
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
