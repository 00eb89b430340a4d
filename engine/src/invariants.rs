//! Full check of a book, for tests and snapshots. `apply` asserts only cheap conditions.

use types::{Lots, Side};

use crate::book::Book;
use crate::slab::{NEVER, NIL};

impl Book {
    /// Panics when an invariant is broken.
    ///
    /// Checks links, level sums, occupancy, cached best, count of live slots, an uncrossed book and
    /// the next expiry.
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
                    assert!(away, "prices are not sorted best first");
                }
                last = Some(price);
                prices += 1;
                let level = self.ladder.level(side, price);
                let (mut open, mut prev, mut link) = (Lots::ZERO, NIL, level.head);
                assert_ne!(link, NIL, "occupied price without an order");
                while link != NIL {
                    let order = self.slab.at(link);
                    assert!(order.live && order.side == side && order.price == price);
                    assert_eq!(order.prev, prev, "prev link disagrees with next link");
                    assert!(!order.open.is_zero() && order.open <= order.quantity);
                    let date = (order.expire_at_ns != NEVER).then_some(order.expire_at_ns);
                    assert_eq!(
                        self.dates.date_of(link),
                        date,
                        "expiry differs from the expiry index"
                    );
                    dated += usize::from(date.is_some());
                    open += order.open;
                    resting += 1;
                    prev = link;
                    link = order.next;
                }
                assert_eq!(level.tail, prev, "tail is not the last order");
                assert_eq!(level.open, open, "level sum differs from its orders");
            }
        }
        assert_eq!(
            resting,
            self.slab.live(),
            "live slots differ from resting orders"
        );
        let live = self
            .slab
            .links()
            .filter(|link| self.slab.at(*link).live)
            .count();
        assert_eq!(live, resting as usize);
        assert!(self.ladder.is_sound(), "book is crossed");
        self.check_marked(prices);
        self.dates.check();
        assert_eq!(
            self.dates.len(),
            dated,
            "the expiry index contains orders that do not rest"
        );
        assert_eq!(self.next_expiry_ns, self.dates.next_ns());
    }

    /// Checks the prices marked in the bitmap, and that iteration from the best price found all
    /// `prices` of them.
    fn check_marked(&self, prices: usize) {
        let mut marked = 0;
        for (side, price) in self.ladder.marked() {
            assert_ne!(
                self.ladder.level(side, price).head,
                NIL,
                "marked price without an order"
            );
            let best = self
                .best(side)
                .expect("a side with a marked price has a best price");
            let behind = match side {
                Side::Buy => price <= best,
                Side::Sell => price >= best,
            };
            assert!(behind, "a marked price is better than the best");
            marked += 1;
        }
        assert_eq!(
            marked, prices,
            "marked prices differ from the iterated ones"
        );
    }
}
