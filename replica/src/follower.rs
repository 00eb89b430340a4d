//! One subscriber's way through the journal: out of the live replica's memory while it keeps up,
//! through a replica of its own from the files when it does not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinHandle;
use types::Sequence;

use crate::catch_up::{CatchUp, ReplicaError};
use crate::facts::Batch;
use crate::hub::Attached;
use crate::live::Shared;
use crate::names::Names;

/// Records that a catching up follower is given at once.
const BATCH_RECORDS: usize = 256;
/// Pause before a read that found no file descriptor is tried again.
const RETRY: Duration = Duration::from_millis(250);

/// A subscriber. It never slows the replica down, whatever it does with its time.
pub struct Follower {
    shared: Arc<Shared>,
    name: &'static str,
    position: Sequence,
    source: Source,
    /// Read from files, and given once the live replica has it too: until then it knows no names for it.
    read_ahead: Option<Batch>,
}

enum Source {
    Live {
        backlog: VecDeque<Batch>,
        queue: Receiver<Batch>,
    },
    Detached,
    CatchingUp(JoinHandle<Round>),
}

/// A temporary replica in its turn.
pub(crate) struct Own {
    pub catch_up: CatchUp,
    /// Its turn, for as long as it lives.
    pub _permit: OwnedSemaphorePermit,
}

/// What came of reading a batch from files: who goes on, and what there was.
type Round = (Option<Own>, Result<Option<Batch>, ReplicaError>);

impl From<Attached> for Source {
    fn from(attached: Attached) -> Self {
        Self::Live {
            backlog: attached.backlog,
            queue: attached.queue,
        }
    }
}

impl Follower {
    pub(crate) fn detached(shared: Arc<Shared>, name: &'static str, position: Sequence) -> Self {
        Self {
            shared,
            name,
            position,
            source: Source::Detached,
            read_ahead: None,
        }
    }

    pub(crate) fn attached(
        shared: Arc<Shared>,
        name: &'static str,
        position: Sequence,
        attached: Attached,
    ) -> Self {
        Self {
            source: attached.into(),
            ..Self::detached(shared, name, position)
        }
    }

    pub(crate) fn catching_up(shared: Arc<Shared>, name: &'static str, own: Own) -> Self {
        let position = own.catch_up.state().sequence();
        let source = Source::CatchingUp(read(own, None));
        Self {
            source,
            ..Self::detached(shared, name, position)
        }
    }

    /// Last record given.
    pub fn position(&self) -> Sequence {
        self.position
    }

    /// What the indexes in effects stand for.
    pub fn names(&self) -> &Arc<Names> {
        self.shared.names()
    }

    /// Waits for the records behind the last ones given. Cancel safe.
    ///
    /// # Errors
    /// The replica has ended, or the files do not give what is looked for.
    pub async fn next(&mut self) -> Result<Batch, ReplicaError> {
        loop {
            if let Some(batch) = &self.read_ahead {
                self.shared.wait(batch.last()).await?;
                if let Some(batch) = self.read_ahead.take() {
                    self.position = batch.last();
                    return Ok(batch);
                }
            }
            let found = match &mut self.source {
                Source::Live { backlog, queue } => match backlog.pop_front() {
                    Some(batch) => Some(batch),
                    None => match queue.recv().await {
                        Some(batch) => Some(batch),
                        None => {
                            self.source = Source::Detached;
                            None
                        }
                    },
                },
                Source::Detached => {
                    self.attach().await?;
                    None
                }
                Source::CatchingUp(reading) => {
                    let round = reading.await;
                    let (own, read) = round.unwrap_or_else(|panic| {
                        (None, Err(ReplicaError::Ended(panic.to_string())))
                    });
                    let found = self.caught(own, read)?;
                    self.read_ahead = found.and_then(|batch| batch.behind(self.position));
                    None
                }
            };
            if let Some(batch) = found.and_then(|batch| batch.behind(self.position)) {
                self.position = batch.last();
                return Ok(batch);
            }
        }
    }

    /// More records if they are in memory now.
    pub fn try_next(&mut self) -> Option<Batch> {
        loop {
            let Source::Live { backlog, queue } = &mut self.source else {
                return None;
            };
            let found = backlog.pop_front().or_else(|| queue.try_recv().ok())?;
            if let Some(batch) = found.behind(self.position) {
                self.position = batch.last();
                return Some(batch);
            }
        }
    }

    async fn attach(&mut self) -> Result<(), ReplicaError> {
        if let Some(attached) = self.shared.attach(self.name, self.position)? {
            self.source = attached.into();
            return Ok(());
        }
        let permit = self.shared.turn().await?;
        let (shared, position) = (self.shared.clone(), self.position);
        tracing::info!(
            follower = self.name,
            position = position.get(),
            "catching up from the files"
        );
        self.source = Source::CatchingUp(tokio::task::spawn_blocking(move || {
            let opened = shared.state_before(position);
            match opened {
                Ok(catch_up) => step(
                    Own {
                        catch_up,
                        _permit: permit,
                    },
                    position,
                ),
                Err(error) => (None, Err(error)),
            }
        }));
        Ok(())
    }

    /// Takes in what a round of the own replica gave, and begins the next one where one is needed.
    fn caught(
        &mut self,
        own: Option<Own>,
        read: Result<Option<Batch>, ReplicaError>,
    ) -> Result<Option<Batch>, ReplicaError> {
        let found = match read {
            Ok(found) => {
                if own.is_some() {
                    self.shared.well(self.name);
                }
                found
            }
            Err(error) if error.is_transient() => {
                self.shared.trouble(self.name, &error.to_string());
                self.source = match own {
                    Some(own) => Source::CatchingUp(self::read(own, Some(RETRY))),
                    None => Source::CatchingUp(tokio::task::spawn_blocking(|| {
                        std::thread::sleep(RETRY);
                        (None, Ok(None))
                    })),
                };
                return Ok(None);
            }
            Err(error) => {
                self.source = Source::Detached;
                return Err(error);
            }
        };
        let position = found.as_ref().map_or(self.position, Batch::last);
        self.source = match own {
            // At the end of the files the live replica is no further than that, or its window begins there soon.
            Some(own) if found.is_some() && !self.shared.reaches(position) => {
                Source::CatchingUp(self::read(own, None))
            }
            _ => Source::Detached,
        };
        Ok(found)
    }
}

/// Reads the next batch on a thread that may block.
fn read(own: Own, pause: Option<Duration>) -> JoinHandle<Round> {
    let position = own.catch_up.state().sequence();
    tokio::task::spawn_blocking(move || {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        step(own, position)
    })
}

/// Up to [`BATCH_RECORDS`] records behind `after`; none at the commit position.
fn step(mut own: Own, after: Sequence) -> Round {
    let mut applied = Vec::new();
    let read = loop {
        match own.catch_up.step() {
            Ok(Some(record)) if record.sequence() <= after => {}
            Ok(Some(record)) => {
                applied.push(record);
                if applied.len() == BATCH_RECORDS {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            // What was read is given first.
            Err(error) if error.is_transient() && !applied.is_empty() => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    let found = read.map(|()| (!applied.is_empty()).then(|| Batch::new(applied)));
    (Some(own), found)
}
