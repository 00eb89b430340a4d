//! Truncation of the log's beginning.
//!
//! Whole segments are removed, oldest first, each durably before the next: after a crash in between
//! the log has no gap. The segment with the commit position and all later ones stay, so that the
//! log always has a mark that says where it begins.

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

    /// Last record removed, 0 while the log is whole.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub fn removed_through(&self) -> Result<u64, JournalError> {
        scan::removed_through(&*self.storage)
    }

    /// Last record of the segments removable so that at least `bytes` of the log are left.
    ///
    /// That of [`SegmentTruncator::removed_through`] when none is removable.
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

    /// Last record of the segments removable when records at or before `through` are not needed.
    ///
    /// That of [`SegmentTruncator::removed_through`] when none is removable.
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

    /// Segments before the one with the commit position, ascending: full and durable.
    fn durable_segments(&self) -> Result<Vec<u64>, JournalError> {
        let (commit, offset) = {
            let state = self.state.borrow();
            (state.segment, state.offset)
        };
        let mut segments = self.storage.segments()?;
        // While it contains nothing durable, its own mark may be missing after a crash.
        segments.retain(|segment| *segment < commit && offset > 0);
        Ok(segments)
    }

    /// Last record of a segment that another one follows.
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
