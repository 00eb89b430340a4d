//! Price levels of both sides: a window of consecutive ticks, one 16-byte level each, with one occupancy bitmap, and a map for prices outside the
//! window. The best price of each side is cached.
//!
//! Both sides share window and bitmap: a book is never crossed, so a price holds orders of one side only, and what is occupied at or below the
//! best bid are bids. Inside the window nothing allocates; outside it a level costs a map entry (correct, slower). The window covers the price band
//! when the band is not wider than the bound given, otherwise it is centred on the first price that rests.
//!
//! Prices are compared by *key*: the price of an ask, the complement of a bid's. A lower key is a better price on either side, so that neither
//! side needs a branch.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hint::select_unpredictable;
use core::mem::size_of;

use types::{InstrumentSpec, Lots, Side, Ticks};

use crate::bits::Bits;
use crate::slab::{NIL, prefetch};

/// Widest window, in ticks (16 bytes each).
pub const LEVELS_MAX: u32 = 1 << 22;
/// Window width unless configured otherwise: 16 MiB of levels, of which the untouched ones cost address space alone.
pub const LEVELS_DEFAULT: u32 = 1 << 20;

/// Orders of one price in time order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    pub head: u32,
    pub tail: u32,
    /// Sum of the open quantities.
    pub open: Lots,
}

/// A level as it is stored: two words, all zero when empty, so that a new window is memory which the system gives when it is touched.
type Words = [u64; 2];

const _: () = assert!(size_of::<Words>() == 16 && NIL == 0);

impl Level {
    pub const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
        open: Lots::ZERO,
    };

    #[inline(always)]
    fn of(words: Words) -> Self {
        Self {
            head: words[0] as u32,
            tail: (words[0] >> 32) as u32,
            open: Lots(words[1]),
        }
    }

    #[inline(always)]
    fn words(self) -> Words {
        [
            u64::from(self.head) | u64::from(self.tail) << 32,
            self.open.0,
        ]
    }
}

/// Where a price stands among those of its side: lower is better.
#[inline(always)]
pub(crate) fn key(side: Side, price: Ticks) -> i64 {
    // All ones for a bid: the complement.
    price.0 ^ (side.index() as i64 - 1)
}

/// Key of the best price of an empty side: worse than any price.
pub(crate) const NO_KEY: i64 = i64::MAX;

/// Base of a window without a place: every price lies outside.
const UNPLACED: i64 = i64::MIN;

#[derive(Clone, Debug)]
pub(crate) struct Ladder {
    /// Price of the first place; `UNPLACED`, which no price is near, until the first price fixes it.
    base: i64,
    levels: Vec<Words>,
    bits: Bits,
    outside: [BTreeMap<Ticks, Level>; 2],
    /// Key of the best price, by side.
    best: [i64; 2],
}

impl Ladder {
    pub fn new(spec: &InstrumentSpec, levels_max: u32) -> Self {
        let bound = i64::from(levels_max.clamp(64, LEVELS_MAX));
        let span = (spec.band_high.0 - spec.band_low.0).saturating_add(1);
        let count = span.min(bound) as usize;
        let base = if span <= bound {
            spec.band_low.0
        } else {
            UNPLACED
        };
        Self {
            base,
            levels: alloc::vec![Level::EMPTY.words(); count],
            bits: Bits::new(count),
            outside: [BTreeMap::new(), BTreeMap::new()],
            best: [NO_KEY; 2],
        }
    }

    #[inline(always)]
    fn place(&self, price: Ticks) -> Option<usize> {
        let place = price.0.wrapping_sub(self.base) as u64;
        (place < self.levels.len() as u64).then_some(place as usize)
    }

    #[inline(always)]
    fn price(&self, place: usize) -> Ticks {
        Ticks(self.base + place as i64)
    }

    /// The level of a price; empty when nothing rests there.
    #[inline(always)]
    pub fn level(&self, side: Side, price: Ticks) -> Level {
        match self.place(price) {
            Some(place) => Level::of(self.levels[place]),
            None => self.level_outside(side, price),
        }
    }

    #[cold]
    #[inline(never)]
    fn level_outside(&self, side: Side, price: Ticks) -> Level {
        let level = self.outside[side.index()].get(&price);
        level.copied().unwrap_or(Level::EMPTY)
    }

    /// Puts a level back that held orders; one without orders is gone.
    #[inline(always)]
    pub fn set_level(&mut self, side: Side, price: Ticks, level: Level) {
        match self.place(price) {
            Some(place) => self.set_level_at(place, side, price, level),
            None => self.set_level_outside(side, price, level),
        }
    }

    #[inline(always)]
    fn set_level_at(&mut self, place: usize, side: Side, price: Ticks, level: Level) {
        self.levels[place] = level.words();
        if level.head == NIL {
            assert!(level.open.is_zero(), "level sum equals its orders");
            self.bits.clear(place);
            self.refresh(side, price);
        }
    }

    #[cold]
    #[inline(never)]
    fn set_level_outside(&mut self, side: Side, price: Ticks, level: Level) {
        if level.head != NIL {
            self.outside[side.index()].insert(price, level);
            return;
        }
        assert!(level.open.is_zero(), "level sum equals its orders");
        self.outside[side.index()].remove(&price);
        self.refresh(side, price);
    }

    /// The best price, when it was the one that is gone.
    #[inline(always)]
    fn refresh(&mut self, side: Side, gone: Ticks) {
        if self.best[side.index()] == key(side, gone) {
            let next = self.next(side, gone);
            self.best[side.index()] = next.map_or(NO_KEY, |price| key(side, price));
        }
    }

    /// Takes an order in at the tail of its price and gives the link before it.
    #[inline(always)]
    pub fn push(&mut self, side: Side, price: Ticks, link: u32, open: Lots) -> u32 {
        let best = &mut self.best[side.index()];
        *best = (*best).min(key(side, price));
        let Some(place) = self.place(price) else {
            return self.push_outside(side, price, link, open);
        };
        self.push_at(place, link, open)
    }

    #[inline(always)]
    fn push_at(&mut self, place: usize, link: u32, open: Lots) -> u32 {
        let words = &mut self.levels[place];
        let mut level = Level::of(*words);
        let tail = level.push(link, open);
        *words = level.words();
        self.bits.set(place);
        tail
    }

    #[cold]
    #[inline(never)]
    fn push_outside(&mut self, side: Side, price: Ticks, link: u32, open: Lots) -> u32 {
        if self.base == UNPLACED {
            // Centre the window on the first price; it never moves afterwards.
            self.base = price.0.saturating_sub(self.levels.len() as i64 / 2);
            if let Some(place) = self.place(price) {
                return self.push_at(place, link, open);
            }
        }
        let level = self.outside[side.index()].entry(price);
        level.or_insert(Level::EMPTY).push(link, open)
    }

    /// Takes an order out that stands between these two.
    #[inline(always)]
    pub fn unlink(&mut self, side: Side, price: Ticks, prev: u32, next: u32, open: Lots) {
        match self.place(price) {
            Some(place) => {
                let level = Level::of(self.levels[place]).without(prev, next, open);
                self.set_level_at(place, side, price, level);
            }
            None => self.unlink_outside(side, price, prev, next, open),
        }
    }

    #[cold]
    #[inline(never)]
    fn unlink_outside(&mut self, side: Side, price: Ticks, prev: u32, next: u32, open: Lots) {
        let level = self.level_outside(side, price);
        self.set_level_outside(side, price, level.without(prev, next, open));
    }

    /// Changes the sum of a price when one of its orders shrinks in place.
    #[inline(always)]
    pub fn shrink(&mut self, side: Side, price: Ticks, less: Lots) {
        let mut level = self.level(side, price);
        level.open -= less;
        self.set_level(side, price, level);
    }

    /// Place of a price, or the window's end when it lies outside.
    #[inline(always)]
    pub fn nearest_place(&self, price: Ticks) -> u32 {
        let place = price.0.wrapping_sub(self.base) as u64;
        place.min(self.levels.len() as u64 - 1) as u32
    }

    /// Asks for the level of a place.
    #[inline(always)]
    pub fn prefetch(&self, place: u32) {
        prefetch(&self.levels[place as usize]);
    }

    /// Last link of the level of a place.
    #[inline(always)]
    pub fn tail(&self, place: u32) -> u32 {
        Level::of(self.levels[place as usize]).tail
    }

    /// The next occupied price behind `price`, away from the other side.
    #[inline]
    pub fn next(&self, side: Side, price: Ticks) -> Option<Ticks> {
        let inside = self.next_inside(side, price);
        let outside = &self.outside[side.index()];
        if outside.is_empty() {
            return inside;
        }
        match side {
            Side::Buy => {
                let other = outside.range(..price).next_back().map(|(p, _)| *p);
                inside.max(other)
            }
            Side::Sell => {
                let above = (
                    core::ops::Bound::Excluded(price),
                    core::ops::Bound::Unbounded,
                );
                let other = outside.range(above).next().map(|(p, _)| *p);
                match (inside, other) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                }
            }
        }
    }

    #[inline]
    fn next_inside(&self, side: Side, price: Ticks) -> Option<Ticks> {
        let count = self.levels.len() as i64;
        let place = price.0.saturating_sub(self.base);
        let found = match side {
            Side::Buy if place <= 0 => None,
            Side::Buy => self.bits.down((place - 1).min(count - 1) as usize),
            Side::Sell if place >= count - 1 => None,
            Side::Sell => self.bits.up((place + 1).max(0) as usize),
        };
        found.map(|place| self.price(place))
    }

    /// Keys of the best prices, by side; `NO_KEY` for an empty one.
    #[inline(always)]
    pub fn best_keys(&self) -> [i64; 2] {
        self.best
    }

    /// Best price of a side.
    #[inline(always)]
    pub fn best(&self, side: Side) -> Option<Ticks> {
        let best = self.best[side.index()];
        (best != NO_KEY).then(|| Ticks(key(side, Ticks(best))))
    }

    /// True when an order of this side and limit would meet the other side.
    #[inline(always)]
    pub fn crosses(&self, side: Side, limit: Ticks) -> bool {
        let other = side.opposite();
        let best = self.best[other.index()];
        (best <= key(other, limit)) & (best != NO_KEY)
    }

    /// True while every bid is below every ask.
    #[inline(always)]
    pub fn is_sound(&self) -> bool {
        key(Side::Buy, Ticks(self.best[0])) < self.best[1]
    }

    /// Prices of a side from the best one on.
    pub fn prices(&self, side: Side) -> impl Iterator<Item = Ticks> + '_ {
        core::iter::successors(self.best(side), move |price| self.next(side, *price))
    }

    /// True when the occupancy of a price says that it holds orders.
    pub fn is_occupied(&self, side: Side, price: Ticks) -> bool {
        match self.place(price) {
            Some(place) => self.bits.is_set(place),
            None => self.outside[side.index()].contains_key(&price),
        }
    }
}

impl Level {
    /// Appends an order; gives the link that was last.
    #[inline(always)]
    fn push(&mut self, link: u32, open: Lots) -> u32 {
        let tail = self.tail;
        self.head = select_unpredictable(tail == NIL, link, self.head);
        self.tail = link;
        self.open += open;
        tail
    }

    /// The level after one of its orders, which stood between these two, has left.
    #[inline(always)]
    fn without(self, prev: u32, next: u32, open: Lots) -> Self {
        Self {
            head: select_unpredictable(prev == NIL, next, self.head),
            tail: select_unpredictable(next == NIL, prev, self.tail),
            open: self.open - open,
        }
    }
}
