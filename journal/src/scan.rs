//! Scans a log that is not being written: checks the chain, distinguishes a torn tail from a hole.
//!
//! [`visit_frames`] and [`list`] only read. [`repair`] is the scan of an opening: it also truncates
//! a torn tail and creates the first segment.

use std::io;

use crate::aligned::Buffer;
use crate::chain::{ChainScan, Stop, extent_bytes, is_zero};
use crate::frame::{self, Found, Frame, MARK_BYTES, Mark};
use crate::log::{Config, JournalError};
use crate::storage::Storage;

/// Bytes of the first read of a segment; each further read is twice as large, up to `CHUNK_BYTES`.
const CHUNK_BYTES_FIRST: usize = 128 << 10;
const CHUNK_BYTES: usize = 4 << 20;

/// End of the log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    pub segment: u64,
    /// Size of that segment, in whole blocks.
    pub bytes: u64,
    /// Offset of the next batch.
    pub offset: u64,
    pub sequence: u64,
    pub batch: u64,
    pub crc: u32,
}

/// A torn tail.
#[derive(Clone, Copy, Debug)]
struct Torn {
    segment: u64,
    offset: u64,
    /// Bytes that truncation keeps of the segment of [`End`].
    keep: u64,
}

/// Result of a scan.
struct ScanResult {
    end: End,
    segments: Vec<u64>,
    torn: Option<Torn>,
}

/// Summary of one segment, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    pub number: u64,
    pub name: String,
    /// Size of the segment.
    pub bytes: u64,
    /// Bytes used by batches.
    pub used_bytes: u64,
    pub batches: u64,
    /// First and last sequence; `None` when the segment is empty.
    pub sequences: Option<(u64, u64)>,
}

/// Reads the log from its first segment and returns the last sequence.
///
/// Calls `visit` with every frame of every whole unit, in order. Changes nothing: a torn tail is
/// skipped. If the log is being written, the result is a prefix, or an error because a write in
/// progress looks like damage.
///
/// # Errors
/// [`JournalError`]; an error text of `visit` becomes [`JournalError::Content`].
pub fn visit_frames(
    storage: &dyn Storage,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<u64, JournalError> {
    scan(storage, 0, visit).map(|scan| scan.end.sequence)
}

/// Result of [`check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Last record of the log.
    pub sequence: u64,
    /// Segment and offset of a torn tail, which the next opening truncates.
    pub torn: Option<(String, u64)>,
}

/// As [`visit_frames`], and reports a torn tail.
///
/// # Errors
/// As [`visit_frames`].
pub fn check(
    storage: &dyn Storage,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<Checked, JournalError> {
    let scan = scan(storage, 0, visit)?;
    Ok(Checked {
        sequence: scan.end.sequence,
        torn: scan
            .torn
            .map(|torn| (storage.name(torn.segment), torn.offset)),
    })
}

/// As [`visit_frames`], from the segment that contains the record after `after`.
///
/// Earlier segments are not read. `visit` may still see frames at or before `after`.
///
/// # Errors
/// [`JournalError::Removed`] when that record was removed; others as [`visit_frames`].
pub fn visit_frames_after(
    storage: &dyn Storage,
    after: u64,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<u64, JournalError> {
    let segments = storage.segments()?;
    check_not_removed(storage, &segments, after)?;
    scan(storage, after, visit).map(|scan| scan.end.sequence)
}

/// Last record removed from the log's beginning; 0 if none was.
///
/// # Errors
/// The storage cannot be read.
pub fn removed_through(storage: &dyn Storage) -> Result<u64, JournalError> {
    let first = first_existing_mark(storage, &storage.segments()?)?;
    Ok(first.map_or(0, |mark| mark.durable))
}

/// Lists the segments by their marks, ascending. Frames are not checked.
///
/// # Errors
/// The storage cannot be read.
pub fn list(storage: &dyn Storage) -> Result<Vec<SegmentInfo>, JournalError> {
    let mut found = Vec::new();
    for number in storage.segments()? {
        let bytes = load(storage, number)?;
        let mut info = SegmentInfo {
            number,
            name: storage.name(number),
            bytes: bytes.len() as u64,
            used_bytes: 0,
            batches: 0,
            sequences: None,
        };
        let mut at = 0;
        while let Some(rest) = bytes.get(at..)
            && let Found::Mark(mark) = frame::read(rest)
        {
            info.batches += 1;
            let first = info.sequences.map_or(mark.durable + 1, |(first, _)| first);
            info.sequences = Some((first, mark.last));
            at += extent_bytes(&mark);
        }
        info.used_bytes = at.min(bytes.len()) as u64;
        found.push(info);
    }
    Ok(found)
}

/// Scans from the record after `after`, truncates a torn tail, creates the first segment if none.
///
/// Records through `after` and `reach` are known to have been durable. A log that ends before them
/// is refused unchanged.
pub(crate) fn repair(
    storage: &dyn Storage,
    config: Config,
    after: u64,
    reach: u64,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<End, JournalError> {
    let segments = storage.segments()?;
    check_not_removed(storage, &segments, after)?;
    let scan = scan(storage, after, visit)?;
    let end = scan.end;
    // Before any change: an operator needs the log as it was found.
    let reach = reach.max(after);
    if end.sequence < reach {
        return Err(JournalError::Lost {
            end: end.sequence,
            after: reach,
        });
    }
    let block = storage.block_bytes() as u64;
    if scan.segments.is_empty() {
        let bytes = config.segment_bytes.next_multiple_of(block);
        storage.create(1, bytes)?;
        return Ok(End {
            segment: 1,
            bytes,
            ..end
        });
    }
    if let Some(torn) = scan.torn {
        truncate_tail(storage, &scan.segments, end, torn.keep)?;
        tracing::warn!(
            sequence = end.sequence,
            file = storage.name(torn.segment),
            offset = torn.offset,
            "journal tail was torn: truncated after the last whole record"
        );
    }
    // The scanned records count as durable from here. Their writer may have died before the sync.
    storage.make_durable(end.segment)?;
    Ok(End {
        bytes: end.bytes - end.bytes % block,
        offset: end.offset.next_multiple_of(block),
        ..end
    })
}

/// The last segment whose first mark is at or before `after`; the first segment if there is none.
pub(crate) fn segment_containing(
    storage: &dyn Storage,
    segments: &[u64],
    after: u64,
) -> Result<Option<u64>, JournalError> {
    for segment in segments.iter().rev() {
        if first_mark(storage, *segment)?.is_some_and(|mark| mark.durable <= after) {
            return Ok(Some(*segment));
        }
    }
    Ok(segments.first().copied())
}

/// Checks that the record after `after` was not removed.
pub(crate) fn check_not_removed(
    storage: &dyn Storage,
    segments: &[u64],
    after: u64,
) -> Result<(), JournalError> {
    match first_existing_mark(storage, segments)? {
        Some(mark) if mark.durable > after => Err(JournalError::Removed {
            through: mark.durable,
            after,
        }),
        _ => Ok(()),
    }
}

/// First mark of the first of these segments that still exists.
fn first_existing_mark(
    storage: &dyn Storage,
    segments: &[u64],
) -> Result<Option<Mark>, JournalError> {
    for segment in segments {
        match first_mark(storage, *segment) {
            Err(JournalError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found,
        }
    }
    Ok(None)
}

pub(crate) fn first_mark(
    storage: &dyn Storage,
    segment: u64,
) -> Result<Option<Mark>, JournalError> {
    let mut bytes = [0; MARK_BYTES];
    let count = storage.read(segment, 0, &mut bytes)?;
    Ok(match frame::read(&bytes[..count]) {
        Found::Mark(mark) => Some(mark),
        _ => None,
    })
}

fn scan(
    storage: &dyn Storage,
    after: u64,
    mut visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<ScanResult, JournalError> {
    let segments = storage.segments()?;
    for (segment, expected) in segments
        .iter()
        .zip(segments.first().copied().unwrap_or(0)..)
    {
        if *segment != expected {
            return Err(JournalError::SegmentMissing {
                missing: expected,
                after: *segment,
            });
        }
    }
    let first = segment_containing(storage, &segments, after)?.unwrap_or_default();
    let mut chain = ChainScan::new(first);
    let mut torn = None;
    for segment in segments.iter().filter(|number| **number >= first) {
        let bytes = load(storage, *segment)?;
        let name = || storage.name(*segment);
        refuse_version(frame::other_version(&bytes), &name)?;
        if *segment == first {
            chain.end.bytes = bytes.len() as u64;
            // The chain begins at the log's beginning, or as the segment's first mark says.
            match frame::read(&bytes) {
                Found::Mark(mark) if first > 1 => {
                    chain.crc = mark.prev;
                    chain.end.crc = mark.prev;
                    chain.end.sequence = mark.durable;
                    chain.end.batch = mark.batch.saturating_sub(1);
                }
                _ if first > 1 => {
                    return Err(JournalError::Hole {
                        file: name(),
                        offset: 0,
                        sequence: 0,
                    });
                }
                _ => {}
            }
        }
        match chain.scan_segment(*segment, &bytes, &name, &mut visit)? {
            Stop::Next => {}
            Stop::Empty => {
                if is_used(storage, &segments, *segment)? {
                    torn = Some((*segment, 0));
                }
                break;
            }
            Stop::Torn(offset) => {
                torn = Some((*segment, offset));
                break;
            }
        }
    }
    let end = chain.end;
    if let Some((segment, offset)) = torn {
        refuse_hole(storage, &segments, segment, offset, end.sequence)?;
    }
    Ok(ScanResult {
        end,
        torn: torn.map(|(segment, offset)| Torn {
            segment,
            offset,
            keep: chain.keep,
        }),
        segments,
    })
}

/// True when anything was written after `segment`.
fn is_used(storage: &dyn Storage, segments: &[u64], segment: u64) -> Result<bool, JournalError> {
    for later in segments.iter().filter(|number| **number > segment) {
        if !is_zero(&load(storage, *later)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn load(storage: &dyn Storage, segment: u64) -> Result<Vec<u8>, JournalError> {
    let (mut bytes, mut chunk) = (Vec::new(), CHUNK_BYTES_FIRST);
    loop {
        let done = bytes.len();
        bytes.resize(done + chunk, 0);
        let count = storage.read(segment, done as u64, &mut bytes[done..])?;
        if count < chunk {
            bytes.truncate(done + count);
            return Ok(bytes);
        }
        chunk = CHUNK_BYTES.min(chunk * 2);
    }
}

fn refuse_version(other: Option<u16>, name: &dyn Fn() -> String) -> Result<(), JournalError> {
    match other {
        Some(version) => Err(JournalError::Version {
            file: name(),
            version,
        }),
        None => Ok(()),
    }
}

/// Returns an error if the damaged place is a hole, not a torn tail.
///
/// A later record that names a sequence after `sequence` as durable exists only if this place had
/// been synced. The same holds for a later mark: a batch is written only when the one before it is
/// durable. Data of another format version is reported as such.
fn refuse_hole(
    storage: &dyn Storage,
    segments: &[u64],
    segment: u64,
    offset: u64,
    sequence: u64,
) -> Result<(), JournalError> {
    for later in segments.iter().filter(|number| **number >= segment) {
        let bytes = load(storage, *later)?;
        let name = || storage.name(*later);
        let mut at = if *later == segment {
            usize::try_from(offset).expect("fits memory")
        } else {
            0
        };
        // A header is due at the damaged place and at the start of each later segment.
        refuse_version(bytes.get(at..).and_then(frame::other_version), &name)?;
        while at < bytes.len() {
            let place = &bytes[at..];
            if frame::may_begin(place) {
                let is_lost = match frame::read(place) {
                    // Also for the next batch: it went to a later segment, and this place is noise.
                    Found::Mark(mark) => mark.durable >= sequence,
                    Found::Frame(frame) => frame.durable > sequence,
                    _ => false,
                };
                if is_lost {
                    return Err(JournalError::Hole {
                        file: storage.name(segment),
                        offset,
                        sequence,
                    });
                }
            } else {
                refuse_version(frame::complete_frame_version(place), &name)?;
            }
            at += 8;
        }
    }
    Ok(())
}

/// Zeroes everything after `keep` in the last segment, and all of the later ones.
fn truncate_tail(
    storage: &dyn Storage,
    segments: &[u64],
    end: End,
    keep: u64,
) -> Result<(), JournalError> {
    let block = storage.block_bytes();
    for segment in segments.iter().filter(|number| **number >= end.segment) {
        let mut bytes = load(storage, *segment)?;
        let keep = if *segment == end.segment {
            usize::try_from(keep).expect("fits memory")
        } else {
            0
        };
        let keep = keep.min(bytes.len());
        let is_written = |byte: &u8| *byte != 0;
        let Some(last) = bytes[keep..].iter().rposition(is_written) else {
            continue;
        };
        // Only the blocks that need it: a durable block is not rewritten.
        let first = keep + bytes[keep..].iter().position(is_written).unwrap_or(last);
        let start = first - first % block;
        let stop = (keep + last + 1).next_multiple_of(block);
        bytes[keep..].fill(0);
        bytes.resize(bytes.len().max(stop), 0);
        let mut zeroed = Buffer::with_capacity(stop - start);
        zeroed.extend(&bytes[start..stop]);
        storage.write(*segment, start as u64, zeroed.padded(block))?;
        storage.sync(*segment)?;
    }
    Ok(())
}
