//! Details of the last order in each slot, by slot and by public id.
//!
//! A hash table of fixed size, chained through the slots. Commands are numbered without gap, so the
//! low bits of an order's sequence are its bucket. An order leaves its chain when its slot is used
//! again, so the end of an order costs nothing.

use types::{Handle, Id128, Sequence};

use crate::effects::OrderTerms;

/// Number of buckets. They stay in the cache; with more open orders the chains grow.
const BUCKETS: usize = 1 << 16;

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
    bucket: u16,
    /// Slot + 1 of the next order in the chain, 0 at its end.
    next: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Orders {
    rows: Vec<Option<Row>>,
    /// Slot + 1 of the first order in each chain, 0 if empty: untouched zero pages cost no memory.
    heads: Vec<u32>,
}

impl Default for Orders {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            heads: vec![0; BUCKETS],
        }
    }
}

impl Orders {
    /// Adds the order that command `sequence` entered into a slot. The slot's last order has ended.
    pub fn insert(
        &mut self,
        slot: u32,
        sequence: Sequence,
        details: OrderDetails,
        updated_ns: Option<u64>,
    ) {
        let at = slot as usize;
        if self.rows.len() <= at {
            self.rows.resize(at + 1, None);
        }
        if let Some(ended) = self.rows[at] {
            *self.link_to(ended.bucket, slot) = ended.next;
        }
        let bucket = bucket(sequence.get() as u32);
        let next = std::mem::replace(&mut self.heads[usize::from(bucket)], slot + 1);
        self.rows[at] = Some(Row {
            details,
            updated_ns,
            bucket,
            next,
        });
    }

    /// The link of a chain that leads to a slot.
    fn link_to(&mut self, bucket: u16, slot: u32) -> &mut u32 {
        let (mut before, mut at) = (None, self.heads[usize::from(bucket)]);
        while at != slot + 1 {
            before = Some(at as usize - 1);
            at = self.row(at - 1).next;
        }
        match before {
            None => &mut self.heads[usize::from(bucket)],
            Some(before) => &mut self.rows[before].as_mut().expect("a chain has orders").next,
        }
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
        let mut at = self.heads[usize::from(bucket(sequence_low))];
        while at != 0 {
            let (slot, row) = (at - 1, self.row(at - 1));
            if row.details.id == id {
                let generation = row.details.generation;
                return Some((Handle { slot, generation }, row.updated_ns));
            }
            at = row.next;
        }
        None
    }
}

fn bucket(sequence_low: u32) -> u16 {
    (sequence_low as usize % BUCKETS) as u16
}

#[cfg(test)]
mod tests {
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
        orders.insert(slot, Sequence(sequence), details, Some(sequence));
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
}
