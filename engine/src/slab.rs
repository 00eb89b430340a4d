//! Resting orders, addressed by admission's slot; 32-bit links join the orders of a price in time order.
//!
//! A link is the slot plus one. Link 0 is nobody: it has a record of its own, which takes the writes meant for a neighbour that is not there, so
//! that linking and unlinking need no branch. What it holds decides nothing: only the look-ahead reads it, to ask for memory.
//!
//! Invariant: a slot is live exactly while its order rests in the ladder. The generation is asserted at every access by handle: admission frees a
//! slot only after the closing event, so a foreign generation in a live slot is our bug.

use alloc::vec::Vec;
use core::mem::{align_of, size_of};

use types::{Handle, Lots, SessionIx, Side, StpGroup, StpMode, Ticks, UserIx};

/// No link.
pub(crate) const NIL: u32 = 0;

/// Never expires.
pub(crate) const NEVER: u64 = u64::MAX;

/// One resting order.
#[derive(Clone, Copy, Debug)]
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
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(Order);

const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);

impl Order {
    const EMPTY: Self = Self {
        price: Ticks::ZERO,
        open: Lots::ZERO,
        quantity: Lots::ZERO,
        expire_at_ns: NEVER,
        next: NIL,
        prev: NIL,
        generation: 0,
        user: UserIx::NONE,
        session: SessionIx::NONE,
        group: StpGroup::NONE,
        side: Side::Buy,
        stp: StpMode::CancelNewest,
        post_only: false,
        live: false,
    };

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
            // SAFETY: a prefetch reads nothing that the program could see and faults at no address; `wrapping_add` may leave the value.
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
        // SAFETY: a prefetch reads nothing that the program could see and faults at no address; `wrapping_add` may leave the value.
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

#[derive(Clone, Debug)]
pub(crate) struct Slab {
    /// By link. As long as the highest slot used so far asks for, in whole blocks: bound of every walk.
    orders: Vec<Line>,
    live: u32,
}

impl Slab {
    pub fn new(capacity: u32) -> Self {
        let mut orders = Vec::with_capacity(capacity as usize + 1);
        orders.push(Line(Order::EMPTY));
        Self { orders, live: 0 }
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

    /// Makes the slot of a new order ready and gives its link. Grows (the only allocation) when it lies past the capacity.
    #[inline(always)]
    pub fn vacate(&mut self, handle: Handle) -> u32 {
        let link = handle.slot as usize + 1;
        let (is_live, generation) = match self.orders.get(link) {
            Some(Line(order)) => (order.live, order.generation),
            None => self.extend(link),
        };
        assert!(
            !is_live & (generation <= handle.generation) & !handle.is_none(),
            "admission gave away a taken slot"
        );
        link as u32
    }

    /// Brings slots up to this link into play; gives whether the link is live, and its generation.
    #[cold]
    #[inline(never)]
    fn extend(&mut self, link: usize) -> (bool, u32) {
        assert!(link < u32::MAX as usize, "slot is no slot");
        let mut room = self.orders.capacity();
        if link >= room {
            room = (link + 1).next_power_of_two();
            self.orders.reserve_exact(room - self.orders.len());
        }
        let length = (link.next_multiple_of(BLOCK) + 1).min(room);
        self.orders.resize(length, Line(Order::EMPTY));
        (Order::EMPTY.live, Order::EMPTY.generation)
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

    /// Memory of the slots in play.
    pub fn bytes(&self) -> usize {
        self.orders.len() * size_of::<Line>()
    }

    /// Every link used so far, in slot order.
    pub fn links(&self) -> core::ops::Range<u32> {
        1..self.orders.len() as u32
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

    // Miri runs this too: what is asked for may lie anywhere, also at the very end of what there is.
    #[test]
    fn a_prefetch_reads_nothing_and_changes_nothing() {
        let bytes = [7u8; 65];
        prefetch(&bytes);
        prefetch(&bytes[64]);
        prefetch_head(&bytes[64]);
        prefetch_head(&Line(Order::EMPTY));
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
