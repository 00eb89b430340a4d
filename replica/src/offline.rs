//! Reads a journal from its files: replays it, and writes a checkpoint of a stopped node's, for a
//! faster start.

use journal::Snapshots;
use sequencer::inspect::{Folder, InspectError, Written};
use types::{NodeId, Sequence};

use crate::catch_up::ReplicaError;
use crate::effects::Applied;
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

/// The earliest state after which the journal still has every record. `None`: the records after the
/// beginning were removed, and no checkpoint replaces them. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub fn earliest_state(folder: &Folder, node: NodeId) -> Result<Option<State>, SnapshotError> {
    let limits = sequencer::limits();
    let removed = folder.removed_through()?;
    if removed == Sequence::ZERO {
        return Ok(Some(State::new(node, limits)));
    }
    let oldest = image::restore_oldest(&folder.snapshot_dir(), node, limits, removed);
    Ok(oldest.map_err(ReplicaError::from)?)
}

/// Applies the records after `state` through `until`. Passes the state after each record, and its
/// effects, to `visit`. Also for the journal of a running node, if `until` is durable. Blocks.
///
/// A journal that ends before `until` is no error: see [`State::sequence`].
///
/// # Errors
/// The journal is damaged, has other events than the state computes, or `visit` fails.
///
/// # Panics
/// As [`State::apply`].
pub fn replay(
    folder: &Folder,
    state: &mut State,
    until: Sequence,
    mut visit: impl FnMut(&State, Applied) -> Result<(), String>,
) -> Result<(), InspectError> {
    let first = state.sequence().next().get();
    let mut is_done = false;
    let read = folder.dump(first..=until.get(), |record| {
        let applied = state.apply(&record);
        visit(state, applied.map_err(|differs| differs.to_string())?)?;
        is_done = state.sequence() == until;
        match is_done {
            // What follows is not read: the end of a running node's journal may look damaged.
            true => Err(String::new()),
            false => Ok(()),
        }
    });
    match read {
        Err(_) if is_done => Ok(()),
        read => read.map(drop),
    }
}
