//! The live replica: one thread per process follows the journal at the commit position.
//!
//! The thread decodes and applies each record once, compares its events, and publishes the effects
//! to its followers. It also writes the checkpoints, and compares its core with the hot thread's
//! whenever the node is quiet.
//!
//! The thread ends at a difference, a panic or an unreadable journal. Publishing ends with it, and
//! new orders are refused, because the state that reports and settlement rely on is unknown.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use admission::{AdmissionConfig, Settlement};
use sequencer::handle::ReplicaParts;
use sequencer::image::panic_text;
use sequencer::{
    Backlog, CheckpointKeeper, Core, Port, ReadError, Reader, Record, SnapshotConfig, Stats,
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
/// Pause after a batch that is not full, unless a call waits for a record. Without the pause the
/// replica and its followers would run at each commit: once per order, on the hot thread's core.
const BATCH_PAUSE: Duration = Duration::from_millis(1);
/// Timeout of the wait for a record.
const IDLE: Duration = Duration::from_millis(200);
/// Pause before a retry after a read without a file descriptor.
const RETRY: Duration = Duration::from_millis(250);
/// The node counts as quiet after this time without a record.
const QUIET: Duration = Duration::from_secs(1);
/// Maximum number of table rows and resting orders for a comparison with the hot thread. With more,
/// hashing would occupy that thread for more than a few milliseconds. An open order counts twice:
/// admission and its book have a row each.
const COMPARE_ROWS_MAX: usize = 100_000;
/// Maximum wait for an inspection by the hot thread.
const INSPECTION_WAIT: Duration = Duration::from_secs(5);
/// Maximum number of followers that catch up at the same time. Each has a copy of the node's state.
const CATCH_UPS_MAX: usize = 2;
/// Maximum among them of followers that the market does not wait for. The others keep one permit.
const CATCH_UPS_OTHERS_MAX: usize = 1;
/// Maximum number of reads that wait for the live thread.
const THREAD_READS_MAX: usize = 16;

/// A read of the state by the live thread.
type ThreadRead = Box<dyn FnOnce(&State) + Send>;

/// Whether the market waits for a follower (`design.md` 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Gating,
    Other,
}

/// A catch-up permit; released on drop.
pub(crate) struct CatchUpPermit {
    _permit: OwnedSemaphorePermit,
    _other_permit: Option<OwnedSemaphorePermit>,
}

/// A call that waits for a position; unregistered on drop.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.waiting.fetch_add(1, Ordering::SeqCst);
        shared.end_pause.notify_one();
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
    /// Other readers are opened from it.
    reader: Mutex<Reader>,
    dir: PathBuf,
    limits: AdmissionConfig,
    /// Written only by the live thread.
    state: RwLock<State>,
    names: Arc<Names>,
    hub: Mutex<Hub>,
    position: watch::Sender<Sequence>,
    /// Highest lag since [`Replica::take_lag_max`], in records.
    lag_max: AtomicU64,
    /// Number of calls that wait for a position.
    waiting: AtomicUsize,
    /// Ends the thread's pause between batches.
    end_pause: Notify,
    thread_reads: SyncSender<ThreadRead>,
    /// Wakes the idle thread for a read.
    read_added: Notify,
    /// Settlement's positions, as journalled.
    settlement: watch::Sender<Settlement>,
    /// Contains the last sequence that the hot thread assigned.
    stats: Arc<Stats>,
    backlog: Arc<Backlog>,
    catch_up_permits: Arc<Semaphore>,
    other_permits: Arc<Semaphore>,
    /// Current trouble of the live replica and of followers, by name.
    troubles: watch::Sender<BTreeMap<&'static str, String>>,
}

impl Shared {
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records with a sequence that are not applied and published.
    fn lag(&self) -> u64 {
        let assigned = self.stats.sequence.load(Ordering::Acquire);
        assigned.saturating_sub(self.position.borrow().get())
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
    pub async fn catch_up_permit(&self, class: Class) -> Result<CatchUpPermit, ReplicaError> {
        let wait = async |of: &Arc<Semaphore>| {
            let permit = of.clone().acquire_owned().await;
            permit.map_err(|_| ReplicaError::Ended("the replica has stopped".to_owned()))
        };
        let other_permit = match class {
            Class::Gating => None,
            Class::Other => Some(wait(&self.other_permits).await?),
        };
        Ok(CatchUpPermit {
            _permit: wait(&self.catch_up_permits).await?,
            _other_permit: other_permit,
        })
    }

    /// Starts from the newest checkpoint at or before `until` that `accepts` is true for. Blocks.
    pub fn catch_up_from_newest(
        &self,
        until: Sequence,
        accepts: impl Fn(&Checkpoint) -> bool,
    ) -> Result<CatchUp, ReplicaError> {
        let state = image::restore_newest(&self.dir, self.node, self.limits, until, accepts)?;
        Ok(CatchUp::new(state, &self.reader(Sequence::ZERO)))
    }

    pub fn set_trouble(&self, name: &'static str, reason: &str) {
        self.troubles.send_if_modified(|troubles| {
            let known = troubles.insert(name, reason.to_owned());
            known.as_deref() != Some(reason)
        });
    }

    pub fn clear_trouble(&self, name: &'static str) {
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
    /// Starts at the newest checkpoint, or at the journal's beginning without one.
    ///
    /// Runs until the node stops. Writes checkpoints if `checkpoints` is given. Blocks while it
    /// restores a checkpoint.
    ///
    /// # Errors
    /// The checkpoint folder cannot be read, the journal begins after every checkpoint, or no
    /// thread can be started.
    pub fn start(
        node: NodeId,
        parts: ReplicaParts,
        checkpoints: Option<SnapshotConfig>,
    ) -> Result<Self, ReplicaError> {
        // No later checkpoint: the reader could not continue it.
        let durable = parts.reader.end();
        let state = image::restore_newest(&parts.dir, node, parts.limits, durable, |_| true)?;
        let from = state.sequence();
        let reader = parts.reader.reopen_after(from);
        reader.check()?;
        let (thread_reads, reads) = sync_channel(THREAD_READS_MAX);
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
            lag_max: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            end_pause: Notify::new(),
            thread_reads,
            read_added: Notify::new(),
            stats: parts.stats,
            backlog: parts.backlog,
            catch_up_permits: Arc::new(Semaphore::new(CATCH_UPS_MAX)),
            other_permits: Arc::new(Semaphore::new(CATCH_UPS_OTHERS_MAX)),
            troubles: watch::Sender::default(),
        });
        shared.backlog.sessions_at(from);
        let keeper = checkpoints.map(|config| {
            shared.backlog.checkpoint_at(from);
            CheckpointKeeper::new("node", &parts.dir, config, from, parts.usable.clone())
        });
        let live = Live {
            shared: shared.clone(),
            reader,
            reads,
            port: parts.port,
            keeper,
            quiet_since: None,
            compared: Sequence::ZERO,
            released: 0,
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
    /// Reads the current state, which may lack the last durable records.
    pub fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.shared.state())
    }

    /// As [`Replica::read`], by the live thread between two batches.
    ///
    /// For reads of a whole book: a reader of low priority that is preempted would hold the state's
    /// lock, and delay the replica, for tens of milliseconds. `None` when too many reads wait, the
    /// read panics, or the replica ends.
    pub async fn read_on_thread<T: Send + 'static>(
        &self,
        read: impl FnOnce(&State) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, result) = oneshot::channel();
        let read = Box::new(move |state: &State| {
            if !sender.is_closed() {
                drop(sender.send(read(state)));
            }
        });
        self.shared.thread_reads.try_send(read).ok()?;
        self.shared.read_added.notify_one();
        result.await.ok()
    }

    /// Reads the state once it includes every command sequenced by now (R178).
    ///
    /// The state is never older than an answer that the caller has received.
    ///
    /// # Errors
    /// The number of missing records, after `timeout` or when the replica has ended.
    pub async fn read_fresh<T>(
        &self,
        timeout: Duration,
        read: impl FnOnce(&State) -> T,
    ) -> Result<T, u64> {
        let assigned = self.assigned();
        let waited = tokio::time::timeout(timeout, self.wait(assigned)).await;
        let is_running = self.shared.hub().check_running().is_ok();
        match waited {
            Ok(Ok(())) if is_running => Ok(self.read(read)),
            _ => Err(assigned.get().saturating_sub(self.position().get())),
        }
    }

    /// True once the replica has ended; its state then stays as it is.
    pub fn has_ended(&self) -> bool {
        self.shared.hub().check_running().is_err()
    }

    /// Reads the effects of a recent record. `None` before it is applied, and when it is no longer
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

    /// Highest lag since the last call, in records; at least the current lag.
    ///
    /// Each call starts a new maximum, so only one caller can have it.
    pub fn take_lag_max(&self) -> u64 {
        let highest = self.shared.lag_max.swap(0, Ordering::Relaxed);
        highest.max(self.shared.lag())
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

    /// Waits until the record is applied and published.
    ///
    /// # Errors
    /// [`ReplicaError::Ended`]: the replica ended before that.
    pub async fn wait(&self, sequence: Sequence) -> Result<(), ReplicaError> {
        if self.position() >= sequence {
            return Ok(());
        }
        let _waiting = Waiting::new(&self.shared);
        let mut position = self.shared.position.subscribe();
        let reached = position.wait_for(|position| *position >= sequence);
        self.wait_unless_ended(reached).await
    }

    async fn wait_unless_ended(&self, waiting: impl Future) -> Result<(), ReplicaError> {
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
            if let Err(reason) = self.shared.hub().check_running() {
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

    /// Waits until the journal records that the ledger has every posting up to `sequence`.
    ///
    /// # Errors
    /// [`ReplicaError::Ended`]: the replica ended before that.
    pub async fn wait_posted(&self, sequence: Sequence) -> Result<(), ReplicaError> {
        let mut settlement = self.shared.settlement.subscribe();
        let posted = settlement.wait_for(|settlement| settlement.posted >= sequence);
        self.wait_unless_ended(posted).await
    }

    pub fn names(&self) -> &Arc<Names> {
        &self.shared.names
    }

    /// Current troubles of the live replica and its followers, by name.
    pub fn troubles(&self) -> watch::Receiver<BTreeMap<&'static str, String>> {
        self.shared.troubles.subscribe()
    }

    /// Returns a follower of the records after `after` that the market does not wait for.
    ///
    /// It reads records that are no longer in memory from files.
    pub fn follow_detached(&self, name: &'static str, after: Sequence) -> Follower {
        Follower::new(self.clone(), name, Class::Other, after, Source::Detached)
    }

    /// As [`Replica::follow_detached`], for a follower that the market waits for.
    ///
    /// Also returns the result of `begin`, which gets the state at `after`.
    ///
    /// # Errors
    /// The journal ends before `after`, lacks records after every checkpoint, or is unreadable.
    pub async fn follow_from<T: Send + 'static>(
        &self,
        name: &'static str,
        after: Sequence,
        begin: impl FnOnce(&State) -> T + Send + 'static,
    ) -> Result<(T, Follower), ReplicaError> {
        let permit = self.shared.catch_up_permit(Class::Gating).await?;
        let shared = self.shared.clone();
        let opening = tokio::task::spawn_blocking(move || {
            let mut catch_up = shared.catch_up_from_newest(after, |_| true)?;
            let reached = catch_up.run_to(after)?;
            if reached < after {
                let reason = format!("the journal ends at {reached}, before {after}");
                return Err(ReplicaError::Ended(reason));
            }
            Ok((begin(catch_up.state()), (catch_up, permit)))
        });
        let opened = opening.await;
        let opened = opened.map_err(|panic| ReplicaError::Ended(panic.to_string()))?;
        let (begun, own) = opened?;
        // The temporary replica is dropped if the live one has the rest in memory.
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
        self.shared
            .catch_up_from_newest(Sequence(u64::MAX), is_before)
    }

    /// As [`Replica::catch_up_from_newest`], with a fallback. Blocks.
    ///
    /// If the records after that checkpoint were removed, starts from the oldest checkpoint that
    /// the journal continues.
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
        let oldest = image::restore_oldest(&shared.dir, shared.node, shared.limits, removed)?;
        Ok(oldest.map_or(newest, |state| CatchUp::new(state, &reader)))
    }
}

/// State of the live thread.
struct Live {
    shared: Arc<Shared>,
    reader: Reader,
    reads: Receiver<ThreadRead>,
    port: Port,
    keeper: Option<CheckpointKeeper>,
    /// Start of the current quiet period at the commit position.
    quiet_since: Option<Instant>,
    /// Position of the last comparison with the hot thread's core.
    compared: Sequence,
    /// Number of times that the idle thread has released a book's unused memory.
    released: usize,
}

/// Why the live replica ends.
enum End {
    /// The node stops.
    Stopped,
    /// The journal is closed or has failed, which its owner reports.
    Journal(ReadError),
    /// The replica differs from the journal or the hot thread, cannot read, or panicked.
    Failed(String),
}

impl End {
    /// A closed or failed journal accepts no orders itself. Any other error must close admission:
    /// the market would continue without a replica.
    fn of(error: ReadError) -> Self {
        use journal::reader::ReadError as Frames;
        match error {
            ReadError::Journal(Frames::Closed | Frames::Failed(_)) => Self::Journal(error),
            other => Self::Failed(other.to_string()),
        }
    }
}

/// True if a hash of the state takes a few milliseconds at most.
fn is_quick_to_hash(core: &Core) -> bool {
    core.hashed_rows() <= COMPARE_ROWS_MAX
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
                    .unwrap_or_else(|panic| End::Failed(panic_text(&*panic)))
            }
            Err(error) => End::Failed(error.to_string()),
        };
        let reason = match end {
            End::Stopped => "the replica has stopped".to_owned(),
            End::Journal(error) => {
                tracing::warn!(%error, "the replica ends with the journal");
                error.to_string()
            }
            End::Failed(reason) => {
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
        self.shared.set_trouble(PART, &reason);
        self.shared.hub().end(reason);
        self.shared.catch_up_permits.close();
        self.shared.other_permits.close();
        // Wakes the waiters: they check whether the replica has ended.
        self.shared.troubles.send_modify(|_| {});
    }

    async fn follow(&mut self, mut stopped: oneshot::Receiver<()>) -> End {
        loop {
            let idle_at = tokio::time::Instant::now() + IDLE;
            let first = loop {
                tokio::select! {
                    biased;
                    _ = &mut stopped => return End::Stopped,
                    record = self.reader.next() => break Some(record),
                    // Before the reads: frequent ones must not put off what an idle replica does.
                    () = tokio::time::sleep_until(idle_at) => break None,
                    () = self.shared.read_added.notified() => self.answer_reads(),
                }
            };
            let round = match first {
                Some(Ok(record)) => self.apply_batch(record),
                Some(Err(error)) if error.is_transient() => {
                    self.shared.set_trouble(PART, &error.to_string());
                    self.shared.backlog.sessions_stalled(true);
                    tokio::time::sleep(RETRY).await;
                    Ok(true)
                }
                Some(Err(error)) => Err(End::of(error)),
                None => {
                    // No record and no error within the timeout.
                    self.shared.clear_trouble(PART);
                    self.shared.backlog.sessions_stalled(false);
                    self.release_unused();
                    self.compare_when_quiet().map(|()| true)
                }
            };
            match round {
                Ok(has_more) => {
                    self.write_checkpoint();
                    self.answer_reads();
                    if !has_more {
                        self.pause().await;
                    }
                }
                Err(end) => return end,
            }
        }
    }

    fn answer_reads(&self) {
        while let Ok(read) = self.reads.try_recv() {
            let state = self.shared.state();
            // The caller of a read that panics gets no result; the market goes on.
            let _ = catch_unwind(AssertUnwindSafe(|| read(&state)));
        }
    }

    /// Pauses so that records accumulate, unless a call waits for a record.
    async fn pause(&self) {
        if self.shared.waiting.load(Ordering::SeqCst) == 0 {
            let end_pause = self.shared.end_pause.notified();
            // Timeout or notified: continue with the next batch.
            let _ = tokio::time::timeout(BATCH_PAUSE, end_pause).await;
        }
    }

    /// Applies and publishes up to [`BATCH_RECORDS`] records; true when there may be more.
    fn apply_batch(&mut self, first: Record) -> Result<bool, End> {
        self.quiet_since = None;
        self.shared.clear_trouble(PART);
        self.shared.backlog.sessions_stalled(false);
        let mut records = Vec::with_capacity(BATCH_RECORDS);
        records.push(first);
        let mut failed = None;
        while records.len() < BATCH_RECORDS {
            match self.reader.try_next() {
                Ok(Some(record)) => records.push(record),
                Ok(None) => break,
                // The next read fails again, after these records are published.
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
                // Not `collect`: without a known length it would reallocate.
                let mut applied = Vec::with_capacity(records.len());
                for record in &records {
                    applied.push(state.apply(record)?);
                }
                Ok(applied)
            }))
        };
        let applied = applied
            .map_err(|panic| End::Failed(panic_text(&*panic)))?
            .map_err(|differs: Differs| End::Failed(differs.to_string()))?;
        let batch = Batch::new(applied);
        let position = batch.last();
        // Between two batches the lag only grows, so it is highest here.
        let lag = self.shared.lag();
        self.shared.lag_max.fetch_max(lag, Ordering::Relaxed);
        self.shared.hub().publish(batch);
        self.shared.position.send_replace(position);
        self.shared.backlog.sessions_at(position);
        let settlement = *self.shared.state().core().admission().settlement();
        let known = &self.shared.settlement;
        known.send_if_modified(|known| std::mem::replace(known, settlement) != settlement);
        failed.map_or(Ok(has_more), Err)
    }

    /// Releases unused memory of the next book.
    fn release_unused(&mut self) {
        self.released = self.released.wrapping_add(1);
        let state = self.shared.state.write();
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.release_unused(self.released);
    }

    /// Compares with the hot thread's core once the node has been quiet for [`QUIET`].
    fn compare_when_quiet(&mut self) -> Result<(), End> {
        let position = *self.shared.position.borrow();
        let since = *self.quiet_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= QUIET && self.compared < position {
            self.compared = position;
            self.compare()?;
        }
        Ok(())
    }

    /// Compares the state hash with that of the hot thread's core.
    fn compare(&mut self) -> Result<(), End> {
        let state = self.shared.state();
        let core = state.core();
        if !is_quick_to_hash(core) {
            return Ok(());
        }
        let (sender, receiver) = sync_channel(1);
        let submitted = self.port.inspect_with(Box::new(move |live| {
            // The receiver is gone when the replica has ended.
            let _ = sender.try_send((live.sequence(), live.state_hash()));
        }));
        if submitted.is_err() {
            return Ok(());
        }
        match receiver.recv_timeout(INSPECTION_WAIT) {
            // A command came in between: the next quiet period compares again.
            Ok((sequence, _)) if sequence != core.sequence() => Ok(()),
            Ok((_, hash)) if hash == core.state_hash() => {
                metrics::counter!("replica_comparisons_total").increment(1);
                Ok(())
            }
            Ok((sequence, _)) => Err(End::Failed(format!(
                "at command {sequence} the state of the hot thread differs from the replica's"
            ))),
            Err(_) => Ok(()),
        }
    }

    /// Writes a checkpoint if one is due.
    fn write_checkpoint(&mut self) {
        let position = *self.shared.position.borrow();
        let Some(keeper) = &mut self.keeper else {
            return;
        };
        let is_due = keeper.is_due(position);
        self.shared.backlog.checkpoint_at(keeper.saved());
        if is_due {
            let begun = Instant::now();
            let checkpoint = self.shared.state().checkpoint();
            let copied_us = begun.elapsed().as_micros() as f64;
            metrics::gauge!("replica_checkpoint_copy_us").set(copied_us);
            let reader = self.shared.reader(position);
            let removed = move || reader.removed_through().map_err(std::io::Error::other);
            keeper.write(position, removed, move || checkpoint.encode());
        }
    }
}

#[cfg(test)]
mod tests {
    use types::command::BindUser;
    use types::{Command, Envelope, UserId, UserIx};

    use super::*;

    #[test]
    fn a_state_with_many_rows_and_no_order_is_not_compared() {
        let mut core = Core::new(AdmissionConfig {
            orders_max: 16,
            ..AdmissionConfig::default()
        });
        for at in 0..=COMPARE_ROWS_MAX {
            assert!(is_quick_to_hash(&core), "{at} rows");
            let bind = BindUser {
                user: UserIx(at as u32),
                id: UserId::new(&format!("user-{at}")).expect("an id"),
            };
            core.apply(&Envelope {
                sequence: Sequence(at as u64 + 1),
                time_ns: 1,
                received_ns: 1,
                command: Command::BindUser(bind),
            });
        }
        assert!(!is_quick_to_hash(&core));
    }
}
