//! Reads the log from behind the writer, never past the commit position.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::watch;

use crate::frame::{self, Found, Frame};
use crate::log::{JournalError, JournalFailed, State};
use crate::storage::Storage;

/// Bytes taken from the disk at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Tails the log. Frames come in log order; at the commit position the last frame given is always the end of a unit.
pub struct Reader {
    storage: Arc<dyn Storage>,
    state: watch::Receiver<State>,
    after: u64,
    segment: u64,
    offset: u64,
    buffer: Vec<u8>,
    buffer_at: usize,
    ready: VecDeque<Frame>,
}

/// Why a reader cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Log(#[from] JournalError),
    #[error(transparent)]
    Failed(#[from] JournalFailed),
    #[error("the journal was closed")]
    Closed,
}

impl Reader {
    pub(crate) fn new(
        storage: Arc<dyn Storage>,
        state: watch::Receiver<State>,
        after: u64,
    ) -> Self {
        Self {
            storage,
            state,
            after,
            segment: 0,
            offset: 0,
            buffer: Vec::new(),
            buffer_at: 0,
            ready: VecDeque::new(),
        }
    }

    /// Another reader of the same log, behind `after`.
    pub fn again(&self, after: u64) -> Self {
        Self::new(self.storage.clone(), self.state.clone(), after)
    }

    /// The next frame at or before the commit position, if there is one.
    pub fn try_next(&mut self) -> Result<Option<Frame>, ReadError> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                if frame.sequence > self.after {
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
    /// The log is damaged, has failed, or was closed and everything of it has been read.
    pub async fn next(&mut self) -> Result<Frame, ReadError> {
        loop {
            if let Some(frame) = self.try_next()? {
                return Ok(frame);
            }
            if let Some(reason) = self.state.borrow_and_update().failed.clone() {
                return Err(JournalFailed(reason).into());
            }
            // Between the look and the mark something may have become durable.
            if let Some(frame) = self.try_next()? {
                return Ok(frame);
            }
            self.state.changed().await.map_err(|_| ReadError::Closed)?;
        }
    }

    /// Durable bytes not read yet, but for the chunk at hand. Every segment before the last counts as full, whatever was left unused of it.
    pub fn bytes_behind(&self) -> u64 {
        let state = self.state.borrow();
        let ahead = state.segment.saturating_sub(self.segment.max(1));
        (ahead * state.segment_bytes + state.offset).saturating_sub(self.offset)
    }

    /// Parses more frames into `ready`; false at the commit position.
    fn fill(&mut self) -> Result<bool, ReadError> {
        let (segment, offset) = {
            let state = self.state.borrow();
            (state.segment, state.offset)
        };
        if self.segment == 0 {
            self.segment = self
                .storage
                .segments()
                .map_err(JournalError::Io)?
                .first()
                .copied()
                .unwrap_or(segment);
        }
        loop {
            if self.segment > segment || (self.segment == segment && self.offset >= offset) {
                return Ok(false);
            }
            let mut limit = CHUNK_BYTES;
            if self.segment == segment {
                limit = limit.min(usize::try_from(offset - self.offset).unwrap_or(usize::MAX));
            }
            self.buffer.resize(limit, 0);
            let count = self
                .storage
                .read(self.segment, self.offset, &mut self.buffer)
                .map_err(JournalError::Io)?;
            self.buffer.truncate(count);
            self.buffer_at = 0;
            if self.parse()? {
                return Ok(true);
            }
            // Zeros to the end of a segment that has a successor.
            self.segment += 1;
            self.offset = 0;
        }
    }

    fn parse(&mut self) -> Result<bool, ReadError> {
        let mut any = false;
        loop {
            match frame::read(&self.buffer[self.buffer_at..]) {
                Found::Frame(frame) => {
                    let bytes = frame::frame_bytes(frame.payload.len());
                    self.buffer_at += bytes;
                    self.offset += bytes as u64;
                    self.ready.push_back(frame);
                    any = true;
                }
                Found::End => return Ok(any),
                // The chunk ends inside a frame: the rest comes with the next chunk.
                Found::Damaged if any || self.buffer_at > 0 => return Ok(any),
                Found::Damaged => {
                    return Err(JournalError::Hole {
                        file: self.storage.name(self.segment),
                        offset: self.offset,
                    }
                    .into());
                }
            }
        }
    }
}
