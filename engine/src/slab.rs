//! Resting orders, addressed by admission's slot; 32-bit links join the orders of a price in time order.
//!
//! Invariant: a slot is live exactly while its order rests in the ladder. The generation is asserted at every access by handle: admission frees a
//! slot only after the closing event, so a foreign generation in a live slot is our bug.

use alloc::vec::Vec;
use core::mem::size_of;

use types::{Handle, Lots, SessionIx, Side, StpGroup, StpMode, Ticks, UserIx};

/// No link.
pub(crate) const NIL: u32 = u32::MAX;

/// Never expires.
pub(crate) const NEVER: u64 = u64::MAX;

/// One resting order: a cache line.
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

const _: () = assert!(size_of::<Order>() <= 64);

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
}

#[derive(Clone, Debug)]
pub(crate) struct Slab {
    orders: Vec<Order>,
    live: u32,
    /// One past the highest slot ever used: bound of every walk.
    high: u32,
}

impl Slab {
    pub fn new(capacity: u32) -> Self {
        Self {
            orders: alloc::vec![Order::EMPTY; capacity as usize],
            live: 0,
            high: 0,
        }
    }

    /// The order in a slot that the ladder's links name.
    #[inline]
    pub fn at(&self, slot: u32) -> &Order {
        &self.orders[slot as usize]
    }

    #[inline]
    pub fn at_mut(&mut self, slot: u32) -> &mut Order {
        &mut self.orders[slot as usize]
    }

    /// The resting order of a handle; `None` when it has closed.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<&Order> {
        let order = self.orders.get(handle.slot as usize)?;
        if !order.live {
            return None;
        }
        assert_eq!(
            order.generation, handle.generation,
            "slot was given away under a live order"
        );
        Some(order)
    }

    /// True when the slot may take a new order.
    #[inline]
    pub fn is_free(&self, slot: u32) -> bool {
        self.orders
            .get(slot as usize)
            .is_none_or(|order| !order.live)
    }

    /// Puts an order into its slot. Grows (the only allocation) when the slot lies past the capacity.
    #[inline]
    pub fn put(&mut self, slot: u32, order: Order) {
        if slot as usize >= self.orders.len() {
            self.grow(slot);
        }
        let place = &mut self.orders[slot as usize];
        assert!(
            !place.live && place.generation <= order.generation,
            "slot is taken"
        );
        *place = order;
        place.live = true;
        self.live += 1;
        self.high = self.high.max(slot + 1);
    }

    #[cold]
    fn grow(&mut self, slot: u32) {
        assert!(slot < NIL, "slot is no slot");
        let target = (slot as usize + 1).next_power_of_two();
        self.orders.resize(target, Order::EMPTY);
    }

    /// Ends the order in a slot. Its generation stays, so that a late handle is seen to be closed.
    #[inline]
    pub fn close(&mut self, slot: u32) {
        let order = &mut self.orders[slot as usize];
        debug_assert!(order.live);
        order.live = false;
        self.live -= 1;
    }

    pub fn live(&self) -> u32 {
        self.live
    }

    pub fn high(&self) -> u32 {
        self.high
    }

    #[inline]
    pub fn handle(&self, slot: u32) -> Handle {
        Handle {
            slot,
            generation: self.orders[slot as usize].generation,
        }
    }
}
