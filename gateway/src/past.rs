//! The numbered messages of all time, told again from the journal: for what has left the windows of [`crate::streams`].
//!
//! Reads block: they run on threads of their own, few at a time ([`SCANS_MAX`]), and stop as soon as the caller has what it came for. Cost: every scan
//! starts at the newest checkpoint before what it looks for, at the beginning of the journal without one.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sequencer::{CheckpointError, ReadError, Reader};
use tokio::sync::OwnedSemaphorePermit;
use types::{Sequence, SessionIx};
use wire::ServerMessage;

use crate::checkpoint;
use crate::fold::{Fact, Fold};
use crate::market::Market;
use crate::numbered;
use crate::streams::Place;

/// Scans that read at the same moment, of all connections together.
pub const SCANS_MAX: usize = 2;

/// Pause while there is no file descriptor to read with, and how long one read waits for it.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

impl PastError {
    fn is_transient(&self) -> bool {
        match self {
            Self::Journal(error) => error.is_transient(),
            Self::Checkpoint(error) => error.is_transient(),
            Self::GivenUp => false,
        }
    }

    /// What is looked for has left the journal.
    pub fn is_removed(&self) -> bool {
        matches!(self, Self::Journal(error) if error.is_removed())
    }
}

/// A place in the past.
pub struct Past {
    reader: Reader,
    fold: Fold,
    facts: Vec<Fact>,
    /// Last number of each session so far.
    numbers: Vec<u64>,
    /// The turn in which the place was found: the first scan takes it over.
    permit: Option<OwnedSemaphorePermit>,
}

/// Why the past cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum PastError {
    #[error(transparent)]
    Journal(#[from] ReadError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("the reading was given up")]
    GivenUp,
}

impl Past {
    /// The newest place that `is_before` takes: asked with the last number and the last client sequence of each session there.
    ///
    /// # Errors
    /// There is none, and the journal's beginning is gone: at the first scan.
    pub async fn before(
        market: &Arc<Market>,
        is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool + Send + 'static,
    ) -> Result<Self, PastError> {
        let (data_dir, node) = (market.config.data_dir.clone(), market.node);
        let finding = move || Ok(checkpoint::place_before(&data_dir, node, &is_before)?);
        Self::at(market, finding).await
    }

    /// The same; where there is none, the oldest place behind which the journal goes on.
    pub async fn before_or_oldest(
        market: &Arc<Market>,
        is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool + Send + 'static,
    ) -> Result<Self, PastError> {
        let (data_dir, node) = (market.config.data_dir.clone(), market.node);
        let reader = market.read_journal(Sequence::ZERO);
        let finding = move || {
            let place = checkpoint::place_before(&data_dir, node, &is_before)?;
            let removed = reader.removed_through()?;
            if place.fold.sequence() >= removed {
                return Ok(place);
            }
            let oldest = checkpoint::oldest_place(&data_dir, node, removed)?;
            Ok(oldest.unwrap_or(place))
        };
        Self::at(market, finding).await
    }

    async fn at(
        market: &Arc<Market>,
        finding: impl Fn() -> Result<Place, PastError> + Send + 'static,
    ) -> Result<Self, PastError> {
        // Finding it reads whole files, and a place is as large as the fold: the turn lasts as long as the thread, also when nobody waits for it any more.
        let permit = turn(market).await?;
        let finding = move || {
            let place = with_descriptor(PastError::is_transient, finding)?;
            Ok::<_, PastError>((place, permit))
        };
        let found = tokio::task::spawn_blocking(finding).await;
        let (place, permit) = found.map_err(|_| PastError::GivenUp)??;
        Ok(Self {
            reader: market.read_journal(place.fold.sequence()),
            fold: place.fold,
            facts: Vec::new(),
            numbers: place.numbers,
            permit: Some(permit),
        })
    }

    /// The last request of a session that was answered up to here, 0 for none.
    pub fn client_seq(&self, session: SessionIx) -> u64 {
        let session = self.fold.sessions().get(session.index());
        session.map_or(0, |session| session.client_seq)
    }

    /// Reads on, up to `through` or until `emit` breaks off; a record is never left in the middle. `emit` is given the session, the number and the
    /// message. Blocks.
    fn read(
        &mut self,
        through: Sequence,
        mut emit: impl FnMut(SessionIx, u64, ServerMessage) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let mut flow = ControlFlow::Continue(());
        while self.fold.sequence() < through && flow.is_continue() {
            let read = with_descriptor(ReadError::is_transient, || self.reader.try_next());
            let Some(record) = read? else {
                return Ok(());
            };
            self.facts.clear();
            let cause = self
                .fold
                .apply(&record.command, &record.events, &mut self.facts);
            for fact in &self.facts {
                numbered::messages(&cause, fact, |session, message| {
                    let at = session.index();
                    if self.numbers.len() <= at {
                        self.numbers.resize(at + 1, 0);
                    }
                    self.numbers[at] += 1;
                    if emit(session, self.numbers[at], message).is_break() {
                        flow = ControlFlow::Break(());
                    }
                });
            }
        }
        Ok(())
    }

    /// Reads on as far as the streams have come, on a thread that may block, when it is this scan's turn. Gives back the place and what was collected.
    pub async fn scan<T: Send + 'static>(
        mut self,
        market: &Arc<Market>,
        mut collected: T,
        mut take: impl FnMut(&mut T, SessionIx, u64, ServerMessage) -> ControlFlow<()> + Send + 'static,
    ) -> Result<(Self, T), PastError> {
        let permit = match self.permit.take() {
            Some(permit) => permit,
            None => turn(market).await?,
        };
        let through = market.streams.position();
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let read = self.read(through, |session, number, message| {
                take(&mut collected, session, number, message)
            });
            read.map(|()| (self, collected))
        });
        let read = reading.await.map_err(|_| PastError::GivenUp)?;
        read.map_err(PastError::Journal)
    }
}

/// Repeats a read that finds no file descriptor, for [`RETRY_MAX`] at most. Blocks.
fn with_descriptor<T, E>(
    is_transient: impl Fn(&E) -> bool,
    mut read: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let until = Instant::now() + RETRY_MAX;
    loop {
        match read() {
            Err(error) if is_transient(&error) && Instant::now() < until => {
                std::thread::sleep(RETRY);
            }
            read => return read,
        }
    }
}

/// Waits for one of the [`SCANS_MAX`] turns.
async fn turn(market: &Arc<Market>) -> Result<OwnedSemaphorePermit, PastError> {
    let permit = market.scans.clone().acquire_owned().await;
    permit.map_err(|_| PastError::GivenUp)
}
