//! Map from the harness's order ids to the book's handles. Slots are assigned as by admission: the
//! slot freed last is reused first, with a higher generation.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use types::Handle;

/// Initial length of the table: twice the ids of a scenario.
const TABLE_INITIAL: usize = 1 << 21;
/// Maximum length of the table. Higher ids are in a map, because ids of the ABI have 64 bits.
const TABLE_MAX: usize = 1 << 24;
/// Initial capacity in slots.
const SLOTS_INITIAL: usize = 1 << 20;

/// The adapter's state of a slot.
#[derive(Clone, Copy, Default)]
struct Slot {
    order_id: u64,
    generation: u32,
}

/// Live orders by id. Allocates if the number of orders or an id exceeds its previous maximum, and
/// in the map.
pub struct Orders {
    /// Slot plus one of each id below `TABLE_MAX`, 0 if no live order has it.
    table: Vec<u32>,
    /// Slot plus one of higher ids.
    map: HashMap<u64, u32, FixedState>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Orders {
    pub fn new() -> Self {
        Self {
            table: vec![0; TABLE_INITIAL],
            map: HashMap::default(),
            slots: Vec::with_capacity(SLOTS_INITIAL),
            free: Vec::with_capacity(SLOTS_INITIAL),
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

    /// Handle of a live order, `Handle::NONE` if there is none with this id.
    pub fn handle(&self, order_id: u64) -> Handle {
        let link = self.link(order_id);
        let Some(slot) = link.checked_sub(1) else {
            return Handle::NONE;
        };
        let generation = self.slots[slot as usize].generation;
        Handle { slot, generation }
    }

    /// Assigns a handle to a new order. Returns `None` if a live order has this id.
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

    /// Id of the order that has, or last had, the slot of this handle.
    pub fn id(&self, handle: Handle) -> u64 {
        self.slots[handle.slot as usize].order_id
    }

    /// Removes an order. Its id and slot become free.
    pub fn close(&mut self, handle: Handle) {
        self.set_link(self.id(handle), 0);
        self.free.push(handle.slot);
    }
}
