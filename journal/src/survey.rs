//! Walking a log that is at rest: every frame checked against the one before it, a torn tail told from a hole.
//!
//! [`walk`] only reads. [`mend`] is what opening does: it also cuts the tail and makes the first segment.

use crate::frame::{self, Found, Frame};
use crate::log::{Config, JournalError};
use crate::storage::Storage;

/// Where the log ends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    pub segment: u64,
    /// Size of that segment.
    pub bytes: u64,
    pub offset: u64,
    pub sequence: u64,
    pub batch: u64,
    pub crc: u32,
}

/// What a walk has found.
struct Survey {
    end: End,
    segments: Vec<u64>,
    /// First place that is no whole frame.
    torn_at: Option<(u64, u64)>,
    /// Something stands behind the end.
    has_tail: bool,
}

/// Reads the log, gives every frame of every whole unit to `visit` in order, gives the last sequence. Changes nothing: a torn tail is passed over. Of a
/// log that somebody is writing it sees a beginning, or takes what is being written for damage.
///
/// # Errors
/// [`JournalError`]; `visit` refuses a frame with a text that becomes [`JournalError::Content`].
pub fn walk(
    storage: &dyn Storage,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<u64, JournalError> {
    survey(storage, visit).map(|survey| survey.end.sequence)
}

/// Walks the log, cuts a torn tail, makes the first segment where there is none.
pub(crate) fn mend(
    storage: &dyn Storage,
    config: Config,
    visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<End, JournalError> {
    let survey = survey(storage, visit)?;
    let end = survey.end;
    if survey.segments.is_empty() {
        storage.create(1, config.segment_bytes)?;
        return Ok(End {
            segment: 1,
            bytes: config.segment_bytes,
            ..end
        });
    }
    if survey.has_tail {
        cut(storage, &survey.segments, end)?;
    }
    if let Some((segment, offset)) = survey.torn_at {
        tracing::warn!(
            sequence = end.sequence,
            file = storage.name(segment),
            offset,
            "a torn tail was cut from the journal"
        );
    }
    Ok(end)
}

fn survey(
    storage: &dyn Storage,
    mut visit: impl FnMut(&Frame) -> Result<(), String>,
) -> Result<Survey, JournalError> {
    let segments = storage.segments()?;
    let first = segments.first().copied().unwrap_or_default();
    for (segment, expected) in segments.iter().zip(first..) {
        if *segment != expected {
            return Err(JournalError::SegmentMissing {
                missing: expected,
                after: *segment,
            });
        }
    }
    let mut end = End {
        segment: first,
        ..End::default()
    };
    // Chain through frames of a unit that may still turn out torn.
    let (mut crc, mut unit) = (0u32, Vec::new());
    let mut torn_at = None;
    'segments: for segment in &segments {
        let bytes = load(storage, *segment)?;
        if end.segment == *segment {
            end.bytes = bytes.len() as u64;
        }
        if end.segment != *segment {
            if !unit.is_empty() {
                // A unit never spans segments.
                torn_at = Some((end.segment, end.offset));
                break;
            }
            if frame::read(&bytes) == Found::End {
                // Made, but nothing reached it.
                if bytes.iter().any(|byte| *byte != 0) {
                    torn_at = Some((*segment, 0));
                }
                break;
            }
        }
        let mut at = 0usize;
        loop {
            let name = || storage.name(*segment);
            match frame::read(&bytes[at..]) {
                Found::Frame(frame)
                    if frame.prev == crc
                        && frame.batch >= end.batch
                        && frame.batch <= end.batch + 1 =>
                {
                    crc = frame.crc;
                    let offset = at as u64;
                    at += frame::frame_bytes(frame.payload.len());
                    let is_end = frame.unit_end;
                    let (sequence, batch) = (frame.sequence, frame.batch);
                    unit.push(frame);
                    if is_end {
                        for frame in unit.drain(..) {
                            visit(&frame).map_err(|reason| JournalError::Content {
                                file: name(),
                                offset,
                                reason,
                            })?;
                        }
                        end = End {
                            segment: *segment,
                            bytes: bytes.len() as u64,
                            offset: at as u64,
                            sequence,
                            batch,
                            crc,
                        };
                    }
                }
                Found::Frame(frame) if frame.batch <= end.batch => {
                    return Err(JournalError::Chain {
                        file: name(),
                        offset: at as u64,
                    });
                }
                Found::End if bytes[at..].iter().all(|byte| *byte == 0) && unit.is_empty() => {
                    continue 'segments;
                }
                Found::End | Found::Damaged | Found::Frame(_) => {
                    torn_at = Some((*segment, at as u64));
                    break 'segments;
                }
            }
        }
    }
    if let Some((segment, offset)) = torn_at {
        refuse_hole(storage, &segments, segment, offset, end.batch)?;
    }
    Ok(Survey {
        end,
        has_tail: torn_at.is_some() || !unit.is_empty(),
        segments,
        torn_at,
    })
}

fn load(storage: &dyn Storage, segment: u64) -> Result<Vec<u8>, JournalError> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0u8; 1 << 20];
    loop {
        let count = storage.read(segment, bytes.len() as u64, &mut chunk)?;
        bytes.extend_from_slice(&chunk[..count]);
        if count < chunk.len() {
            return Ok(bytes);
        }
    }
}

/// Data of a batch after the torn one exists only when the torn one had been synced: then it is not torn but lost.
fn refuse_hole(
    storage: &dyn Storage,
    segments: &[u64],
    segment: u64,
    offset: u64,
    batch: u64,
) -> Result<(), JournalError> {
    for later in segments.iter().filter(|number| **number >= segment) {
        let bytes = load(storage, *later)?;
        let mut at = if *later == segment {
            usize::try_from(offset).expect("fits memory")
        } else {
            0
        };
        while at < bytes.len() {
            if let Found::Frame(frame) = frame::read(&bytes[at..])
                && frame.batch > batch + 1
            {
                return Err(JournalError::Hole {
                    file: storage.name(segment),
                    offset,
                });
            }
            at += 8;
        }
    }
    Ok(())
}

/// Zeroes everything behind the end.
fn cut(storage: &dyn Storage, segments: &[u64], end: End) -> Result<(), JournalError> {
    for segment in segments.iter().filter(|number| **number >= end.segment) {
        let start = if *segment == end.segment {
            end.offset
        } else {
            0
        };
        let bytes = load(storage, *segment)?;
        let start_at = usize::try_from(start).expect("fits memory");
        if let Some(last) = bytes[start_at..].iter().rposition(|byte| *byte != 0) {
            storage.write(*segment, start, &vec![0; last + 1])?;
            storage.sync(*segment)?;
        }
    }
    Ok(())
}
