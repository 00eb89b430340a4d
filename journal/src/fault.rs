//! In-memory disk that loses power: unsynced blocks are kept, dropped or torn, as a seed decides.
//!
//! Each block has its own fate. The disk also stalls and fails on request.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::aligned::Blocks;
use crate::storage::{Mode, Storage};

/// Unit of loss: a power loss keeps, drops or tears each block on its own.
const BLOCK_BYTES: usize = 512;

#[derive(Clone, Default)]
struct Segment {
    /// Contents as read now.
    cached: Vec<u8>,
    /// Contents that survive a crash for certain.
    durable: Vec<u8>,
    /// Writes since the last sync, in order.
    unsynced: Vec<(usize, Vec<u8>)>,
    /// State before a creation or after a removal in which the power failed; the crash chooses one
    /// of the two. Inner `None`: the segment is absent.
    alternative: Option<Box<Option<Segment>>>,
}

impl Segment {
    fn write(&mut self, start: usize, bytes: &[u8]) {
        let length = self.cached.len().max(start + bytes.len());
        self.cached.resize(length, 0);
        self.durable.resize(length, 0);
        self.cached[start..start + bytes.len()].copy_from_slice(bytes);
        self.unsynced.push((start, bytes.to_vec()));
    }

    fn sync(&mut self) {
        for (start, bytes) in self.unsynced.drain(..) {
            self.durable[start..start + bytes.len()].copy_from_slice(&bytes);
        }
    }

    fn crash(&mut self, random: &mut impl FnMut() -> u64) {
        let mut blocks: Vec<(usize, &[u8])> = Vec::new();
        for (start, bytes) in &self.unsynced {
            let chunks = bytes.chunks(BLOCK_BYTES).enumerate();
            blocks.extend(chunks.map(|(at, chunk)| (start + at * BLOCK_BYTES, chunk)));
        }
        for at in (1..blocks.len()).rev() {
            blocks.swap(at, below(random, at + 1));
        }
        for (start, chunk) in blocks {
            let block = &mut self.durable[start..start + chunk.len()];
            match random() % 4 {
                0 | 1 => block.copy_from_slice(chunk),
                2 => {}
                _ => {
                    let cut = below(random, chunk.len());
                    block[..cut].copy_from_slice(&chunk[..cut]);
                    // The rest of a torn block is old, or noise.
                    if random().is_multiple_of(4) {
                        block[cut..].fill_with(|| random().to_le_bytes()[0]);
                    }
                }
            }
        }
        self.unsynced.clear();
        self.cached.clone_from(&self.durable);
    }
}

fn below(random: &mut impl FnMut() -> u64, bound: usize) -> usize {
    usize::try_from(random() % bound as u64).expect("below a size")
}

/// In-memory storage that loses power, stalls and fails on request.
#[derive(Default)]
pub struct MemoryStorage {
    segments: Mutex<BTreeMap<u64, Segment>>,
    /// Full disk: writes, creation and removal of segments fail.
    pub is_full: AtomicBool,
    /// A creation of a segment finds the disk full.
    pub create_finds_disk_full: AtomicBool,
    /// Every n-th `segments`, `read` or `begin` fails with EMFILE; 0 = none.
    pub open_fails_every: AtomicU64,
    pub opens: AtomicU64,
    /// Broken disk: a sync fails.
    pub is_broken: AtomicBool,
    /// Lying disk: a sync returns without syncing.
    pub sync_is_lost: AtomicBool,
    pub syncs: AtomicU64,
    /// Operations until the power fails, plus one; 0 = it does not fail.
    power_off_countdown: AtomicU64,
    is_off: AtomicBool,
    /// The disk does not complete writes: see [`MemoryStorage::stall`].
    is_stalled: Mutex<bool>,
    stall_ended: Condvar,
}

impl MemoryStorage {
    /// Lets `operations` operations succeed, then cuts the power during the next one.
    ///
    /// Operations are writes, syncs, and the creation and removal of segments. Then every write,
    /// sync, creation and removal fails until [`MemoryStorage::crash`] or
    /// [`MemoryStorage::revive`].
    pub fn power_off_after(&self, operations: u64) {
        self.power_off_countdown
            .store(operations + 1, Ordering::SeqCst);
    }

    /// Loses power: unsynced blocks are each kept, dropped or torn, in any order.
    ///
    /// The disk continues with the result.
    pub fn crash(&self, seed: u64) {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z ^= z >> 27;
            z = z.wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        };
        let mut segments = self.lock();
        // An interrupted creation or removal happened or did not; there is no state in between.
        *segments = std::mem::take(&mut *segments)
            .into_iter()
            .filter_map(|(number, mut segment)| match segment.alternative.take() {
                Some(before) if random().is_multiple_of(2) => before.map(|old| (number, old)),
                _ => Some((number, segment)),
            })
            .collect();
        for segment in segments.values_mut() {
            segment.crash(&mut random);
        }
        drop(segments);
        self.power_off_countdown.store(0, Ordering::SeqCst);
        self.is_off.store(false, Ordering::SeqCst);
    }

    /// Restores the power without loss, as after the kill of a process.
    pub fn revive(&self) {
        for segment in self.lock().values_mut() {
            segment.alternative = None;
        }
        self.power_off_countdown.store(0, Ordering::SeqCst);
        self.is_off.store(false, Ordering::SeqCst);
    }

    /// Makes every write wait until called with false.
    pub fn stall(&self, is_stalled: bool) {
        *self.stalled() = is_stalled;
        self.stall_ended.notify_all();
    }

    fn stalled(&self) -> MutexGuard<'_, bool> {
        self.is_stalled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Corrupts bytes of a segment, and makes its current contents durable.
    pub fn corrupt(&self, segment: u64, offset: usize, bytes: &[u8]) {
        if let Some(segment) = self.lock().get_mut(&segment) {
            segment.cached[offset..offset + bytes.len()].copy_from_slice(bytes);
            segment.durable = segment.cached.clone();
            segment.unsynced.clear();
        }
    }

    /// Loses a segment, as by a mistake of an operator or the file system.
    pub fn lose(&self, segment: u64) {
        self.lock().remove(&segment);
    }

    /// Truncates a segment.
    pub fn shorten(&self, segment: u64, bytes: usize) {
        if let Some(segment) = self.lock().get_mut(&segment) {
            segment.sync();
            segment.cached.truncate(bytes);
            segment.durable.truncate(bytes);
        }
    }

    /// Copies the disk, so that the copy can be crashed while the original continues.
    pub fn image(&self) -> Self {
        Self {
            segments: Mutex::new(self.lock().clone()),
            ..Self::default()
        }
    }

    /// Contents of a segment.
    pub fn bytes(&self, segment: u64) -> Vec<u8> {
        self.lock()
            .get(&segment)
            .map(|segment| segment.cached.clone())
            .unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Segment>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an operation; true when the power fails in it.
    fn power_fails(&self) -> bool {
        let left =
            self.power_off_countdown
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                });
        let is_last = left == Ok(1);
        self.is_off.fetch_or(is_last, Ordering::SeqCst);
        is_last
    }

    fn check_power_and_space(&self) -> io::Result<()> {
        if self.is_off.load(Ordering::SeqCst) {
            return Err(io::Error::other("the power is off"));
        }
        if self.is_full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn acquire_descriptor(&self) -> io::Result<()> {
        let opens = self.opens.fetch_add(1, Ordering::SeqCst) + 1;
        match opens.checked_rem(self.open_fails_every.load(Ordering::SeqCst)) {
            Some(0) => Err(Errno::MFILE.into()),
            _ => Ok(()),
        }
    }

    fn sync_segment(&self, segment: u64) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        if self.is_off.load(Ordering::SeqCst) || self.power_fails() {
            return Err(io::Error::other("the power is off"));
        }
        if self.is_broken.load(Ordering::SeqCst) {
            return Err(io::Error::other("the disk is broken"));
        }
        if self.sync_is_lost.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut segments = self.lock();
        segments
            .get_mut(&segment)
            .ok_or(io::ErrorKind::NotFound)?
            .sync();
        Ok(())
    }
}

impl Storage for Arc<MemoryStorage> {
    fn segments(&self) -> io::Result<Vec<u64>> {
        self.acquire_descriptor()?;
        Ok(self.lock().keys().copied().collect())
    }

    fn create(&self, segment: u64, bytes: u64) -> io::Result<()> {
        self.check_power_and_space()?;
        let power_fails = self.power_fails();
        if self.create_finds_disk_full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let zeros = vec![0; usize::try_from(bytes).expect("fits memory")];
        let mut segments = self.lock();
        let before = segments.remove(&segment);
        segments.insert(
            segment,
            Segment {
                cached: zeros.clone(),
                durable: zeros,
                unsynced: Vec::new(),
                alternative: power_fails.then(|| Box::new(before)),
            },
        );
        if power_fails {
            return Err(io::Error::other("the power is off"));
        }
        Ok(())
    }

    fn begin(&self, _segment: u64) -> io::Result<()> {
        self.acquire_descriptor()
    }

    fn remove(&self, segment: u64) -> io::Result<()> {
        self.check_power_and_space()?;
        let power_fails = self.power_fails();
        let mut segments = self.lock();
        if power_fails {
            // Removed or not: decided by the crash.
            let removed = segments.get_mut(&segment).ok_or(io::ErrorKind::NotFound)?;
            removed.alternative = Some(Box::new(None));
            return Err(io::Error::other("the power is off"));
        }
        match segments.remove(&segment) {
            Some(_) => Ok(()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn size(&self, segment: u64) -> io::Result<u64> {
        let segments = self.lock();
        let segment = segments.get(&segment).ok_or(io::ErrorKind::NotFound)?;
        Ok(segment.cached.len() as u64)
    }

    fn write(&self, segment: u64, offset: u64, blocks: Blocks<'_>) -> io::Result<()> {
        self.check_power_and_space()?;
        assert_eq!(offset % BLOCK_BYTES as u64, 0, "aligned offset");
        let stalled = self.stalled();
        drop(
            self.stall_ended
                .wait_while(stalled, |stalled| *stalled)
                .unwrap_or_else(PoisonError::into_inner),
        );
        let start = usize::try_from(offset).expect("fits memory");
        let power_fails = self.power_fails();
        let mut segments = self.lock();
        let segment = segments.get_mut(&segment).ok_or(io::ErrorKind::NotFound)?;
        segment.write(start, blocks.bytes());
        if power_fails {
            return Err(io::Error::other("the power is off"));
        }
        Ok(())
    }

    fn sync(&self, segment: u64) -> io::Result<()> {
        self.sync_segment(segment)
    }

    fn make_durable(&self, segment: u64) -> io::Result<()> {
        self.sync_segment(segment)
    }

    fn read(&self, segment: u64, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.acquire_descriptor()?;
        let segments = self.lock();
        let segment = segments.get(&segment).ok_or(io::ErrorKind::NotFound)?;
        let start = usize::try_from(offset)
            .expect("fits memory")
            .min(segment.cached.len());
        let count = into.len().min(segment.cached.len() - start);
        into[..count].copy_from_slice(&segment.cached[start..start + count]);
        Ok(count)
    }

    fn name(&self, segment: u64) -> String {
        format!("memory segment {segment}")
    }

    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn mode(&self) -> Mode {
        Mode::Synced
    }
}
