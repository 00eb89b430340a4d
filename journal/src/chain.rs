//! Verifies the checksum chain of marks and frames, segment by segment, up to a torn place.

use crate::frame::{self, Found, Frame, MARK_BYTES, Mark};
use crate::log::JournalError;
use crate::scan::End;

/// State of the scan: the chain so far.
pub(crate) struct ChainScan {
    pub end: End,
    /// Checksum of the last frame read; inside a unit it is newer than `end.crc`.
    pub crc: u32,
    unit: Vec<Frame>,
    /// Memory of payloads that were visited, for the next ones: a replay allocates no frame.
    spare: Vec<Vec<u8>>,
    /// Bytes of the segment of `end` that a truncation keeps: whole units and batches.
    pub keep: u64,
    /// File and offset where the last batch ends without all units that its mark names.
    short_at: Option<(String, u64)>,
}

/// Why the scan of a segment ended.
pub(crate) enum Stop {
    /// The last batch, or zeros after it, extend to the segment's end.
    Next,
    /// The segment is empty.
    Empty,
    /// No whole frame at this offset.
    Torn(u64),
}

impl ChainScan {
    /// Starts at `segment`, with an empty chain.
    pub fn new(segment: u64) -> Self {
        Self {
            end: End {
                segment,
                ..End::default()
            },
            crc: 0,
            unit: Vec::new(),
            spare: Vec::new(),
            keep: 0,
            short_at: None,
        }
    }

    /// Scans the batches of a segment from its start; `visit` gets the frames of whole units.
    pub fn scan_segment(
        &mut self,
        segment: u64,
        bytes: &[u8],
        name: &dyn Fn() -> String,
        visit: &mut impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Stop, JournalError> {
        let mut at = 0;
        while at < bytes.len() {
            let mark = match frame::read(&bytes[at..]) {
                Found::Mark(mark) => mark,
                Found::End | Found::Short if is_zero(&bytes[at..]) => {
                    return Ok(if at == 0 { Stop::Empty } else { Stop::Next });
                }
                _ => return Ok(Stop::Torn(at as u64)),
            };
            if mark.durable > self.end.sequence || mark.batch > self.end.batch + 1 {
                let (file, offset) = self.short_at.take().unwrap_or((name(), at as u64));
                return Err(JournalError::Hole {
                    file,
                    offset,
                    sequence: self.end.sequence,
                });
            }
            self.short_at = None;
            let extent_end = at.saturating_add(extent_bytes(&mark)).min(bytes.len());
            let is_next = mark.durable == self.end.sequence && mark.batch == self.end.batch + 1;
            if !is_next || mark.prev != self.crc {
                return Err(JournalError::Chain {
                    file: name(),
                    offset: at as u64,
                });
            }
            if let Some(torn) = self.scan_batch(
                segment,
                &bytes[..extent_end],
                at,
                &mark,
                bytes.len(),
                name,
                visit,
            )? {
                return Ok(Stop::Torn(torn));
            }
            at = extent_end;
        }
        Ok(Stop::Next)
    }

    /// Scans the frames of a batch. Returns the offset of the first torn frame, if there is one.
    fn scan_batch(
        &mut self,
        segment: u64,
        bytes: &[u8],
        start: usize,
        mark: &Mark,
        segment_bytes: usize,
        name: &dyn Fn() -> String,
        visit: &mut impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Option<u64>, JournalError> {
        let mut at = start + MARK_BYTES;
        if self.end.segment != segment || start == 0 {
            // The log now ends in this segment, even if no unit of the batch is whole.
            self.end.segment = segment;
            self.end.bytes = segment_bytes as u64;
        }
        self.end.offset = start as u64;
        self.keep = start as u64;
        while self.end.sequence < mark.last {
            let offset = at as u64;
            let memory = self.spare.pop().unwrap_or_default();
            match frame::read_with(&bytes[at..], memory) {
                Found::Frame(frame) if frame.prev == self.crc => {
                    at += frame::frame_bytes(frame.payload.len());
                    self.crc = frame.crc;
                    let (sequence, is_end) = (frame.sequence, frame.unit_end);
                    self.unit.push(frame);
                    if !is_end {
                        continue;
                    }
                    for frame in self.unit.drain(..) {
                        visit(&frame).map_err(|reason| JournalError::Content {
                            file: name(),
                            offset,
                            reason,
                        })?;
                        self.spare.push(frame.payload);
                    }
                    self.end.offset = bytes.len() as u64;
                    self.end.sequence = sequence;
                    self.end.batch = mark.batch;
                    self.end.crc = self.crc;
                    self.keep = at as u64;
                }
                Found::Frame(_) => {
                    return Err(JournalError::Chain {
                        file: name(),
                        offset,
                    });
                }
                // An earlier opening truncated this batch after its last whole unit.
                Found::End | Found::Short
                    if self.unit.is_empty()
                        && self.end.batch == mark.batch
                        && is_zero(&bytes[at..]) =>
                {
                    self.short_at = Some((name(), offset));
                    break;
                }
                _ => {
                    self.crc = self.end.crc;
                    self.unit.clear();
                    return Ok(Some(offset));
                }
            }
        }
        // Bytes between the last frame and the end of the extent have no meaning.
        self.keep = bytes.len() as u64;
        Ok(None)
    }
}

pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

pub(crate) fn extent_bytes(mark: &Mark) -> usize {
    usize::try_from(mark.extent)
        .unwrap_or(usize::MAX)
        .max(MARK_BYTES)
}
