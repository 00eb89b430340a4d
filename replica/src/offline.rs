//! Writes a checkpoint of a stopped node's journal, for a faster start.

use journal::Snapshots;
use sequencer::inspect::{Folder, InspectError, Written};
use types::{NodeId, Sequence};

use crate::catch_up::ReplicaError;
use crate::image;
use crate::state::State;

/// Why no checkpoint was written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Journal(#[from] InspectError),
    #[error(transparent)]
    State(#[from] ReplicaError),
    #[error("cannot write the checkpoint: {0}")]
    Write(String),
}

/// Writes a checkpoint of the state after command `until`, or at the end; removes none.
///
/// Fails while a node uses the folder.
///
/// # Errors
/// No journal, a damaged one, one that ends before `until`, or a folder that cannot be written.
pub fn snapshot(
    folder: &Folder,
    node: NodeId,
    until: Option<Sequence>,
) -> Result<Written, SnapshotError> {
    let _lock = folder.lock()?;
    let limits = sequencer::limits();
    let last = until.unwrap_or(Sequence(u64::MAX));
    // From the first record, if it exists, so that every event is compared.
    let mut state = match folder.removed_through()? {
        Sequence::ZERO => State::new(node, limits),
        _ => image::restore_newest(&folder.snapshot_dir(), node, limits, last, |_| true)
            .map_err(ReplicaError::from)?,
    };
    let after = state.sequence();
    let end = folder.dump(after.next().get()..=last.get(), |record| {
        let applied = state.apply(&record);
        applied.map(drop).map_err(|differs| differs.to_string())
    })?;
    if let Some(until) = until.filter(|until| state.sequence() < *until) {
        return Err(InspectError::Beyond { until, end }.into());
    }
    let (sequence, state_hash) = (state.sequence().get(), state.core().state_hash());
    let bytes = state.checkpoint().encode();
    let bytes = bytes.map_err(|error| SnapshotError::Write(error.to_string()))?;
    Snapshots::new(&folder.snapshot_dir())
        .write(sequence, &bytes)
        .map_err(|error| SnapshotError::Write(error.to_string()))?;
    Ok(Written {
        sequence,
        state_hash: format!("{state_hash:016x}"),
        bytes: bytes.len(),
    })
}
