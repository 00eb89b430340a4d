//! The walk that proves the structure of a book. Tests and snapshots call it; `apply` itself asserts only what costs one comparison.

use types::{Lots, Side};

use crate::book::Book;
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
                let (mut open, mut prev, mut link) = (Lots::ZERO, NIL, level.head);
                assert_ne!(link, NIL, "an occupied price holds an order");
                while link != NIL {
                    let order = self.slab.at(link);
                    assert!(order.live && order.side == side && order.price == price);
                    assert_eq!(order.prev, prev, "links agree both ways");
                    assert!(!order.open.is_zero() && order.open <= order.quantity);
                    assert!(order.expire_at_ns >= self.next_expiry_ns);
                    open += order.open;
                    resting += 1;
                    prev = link;
                    link = order.next;
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
        let live = self
            .slab
            .links()
            .filter(|link| self.slab.at(*link).live)
            .count();
        assert_eq!(live, resting as usize);
        assert!(self.ladder.is_sound(), "book is crossed");
        for side in [Side::Buy, Side::Sell] {
            assert_eq!(self.best(side), self.depth(side).next().map(|l| l.price));
        }
    }
}
