//! Complete records up to the commit position.

use types::Sequence;

use crate::record::{Record, RecordBuilder};

/// Why a reader cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Journal(#[from] journal::reader::ReadError),
    #[error("journal record {sequence}: {reason}")]
    Record { sequence: u64, reason: String },
}

impl ReadError {
    /// True when the journal was truncated past the next record.
    pub fn is_truncated(&self) -> bool {
        use journal::reader::ReadError as Frames;
        matches!(
            self,
            Self::Journal(Frames::Log(journal::JournalError::Removed { .. }))
        )
    }

    /// True when the process is out of file descriptors. The call may be retried without loss.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Journal(error) if error.is_transient())
    }
}

/// Tails the journal record by record.
pub struct Reader {
    frames: journal::Reader,
    records: RecordBuilder,
}

impl Reader {
    /// Reads the records of any log.
    pub fn new(frames: journal::Reader) -> Self {
        Self {
            frames,
            records: RecordBuilder::default(),
        }
    }

    /// Returns another reader of the same journal, for records after `after`.
    pub fn reopen_after(&self, after: Sequence) -> Self {
        Self::new(self.frames.reopen_after(after.get()))
    }

    /// Last record that is durable.
    pub fn end(&self) -> Sequence {
        Sequence(self.frames.durable())
    }

    /// Last record removed from the journal's beginning; [`Sequence::ZERO`] if none was.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn removed_through(&self) -> Result<Sequence, ReadError> {
        Ok(Sequence(self.frames.removed_through()?))
    }

    /// Checks that the next record was not removed.
    ///
    /// # Errors
    /// The record was removed, or the journal cannot be read.
    pub fn check(&self) -> Result<(), ReadError> {
        Ok(self.frames.check()?)
    }

    /// The next record at or before the commit position, if there is one.
    pub fn try_next(&mut self) -> Result<Option<Record>, ReadError> {
        while let Some(frame) = self.frames.try_next()? {
            if let Some(record) = self.add(&frame)? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// Waits for the next record. Cancel safe.
    pub async fn next(&mut self) -> Result<Record, ReadError> {
        loop {
            let frame = self.frames.next().await?;
            if let Some(record) = self.add(&frame)? {
                return Ok(record);
            }
        }
    }

    fn add(&mut self, frame: &journal::Frame) -> Result<Option<Record>, ReadError> {
        let added = self.records.add(frame);
        added
            .map(|record| record.map(Record::take))
            .map_err(|reason| ReadError::Record {
                sequence: frame.sequence,
                reason,
            })
    }
}
