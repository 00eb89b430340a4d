//! A replica that lives for a while: it begins at a checkpoint and reads on from the files, for a
//! follower that is behind what the live one keeps in memory, or for a look at the past.

use sequencer::{CheckpointError, ReadError, Reader};
use types::Sequence;

use crate::facts::Applied;
use crate::state::{Differs, State};

/// Why the journal cannot be followed.
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
    /// There is no file descriptor at the moment: the same may be tried again.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Read(error) => error.is_transient(),
            Self::Checkpoint(error) => error.is_transient(),
            Self::Differs(_) | Self::Ended(_) => false,
        }
    }

    /// What is looked for has left the journal.
    pub fn is_removed(&self) -> bool {
        matches!(self, Self::Read(error) if error.is_removed())
    }
}

/// A state and where it goes on. Every call blocks.
pub struct CatchUp {
    state: State,
    reader: Reader,
}

impl CatchUp {
    /// From `state` with any reader of its journal.
    pub fn new(state: State, reader: &Reader) -> Self {
        let reader = reader.again(state.sequence());
        Self { state, reader }
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// The next record at or before the commit position, if there is one.
    ///
    /// # Errors
    /// As [`ReplicaError`] says; after [`ReplicaError::Differs`] the state is of no use.
    pub fn step(&mut self) -> Result<Option<Applied>, ReplicaError> {
        match self.reader.try_next()? {
            Some(record) => Ok(Some(self.state.apply(&record)?)),
            None => Ok(None),
        }
    }

    /// Follows up to `until`, or to the commit position where that comes first; gives the sequence reached.
    ///
    /// # Errors
    /// As [`CatchUp::step`].
    pub fn run_to(&mut self, until: Sequence) -> Result<Sequence, ReplicaError> {
        while self.state.sequence() < until && self.step()?.is_some() {}
        Ok(self.state.sequence())
    }
}
