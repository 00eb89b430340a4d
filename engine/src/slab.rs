//! Resting orders, addressed by admission's slot; 32-bit links join the orders of a price by time.
//!
//! A link is the slot plus one. Link 0 means none. Its record absorbs the writes to a missing
//! neighbour, so linking and unlinking need no branch. Only the prefetch reads that record.
//!
//! The address range for all slots is mapped at the start; the system provides zeroed memory for
//! the touched part. Slots are shared by the whole node, so a quiet book, or one whose orders have
//! high slots, uses memory only for its own orders.
//!
//! Invariant: a slot is live exactly while its order rests in the ladder. The generation is
//! asserted at every access by handle: admission frees a slot only after the closing event, so
//! another generation in a live slot is a bug of this program.

use alloc::alloc::handle_alloc_error;
use core::alloc::Layout;
use core::fmt;
use core::mem::{align_of, size_of};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};
use types::{Handle, Lots, SessionIx, Side, StpGroup, StpMode, Ticks, UserIx};
use zerocopy::FromZeros;

/// No link.
pub(crate) const NIL: u32 = 0;

/// Never expires.
pub(crate) const NEVER: u64 = u64::MAX;

/// One resting order. All zero in a slot never used.
#[derive(Clone, Copy, Debug, FromZeros)]
pub(crate) struct Order {
    pub price: Ticks,
    pub open: Lots,
    /// Total quantity, filled part included.
    pub quantity: Lots,
    /// Expiry time in nanoseconds, the first moment without the order; `NEVER` without one.
    pub expire_at_ns: u64,
    pub next: u32,
    pub prev: u32,
    pub generation: u32,
    pub user: UserIx,
    pub session: SessionIx,
    pub group: StpGroup,
    pub side: Side,
    pub stp: StpMode,
    pub post_only: bool,
    pub live: bool,
}

/// A record, aligned to its own cache line.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(align(64))]
struct Line(Order);

const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);

impl Order {
    /// True while the order of this handle rests in this slot.
    #[inline(always)]
    fn is(&self, handle: Handle) -> bool {
        if !self.live {
            return false;
        }
        assert!(
            self.generation == handle.generation,
            "slot was reused under a live order"
        );
        true
    }

    /// Closes and returns the order. The generation stays, so a late handle is seen as closed.
    #[inline(always)]
    pub fn end(&mut self) -> Self {
        debug_assert!(self.live);
        self.live = false;
        *self
    }
}

/// Prefetches the cache lines of a value.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start: *const i8 = core::ptr::from_ref(value).cast();
        for offset in (0..size_of::<T>()).step_by(64) {
            // SAFETY: a prefetch has no visible effect and faults at no address; `wrapping_add` may
            // leave the value.
            #[allow(unsafe_code)]
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Prefetches the first cache line of a value, and the next one if it starts inside a line.
#[inline(always)]
pub(crate) fn prefetch_head<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start: *const i8 = core::ptr::from_ref(value).cast();
        let last = if align_of::<T>().is_multiple_of(64) {
            0
        } else {
            63
        };
        // SAFETY: a prefetch has no visible effect and faults at no address; `wrapping_add` may
        // leave the value.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(start);
            if last > 0 {
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(last));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Slots brought into use at once.
const BLOCK: usize = 512;

/// Zeroed records in a mapping of their own; the system provides memory on first touch.
///
/// An allocator zeroes memory that it has used before by writing all of it, so each new book would
/// have its whole capacity resident.
pub(crate) struct Mapped<Record> {
    first: NonNull<Record>,
    count: usize,
    /// Owns the memory. Never accessed: records are reached through `first` only.
    _memory: MmapMut,
}

// SAFETY: owns its records, which are plain values, and hands them out as a slice does.
#[allow(unsafe_code)]
unsafe impl<Record: Send> Send for Mapped<Record> {}
// SAFETY: as above; no interior mutability.
#[allow(unsafe_code)]
unsafe impl<Record: Sync> Sync for Mapped<Record> {}

impl<Record: FromZeros + Copy> Mapped<Record> {
    pub fn new(count: usize) -> Self {
        let layout = Layout::array::<Record>(count).expect("fits the address space");
        let mut options = MmapOptions::new();
        options.len(layout.size());
        // The whole capacity is not memory that the node will use.
        #[cfg(not(miri))]
        options.no_reserve_swap();
        let Ok(mut memory) = options.map_anon() else {
            handle_alloc_error(layout)
        };
        // With huge pages one record would take 2 MiB. A kernel without them refuses the advice.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = memory.advise(memmap2::Advice::NoHugePage);
        let first = memory.as_mut_ptr().cast::<Record>();
        assert!(first.is_aligned(), "a mapping begins at a page");
        Self {
            first: NonNull::new(first).expect("a mapping is not null"),
            count,
            _memory: memory,
        }
    }
}

impl<Record> Deref for Mapped<Record> {
    type Target = [Record];

    #[inline(always)]
    fn deref(&self) -> &[Record] {
        // SAFETY: `first` points to `count` aligned records within `_memory`, which lives as long
        // as `self` and is not accessed otherwise. They were all zero, which `new` accepts only for
        // records that may be, and only records have been written since.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts(self.first.as_ptr(), self.count)
        }
    }
}

impl<Record> DerefMut for Mapped<Record> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Record] {
        // SAFETY: as in `deref`; `first` was derived from a mutable pointer, and `self` is borrowed
        // mutably.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts_mut(self.first.as_ptr(), self.count)
        }
    }
}

pub(crate) struct Slab {
    /// By link, one for every slot of the capacity.
    orders: Mapped<Line>,
    /// Links in use: up to the highest one used so far, in whole blocks. Bounds every iteration.
    in_play: usize,
    live: u32,
}

impl Clone for Slab {
    fn clone(&self) -> Self {
        self.with_room(self.orders.len())
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(&self.orders[..self.in_play])
            .finish()
    }
}

impl Slab {
    pub fn new(capacity: u32) -> Self {
        Self {
            orders: Mapped::new(capacity as usize + 1),
            in_play: 1,
            live: 0,
        }
    }

    /// Copies the slab with capacity for this many links.
    fn with_room(&self, links: usize) -> Self {
        let mut orders = Mapped::new(links);
        orders[..self.in_play].copy_from_slice(&self.orders[..self.in_play]);
        Self {
            orders,
            in_play: self.in_play,
            live: self.live,
        }
    }

    /// The record of a link.
    #[inline(always)]
    pub fn at(&self, link: u32) -> &Order {
        &self.orders[link as usize].0
    }

    #[inline(always)]
    pub fn at_mut(&mut self, link: u32) -> &mut Order {
        &mut self.orders[link as usize].0
    }

    /// The link of a resting order; `None` when it has closed.
    #[inline(always)]
    pub fn find(&self, handle: Handle) -> Option<u32> {
        let Line(order) = self.orders.get(handle.slot as usize + 1)?;
        order.is(handle).then_some(handle.slot.wrapping_add(1))
    }

    /// The resting order of a handle; `None` when it has closed.
    #[inline(always)]
    pub fn find_mut(&mut self, handle: Handle) -> Option<&mut Order> {
        let Line(order) = self.orders.get_mut(handle.slot as usize + 1)?;
        order.is(handle).then_some(order)
    }

    /// Prepares the slot of a new order and returns its link.
    ///
    /// Allocates only when the slot exceeds the capacity.
    #[inline(always)]
    pub fn vacate(&mut self, handle: Handle) -> u32 {
        let link = handle.slot as usize + 1;
        if link >= self.in_play {
            self.extend(link);
        }
        let Line(order) = &self.orders[link];
        assert!(
            !order.live & (order.generation <= handle.generation) & !handle.is_none(),
            "admission reused a slot before its order was closed"
        );
        link as u32
    }

    /// Brings slots up to this link into use.
    #[cold]
    #[inline(never)]
    fn extend(&mut self, link: usize) {
        assert!(link < u32::MAX as usize, "slot exceeds the link range");
        if link >= self.orders.len() {
            *self = self.with_room((link + 1).next_power_of_two());
        }
        self.in_play = (link.next_multiple_of(BLOCK) + 1).min(self.orders.len());
    }

    /// Rests an order after `order.prev`, which may be link 0.
    #[inline(always)]
    pub fn open(&mut self, link: u32, order: Order) {
        self.orders[order.prev as usize].0.next = link;
        self.orders[link as usize].0 = Order {
            live: true,
            ..order
        };
        // Cannot overflow: at most the number of slots.
        self.live = self.live.wrapping_add(1);
    }

    /// Closes the order of a link that is already unlinked from its neighbours.
    #[inline(always)]
    pub fn close(&mut self, link: u32) {
        self.at_mut(link).end();
        self.has_ended();
    }

    /// Unlinks a closed order from its neighbours.
    #[inline(always)]
    pub fn unlink(&mut self, order: &Order) {
        self.has_ended();
        self.at_mut(order.prev).next = order.next;
        self.at_mut(order.next).prev = order.prev;
    }

    #[inline(always)]
    fn has_ended(&mut self) {
        // Cannot underflow: the order was counted when it began to rest.
        self.live = self.live.wrapping_sub(1);
    }

    /// The link of a slot, or the last one when the slot exceeds the capacity.
    #[inline(always)]
    pub fn nearest_link(&self, slot: u32) -> u32 {
        (slot as usize + 1).min(self.orders.len() - 1) as u32
    }

    /// Prefetches the record of a link.
    #[inline(always)]
    pub fn prefetch(&self, link: u32) {
        prefetch(self.at(link));
    }

    pub fn live(&self) -> u32 {
        self.live
    }

    /// Bytes of the slots in use; the system has provided the touched part.
    pub fn bytes(&self) -> usize {
        self.in_play * size_of::<Line>()
    }

    /// Capacity in orders.
    pub fn room(&self) -> usize {
        self.orders.len() - 1
    }

    /// Every link in use, in slot order.
    pub fn links(&self) -> core::ops::Range<u32> {
        1..self.in_play as u32
    }

    #[inline(always)]
    pub fn handle(&self, link: u32) -> Handle {
        Handle {
            slot: link - 1,
            generation: self.at(link).generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_aligned_zeroed_and_distinct() {
        for count in [1, 2, 7, 600] {
            let mut lines = Mapped::<Line>::new(count);
            assert_eq!((lines.len(), lines.as_ptr().align_offset(64)), (count, 0));
            for (at, Line(order)) in lines.iter_mut().enumerate() {
                assert!(!order.live && order.generation == 0 && order.side == Side::Buy);
                order.generation = at as u32 + 1;
            }
            let numbers = lines.iter().map(|Line(order)| order.generation);
            assert!(numbers.eq(1..=count as u32));
        }
    }

    #[test]
    fn a_slab_grows_and_clones_with_its_orders() {
        let mut slab = Slab::new(2);
        let handle = |slot| Handle {
            slot,
            generation: 5,
        };
        for slot in [0, 1, 700] {
            let link = slab.vacate(handle(slot));
            let order = Order {
                generation: 5,
                open: Lots(u64::from(slot)),
                ..Order::new_zeroed()
            };
            slab.open(link, order);
        }
        let mut copy = slab.clone();
        slab.close(1);
        assert_eq!(
            (slab.live(), copy.live(), slab.find(handle(0))),
            (2, 3, None)
        );
        for slot in [0, 1, 700] {
            let order = copy.find_mut(handle(slot)).expect("the order rests");
            assert_eq!(order.open, Lots(u64::from(slot)));
        }
    }

    // Miri runs this too: the address may be anywhere, also at the end of the allocation.
    #[test]
    fn a_prefetch_reads_nothing_and_changes_nothing() {
        let bytes = [7u8; 65];
        prefetch(&bytes);
        prefetch(&bytes[64]);
        prefetch_head(&bytes[64]);
        prefetch_head(&Line::new_zeroed());
        prefetch(&());
        let mut slab = Slab::new(1);
        let link = slab.vacate(Handle {
            slot: 0,
            generation: 1,
        });
        slab.prefetch(link);
        slab.prefetch(slab.nearest_link(u32::MAX - 1));
        assert_eq!(bytes, [7; 65]);
        assert_eq!(slab.live(), 0);
    }
}
