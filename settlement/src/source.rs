//! Where records come from: the tail of the running journal, or a recording of one.

use async_trait::async_trait;
use types::{Envelope, EventEnvelope, Sequence};

/// A command with all its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
}

/// The journal cannot be read on.
#[derive(Debug, thiserror::Error)]
#[error("journal cannot be read: {reason}")]
pub struct SourceError {
    pub reason: String,
    /// For want of a file descriptor: nothing was lost, the same call may be made again.
    pub is_transient: bool,
}

impl From<sequencer::ReadError> for SourceError {
    fn from(error: sequencer::ReadError) -> Self {
        Self {
            reason: error.to_string(),
            is_transient: error.is_transient(),
        }
    }
}

/// Records in sequence, from the first one unless told otherwise, never past the commit position.
#[async_trait]
pub trait Source: Send + Sync {
    /// Begins behind `after`: before anything was read.
    fn begin_behind(&mut self, after: Sequence);

    /// Last record that was removed from its beginning.
    fn removed_through(&self) -> Result<Sequence, SourceError>;

    /// Last record that is there, as far as one can tell.
    fn end(&self) -> Sequence;

    /// The next record, without waiting.
    fn try_next(&mut self) -> Result<Option<Record>, SourceError>;

    /// Waits for the next record. Cancel safe.
    async fn next(&mut self) -> Result<Record, SourceError>;

    /// Durable bytes not read yet.
    fn bytes_behind(&self) -> u64;
}

#[async_trait]
impl Source for sequencer::Reader {
    fn begin_behind(&mut self, after: Sequence) {
        *self = self.again(after);
    }

    fn removed_through(&self) -> Result<Sequence, SourceError> {
        Ok(self.removed_through()?)
    }

    fn end(&self) -> Sequence {
        self.end()
    }

    fn try_next(&mut self) -> Result<Option<Record>, SourceError> {
        Ok(self.try_next()?.map(Record::from))
    }

    async fn next(&mut self) -> Result<Record, SourceError> {
        Ok(self.next().await?.into())
    }

    fn bytes_behind(&self) -> u64 {
        self.bytes_behind()
    }
}

impl From<sequencer::Record> for Record {
    fn from(record: sequencer::Record) -> Self {
        Self {
            command: record.command,
            events: record.events,
        }
    }
}

/// A recording that may still grow: whoever holds the sender adds to it.
pub struct Recorded {
    records: tokio::sync::mpsc::UnboundedReceiver<Record>,
    /// Last record before its beginning.
    removed: Sequence,
    after: Sequence,
}

impl Recorded {
    pub fn new() -> (tokio::sync::mpsc::UnboundedSender<Record>, Self) {
        Self::behind(Sequence::ZERO)
    }

    /// One that begins behind record `removed`.
    pub fn behind(removed: Sequence) -> (tokio::sync::mpsc::UnboundedSender<Record>, Self) {
        let (sender, records) = tokio::sync::mpsc::unbounded_channel();
        let recorded = Self {
            records,
            removed,
            after: removed,
        };
        (sender, recorded)
    }
}

#[async_trait]
impl Source for Recorded {
    fn begin_behind(&mut self, after: Sequence) {
        self.after = after;
    }

    fn removed_through(&self) -> Result<Sequence, SourceError> {
        Ok(self.removed)
    }

    /// It may still grow.
    fn end(&self) -> Sequence {
        Sequence(u64::MAX)
    }

    fn try_next(&mut self) -> Result<Option<Record>, SourceError> {
        while let Ok(record) = self.records.try_recv() {
            if record.command.sequence > self.after {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// Waits for ever once the recording has ended.
    async fn next(&mut self) -> Result<Record, SourceError> {
        while let Some(record) = self.records.recv().await {
            if record.command.sequence > self.after {
                return Ok(record);
            }
        }
        std::future::pending().await
    }

    fn bytes_behind(&self) -> u64 {
        (self.records.len() * 256) as u64
    }
}
