//! Open orders by client order id: a hash table of fixed size, chained through the order slots.
//!
//! Does not allocate while slots are below `slots_max`. No result depends on the order of
//! insertion.

use alloc::vec::Vec;

use types::UserIx;

/// Maximum number of buckets. 256 KiB stay in the cache; with more open orders the chains grow.
const BUCKETS_MAX: u32 = 1 << 16;

/// Links of one slot.
#[derive(Clone, Copy, Debug, Default)]
struct Node {
    id: u64,
    user: u32,
    /// Slot + 1 of the next order in the chain, 0 at its end.
    next: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct ClientIds {
    /// Slot + 1 of the first order in each chain, 0 if empty: untouched zero pages cost no memory.
    heads: Vec<u32>,
    nodes: Vec<Node>,
    count: usize,
    /// Odd, so that no bit of an id is lost.
    key: [u64; 2],
}

impl ClientIds {
    /// Reserves capacity for orders in slots below `slots_max`. `key` must be secret: a client that
    /// knows it can choose ids that share one chain.
    pub fn new(slots_max: u32, key: [u64; 2]) -> Self {
        let buckets = slots_max.clamp(64, BUCKETS_MAX).next_power_of_two();
        Self {
            heads: alloc::vec![0; buckets as usize],
            nodes: Vec::with_capacity(slots_max as usize),
            count: 0,
            key: key.map(|word| word | 1),
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Slot of the user's open order with this id.
    #[inline(always)]
    pub fn get(&self, user: UserIx, id: u64) -> Option<u32> {
        let mut at = self.heads[self.bucket(user, id)];
        while at != 0 {
            let node = self.nodes[at as usize - 1];
            if node.id == id && node.user == user.0 {
                return Some(at - 1);
            }
            at = node.next;
        }
        None
    }

    /// Adds an open order. Panics if the user has an open order with this id, which admission has
    /// excluded.
    #[inline(always)]
    pub fn insert(&mut self, user: UserIx, id: u64, slot: u32) {
        assert!(
            self.get(user, id).is_none(),
            "client order ids of open orders differ"
        );
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Node::default());
        }
        let bucket = self.bucket(user, id);
        self.nodes[slot as usize] = Node {
            id,
            user: user.0,
            next: self.heads[bucket],
        };
        self.heads[bucket] = slot + 1;
        self.count += 1;
    }

    /// Removes the order of a slot; panics when it is not in the table.
    #[inline(always)]
    pub fn remove(&mut self, user: UserIx, id: u64, slot: u32) {
        let bucket = self.bucket(user, id);
        let next = self.nodes[slot as usize].next;
        if self.heads[bucket] == slot + 1 {
            self.heads[bucket] = next;
        } else {
            let mut at = self.heads[bucket];
            while at != 0 && self.nodes[at as usize - 1].next != slot + 1 {
                at = self.nodes[at as usize - 1].next;
            }
            assert_ne!(at, 0, "an open order's client id is known");
            self.nodes[at as usize - 1].next = next;
        }
        self.count -= 1;
    }

    #[inline(always)]
    fn bucket(&self, user: UserIx, id: u64) -> usize {
        // High bits of a product with a secret factor: ids collide only by chance. Sixteen
        // consecutive ids share a cache line.
        let [of_id, of_user] = self.key;
        let x = (id >> 4)
            .wrapping_mul(of_id)
            .wrapping_add(u64::from(user.0).wrapping_mul(of_user));
        let lines = self.heads.len() / 16;
        let line = ((u128::from(x) * lines as u128) >> 64) as usize;
        (line << 4) | (id & 15) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_find_lose_and_reuse() {
        // 64 buckets, 500 orders: every chain is long.
        let mut ids = ClientIds::new(1, [3, 5]);
        for slot in 0..500 {
            ids.insert(UserIx(slot % 3), u64::from(slot / 3) + 1, slot);
        }
        for slot in (0..500).step_by(2) {
            ids.remove(UserIx(slot % 3), u64::from(slot / 3) + 1, slot);
        }
        assert_eq!(ids.len(), 250);
        for slot in 0..500 {
            let found = ids.get(UserIx(slot % 3), u64::from(slot / 3) + 1);
            assert_eq!(found, (slot % 2 == 1).then_some(slot));
        }
        ids.insert(UserIx(9), 9, 0);
        assert_eq!(ids.get(UserIx(9), 9), Some(0));
    }

    /// Orders in the longest chain.
    fn longest(ids: &ClientIds) -> usize {
        let chain = |head: &u32| {
            let next = |at: &u32| Some(ids.nodes[*at as usize - 1].next).filter(|at| *at != 0);
            core::iter::successors(Some(*head).filter(|at| *at != 0), next).count()
        };
        ids.heads.iter().map(chain).max().unwrap_or(0)
    }

    #[test]
    fn ids_chosen_to_collide_under_one_key_do_not_collide_under_another() {
        let filled = |key: [u64; 2], chosen: &[u64]| {
            let mut ids = ClientIds::new(1 << 16, key);
            for (slot, id) in chosen.iter().enumerate() {
                ids.insert(UserIx(1), *id, slot as u32);
            }
            longest(&ids)
        };
        // With this key known, all of them share one bucket.
        let known = ClientIds::new(1 << 16, [1, 1]);
        let place = known.bucket(UserIx(1), 0);
        let chosen: Vec<u64> = (0..1u64 << 44)
            .map(|n| n << 4)
            .filter(|id| known.bucket(UserIx(1), *id) == place)
            .take(20_000)
            .collect();
        assert_eq!(filled([1, 1], &chosen), chosen.len());
        let secret = [0x2545_f491_4f6c_dd1d, 0x5851_f42d_4c95_7f2d];
        let length = filled(secret, &chosen);
        assert!(length < 200, "{length}");
    }

    #[test]
    #[should_panic(expected = "differ")]
    fn an_id_is_inserted_once() {
        let mut ids = ClientIds::new(10, [3, 5]);
        ids.insert(UserIx(1), 7, 0);
        ids.insert(UserIx(1), 7, 1);
    }
}
