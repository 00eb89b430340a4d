//! A naive price-time-priority book that computes the expected number of trades of a file. Shares
//! no code with the engine.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::lobster::{Kind, Row};

/// Expected results of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    pub trades: u64,
    pub quantity: u64,
    /// Rows of type 4 whose order id occurred in an earlier row of type 1.
    pub executions_of_known_orders: u64,
    /// Of those: rows whose first maker is the order that the row names.
    pub same_maker: u64,
}

#[derive(Default)]
struct Book {
    /// Price to orders in time order, per side: `[buys, sells]`.
    sides: [BTreeMap<i64, VecDeque<u64>>; 2],
    open: HashMap<u64, (bool, i64, u64)>,
}

fn side(is_buy: bool) -> usize {
    usize::from(!is_buy)
}

impl Book {
    fn best(&self, is_buy: bool) -> Option<i64> {
        let levels = &self.sides[side(is_buy)];
        if is_buy {
            levels.keys().next_back().copied()
        } else {
            levels.keys().next().copied()
        }
    }

    fn remove(&mut self, id: u64) {
        if let Some((is_buy, price, _)) = self.open.remove(&id) {
            let levels = &mut self.sides[side(is_buy)];
            if let Some(queue) = levels.get_mut(&price) {
                queue.retain(|other| *other != id);
                if queue.is_empty() {
                    levels.remove(&price);
                }
            }
        }
    }

    /// Matches an incoming order; returns the makers with quantities, and the open quantity.
    fn execute(&mut self, is_buy: bool, price: i64, mut left: u64) -> (Vec<(u64, u64)>, u64) {
        let mut fills = Vec::new();
        while left > 0 {
            let Some(best) = self.best(!is_buy) else {
                break;
            };
            if (is_buy && best > price) || (!is_buy && best < price) {
                break;
            }
            let maker = self.sides[side(!is_buy)][&best][0];
            let open = self.open.get_mut(&maker).expect("queued orders are open");
            let quantity = left.min(open.2);
            open.2 -= quantity;
            left -= quantity;
            fills.push((maker, quantity));
            if open.2 == 0 {
                self.remove(maker);
            }
        }
        (fills, left)
    }

    fn rest(&mut self, id: u64, is_buy: bool, price: i64, quantity: u64) {
        self.open.insert(id, (is_buy, price, quantity));
        self.sides[side(is_buy)]
            .entry(price)
            .or_default()
            .push_back(id);
    }
}

/// Runs the rows through the naive book.
pub fn expect(rows: &[Row]) -> Expected {
    let mut book = Book::default();
    let mut seen = HashSet::new();
    let mut expected = Expected::default();
    for row in rows {
        match row.kind {
            Kind::New => {
                if !seen.insert(row.order_id) {
                    continue;
                }
                let (fills, left) = book.execute(row.is_buy, row.price_x10000, row.size);
                expected.trades += fills.len() as u64;
                expected.quantity += fills.iter().map(|fill| fill.1).sum::<u64>();
                if left > 0 {
                    book.rest(row.order_id, row.is_buy, row.price_x10000, left);
                }
            }
            Kind::Reduce => {
                if let Some(open) = book.open.get_mut(&row.order_id) {
                    if open.2 > row.size {
                        open.2 -= row.size;
                    } else {
                        book.remove(row.order_id);
                    }
                }
            }
            Kind::Delete => book.remove(row.order_id),
            Kind::Execute => {
                let known = seen.contains(&row.order_id);
                let (fills, _) = book.execute(!row.is_buy, row.price_x10000, row.size);
                expected.trades += fills.len() as u64;
                expected.quantity += fills.iter().map(|fill| fill.1).sum::<u64>();
                if known {
                    expected.executions_of_known_orders += 1;
                    if fills.first().is_some_and(|fill| fill.0 == row.order_id) {
                        expected.same_maker += 1;
                    }
                }
            }
            Kind::ExecuteHidden | Kind::Other => {}
        }
    }
    expected
}
