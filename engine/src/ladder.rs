//! Price levels of both sides: a window of consecutive ticks, one 16-byte level each, with an occupancy bitmap a side, and a map for prices
//! outside the window. The best price of each side is cached.
//!
//! Both sides share the window: a book is never crossed, so a price holds orders of one side only. Inside the window nothing allocates; outside
//! it a level costs a map entry (correct, slower). The window covers the price band when the band is not wider than the bound given, otherwise it
//! is centred on the first price that rests.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use types::{InstrumentSpec, Lots, Side, Ticks};

use crate::bits::Bits;
use crate::slab::NIL;

/// Widest window, in ticks (16 bytes each).
pub const LEVELS_MAX: u32 = 1 << 22;
/// Window width unless configured otherwise: 1 MiB of levels.
pub const LEVELS_DEFAULT: u32 = 1 << 16;

/// Orders of one price in time order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    pub head: u32,
    pub tail: u32,
    /// Sum of the open quantities.
    pub open: Lots,
}

const _: () = assert!(size_of::<Level>() == 16);

impl Level {
    pub const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
        open: Lots::ZERO,
    };
}

/// Best price of an empty side: crossed by nothing.
pub(crate) const NO_PRICE: [Ticks; 2] = [Ticks(i64::MIN), Ticks(i64::MAX)];

#[derive(Clone, Debug)]
pub(crate) struct Ladder {
    base: i64,
    /// False until the first price fixes `base`.
    placed: bool,
    levels: Vec<Level>,
    bits: [Bits; 2],
    outside: [BTreeMap<Ticks, Level>; 2],
    pub best: [Ticks; 2],
}

impl Ladder {
    pub fn new(spec: &InstrumentSpec, levels_max: u32) -> Self {
        let bound = i64::from(levels_max.clamp(64, LEVELS_MAX));
        let span = (spec.band_high.0 - spec.band_low.0).saturating_add(1);
        let placed = span <= bound;
        let count = span.min(bound) as usize;
        Self {
            base: spec.band_low.0,
            placed,
            levels: alloc::vec![Level::EMPTY; count],
            bits: [Bits::new(count), Bits::new(count)],
            outside: [BTreeMap::new(), BTreeMap::new()],
            best: NO_PRICE,
        }
    }

    #[inline]
    fn place(&self, price: Ticks) -> Option<usize> {
        let place = price.0.wrapping_sub(self.base) as u64;
        (place < self.levels.len() as u64).then_some(place as usize)
    }

    #[inline]
    fn price(&self, place: usize) -> Ticks {
        Ticks(self.base + place as i64)
    }

    /// The level of a price; empty when nothing rests there.
    #[inline]
    pub fn level(&self, side: Side, price: Ticks) -> Level {
        match self.place(price) {
            Some(place) => self.levels[place],
            None => self.outside[side.index()]
                .get(&price)
                .copied()
                .unwrap_or(Level::EMPTY),
        }
    }

    /// The level of a price that holds orders.
    #[inline]
    pub fn level_mut(&mut self, side: Side, price: Ticks) -> &mut Level {
        match self.place(price) {
            Some(place) => &mut self.levels[place],
            None => self.outside[side.index()]
                .get_mut(&price)
                .expect("a resting order's level exists"),
        }
    }

    /// The level of a price about to take an order; marks it occupied and keeps the best price.
    #[inline]
    pub fn level_for_rest(&mut self, side: Side, price: Ticks) -> &mut Level {
        if !self.placed {
            // Centre the window on the first price; orders never move afterwards.
            self.base = price.0.saturating_sub(self.levels.len() as i64 / 2);
            self.placed = true;
        }
        let better = match side {
            Side::Buy => price > self.best[0],
            Side::Sell => price < self.best[1],
        };
        if better {
            self.best[side.index()] = price;
        }
        match self.place(price) {
            Some(place) => {
                let level = &mut self.levels[place];
                if level.head == NIL {
                    self.bits[side.index()].set(place);
                }
                level
            }
            None => self.outside[side.index()]
                .entry(price)
                .or_insert(Level::EMPTY),
        }
    }

    /// The last order of a price is gone.
    #[inline]
    pub fn remove(&mut self, side: Side, price: Ticks) {
        match self.place(price) {
            Some(place) => {
                self.levels[place] = Level::EMPTY;
                self.bits[side.index()].clear(place);
            }
            None => {
                self.outside[side.index()].remove(&price);
            }
        }
        if self.best[side.index()] == price {
            self.best[side.index()] = self.next(side, price).unwrap_or(NO_PRICE[side.index()]);
        }
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
        let bits = &self.bits[side.index()];
        let found = match side {
            Side::Buy if place <= 0 => None,
            Side::Buy => bits.down((place - 1).min(count - 1) as usize),
            Side::Sell if place >= count - 1 => None,
            Side::Sell => bits.up((place + 1).max(0) as usize),
        };
        found.map(|place| self.price(place))
    }

    /// Best price of a side.
    #[inline]
    pub fn best(&self, side: Side) -> Option<Ticks> {
        let best = self.best[side.index()];
        (best != NO_PRICE[side.index()]).then_some(best)
    }

    /// Prices of a side from the best one on.
    pub fn prices(&self, side: Side) -> impl Iterator<Item = Ticks> + '_ {
        core::iter::successors(self.best(side), move |price| self.next(side, *price))
    }

    /// True when the occupancy of a price says that it holds orders of this side.
    pub fn is_occupied(&self, side: Side, price: Ticks) -> bool {
        match self.place(price) {
            Some(place) => self.bits[side.index()].is_set(place),
            None => self.outside[side.index()].contains_key(&price),
        }
    }
}
