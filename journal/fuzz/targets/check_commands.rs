//! What any bytes must do to the decoding of commands and events; shared by the fuzz target and the ordinary test.

use journal::{Frame, FrameKind};
use sequencer::record::{decode_command, decode_event};

/// Panics when the bytes do: a payload is refused with a text, or it is a value that can be shown.
/// Gives whether it is a command.
pub fn check(bytes: &[u8]) -> bool {
    let frame = |kind| Frame {
        kind,
        unit_end: true,
        sequence: 7,
        time_ns: 8,
        durable: 6,
        crc: 0,
        prev: 0,
        payload: bytes.to_vec(),
    };
    if let Ok(event) = decode_event(&frame(FrameKind::Event)) {
        assert_eq!(event.sequence.get(), 7);
        assert!(!format!("{event:?}").is_empty());
    }
    match decode_command(&frame(FrameKind::Command)) {
        Ok(envelope) => {
            assert_eq!((envelope.sequence.get(), envelope.time_ns), (7, 8));
            assert!(!format!("{envelope:?}").is_empty());
            true
        }
        Err(reason) => {
            assert!(!reason.is_empty());
            false
        }
    }
}
