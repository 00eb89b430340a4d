//! Appends frames to a local buffer, which is swapped for an empty one of the writer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, TryLockError};

use crate::aligned::Buffer;
use crate::frame::{self, FrameKind, MARK_BYTES, SMALL_BYTES};
use crate::log::{Config, Pending, Shared};

/// How much room is left for bytes that wait for the writer, of [`Config::pending_bytes_max`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    Free,
    /// More than seven eighths are used: the rest is a reserve.
    Reserve,
    /// More bytes wait than the limit allows.
    Full,
}

/// Bytes that [`Appender::flush_batch`] adds to others that wait for the writer.
const BATCH_BYTES: usize = 4_096;

/// Makes frames and hands whole units to the writer.
///
/// Makes no system call unless the writer sleeps, or swaps buffers during [`Appender::flush`].
pub struct Appender {
    shared: Arc<Shared>,
    /// Frames after the space for a mark.
    local: Buffer,
    /// Sequence of the last frame.
    sequence: u64,
    /// True when the last frame ended its unit.
    is_whole: bool,
    durable: u64,
    pending_bytes_max: usize,
}

impl Appender {
    pub(crate) fn new(shared: Arc<Shared>, config: Config, start: u64) -> Self {
        Self {
            shared,
            local: config.buffer(),
            sequence: start,
            is_whole: true,
            durable: start,
            pending_bytes_max: config.pending_bytes_max,
        }
    }

    /// Adds a frame to the batch that [`Appender::flush`] hands over.
    ///
    /// The frames of a unit are consecutive; `unit_end` is set on the last one.
    pub fn append(
        &mut self,
        kind: FrameKind,
        unit_end: bool,
        sequence: u64,
        time_ns: u64,
        payload: &[u8],
    ) {
        frame::write(
            &mut self.local,
            kind,
            unit_end,
            sequence,
            time_ns,
            self.durable,
            payload,
        );
        self.sequence = sequence;
        self.is_whole = unit_end;
    }

    /// As [`Appender::append`], for a payload that `fill` writes in place.
    ///
    /// `fill` returns the payload's length, 1 to [`SMALL_BYTES`].
    #[inline]
    pub fn append_small(
        &mut self,
        kind: FrameKind,
        unit_end: bool,
        sequence: u64,
        time_ns: u64,
        fill: impl FnOnce(&mut [u8; SMALL_BYTES]) -> usize,
    ) {
        frame::write_small(
            &mut self.local,
            kind,
            unit_end,
            sequence,
            time_ns,
            self.durable,
            fill,
        );
        self.sequence = sequence;
        self.is_whole = unit_end;
    }

    /// Hands the appended units to the writer. Waits while the writer swaps buffers.
    pub fn flush(&mut self) {
        if self.local.len() > MARK_BYTES {
            assert!(self.is_whole, "flush inside a unit");
            let pending = self.shared.pending();
            hand_over(&self.shared, pending, &mut self.local, self.sequence);
            self.durable = self.shared.durable.load(Ordering::Acquire);
        }
    }

    /// As [`Appender::flush`] without waiting.
    ///
    /// Returns false while the writer swaps buffers; the units then stay local until the next call.
    #[must_use]
    pub fn try_flush(&mut self) -> bool {
        if self.local.len() > MARK_BYTES {
            assert!(self.is_whole, "flush inside a unit");
            let pending = match self.shared.pending.try_lock() {
                Ok(pending) => pending,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => return false,
            };
            hand_over(&self.shared, pending, &mut self.local, self.sequence);
            self.durable = self.shared.durable.load(Ordering::Acquire);
        }
        true
    }

    /// As [`Appender::try_flush`], unless the units are few and others wait for the writer already.
    ///
    /// Under load that saves most of the locking, which waits for the stores before it. Units that
    /// stay local are lost in a panic, so the caller calls [`Appender::try_flush`] when it has
    /// nothing else to do.
    #[inline]
    pub fn flush_batch(&mut self) {
        let is_next = self.shared.pending_bytes.load(Ordering::Relaxed) == 0;
        if is_next || self.local.len() >= BATCH_BYTES {
            // Units that stay local are handed over later.
            let _ = self.try_flush();
        }
    }

    /// Bytes appended and not handed over, including the space for a mark.
    pub fn local_bytes(&self) -> usize {
        self.local.len()
    }

    /// True when anything appended is not handed over.
    pub fn has_local(&self) -> bool {
        self.local.len() > MARK_BYTES
    }

    /// Room for further bytes that wait for the writer.
    #[inline]
    pub fn room(&self) -> Room {
        let waiting = self.shared.pending_bytes.load(Ordering::Relaxed) + self.local.len();
        let max = self.pending_bytes_max;
        match waiting {
            waiting if waiting <= max - max / 8 => Room::Free,
            waiting if waiting <= max => Room::Reserve,
            _ => Room::Full,
        }
    }

    /// True when everything appended is durable.
    pub fn is_durable(&self) -> bool {
        self.shared.durable.load(Ordering::Acquire) >= self.sequence
    }

    /// True while the writer waits for its next segment. Appended units stay in memory.
    pub fn is_stalled(&self) -> bool {
        self.shared.is_stalled.load(Ordering::Relaxed)
    }

    /// True when the log has failed.
    pub fn is_failed(&self) -> bool {
        self.shared.is_failed.load(Ordering::Acquire)
    }
}

/// Appends `local` to the pending units and empties it, except for the space for a mark.
fn hand_over(
    shared: &Shared,
    mut pending: MutexGuard<'_, Pending>,
    local: &mut Buffer,
    sequence: u64,
) {
    if pending.buffer.len() <= MARK_BYTES {
        std::mem::swap(&mut pending.buffer, local);
    } else {
        pending.buffer.extend(&local.bytes()[MARK_BYTES..]);
    }
    pending.sequence = sequence;
    let bytes = pending.buffer.len();
    shared.pending_bytes.store(bytes, Ordering::Relaxed);
    let is_waiting = std::mem::take(&mut pending.is_waiting);
    drop(pending);
    if is_waiting {
        shared.wake.notify_one();
    }
    local.resize(MARK_BYTES);
}
