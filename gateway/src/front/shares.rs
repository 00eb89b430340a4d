//! Places that keys share by dynamic thresholds, as users share the ring (`in_flight`): a key gets
//! another place while it has fewer places than are free. A single key gets half of them. The other
//! half stays for other keys.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Places in use, by key.
pub struct Shares<K> {
    places: usize,
    in_use: usize,
    by_key: HashMap<K, usize>,
}

impl<K: Eq + Hash> Shares<K> {
    pub fn new(places: usize) -> Self {
        Self {
            places,
            in_use: 0,
            by_key: HashMap::new(),
        }
    }

    /// Number of places that the key has.
    pub fn count(&self, key: &K) -> usize {
        self.by_key.get(key).copied().unwrap_or(0)
    }

    /// True if the key has fewer places than are free.
    pub fn has_place(&self, key: &K) -> bool {
        self.count(key) < self.places - self.in_use
    }

    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Takes a place for the key. Returns false and takes none if the key has as many as are free.
    pub fn begin(&mut self, key: K) -> bool {
        let has_place = self.has_place(&key);
        if has_place {
            self.in_use += 1;
            *self.by_key.entry(key).or_default() += 1;
        }
        has_place
    }

    /// Returns a place of the key.
    pub fn end(&mut self, key: K) {
        if let Entry::Occupied(mut count) = self.by_key.entry(key) {
            self.in_use -= 1;
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn is_full(&self) -> bool {
        self.in_use == self.places
    }
}

/// Work that waits for a place. Keys take turns.
pub struct PlaceQueue<K, T> {
    shares: Shares<K>,
    /// By key, oldest first; a key without waiting work has no entry.
    waiting: HashMap<K, VecDeque<T>>,
    /// The keys of `waiting`, in the order of their turns.
    turns: VecDeque<K>,
    count: usize,
}

impl<K: Copy + Eq + Hash, T> PlaceQueue<K, T> {
    pub fn new(places: usize) -> Self {
        Self {
            shares: Shares::new(places),
            waiting: HashMap::new(),
            turns: VecDeque::new(),
            count: 0,
        }
    }

    /// Amount of waiting work.
    pub fn waiting(&self) -> usize {
        self.count
    }

    pub fn push(&mut self, key: K, work: T) {
        self.count += 1;
        match self.waiting.entry(key) {
            Entry::Occupied(mut waiting) => waiting.get_mut().push_back(work),
            Entry::Vacant(none) => {
                none.insert(VecDeque::from([work]));
                self.turns.push_back(key);
            }
        }
    }

    /// Takes a place for the next work whose key gets one. The caller returns it by
    /// [`PlaceQueue::end`].
    pub fn start_next(&mut self) -> Option<(K, T)> {
        for _ in 0..self.turns.len() {
            if self.shares.is_full() {
                return None;
            }
            let key = self.turns.pop_front()?;
            if !self.shares.begin(key) {
                self.turns.push_back(key);
                continue;
            }
            let waiting = self.waiting.get_mut(&key);
            let waiting = waiting.expect("a key with a turn has waiting work");
            let work = waiting.pop_front().expect("as above");
            match waiting.is_empty() {
                true => drop(self.waiting.remove(&key)),
                false => self.turns.push_back(key),
            }
            self.count -= 1;
            return Some((key, work));
        }
        None
    }

    /// Returns a place of the key.
    pub fn end(&mut self, key: K) {
        self.shares.end(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes places until the key gets none. Returns their number.
    fn fill(shares: &mut Shares<u8>, key: u8) -> usize {
        (0..100).take_while(|_| shares.begin(key)).count()
    }

    // rows: R341
    #[test]
    fn r341_a_key_gets_half_of_the_free_places_and_leaves_the_rest() {
        let mut shares = Shares::new(8);
        assert_eq!(
            [1, 2, 3, 4, 5].map(|key| fill(&mut shares, key)),
            [4, 2, 1, 1, 0]
        );
        shares.end(4);
        assert_eq!(fill(&mut shares, 1), 0, "it has more than are free");
        assert_eq!(fill(&mut shares, 5), 1);
        for (key, count) in [(1, 4), (2, 2), (3, 1), (5, 1)] {
            (0..count).for_each(|_| shares.end(key));
        }
        assert!(shares.by_key.is_empty(), "no entry is left");
        shares.end(1);
        assert_eq!(fill(&mut shares, 1), 4, "a place is returned once");
    }

    // rows: R341
    #[test]
    fn r341_work_of_a_busy_key_waits_and_that_of_others_starts() {
        let mut queue = PlaceQueue::new(4);
        let start = |queue: &mut PlaceQueue<char, u32>| {
            let started = std::iter::from_fn(|| queue.start_next());
            started.collect::<Vec<_>>()
        };
        (0..10).for_each(|work| queue.push('a', work));
        queue.push('b', 100);
        assert_eq!(start(&mut queue), [('a', 0), ('b', 100), ('a', 1)]);
        assert_eq!(queue.waiting(), 8);
        queue.push('c', 200);
        assert_eq!(start(&mut queue), [('c', 200)]);
        for key in ['b', 'c'] {
            queue.end(key);
        }
        assert!(start(&mut queue).is_empty(), "two places are kept free");
        queue.end('a');
        assert_eq!(start(&mut queue), [('a', 2)], "in the order of arrival");
        assert_eq!(queue.waiting(), 7);
    }
}
