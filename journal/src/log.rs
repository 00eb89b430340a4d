//! The log: opening, hand-over to the writer, commit position.
//!
//! Group commit is natural: units handed over while one write runs go out in the next one. A batch
//! consists of whole units, so the commit position is always between two commands. After a write or
//! sync error the log is failed for good: nothing more is accepted, and records reported durable
//! are not touched. Creating or opening a segment is retried after a shortage of space, memory or
//! descriptors, since the segment contains nothing yet.
//!
//! The appender makes the frames. The writer's thread swaps buffers, adds checksums and chain, a
//! mark per batch, and waits for the disk.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadId, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy,
};
use tokio::sync::watch;

use crate::aligned::Buffer;
use crate::appender::Appender;
use crate::frame::{self, Frame, MARK_BYTES};
use crate::reader::Reader;
use crate::recent::Recent;
use crate::scan;
use crate::storage::{Mode, Storage, is_out_of_descriptors};
use crate::truncate::SegmentTruncator;
use crate::writer::Writer;

/// Sizes of the log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of a segment. A unit never spans two; a larger one gets a segment of its own size.
    pub segment_bytes: u64,
    /// Soft limit of the bytes that wait for the writer; above it [`Appender::room`] returns
    /// [`crate::Room::Full`].
    ///
    /// Units in flight come on top, and so does the batch being written, which is at most as large
    /// again. At the start three buffers of this size are allocated and written to once: the
    /// appending thread has no page faults while a disk stalls.
    pub pending_bytes_max: usize,
    /// Bytes of the last batches kept in memory for readers; 0 = none.
    pub recent_bytes: usize,
}

/// Extra capacity of each buffer, for units in flight.
const PENDING_MORE_BYTES: usize = 1 << 20;

impl Config {
    /// An empty buffer with space for a mark at its start. It does not grow within the limit.
    pub(crate) fn buffer(&self) -> Buffer {
        let mut buffer = Buffer::default();
        buffer.resize(self.pending_bytes_max + PENDING_MORE_BYTES);
        buffer.resize(MARK_BYTES);
        buffer
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
            pending_bytes_max: 32 << 20,
            recent_bytes: 16 << 20,
        }
    }
}

/// Why a log cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("journal storage: {0}")]
    Io(#[from] io::Error),
    #[error(
        "{file}: damaged at offset {offset}, after record {sequence}, but later records are whole: \
         records in the middle are lost; restore this file from a copy"
    )]
    Hole {
        file: String,
        offset: u64,
        /// Last record before the damaged place.
        sequence: u64,
    },
    #[error(
        "{file}: the record at offset {offset} does not continue the one before it; restore this file \
         from a copy"
    )]
    Chain { file: String, offset: u64 },
    #[error(
        "the journal has segment {after} but segment {missing} is missing; restore it from a copy"
    )]
    SegmentMissing { missing: u64, after: u64 },
    #[error(
        "the journal was truncated through record {through} and begins with {}: cannot read after \
         {after}; start from a snapshot at or after {through}",
        .through + 1
    )]
    Removed { through: u64, after: u64 },
    #[error(
        "the journal ends at record {end}, but records through {after} were durable: restore the \
         journal from a copy"
    )]
    Lost { end: u64, after: u64 },
    #[error(
        "{file}: format version {version}, this program reads version {}",
        frame::VERSION
    )]
    Version { file: String, version: u16 },
    #[error("{file}, offset {offset}: {reason}")]
    Content {
        file: String,
        offset: u64,
        reason: String,
    },
}

impl JournalError {
    /// True when the process is out of file descriptors. The call may be retried without loss.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Io(error) if is_out_of_descriptors(error))
    }
}

/// The log has failed, or was closed before a record became durable.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the journal has failed: {0}")]
pub struct JournalFailed(pub Arc<str>);

/// Durable position of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub sequence: u64,
    pub segment: u64,
    pub offset: u64,
    pub failed: Option<Arc<str>>,
    /// Why the writer waits for its next segment, if it does.
    pub stalled: Option<Arc<str>>,
}

/// Commit position, to read and to wait for.
#[derive(Clone)]
pub struct Commit {
    state: watch::Receiver<State>,
    durable: Arc<AtomicU64>,
    listeners: Arc<Mutex<Vec<Listener>>>,
}

/// Called by the writer's thread after each advance of the commit position and when the log fails.
/// Must be short and must not block.
pub type Listener = Box<dyn Fn() + Send>;

impl Commit {
    /// Last durable node sequence. One atomic load: a caller may spin on it.
    pub fn position(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Adds a listener for the lifetime of the log.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.push(listener);
    }

    /// Why the log has failed, if it has.
    pub fn failure(&self) -> Option<JournalFailed> {
        self.state.borrow().failed.clone().map(JournalFailed)
    }

    /// Why the next segment cannot be created or opened at present, if so.
    ///
    /// Nothing becomes durable meanwhile. The writer retries.
    pub fn stalled(&self) -> Option<Arc<str>> {
        self.state.borrow().stalled.clone()
    }

    /// Waits until `sequence` is durable.
    ///
    /// # Errors
    /// The log failed or was closed before that.
    pub async fn wait(&self, sequence: u64) -> Result<(), JournalFailed> {
        let mut state = self.state.clone();
        let state = state
            .wait_for(|state| state.sequence >= sequence || state.failed.is_some())
            .await
            .map_err(|_| JournalFailed("closed before the record became durable".into()))?;
        match &state.failed {
            Some(reason) if state.sequence < sequence => Err(JournalFailed(reason.clone())),
            _ => Ok(()),
        }
    }
}

/// Writer statistics since the log was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// How writes become durable; chosen when the storage is opened.
    pub mode: Mode,
    pub block_bytes: usize,
    /// Writes.
    pub batches: u64,
    /// Bytes of frames in them.
    pub frame_bytes: u64,
    /// Bytes written, with marks and padding to whole blocks.
    pub written_bytes: u64,
    /// Segments started.
    pub segments: u64,
    /// Segments that were not ready when needed.
    pub segment_waits: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub batches: AtomicU64,
    pub frame_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub segments: AtomicU64,
    pub segment_waits: AtomicU64,
}

#[derive(Default)]
pub(crate) struct Pending {
    /// Whole units after the space for a mark.
    pub buffer: Buffer,
    /// Sequence of the last unit.
    pub sequence: u64,
    pub is_stopping: bool,
    /// The writer sleeps: the appender must wake it.
    pub is_waiting: bool,
}

/// Kernel id and pthread id of the writer's thread.
#[derive(Clone, Copy)]
pub(crate) struct WriterThread {
    pub pid: Pid,
    pub thread: ThreadId,
}

pub(crate) struct Shared {
    pub pending: Mutex<Pending>,
    pub wake: Condvar,
    pub state: watch::Sender<State>,
    /// Commit position, for the appender.
    pub durable: Arc<AtomicU64>,
    pub listeners: Arc<Mutex<Vec<Listener>>>,
    pub pending_bytes: AtomicUsize,
    pub is_failed: AtomicBool,
    /// The next segment cannot be created or opened at present.
    pub is_stalled: AtomicBool,
    pub counters: Counters,
    pub recent: Arc<Recent>,
    /// Minimum nanoseconds from the start of a large write to that of the next; 0 = none.
    pub gather_ns: AtomicU64,
    /// Set by the writer's thread.
    pub writer: OnceLock<WriterThread>,
}

impl Shared {
    pub fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes why the writer waits for its next segment; `None` when it continues.
    pub fn set_stalled(&self, reason: Option<String>) {
        if reason.is_none() && !self.is_stalled.load(Ordering::Relaxed) {
            return;
        }
        self.is_stalled.store(reason.is_some(), Ordering::Release);
        self.state.send_modify(|state| {
            state.stalled = reason.map(Into::into);
        });
    }

    pub fn fail(&self, reason: &str) {
        self.is_failed.store(true, Ordering::Release);
        self.state.send_modify(|state| {
            state.failed.get_or_insert_with(|| reason.into());
        });
        self.notify_listeners();
    }

    pub fn notify_listeners(&self) {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.iter().for_each(|listener| listener());
    }
}

/// An open log.
pub struct Journal {
    storage: Arc<dyn Storage>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    config: Config,
    /// Sequence after which the appender begins; `None` once there is an appender.
    start: Mutex<Option<u64>>,
}

impl Journal {
    /// Opens the log and starts the writer: scans all of it and truncates a torn tail.
    ///
    /// Calls `visit` with every frame of every whole unit, in order.
    ///
    /// # Errors
    /// [`JournalError`]; an error text of `visit` becomes [`JournalError::Content`].
    pub fn open(
        storage: Arc<dyn Storage>,
        config: Config,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        Self::open_after(storage, config, 0, visit)
    }

    /// As [`Journal::open`], for a caller that has the state after record `after`.
    ///
    /// Earlier segments are not read. `visit` may still see frames at or before `after`.
    ///
    /// # Errors
    /// [`JournalError::Removed`] when the record after `after` was removed, [`JournalError::Lost`]
    /// when the log ends before `after`. The log is then unchanged.
    pub fn open_after(
        storage: Arc<dyn Storage>,
        config: Config,
        after: u64,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        Self::open_reaching(storage, config, after, after, visit)
    }

    /// As [`Journal::open_after`], for a log known to have been durable up to record `reach`.
    ///
    /// # Errors
    /// As [`Journal::open_after`]; [`JournalError::Lost`] also when the log ends before `reach`.
    pub fn open_reaching(
        storage: Arc<dyn Storage>,
        config: Config,
        after: u64,
        reach: u64,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        let end = scan::repair(&*storage, config, after, reach, visit)?;
        storage.begin(end.segment)?;
        let (state, _) = watch::channel(State {
            sequence: end.sequence,
            segment: end.segment,
            offset: end.offset,
            failed: None,
            stalled: None,
        });
        let shared = Arc::new(Shared {
            pending: Mutex::new(Pending {
                buffer: config.buffer(),
                ..Pending::default()
            }),
            wake: Condvar::new(),
            state,
            durable: Arc::new(AtomicU64::new(end.sequence)),
            listeners: Arc::default(),
            pending_bytes: AtomicUsize::new(0),
            is_failed: AtomicBool::new(false),
            is_stalled: AtomicBool::new(false),
            counters: Counters::default(),
            recent: Arc::new(Recent::new(config.recent_bytes)),
            gather_ns: AtomicU64::new(0),
            writer: OnceLock::new(),
        });
        tracing::info!(
            mode = storage.mode().name(),
            sequence = end.sequence,
            segment = end.segment,
            "journal opened"
        );
        let writer = Writer::new(storage.clone(), shared.clone(), config, end);
        let writer = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run())?;
        Ok(Self {
            storage,
            shared,
            writer: Some(writer),
            config,
            start: Mutex::new(Some(end.sequence)),
        })
    }

    /// Returns the only appender.
    ///
    /// # Panics
    /// The appender was taken already.
    pub fn appender(&self) -> Appender {
        let start = self
            .start
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .expect("the journal's only appender was taken already");
        Appender::new(self.shared.clone(), self.config, start)
    }

    /// Keeps the log's threads off `cores`, on which threads spin, and raises their priority.
    ///
    /// The threads stay on all cores if no other core is left. They work for a few microseconds per
    /// write and then sleep. With equal priority they would wait after each disk completion for the
    /// end of a spinning thread's time slice, some milliseconds. Failures are logged as warnings.
    pub fn keep_off(&self, cores: Range<usize>) {
        let cores = cores.start..cores.end.min(CpuSet::MAX_CPU);
        self.place(|set| cores.for_each(|core| set.unset(core)));
    }

    /// Keeps the log's threads on `core` and raises their priority, as [`Journal::keep_off`] does.
    pub fn keep_on(&self, core: usize) {
        self.place(|set| {
            set.clear();
            // No machine has the last core of the set: the system refuses it.
            set.set(core.min(CpuSet::MAX_CPU - 1));
        });
    }

    fn place(&self, choose: impl FnOnce(&mut CpuSet)) {
        let writer = *self.shared.writer.wait();
        let placed = sched_getaffinity(Some(writer.pid)).and_then(|mut set| {
            choose(&mut set);
            // Threads that the writer starts inherit the set and the priority.
            match set.count() {
                0 => Ok(()),
                _ => sched_setaffinity(Some(writer.pid), &set),
            }
        });
        if let Err(error) = placed {
            tracing::warn!(%error, "cannot choose the cores of the journal's threads; they run on any core");
        }
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
        let raised = set_thread_priority_and_policy(writer.thread, ThreadPriority::Min, policy);
        if let Err(error) = raised {
            tracing::warn!(
                ?error,
                "cannot raise the priority of the journal's threads; disk completions may be delayed"
            );
        }
    }

    /// Delays the write after a large one until `time` has passed since the large one began.
    ///
    /// Few large writes take less of a core that the writer shares with a spinning thread than many
    /// small ones. A write after a single command is not delayed.
    pub fn gather(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.shared.gather_ns.store(time_ns, Ordering::Relaxed);
    }

    pub fn commit(&self) -> Commit {
        Commit {
            state: self.shared.state.subscribe(),
            durable: self.shared.durable.clone(),
            listeners: self.shared.listeners.clone(),
        }
    }

    /// Returns a reader of the frames after record `after`.
    pub fn reader(&self, after: u64) -> Reader {
        let (storage, recent) = (self.storage.clone(), self.shared.recent.clone());
        Reader::new(storage, recent, self.shared.state.subscribe(), after)
    }

    /// Returns a handle that removes segments from the log's beginning.
    pub fn truncator(&self) -> SegmentTruncator {
        SegmentTruncator::new(self.storage.clone(), self.shared.state.subscribe())
    }

    pub fn stats(&self) -> Stats {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            mode: self.storage.mode(),
            block_bytes: self.storage.block_bytes(),
            batches: get(&counters.batches),
            frame_bytes: get(&counters.frame_bytes),
            written_bytes: get(&counters.written_bytes),
            segments: get(&counters.segments),
            segment_waits: get(&counters.segment_waits),
        }
    }

    /// Writes pending units, syncs and ends the thread.
    pub fn close(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.pending().is_stopping = true;
        self.shared.wake.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the journal's writer thread panicked");
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.stop();
    }
}
