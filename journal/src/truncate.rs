//! Truncation of the log's beginning.
//!
//! Whole segments are removed, oldest first. Each removal is durable before the next one starts, so
//! a crash leaves no gap. The segment with the commit position and all later ones stay: the first
//! mark of the log shows where it begins.

use std::sync::Arc;

use tokio::sync::watch;

use crate::log::{JournalError, State};
use crate::scan;
use crate::storage::Storage;

/// Removes segments from the beginning of an open log.
pub struct SegmentTruncator {
    storage: Arc<dyn Storage>,
    state: watch::Receiver<State>,
}

impl SegmentTruncator {
    pub(crate) fn new(storage: Arc<dyn Storage>, state: watch::Receiver<State>) -> Self {
        Self { storage, state }
    }

    /// Last record removed; 0 if none was.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub fn removed_through(&self) -> Result<u64, JournalError> {
        scan::removed_through(&*self.storage)
    }

    /// Last record that can be removed while at least `bytes` of the log stay.
    ///
    /// Equals [`SegmentTruncator::removed_through`] if no segment can be removed.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub fn removable_above_bytes(&self, bytes: u64) -> Result<u64, JournalError> {
        let mut left = self.state.borrow().offset;
        for segment in self.durable_segments()?.into_iter().rev() {
            if left >= bytes {
                return self.last_record(segment);
            }
            left = left.saturating_add(self.storage.size(segment)?);
        }
        self.removed_through()
    }

    /// Last record that can be removed if records at or before `through` are not needed.
    ///
    /// Equals [`SegmentTruncator::removed_through`] if no segment can be removed.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub fn removable_through(&self, through: u64) -> Result<u64, JournalError> {
        let mut last_removable = self.removed_through()?;
        for segment in self.durable_segments()? {
            let last = self.last_record(segment)?;
            if last > through {
                break;
            }
            last_removable = last;
        }
        Ok(last_removable)
    }

    /// Removes the segments without a record after `through`; returns their number.
    ///
    /// # Errors
    /// A segment cannot be removed: it and all later ones stay.
    pub fn remove(&self, through: u64) -> Result<usize, JournalError> {
        let mut count = 0;
        for segment in self.durable_segments()? {
            if self.last_record(segment)? > through {
                break;
            }
            self.storage.remove(segment)?;
            count += 1;
        }
        Ok(count)
    }

    /// Segments before the one with the commit position, ascending. They are durable.
    fn durable_segments(&self) -> Result<Vec<u64>, JournalError> {
        let (commit, offset) = {
            let state = self.state.borrow();
            (state.segment, state.offset)
        };
        let mut segments = self.storage.segments()?;
        // At offset 0 the first mark of the segment with the commit position is not durable.
        segments.retain(|segment| *segment < commit && offset > 0);
        Ok(segments)
    }

    /// Last record of a segment, read from the first mark of the next one.
    fn last_record(&self, segment: u64) -> Result<u64, JournalError> {
        match scan::first_mark(&*self.storage, segment + 1)? {
            Some(mark) => Ok(mark.durable),
            None => Err(JournalError::Hole {
                file: self.storage.name(segment + 1),
                offset: 0,
                sequence: 0,
            }),
        }
    }
}
