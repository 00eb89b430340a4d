//! Recent batches in memory, so that readers near the end of the log do not read the disk.
//!
//! Direct writes leave nothing in the page cache, so each such read would go to the device that the
//! next batch is being written to.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Maximum number of batches kept.
const BATCHES_MAX: usize = 8_192;
/// Limit of the bytes set aside while a reader holds the lock. A reader copies one chunk, so few
/// batches arrive meanwhile.
const MISSED_BYTES_MAX: usize = 4 << 20;

struct Batch {
    segment: u64,
    offset: u64,
    bytes: usize,
    /// Position of its first byte among all bytes ever pushed.
    at: u64,
}

impl Batch {
    fn end(&self) -> u64 {
        self.offset + self.bytes as u64
    }
}

/// Ring of bytes. Untouched pages cost only address space; nothing is allocated after the start.
struct Ring {
    bytes: Box<[u8]>,
    /// In log order, without gaps.
    batches: VecDeque<Batch>,
    kept: usize,
    /// Number of bytes ever pushed.
    pushed: u64,
}

impl Ring {
    fn push(&mut self, segment: u64, offset: u64, bytes: &[u8]) {
        if bytes.len() > self.bytes.len() {
            return self.clear();
        }
        while self.kept + bytes.len() > self.bytes.len() || self.batches.len() == BATCHES_MAX {
            let oldest = self
                .batches
                .pop_front()
                .expect("kept bytes belong to a batch");
            self.kept -= oldest.bytes;
        }
        let at = self.index(self.pushed);
        let (head, wrapped) = bytes.split_at(bytes.len().min(self.bytes.len() - at));
        self.bytes[at..at + head.len()].copy_from_slice(head);
        self.bytes[..wrapped.len()].copy_from_slice(wrapped);
        self.batches.push_back(Batch {
            segment,
            offset,
            bytes: bytes.len(),
            at: self.pushed,
        });
        self.kept += bytes.len();
        self.pushed += bytes.len() as u64;
    }

    fn clear(&mut self) {
        self.batches.clear();
        self.kept = 0;
    }

    /// Index of a position in `bytes`.
    fn index(&self, at: u64) -> usize {
        usize::try_from(at % self.bytes.len() as u64).expect("less than the ring's length")
    }
}

/// Batches pushed while a reader held the lock.
#[derive(Default)]
pub(crate) struct Missed {
    bytes: Vec<u8>,
    /// Segment, offset and length of each.
    batches: Vec<(u64, u64, usize)>,
    /// Batches were dropped, so a gap follows the ring's contents.
    has_gap: bool,
}

impl Missed {
    fn push(&mut self, segment: u64, offset: u64, bytes: &[u8]) {
        if self.has_gap || self.bytes.len() + bytes.len() > MISSED_BYTES_MAX {
            self.has_gap = true;
            return;
        }
        self.bytes.extend_from_slice(bytes);
        self.batches.push((segment, offset, bytes.len()));
    }

    /// Moves the batches into the ring. After a gap it empties the ring instead.
    fn drain_into(&mut self, ring: &mut Ring) {
        if std::mem::take(&mut self.has_gap) {
            ring.clear();
        } else {
            let mut bytes = self.bytes.as_slice();
            for (segment, offset, length) in &self.batches {
                let (batch, rest) = bytes.split_at(*length);
                ring.push(*segment, *offset, batch);
                bytes = rest;
            }
        }
        self.bytes.clear();
        self.batches.clear();
    }
}

/// The last durable batches. The writer's thread adds them, and all readers of the log read them.
pub(crate) struct Recent(Mutex<Ring>);

impl Recent {
    /// Keeps at most `bytes_max` bytes; 0 = none.
    pub fn new(bytes_max: usize) -> Self {
        Self(Mutex::new(Ring {
            bytes: vec![0; bytes_max].into(),
            batches: VecDeque::with_capacity(BATCHES_MAX),
            kept: 0,
            pushed: 0,
        }))
    }

    /// Adds a durable batch as written and drops the oldest ones.
    ///
    /// Does not wait for readers: while one holds the lock, the batch goes to `missed` and is added
    /// with a later one.
    pub fn push(&self, missed: &mut Missed, segment: u64, offset: u64, bytes: &[u8]) {
        let mut ring = match self.0.try_lock() {
            Ok(ring) => ring,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return missed.push(segment, offset, bytes),
        };
        missed.drain_into(&mut ring);
        ring.push(segment, offset, bytes);
    }

    /// Fills `into` with up to `bytes` bytes from this offset on, within the segment.
    ///
    /// Returns false when the first of them is not in memory.
    pub fn read(&self, segment: u64, offset: u64, bytes: usize, into: &mut Vec<u8>) -> bool {
        let ring = self.lock();
        let end = |batch: &Batch| (batch.segment, batch.end());
        let batches = &ring.batches;
        let from = batches.partition_point(|batch| end(batch) <= (segment, offset));
        let to = batches.partition_point(|batch| batch.segment <= segment);
        let first = batches
            .get(from)
            .filter(|batch| batch.segment == segment && batch.offset <= offset);
        let (Some(first), Some(last)) = (first, batches.get(to.wrapping_sub(1))) else {
            return false;
        };
        let (begin, end) = (
            first.at + (offset - first.offset),
            last.at + last.bytes as u64,
        );
        let count = usize::try_from(end - begin).map_or(bytes, |count| count.min(bytes));
        let start = ring.index(begin);
        let head = count.min(ring.bytes.len() - start);
        into.clear();
        into.extend_from_slice(&ring.bytes[start..start + head]);
        into.extend_from_slice(&ring.bytes[..count - head]);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(recent: &Recent, segment: u64, offset: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut into = vec![9; 3];
        recent
            .read(segment, offset, bytes, &mut into)
            .then_some(into)
    }

    #[test]
    fn recent_bytes_are_read_at_any_offset_within_their_segment() {
        let recent = Recent::new(12);
        let mut missed = Missed::default();
        assert_eq!(read(&recent, 1, 0, 8), None);
        recent.push(&mut missed, 1, 4, &[1; 4]);
        recent.push(&mut missed, 1, 8, &[2; 4]);
        recent.push(&mut missed, 2, 0, &[3; 4]);
        assert_eq!(read(&recent, 1, 0, 8), None, "before the first");
        assert_eq!(read(&recent, 1, 4, 4), Some(vec![1; 4]));
        assert_eq!(read(&recent, 1, 6, 3), Some(vec![1, 1, 2]));
        assert_eq!(read(&recent, 1, 8, 99), Some(vec![2; 4]));
        assert_eq!(
            read(&recent, 1, 12, 8),
            None,
            "after the segment's last batch"
        );
        assert_eq!(read(&recent, 2, 2, 8), Some(vec![3; 2]));
        assert_eq!(read(&recent, 2, 4, 8), None);
        recent.push(&mut missed, 2, 4, &[4, 5, 6]);
        assert_eq!(read(&recent, 1, 4, 4), None, "the oldest was dropped");
        assert_eq!(read(&recent, 2, 0, 9), Some(vec![3, 3, 3, 3, 4, 5, 6]));
        recent.push(&mut missed, 2, 7, &[7; 13]);
        assert_eq!(read(&recent, 2, 4, 9), None, "larger than the ring");
    }

    #[test]
    fn a_long_log_is_read_as_it_was_written() {
        let recent = Recent::new(1_000);
        let mut missed = Missed::default();
        let mut log = Vec::new();
        for step in 0..3_000usize {
            let batch: Vec<u8> = (0..1 + step * 7 % 90).map(|at| (step + at) as u8).collect();
            recent.push(&mut missed, 1, log.len() as u64, &batch);
            log.extend(batch);
            let from = log.len().saturating_sub(step * 13 % 900 + 1);
            let found = read(&recent, 1, from as u64, 333).expect("kept");
            let to = log.len().min(from + 333);
            assert_eq!(found, log[from..to], "step {step}");
        }
    }

    #[test]
    fn a_reader_neither_blocks_the_writer_nor_loses_a_batch() {
        let recent = Recent::new(100);
        let mut missed = Missed::default();
        recent.push(&mut missed, 1, 0, &[1; 4]);
        let reading = recent.lock();
        recent.push(&mut missed, 1, 4, &[2; 4]);
        recent.push(&mut missed, 2, 0, &[3; 4]);
        drop(reading);
        assert_eq!(read(&recent, 1, 4, 8), None, "not yet");
        recent.push(&mut missed, 2, 4, &[4; 4]);
        assert_eq!(read(&recent, 1, 0, 9), Some([[1; 4], [2; 4]].concat()));
        assert_eq!(read(&recent, 2, 0, 9), Some([[3; 4], [4; 4]].concat()));
    }

    #[test]
    fn a_reader_that_holds_the_lock_for_long_leaves_no_unnoticed_gap() {
        let recent = Recent::new(100);
        let mut missed = Missed::default();
        recent.push(&mut missed, 1, 0, &[1; 4]);
        let reading = recent.lock();
        let long = vec![2; MISSED_BYTES_MAX];
        recent.push(&mut missed, 1, 4, &long);
        recent.push(&mut missed, 1, 4 + long.len() as u64, &[3; 4]);
        drop(reading);
        recent.push(&mut missed, 1, 8 + long.len() as u64, &[4; 4]);
        assert_eq!(read(&recent, 1, 0, 8), None);
        assert_eq!(read(&recent, 1, 8 + long.len() as u64, 8), Some(vec![4; 4]));
    }
}
