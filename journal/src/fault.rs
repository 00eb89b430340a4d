//! A disk in memory that loses power: what was not synced is dropped, kept or torn, block by block, as a seed decides. It also fails on request.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use crate::storage::Storage;

/// Bytes that a disk writes as one; a power loss tears between blocks and inside one.
const BLOCK_BYTES: usize = 512;

#[derive(Default)]
struct Segment {
    /// What would be read now.
    seen: Vec<u8>,
    /// What survives for certain.
    durable: Vec<u8>,
}

/// See the module.
#[derive(Default)]
pub struct MemoryStorage {
    segments: Mutex<BTreeMap<u64, Segment>>,
    /// The disk is full: writes fail.
    pub is_full: AtomicBool,
    /// Lies: sync returns without syncing.
    pub sync_is_lost: AtomicBool,
    pub syncs: AtomicU64,
    /// A disk that does not answer: see [`MemoryStorage::stall`].
    is_stalled: Mutex<bool>,
    answers: Condvar,
}

impl MemoryStorage {
    /// Loses power: blocks that differ from what is durable are each kept, dropped or torn. The disk goes on with what is left.
    pub fn crash(&self, seed: u64) {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z ^ (z >> 31)
        };
        for segment in self.lock().values_mut() {
            let (seen, durable) = (&segment.seen, &mut segment.durable);
            for (block, chunk) in seen.chunks(BLOCK_BYTES).enumerate() {
                let start = block * BLOCK_BYTES;
                let old = &mut durable[start..start + chunk.len()];
                if old == chunk {
                    continue;
                }
                match random() % 3 {
                    0 => old.copy_from_slice(chunk),
                    1 => {}
                    _ => {
                        let cut =
                            usize::try_from(random() % chunk.len() as u64).expect("within a block");
                        old[..cut].copy_from_slice(&chunk[..cut]);
                    }
                }
            }
            segment.seen = segment.durable.clone();
        }
    }

    /// Makes every write wait until the disk answers again.
    pub fn stall(&self, is_stalled: bool) {
        *self.stalled() = is_stalled;
        self.answers.notify_all();
    }

    fn stalled(&self) -> std::sync::MutexGuard<'_, bool> {
        self.is_stalled
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Overwrites bytes as a failing disk would.
    pub fn damage(&self, segment: u64, offset: usize, bytes: &[u8]) {
        if let Some(segment) = self.lock().get_mut(&segment) {
            segment.seen[offset..offset + bytes.len()].copy_from_slice(bytes);
            segment.durable = segment.seen.clone();
        }
    }

    /// The disk as it is at this moment, to be crashed while the original goes on.
    pub fn image(&self) -> Self {
        let segments = self
            .lock()
            .iter()
            .map(|(number, segment)| {
                (
                    *number,
                    Segment {
                        seen: segment.seen.clone(),
                        durable: segment.durable.clone(),
                    },
                )
            })
            .collect();
        Self {
            segments: Mutex::new(segments),
            ..Self::default()
        }
    }

    /// What a segment holds.
    pub fn bytes(&self, segment: u64) -> Vec<u8> {
        self.lock()
            .get(&segment)
            .map(|segment| segment.seen.clone())
            .unwrap_or_default()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Segment>> {
        self.segments
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Storage for std::sync::Arc<MemoryStorage> {
    fn segments(&self) -> io::Result<Vec<u64>> {
        Ok(self.lock().keys().copied().collect())
    }

    fn create(&self, segment: u64, bytes: u64) -> io::Result<()> {
        if self.is_full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let zeros = vec![0; usize::try_from(bytes).expect("fits memory")];
        self.lock().insert(
            segment,
            Segment {
                seen: zeros.clone(),
                durable: zeros,
            },
        );
        Ok(())
    }

    fn write(&self, segment: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.is_full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let stalled = self.stalled();
        drop(
            self.answers
                .wait_while(stalled, |stalled| *stalled)
                .unwrap_or_else(std::sync::PoisonError::into_inner),
        );
        let start = usize::try_from(offset).expect("fits memory");
        let mut segments = self.lock();
        let segment = segments.get_mut(&segment).ok_or(io::ErrorKind::NotFound)?;
        segment.seen[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self, segment: u64) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        if self.sync_is_lost.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut segments = self.lock();
        let segment = segments.get_mut(&segment).ok_or(io::ErrorKind::NotFound)?;
        segment.durable = segment.seen.clone();
        Ok(())
    }

    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let segments = self.lock();
        let segment = segments.get(&segment).ok_or(io::ErrorKind::NotFound)?;
        let start = usize::try_from(offset)
            .expect("fits memory")
            .min(segment.seen.len());
        let count = into.len().min(segment.seen.len() - start);
        into[..count].copy_from_slice(&segment.seen[start..start + count]);
        Ok(count)
    }

    fn name(&self, segment: u64) -> String {
        format!("memory segment {segment}")
    }
}
