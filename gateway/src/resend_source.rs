//! Restores a checkpoint and scans the journal for session messages older than the in-memory
//! window. `front::resend` selects and encodes them.
//!
//! A scan is the load of the checkpoint and the pass over the journal after it. Scans block. They
//! run on tokio's blocking threads, at most [`SCANS_MAX`] at a time, and stop as soon as the caller
//! has what it needs. Cost: a scan starts at the newest checkpoint before its target, or at the
//! beginning of the journal if there is none. `newest_before_or_oldest` falls back to the oldest
//! checkpoint that the remaining journal continues.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replica::{CatchUp, ReplicaError, SessionPosition};
use sequencer::Stamp;
use tokio::sync::OwnedSemaphorePermit;
use types::{NodeId, Sequence, SessionIx};
use wire::ServerMessage;

use crate::front::report::message;
use crate::market::Market;

/// Maximum number of concurrent scans, over all connections.
pub const SCANS_MAX: usize = 2;

/// Pause between retries while the process is out of file descriptors.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Total time to retry one call.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);

impl ResendError {
    /// True when the journal was truncated past the next record.
    pub fn is_truncated(&self) -> bool {
        matches!(self, Self::Replica(error) if error.is_truncated())
    }
}

/// A state restored from a checkpoint, with a reader of the journal after it. Holds a scan permit;
/// used for one scan.
pub struct ResendSource {
    node: NodeId,
    catch_up: CatchUp,
    /// One of the [`SCANS_MAX`] permits, held until the scan ends.
    _permit: OwnedSemaphorePermit,
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
pub enum ResendError {
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    #[error("journal scan aborted: the process is stopping, or the scan panicked (see the log)")]
    Aborted,
}

impl ResendSource {
    /// Starts at the newest checkpoint that `accepts` accepts, else at the beginning of the
    /// journal. `accepts` receives a lookup of a session's position in the checkpoint.
    ///
    /// # Errors
    /// The checkpoints cannot be read, or the load was aborted. If the journal was truncated past
    /// the start position, [`Self::scan`] fails.
    pub async fn newest_before(
        market: &Arc<Market>,
        accepts: impl Fn(&dyn Fn(SessionIx) -> SessionPosition) -> bool + Send + 'static,
    ) -> Result<Self, ResendError> {
        let replica = market.replica.clone();
        let restore = move || {
            replica.catch_up_from_newest(|checkpoint| {
                accepts(&|session| checkpoint.session_position(session))
            })
        };
        Self::open(market, restore).await
    }

    /// Like [`Self::newest_before`]. If the journal was truncated past the start position,
    /// starts at the oldest checkpoint that the remaining journal continues.
    ///
    /// # Errors
    /// As [`Self::newest_before`], or the journal cannot be read.
    pub async fn newest_before_or_oldest(
        market: &Arc<Market>,
        accepts: impl Fn(&dyn Fn(SessionIx) -> SessionPosition) -> bool + Send + 'static,
    ) -> Result<Self, ResendError> {
        let replica = market.replica.clone();
        let restore = move || {
            replica.catch_up_from_newest_or_oldest(|checkpoint| {
                accepts(&|session| checkpoint.session_position(session))
            })
        };
        Self::open(market, restore).await
    }

    async fn open(
        market: &Arc<Market>,
        restore: impl Fn() -> Result<CatchUp, ReplicaError> + Send + 'static,
    ) -> Result<Self, ResendError> {
        // The permit is taken before the load: the restored state takes as much memory as the
        // node's. The blocking thread owns it, so a cancelled future does not release it early.
        let permit = scan_permit(market).await?;
        let restore_with_permit = move || Ok::<_, ResendError>((retry_transient(restore)?, permit));
        let joined = tokio::task::spawn_blocking(restore_with_permit).await;
        let (catch_up, permit) = joined.map_err(|_| ResendError::Aborted)??;
        Ok(Self {
            node: market.node,
            catch_up,
            _permit: permit,
        })
    }

    /// Client sequence of the session's last answered request at the start position; 0 for none.
    pub fn client_seq(&self, session: SessionIx) -> u64 {
        let session = self.catch_up.state().session(session);
        session.map_or(0, |session| session.client_seq)
    }

    /// Scans the journal through `through`, or until `emit` returns Break. After `emit` returns
    /// Break, the remaining messages of the same record are still emitted. `emit` receives the
    /// session, the message number and the message. Returns the number of records read. Blocks.
    fn scan_blocking(
        &mut self,
        through: Sequence,
        mut emit: impl FnMut(SessionIx, u64, ServerMessage) -> ControlFlow<()>,
    ) -> Result<u64, ReplicaError> {
        let mut flow = ControlFlow::Continue(());
        let mut records = 0;
        while self.catch_up.state().sequence() < through && flow.is_continue() {
            let Some(applied) = retry_transient(|| self.catch_up.apply_next())? else {
                break;
            };
            records += 1;
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
        Ok(records)
    }

    /// Scans the journal through the commit position on a blocking thread, or until `fold` returns
    /// Break. `fold` receives the accumulator, which starts as `init`, and the arguments of each
    /// message. After Break, the remaining messages of the same record are still folded. Returns
    /// the accumulator.
    pub async fn scan<T: Send + 'static>(
        mut self,
        market: &Arc<Market>,
        init: T,
        mut fold: impl FnMut(&mut T, SessionIx, u64, ServerMessage) -> ControlFlow<()> + Send + 'static,
    ) -> Result<T, ResendError> {
        let through = market.commit.position();
        let records_total = metrics::counter!("trading_look_up_records_total");
        let scan = tokio::task::spawn_blocking(move || {
            let mut accumulator = init;
            let scanned = self.scan_blocking(through, |session, number, message| {
                fold(&mut accumulator, session, number, message)
            });
            scanned.map(|records| {
                records_total.increment(records);
                accumulator
            })
        });
        let joined = scan.await.map_err(|_| ResendError::Aborted)?;
        joined.map_err(ResendError::Replica)
    }
}

/// Retries `attempt` while the process is out of file descriptors, for at most [`RETRY_TIMEOUT`].
/// Blocks.
fn retry_transient<T>(
    mut attempt: impl FnMut() -> Result<T, ReplicaError>,
) -> Result<T, ReplicaError> {
    let deadline = Instant::now() + RETRY_TIMEOUT;
    loop {
        match attempt() {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Waits for one of the [`SCANS_MAX`] permits.
async fn scan_permit(market: &Arc<Market>) -> Result<OwnedSemaphorePermit, ResendError> {
    let permit = market.scans.clone().acquire_owned().await;
    permit.map_err(|_| ResendError::Aborted)
}
