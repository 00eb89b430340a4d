//! Reasons why a worker ends: shutdown or a failure.

use replica::ReplicaError;
use types::Sequence;

use crate::saga::UnexpectedResult;

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Halt {
    #[error("shutting down")]
    Stopped,
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    #[error("batch {0}: {1}")]
    Saga(String, UnexpectedResult),
    #[error("stored batch {0} is unreadable")]
    Request(String),
    #[error("batch {0}: stored trades are unreadable")]
    Legs(String),
    #[error("{0}")]
    Panic(tokio::task::JoinError),
    #[error(
        "the ledger is at {ledger}, before every checkpoint that the journal continues: {reason}; \
         the ledger may be an older copy: \
         restore ledger, settlement and journal from the same point in time"
    )]
    Behind { ledger: Sequence, reason: String },
    #[error(
        "sealed batch {batch} settles records up to {last}, \
         but the journal ends at {journal}: a journal was lost"
    )]
    Unjournalled {
        batch: String,
        last: Sequence,
        journal: Sequence,
    },
    #[error("the journal ends at {journal}, but the ledger is at {ledger}: a journal was lost")]
    JournalLost { journal: Sequence, ledger: Sequence },
}

impl Halt {
    /// Converts an error of following the replica: [`Self::Behind`] if the journal was
    /// truncated past the ledger's position.
    pub(super) fn following(error: ReplicaError, ledger: Sequence) -> Self {
        if !error.is_truncated() {
            return error.into();
        }
        Self::Behind {
            ledger,
            reason: error.to_string(),
        }
    }
}
