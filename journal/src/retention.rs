//! What of the log may go: segments that no snapshot, no reader and no recovery needs.

use crate::log::JournalError;
use crate::snapshot::Snapshots;
use crate::storage::Storage;
use crate::survey;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Good snapshots that must be there before anything goes: the log is removed behind the oldest of them, so that a damaged one costs time alone.
    pub snapshots_min: usize,
    /// Segments kept although nothing needs them, for audits.
    pub segments_kept: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            snapshots_min: 2,
            segments_kept: 0,
        }
    }
}

/// Sequence of the oldest good snapshot; `None` when there are too few.
pub(crate) fn oldest(
    snapshots: &Snapshots,
    retention: Retention,
) -> Result<Option<u64>, JournalError> {
    let good = snapshots.good()?;
    Ok(if good.len() < retention.snapshots_min.max(1) {
        None
    } else {
        good.first().copied()
    })
}

/// Removes segments whose records all stand at or before `through`, oldest first, so that a crash in between leaves no gap. Gives their numbers.
pub(crate) fn remove(
    storage: &dyn Storage,
    through: u64,
    retention: Retention,
) -> Result<Vec<u64>, JournalError> {
    let mut removable = Vec::new();
    for pair in storage.segments()?.windows(2) {
        // A segment is done with when the next one begins at or before the bound.
        match survey::first_mark(storage, pair[1])? {
            Some(mark) if mark.durable <= through => removable.push(pair[0]),
            _ => break,
        }
    }
    removable.truncate(removable.len().saturating_sub(retention.segments_kept));
    for segment in &removable {
        storage.remove(*segment)?;
    }
    Ok(removable)
}
