//! A frame of the log, little-endian, aligned to 8:
//!
//! ```text
//!  0        4     5      6        8           16          24          32        36       40
//!  | len u32 | kind | flags | ver u16 | sequence u64 | time_ns u64 | batch u64 | prev u32 | crc u32 | payload, padded to 8 |
//! ```
//!
//! `len` is the payload's length without padding and never 0: zeros are the end of what was written. `crc` is CRC-32C over the header before it and the payload;
//! `prev` is the `crc` of the frame before, so that frames form a chain. `batch` counts writes: batch `n + 1` is written only after batch `n` is synced,
//! which tells a torn tail from a hole. Flag bit 0 marks the last frame of a *unit*: a command with all its events.

/// Bytes of a frame before its payload.
pub const HEADER_BYTES: usize = 40;
/// Longest payload, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Version written today.
pub const VERSION: u16 = 1;
const FLAG_UNIT_END: u8 = 1;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A sequenced command: decides durability.
    Command,
    /// Something the command of the same sequence caused.
    Event,
}

/// One frame as a reader gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    /// Last frame of its unit.
    pub unit_end: bool,
    /// Node sequence of the command.
    pub sequence: u64,
    pub time_ns: u64,
    pub batch: u64,
    pub crc: u32,
    pub prev: u32,
    pub payload: Vec<u8>,
}

/// Bytes that a payload takes with header and padding.
pub const fn frame_bytes(payload: usize) -> usize {
    HEADER_BYTES + payload.next_multiple_of(8)
}

/// Appends a frame to `out`; gives its checksum. The batch is filled in by [`seal`], when it is known.
pub fn write(
    out: &mut Vec<u8>,
    kind: FrameKind,
    unit_end: bool,
    sequence: u64,
    time_ns: u64,
    payload: &[u8],
) {
    assert!(
        !payload.is_empty() && payload.len() <= PAYLOAD_BYTES_MAX,
        "a payload of 1 to 64 KiB"
    );
    let length = u32::try_from(payload.len()).expect("bounded above");
    out.extend_from_slice(&length.to_le_bytes());
    out.push(match kind {
        FrameKind::Command => 1,
        FrameKind::Event => 2,
    });
    out.push(if unit_end { FLAG_UNIT_END } else { 0 });
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    out.extend_from_slice(&time_ns.to_le_bytes());
    out.extend_from_slice(&[0; 16]);
    out.extend_from_slice(payload);
    out.resize(out.len().next_multiple_of(8), 0);
}

/// Fills batch, chain and checksum of every frame of a batch; gives the last checksum.
pub fn seal(bytes: &mut [u8], batch: u64, mut prev: u32) -> u32 {
    let mut at = 0;
    while at < bytes.len() {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        bytes[at + 24..at + 32].copy_from_slice(&batch.to_le_bytes());
        bytes[at + 32..at + 36].copy_from_slice(&prev.to_le_bytes());
        let crc = checksum(
            &bytes[at..at + 36],
            &bytes[at + HEADER_BYTES..at + HEADER_BYTES + length],
        );
        bytes[at + 36..at + 40].copy_from_slice(&crc.to_le_bytes());
        prev = crc;
        at += frame_bytes(length);
    }
    assert_eq!(at, bytes.len(), "a batch is whole frames");
    prev
}

fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(header), payload)
}

/// What stands at an offset.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Frame(Frame),
    /// Zeros: nothing was written here.
    End,
    /// Something that is no whole frame.
    Damaged,
}

/// Reads the frame at the start of `bytes`, which may hold more. The chain is the caller's to check.
pub fn read(bytes: &[u8]) -> Found {
    if bytes.len() < HEADER_BYTES {
        return if bytes.iter().all(|byte| *byte == 0) {
            Found::End
        } else {
            Found::Damaged
        };
    }
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let length = word(0) as usize;
    if length == 0 {
        return if bytes[..HEADER_BYTES].iter().all(|byte| *byte == 0) {
            Found::End
        } else {
            Found::Damaged
        };
    }
    if length > PAYLOAD_BYTES_MAX || frame_bytes(length) > bytes.len() {
        return Found::Damaged;
    }
    let payload = &bytes[HEADER_BYTES..HEADER_BYTES + length];
    let kind = match bytes[4] {
        1 => FrameKind::Command,
        2 => FrameKind::Event,
        _ => return Found::Damaged,
    };
    let version = u16::from_le_bytes(bytes[6..8].try_into().expect("two bytes"));
    if version != VERSION || checksum(&bytes[..36], payload) != word(36) {
        return Found::Damaged;
    }
    Found::Frame(Frame {
        kind,
        unit_end: bytes[5] & FLAG_UNIT_END != 0,
        sequence: long(8),
        time_ns: long(16),
        batch: long(24),
        prev: word(32),
        crc: word(36),
        payload: payload.to_vec(),
    })
}
