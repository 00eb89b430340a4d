//! Resting orders, addressed by admission's slot; 32-bit links join the orders of a price in time order.
//!
//! A link is the slot plus one. Link 0 is nobody: it has a record of its own, which takes the writes meant for
//! a neighbour that is not there, so that linking and unlinking need no branch. What it holds decides nothing:
//! only the look-ahead reads it, to ask for memory.
//!
//! The records of all slots have their place from the start, all zero; the system gives the memory of those
//! that are used. Slots are the whole node's, so a book that is quiet, or whose orders have high slots, costs
//! what its own orders touch.
//!
//! Invariant: a slot is live exactly while its order rests in the ladder. The generation is asserted at every
//! access by handle: admission frees a slot only after the closing event, so a foreign generation in a live
//! slot is our bug.

use alloc::vec::Vec;
use core::fmt;
use core::mem::{align_of, size_of};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;

use types::{Handle, Lots, SessionIx, Side, StpGroup, StpMode, Ticks, UserIx};
use zerocopy::FromZeros;

/// No link.
pub(crate) const NIL: u32 = 0;

/// Never expires.
pub(crate) const NEVER: u64 = u64::MAX;

/// One resting order. All zero where none has rested yet.
#[derive(Clone, Copy, Debug, FromZeros)]
pub(crate) struct Order {
    pub price: Ticks,
    pub open: Lots,
    /// Total quantity, filled part included.
    pub quantity: Lots,
    /// First moment at which the order is gone, `NEVER` without date.
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

/// A record has a cache line of its own.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(align(64))]
struct Line(Order);

const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);

impl Order {
    /// True while this order, which a handle names by its slot, rests.
    #[inline(always)]
    fn is(&self, handle: Handle) -> bool {
        if !self.live {
            return false;
        }
        assert!(
            self.generation == handle.generation,
            "slot was given away under a live order"
        );
        true
    }

    /// It rests no more. Its generation stays, so that a late handle is seen to be closed. Gives what it was.
    #[inline(always)]
    pub fn end(&mut self) -> Self {
        debug_assert!(self.live);
        self.live = false;
        *self
    }
}

/// Asks the memory for the cache lines of a value, without waiting for them.
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start: *const i8 = core::ptr::from_ref(value).cast();
        for offset in (0..size_of::<T>()).step_by(64) {
            // SAFETY: a prefetch reads nothing that the program could see and faults at no address;
            // `wrapping_add` may leave the value.
            #[allow(unsafe_code)]
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(offset));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Asks for the first cache line of a value, and for the next one where it begins inside the line.
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
        // SAFETY: a prefetch reads nothing that the program could see and faults at no address; `wrapping_add`
        // may leave the value.
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

/// Slots that come into play at once.
const BLOCK: usize = 512;

/// Records in a row, all zero at first; the system gives their memory when it is touched.
///
/// An allocator that is asked for zeroed memory of a wide alignment may write all of it. So plain words are asked
/// for, and the first aligned place among them is taken.
struct Lines {
    first: NonNull<Line>,
    count: usize,
    /// Owns the memory, and is not looked at: records are reached through `first` alone.
    _words: Vec<u64>,
}

/// Words of a record.
const WORDS: usize = size_of::<Line>() / size_of::<u64>();

// SAFETY: it owns its records, which are plain values, and gives them out as a slice does.
#[allow(unsafe_code)]
unsafe impl Send for Lines {}
// SAFETY: as above; nothing changes behind a shared reference.
#[allow(unsafe_code)]
unsafe impl Sync for Lines {}

impl Lines {
    fn new(count: usize) -> Self {
        // A record of zeros is a record.
        const fn is_valid_as_zeros<Record: FromZeros>() {}
        const { is_valid_as_zeros::<Line>() };
        let mut words = alloc::vec![0; (count + 1) * WORDS];
        let start = words.as_mut_ptr();
        let skipped = start.align_offset(align_of::<Line>());
        assert!(skipped < WORDS, "an aligned place comes within a record");
        let first = start.wrapping_add(skipped).cast();
        Self {
            first: NonNull::new(first).expect("memory does not begin at zero"),
            count,
            _words: words,
        }
    }
}

impl Deref for Lines {
    type Target = [Line];

    #[inline(always)]
    fn deref(&self) -> &[Line] {
        // SAFETY: `count` aligned records lie behind `first` within `_words`, which lives as long as this does
        // and is reached no other way; they were all zero, which is a record, and only records have been
        // written since.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts(self.first.as_ptr(), self.count)
        }
    }
}

impl DerefMut for Lines {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Line] {
        // SAFETY: as in `deref`; `first` comes from a pointer that may write, and `self` is borrowed for as long.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts_mut(self.first.as_ptr(), self.count)
        }
    }
}

pub(crate) struct Slab {
    /// By link, one for every slot there is room for.
    orders: Lines,
    /// Links in play: up to the highest one used so far, in whole blocks. Bound of every walk.
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
            orders: Lines::new(capacity as usize + 1),
            in_play: 1,
            live: 0,
        }
    }

    /// A copy with room for so many links.
    fn with_room(&self, links: usize) -> Self {
        let mut orders = Lines::new(links);
        orders[..self.in_play].copy_from_slice(&self.orders[..self.in_play]);
        Self {
            orders,
            in_play: self.in_play,
            live: self.live,
        }
    }

    /// The order that a link names.
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

    /// Makes the slot of a new order ready and gives its link. Grows (the only allocation) when it lies past
    /// the capacity.
    #[inline(always)]
    pub fn vacate(&mut self, handle: Handle) -> u32 {
        let link = handle.slot as usize + 1;
        if link >= self.in_play {
            self.extend(link);
        }
        let Line(order) = &self.orders[link];
        assert!(
            !order.live & (order.generation <= handle.generation) & !handle.is_none(),
            "admission gave away a taken slot"
        );
        link as u32
    }

    /// Brings slots up to this link into play.
    #[cold]
    #[inline(never)]
    fn extend(&mut self, link: usize) {
        assert!(link < u32::MAX as usize, "slot is no slot");
        if link >= self.orders.len() {
            *self = self.with_room((link + 1).next_power_of_two());
        }
        self.in_play = (link.next_multiple_of(BLOCK) + 1).min(self.orders.len());
    }

    /// An order begins to rest behind `order.prev`, which may be nobody.
    #[inline(always)]
    pub fn open(&mut self, link: u32, order: Order) {
        self.orders[order.prev as usize].0.next = link;
        self.orders[link as usize].0 = Order {
            live: true,
            ..order
        };
        // Below the number of slots, which fits.
        self.live = self.live.wrapping_add(1);
    }

    /// Ends the order of a link, which nobody is linked with any more.
    #[inline(always)]
    pub fn close(&mut self, link: u32) {
        self.at_mut(link).end();
        self.has_ended();
    }

    /// Takes an order that has ended out from between its neighbours.
    #[inline(always)]
    pub fn part(&mut self, order: &Order) {
        self.has_ended();
        self.at_mut(order.prev).next = order.next;
        self.at_mut(order.next).prev = order.prev;
    }

    #[inline(always)]
    fn has_ended(&mut self) {
        // Every order that ends was counted when it began to rest.
        self.live = self.live.wrapping_sub(1);
    }

    /// The link of a slot, or the last one when it lies past the end.
    #[inline(always)]
    pub fn nearest_link(&self, slot: u32) -> u32 {
        (slot as usize + 1).min(self.orders.len() - 1) as u32
    }

    /// Asks for the record of a link.
    #[inline(always)]
    pub fn prefetch(&self, link: u32) {
        prefetch(self.at(link));
    }

    pub fn live(&self) -> u32 {
        self.live
    }

    /// Memory of the slots in play, of which the system has given what was touched.
    pub fn bytes(&self) -> usize {
        self.in_play * size_of::<Line>()
    }

    /// Orders that there is room for.
    pub fn room(&self) -> usize {
        self.orders.len() - 1
    }

    /// Every link used so far, in slot order.
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
    fn records_are_aligned_zero_and_apart() {
        for count in [1, 2, 7, 600] {
            let mut lines = Lines::new(count);
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
    fn a_slab_grows_and_is_copied_with_its_orders() {
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
            let order = copy.find_mut(handle(slot)).expect("it rests");
            assert_eq!(order.open, Lots(u64::from(slot)));
        }
    }

    // Miri runs this too: what is asked for may lie anywhere, also at the very end of what there is.
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
