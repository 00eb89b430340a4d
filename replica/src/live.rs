//! The live replica: one thread per process follows the journal at the commit position.
//!
//! The thread decodes and applies each record once, compares its events, and publishes the effects
//! to its followers. It also writes the checkpoints, and compares its core with the hot thread's
//! whenever the node is quiet.
//!
//! It stops at a difference, a panic or an unreadable journal: publishing ends and new orders are
//! refused, because the state that reports and settlement rely on is unknown.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use admission::{AdmissionConfig, Settlement};
use sequencer::handle::ReplicaParts;
use sequencer::image::panic_text;
use sequencer::{
    Backlog, CheckpointKeeper, Port, ReadError, Reader, Record, SnapshotConfig, Stats,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use types::{NodeId, Sequence};

use crate::catch_up::{CatchUp, ReplicaError};
use crate::effects::{Applied, Batch};
use crate::follower::{Follower, Source};
use crate::hub::{Attached, Hub};
use crate::image::{self, Checkpoint};
use crate::names::Names;
use crate::state::{Differs, State};

/// Name of the live replica in [`Replica::troubles`].
pub const PART: &str = "replica";
/// Records applied under one lock and published together.
const BATCH_RECORDS: usize = 256;
/// Pause after a batch that is not full, unless a call waits for the next record. Woken at each
/// commit, the replica and its followers would take the hot thread's core once per order.
const PACE: Duration = Duration::from_millis(1);
/// Timeout of a read while no record arrives.
const IDLE: Duration = Duration::from_millis(200);
/// Pause before a retry after a read without a file descriptor.
const RETRY: Duration = Duration::from_millis(250);
/// The node counts as quiet after this time without a record.
const QUIET: Duration = Duration::from_secs(1);
/// Limit of open orders for a comparison with the hot thread: above it, hashing would occupy that
/// thread for more than a few milliseconds.
const COMPARE_ORDERS_MAX: usize = 50_000;
/// Maximum wait for the hot thread's inspection.
const INSPECTION_WAIT: Duration = Duration::from_secs(5);
/// Followers that catch up at the same time; each holds a copy of the node's state in memory.
const CATCH_UPS_MAX: usize = 2;
/// Maximum among them of followers that the market does not wait for: one permit is always left.
const CATCH_UPS_OTHERS_MAX: usize = 1;

/// Whether the market waits for a follower (`design.md` 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Gating,
    Other,
}

/// A catch-up permit; released on drop.
pub(crate) struct Turn {
    _place: OwnedSemaphorePermit,
    _of_others: Option<OwnedSemaphorePermit>,
}

/// A call that waits for a position; unregistered on drop.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        shared.hurry.notify_one();
        Self(&shared.waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// State shared by the thread, its handles and its followers.
pub(crate) struct Shared {
    node: NodeId,
    /// Prototype: other readers are made from it.
    reader: Mutex<Reader>,
    dir: PathBuf,
    limits: AdmissionConfig,
    /// Written only by the live thread.
    state: RwLock<State>,
    names: Arc<Names>,
    hub: Mutex<Hub>,
    position: watch::Sender<Sequence>,
    /// Number of calls that wait for a position, and the notifier that ends the thread's pause.
    waiting: AtomicUsize,
    hurry: Notify,
    /// Settlement's positions, as journalled.
    settlement: watch::Sender<Settlement>,
    /// Contains the last sequence that the hot thread assigned.
    stats: Arc<Stats>,
    backlog: Arc<Backlog>,
    turns: Arc<Semaphore>,
    turns_of_others: Arc<Semaphore>,
    /// Current trouble of the live replica and of followers, by name.
    troubles: watch::Sender<BTreeMap<&'static str, String>>,
}

impl Shared {
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn hub(&self) -> MutexGuard<'_, Hub> {
        self.hub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn attach(
        &self,
        name: &'static str,
        after: Sequence,
    ) -> Result<Option<Attached>, ReplicaError> {
        self.hub().attach(name, after).map_err(ReplicaError::Ended)
    }

    pub fn reaches(&self, after: Sequence) -> bool {
        self.hub().reaches(after)
    }

    fn reader(&self, after: Sequence) -> Reader {
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.reopen_after(after)
    }

    /// Waits for one of the [`CATCH_UPS_MAX`] permits.
    pub async fn turn(&self, class: Class) -> Result<Turn, ReplicaError> {
        let wait = async |of: &Arc<Semaphore>| {
            let permit = of.clone().acquire_owned().await;
            permit.map_err(|_| ReplicaError::Ended("the replica has stopped".to_owned()))
        };
        let of_others = match class {
            Class::Gating => None,
            Class::Other => Some(wait(&self.turns_of_others).await?),
        };
        Ok(Turn {
            _place: wait(&self.turns).await?,
            _of_others: of_others,
        })
    }

    /// Starts from the newest checkpoint at or before `until` that `is_wanted` accepts. Blocks.
    pub fn newest(
        &self,
        until: Sequence,
        is_wanted: impl Fn(&Checkpoint) -> bool,
    ) -> Result<CatchUp, ReplicaError> {
        let state = image::newest(&self.dir, self.node, self.limits, until, is_wanted)?;
        Ok(CatchUp::new(state, &self.reader(Sequence::ZERO)))
    }

    pub fn trouble(&self, name: &'static str, reason: &str) {
        self.troubles.send_if_modified(|troubles| {
            let known = troubles.insert(name, reason.to_owned());
            known.as_deref() != Some(reason)
        });
    }

    pub fn well(&self, name: &'static str) {
        self.troubles
            .send_if_modified(|troubles| troubles.remove(name).is_some());
    }
}

/// A cloneable handle to the live replica.
#[derive(Clone)]
pub struct Replica {
    pub(crate) shared: Arc<Shared>,
}

/// Owner of the live replica's thread; stops it on drop.
pub struct LiveReplica {
    replica: Replica,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LiveReplica {
    /// Starts at the newest checkpoint, or the journal's beginning; follows until the node stops.
    ///
    /// Writes checkpoints as `checkpoints` says, if given. Blocks while a checkpoint is read.
    ///
    /// # Errors
    /// The checkpoint folder cannot be read, the journal begins after every checkpoint, or no
    /// thread can be started.
    pub fn start(
        node: NodeId,
        parts: ReplicaParts,
        checkpoints: Option<SnapshotConfig>,
    ) -> Result<Self, ReplicaError> {
        // At most the durable position: later records are not there yet.
        let durable = parts.reader.end();
        let state = image::newest(&parts.dir, node, parts.limits, durable, |_| true)?;
        let from = state.sequence();
        let reader = parts.reader.reopen_after(from);
        reader.check()?;
        let shared = Arc::new(Shared {
            node,
            reader: Mutex::new(parts.reader),
            dir: parts.dir.clone(),
            limits: parts.limits,
            names: state.names().clone(),
            settlement: watch::Sender::new(*state.core().admission().settlement()),
            state: RwLock::new(state),
            hub: Mutex::new(Hub::new(from)),
            position: watch::Sender::new(from),
            waiting: AtomicUsize::new(0),
            hurry: Notify::new(),
            stats: parts.stats,
            backlog: parts.backlog,
            turns: Arc::new(Semaphore::new(CATCH_UPS_MAX)),
            turns_of_others: Arc::new(Semaphore::new(CATCH_UPS_OTHERS_MAX)),
            troubles: watch::Sender::default(),
        });
        shared.backlog.sessions_at(from);
        let keeper = checkpoints.map(|config| {
            shared.backlog.checkpoint_at(from);
            CheckpointKeeper::new("node", &parts.dir, config, from, parts.proven.clone())
        });
        let live = Live {
            shared: shared.clone(),
            reader,
            port: parts.port,
            keeper,
            quiet_since: None,
            compared: Sequence::ZERO,
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("replica".to_owned())
            .spawn(move || live.run(stopped));
        let thread = thread.map_err(|error| ReplicaError::Ended(error.to_string()))?;
        Ok(Self {
            replica: Replica { shared },
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub fn replica(&self) -> Replica {
        self.replica.clone()
    }
}

impl Drop for LiveReplica {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the replica's thread panicked");
        }
    }
}

impl Replica {
    /// Reads the current state: all durable records are applied but the last few.
    pub fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.shared.state())
    }

    /// Reads the state once it includes every command sequenced by now (R178).
    ///
    /// It is never older than anything the caller has seen before.
    ///
    /// # Errors
    /// The state did not get there within `patience`; returns the number of missing records.
    pub async fn read_fresh<T>(
        &self,
        patience: Duration,
        read: impl FnOnce(&State) -> T,
    ) -> Result<T, u64> {
        let assigned = self.assigned();
        let waited = tokio::time::timeout(patience, self.wait(assigned)).await;
        let is_running = self.shared.hub().is_running().is_ok();
        match waited {
            Ok(Ok(())) if is_running => Ok(self.read(read)),
            _ => Err(assigned.get().saturating_sub(self.position().get())),
        }
    }

    /// Reads the effects of a recent record: `None` before it is applied, and when it is no longer
    /// in memory.
    pub fn effects<T>(&self, sequence: Sequence, read: impl FnOnce(&Applied) -> T) -> Option<T> {
        let batch = self.shared.hub().batch_containing(sequence)?;
        let mut applied = batch.iter();
        applied
            .find(|applied| applied.sequence() == sequence)
            .map(read)
    }

    /// Last sequence assigned to a command.
    pub fn assigned(&self) -> Sequence {
        let assigned = &self.shared.stats.sequence;
        Sequence(assigned.load(Ordering::Acquire))
    }

    /// Counters of the hot thread.
    pub fn hot_stats(&self) -> &Stats {
        &self.shared.stats
    }

    /// Last durable record.
    pub fn durable(&self) -> Sequence {
        let reader = &self.shared.reader;
        reader.lock().unwrap_or_else(PoisonError::into_inner).end()
    }

    /// Last record applied and published.
    pub fn position(&self) -> Sequence {
        *self.shared.position.borrow()
    }

    /// Returns when the record is applied and published.
    ///
    /// # Errors
    /// [`ReplicaError::Ended`]: it never will be.
    pub async fn wait(&self, sequence: Sequence) -> Result<(), ReplicaError> {
        if self.position() >= sequence {
            return Ok(());
        }
        let _waiting = Waiting::new(&self.shared);
        let mut position = self.shared.position.subscribe();
        let reached = position.wait_for(|position| *position >= sequence);
        self.unless_ended(reached).await
    }

    async fn unless_ended(&self, waiting: impl Future) -> Result<(), ReplicaError> {
        tokio::select! {
            biased;
            _ = waiting => Ok(()),
            reason = self.ended() => Err(ReplicaError::Ended(reason)),
        }
    }

    /// Waits for the end of the replica; returns the reason.
    pub async fn ended(&self) -> String {
        let mut troubles = self.troubles();
        loop {
            if let Err(reason) = self.shared.hub().is_running() {
                return reason;
            }
            if troubles.changed().await.is_err() {
                return "the replica has stopped".to_owned();
            }
        }
    }

    /// Sequenced records that settlement has not applied; `u64::MAX` when settlement has failed.
    pub fn settlement_lag(&self) -> u64 {
        self.shared.backlog.settlement_lag(self.assigned())
    }

    /// Settlement's positions, as journalled and applied here.
    pub fn settlement(&self) -> Settlement {
        *self.shared.settlement.borrow()
    }

    /// Returns when the journal records that the ledger has every posting up to `sequence`.
    ///
    /// # Errors
    /// [`ReplicaError::Ended`]: it never will.
    pub async fn wait_posted(&self, sequence: Sequence) -> Result<(), ReplicaError> {
        let mut settlement = self.shared.settlement.subscribe();
        let posted = settlement.wait_for(|settlement| settlement.posted >= sequence);
        self.unless_ended(posted).await
    }

    pub fn names(&self) -> &Arc<Names> {
        &self.shared.names
    }

    /// Current troubles of the live replica and its followers, by name; empty when there are none.
    pub fn troubles(&self) -> watch::Receiver<BTreeMap<&'static str, String>> {
        self.shared.troubles.subscribe()
    }

    /// Follows after `after`, for a follower that the market does not wait for.
    ///
    /// Records that are no longer in memory are read from files.
    pub fn follow_detached(&self, name: &'static str, after: Sequence) -> Follower {
        Follower::new(self.clone(), name, Class::Other, after, Source::Detached)
    }

    /// As [`Replica::follow_detached`], for a follower that the market waits for.
    ///
    /// `begin` gets the state at `after`.
    ///
    /// # Errors
    /// The journal ends before `after`, lacks records after every checkpoint, or is unreadable.
    pub async fn follow_from<T: Send + 'static>(
        &self,
        name: &'static str,
        after: Sequence,
        begin: impl FnOnce(&State) -> T + Send + 'static,
    ) -> Result<(T, Follower), ReplicaError> {
        let turn = self.shared.turn(Class::Gating).await?;
        let shared = self.shared.clone();
        let opening = tokio::task::spawn_blocking(move || {
            let mut catch_up = shared.newest(after, |_| true)?;
            let reached = catch_up.run_to(after)?;
            if reached < after {
                let reason = format!("the journal ends at {reached}, before {after}");
                return Err(ReplicaError::Ended(reason));
            }
            Ok((begin(catch_up.state()), (catch_up, turn)))
        });
        let opened = opening.await;
        let opened = opened.map_err(|panic| ReplicaError::Ended(panic.to_string()))?;
        let (begun, own) = opened?;
        // If the live replica has the rest in memory, the temporary one is dropped at once.
        let source = match self.shared.attach(name, after)? {
            Some(attached) => Source::Live(attached),
            None => Source::catching_up(own),
        };
        let follower = Follower::new(self.clone(), name, Class::Gating, after, source);
        Ok((begun, follower))
    }

    /// Starts from the newest checkpoint that `is_before` accepts, or the beginning. Blocks.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn catch_up_from_newest(
        &self,
        is_before: impl Fn(&Checkpoint) -> bool,
    ) -> Result<CatchUp, ReplicaError> {
        self.shared.newest(Sequence(u64::MAX), is_before)
    }

    /// As [`Replica::catch_up_from_newest`], or from the oldest checkpoint that the journal
    /// continues. Blocks.
    ///
    /// The oldest one is used when the records after the newest were removed.
    ///
    /// # Errors
    /// The checkpoint folder or the journal cannot be read.
    pub fn catch_up_from_newest_or_oldest(
        &self,
        is_before: impl Fn(&Checkpoint) -> bool,
    ) -> Result<CatchUp, ReplicaError> {
        let newest = self.catch_up_from_newest(is_before)?;
        let shared = &self.shared;
        let reader = shared.reader(Sequence::ZERO);
        let removed = reader.removed_through()?;
        if newest.state().sequence() >= removed {
            return Ok(newest);
        }
        let oldest = image::oldest(&shared.dir, shared.node, shared.limits, removed)?;
        Ok(oldest.map_or(newest, |state| CatchUp::new(state, &reader)))
    }
}

/// State of the live thread.
struct Live {
    shared: Arc<Shared>,
    reader: Reader,
    port: Port,
    keeper: Option<CheckpointKeeper>,
    /// Start of the current quiet period at the commit position.
    quiet_since: Option<Instant>,
    /// Position of the last comparison with the hot thread's core.
    compared: Sequence,
}

/// Why the live replica ends.
enum End {
    /// The node stops.
    Stopped,
    /// The journal is closed or has failed; its owner reports that.
    Journal(ReadError),
    /// Replica and journal, or replica and hot thread, differ.
    Wrong(String),
}

impl End {
    /// A closed or failed journal accepts no orders. One that is written but cannot be read would
    /// continue without a replica, so that ends admission.
    fn of(error: ReadError) -> Self {
        use journal::reader::ReadError as Frames;
        match error {
            ReadError::Journal(Frames::Closed | Frames::Failed(_)) => Self::Journal(error),
            other => Self::Wrong(other.to_string()),
        }
    }
}

impl Live {
    fn run(mut self, stopped: oneshot::Receiver<()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        let end = match runtime {
            Ok(runtime) => {
                let following = || runtime.block_on(self.follow(stopped));
                // A panic also ends the waits of followers and callers.
                catch_unwind(AssertUnwindSafe(following))
                    .unwrap_or_else(|panic| End::Wrong(panic_text(&*panic)))
            }
            Err(error) => End::Wrong(error.to_string()),
        };
        let reason = match end {
            End::Stopped => "the replica has stopped".to_owned(),
            End::Journal(error) => {
                tracing::warn!(%error, "the replica ends with the journal");
                error.to_string()
            }
            End::Wrong(reason) => {
                tracing::error!(
                    reason,
                    severity = "critical",
                    "the replica ends; new orders are refused until a restart"
                );
                metrics::counter!("replica_failures_total").increment(1);
                self.shared.backlog.close();
                reason
            }
        };
        self.shared.trouble(PART, &reason);
        self.shared.hub().end(reason);
        self.shared.turns.close();
        self.shared.turns_of_others.close();
        // Wakes the waiters: they check whether the replica has ended.
        self.shared.troubles.send_modify(|_| {});
    }

    async fn follow(&mut self, mut stopped: oneshot::Receiver<()>) -> End {
        loop {
            let first = tokio::select! {
                biased;
                _ = &mut stopped => return End::Stopped,
                record = self.reader.next() => Some(record),
                () = tokio::time::sleep(IDLE) => None,
            };
            let round = match first {
                Some(Ok(record)) => self.take(record),
                Some(Err(error)) if error.is_transient() => {
                    self.shared.trouble(PART, &error.to_string());
                    self.shared.backlog.sessions_stalled(true);
                    tokio::time::sleep(RETRY).await;
                    Ok(true)
                }
                Some(Err(error)) => Err(End::of(error)),
                None => {
                    // The last read had no error: there is nothing to read.
                    self.shared.well(PART);
                    self.shared.backlog.sessions_stalled(false);
                    self.rest().map(|()| true)
                }
            };
            match round {
                Ok(has_more) => {
                    self.checkpoint();
                    if !has_more {
                        self.pace().await;
                    }
                }
                Err(end) => return end,
            }
        }
    }

    /// Pauses so that records accumulate.
    async fn pace(&self) {
        if self.shared.waiting.load(Ordering::SeqCst) == 0 {
            let hurry = self.shared.hurry.notified();
            // Timeout or notified: continue with the next batch.
            let _ = tokio::time::timeout(PACE, hurry).await;
        }
    }

    /// Applies and publishes up to [`BATCH_RECORDS`] records; true when there may be more.
    fn take(&mut self, first: Record) -> Result<bool, End> {
        self.quiet_since = None;
        self.shared.well(PART);
        self.shared.backlog.sessions_stalled(false);
        let mut records = Vec::with_capacity(BATCH_RECORDS);
        records.push(first);
        let mut failed = None;
        while records.len() < BATCH_RECORDS {
            match self.reader.try_next() {
                Ok(Some(record)) => records.push(record),
                Ok(None) => break,
                // The next read fails again, after these are published.
                Err(error) if error.is_transient() => break,
                Err(error) => {
                    failed = Some(End::of(error));
                    break;
                }
            }
        }
        let has_more = records.len() == BATCH_RECORDS;
        let applied = {
            let mut state = self
                .shared
                .state
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            catch_unwind(AssertUnwindSafe(|| {
                // Not collected: results have no known length, and the list would be moved often.
                let mut applied = Vec::with_capacity(records.len());
                for record in &records {
                    applied.push(state.apply(record)?);
                }
                Ok(applied)
            }))
        };
        let applied = applied
            .map_err(|panic| End::Wrong(panic_text(&*panic)))?
            .map_err(|differs: Differs| End::Wrong(differs.to_string()))?;
        let batch = Batch::new(applied);
        let position = batch.last();
        self.shared.hub().publish(batch);
        self.shared.position.send_replace(position);
        self.shared.backlog.sessions_at(position);
        let settlement = *self.shared.state().core().admission().settlement();
        let known = &self.shared.settlement;
        known.send_if_modified(|known| std::mem::replace(known, settlement) != settlement);
        failed.map_or(Ok(has_more), Err)
    }

    /// Called when no record arrived for a while.
    fn rest(&mut self) -> Result<(), End> {
        let position = *self.shared.position.borrow();
        let since = *self.quiet_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= QUIET && self.compared < position {
            self.compared = position;
            self.compare()?;
        }
        Ok(())
    }

    /// Compares with the hot thread's core, which is idle now.
    fn compare(&mut self) -> Result<(), End> {
        let state = self.shared.state();
        let core = state.core();
        if core.admission().orders().count() > COMPARE_ORDERS_MAX {
            return Ok(());
        }
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let asked = self.port.inspect_with(Box::new(move |live| {
            // The receiver is gone when the replica has ended.
            let _ = tell.try_send((live.sequence(), live.state_hash()));
        }));
        if asked.is_err() {
            return Ok(());
        }
        match told.recv_timeout(INSPECTION_WAIT) {
            // Traffic came in between: try another time.
            Ok((sequence, _)) if sequence != core.sequence() => Ok(()),
            Ok((_, hash)) if hash == core.state_hash() => {
                metrics::counter!("replica_comparisons_total").increment(1);
                Ok(())
            }
            Ok((sequence, _)) => Err(End::Wrong(format!(
                "at command {sequence} the state of the hot thread differs from the replica's"
            ))),
            Err(_) => Ok(()),
        }
    }

    fn checkpoint(&mut self) {
        let position = *self.shared.position.borrow();
        let Some(keeper) = &mut self.keeper else {
            return;
        };
        let is_due = keeper.is_due(position);
        self.shared.backlog.checkpoint_at(keeper.saved());
        if is_due {
            let begun = Instant::now();
            let taken = self.shared.state().take();
            let copied_us = begun.elapsed().as_micros() as f64;
            metrics::gauge!("replica_checkpoint_copy_us").set(copied_us);
            let reader = self.shared.reader(position);
            let removed = move || reader.removed_through().map_err(std::io::Error::other);
            keeper.write(position, removed, move || taken.encode());
        }
    }
}
