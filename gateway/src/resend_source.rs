//! Rebuilds session messages older than the in-memory window from the journal, for resend.
//!
//! Reads block. They run on tokio's blocking threads, at most [`SCANS_MAX`] at a time, and stop as
//! soon as the caller has what it needs. Cost: a scan starts at the newest checkpoint before its
//! target, or at the beginning of the journal if there is none.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replica::{CatchUp, ReplicaError};
use sequencer::Stamp;
use tokio::sync::OwnedSemaphorePermit;
use types::{NodeId, Sequence, SessionIx};
use wire::ServerMessage;

use crate::front::report::message;
use crate::market::Market;

/// Maximum number of concurrent scans, over all connections.
pub const SCANS_MAX: usize = 2;

/// Pause between attempts to get a file descriptor, and the time limit of the attempts of one read.
const RETRY: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(10);

impl ResendError {
    /// The journal no longer contains the records.
    pub fn is_removed(&self) -> bool {
        matches!(self, Self::Replica(error) if error.is_removed())
    }
}

/// A position in the journal to read session messages from.
pub struct ResendSource {
    node: NodeId,
    replica: CatchUp,
    /// One of the [`SCANS_MAX`] permits, held until the read ends.
    _permit: OwnedSemaphorePermit,
}

/// Why messages cannot be rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum ResendError {
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The process stops, or the scan panicked.
    #[error("the journal scan was aborted")]
    Aborted,
}

impl ResendSource {
    /// Starts at the newest checkpoint that `is_before` accepts, else at the beginning of the
    /// journal. `is_before` gets a function that returns a session's last message number and last
    /// answered client sequence in the checkpoint.
    ///
    /// # Errors
    /// The checkpoints cannot be read. If no checkpoint is accepted and the journal was truncated,
    /// the first scan fails instead.
    pub async fn newest_before(
        market: &Arc<Market>,
        is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool + Send + 'static,
    ) -> Result<Self, ResendError> {
        let replica = market.replica.clone();
        let find = move || {
            replica
                .catch_up_from_newest(|found| is_before(&|session| found.session_position(session)))
        };
        Self::at(market, find).await
    }

    /// Like [`Self::newest_before`], but starts at the oldest checkpoint that the journal still
    /// continues if the records after the accepted position were removed.
    pub async fn newest_before_or_oldest(
        market: &Arc<Market>,
        is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool + Send + 'static,
    ) -> Result<Self, ResendError> {
        let replica = market.replica.clone();
        let find = move || {
            replica.catch_up_from_newest_or_oldest(|found| {
                is_before(&|session| found.session_position(session))
            })
        };
        Self::at(market, find).await
    }

    async fn at(
        market: &Arc<Market>,
        find: impl Fn() -> Result<CatchUp, ReplicaError> + Send + 'static,
    ) -> Result<Self, ResendError> {
        // Loading a checkpoint reads whole files, and its state is as large as the node's. The
        // blocking thread owns the permit, so that a dropped caller does not free it early.
        let permit = scan_permit(market).await?;
        let find = move || Ok::<_, ResendError>((with_descriptor(find)?, permit));
        let found = tokio::task::spawn_blocking(find).await;
        let (replica, permit) = found.map_err(|_| ResendError::Aborted)??;
        Ok(Self {
            node: market.node,
            replica,
            _permit: permit,
        })
    }

    /// Client sequence of the session's last answered request at this position; 0 for none.
    pub fn client_seq(&self, session: SessionIx) -> u64 {
        let session = self.replica.state().session(session);
        session.map_or(0, |session| session.client_seq)
    }

    /// Reads records through `through`, or until `emit` breaks. Emits all messages of the last
    /// record. `emit` gets the session, the number and the message. Blocks.
    fn read(
        &mut self,
        through: Sequence,
        mut emit: impl FnMut(SessionIx, u64, ServerMessage) -> ControlFlow<()>,
    ) -> Result<(), ReplicaError> {
        let mut flow = ControlFlow::Continue(());
        while self.replica.state().sequence() < through && flow.is_continue() {
            let Some(applied) = with_descriptor(|| self.replica.apply_next())? else {
                return Ok(());
            };
            let stamp = Stamp {
                sequence: applied.cause.sequence,
                time_ns: applied.cause.time_ns,
                received_ns: applied.cause.received_ns,
            };
            for report in &applied.reports {
                let message = message(self.node, &stamp, report);
                if emit(report.session, report.number, message).is_break() {
                    flow = ControlFlow::Break(());
                }
            }
        }
        Ok(())
    }

    /// Reads through the commit position on a blocking thread, or until `collect` breaks. Returns
    /// `collected`.
    pub async fn scan<T: Send + 'static>(
        mut self,
        market: &Arc<Market>,
        mut collected: T,
        mut collect: impl FnMut(&mut T, SessionIx, u64, ServerMessage) -> ControlFlow<()>
        + Send
        + 'static,
    ) -> Result<T, ResendError> {
        let through = market.commit.position();
        let reading = tokio::task::spawn_blocking(move || {
            let read = self.read(through, |session, number, message| {
                collect(&mut collected, session, number, message)
            });
            read.map(|()| collected)
        });
        let read = reading.await.map_err(|_| ResendError::Aborted)?;
        read.map_err(ResendError::Replica)
    }
}

/// Retries a read while the process is out of file descriptors, at most [`RETRY_MAX`]. Blocks.
fn with_descriptor<T>(
    mut read: impl FnMut() -> Result<T, ReplicaError>,
) -> Result<T, ReplicaError> {
    let until = Instant::now() + RETRY_MAX;
    loop {
        match read() {
            Err(error) if error.is_transient() && Instant::now() < until => {
                std::thread::sleep(RETRY);
            }
            read => return read,
        }
    }
}

/// Waits for one of the [`SCANS_MAX`] permits.
async fn scan_permit(market: &Arc<Market>) -> Result<OwnedSemaphorePermit, ResendError> {
    let permit = market.scans.clone().acquire_owned().await;
    permit.map_err(|_| ResendError::Aborted)
}
