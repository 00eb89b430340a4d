//! The walk that proves the structure of a book. Tests and snapshots call it; `apply` itself asserts only what
//! costs one comparison.

use types::{Lots, Side};

use crate::book::Book;
use crate::slab::{NEVER, NIL};

impl Book {
    /// Panics when any invariant is broken: links, level sums, occupancy, cached best, count of live slots, no
    /// crossed book, next expiry.
    pub fn check_invariants(&self) {
        let (mut resting, mut prices, mut dated) = (0, 0, 0);
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
                prices += 1;
                let level = self.ladder.level(side, price);
                let (mut open, mut prev, mut link) = (Lots::ZERO, NIL, level.head);
                assert_ne!(link, NIL, "an occupied price holds an order");
                while link != NIL {
                    let order = self.slab.at(link);
                    assert!(order.live && order.side == side && order.price == price);
                    assert_eq!(order.prev, prev, "links agree both ways");
                    assert!(!order.open.is_zero() && order.open <= order.quantity);
                    let date = (order.expire_at_ns != NEVER).then_some(order.expire_at_ns);
                    assert_eq!(self.dates.date_of(link), date, "dates are known");
                    dated += usize::from(date.is_some());
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
        // Each price walked from the best one on is marked; as many are marked, so none stands where no walk comes.
        let mut marked = 0;
        for (side, price) in self.ladder.marked() {
            assert_ne!(
                self.ladder.level(side, price).head,
                NIL,
                "a marked price holds an order"
            );
            let best = self.best(side).expect("a marked price has a best one");
            let behind = match side {
                Side::Buy => price <= best,
                Side::Sell => price >= best,
            };
            assert!(behind, "no price is better than the best");
            marked += 1;
        }
        assert_eq!(marked, prices, "what is marked is what a walk finds");
        self.dates.check();
        assert_eq!(self.dates.len(), dated, "only resting orders have dates");
        assert_eq!(self.next_expiry_ns, self.dates.next_ns());
    }
}
