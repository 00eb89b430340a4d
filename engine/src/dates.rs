//! Expiry times of resting orders: an indexed binary heap by date, then slot.
//!
//! Every resting order with an expiry has exactly one entry, so an order that closes early leaves
//! nothing to clean up later. Insert and remove cost O(log n) in the orders with an expiry, finding
//! the next one O(1). The first insert allocates the configured capacity. Later inserts allocate
//! only for links beyond it.

use alloc::vec;
use alloc::vec::Vec;

use crate::slab::NEVER;

/// Expiry time and link, in heap order.
type Entry = (u64, u32);

#[derive(Clone, Debug)]
pub(crate) struct Dates {
    heap: Vec<Entry>,
    /// Position in the heap plus one, by link; 0 = no entry.
    places: Vec<u32>,
    /// Capacity allocated by the first insert.
    orders: usize,
}

impl Dates {
    /// Allocates capacity for `orders` at the first insert.
    pub fn new(orders: u32) -> Self {
        Self {
            heap: Vec::new(),
            places: Vec::new(),
            orders: orders as usize,
        }
    }

    /// Allocates space for a link. Untouched memory costs only address space.
    #[cold]
    fn extend(&mut self, link: usize) {
        if self.places.is_empty() {
            self.heap.reserve_exact(self.orders);
            self.places = vec![0; (self.orders + 1).max(link + 1)];
        } else {
            self.places.resize((link + 1).next_power_of_two(), 0);
        }
    }

    /// The next order to expire, and its expiry time.
    #[inline]
    pub fn first(&self) -> Option<Entry> {
        self.heap.first().copied()
    }

    /// Earliest expiry time; `NEVER` without one.
    #[inline]
    pub fn next_ns(&self) -> u64 {
        self.first().map_or(NEVER, |(at_ns, _)| at_ns)
    }

    /// Inserts an order without an entry.
    pub fn insert(&mut self, at_ns: u64, link: u32) {
        let index = link as usize;
        if index >= self.places.len() {
            self.extend(index);
        }
        assert!(self.places[index] == 0, "order already has an expiry entry");
        self.heap.push((at_ns, link));
        self.rise(self.heap.len() - 1);
    }

    /// Removes an order's entry.
    pub fn remove(&mut self, link: u32) {
        let place = self.places[link as usize];
        assert!(place != 0, "resting order without an expiry entry");
        let at = place as usize - 1;
        self.places[link as usize] = 0;
        self.heap.swap_remove(at);
        if at < self.heap.len() {
            // The entry moved from the end may belong higher or lower.
            let at = self.rise(at);
            self.sink(at);
        }
    }

    /// Expiry time of a link; checks that heap and positions agree.
    pub fn date_of(&self, link: u32) -> Option<u64> {
        let place = *self.places.get(link as usize)?;
        let at = (place as usize).checked_sub(1)?;
        let (at_ns, found) = self.heap[at];
        assert_eq!(found, link, "heap and positions disagree");
        Some(at_ns)
    }

    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Panics when the heap order is broken.
    pub fn check(&self) {
        for (at, entry) in self.heap.iter().enumerate().skip(1) {
            assert!(self.heap[(at - 1) / 2] < *entry, "heap order is broken");
        }
    }

    fn rise(&mut self, mut at: usize) -> usize {
        let entry = self.heap[at];
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent] < entry {
                break;
            }
            self.put(at, self.heap[parent]);
            at = parent;
        }
        self.put(at, entry);
        at
    }

    fn sink(&mut self, mut at: usize) {
        let entry = self.heap[at];
        loop {
            let left = 2 * at + 1;
            let Some(mut child) = self.heap.get(left).map(|_| left) else {
                break;
            };
            if self
                .heap
                .get(left + 1)
                .is_some_and(|r| *r < self.heap[left])
            {
                child = left + 1;
            }
            if entry < self.heap[child] {
                break;
            }
            self.put(at, self.heap[child]);
            at = child;
        }
        self.put(at, entry);
    }

    fn put(&mut self, at: usize, entry: Entry) {
        self.heap[at] = entry;
        self.places[entry.1 as usize] = at as u32 + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        #[test]
        fn pops_in_the_order_of_a_sorted_set(
            steps in prop::collection::vec((any::<bool>(), 1u32..40, 0u64..30), 0..400)
        ) {
            let mut plain = BTreeSet::new();
            let mut dates = Dates::new(8);
            for (takes_out, link, at_ns) in steps {
                match (plain.iter().find(|(_, l)| *l == link).copied(), takes_out) {
                    (Some(entry), true) => {
                        plain.remove(&entry);
                        dates.remove(link);
                    }
                    (None, false) => {
                        plain.insert((at_ns, link));
                        dates.insert(at_ns, link);
                    }
                    _ => {}
                }
                dates.check();
                prop_assert_eq!(dates.first(), plain.first().copied());
                prop_assert_eq!(dates.len(), plain.len());
            }
            while let Some(entry) = plain.pop_first() {
                prop_assert_eq!(dates.first(), Some(entry));
                dates.remove(entry.1);
            }
            prop_assert_eq!(dates.next_ns(), NEVER);
        }
    }
}
