//! What the hot thread leaves behind: a journal, or nothing.

use journal::Appender;
use types::{Envelope, EventEnvelope};

use crate::record;

/// Where complete records go.
pub(crate) enum Keep {
    Journal(Appender),
    /// A node that is gone when it stops: measurements, simulations.
    Nothing,
}

impl Keep {
    /// Adds a command and its events to what [`Keep::flush`] hands over; how many bytes they take.
    pub fn append(&mut self, command: &Envelope, events: &[EventEnvelope]) -> usize {
        let Self::Journal(appender) = self else {
            return 0;
        };
        let before = appender.local_bytes();
        record::append(appender, command, events);
        appender.local_bytes() - before
    }

    /// Hands over what was added, unless the writer is just taking something: then false, and it is tried again
    /// in the next turn. Never waits.
    pub fn flush(&mut self) -> bool {
        match self {
            Self::Journal(appender) => appender.try_flush(),
            Self::Nothing => true,
        }
    }

    /// Nothing waits here for its hand-over.
    pub fn is_handed_over(&self) -> bool {
        !matches!(self, Self::Journal(appender) if appender.has_local())
    }

    /// Hands over what is left, at the end.
    pub fn finish(&mut self) {
        if let Self::Journal(appender) = self {
            appender.flush();
        }
    }

    /// The disk is behind by more than the bound.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Journal(appender) if appender.is_full())
    }

    /// The disk has no room at the moment: what is appended waits in memory.
    pub fn is_stalled(&self) -> bool {
        matches!(self, Self::Journal(appender) if appender.is_stalled())
    }

    /// Nothing more can be kept.
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Journal(appender) if appender.is_failed())
    }
}
