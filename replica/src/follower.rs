//! A follower of the replica: reads effects from the live replica's memory while it keeps up.
//!
//! A follower that lags further reads from the files, through a temporary replica.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use types::Sequence;

use crate::catch_up::{CatchUp, ReplicaError};
use crate::effects::Batch;
use crate::hub::Attached;
use crate::live::{CatchUpPermit, Class, Replica};
use crate::names::Names;

/// Maximum number of records per batch of a follower that catches up.
const BATCH_RECORDS: usize = 256;
/// Wait for a catch-up permit after which health reports the follower.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Pause before a retry after a read without a file descriptor.
const RETRY: Duration = Duration::from_millis(250);

/// A consumer of the effects. The replica never waits for it.
pub struct Follower {
    replica: Replica,
    name: &'static str,
    class: Class,
    position: Sequence,
    source: Source,
    /// Start of the wait for a catch-up permit.
    waiting_since: Option<Instant>,
    /// Batch read from files. Returned once the live replica has it: only that one adds the names.
    read_ahead: Option<Batch>,
}

pub(crate) enum Source {
    Live(Attached),
    Detached,
    CatchingUp(JoinHandle<Round>),
}

/// A temporary replica with its catch-up permit.
pub(crate) type OwnReplica = (CatchUp, CatchUpPermit);

/// Result of reading a batch from files: the replica to continue with, and the batch.
type Round = (Option<OwnReplica>, Result<Option<Batch>, ReplicaError>);

impl Source {
    pub fn catching_up(own: OwnReplica) -> Self {
        Self::CatchingUp(spawn_read(own, None))
    }
}

impl Follower {
    pub(crate) fn new(
        replica: Replica,
        name: &'static str,
        class: Class,
        position: Sequence,
        source: Source,
    ) -> Self {
        Self {
            replica,
            name,
            class,
            position,
            source,
            waiting_since: None,
            read_ahead: None,
        }
    }

    /// Last record returned.
    pub fn position(&self) -> Sequence {
        self.position
    }

    /// Ids and specs for the indexes in effects.
    pub fn names(&self) -> &Arc<Names> {
        self.replica.names()
    }

    /// Waits for the next batch of records. Cancel safe.
    ///
    /// # Errors
    /// The replica has ended, or the records were removed or cannot be read.
    pub async fn next(&mut self) -> Result<Batch, ReplicaError> {
        loop {
            if let Some(batch) = &self.read_ahead {
                self.replica.wait(batch.last()).await?;
                let batch = self.read_ahead.take();
                if let Some(batch) = batch.and_then(|batch| batch.after(self.position)) {
                    self.position = batch.last();
                    return Ok(batch);
                }
            }
            let found = match &mut self.source {
                Source::Live(live) => {
                    let found = live.next().await;
                    if found.is_none() {
                        self.source = Source::Detached;
                    }
                    found
                }
                Source::Detached => {
                    self.attach().await?;
                    None
                }
                Source::CatchingUp(reading) => {
                    let round = reading.await;
                    let (own, read) = round.unwrap_or_else(|panic| {
                        (None, Err(ReplicaError::Ended(panic.to_string())))
                    });
                    let found = self.finish_round(own, read)?;
                    self.read_ahead = found.and_then(|batch| batch.after(self.position));
                    None
                }
            };
            if let Some(batch) = found.and_then(|batch| batch.after(self.position)) {
                self.position = batch.last();
                return Ok(batch);
            }
        }
    }

    /// The next batch, if it is in memory.
    pub fn try_next(&mut self) -> Option<Batch> {
        // Records read from files come first: the queue may continue after them.
        if self.read_ahead.is_some() {
            return None;
        }
        loop {
            let Source::Live(live) = &mut self.source else {
                return None;
            };
            if let Some(batch) = live.try_next()?.after(self.position) {
                self.position = batch.last();
                return Some(batch);
            }
        }
    }

    /// Releases the catch-up permit until the next call of [`Follower::next`].
    ///
    /// For a follower that waits for something other than records.
    pub fn release_permit(&mut self) {
        if let Source::CatchingUp(_) = self.source {
            self.source = Source::Detached;
            self.read_ahead = None;
        }
    }

    /// Waits for a catch-up permit. Health reports a follower that waits for long.
    async fn catch_up_permit(&mut self) -> Result<CatchUpPermit, ReplicaError> {
        let shared = self.replica.shared.clone();
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let permit = {
            // Includes earlier waits that were cancelled.
            let mut waiting = std::pin::pin!(shared.catch_up_permit(self.class));
            let left = REPORT_AFTER.saturating_sub(since.elapsed());
            match tokio::time::timeout(left, &mut waiting).await {
                Ok(permit) => permit?,
                Err(_) => {
                    let reason = "waits for a catch-up permit: \
                                  other followers are reading the journal's files";
                    shared.set_trouble(self.name, reason);
                    waiting.await?
                }
            }
        };
        self.waiting_since = None;
        shared.clear_trouble(self.name);
        Ok(permit)
    }

    async fn attach(&mut self) -> Result<(), ReplicaError> {
        let shared = &self.replica.shared;
        if let Some(attached) = shared.attach(self.name, self.position)? {
            self.source = Source::Live(attached);
            return Ok(());
        }
        let permit = self.catch_up_permit().await?;
        let (shared, position) = (self.replica.shared.clone(), self.position);
        tracing::info!(
            follower = self.name,
            position = position.get(),
            "follower catches up from the journal's files"
        );
        self.source = Source::CatchingUp(tokio::task::spawn_blocking(move || {
            match shared.catch_up_from_newest(position, |_| true) {
                Ok(catch_up) => read_batch((catch_up, permit), position),
                Err(error) => (None, Err(error)),
            }
        }));
        Ok(())
    }

    /// Handles the result of a read from files; starts the next one if needed.
    fn finish_round(
        &mut self,
        own: Option<OwnReplica>,
        read: Result<Option<Batch>, ReplicaError>,
    ) -> Result<Option<Batch>, ReplicaError> {
        let shared = &self.replica.shared;
        let found = match read {
            Ok(found) => {
                if own.is_some() {
                    shared.clear_trouble(self.name);
                }
                found
            }
            Err(error) if error.is_transient() => {
                shared.set_trouble(self.name, &error.to_string());
                self.source = match own {
                    Some(own) => Source::CatchingUp(spawn_read(own, Some(RETRY))),
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
        self.source = Source::Detached;
        let attached = match shared.reaches(position) {
            // Before the batch is returned: the window may move on while it is processed.
            true => shared.attach(self.name, position)?,
            false => None,
        };
        self.source = match (attached, own) {
            (Some(attached), _) => Source::Live(attached),
            (None, Some(own)) => Source::catching_up(own),
            (None, None) => Source::Detached,
        };
        Ok(found)
    }
}

/// Reads the next batch on a blocking thread.
fn spawn_read(own: OwnReplica, pause: Option<Duration>) -> JoinHandle<Round> {
    let position = own.0.state().sequence();
    tokio::task::spawn_blocking(move || {
        if let Some(pause) = pause {
            std::thread::sleep(pause);
        }
        read_batch(own, position)
    })
}

/// Reads up to [`BATCH_RECORDS`] records after `after`; the batch is `None` if there are none.
fn read_batch(mut own: OwnReplica, after: Sequence) -> Round {
    let mut applied = Vec::new();
    let read = loop {
        match own.0.apply_next() {
            Ok(Some(record)) if record.sequence() <= after => {}
            Ok(Some(record)) => {
                applied.push(record);
                if applied.len() == BATCH_RECORDS {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            // Records already read are returned first. The next read fails again.
            Err(error) if error.is_transient() && !applied.is_empty() => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    let found = read.map(|()| (!applied.is_empty()).then(|| Batch::new(applied)));
    (Some(own), found)
}
