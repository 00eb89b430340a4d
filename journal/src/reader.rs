//! Tails the log in the writer's process, up to the commit position.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use tokio::sync::watch;

use crate::frame::{self, Found, Frame, MARK_BYTES};
use crate::log::{JournalError, JournalFailed, State};
use crate::recent::Recent;
use crate::scan;
use crate::storage::Storage;

/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns the durable frames in log order.
///
/// At the commit position the last frame returned is always the end of a unit.
pub struct Reader {
    storage: Arc<dyn Storage>,
    recent: Arc<Recent>,
    state: watch::Receiver<State>,
    /// Last record returned whole, or the one after which reading begins.
    position: u64,
    after: u64,
    /// 0 before the first read.
    segment: u64,
    offset: u64,
    /// Offset of the next mark.
    extent_end: u64,
    /// Checksum of the last frame.
    crc: Option<u32>,
    buffer: Vec<u8>,
    buffer_at: usize,
    ready: VecDeque<Frame>,
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Log(#[from] JournalError),
    #[error(transparent)]
    Failed(#[from] JournalFailed),
    #[error("the journal was closed")]
    Closed,
}

impl ReadError {
    /// See [`JournalError::is_transient`].
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Log(error) if error.is_transient())
    }
}

impl Reader {
    pub(crate) fn new(
        storage: Arc<dyn Storage>,
        recent: Arc<Recent>,
        state: watch::Receiver<State>,
        after: u64,
    ) -> Self {
        Self {
            storage,
            recent,
            state,
            position: after,
            after,
            segment: 0,
            offset: 0,
            extent_end: 0,
            crc: None,
            buffer: Vec::new(),
            buffer_at: 0,
            ready: VecDeque::new(),
        }
    }

    /// Returns another reader of the same log, for records after `after`.
    pub fn reopen_after(&self, after: u64) -> Self {
        let (storage, recent) = (self.storage.clone(), self.recent.clone());
        Self::new(storage, recent, self.state.clone(), after)
    }

    /// The commit position.
    pub fn durable(&self) -> u64 {
        self.state.borrow().sequence
    }

    /// Last record removed from the log's beginning, 0 while none is.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub fn removed_through(&self) -> Result<u64, ReadError> {
        Ok(scan::removed_through(&*self.storage)?)
    }

    /// Checks that the next record was not removed.
    ///
    /// # Errors
    /// The record was removed, or the storage cannot be read.
    pub fn check(&self) -> Result<(), ReadError> {
        let segments = self.storage.segments().map_err(JournalError::Io)?;
        Ok(scan::check_not_removed(
            &*self.storage,
            &segments,
            self.position,
        )?)
    }

    /// The next frame at or before the commit position, if there is one.
    ///
    /// # Errors
    /// The log is damaged, or the records after `after` were removed.
    pub fn try_next(&mut self) -> Result<Option<Frame>, ReadError> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                if frame.sequence > self.after {
                    self.position = frame.sequence - u64::from(!frame.unit_end);
                    return Ok(Some(frame));
                }
                continue;
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Waits for the next frame.
    ///
    /// # Errors
    /// The log is damaged, has failed, or was closed and is read to its end.
    pub async fn next(&mut self) -> Result<Frame, ReadError> {
        loop {
            if let Some(frame) = self.try_next()? {
                return Ok(frame);
            }
            if let Some(reason) = self.state.borrow_and_update().failed.clone() {
                return Err(JournalFailed(reason).into());
            }
            // Records may have become durable between `try_next` and `borrow_and_update`.
            if let Some(frame) = self.try_next()? {
                return Ok(frame);
            }
            self.state.changed().await.map_err(|_| ReadError::Closed)?;
        }
    }

    /// Parses more frames into `ready`; false at the commit position.
    fn fill(&mut self) -> Result<bool, ReadError> {
        let (segment, offset) = {
            let state = self.state.borrow();
            (state.segment, state.offset)
        };
        if self.segment == 0 {
            // A segment created ahead, or without durable data, is not the first one.
            self.segment = self.first_segment()?.unwrap_or(segment).min(segment);
        }
        loop {
            if self.segment > segment || (self.segment == segment && self.offset >= offset) {
                return Ok(false);
            }
            let mut limit = CHUNK_BYTES;
            if self.segment == segment {
                limit = limit.min(usize::try_from(offset - self.offset).unwrap_or(usize::MAX));
            }
            let (recent, into) = (&self.recent, &mut self.buffer);
            let is_in_memory = recent.read(self.segment, self.offset, limit, into);
            let count = match is_in_memory {
                true => Ok(self.buffer.len()),
                false => {
                    self.buffer.resize(limit, 0);
                    let into = &mut self.buffer;
                    self.storage.read(self.segment, self.offset, into)
                }
            };
            let count = match count {
                Ok(count) => count,
                Err(error) => {
                    // If the segment was removed, `check` fails when the next record is lost.
                    self.check()?;
                    if error.kind() != io::ErrorKind::NotFound || self.segment == segment {
                        return Err(JournalError::Io(error).into());
                    }
                    self.skip_removed_segment()?;
                    continue;
                }
            };
            self.buffer.truncate(count);
            self.buffer_at = 0;
            let from = self.offset;
            // The disk may have more of the segment than the copy in memory.
            let is_done = self.parse(count < limit && !is_in_memory)?;
            if self.segment == segment && self.offset == from {
                // Only marks and frames precede the commit position: the disk is damaged.
                return Err(self.hole());
            }
            if is_done && self.segment < segment {
                self.segment += 1;
                self.offset = 0;
                self.extent_end = 0;
            }
            if !self.ready.is_empty() {
                return Ok(true);
            }
        }
    }

    /// The segment that contains the record after `after`.
    fn first_segment(&self) -> Result<Option<u64>, JournalError> {
        loop {
            let segments = self.storage.segments()?;
            scan::check_not_removed(&*self.storage, &segments, self.after)?;
            match scan::segment_containing(&*self.storage, &segments, self.after) {
                // A segment was removed after the listing.
                Err(JournalError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                found => return found,
            }
        }
    }

    /// Continues after a segment that was removed after its last record was returned.
    fn skip_removed_segment(&mut self) -> Result<(), ReadError> {
        let next = match scan::first_mark(&*self.storage, self.segment + 1) {
            Err(JournalError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                // The next segment is gone as well, with records not returned.
                self.check()?;
                None
            }
            found => found?,
        };
        let Some(mark) = next.filter(|mark| mark.durable <= self.position) else {
            return Err(self.hole());
        };
        (self.segment, self.offset) = (self.segment + 1, 0);
        (self.extent_end, self.crc) = (0, Some(mark.prev));
        Ok(())
    }

    /// Parses frames from the buffer; true when the segment contains no more.
    fn parse(&mut self, is_last: bool) -> Result<bool, ReadError> {
        loop {
            let rest = &self.buffer[self.buffer_at..];
            let left = self.extent_end - self.offset;
            let is_mark_due = left == 0;
            if (1..frame::HEADER_BYTES as u64).contains(&left) {
                // Padding: too short for a header.
                self.skip(left);
                continue;
            }
            match frame::read(rest) {
                Found::Mark(mark) if is_mark_due => {
                    self.extent_end = self.offset + mark.extent.max(MARK_BYTES as u64);
                    self.skip(MARK_BYTES as u64);
                }
                Found::Frame(frame) if !is_mark_due => {
                    if self.crc.is_some_and(|crc| crc != frame.prev) {
                        return Err(JournalError::Chain {
                            file: self.storage.name(self.segment),
                            offset: self.offset,
                        }
                        .into());
                    }
                    self.crc = Some(frame.crc);
                    self.skip(frame::frame_bytes(frame.payload.len()) as u64);
                    self.ready.push_back(frame);
                }
                Found::End if is_mark_due => return Ok(true),
                Found::End => self.skip(left),
                // The rest comes with the next chunk, if there is one.
                Found::Short if is_mark_due || !is_last => return Ok(is_last),
                Found::Short if rest.iter().all(|byte| *byte == 0) => {
                    self.skip(left);
                    return Ok(true);
                }
                _ => return Err(self.hole()),
            }
        }
    }

    /// The error for a missing frame.
    fn hole(&self) -> ReadError {
        let last = self.ready.back();
        JournalError::Hole {
            file: self.storage.name(self.segment),
            offset: self.offset,
            sequence: last.map_or(self.position, |frame| frame.sequence),
        }
        .into()
    }

    fn skip(&mut self, bytes: u64) {
        self.offset += bytes;
        let at = self.buffer_at as u64 + bytes;
        self.buffer_at = usize::try_from(at)
            .unwrap_or(usize::MAX)
            .min(self.buffer.len());
    }
}
