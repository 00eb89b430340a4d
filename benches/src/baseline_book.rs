//! Baseline of the book: price-time priority only. No accounts, no self-trade prevention, no
//! phases, no bands, no assertions; a 32-byte event per outcome. The difference to the product's
//! book is the cost of its rules.
//!
//! Levels are in an array by tick with a bitmap of the occupied ones per side, orders in a slab
//! with 32-bit links, ids in a dense table.

use crate::xflow::{Header, Kind, Op, Record, TapeHash};

const NIL: u32 = u32::MAX;
/// Events kept; older ones are overwritten.
const EVENTS: usize = 1 << 12;

#[derive(Clone, Copy)]
struct Order {
    prev: u32,
    next: u32,
    open: u64,
    place: u32,
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

/// An outcome: maker or order, taker or kind of outcome, price, quantity.
#[derive(Clone, Copy, Default)]
struct Outcome(u64, u64, i64, u64);

const ACCEPTED: u64 = 0;
const DROPPED: u64 = u64::MAX;
const CANCELLED: u64 = u64::MAX - 1;
const REPLACED: u64 = u64::MAX - 2;

/// Occupied price levels, one bit each, with a second level of one bit per word.
struct Bits {
    low: Vec<u64>,
    high: Vec<u64>,
}

impl Bits {
    fn new(places: usize) -> Self {
        let low = places / 64 + 1;
        Self {
            low: vec![0; low],
            high: vec![0; low / 64 + 1],
        }
    }

    #[inline(always)]
    fn set(&mut self, place: u32) {
        let word = place as usize >> 6;
        self.low[word] |= 1 << (place & 63);
        self.high[word >> 6] |= 1 << (word & 63);
    }

    #[inline(always)]
    fn clear(&mut self, place: u32) {
        let word = place as usize >> 6;
        self.low[word] &= !(1 << (place & 63));
        if self.low[word] == 0 {
            self.high[word >> 6] &= !(1 << (word & 63));
        }
    }

    fn above(&self, place: u32) -> u32 {
        let from = place as usize + 1;
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

    fn below(&self, place: u32) -> u32 {
        let mut word = place as usize >> 6;
        let rest = self.low[word] & ((1 << (place & 63)) - 1);
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

/// The bare book.
pub struct BaselineBook {
    levels: [Vec<Level>; 2],
    bits: [Bits; 2],
    best: [u32; 2],
    slab: Vec<Order>,
    free: u32,
    index: Vec<u32>,
    base: i64,
    events: Box<[Outcome; EVENTS]>,
    event_count: usize,
    pub trades: u64,
    pub quantity: u64,
    pub tape: TapeHash,
}

impl BaselineBook {
    /// A book with capacity for everything in the header.
    pub fn new(header: &Header) -> Self {
        let places = (header.price_high - header.price_low + 1) as usize;
        let orders = header.resting_max as u32 + 1;
        let empty = Order {
            prev: NIL,
            next: NIL,
            open: 0,
            place: 0,
            id: 0,
            side: 0,
            _account: 0,
        };
        Self {
            levels: [vec![EMPTY; places], vec![EMPTY; places]],
            bits: [Bits::new(places), Bits::new(places)],
            best: [NIL; 2],
            slab: (0..orders)
                .map(|at| Order {
                    next: at + 1,
                    ..empty
                })
                .collect(),
            free: 0,
            index: vec![NIL; header.id_max as usize + 1],
            base: header.price_low,
            events: vec![Outcome::default(); EVENTS]
                .into_boxed_slice()
                .try_into()
                .unwrap_or_else(|_| unreachable!("the length is the constant")),
            event_count: 0,
            trades: 0,
            quantity: 0,
            tape: TapeHash::default(),
        }
    }

    /// Executes one record.
    #[inline(always)]
    pub fn apply(&mut self, record: &Record) {
        let side = usize::from(record.side & 1);
        match record.op {
            Op::New(kind) => {
                self.outcome(record.id, ACCEPTED, record.price, record.quantity);
                if kind == Kind::Gtc {
                    return self.enter(record, side);
                }
                let place = match (kind, side) {
                    (Kind::Market, 0) => NIL - 1,
                    (Kind::Market, _) => 0,
                    _ => (record.price - self.base) as u32,
                };
                if kind == Kind::Fok && !self.can_fill(side, place, record.quantity) {
                    return;
                }
                let left = self.take(record.id, side, place, record.quantity);
                self.outcome(record.id, DROPPED, 0, left);
            }
            Op::Cancel => {
                let slot = self.index[record.id as usize];
                let open = self.unlink(slot);
                self.outcome(record.id, CANCELLED, 0, open);
            }
            Op::Replace { keeps_place } => {
                self.outcome(record.id, REPLACED, record.price, record.quantity);
                let slot = self.index[record.id as usize];
                if !keeps_place {
                    self.unlink(slot);
                    return self.enter(record, side);
                }
                let order = &mut self.slab[slot as usize];
                let less = order.open - record.quantity;
                order.open = record.quantity;
                self.levels[order.side as usize][order.place as usize].open -= less;
            }
        }
    }

    #[inline(always)]
    fn outcome(&mut self, a: u64, b: u64, price: i64, quantity: u64) {
        self.events[self.event_count & (EVENTS - 1)] = Outcome(a, b, price, quantity);
        self.event_count += 1;
    }

    #[inline(always)]
    fn enter(&mut self, record: &Record, side: usize) {
        let place = (record.price - self.base) as u32;
        let best = self.best[1 - side];
        let crosses = best != NIL
            && if side == 0 {
                best <= place
            } else {
                best >= place
            };
        let left = if crosses {
            self.take(record.id, side, place, record.quantity)
        } else {
            record.quantity
        };
        if left > 0 {
            self.rest(record, side, place, left);
        }
    }

    #[inline(always)]
    fn rest(&mut self, record: &Record, side: usize, place: u32, open: u64) {
        let slot = self.free;
        let level = &mut self.levels[side][place as usize];
        let tail = level.tail;
        level.tail = slot;
        level.open += open;
        if tail == NIL {
            level.head = slot;
            self.bits[side].set(place);
            let best = self.best[side];
            if best == NIL
                || (if side == 0 {
                    place > best
                } else {
                    place < best
                })
            {
                self.best[side] = place;
            }
        } else {
            self.slab[tail as usize].next = slot;
        }
        let order = &mut self.slab[slot as usize];
        self.free = order.next;
        *order = Order {
            prev: tail,
            next: NIL,
            open,
            place,
            id: record.id as u32,
            side: side as u32,
            _account: record.account,
        };
        self.index[record.id as usize] = slot;
    }

    #[inline(always)]
    fn unlink(&mut self, slot: u32) -> u64 {
        let order = self.slab[slot as usize];
        let side = order.side as usize & 1;
        let level = &mut self.levels[side][order.place as usize];
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
            self.level_gone(side, order.place);
        }
        self.slab[slot as usize].next = self.free;
        self.free = slot;
        order.open
    }

    #[inline(always)]
    fn level_gone(&mut self, side: usize, place: u32) {
        self.bits[side].clear(place);
        if self.best[side] == place {
            self.best[side] = self.next_worse(side, place);
        }
    }

    #[inline(always)]
    fn next_worse(&self, side: usize, place: u32) -> u32 {
        if side == 0 {
            self.bits[0].below(place)
        } else {
            self.bits[1].above(place)
        }
    }

    #[inline(always)]
    fn inside(side: usize, best: u32, limit: u32) -> bool {
        best != NIL
            && if side == 0 {
                best <= limit
            } else {
                best >= limit
            }
    }

    #[inline(always)]
    fn take(&mut self, taker: u64, side: usize, limit: u32, mut want: u64) -> u64 {
        let other = 1 - side;
        while want > 0 && Self::inside(side, self.best[other], limit) {
            let place = self.best[other];
            let price = self.base + i64::from(place);
            let Level {
                mut head, mut open, ..
            } = self.levels[other][place as usize];
            while want > 0 && head != NIL {
                let maker = &mut self.slab[head as usize];
                let quantity = want.min(maker.open);
                let (id, slot) = (u64::from(maker.id), head);
                want -= quantity;
                open -= quantity;
                maker.open -= quantity;
                if maker.open == 0 {
                    head = maker.next;
                    maker.next = self.free;
                    self.free = slot;
                }
                self.trades += 1;
                self.quantity += quantity;
                self.tape.trade(id, taker, price, quantity);
                self.outcome(id, taker, price, quantity);
            }
            let level = &mut self.levels[other][place as usize];
            level.head = head;
            level.open = open;
            if head == NIL {
                level.tail = NIL;
                self.level_gone(other, place);
            } else {
                self.slab[head as usize].prev = NIL;
            }
        }
        want
    }

    fn can_fill(&self, side: usize, limit: u32, want: u64) -> bool {
        let other = 1 - side;
        let (mut place, mut sum) = (self.best[other], 0);
        while Self::inside(side, place, limit) {
            sum += self.levels[other][place as usize].open;
            if sum >= want {
                return true;
            }
            place = self.next_worse(other, place);
        }
        false
    }

    /// Events written, and a digest of those kept. Reading it prevents the compiler from removing
    /// them.
    pub fn digest(&self) -> (usize, u64) {
        let words = self
            .events
            .iter()
            .map(|Outcome(a, b, price, quantity)| a ^ b ^ *price as u64 ^ quantity);
        (self.event_count, words.fold(0, u64::wrapping_add))
    }
}
