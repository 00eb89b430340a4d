//! A temporary replica: starts from a checkpoint and reads the journal's files.
//!
//! For a follower whose records are no longer in memory, or for reads of past states.

use sequencer::{CheckpointError, ReadError, Reader};
use types::Sequence;

use crate::effects::Applied;
use crate::state::{Differs, State};

/// Why a replica or a follower cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Differs(#[from] Differs),
    #[error("{0}")]
    Ended(String),
}

impl ReplicaError {
    /// True when the process is out of file descriptors. The call may be retried.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Read(error) => error.is_transient(),
            Self::Checkpoint(error) => error.is_transient(),
            Self::Differs(_) | Self::Ended(_) => false,
        }
    }

    /// True when the journal was truncated past the next record.
    pub fn is_truncated(&self) -> bool {
        matches!(self, Self::Read(error) if error.is_truncated())
    }
}

/// A state and the reader that continues it. Its calls block.
pub struct CatchUp {
    state: State,
    reader: Reader,
}

impl CatchUp {
    /// Starts at `state`, with a new reader of the same journal as `reader`.
    pub fn new(state: State, reader: &Reader) -> Self {
        let reader = reader.reopen_after(state.sequence());
        Self { state, reader }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// Applies the next record and returns its effects; `None` at the commit position.
    ///
    /// # Errors
    /// [`ReplicaError`]; after [`ReplicaError::Differs`] the state must be discarded.
    pub fn apply_next(&mut self) -> Result<Option<Applied>, ReplicaError> {
        match self.reader.try_next()? {
            Some(record) => Ok(Some(self.state.apply(&record)?)),
            None => Ok(None),
        }
    }

    /// Applies records up to `until` or the commit position; returns the sequence reached.
    ///
    /// # Errors
    /// As [`CatchUp::apply_next`].
    pub fn run_to(&mut self, until: Sequence) -> Result<Sequence, ReplicaError> {
        while self.state.sequence() < until && self.apply_next()?.is_some() {}
        Ok(self.state.sequence())
    }
}
