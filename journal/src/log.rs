//! The log itself: opening, the writer thread, the commit position.
//!
//! Group commit is natural: whatever was handed over while the previous sync ran goes out in the next write. A batch consists of whole units, so
//! the commit position always stands between two commands. After an I/O error the log is failed for good: nothing more is accepted, and nothing
//! that was reported durable is touched.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::watch;

use crate::frame::{self, Frame, FrameKind};
use crate::reader::Reader;
use crate::storage::Storage;
use crate::survey::{self, End};

/// Sizes of the log.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of a segment. A unit never spans two; one that is larger gets a segment of its own size.
    pub segment_bytes: u64,
    /// Most bytes handed over and not yet written; past it [`Appender::is_full`].
    pub pending_bytes_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            segment_bytes: 16 << 20,
            pending_bytes_max: 32 << 20,
        }
    }
}

/// Why a log cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("journal storage: {0}")]
    Io(#[from] io::Error),
    #[error(
        "{file}: damaged at offset {offset}, but later records are whole: something in the middle is lost; restore this file from a copy"
    )]
    Hole { file: String, offset: u64 },
    #[error("{file}: the record at offset {offset} does not continue the one before it")]
    Chain { file: String, offset: u64 },
    #[error("the journal has segment {after} but not {missing}")]
    SegmentMissing { missing: u64, after: u64 },
    #[error("{file}, offset {offset}: {reason}")]
    Content {
        file: String,
        offset: u64,
        reason: String,
    },
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
    /// Size of a segment, never changes.
    pub segment_bytes: u64,
    pub failed: Option<Arc<str>>,
}

/// The commit position, to read and to wait for.
#[derive(Clone)]
pub struct Commit(watch::Receiver<State>);

impl Commit {
    /// Last durable node sequence.
    pub fn position(&self) -> u64 {
        self.0.borrow().sequence
    }

    /// Why the log no longer accepts anything, if so.
    pub fn failure(&self) -> Option<JournalFailed> {
        self.0.borrow().failed.clone().map(JournalFailed)
    }

    /// Waits until `sequence` is durable.
    ///
    /// # Errors
    /// The log failed or was closed before.
    pub async fn wait(&self, sequence: u64) -> Result<(), JournalFailed> {
        let mut state = self.0.clone();
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

#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    is_stopping: bool,
}

struct Shared {
    pending: Mutex<Pending>,
    wake: Condvar,
    state: watch::Sender<State>,
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open log.
pub struct Journal {
    storage: Arc<dyn Storage>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    config: Config,
}

impl Journal {
    /// Opens the log: walks all of it, gives every frame of every whole unit to `visit` in order, cuts a torn tail, starts the writer.
    ///
    /// # Errors
    /// [`JournalError`]; `visit` refuses a frame with a text that becomes [`JournalError::Content`].
    pub fn open(
        storage: Arc<dyn Storage>,
        config: Config,
        visit: impl FnMut(&Frame) -> Result<(), String>,
    ) -> Result<Self, JournalError> {
        let end = survey::mend(&*storage, config, visit)?;
        let (state, _) = watch::channel(State {
            sequence: end.sequence,
            segment: end.segment,
            offset: end.offset,
            segment_bytes: config.segment_bytes,
            failed: None,
        });
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            wake: Condvar::new(),
            state,
        });
        let writer = Writer {
            storage: storage.clone(),
            shared: shared.clone(),
            config,
            end,
        };
        let writer = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run())?;
        Ok(Self {
            storage,
            shared,
            writer: Some(writer),
            config,
        })
    }

    /// The one hand that appends.
    pub fn appender(&self) -> Appender {
        Appender {
            shared: self.shared.clone(),
            local: Vec::with_capacity(1 << 20),
            pending_bytes_max: self.config.pending_bytes_max,
        }
    }

    pub fn commit(&self) -> Commit {
        Commit(self.shared.state.subscribe())
    }

    /// Reads frames of sequences greater than `after`.
    pub fn reader(&self, after: u64) -> Reader {
        Reader::new(self.storage.clone(), self.shared.state.subscribe(), after)
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

/// Collects units and hands them to the writer.
pub struct Appender {
    shared: Arc<Shared>,
    local: Vec<u8>,
    pending_bytes_max: usize,
}

impl Appender {
    /// Adds a frame to the batch that [`Appender::flush`] hands over. The frames of a unit follow one another, its last one says so.
    pub fn append(
        &mut self,
        kind: FrameKind,
        unit_end: bool,
        sequence: u64,
        time_ns: u64,
        payload: &[u8],
    ) {
        frame::write(&mut self.local, kind, unit_end, sequence, time_ns, payload);
    }

    /// Hands over what was appended: whole units.
    pub fn flush(&mut self) {
        if self.local.is_empty() {
            return;
        }
        let mut pending = self.shared.pending();
        if pending.bytes.is_empty() {
            std::mem::swap(&mut pending.bytes, &mut self.local);
        } else {
            pending.bytes.extend_from_slice(&self.local);
        }
        drop(pending);
        self.local.clear();
        self.shared.wake.notify_one();
    }

    /// The disk is behind by more than the bound.
    pub fn is_full(&self) -> bool {
        self.shared.pending().bytes.len() + self.local.len() > self.pending_bytes_max
    }

    /// The log has failed.
    pub fn is_failed(&self) -> bool {
        self.shared.state.borrow().failed.is_some()
    }
}

struct Writer {
    storage: Arc<dyn Storage>,
    shared: Arc<Shared>,
    config: Config,
    end: End,
}

/// A writer that ends with a panic fails the log: who waits for the commit position must hear of it.
struct Latch(Arc<Shared>);

impl Drop for Latch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state.send_modify(|state| {
                state
                    .failed
                    .get_or_insert_with(|| "its writer stopped with a panic".into());
            });
        }
    }
}

impl Writer {
    fn run(mut self) {
        let _latch = Latch(self.shared.clone());
        let mut bytes = Vec::new();
        loop {
            {
                let mut pending = self.shared.pending();
                while pending.bytes.is_empty() && !pending.is_stopping {
                    pending = self
                        .shared
                        .wake
                        .wait(pending)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                if pending.bytes.is_empty() {
                    return;
                }
                bytes.clear();
                std::mem::swap(&mut bytes, &mut pending.bytes);
            }
            if self.shared.state.borrow().failed.is_some() {
                continue;
            }
            if let Err(error) = self.write(&mut bytes) {
                tracing::error!(%error, "the journal cannot be written; no more orders are taken");
                self.shared
                    .state
                    .send_modify(|state| state.failed = Some(error.to_string().into()));
            }
        }
    }

    /// Writes whole units, segment by segment, each part durable before the next.
    fn write(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let room = usize::try_from(self.end.bytes - self.end.offset).unwrap_or(usize::MAX);
            let (part, sequence) = units_within(&bytes[done..], room);
            if part == 0 {
                let next = self.end.segment + 1;
                let size = self
                    .config
                    .segment_bytes
                    .max(first_unit_bytes(&bytes[done..]));
                self.storage.create(next, size)?;
                self.end.segment = next;
                self.end.bytes = size;
                self.end.offset = 0;
                continue;
            }
            let chunk = &mut bytes[done..done + part];
            let batch = self.end.batch + 1;
            let crc = frame::seal(chunk, batch, self.end.crc);
            self.storage
                .write(self.end.segment, self.end.offset, chunk)?;
            self.storage.sync(self.end.segment)?;
            self.end = End {
                offset: self.end.offset + part as u64,
                sequence,
                batch,
                crc,
                ..self.end
            };
            done += part;
            let end = self.end;
            self.shared.state.send_modify(|state| {
                assert!(
                    end.sequence >= state.sequence,
                    "the commit position only grows"
                );
                state.sequence = end.sequence;
                state.segment = end.segment;
                state.offset = end.offset;
            });
        }
        Ok(())
    }
}

/// Length of the longest run of whole units within `room` bytes, and its last sequence.
fn units_within(bytes: &[u8], room: usize) -> (usize, u64) {
    let mut at = 0;
    let mut whole = (0, 0);
    while at < bytes.len() {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let sequence = u64::from_le_bytes(bytes[at + 8..at + 16].try_into().expect("eight bytes"));
        let is_unit_end = bytes[at + 5] & 1 != 0;
        at += frame::frame_bytes(length);
        if at > room {
            break;
        }
        if is_unit_end {
            whole = (at, sequence);
        }
    }
    whole
}

/// Length of the first unit: a mass cancel or a deep sweep can be longer than a segment.
fn first_unit_bytes(bytes: &[u8]) -> u64 {
    let mut at = 0;
    loop {
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let is_unit_end = bytes[at + 5] & 1 != 0;
        at += frame::frame_bytes(length);
        if is_unit_end {
            return at as u64;
        }
    }
}
