//! Details of the last order in each slot, by slot, by public id, and by user and time.
//!
//! Two hash tables of fixed size, chained through the slots. Commands are numbered without gap, so
//! the low bits of an order's sequence are its bucket in the first. An order leaves its chains when
//! its slot is used again, so the end of an order costs nothing.

use types::{Handle, Id128, Sequence, UserIx};

use crate::effects::OrderTerms;

/// Number of buckets of a table. They stay in the cache; with more open orders the chains grow.
const BUCKETS: usize = 1 << 16;
/// Table of the low bits of sequences.
const BY_ID: usize = 0;
/// Table of the pairs (user, millisecond of entry).
const BY_TIME: usize = 1;

/// Data of an open order that admission does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub(crate) struct OrderDetails {
    pub generation: u32,
    pub id: Id128,
    pub terms: OrderTerms,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    details: OrderDetails,
    /// Time of the last change; `None` if that was before the checkpoint that restored the order.
    updated_ns: Option<u64>,
    /// Places in the tables [`BY_ID`] and [`BY_TIME`].
    places: [Place; 2],
}

#[derive(Clone, Copy, Debug)]
struct Place {
    bucket: u16,
    /// Slot + 1 of the order before it in the chain, 0 if it is the first.
    before: u32,
    /// Slot + 1 of the next order in the chain, 0 at its end.
    next: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Orders {
    rows: Vec<Option<Row>>,
    /// Slot + 1 of the first order in each chain, 0 if empty: untouched zero pages cost no memory.
    heads: [Vec<u32>; 2],
}

impl Default for Orders {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            heads: [vec![0; BUCKETS], vec![0; BUCKETS]],
        }
    }
}

impl Orders {
    /// Adds the order that command `sequence` of a user entered into a slot. The slot's last order
    /// has ended.
    pub fn insert(
        &mut self,
        slot: u32,
        (user, sequence): (UserIx, Sequence),
        details: OrderDetails,
        updated_ns: Option<u64>,
    ) {
        let at = slot as usize;
        if self.rows.len() <= at {
            self.rows.resize(at + 1, None);
        }
        if let Some(ended) = self.rows[at] {
            self.unlink(BY_ID, ended.places[BY_ID]);
            self.unlink(BY_TIME, ended.places[BY_TIME]);
        }
        let places = [
            self.link(BY_ID, bucket(sequence.get() as u32), slot),
            self.link(BY_TIME, time_bucket(user, millis(details.id)), slot),
        ];
        self.rows[at] = Some(Row {
            details,
            updated_ns,
            places,
        });
    }

    /// Adds a slot at the head of a chain.
    fn link(&mut self, table: usize, bucket: u16, slot: u32) -> Place {
        let next = std::mem::replace(&mut self.heads[table][usize::from(bucket)], slot + 1);
        if let Some(next) = next.checked_sub(1) {
            self.place_mut(next, table).before = slot + 1;
        }
        Place {
            bucket,
            before: 0,
            next,
        }
    }

    /// Removes a slot from its chain, at a cost that does not depend on the chain: while the clock
    /// stands still, all orders of a user have the same millisecond.
    fn unlink(&mut self, table: usize, place: Place) {
        match place.before.checked_sub(1) {
            None => self.heads[table][usize::from(place.bucket)] = place.next,
            Some(before) => self.place_mut(before, table).next = place.next,
        }
        if let Some(next) = place.next.checked_sub(1) {
            self.place_mut(next, table).before = place.before;
        }
    }

    fn place_mut(&mut self, slot: u32, table: usize) -> &mut Place {
        let row = self.rows[slot as usize].as_mut();
        &mut row.expect("a chain has orders").places[table]
    }

    fn row(&self, slot: u32) -> &Row {
        self.rows[slot as usize]
            .as_ref()
            .expect("a chain has orders")
    }

    /// Details of an open order.
    ///
    /// # Panics
    /// No order with this handle was inserted.
    pub fn details(&self, handle: Handle) -> &OrderDetails {
        let row = self.rows[handle.slot as usize].as_ref();
        let details = &row.expect("open order without details").details;
        debug_assert_eq!(details.generation, handle.generation);
        details
    }

    /// Records the time of a change of an open order.
    pub fn set_updated(&mut self, handle: Handle, time_ns: u64) {
        let row = self.rows[handle.slot as usize].as_mut();
        row.expect("open order without details").updated_ns = Some(time_ns);
    }

    /// The handle of the order with this id, and the time of its last change if known.
    ///
    /// The order may have ended. `sequence_low` is the part of the sequence that the id contains.
    pub fn find(&self, id: Id128, sequence_low: u32) -> Option<(Handle, Option<u64>)> {
        let mut chain = self.chain(BY_ID, bucket(sequence_low));
        let (slot, row) = chain.find(|(_, row)| row.details.id == id)?;
        Some((handle(slot, row), row.updated_ns))
    }

    /// Handles and ids of the orders that a user entered in the millisecond of this id, and perhaps
    /// some of other users. They may have ended.
    pub fn entered_with(&self, user: UserIx, id: Id128) -> impl Iterator<Item = (Handle, Id128)> {
        let chain = self.chain(BY_TIME, time_bucket(user, millis(id)));
        let same = chain.filter(move |(_, row)| millis(row.details.id) == millis(id));
        same.map(|(slot, row)| (handle(slot, row), row.details.id))
    }

    /// Slots and rows of a chain.
    fn chain(&self, table: usize, bucket: u16) -> impl Iterator<Item = (u32, &Row)> {
        let row = |at: u32| at.checked_sub(1).map(|slot| (slot, self.row(slot)));
        let first = row(self.heads[table][usize::from(bucket)]);
        std::iter::successors(first, move |(_, last)| row(last.places[table].next))
    }
}

fn handle(slot: u32, row: &Row) -> Handle {
    let generation = row.details.generation;
    Handle { slot, generation }
}

/// Milliseconds that an id begins with: of an order, or of a child such as its hold.
fn millis(id: Id128) -> u64 {
    id.halves().0 >> 16
}

fn time_bucket(user: UserIx, millis: u64) -> u16 {
    let key = millis ^ (u64::from(user.0) << 32);
    // Fibonacci hashing: the high bits of the product depend on all bits of the key.
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16
}

fn bucket(sequence_low: u32) -> u16 {
    (sequence_low as usize % BUCKETS) as u16
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use types::command::New;
    use types::{InstrumentIx, Lots, NodeId, Side, Ticks, UserIx, derived, order_uuid};

    use super::*;

    fn id(sequence: u64) -> Id128 {
        order_uuid(sequence, NodeId::new(1).unwrap(), Sequence(sequence))
    }

    fn insert(orders: &mut Orders, slot: u32, generation: u32, sequence: u64) {
        let handle = Handle { slot, generation };
        let (instrument, user) = (InstrumentIx(0), UserIx(0));
        let new = New::limit(instrument, handle, user, Side::Buy, Ticks(1), Lots(1));
        let details = OrderDetails {
            generation,
            id: id(sequence),
            terms: (&new).into(),
        };
        let by = (UserIx(0), Sequence(sequence));
        orders.insert(slot, by, details, Some(sequence));
    }

    fn find(orders: &Orders, sequence: u64) -> Option<(Handle, Option<u64>)> {
        let id = id(sequence);
        let from = derived::derived_from(id, NodeId::new(1).unwrap()).unwrap();
        orders.find(id, from.sequence_low)
    }

    #[test]
    fn an_order_is_found_by_its_id_until_its_slot_is_used_again() {
        let mut orders = Orders::default();
        // Three chains, of which each slot changes into the next one.
        let sequence = |round: u64, slot: u32| {
            (u64::from(slot) + round) % 3 + (1 + round * 90 + u64::from(slot)) * BUCKETS as u64
        };
        for round in 0..5 {
            for slot in 0..90 {
                insert(&mut orders, slot, round as u32 + 1, sequence(round, slot));
            }
            for slot in 0..90 {
                let known = sequence(round, slot);
                let generation = round as u32 + 1;
                let handle = Handle { slot, generation };
                assert_eq!(find(&orders, known), Some((handle, Some(known))));
                let ended = round.checked_sub(1).map(|round| sequence(round, slot));
                assert_eq!(ended.and_then(|ended| find(&orders, ended)), None);
            }
        }
        let handle = Handle {
            slot: 7,
            generation: 5,
        };
        orders.set_updated(handle, 1);
        assert_eq!(find(&orders, sequence(4, 7)), Some((handle, Some(1))));
        assert_eq!(orders.details(handle).id, id(sequence(4, 7)));
        assert_eq!(find(&orders, 5), None);
    }

    /// Many orders per millisecond; slots are used again in random order.
    #[test]
    fn orders_of_a_user_and_millisecond_are_found_until_their_slots_are_used_again() {
        const SLOTS: u64 = 200;
        let node = NodeId::new(1).unwrap();
        let users = [UserIx(0), UserIx(1), UserIx(70_000)];
        let (mut orders, mut random) = (Orders::default(), 1_u64);
        // Slot: user and id of the last order.
        let mut model = BTreeMap::new();
        for at in 0..2_000_u64 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let slot = (random >> 33) % SLOTS;
            let user = users[(random >> 50) as usize % users.len()];
            let id = order_uuid(at / 500 * 1_000_000, node, Sequence(at));
            let handle = Handle {
                slot: slot as u32,
                generation: at as u32,
            };
            let new = New::limit(InstrumentIx(0), handle, user, Side::Buy, Ticks(1), Lots(1));
            let details = OrderDetails {
                generation: handle.generation,
                id,
                terms: (&new).into(),
            };
            orders.insert(handle.slot, (user, Sequence(at)), details, None);
            model.insert(handle.slot, (user, handle, id));
            if at % 100 != 99 {
                continue;
            }
            for user in users {
                // A child begins with the same milliseconds.
                let child = derived::order_hold(id, derived::HoldPart::Main);
                let found: HashMap<_, _> = orders.entered_with(user, child).collect();
                let of = |(owner, _, other): &&(UserIx, Handle, Id128)| {
                    *owner == user && millis(*other) == millis(id)
                };
                let expected = model
                    .values()
                    .filter(of)
                    .map(|(_, handle, id)| (*handle, *id));
                assert_eq!(found, expected.collect());
            }
        }
        for (_, handle, id) in model.into_values() {
            let from = derived::derived_from(id, node).unwrap();
            assert_eq!(orders.find(id, from.sequence_low), Some((handle, None)));
        }
    }
}
