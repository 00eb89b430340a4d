//! What any bytes must do to the reader of frames and to the opening of a log; shared by the fuzz
//! target and the ordinary test.

use std::sync::Arc;

use journal::aligned::Buffer;
use journal::fault::MemoryStorage;
use journal::frame::{self, Found};
use journal::{Config, Journal, Storage, list, walk};

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
    let mut units = 0;
    let walked = walk(&storage, |frame| {
        units += u64::from(frame.unit_end);
        Ok(())
    });
    let config = Config {
        segment_bytes: length as u64,
        pending_bytes_max: 1 << 10,
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
