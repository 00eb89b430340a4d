//! Order book with price-time priority only, the baseline for `engine::Book`: no accounts,
//! self-trade prevention, trading phases, price bands or assertions. It writes one 32-byte event
//! per result. The difference in time is the cost of the product's rules.
//!
//! Per side an array of price levels by tick and a bitmap of the non-empty ones. Orders are in a
//! slab, linked by 32-bit slot numbers. A dense array has the slot of each order id.

use crate::xflow::{Header, Kind, Op, Record, TapeHash};

const NIL: u32 = u32::MAX;
/// Capacity of the event buffer, which is overwritten cyclically.
const EVENTS: usize = 1 << 12;

#[derive(Clone, Copy)]
struct Order {
    prev: u32,
    next: u32,
    open: u64,
    tick: u32,
    id: u32,
    side: u32,
    _account: u32,
}

#[derive(Clone, Copy)]
struct Level {
    head: u32,
    tail: u32,
    open: u64,
}

const EMPTY: Level = Level {
    head: NIL,
    tail: NIL,
    open: 0,
};

/// A trade or another event of an order. Fields of a trade: maker id, taker id, price, quantity; of
/// other events: order id, one of the kinds below, price, quantity.
#[derive(Clone, Copy, Default)]
struct BookEvent(u64, u64, i64, u64);

const ACCEPTED: u64 = 0;
/// End of an IOC, market or filled FOK order. The quantity is the cancelled remainder, 0 if filled.
const REMAINDER_CANCELLED: u64 = u64::MAX;
const CANCELLED: u64 = u64::MAX - 1;
const REPLACED: u64 = u64::MAX - 2;

/// Non-empty price levels: `low` has one bit per tick, `high` one bit per word of `low`.
struct TickBitmap {
    low: Vec<u64>,
    high: Vec<u64>,
}

impl TickBitmap {
    fn new(ticks: usize) -> Self {
        let low = ticks / 64 + 1;
        Self {
            low: vec![0; low],
            high: vec![0; low / 64 + 1],
        }
    }

    #[inline(always)]
    fn set(&mut self, tick: u32) {
        let word = tick as usize >> 6;
        self.low[word] |= 1 << (tick & 63);
        self.high[word >> 6] |= 1 << (word & 63);
    }

    #[inline(always)]
    fn clear(&mut self, tick: u32) {
        let word = tick as usize >> 6;
        self.low[word] &= !(1 << (tick & 63));
        if self.low[word] == 0 {
            self.high[word >> 6] &= !(1 << (word & 63));
        }
    }

    /// The next non-empty tick above, [`NIL`] if there is none.
    fn above(&self, tick: u32) -> u32 {
        let from = tick as usize + 1;
        let mut word = from >> 6;
        if word >= self.low.len() {
            return NIL;
        }
        let rest = self.low[word] & (u64::MAX << (from & 63));
        if rest != 0 {
            return ((word << 6) + rest.trailing_zeros() as usize) as u32;
        }
        word += 1;
        let mut high = word >> 6;
        let mut mask = u64::MAX << (word & 63);
        while high < self.high.len() {
            let rest = self.high[high] & mask;
            if rest != 0 {
                word = (high << 6) + rest.trailing_zeros() as usize;
                return ((word << 6) + self.low[word].trailing_zeros() as usize) as u32;
            }
            high += 1;
            mask = u64::MAX;
        }
        NIL
    }

    /// The next non-empty tick below, [`NIL`] if there is none.
    fn below(&self, tick: u32) -> u32 {
        let mut word = tick as usize >> 6;
        let rest = self.low[word] & ((1 << (tick & 63)) - 1);
        if rest != 0 {
            return ((word << 6) + 63 - rest.leading_zeros() as usize) as u32;
        }
        let mut high = word >> 6;
        let mut mask = (1u64 << (word & 63)) - 1;
        loop {
            let rest = self.high[high] & mask;
            if rest != 0 {
                word = (high << 6) + 63 - rest.leading_zeros() as usize;
                return ((word << 6) + 63 - self.low[word].leading_zeros() as usize) as u32;
            }
            if high == 0 {
                return NIL;
            }
            high -= 1;
            mask = u64::MAX;
        }
    }
}

pub struct BaselineBook {
    levels: [Vec<Level>; 2],
    bits: [TickBitmap; 2],
    best: [u32; 2],
    slab: Vec<Order>,
    free_head: u32,
    slot_of_id: Vec<u32>,
    price_low: i64,
    events: Box<[BookEvent; EVENTS]>,
    event_count: usize,
    pub trades: u64,
    pub quantity: u64,
    pub tape: TapeHash,
}

impl BaselineBook {
    /// Allocates for the price range, highest order id and resting orders of the header.
    pub fn new(header: &Header) -> Self {
        let ticks = (header.price_high - header.price_low + 1) as usize;
        let orders = header.resting_max as u32 + 1;
        let empty = Order {
            prev: NIL,
            next: NIL,
            open: 0,
            tick: 0,
            id: 0,
            side: 0,
            _account: 0,
        };
        Self {
            levels: [vec![EMPTY; ticks], vec![EMPTY; ticks]],
            bits: [TickBitmap::new(ticks), TickBitmap::new(ticks)],
            best: [NIL; 2],
            slab: (0..orders)
                .map(|at| Order {
                    next: at + 1,
                    ..empty
                })
                .collect(),
            free_head: 0,
            slot_of_id: vec![NIL; header.id_max as usize + 1],
            price_low: header.price_low,
            events: vec![BookEvent::default(); EVENTS]
                .into_boxed_slice()
                .try_into()
                .unwrap_or_else(|_| unreachable!("the length is the constant")),
            event_count: 0,
            trades: 0,
            quantity: 0,
            tape: TapeHash::default(),
        }
    }

    /// Executes one operation of the flow.
    #[inline(always)]
    pub fn apply(&mut self, record: &Record) {
        let side = usize::from(record.side & 1);
        match record.op {
            Op::New(kind) => {
                self.push_event(record.id, ACCEPTED, record.price, record.quantity);
                if kind == Kind::Gtc {
                    return self.match_then_rest(record, side);
                }
                let tick = match (kind, side) {
                    (Kind::Market, 0) => NIL - 1,
                    (Kind::Market, _) => 0,
                    _ => (record.price - self.price_low) as u32,
                };
                if kind == Kind::Fok && !self.can_fill(side, tick, record.quantity) {
                    return;
                }
                let left = self.match_incoming(record.id, side, tick, record.quantity);
                self.push_event(record.id, REMAINDER_CANCELLED, 0, left);
            }
            Op::Cancel => {
                let slot = self.slot_of_id[record.id as usize];
                let open = self.unlink(slot);
                self.push_event(record.id, CANCELLED, 0, open);
            }
            Op::Replace { keeps_place } => {
                self.push_event(record.id, REPLACED, record.price, record.quantity);
                let slot = self.slot_of_id[record.id as usize];
                if !keeps_place {
                    self.unlink(slot);
                    return self.match_then_rest(record, side);
                }
                let order = &mut self.slab[slot as usize];
                let less = order.open - record.quantity;
                order.open = record.quantity;
                self.levels[order.side as usize][order.tick as usize].open -= less;
            }
        }
    }

    #[inline(always)]
    fn push_event(&mut self, a: u64, b: u64, price: i64, quantity: u64) {
        self.events[self.event_count & (EVENTS - 1)] = BookEvent(a, b, price, quantity);
        self.event_count += 1;
    }

    #[inline(always)]
    fn match_then_rest(&mut self, record: &Record, side: usize) {
        let tick = (record.price - self.price_low) as u32;
        let best = self.best[1 - side];
        let crosses = best != NIL
            && if side == 0 {
                best <= tick
            } else {
                best >= tick
            };
        let left = if crosses {
            self.match_incoming(record.id, side, tick, record.quantity)
        } else {
            record.quantity
        };
        if left > 0 {
            self.rest(record, side, tick, left);
        }
    }

    #[inline(always)]
    fn rest(&mut self, record: &Record, side: usize, tick: u32, open: u64) {
        let slot = self.free_head;
        let level = &mut self.levels[side][tick as usize];
        let tail = level.tail;
        level.tail = slot;
        level.open += open;
        if tail == NIL {
            level.head = slot;
            self.bits[side].set(tick);
            let best = self.best[side];
            if best == NIL || (if side == 0 { tick > best } else { tick < best }) {
                self.best[side] = tick;
            }
        } else {
            self.slab[tail as usize].next = slot;
        }
        let order = &mut self.slab[slot as usize];
        self.free_head = order.next;
        *order = Order {
            prev: tail,
            next: NIL,
            open,
            tick,
            id: record.id as u32,
            side: side as u32,
            _account: record.account,
        };
        self.slot_of_id[record.id as usize] = slot;
    }

    #[inline(always)]
    fn unlink(&mut self, slot: u32) -> u64 {
        let order = self.slab[slot as usize];
        let side = order.side as usize & 1;
        let level = &mut self.levels[side][order.tick as usize];
        level.open -= order.open;
        if order.prev == NIL {
            level.head = order.next;
        } else {
            self.slab[order.prev as usize].next = order.next;
        }
        if order.next == NIL {
            level.tail = order.prev;
        } else {
            self.slab[order.next as usize].prev = order.prev;
        }
        if level.head == NIL {
            self.remove_level(side, order.tick);
        }
        self.slab[slot as usize].next = self.free_head;
        self.free_head = slot;
        order.open
    }

    #[inline(always)]
    fn remove_level(&mut self, side: usize, tick: u32) {
        self.bits[side].clear(tick);
        if self.best[side] == tick {
            self.best[side] = self.next_worse(side, tick);
        }
    }

    #[inline(always)]
    fn next_worse(&self, side: usize, tick: u32) -> u32 {
        if side == 0 {
            self.bits[0].below(tick)
        } else {
            self.bits[1].above(tick)
        }
    }

    #[inline(always)]
    fn is_within_limit(side: usize, best: u32, limit: u32) -> bool {
        best != NIL
            && if side == 0 {
                best <= limit
            } else {
                best >= limit
            }
    }

    #[inline(always)]
    fn match_incoming(&mut self, taker: u64, side: usize, limit: u32, mut remaining: u64) -> u64 {
        let other = 1 - side;
        while remaining > 0 && Self::is_within_limit(side, self.best[other], limit) {
            let tick = self.best[other];
            let price = self.price_low + i64::from(tick);
            let Level {
                mut head, mut open, ..
            } = self.levels[other][tick as usize];
            while remaining > 0 && head != NIL {
                let maker = &mut self.slab[head as usize];
                let quantity = remaining.min(maker.open);
                let (id, slot) = (u64::from(maker.id), head);
                remaining -= quantity;
                open -= quantity;
                maker.open -= quantity;
                if maker.open == 0 {
                    head = maker.next;
                    maker.next = self.free_head;
                    self.free_head = slot;
                }
                self.trades += 1;
                self.quantity += quantity;
                self.tape.trade(id, taker, price, quantity);
                self.push_event(id, taker, price, quantity);
            }
            let level = &mut self.levels[other][tick as usize];
            level.head = head;
            level.open = open;
            if head == NIL {
                level.tail = NIL;
                self.remove_level(other, tick);
            } else {
                self.slab[head as usize].prev = NIL;
            }
        }
        remaining
    }

    fn can_fill(&self, side: usize, limit: u32, remaining: u64) -> bool {
        let other = 1 - side;
        let (mut tick, mut sum) = (self.best[other], 0);
        while Self::is_within_limit(side, tick, limit) {
            sum += self.levels[other][tick as usize].open;
            if sum >= remaining {
                return true;
            }
            tick = self.next_worse(other, tick);
        }
        false
    }

    /// Number of events written, and a checksum of those in the buffer. Callers pass it to
    /// `black_box`, so the compiler cannot remove the writes.
    pub fn digest(&self) -> (usize, u64) {
        let words = self
            .events
            .iter()
            .map(|BookEvent(a, b, price, quantity)| a ^ b ^ *price as u64 ^ quantity);
        (self.event_count, words.fold(0, u64::wrapping_add))
    }
}
