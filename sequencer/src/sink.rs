//! Sink for complete records: the journal, or none.

use journal::{Appender, Room};
use types::{Envelope, EventEnvelope};

use crate::record;

/// Where complete records go.
pub(crate) enum JournalSink {
    File(Appender),
    /// No journal: for benchmarks and simulation only.
    Null,
}

impl JournalSink {
    /// Buffers a command and its events for [`JournalSink::flush`]; returns their size in bytes.
    pub fn append(&mut self, command: &Envelope, events: &[EventEnvelope]) -> usize {
        let Self::File(appender) = self else {
            return 0;
        };
        let before = appender.local_bytes();
        record::append(appender, command, events);
        appender.local_bytes() - before
    }

    /// Hands the buffer to the journal's writer. Never waits: while the writer swaps buffers it
    /// does nothing, and the next iteration retries. With `is_busy`, a small buffer stays while
    /// other records wait for the writer.
    pub fn flush(&mut self, is_busy: bool) {
        match self {
            Self::File(appender) if is_busy => appender.flush_batch(),
            Self::File(appender) => {
                let _ = appender.try_flush();
            }
            Self::Null => {}
        }
    }

    /// True when the buffer is empty.
    pub fn is_handed_over(&self) -> bool {
        !matches!(self, Self::File(appender) if appender.has_local())
    }

    /// True when no record waits for the disk.
    pub fn is_durable(&self) -> bool {
        !matches!(self, Self::File(appender) if !appender.is_durable())
    }

    /// Hands the buffer to the journal's writer, and waits for that. Called at the end.
    pub fn finish(&mut self) {
        if let Self::File(appender) = self {
            appender.flush();
        }
    }

    /// Room in the journal's buffer. While the journal has no next segment at present, only the
    /// reserve is left.
    #[inline]
    pub fn room(&self) -> Room {
        match self {
            Self::File(appender) => match appender.room() {
                Room::Free if appender.is_stalled() => Room::Reserve,
                room => room,
            },
            Self::Null => Room::Free,
        }
    }

    /// True when the journal has failed: no record can be written any more.
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::File(appender) if appender.is_failed())
    }
}
