//! Map from the harness's order ids to the book's handles, assigned as by admission: the slot freed
//! last is reused first, with a higher generation.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use types::Handle;

/// Ids below this have a table entry from the start: twice the ids of a scenario.
const TABLE_FIRST: usize = 1 << 21;
/// Ids from here on are in a map: the ABI's ids have 64 bits and no bound.
const TABLE_MAX: usize = 1 << 24;
/// Slots with preallocated memory.
const SLOTS_FIRST: usize = 1 << 20;

/// The adapter's state of a slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    order_id: u64,
    generation: u32,
}

/// Orders that rest or match. Allocates only if an id or the number of orders exceeds its previous
/// maximum.
pub struct Orders {
    /// By id below `TABLE_MAX`: slot plus one, 0 if none.
    table: Vec<u32>,
    /// The same for all other ids.
    map: HashMap<u64, u32, FixedState>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Orders {
    pub fn new() -> Self {
        Self {
            table: vec![0; TABLE_FIRST],
            map: HashMap::default(),
            slots: Vec::with_capacity(SLOTS_FIRST),
            free: Vec::with_capacity(SLOTS_FIRST),
        }
    }

    fn link(&self, order_id: u64) -> u32 {
        match self.table.get(order_id as usize) {
            Some(link) => *link,
            None => self.map.get(&order_id).copied().unwrap_or(0),
        }
    }

    fn set_link(&mut self, order_id: u64, link: u32) {
        let at = order_id as usize;
        if at < TABLE_MAX {
            if at >= self.table.len() {
                self.table.resize((at + 1).next_power_of_two(), 0);
            }
            self.table[at] = link;
        } else if link == 0 {
            self.map.remove(&order_id);
        } else {
            self.map.insert(order_id, link);
        }
    }

    /// Handle of a live order; for any other id `Handle::NONE`, which names no order.
    pub fn handle(&self, order_id: u64) -> Handle {
        let link = self.link(order_id);
        let Some(slot) = link.checked_sub(1) else {
            return Handle::NONE;
        };
        let generation = self.slots[slot as usize].generation;
        Handle { slot, generation }
    }

    /// A handle for a new order; `None` if an order with that id is live.
    pub fn open(&mut self, order_id: u64) -> Option<Handle> {
        if self.link(order_id) != 0 {
            return None;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let of = &mut self.slots[slot as usize];
        of.order_id = order_id;
        of.generation += 1;
        let generation = of.generation;
        self.set_link(order_id, slot + 1);
        Some(Handle { slot, generation })
    }

    pub fn id(&self, handle: Handle) -> u64 {
        self.slots[handle.slot as usize].order_id
    }

    /// Ends an order: its id and its slot become free.
    pub fn close(&mut self, handle: Handle) {
        self.set_link(self.id(handle), 0);
        self.free.push(handle.slot);
    }
}
