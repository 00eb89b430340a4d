//! The last batches in memory, as they stand in their segment: who reads right behind the writer asks no disk.
//! Direct writes leave nothing in the page cache, so each such read would go to the device that the next batch is
//! being written to.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Batches kept at most.
const BATCHES_MAX: usize = 8_192;

struct Batch {
    segment: u64,
    offset: u64,
    bytes: usize,
    /// Number of its first byte among all that were ever put in.
    at: u64,
}

impl Batch {
    fn end(&self) -> u64 {
        self.offset + self.bytes as u64
    }
}

/// A ring of bytes, of which untouched ones cost address space alone. Nothing is allocated after the start.
struct Ring {
    bytes: Box<[u8]>,
    /// In the order of the log, without gap.
    batches: VecDeque<Batch>,
    kept: usize,
    /// All bytes that were ever put in.
    put: u64,
}

impl Ring {
    fn push(&mut self, segment: u64, offset: u64, bytes: &[u8]) {
        if bytes.len() > self.bytes.len() {
            return self.clear();
        }
        while self.kept + bytes.len() > self.bytes.len() || self.batches.len() == BATCHES_MAX {
            let oldest = self.batches.pop_front().expect("it has what is kept");
            self.kept -= oldest.bytes;
        }
        let place = self.place(self.put);
        let (front, wrapped) = bytes.split_at(bytes.len().min(self.bytes.len() - place));
        self.bytes[place..place + front.len()].copy_from_slice(front);
        self.bytes[..wrapped.len()].copy_from_slice(wrapped);
        self.batches.push_back(Batch {
            segment,
            offset,
            bytes: bytes.len(),
            at: self.put,
        });
        self.kept += bytes.len();
        self.put += bytes.len() as u64;
    }

    fn clear(&mut self) {
        self.batches.clear();
        self.kept = 0;
    }

    fn place(&self, at: u64) -> usize {
        usize::try_from(at % self.bytes.len() as u64).expect("it lies in the ring")
    }
}

/// Written by the writer's thread, read by all readers of the log.
pub(crate) struct Recent(Mutex<Ring>);

impl Recent {
    /// Keeps that many bytes at most; 0 = none.
    pub fn new(bytes_max: usize) -> Self {
        Self(Mutex::new(Ring {
            bytes: vec![0; bytes_max].into(),
            batches: VecDeque::with_capacity(BATCHES_MAX),
            kept: 0,
            put: 0,
        }))
    }

    /// Adds a durable batch with everything that was written of it, and forgets the oldest ones. Waits for no
    /// reader: false when one is just reading, and the batch is not kept. Whatever is pushed next is then to
    /// follow a [`Recent::clear`].
    #[must_use]
    pub fn push(&self, segment: u64, offset: u64, bytes: &[u8]) -> bool {
        self.try_with(|ring| ring.push(segment, offset, bytes))
    }

    /// Forgets everything; false when a reader is just reading.
    #[must_use]
    pub fn clear(&self) -> bool {
        self.try_with(Ring::clear)
    }

    fn try_with(&self, act: impl FnOnce(&mut Ring)) -> bool {
        let mut ring = match self.0.try_lock() {
            Ok(ring) => ring,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        act(&mut ring);
        true
    }

    /// Fills `into` with what stands at a place and behind it in the same segment, `bytes` at most; false when that
    /// is not in memory.
    pub fn read(&self, segment: u64, offset: u64, bytes: usize, into: &mut Vec<u8>) -> bool {
        let ring = self.lock();
        let place = |batch: &Batch| (batch.segment, batch.end());
        let batches = &ring.batches;
        let from = batches.partition_point(|batch| place(batch) <= (segment, offset));
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
        let place = ring.place(begin);
        let front = count.min(ring.bytes.len() - place);
        into.clear();
        into.extend_from_slice(&ring.bytes[place..place + front]);
        into.extend_from_slice(&ring.bytes[..count - front]);
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
    fn what_was_written_last_is_read_at_any_place_and_within_its_segment() {
        let recent = Recent::new(12);
        assert_eq!(read(&recent, 1, 0, 8), None);
        assert!(recent.push(1, 4, &[1; 4]));
        assert!(recent.push(1, 8, &[2; 4]));
        assert!(recent.push(2, 0, &[3; 4]));
        assert_eq!(read(&recent, 1, 0, 8), None, "before the first");
        assert_eq!(read(&recent, 1, 4, 4), Some(vec![1; 4]));
        assert_eq!(read(&recent, 1, 6, 3), Some(vec![1, 1, 2]));
        assert_eq!(read(&recent, 1, 8, 99), Some(vec![2; 4]));
        assert_eq!(read(&recent, 1, 12, 8), None, "behind the segment's last");
        assert_eq!(read(&recent, 2, 2, 8), Some(vec![3; 2]));
        assert_eq!(read(&recent, 2, 4, 8), None);
        assert!(recent.push(2, 4, &[4, 5, 6]));
        assert_eq!(read(&recent, 1, 4, 4), None, "the oldest has gone");
        assert_eq!(read(&recent, 2, 0, 9), Some(vec![3, 3, 3, 3, 4, 5, 6]));
        assert!(recent.push(2, 7, &[7; 13]));
        assert_eq!(read(&recent, 2, 4, 9), None, "larger than all of it");
    }

    #[test]
    fn a_long_log_is_read_as_it_was_written() {
        let recent = Recent::new(1_000);
        let mut log = Vec::new();
        for step in 0..3_000usize {
            let batch: Vec<u8> = (0..1 + step * 7 % 90).map(|at| (step + at) as u8).collect();
            assert!(recent.push(1, log.len() as u64, &batch));
            log.extend(batch);
            let from = log.len().saturating_sub(step * 13 % 900 + 1);
            let found = read(&recent, 1, from as u64, 333).expect("kept");
            let to = log.len().min(from + 333);
            assert_eq!(found, log[from..to], "step {step}");
        }
    }

    #[test]
    fn a_reader_holds_up_no_writer() {
        let recent = Recent::new(100);
        assert!(recent.push(1, 0, &[1; 4]));
        let reading = recent.lock();
        assert!(!recent.push(1, 4, &[2; 4]) && !recent.clear());
        drop(reading);
        assert!(recent.clear() && recent.push(1, 8, &[3; 4]));
        assert_eq!(read(&recent, 1, 0, 8), None);
        assert_eq!(read(&recent, 1, 8, 8), Some(vec![3; 4]));
    }
}
