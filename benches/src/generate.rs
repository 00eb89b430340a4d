//! Generates order flow with its expected result. A seed produces the same file on every machine.
//!
//! The result comes from a plain book (a sorted map of queues) that shares no code with the engine.
//!
//! Mix: about 47 % orders that rest, 38 % cancels, 8 % replaces and 7 % aggressive orders (IOC,
//! GTC, FOK, market). Distances from the best price follow a power law. Cancels and replaces prefer
//! recent orders and those near the best price. Each names a resting order, so none is rejected.
//! Aggressive orders come in runs of one side and follow a fair value, a bounded random walk.
//! [`Shape::SINGLE`] has the distributions of the profile `single` of the reference generator, a
//! program outside this repository.

use std::collections::{BTreeMap, VecDeque};

use crate::xflow::{Flow, Header, Kind, Op, Record, TapeHash};

/// Size and price range of the book that the flow builds.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// 0 single, 1 deep.
    pub profile: u32,
    /// Approximate number of resting orders.
    pub resting: u64,
    /// Distances from the best price are below 2^(`reach_bits` + 1) ticks.
    pub reach_bits: u32,
    /// Quarters of the cancels and replaces that prefer recent orders, at most two. Another quarter
    /// prefers orders near the best price.
    pub recent_quarters: u64,
    /// Mean number of records between two moves of the fair value.
    pub fair_interval: u64,
    /// Maximum distance of the fair value from its start, in ticks.
    pub fair_reach: i64,
    /// An aggressive order that is `d` ticks from the fair value moves the price towards it with
    /// probability `min(d, pull / 2) / pull`, else it belongs to the current run.
    pub pull: u64,
}

impl Shape {
    /// A book that fits into a core's cache.
    pub const SINGLE: Self = Self {
        profile: 0,
        resting: 2_000,
        reach_bits: 9,
        recent_quarters: 2,
        fair_interval: 256,
        fair_reach: 1_500,
        pull: 16,
    };
    /// A book that does not fit into it.
    pub const DEEP: Self = Self {
        profile: 1,
        resting: 150_000,
        reach_bits: 16,
        recent_quarters: 1,
        fair_interval: 64,
        fair_reach: 20_000,
        pull: 64,
    };
}

/// Fair value at the start, in ticks.
const CENTRE: i64 = 1_000_000;
/// Quantities of the orders with round lots, by frequency.
const ROUND_LOTS: [u64; 8] = [100, 100, 100, 200, 300, 500, 1_000, 2_000];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `0..2^(bits + 1)` with `P(X >= x)` of about `1 / x`.
    fn power_law(&mut self, bits: u32) -> u64 {
        let scale = 1 << self.next().trailing_zeros().min(bits);
        scale + self.below(scale) - 1
    }
}

#[derive(Clone, Copy)]
struct Resting {
    side: u8,
    price: i64,
    open: u64,
    /// Index in [`PlainBook::live`].
    live_at: usize,
}

/// The plain book, which computes the expected result.
#[derive(Default)]
struct PlainBook {
    /// Order ids in time priority, by price, for each side. The prices of bids are negated, so that
    /// the best price comes first.
    sides: [BTreeMap<i64, VecDeque<u64>>; 2],
    /// By id; `None` if the order does not rest.
    orders: Vec<Option<Resting>>,
    /// Ids of the resting orders.
    live: Vec<u64>,
    trades: u64,
    quantity: u64,
    tape: TapeHash,
}

fn key(side: u8, price: i64) -> i64 {
    if side == 0 { -price } else { price }
}

impl PlainBook {
    fn best(&self, side: u8) -> Option<i64> {
        let (best, _) = self.sides[usize::from(side)].first_key_value()?;
        Some(key(side, *best))
    }

    fn order(&self, id: u64) -> Resting {
        self.orders[id as usize].expect("the order rests")
    }

    fn rest(&mut self, id: u64, side: u8, price: i64, open: u64) {
        self.sides[usize::from(side)]
            .entry(key(side, price))
            .or_default()
            .push_back(id);
        self.orders[id as usize] = Some(Resting {
            side,
            price,
            open,
            live_at: self.live.len(),
        });
        self.live.push(id);
    }

    fn remove(&mut self, id: u64) {
        let order = self.order(id);
        let side = &mut self.sides[usize::from(order.side)];
        let queue = side
            .get_mut(&key(order.side, order.price))
            .expect("the level of the order");
        queue.retain(|other| *other != id);
        if queue.is_empty() {
            side.remove(&key(order.side, order.price));
        }
        self.orders[id as usize] = None;
        self.live.swap_remove(order.live_at);
        if let Some(moved) = self.live.get(order.live_at) {
            let moved = self.orders[*moved as usize]
                .as_mut()
                .expect("the order rests");
            moved.live_at = order.live_at;
        }
    }

    fn can_fill(&self, side: u8, limit: i64, remaining: u64) -> bool {
        let other = 1 - side;
        let inside = self.sides[usize::from(other)].range(..=key(other, limit));
        let mut sum = 0;
        for id in inside.flat_map(|(_, queue)| queue) {
            sum += self.order(*id).open;
            if sum >= remaining {
                return true;
            }
        }
        false
    }

    /// Matches the taker. Returns its remaining quantity.
    fn match_incoming(&mut self, taker: u64, side: u8, limit: i64, mut remaining: u64) -> u64 {
        let other = 1 - side;
        while remaining > 0 {
            let Some((best, queue)) = self.sides[usize::from(other)].first_key_value() else {
                break;
            };
            if *best > key(other, limit) {
                break;
            }
            let maker = queue[0];
            let order = self.orders[maker as usize]
                .as_mut()
                .expect("the order rests");
            let quantity = remaining.min(order.open);
            remaining -= quantity;
            order.open -= quantity;
            let (price, open) = (order.price, order.open);
            self.trades += 1;
            self.quantity += quantity;
            self.tape.trade(maker, taker, price, quantity);
            if open == 0 {
                self.remove(maker);
            }
        }
        remaining
    }
}

struct Generator {
    random: Random,
    shape: Shape,
    book: PlainBook,
    records: Vec<Record>,
    id_last: u64,
    /// In ticks.
    fair_value: i64,
    /// Side of the current run of aggressive orders.
    run_side: u8,
}

/// Generates a flow: the prefill, then `timed` records.
pub fn generate(shape: Shape, seed: u64, timed: u64) -> Flow {
    let mut g = Generator {
        random: Random(seed ^ (u64::from(shape.profile) << 32)),
        shape,
        book: PlainBook::default(),
        records: Vec::new(),
        id_last: 0,
        fair_value: CENTRE,
        run_side: 0,
    };
    g.book.orders.push(None);
    while (g.book.live.len() as u64) < shape.resting {
        g.new_passive();
    }
    let prefill = g.records.len() as u64;
    let (trades_before, quantity_before) = (g.book.trades, g.book.quantity);
    let mut header = Header {
        profile: shape.profile,
        seed,
        prefill,
        timed,
        resting_max: g.book.live.len() as u64,
        ..Header::default()
    };
    let (mut resting_sum, mut levels_sum) = (0u64, 0u64);
    for _ in 0..timed {
        let before = g.book.trades;
        g.step();
        header.trading += u64::from(g.book.trades > before);
        header.resting_max = header.resting_max.max(g.book.live.len() as u64);
        resting_sum += g.book.live.len() as u64;
        levels_sum += (g.book.sides[0].len() + g.book.sides[1].len()) as u64;
    }
    let prices = || g.records.iter().map(|r| r.price).filter(|p| *p != 0);
    header.price_low = prices().min().unwrap_or(0);
    header.price_high = prices().max().unwrap_or(0);
    header.id_max = g.id_last;
    header.trades = g.book.trades - trades_before;
    header.quantity = g.book.quantity - quantity_before;
    header.tape = g.book.tape.0;
    header.resting_end = g.book.live.len() as u64;
    header.resting_mean = resting_sum / timed.max(1);
    header.levels_mean = levels_sum / timed.max(1);
    Flow {
        header,
        records: g.records,
    }
}

impl Generator {
    fn emit(&mut self, op: Op, side: u8, id: u64, price: i64, quantity: u64) {
        let account = 1 + self.random.below(1_000) as u32;
        self.records.push(Record {
            op,
            side,
            account,
            id,
            price,
            quantity,
        });
    }

    fn new_id(&mut self) -> u64 {
        self.id_last += 1;
        self.book.orders.push(None);
        self.id_last
    }

    fn random_quantity(&mut self) -> u64 {
        match self.random.below(4) {
            0 | 1 => ROUND_LOTS[self.random.below(8) as usize],
            2 => 1 + self.random.below(100),
            _ => 10 * (1 + self.random.power_law(9)),
        }
    }

    /// A price that does not cross.
    fn passive_price(&mut self, side: u8) -> i64 {
        let away = if side == 0 { -1 } else { 1 };
        let (own, other) = (self.book.best(side), self.book.best(1 - side));
        let anchor = match (own, other) {
            (Some(own), _) => own,
            (None, Some(other)) => other + 2 * away,
            (None, None) => self.fair_value + away,
        };
        let distance = if self.shape.profile == 1 && self.random.below(2) == 0 {
            self.random.below(2 << self.shape.reach_bits)
        } else {
            self.random.power_law(self.shape.reach_bits)
        };
        // One order in eight improves the best price, by any distance that the spread allows.
        let room = match (own, other) {
            (Some(own), Some(other)) => own.abs_diff(other).saturating_sub(1),
            _ => 0,
        };
        let step = if room > 0 && self.random.below(8) == 0 {
            -away * (1 + self.random.below(room) as i64)
        } else {
            away * distance as i64
        };
        let price = anchor + step;
        match other {
            Some(ask) if side == 0 => price.min(ask - 1),
            Some(bid) => price.max(bid + 1),
            None => price,
        }
        .max(1)
    }

    fn new_passive(&mut self) {
        let [bids, asks] = [0, 1].map(|side: usize| self.book.sides[side].len() as u64);
        // The thinner side gets more orders.
        let side = u8::from(self.random.below(bids + asks + 2) > asks);
        let (price, quantity) = (self.passive_price(side), self.random_quantity());
        let id = self.new_id();
        self.emit(Op::New(Kind::Gtc), side, id, price, quantity);
        self.book.rest(id, side, price, quantity);
    }

    /// Side of the next aggressive order. A run of one side has ten orders on average.
    fn aggressive_side(&mut self, middle: i64) -> u8 {
        if self.random.below(5) == 0 {
            self.run_side = self.random.below(2) as u8;
        }
        let distance = self.fair_value.abs_diff(middle);
        if self.random.below(self.shape.pull) < distance.min(self.shape.pull / 2) {
            return u8::from(self.fair_value < middle);
        }
        self.run_side
    }

    fn new_aggressive(&mut self) {
        let (Some(bid), Some(ask)) = (self.book.best(0), self.book.best(1)) else {
            return self.new_passive();
        };
        let side = self.aggressive_side((bid + ask) / 2);
        let best = if side == 0 { ask } else { bid };
        let slip = self.random.power_law(4) as i64;
        let limit = (if side == 0 { best + slip } else { best - slip }).max(1);
        let kind = match self.random.below(10) {
            0..=5 => Kind::Ioc,
            6 | 7 => Kind::Gtc,
            8 => Kind::Fok,
            _ => Kind::Market,
        };
        let quantity = self.random_quantity();
        let id = self.new_id();
        let price = if kind == Kind::Market { 0 } else { limit };
        self.emit(Op::New(kind), side, id, price, quantity);
        let reach = match (kind, side) {
            (Kind::Market, 0) => i64::MAX - 1,
            (Kind::Market, _) => 1,
            _ => limit,
        };
        if kind == Kind::Fok && !self.book.can_fill(side, reach, quantity) {
            return;
        }
        let left = self.book.match_incoming(id, side, reach, quantity);
        if kind == Kind::Gtc && left > 0 {
            self.book.rest(id, side, limit, left);
        }
    }

    /// Id of a random resting order.
    fn pick_resting(&mut self) -> Option<u64> {
        let preferred = match self.random.below(4) {
            quarter if quarter < self.shape.recent_quarters => self.pick_recent(),
            2 => self.pick_near_best(),
            _ => None,
        };
        let count = self.book.live.len() as u64;
        preferred.or_else(|| {
            let at = self.random.below(count) as usize;
            self.book.live.get(at).copied()
        })
    }

    /// `None` after several ids whose orders do not rest.
    fn pick_recent(&mut self) -> Option<u64> {
        (0..6).find_map(|_| {
            let id = self.id_last.saturating_sub(self.random.power_law(7));
            self.book.orders[id as usize].is_some().then_some(id)
        })
    }

    /// `None` if the side has too few prices.
    fn pick_near_best(&mut self) -> Option<u64> {
        let side = self.random.below(2) as usize;
        let level = self.random.power_law(3) as usize;
        let queue = self.book.sides[side].values().nth(level)?;
        if self.random.below(2) == 0 {
            return queue.back().copied();
        }
        let at = self.random.power_law(3) as usize;
        queue.get(at.min(queue.len() - 1)).copied()
    }

    fn cancel(&mut self) {
        let Some(id) = self.pick_resting() else {
            return self.new_passive();
        };
        let side = self.book.order(id).side;
        self.emit(Op::Cancel, side, id, 0, 0);
        self.book.remove(id);
    }

    fn replace(&mut self) {
        let Some(id) = self.pick_resting() else {
            return self.new_passive();
        };
        let order = self.book.order(id);
        let side = order.side;
        let choice = self.random.below(16);
        if choice < 4 && order.open > 1 {
            let open = 1 + self.random.below(order.open - 1);
            let keeps_place = Op::Replace { keeps_place: true };
            self.emit(keeps_place, side, id, order.price, open);
            let order = self.book.orders[id as usize].as_mut();
            order.expect("the order rests").open = open;
            return;
        }
        let (price, open) = if choice < 6 {
            (order.price, order.open + self.random_quantity())
        } else {
            // One replace in sixteen crosses.
            let crossing = self.book.best(1 - side).filter(|_| choice == 15);
            let price = crossing.unwrap_or_else(|| self.passive_price(side));
            // At an unchanged price a smaller order would keep priority.
            let price = if price == order.price {
                price + if side == 0 && price > 1 { -1 } else { 1 }
            } else {
                price
            };
            (price, order.open)
        };
        let loses_place = Op::Replace { keeps_place: false };
        self.emit(loses_place, side, id, price, open);
        self.book.remove(id);
        let left = self.book.match_incoming(id, side, price, open);
        if left > 0 {
            self.book.rest(id, side, price, left);
        }
    }

    fn move_fair_value(&mut self) {
        let ticks = 1 + self.random.power_law(5) as i64;
        let ticks = if self.random.below(2) == 0 {
            ticks
        } else {
            -ticks
        };
        let reach = self.shape.fair_reach;
        self.fair_value = (self.fair_value + ticks).clamp(CENTRE - reach, CENTRE + reach);
    }

    fn step(&mut self) {
        if self.random.below(self.shape.fair_interval) == 0 {
            self.move_fair_value();
        }
        let (live, target) = (self.book.live.len() as i64, self.shape.resting as i64);
        let tilt = ((target - live) * 400 / target.max(1)).clamp(-120, 120);
        match self.random.below(1_000) as i64 {
            0..70 => self.new_aggressive(),
            70..150 => self.replace(),
            dice if dice < 590 + tilt => self.new_passive(),
            _ => self.cancel(),
        }
    }
}
