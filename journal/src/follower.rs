//! Reads the log of another process while that process writes it.
//!
//! Only marks show what is durable. A batch is returned once the mark after it exists, since that
//! mark was written when the batch was durable. The last batch of a log without a writer is
//! therefore not returned. A place without a whole mark is read again: it may be about to be
//! written, or be torn and rewritten by the next opening. It is damage only when later data shows
//! that it had been durable.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::frame::{self, Found, Frame, MARK_BYTES, Mark};
use crate::log::JournalError;
use crate::scan;
use crate::storage::Storage;

/// Returns the durable frames in log order.
///
/// When `try_next` returns `None`, the last frame returned was the end of a unit.
pub struct Follower {
    storage: Arc<dyn Storage>,
    /// Frames at or before this are not returned.
    after: u64,
    place: Option<Place>,
    ready: VecDeque<Frame>,
}

/// Position of the next batch, and the end of the previous one.
#[derive(Clone, Copy, Debug)]
struct Place {
    segment: u64,
    offset: u64,
    batch: u64,
    sequence: u64,
    crc: u32,
}

impl Place {
    /// True when `mark` is that of the next batch.
    fn continues(&self, mark: &Mark) -> bool {
        mark.batch == self.batch + 1 && mark.durable == self.sequence && mark.prev == self.crc
    }
}

impl Follower {
    /// Begins after record `after`. Reads nothing before the first call of [`Follower::try_next`].
    pub fn new(storage: Arc<dyn Storage>, after: u64) -> Self {
        Self {
            storage,
            after,
            place: None,
            ready: VecDeque::new(),
        }
    }

    /// The next frame that is certainly durable, if there is one yet.
    ///
    /// # Errors
    /// [`JournalError::Removed`] when the next record was removed; another error when the log is
    /// damaged or cannot be read.
    pub fn try_next(&mut self) -> Result<Option<Frame>, JournalError> {
        loop {
            while let Some(frame) = self.ready.pop_front() {
                if frame.sequence > self.after {
                    return Ok(Some(frame));
                }
            }
            if !self.fill().map_err(|error| self.removed_or(error))? {
                return Ok(None);
            }
        }
    }

    /// [`JournalError::Removed`] if the log was truncated past this reader, otherwise `error`.
    fn removed_or(&self, error: JournalError) -> JournalError {
        let place = self.place.map_or(self.after, |place| place.sequence);
        let is_missing = match &error {
            JournalError::Io(error) => error.kind() == io::ErrorKind::NotFound,
            JournalError::Hole { .. } => true,
            _ => false,
        };
        if !is_missing {
            return error;
        }
        let segments = self.storage.segments().map_err(JournalError::Io);
        let checked = segments.and_then(|all| scan::check_not_removed(&*self.storage, &all, place));
        checked.err().unwrap_or(error)
    }

    /// Parses the next batch into `ready`; false when none is certainly durable.
    fn fill(&mut self) -> Result<bool, JournalError> {
        let Some(place) = self.locate()? else {
            return Ok(false);
        };
        if let Some(next) = self.read_batch(place)? {
            self.place = Some(next);
            return Ok(true);
        }
        // Later data shows that the batch is durable. It may have become so since the first read.
        if !self.is_passed(place)? {
            return Ok(false);
        }
        match self.read_batch(place)? {
            Some(next) => {
                self.place = Some(next);
                Ok(true)
            }
            None => Err(self.hole(place)),
        }
    }

    /// The place of the next batch; found in the log on the first call.
    fn locate(&mut self) -> Result<Option<Place>, JournalError> {
        if self.place.is_none() {
            let segments = self.storage.segments()?;
            scan::check_not_removed(&*self.storage, &segments, self.after)?;
            let Some(segment) = scan::segment_containing(&*self.storage, &segments, self.after)?
            else {
                return Ok(None);
            };
            let (batch, sequence, crc) = match self.mark(segment, 0)? {
                Some(mark) => (mark.batch.saturating_sub(1), mark.durable, mark.prev),
                None if segment == 1 => (0, 0, 0),
                None => return Ok(None),
            };
            self.place = Some(Place {
                segment,
                offset: 0,
                batch,
                sequence,
                crc,
            });
        }
        Ok(self.place)
    }

    /// Reads the batch at `place` if the mark after it exists; returns the place of that mark.
    fn read_batch(&mut self, place: Place) -> Result<Option<Place>, JournalError> {
        let mut at = place;
        // The segment may have been removed after its last batch was returned.
        let mut mark = self.mark_if_exists(at.segment, at.offset)?;
        if !mark.is_some_and(|mark| place.continues(&mark)) {
            // The batch is in the next segment if it did not fit, or if a torn end was abandoned.
            (at.segment, at.offset) = (place.segment + 1, 0);
            mark = self.mark_if_exists(at.segment, 0)?;
        }
        let Some(mark) = mark.filter(|mark| place.continues(mark)) else {
            return Ok(None);
        };
        let after_batch = (at.segment, at.offset + mark.extent.max(MARK_BYTES as u64));
        for (segment, offset) in [after_batch, (at.segment + 1, 0)] {
            let next = match offset {
                0 => self.mark_if_exists(segment, 0)?,
                offset => self.mark(segment, offset)?,
            };
            let follows = |next: &Mark| {
                next.batch == mark.batch + 1 && (place.sequence..=mark.last).contains(&next.durable)
            };
            if let Some(next) = next.filter(follows) {
                self.read_frames(at, &mark, next.durable, next.prev)?;
                return Ok(Some(Place {
                    segment,
                    offset,
                    batch: mark.batch,
                    sequence: next.durable,
                    crc: next.prev,
                }));
            }
        }
        Ok(None)
    }

    /// Reads the frames of a batch up to record `through`, whose checksum is `crc`.
    fn read_frames(
        &mut self,
        at: Place,
        mark: &Mark,
        through: u64,
        crc: u32,
    ) -> Result<(), JournalError> {
        let bytes = mark.extent.saturating_sub(MARK_BYTES as u64);
        let mut bytes = vec![0; usize::try_from(bytes).unwrap_or(0)];
        let start = at.offset + MARK_BYTES as u64;
        let count = self.storage.read(at.segment, start, &mut bytes)?;
        let (mut done, mut chain, mut sequence) = (0, at.crc, at.sequence);
        let mut frames = VecDeque::new();
        let mut is_unit_end = true;
        while sequence < through || !is_unit_end {
            let place = Place {
                offset: start + done as u64,
                sequence,
                ..at
            };
            match frame::read(&bytes[done..count]) {
                Found::Frame(frame) if frame.prev == chain => {
                    done += frame::frame_bytes(frame.payload.len());
                    (chain, sequence, is_unit_end) = (frame.crc, frame.sequence, frame.unit_end);
                    frames.push_back(frame);
                }
                _ => return Err(self.hole(place)),
            }
        }
        if chain != crc {
            return Err(JournalError::Chain {
                file: self.storage.name(at.segment),
                offset: start + done as u64,
            });
        }
        self.ready.append(&mut frames);
        Ok(())
    }

    /// True when a later segment begins with a batch that proves the next two to be durable.
    ///
    /// # Errors
    /// [`JournalError::Removed`] when the segment was removed before its records were returned.
    fn is_passed(&self, place: Place) -> Result<bool, JournalError> {
        let segments = self.storage.segments()?;
        if !segments.contains(&place.segment) {
            scan::check_not_removed(&*self.storage, &segments, place.sequence)?;
        }
        for segment in segments {
            if segment > place.segment
                && let Some(mark) = self.mark_if_exists(segment, 0)?
                && mark.batch > place.batch + 2
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The mark at a place, if there is a whole one.
    fn mark(&self, segment: u64, offset: u64) -> Result<Option<Mark>, JournalError> {
        let mut bytes = [0; MARK_BYTES];
        let count = self.storage.read(segment, offset, &mut bytes)?;
        if let Some(version) = frame::complete_frame_version(&bytes[..count]) {
            return Err(JournalError::Version {
                file: self.storage.name(segment),
                version,
            });
        }
        Ok(match frame::read(&bytes[..count]) {
            Found::Mark(mark) => Some(mark),
            _ => None,
        })
    }

    /// As [`Follower::mark`], for a segment that may not exist yet or any more.
    fn mark_if_exists(&self, segment: u64, offset: u64) -> Result<Option<Mark>, JournalError> {
        match self.mark(segment, offset) {
            Err(JournalError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found,
        }
    }

    fn hole(&self, place: Place) -> JournalError {
        JournalError::Hole {
            file: self.storage.name(place.segment),
            offset: place.offset,
            sequence: place.sequence,
        }
    }
}
