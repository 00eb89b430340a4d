//! The walk that proves the structure of a book. Tests and snapshots call it; `apply` itself asserts only what costs one comparison.

use types::{Lots, Side};

use crate::book::Book;
use crate::ladder::NO_PRICE;
use crate::slab::NIL;

impl Book {
    /// Panics when any invariant is broken: links, level sums, occupancy, cached best, count of live slots, no crossed book, next expiry.
    pub fn check_invariants(&self) {
        let mut resting = 0;
        for side in [Side::Buy, Side::Sell] {
            let mut last = None;
            for price in self.ladder.prices(side) {
                if let Some(last) = last {
                    let away = match side {
                        Side::Buy => price < last,
                        Side::Sell => price > last,
                    };
                    assert!(away, "prices go away from the other side");
                }
                last = Some(price);
                assert!(self.ladder.is_occupied(side, price));
                let level = self.ladder.level(side, price);
                let (mut open, mut prev, mut slot) = (Lots::ZERO, NIL, level.head);
                assert_ne!(slot, NIL, "an occupied price holds an order");
                while slot != NIL {
                    let order = self.slab.at(slot);
                    assert!(order.live && order.side == side && order.price == price);
                    assert_eq!(order.prev, prev, "links agree both ways");
                    assert!(!order.open.is_zero() && order.open <= order.quantity);
                    assert!(order.expire_at_ns >= self.next_expiry_ns);
                    open += order.open;
                    resting += 1;
                    prev = slot;
                    slot = order.next;
                }
                assert_eq!(level.tail, prev, "tail is the last order");
                assert_eq!(level.open, open, "level sum equals its orders");
            }
        }
        assert_eq!(
            resting,
            self.slab.live(),
            "every live slot rests at a price"
        );
        let live = (0..self.slab.high())
            .filter(|slot| self.slab.at(*slot).live)
            .count();
        assert_eq!(live, resting as usize);
        assert!(self.ladder.best[0] < self.ladder.best[1], "book is crossed");
        for side in [Side::Buy, Side::Sell] {
            let none = self.ladder.best[side.index()] == NO_PRICE[side.index()];
            assert_eq!(none, self.depth(side).next().is_none());
        }
    }
}
