//! A reader of the journal that waits while the process is out of file descriptors: its part fails in the health
//! read meanwhile and recovers with the first read that works.

use std::time::Duration;

use rpc::Health;
use sequencer::{ReadError, Reader, Record};

/// Pause before a read that found no file descriptor is tried again.
const RETRY: Duration = Duration::from_millis(250);

pub struct Follower {
    reader: Reader,
    health: Health,
    part: &'static str,
    is_failing: bool,
}

impl Follower {
    /// `part` is the reader's name in the health read.
    pub fn new(reader: Reader, health: Health, part: &'static str) -> Self {
        Self {
            reader,
            health,
            part,
            is_failing: false,
        }
    }

    /// Waits for the next record. Cancel safe.
    pub async fn next(&mut self) -> Result<Record, ReadError> {
        loop {
            match self.reader.try_next() {
                Err(error) if error.is_transient() => {
                    self.is_failing = true;
                    self.health.set_failing(self.part, error.to_string());
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
                read => {
                    // Also without a record: the next one may be long in coming.
                    if std::mem::take(&mut self.is_failing) {
                        self.health.set_ok(self.part);
                    }
                    if let Some(record) = read? {
                        return Ok(record);
                    }
                }
            }
            match self.reader.next().await {
                Err(error) if error.is_transient() => {}
                read => return read,
            }
        }
    }

    /// The next record if it can be read now.
    pub fn try_next(&mut self) -> Result<Option<Record>, ReadError> {
        match self.reader.try_next() {
            Err(error) if error.is_transient() => Ok(None),
            read => read,
        }
    }
}
