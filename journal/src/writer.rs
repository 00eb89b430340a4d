//! The writer's thread: takes pending units, adds checksums and a mark, writes them, advances the
//! commit position.
//!
//! A second thread creates the next segment ahead of need.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::aligned::Buffer;
use crate::frame::{self, MARK_BYTES, Mark};
use crate::log::{Config, Shared, WriterThread};
use crate::recent::Missed;
use crate::scan::End;
use crate::storage::{Storage, is_out_of_descriptors};

/// First pause between attempts to create or open a segment; each further one is twice as long.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// Longest pause.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A larger batch has several commands: the next write may be delayed to gather more of them.
const GATHER_FROM_BYTES: usize = 4_096;

pub(crate) struct Writer {
    storage: Arc<dyn Storage>,
    shared: Arc<Shared>,
    block: usize,
    segment_bytes: u64,
    end: End,
    /// Swapped for the pending buffer.
    buffer: Buffer,
    /// For batches that have to be split.
    scratch: Buffer,
    ahead: NextSegment,
    missed: Missed,
}

/// Fails the log when the writer panics, so that waiters for the commit position get an error.
struct FailOnPanic(Arc<Shared>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("the writer thread panicked");
        }
    }
}

impl Writer {
    pub fn new(storage: Arc<dyn Storage>, shared: Arc<Shared>, config: Config, end: End) -> Self {
        let block = storage.block_bytes();
        Self {
            segment_bytes: config.segment_bytes.next_multiple_of(block as u64),
            block,
            ahead: NextSegment::default(),
            missed: Missed::default(),
            storage,
            shared,
            end,
            buffer: config.buffer(),
            scratch: Buffer::default(),
        }
    }

    pub fn run(mut self) {
        let _guard = FailOnPanic(self.shared.clone());
        self.shared.writer.get_or_init(|| WriterThread {
            pid: rustix::thread::gettid(),
            thread: thread_priority::thread_native_id(),
        });
        let mut buffer = std::mem::take(&mut self.buffer);
        while let Some(sequence) = self.take_pending(&mut buffer) {
            if self.shared.is_failed.load(Ordering::Acquire) {
                continue;
            }
            let (begun, bytes) = (Instant::now(), buffer.len());
            if let Err(error) = self.write(&mut buffer, sequence) {
                tracing::error!(%error, "journal write failed; no more orders are accepted until a restart");
                self.shared.fail(&error.to_string());
            } else if bytes > GATHER_FROM_BYTES {
                let gather = Duration::from_nanos(self.shared.gather_ns.load(Ordering::Relaxed));
                std::thread::sleep(gather.saturating_sub(begun.elapsed()));
            }
        }
    }

    /// Waits for units and swaps them into `buffer`. Returns their last sequence; `None` when
    /// closed and all is written.
    fn take_pending(&self, buffer: &mut Buffer) -> Option<u64> {
        buffer.resize(MARK_BYTES);
        let mut pending = self.shared.pending();
        while pending.buffer.len() <= MARK_BYTES {
            if pending.is_stopping {
                return None;
            }
            pending.is_waiting = true;
            pending = self
                .shared
                .wake
                .wait(pending)
                .unwrap_or_else(PoisonError::into_inner);
        }
        pending.is_waiting = false;
        std::mem::swap(buffer, &mut pending.buffer);
        self.shared.pending_bytes.store(0, Ordering::Relaxed);
        Some(pending.sequence)
    }

    fn room(&self) -> u64 {
        self.end.bytes.saturating_sub(self.end.offset)
    }

    fn extent(&self, bytes: usize) -> u64 {
        bytes.next_multiple_of(self.block) as u64
    }

    fn write(&mut self, buffer: &mut Buffer, last: u64) -> io::Result<()> {
        if self.extent(buffer.len()) > self.room() {
            if self.extent(buffer.len()) > self.segment_bytes {
                return self.split(buffer);
            }
            self.roll(self.segment_bytes)?;
        }
        self.write_batch(buffer, last)
    }

    /// Splits units into batches that fit their segments; each is durable before the next.
    fn split(&mut self, buffer: &Buffer) -> io::Result<()> {
        let mut rest = &buffer.bytes()[MARK_BYTES..];
        let mut batch = std::mem::take(&mut self.scratch);
        while !rest.is_empty() {
            let (mut bytes, mut last) = (0, 0);
            while bytes < rest.len() {
                let unit = frame::first_unit(&rest[bytes..]);
                if self.extent(MARK_BYTES + bytes + unit.bytes) > self.room() {
                    break;
                }
                bytes += unit.bytes;
                last = unit.sequence;
            }
            if bytes == 0 {
                let unit = self.extent(MARK_BYTES + frame::first_unit(rest).bytes);
                self.roll(self.segment_bytes.max(unit))?;
                continue;
            }
            batch.resize(MARK_BYTES);
            batch.extend(&rest[..bytes]);
            self.write_batch(&mut batch, last)?;
            rest = &rest[bytes..];
        }
        self.scratch = batch;
        Ok(())
    }

    /// Adds checksums to a batch that fits into the segment; durable when it returns. `last` is the
    /// sequence of its last unit.
    fn write_batch(&mut self, buffer: &mut Buffer, last: u64) -> io::Result<()> {
        let frame_bytes = (buffer.len() - MARK_BYTES) as u64;
        let extent = self.extent(buffer.len());
        assert!(extent <= self.room(), "batch exceeds its segment");
        assert!(last > self.end.sequence, "commit position must increase");
        let mark = frame::mark(&Mark {
            batch: self.end.batch + 1,
            extent,
            durable: self.end.sequence,
            last,
            prev: self.end.crc,
        });
        buffer.bytes_mut()[..MARK_BYTES].copy_from_slice(&mark);
        let crc = frame::add_checksums(&mut buffer.bytes_mut()[MARK_BYTES..], self.end.crc);
        let blocks = buffer.padded(self.block);
        self.storage
            .write(self.end.segment, self.end.offset, blocks)?;
        self.storage.sync(self.end.segment)?;
        self.end = End {
            offset: self.end.offset + extent,
            sequence: last,
            batch: self.end.batch + 1,
            crc,
            ..self.end
        };
        let counters = &self.shared.counters;
        counters.batches.fetch_add(1, Ordering::Relaxed);
        counters
            .frame_bytes
            .fetch_add(frame_bytes, Ordering::Relaxed);
        counters.written_bytes.fetch_add(extent, Ordering::Relaxed);
        self.shared.durable.store(last, Ordering::Release);
        // Before the rest, because reports to clients wait for this call.
        self.shared.notify_listeners();
        let offset = self.end.offset - extent;
        let end = self.end;
        let recent = &self.shared.recent;
        recent.push(&mut self.missed, end.segment, offset, buffer.bytes());
        self.shared.state.send_modify(|state| {
            state.sequence = end.sequence;
            state.segment = end.segment;
            state.offset = end.offset;
        });
        if self.end.offset > self.end.bytes / 2 {
            self.ahead
                .begin(&self.storage, self.end.segment + 1, self.segment_bytes);
        }
        Ok(())
    }

    /// Retries the creation or opening of a segment while space, memory or descriptors are short.
    ///
    /// The segment contains no log data yet, so a failure loses nothing. Appended units wait in
    /// memory.
    ///
    /// # Errors
    /// Any other error, or the last shortage if the log is closed meanwhile.
    fn retry_on_shortage(&self, segment: u64, step: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let shared = &self.shared;
        let mut pause = RETRY_FIRST;
        loop {
            let error = match step() {
                Err(error) if is_shortage(&error) => error,
                ended => {
                    shared.set_stalled(None);
                    return ended;
                }
            };
            let name = self.storage.name(segment);
            if !shared.is_stalled.load(Ordering::Relaxed) {
                tracing::error!(
                    %error,
                    segment = name,
                    "cannot create or open the journal's next segment; new orders are refused until this succeeds"
                );
            }
            shared.set_stalled(Some(format!(
                "cannot create or open the journal's next segment {name}: {error}"
            )));
            let pending = shared.pending();
            let (pending, _) = shared
                .wake
                .wait_timeout_while(pending, pause, |pending| !pending.is_stopping)
                .unwrap_or_else(PoisonError::into_inner);
            if pending.is_stopping {
                drop(pending);
                return step();
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    /// Switches to the next segment; creates it with `bytes` unless it is ready.
    fn roll(&mut self, bytes: u64) -> io::Result<()> {
        let next = self.end.segment + 1;
        let (is_made, was_ready) = self.ahead.take(next, bytes);
        if !is_made {
            self.retry_on_shortage(next, || self.storage.create(next, bytes))?;
        }
        self.retry_on_shortage(next, || self.storage.begin(next))?;
        self.end.segment = next;
        self.end.bytes = bytes;
        self.end.offset = 0;
        let counters = &self.shared.counters;
        counters.segments.fetch_add(1, Ordering::Relaxed);
        counters
            .segment_waits
            .fetch_add(u64::from(!was_ready), Ordering::Relaxed);
        Ok(())
    }
}

/// True for a lack of space, memory or descriptors, which may be temporary.
fn is_shortage(error: &io::Error) -> bool {
    let codes = [Errno::NOSPC, Errno::DQUOT, Errno::NOMEM];
    let code = error.raw_os_error();
    error.kind() == io::ErrorKind::StorageFull
        || is_out_of_descriptors(error)
        || codes.iter().any(|errno| code == Some(errno.raw_os_error()))
}

/// Creates the next segment while the current one fills.
#[derive(Default)]
struct NextSegment(Option<Creation>);

struct Creation {
    segment: u64,
    bytes: u64,
    done: mpsc::Receiver<io::Result<()>>,
}

impl NextSegment {
    /// Starts to create a segment, once.
    fn begin(&mut self, storage: &Arc<dyn Storage>, segment: u64, bytes: u64) {
        if self
            .0
            .as_ref()
            .is_some_and(|creation| creation.segment == segment)
        {
            return;
        }
        let (result, done) = mpsc::sync_channel(1);
        let storage = storage.clone();
        let thread = std::thread::Builder::new().name("journal-next".to_owned());
        let started = thread.spawn(move || {
            // No receiver when the log was closed meanwhile.
            let _ = result.send(storage.create(segment, bytes));
        });
        match started {
            Ok(_) => {
                self.0 = Some(Creation {
                    segment,
                    bytes,
                    done,
                });
            }
            Err(error) => tracing::warn!(
                %error,
                "cannot start the thread that creates the journal's next segment ahead; \
                 retrying when it is needed"
            ),
        }
    }

    /// Returns whether the segment was created, and whether the attempt had ended before the call.
    ///
    /// After a failure the caller creates the segment and gets the error.
    fn take(&mut self, segment: u64, bytes: u64) -> (bool, bool) {
        let Some(creation) = self.0.take() else {
            return (false, false);
        };
        let (answer, was_ready) = match creation.done.try_recv() {
            Ok(answer) => (Ok(answer), true),
            Err(_) => (creation.done.recv(), false),
        };
        if let Ok(Err(error)) = &answer {
            tracing::warn!(
                %error,
                segment = creation.segment,
                "cannot create the journal's next segment ahead; retrying when it is needed"
            );
        }
        let is_requested = creation.segment == segment && creation.bytes == bytes;
        (is_requested && matches!(answer, Ok(Ok(()))), was_ready)
    }
}

impl Drop for NextSegment {
    fn drop(&mut self) {
        // No thread that outlives the log may be creating a segment.
        if let Some(creation) = self.0.take() {
            let _ = creation.done.recv();
        }
    }
}
