//! Generates order flow in the LOBSTER format from a seed. The rows are identical on every machine.
//!
//! Orders arrive around a slowly drifting middle price. About two rows in five cancel an order or,
//! less often, reduce one. One row in twenty executes the best resting order. Prices stay within a
//! fifth of the start.

use std::collections::BTreeMap;

use super::lobster::{Kind, Row};

/// Start price of the flow, in ten-thousandths.
const START_X10000: i64 = 1_000_000;
/// One tick, in ten-thousandths.
const TICK_X10000: i64 = 100;
/// Range of the middle price, in ticks.
const RANGE_TICKS: i64 = 2_000;

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
}

#[derive(Default)]
struct Resting {
    /// (price, arrival) to (id, size), per side: `[buys, sells]`.
    sides: [BTreeMap<(i64, u64), (u64, u64)>; 2],
    live: Vec<(bool, i64, u64)>,
}

impl Resting {
    fn best(&self, is_buy: bool) -> Option<((i64, u64), (u64, u64))> {
        let side = &self.sides[usize::from(!is_buy)];
        let top = if is_buy {
            // The oldest order of the highest price.
            let price = side.keys().next_back()?.0;
            side.range((price, 0)..).next()
        } else {
            side.iter().next()
        };
        top.map(|(key, order)| (*key, *order))
    }
}

/// Generates `rows` rows.
pub fn generate(seed: u64, rows: usize) -> Vec<Row> {
    let mut random = Random::new(seed);
    let mut book = Resting::default();
    let mut out = Vec::with_capacity(rows);
    let mut time_ns = 34_200_000_000_000u64;
    let mut middle = 0i64;
    let mut next_id = 1u64;
    while out.len() < rows {
        time_ns += random.below(2_000_000) + 1_000;
        middle = (middle + i64::try_from(random.below(3)).expect("small") - 1)
            .clamp(-RANGE_TICKS / 2, RANGE_TICKS / 2);
        let dice = random.below(100);
        let row = if dice < 5 {
            execution(&mut random, &mut book, time_ns)
        } else if dice < 45 {
            departure(&mut random, &mut book, time_ns)
        } else {
            None
        };
        let row = row.unwrap_or_else(|| {
            let is_buy = random.below(2) == 0;
            let away = i64::try_from(random.below(30)).expect("small") + 1;
            let ticks = if is_buy { middle - away } else { middle + away };
            // A new order never crosses the other side: only execution rows trade.
            let ticks = match book.best(!is_buy) {
                Some(((price, _), _)) if is_buy => {
                    ticks.min((price - START_X10000) / TICK_X10000 - 1)
                }
                Some(((price, _), _)) => ticks.max((price - START_X10000) / TICK_X10000 + 1),
                None => ticks,
            };
            let price = START_X10000 + ticks * TICK_X10000;
            let size = (random.below(10) + 1) * 10;
            let id = next_id;
            next_id += 1;
            book.sides[usize::from(!is_buy)].insert((price, id), (id, size));
            book.live.push((is_buy, price, id));
            Row {
                time_ns,
                kind: Kind::New,
                order_id: id,
                size,
                price_x10000: price,
                is_buy,
            }
        });
        out.push(row);
    }
    out
}

fn execution(random: &mut Random, book: &mut Resting, time_ns: u64) -> Option<Row> {
    let is_buy = random.below(2) == 0;
    let ((price, arrival), (id, size)) = book.best(is_buy)?;
    let taken = random.below(size) + 1;
    let side = &mut book.sides[usize::from(!is_buy)];
    if taken == size {
        side.remove(&(price, arrival));
    } else {
        side.insert((price, arrival), (id, size - taken));
    }
    Some(Row {
        time_ns,
        kind: Kind::Execute,
        order_id: id,
        size: taken,
        price_x10000: price,
        is_buy,
    })
}

/// A cancel or, one time in ten, a reduction of a random resting order.
fn departure(random: &mut Random, book: &mut Resting, time_ns: u64) -> Option<Row> {
    while !book.live.is_empty() {
        let at = usize::try_from(random.below(book.live.len() as u64)).expect("an index");
        let (is_buy, price, id) = book.live[at];
        let side = &mut book.sides[usize::from(!is_buy)];
        let Some((_, size)) = side.get(&(price, id)).copied() else {
            book.live.swap_remove(at);
            continue;
        };
        if size > 1 && random.below(10) == 0 {
            let less = random.below(size - 1) + 1;
            side.insert((price, id), (id, size - less));
            return Some(Row {
                time_ns,
                kind: Kind::Reduce,
                order_id: id,
                size: less,
                price_x10000: price,
                is_buy,
            });
        }
        side.remove(&(price, id));
        book.live.swap_remove(at);
        return Some(Row {
            time_ns,
            kind: Kind::Delete,
            order_id: id,
            size,
            price_x10000: price,
            is_buy,
        });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::naive;

    #[test]
    fn a_seed_determines_the_flow_and_executions_match_their_orders() {
        let rows = generate(7, 5_000);
        assert_eq!(rows, generate(7, 5_000));
        assert_ne!(rows, generate(8, 5_000));
        let expected = naive::expect(&rows);
        let executions = rows.iter().filter(|row| row.kind == Kind::Execute).count() as u64;
        assert!(executions > 100);
        assert_eq!(expected.executions_of_known_orders, executions);
        assert_eq!(
            expected.same_maker, executions,
            "each execution hits the order it names"
        );
        assert_eq!(expected.trades, executions);
    }
}
