//! The log itself: opening, handing over, the commit position.
//!
//! Group commit is natural: whatever was handed over while the previous write ran goes out in the
//! next one. A batch consists of whole units, so the commit position always stands between two
//! commands. After an error of a write or a sync the log is failed for good: nothing more is
//! accepted, and nothing that was reported durable is touched. A segment that cannot be made or
//! opened for want of room, memory or descriptors is tried again: nothing was written to it.
//!
//! The appender makes the finished frames, chain and checksum included, so that the writer's thread
//! touches no byte of them: it swaps buffers and waits for the disk.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{Pid, sched_getaffinity, sched_setaffinity};
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadId, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy,
};
use tokio::sync::watch;

use crate::aligned::Buffer;
use crate::appender::Appender;
use crate::frame::{self, Frame, MARK_BYTES};
use crate::front::Front;
use crate::reader::Reader;
use crate::recent::Recent;
use crate::storage::{Mode, Storage, is_out_of_descriptors};
use crate::survey;
use crate::writer::Writer;

/// Sizes of the log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of a segment. A unit never spans two; one that is larger gets a segment of its own size.
    pub segment_bytes: u64,
    /// Bytes that may wait for the writer; past it [`Appender::is_full`]. A bound for who then
    /// stops appending: what it had begun comes on top, and so does the batch that is being
    /// written, as large again at most. Three buffers of this size are made, and written to once, at
    /// the start, so that the appending thread has no page faults while a disk stalls.
    pub pending_bytes_max: usize,
    /// Bytes of the last batches that stay in memory for readers; 0 = none.
    pub recent_bytes: usize,
}

/// Room behind the bound for what had been begun.
const PENDING_MORE_BYTES: usize = 1 << 20;

impl Config {
    /// An empty buffer, with room for a mark in front, that does not grow as long as the bound holds.
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
        "{file}: damaged at offset {offset}, behind record {sequence}, but later records are whole: something in the middle is lost; restore this file from a copy"
    )]
    Hole {
        file: String,
        offset: u64,
        /// Last record before it.
        sequence: u64,
    },
    #[error("{file}: the record at offset {offset} does not continue the one before it")]
    Chain { file: String, offset: u64 },
    #[error("the journal has segment {after} but not {missing}")]
    SegmentMissing { missing: u64, after: u64 },
    #[error(
        "records up to {through} were removed from the journal's beginning; it begins with {}: those behind {after} cannot be read, and a start needs a state at or behind {through}",
        .through + 1
    )]
    Removed { through: u64, after: u64 },
    #[error(
        "the journal ends at record {end}, but records up to {after} had been durable; they are missing: restore the journal from a copy"
    )]
    Lost { end: u64, after: u64 },
    #[error(
        "{file}: written in version {version} of the format, this program reads {}",
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
    /// No file descriptor. A reader has lost nothing: the same call may be made again.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Io(error) if is_out_of_descriptors(error))
    }
}

/// The disk failed while the platform ran.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the journal has failed: {0}")]
pub struct JournalFailed(pub Arc<str>);

/// Up to where the log is durable.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub sequence: u64,
    pub segment: u64,
    pub offset: u64,
    pub failed: Option<Arc<str>>,
    /// Why the writer waits, while it does.
    pub stalled: Option<Arc<str>>,
}

/// The commit position, to read and to wait for.
#[derive(Clone)]
pub struct Commit {
    state: watch::Receiver<State>,
    durable: Arc<AtomicU64>,
    listeners: Arc<Mutex<Vec<Listener>>>,
}

/// Called by the writer's thread after each advance of the commit position and when the log fails:
/// short, and without waiting.
pub type Listener = Box<dyn Fn() + Send>;

impl Commit {
    /// Last durable node sequence. One load: who spins on it disturbs the writer no more than that.
    pub fn position(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Adds a listener, for the life of the log.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listeners.push(listener);
    }

    /// Why the log no longer accepts anything, if so.
    pub fn failure(&self) -> Option<JournalFailed> {
        self.state.borrow().failed.clone().map(JournalFailed)
    }

    /// Why nothing becomes durable at the moment, if so: the next segment cannot be made. The
    /// writer tries again by itself.
    pub fn stalled(&self) -> Option<Arc<str>> {
        self.state.borrow().stalled.clone()
    }

    /// Waits until `sequence` is durable.
    ///
    /// # Errors
    /// The log failed or was closed before.
    pub async fn wait(&self, sequence: u64) -> Result<(), JournalFailed> {
        let mut state = self.state.clone();
        let state = state
            .wait_for(|state| state.sequence >= sequence || state.failed.is_some())
            .await
            .map_err(|_| JournalFailed("it was closed".into()))?;
        match &state.failed {
            Some(reason) if state.sequence < sequence => Err(JournalFailed(reason.clone())),
            _ => Ok(()),
        }
    }
}

/// What the writer has done since the log was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// How writes become durable here, chosen when the storage was opened.
    pub mode: Mode,
    pub block_bytes: usize,
    /// Writes.
    pub batches: u64,
    /// Bytes of frames in them.
    pub frame_bytes: u64,
    /// Bytes written: with marks and zeros up to whole blocks.
    pub written_bytes: u64,
    /// Segments begun.
    pub segments: u64,
    /// Of these, not ready when they were needed.
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

/// The end of some frames: what the next ones continue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tail {
    pub sequence: u64,
    pub crc: u32,
}

#[derive(Default)]
pub(crate) struct Pending {
    /// Whole units behind room for a mark.
    pub buffer: Buffer,
    pub tail: Tail,
    pub is_stopping: bool,
    /// The writer sleeps: who brings something wakes it.
    pub is_waiting: bool,
}

/// The two names of a thread.
#[derive(Clone, Copy)]
pub(crate) struct WriterThread {
    pub pid: Pid,
    pub thread: ThreadId,
}

pub(crate) struct Shared {
    pub pending: Mutex<Pending>,
    pub wake: Condvar,
    pub state: watch::Sender<State>,
    /// The commit position, for the appender.
    pub durable: Arc<AtomicU64>,
    pub listeners: Arc<Mutex<Vec<Listener>>>,
    pub pending_bytes: AtomicUsize,
    pub is_failed: AtomicBool,
    /// The next segment cannot be made or opened at the moment.
    pub is_stalled: AtomicBool,
    pub counters: Counters,
    pub recent: Arc<Recent>,
    /// Nanoseconds from the beginning of a large write to that of the next; 0 = the disk alone decides.
    pub gather_ns: AtomicU64,
    /// Of the writer's thread.
    pub writer: OnceLock<WriterThread>,
}

impl Shared {
    pub fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The writer waits for its next segment, or goes on.
    pub fn stall(&self, reason: Option<String>) {
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
        self.tell_listeners();
    }

    pub fn tell_listeners(&self) {
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
    /// Where the appender begins; taken by it.
    start: Mutex<Option<Tail>>,
}

impl Journal {
    /// Opens the log: walks all of it, gives every frame of every whole unit to `visit` in order,
    /// cuts a torn tail, starts the writer.
    ///
    /// # Errors
    /// [`JournalError`]; `visit` refuses a frame with a text that becomes [`JournalError::Content`].
    pub fn open(
        storage: Arc<dyn Storage>,
        config: Config,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        Self::open_after(storage, config, 0, visit)
    }

    /// The same for somebody who knows the state after record `after`: segments wholly before it
    /// are not looked at. Frames at or before `after` may still be given.
    ///
    /// # Errors
    /// [`JournalError::Removed`] when the log begins behind it, [`JournalError::Lost`] when it ends
    /// before it: then nothing of it was changed.
    pub fn open_after(
        storage: Arc<dyn Storage>,
        config: Config,
        after: u64,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        Self::open_reaching(storage, config, after, after, visit)
    }

    /// The same for somebody who also knows that the log once was durable up to record `reach`.
    ///
    /// # Errors
    /// As [`Journal::open_after`]; [`JournalError::Lost`] also when it ends before `reach`.
    pub fn open_reaching(
        storage: Arc<dyn Storage>,
        config: Config,
        after: u64,
        reach: u64,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        let end = survey::mend(&*storage, config, after, reach, visit)?;
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
            "the journal is open"
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
            start: Mutex::new(Some(Tail {
                sequence: end.sequence,
                crc: end.crc,
            })),
        })
    }

    /// The one hand that appends.
    ///
    /// # Panics
    /// There is one already.
    pub fn appender(&self) -> Appender {
        let start = self
            .start
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .expect("a log has one appender");
        Appender::new(self.shared.clone(), self.config, start)
    }

    /// For somebody who spins on these cores: keeps the log's threads off them, as long as there
    /// are others on which they may run, and has them go before whatever spins there. They work for
    /// some microseconds a write and sleep; as equals they would wait for the end of somebody's
    /// slice, some milliseconds, each time the disk has answered. Where the system does not allow
    /// it they stay as they are.
    pub fn keep_off(&self, cores: Range<usize>) {
        let writer = *self.shared.writer.wait();
        let kept = sched_getaffinity(Some(writer.pid)).and_then(|mut set| {
            cores.for_each(|core| set.unset(core));
            // Threads that it starts inherit the set, and the priority.
            match set.count() {
                0 => Ok(()),
                _ => sched_setaffinity(Some(writer.pid), &set),
            }
        });
        if let Err(error) = kept {
            tracing::warn!(%error, "the journal's threads run on any core");
        }
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
        let raised = set_thread_priority_and_policy(writer.thread, ThreadPriority::Min, policy);
        if let Err(error) = raised {
            tracing::warn!(
                ?error,
                "the journal's threads wait for their turn like all others"
            );
        }
    }

    /// Has a write that carried much followed by the next no sooner than so long behind its
    /// beginning: where the writer shares a core with a thread that spins, many small writes take
    /// more of it than few large ones. Single commands are written at once all the same.
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

    /// Reads frames of sequences greater than `after`.
    pub fn reader(&self, after: u64) -> Reader {
        let (storage, recent) = (self.storage.clone(), self.shared.recent.clone());
        Reader::new(storage, recent, self.shared.state.subscribe(), after)
    }

    /// The log's beginning, from which segments can be taken away.
    pub fn front(&self) -> Front {
        Front::new(self.storage.clone(), self.shared.state.subscribe())
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

    /// Writes what is pending, syncs, ends the thread.
    pub fn close(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.pending().is_stopping = true;
        self.shared.wake.notify_all();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the journal's writer ended with a panic");
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.stop();
    }
}
