//! Log format, little-endian, aligned to 8. A *frame* carries a command or an event:
//!
//! ```text
//!  offset  0    4     5      6    8         16       24       32    36   40
//!  field   len  kind  flags  ver  sequence  time_ns  durable  prev  crc  payload, padded to 8
//!  type    u32  u8    u8     u16  u64       u64      u64      u32   u32  bytes
//! ```
//!
//! `len` is the payload's length without padding and never 0: zeros mark the end of the written
//! data. `crc` is CRC-32C over the whole frame with its padding, with the field itself as 0. `prev`
//! is the `crc` of the frame before, so frames form a chain. `durable` is a sequence that was
//! durable when the frame was made. Flag bit 0 marks the last frame of a *unit*: a command with all
//! its events.
//!
//! Each write (*batch*) begins with a *mark*: a frame of kind 3 with the payload
//! `batch u64 | extent u64 | last sequence u64`. `extent` is the size of the write, mark and
//! trailing zeros included; the next mark follows it. A mark's `sequence` is the last one before
//! the batch, durable when the batch was written. Its `prev` is the `crc` of the last frame before
//! the batch, but the mark itself is no link of the chain. If a frame or mark after a damaged place
//! names a record of that place as durable, the place is a hole, otherwise a torn tail.
//!
//! `len`, `kind`, `flags`, `ver` and `crc` have the same offsets in every version from 2 on, so
//! that another version is not mistaken for damage.

use crate::aligned::Buffer;

/// Bytes of a frame before its payload.
pub const HEADER_BYTES: usize = 40;
/// Longest payload, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;
/// Longest payload of a frame that [`crate::Appender::append_small`] makes, in bytes.
pub const SMALL_BYTES: usize = 144;
/// Bytes of a mark.
pub const MARK_BYTES: usize = HEADER_BYTES + MARK_PAYLOAD_BYTES;
/// Version that this program writes.
pub const VERSION: u16 = 3;
/// Highest version accepted in a header whose checksum is not verified. Of the random 16-bit values
/// in a torn header, one in thousands is as small.
const VERSION_NEAR: u16 = 16;
const MARK_PAYLOAD_BYTES: usize = 24;
const MARK: u8 = 3;
const FLAG_UNIT_END: u8 = 1;
const PREV_AT: std::ops::Range<usize> = 32..36;
const CRC_AT: std::ops::Range<usize> = 36..40;

const _: () = assert!(MARK_BYTES.is_multiple_of(8) && HEADER_BYTES.is_multiple_of(8));

/// Kind of a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A sequenced command; determines the commit position.
    Command,
    /// An event of the command with the same sequence.
    Event,
}

/// One frame as a reader returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    /// Last frame of its unit.
    pub unit_end: bool,
    /// Node sequence of the command.
    pub sequence: u64,
    /// Time of the command in nanoseconds, as it was appended.
    pub time_ns: u64,
    /// A sequence that was durable when this frame was made.
    pub durable: u64,
    pub crc: u32,
    pub prev: u32,
    pub payload: Vec<u8>,
}

/// Header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Number of the write, gapless.
    pub batch: u64,
    /// Bytes from this mark to the next one.
    pub extent: u64,
    /// Last sequence before the batch: durable when the batch was written.
    pub durable: u64,
    /// Last sequence of the batch.
    pub last: u64,
    /// `crc` of the last frame before the batch.
    pub prev: u32,
}

/// Bytes of a frame with this payload: header and padding included.
#[inline]
pub const fn frame_bytes(payload: usize) -> usize {
    HEADER_BYTES + payload.next_multiple_of(8)
}

/// Appends a frame to `out`, whose length is a multiple of 8. [`add_checksums`] completes it.
pub fn write(
    out: &mut Buffer,
    kind: FrameKind,
    unit_end: bool,
    sequence: u64,
    time_ns: u64,
    durable: u64,
    payload: &[u8],
) {
    assert!(
        !payload.is_empty() && payload.len() <= PAYLOAD_BYTES_MAX,
        "frame payload must be 1 byte to 64 KiB"
    );
    let flags = if unit_end { FLAG_UNIT_END } else { 0 };
    let start = out.len();
    out.extend(&header(
        payload.len(),
        kind.code(),
        flags,
        sequence,
        time_ns,
        durable,
        0,
    ));
    out.extend(payload);
    out.resize(start + frame_bytes(payload.len()));
}

/// Chains frames of [`write`] to the frame with the checksum `prev`: sets the fields `prev` and
/// `crc` of each. Returns the checksum of the last one.
///
/// Apart from [`write`], so that the thread that waits for the disk does it, not the one that
/// appends.
pub fn add_checksums(frames: &mut [u8], mut prev: u32) -> u32 {
    let mut rest = frames;
    while !rest.is_empty() {
        let bytes = frame_bytes(u32_at(rest, 0) as usize);
        let (frame, others) = rest.split_at_mut(bytes);
        frame[PREV_AT].copy_from_slice(&prev.to_le_bytes());
        frame[CRC_AT].fill(0);
        prev = crc32c::crc32c(frame);
        frame[CRC_AT].copy_from_slice(&prev.to_le_bytes());
        rest = others;
    }
    prev
}

/// Longest frame of a small payload, plus 8 bytes of zeros for the padding.
const SMALL_FRAME_BYTES: usize = HEADER_BYTES + SMALL_BYTES + 8;

/// As [`write`], for a payload that `fill` writes in place.
///
/// `fill` returns the length, 1 to [`SMALL_BYTES`]. The length of `out` is a multiple of 8.
#[inline]
pub(crate) fn write_small(
    out: &mut Buffer,
    kind: FrameKind,
    unit_end: bool,
    sequence: u64,
    time_ns: u64,
    durable: u64,
    fill: impl FnOnce(&mut [u8; SMALL_BYTES]) -> usize,
) {
    let place = out.spare::<SMALL_FRAME_BYTES>();
    let (head, rest) = place
        .split_first_chunk_mut::<HEADER_BYTES>()
        .expect("longer than a header");
    let payload = rest
        .first_chunk_mut()
        .expect("as long as the longest payload");
    let length = fill(payload);
    assert!(
        (1..=SMALL_BYTES).contains(&length),
        "small payload out of range"
    );
    rest[length..length + 8].fill(0);
    let flags = if unit_end { FLAG_UNIT_END } else { 0 };
    *head = header(length, kind.code(), flags, sequence, time_ns, durable, 0);
    out.extend_into_spare(frame_bytes(length));
}

impl FrameKind {
    fn code(self) -> u8 {
        match self {
            Self::Command => 1,
            Self::Event => 2,
        }
    }
}

/// Encodes a mark.
pub fn mark(mark: &Mark) -> [u8; MARK_BYTES] {
    let mut bytes = [0; MARK_BYTES];
    let head = header(
        MARK_PAYLOAD_BYTES,
        MARK,
        0,
        mark.durable,
        0,
        mark.durable,
        mark.prev,
    );
    bytes[..HEADER_BYTES].copy_from_slice(&head);
    for (at, word) in [mark.batch, mark.extent, mark.last].into_iter().enumerate() {
        bytes[HEADER_BYTES + at * 8..][..8].copy_from_slice(&word.to_le_bytes());
    }
    let crc = crc32c::crc32c(&bytes);
    bytes[CRC_AT].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[inline]
fn header(
    payload: usize,
    kind: u8,
    flags: u8,
    sequence: u64,
    time_ns: u64,
    durable: u64,
    prev: u32,
) -> [u8; HEADER_BYTES] {
    let length = u32::try_from(payload).expect("a payload is at most 64 KiB");
    let mut head = [0; HEADER_BYTES];
    head[..4].copy_from_slice(&length.to_le_bytes());
    head[4] = kind;
    head[5] = flags;
    head[6..8].copy_from_slice(&VERSION.to_le_bytes());
    head[8..16].copy_from_slice(&sequence.to_le_bytes());
    head[16..24].copy_from_slice(&time_ns.to_le_bytes());
    head[24..32].copy_from_slice(&durable.to_le_bytes());
    head[PREV_AT].copy_from_slice(&prev.to_le_bytes());
    head
}

/// Result of [`read`].
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Frame(Frame),
    Mark(Mark),
    /// Zeros: the end of the written data.
    End,
    /// Too few bytes to decide.
    Short,
    /// Neither a whole frame nor zeros.
    Damaged,
}

/// Decodes the frame or mark at the start of `bytes`. The caller checks the chain and extents.
pub fn read(bytes: &[u8]) -> Found {
    read_with(bytes, Vec::new())
}

/// As [`read`], with the memory of an earlier payload for the payload.
pub(crate) fn read_with(bytes: &[u8], mut memory: Vec<u8>) -> Found {
    let Some(head) = bytes.get(..HEADER_BYTES) else {
        return Found::Short;
    };
    let length = u32_at(head, 0) as usize;
    if length == 0 {
        return if head.iter().all(|byte| *byte == 0) {
            Found::End
        } else {
            Found::Damaged
        };
    }
    let kind = head[4];
    if length > PAYLOAD_BYTES_MAX || version(head) != VERSION || !(1..=MARK).contains(&kind) {
        return Found::Damaged;
    }
    let Some(whole) = bytes.get(..frame_bytes(length)) else {
        return Found::Short;
    };
    if !is_whole(whole) {
        return Found::Damaged;
    }
    let crc = u32_at(head, CRC_AT.start);
    let payload = &whole[HEADER_BYTES..HEADER_BYTES + length];
    let prev = u32_at(head, PREV_AT.start);
    if kind == MARK {
        if length != MARK_PAYLOAD_BYTES {
            return Found::Damaged;
        }
        return Found::Mark(Mark {
            batch: u64_at(payload, 0),
            extent: u64_at(payload, 8),
            durable: u64_at(head, 24),
            last: u64_at(payload, 16),
            prev,
        });
    }
    memory.clear();
    memory.extend_from_slice(payload);
    Found::Frame(Frame {
        kind: if kind == 1 {
            FrameKind::Command
        } else {
            FrameKind::Event
        },
        unit_end: head[5] & FLAG_UNIT_END != 0,
        sequence: u64_at(head, 8),
        time_ns: u64_at(head, 16),
        durable: u64_at(head, 24),
        prev,
        crc,
        payload: memory,
    })
}

/// True when the checksum of a frame, padding included, matches.
fn is_whole(frame: &[u8]) -> bool {
    let mut plain = [0; HEADER_BYTES];
    plain[..CRC_AT.start].copy_from_slice(&frame[..CRC_AT.start]);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&plain), &frame[HEADER_BYTES..]);
    crc == u32_at(frame, CRC_AT.start)
}

/// Another format version in a header, at a place where a frame or a mark is due.
///
/// Either a version up to 16, whose checksum may be computed differently, or any version with a
/// valid checksum. A header torn inside its version field matches neither.
pub(crate) fn other_version(bytes: &[u8]) -> Option<u16> {
    let near = claimed_version(bytes).filter(|version| *version <= VERSION_NEAR);
    near.or_else(|| complete_frame_version(bytes))
}

fn claimed_version(bytes: &[u8]) -> Option<u16> {
    let head = bytes.get(..HEADER_BYTES)?;
    let is_header = (1..=PAYLOAD_BYTES_MAX).contains(&(u32_at(head, 0) as usize))
        && (1..=MARK).contains(&head[4])
        && head[5] <= FLAG_UNIT_END;
    let version = version(head);
    (is_header && version != 0 && version != VERSION).then_some(version)
}

/// As [`other_version`], for any place. Requires a valid checksum, so payload bytes do not match.
pub(crate) fn complete_frame_version(bytes: &[u8]) -> Option<u16> {
    let version = claimed_version(bytes)?;
    let whole = bytes.get(..frame_bytes(u32_at(bytes, 0) as usize))?;
    is_whole(whole).then_some(version)
}

/// Cheap filter for [`read`]: false for most places inside a frame, and for zeros.
pub(crate) fn may_begin(bytes: &[u8]) -> bool {
    let head = bytes.get(..HEADER_BYTES);
    head.is_some_and(|head| (1..=MARK).contains(&head[4]) && version(head) == VERSION)
}

/// A unit in a buffer.
pub(crate) struct Unit {
    pub bytes: usize,
    pub sequence: u64,
}

/// Returns the first unit of a buffer that this process filled. Verifies no checksum.
pub(crate) fn first_unit(bytes: &[u8]) -> Unit {
    let mut at = 0;
    loop {
        let head = &bytes[at..at + HEADER_BYTES];
        at += frame_bytes(u32_at(head, 0) as usize);
        if head[5] & FLAG_UNIT_END != 0 {
            return Unit {
                bytes: at,
                sequence: u64_at(head, 8),
            };
        }
    }
}

fn version(head: &[u8]) -> u16 {
    u16::from_le_bytes(head[6..8].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
