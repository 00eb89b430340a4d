//! Free slots of the order table, last in first out: the slot freed last is still in the cache.
//!
//! A slot whose 32-bit generation is used up is retired. A million orders per second that all use
//! one slot at a time retire 20 slots per day. The order of free slots is not part of the state: a
//! command carries its slot, and any free slot may be taken.
//!
//! A circular doubly linked list over indices: no operation searches. Slots are added in blocks as
//! needed, so few open orders touch little memory.

use alloc::vec::Vec;

/// Slots added at once.
const BLOCK: u32 = 512;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// One slot in this many is reserved for users with few open orders (`design.md` 7).
const SCARCE_PART: u32 = 8;

/// `prev` of a slot that is not in the list.
const TAKEN: u32 = u32::MAX;

#[derive(Clone, Debug)]
pub(crate) struct FreeSlots {
    /// Index 0 is the list's sentinel, slot `s` is index `s + 1`.
    links: Vec<Link>,
    max: u32,
    taken: u32,
}

impl FreeSlots {
    pub fn new(max: u32) -> Self {
        // Full capacity from the start: untouched memory costs nothing, and growth would copy the
        // table.
        let mut links = Vec::with_capacity(max as usize + 1);
        links.push(Link { prev: 0, next: 0 });
        Self {
            links,
            max,
            taken: 0,
        }
    }

    /// The next free slot, `None` when the table is full.
    #[inline(always)]
    pub fn peek(&self) -> Option<u32> {
        match self.links[0].next {
            0 => {
                let next = self.slot_count();
                (next < self.max).then_some(next)
            }
            index => Some(index - 1),
        }
    }

    /// Slots added so far.
    pub fn slot_count(&self) -> u32 {
        self.links.len() as u32 - 1
    }

    /// Takes a slot; panics when it is taken already.
    #[inline(always)]
    pub fn take(&mut self, slot: u32) {
        if slot >= self.slot_count() {
            // One block, within `max`. A slot past `max` comes from a journal written under a
            // larger `max`.
            let target = (slot + BLOCK).min(self.max).max(slot + 1);
            self.extend(target);
        }
        let index = slot + 1;
        let link = self.links[index as usize];
        assert_ne!(link.prev, TAKEN, "slot is taken");
        self.links[link.prev as usize].next = link.next;
        self.links[link.next as usize].prev = link.prev;
        self.links[index as usize].prev = TAKEN;
        self.taken += 1;
    }

    /// Frees a slot; panics when it is free already.
    #[inline]
    pub fn free(&mut self, slot: u32) {
        let index = slot + 1;
        assert_eq!(self.links[index as usize].prev, TAKEN, "slot is freed once");
        let first = self.links[0].next;
        self.links[index as usize] = Link {
            prev: 0,
            next: first,
        };
        self.links[first as usize].prev = index;
        self.links[0].next = index;
        self.taken -= 1;
    }

    /// True when no more than an eighth of all slots is free.
    pub fn is_scarce(&self) -> bool {
        self.taken >= self.max - self.max / SCARCE_PART
    }

    #[cold]
    fn extend(&mut self, target: u32) {
        while self.slot_count() < target {
            let index = self.links.len() as u32;
            self.links.push(Link { prev: 0, next: 0 });
            self.push(index);
        }
    }

    /// Appends a free slot as the last one.
    fn push(&mut self, index: u32) {
        let last = self.links[0].prev;
        self.links[index as usize] = Link {
            prev: last,
            next: 0,
        };
        self.links[last as usize].next = index;
        self.links[0].prev = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_freed_last_is_taken_first_and_any_may_be_taken() {
        let mut slots = FreeSlots::new(10_000);
        assert_eq!(slots.peek(), Some(0));
        slots.take(0);
        assert_eq!(slots.peek(), Some(1));
        slots.take(500);
        slots.free(0);
        assert_eq!(slots.peek(), Some(0), "a freed slot comes next");
        slots.free(500);
        assert_eq!(slots.peek(), Some(500));
        slots.take(0);
        assert_eq!(slots.peek(), Some(500), "the first one stays");
        slots.take(500);
        for slot in (1..BLOCK).filter(|s| *s != 500) {
            assert_eq!(slots.peek(), Some(slot));
            slots.take(slot);
        }
        for slot in BLOCK..10_000 {
            assert_eq!(slots.peek(), Some(slot));
            slots.take(slot);
        }
        assert_eq!(slots.peek(), None);
    }

    #[test]
    fn the_table_ends_at_its_bound() {
        let mut slots = FreeSlots::new(3);
        for expected in 0..3 {
            assert_eq!(slots.peek(), Some(expected));
            slots.take(expected);
        }
        assert_eq!(slots.peek(), None);
        slots.free(1);
        assert_eq!(slots.peek(), Some(1));
    }

    #[test]
    #[should_panic(expected = "slot is freed once")]
    fn a_slot_is_freed_once() {
        let mut slots = FreeSlots::new(3);
        slots.take(0);
        slots.free(0);
        slots.free(0);
    }
}
