//! Price levels of both sides: a window of consecutive ticks and a map for prices outside it.
//!
//! The window has one 16-byte level per tick and one occupancy bitmap. It begins with
//! [`LEVELS_FIRST`] ticks and grows, up to the book's configured width, when orders rest outside
//! it. The best price of each side is cached.
//!
//! Both sides share window and bitmap: a book is never crossed, so a price has orders of one side
//! only, and occupied prices at or below the best bid are bids. Levels inside the window need no
//! allocation. A level outside is a map entry: correct, slower.
//!
//! The window covers the price band with slack on both sides if the band is not wider than it.
//! Otherwise it is centred on the first resting price, inside the band. It moves when it is empty
//! and the band changes, and when neither best price is inside: then only stray orders are in the
//! window. A move costs the levels that it carries. Orders that rest outside must pay for it first,
//! a few levels each up to a limit, so no client can make a book move its levels back and forth.
//! Growth costs less, because levels inside are copied. A window that has used much more memory
//! than its orders need is replaced by another one of the same prices. The window's position is not
//! part of the state: it changes speed, never results.
//!
//! Prices are compared by *key*: an ask's price, the complement of a bid's. A lower key is a better
//! price on either side, so neither side needs a branch.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::hint::select_unpredictable;
use core::iter::successors;
use core::mem::{self, size_of};
use core::ops::Range;

use types::{InstrumentSpec, Lots, Side, Ticks};

use crate::slab::{NIL, prefetch};
use crate::window::{LEVELS_FIRST, Window, WindowSource, next_step};

/// Widest window, in ticks (16 bytes each).
pub const LEVELS_MAX: u32 = 1 << 22;
/// Default maximum width: 16 MiB of levels, of which untouched ones cost only address space.
pub const LEVELS_DEFAULT: u32 = 1 << 20;

/// Orders of one price in time order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    pub head: u32,
    pub tail: u32,
    /// Sum of the open quantities.
    pub open: Lots,
}

/// A stored level: two words, zero when empty; the system provides memory on first touch.
pub(crate) type Words = [u64; 2];

const _: () = assert!(size_of::<Words>() == 16 && NIL == 0);

impl Level {
    pub const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
        open: Lots::ZERO,
    };

    #[inline(always)]
    pub fn of(words: Words) -> Self {
        Self {
            head: words[0] as u32,
            tail: (words[0] >> 32) as u32,
            open: Lots(words[1]),
        }
    }

    #[inline(always)]
    pub fn words(self) -> Words {
        [
            u64::from(self.head) | u64::from(self.tail) << 32,
            self.open.0,
        ]
    }
}

/// Sort key of a price among those of its side: lower is better.
#[inline(always)]
pub(crate) fn key(side: Side, price: Ticks) -> i64 {
    // All ones for a bid: the complement.
    price.0 ^ (side.index() as i64 - 1)
}

/// Key of the best price of an empty side: worse than any price.
pub(crate) const NO_KEY: i64 = i64::MAX;

/// Base of an unplaced window: every price is outside.
const UNPLACED: i64 = i64::MIN;

#[derive(Clone, Debug)]
pub(crate) struct Ladder {
    /// Price of the first place; `UNPLACED` until a price or a narrow band fixes it.
    base: i64,
    window: Window,
    /// Levels that the window may grow to.
    levels_max: usize,
    /// Source of wider windows; without one the book maps them itself.
    source: Option<Arc<dyn WindowSource>>,
    outside: [BTreeMap<Ticks, Level>; 2],
    /// Key of the best price, by side.
    best: [i64; 2],
    /// `best` as last published.
    published: [i64; 2],
    /// Lowest and highest price of a new order.
    band: (i64, i64),
    /// Orders rested outside the window since its last move or the last evaluation of one.
    credits: u32,
    /// Credits that the next evaluation of a move requires.
    look_at: u32,
}

/// Levels carried through the map that one order outside the window pays for.
const LEVELS_PER_CREDIT: usize = 8;
/// Levels that cost as much to copy, when the window grows, as one to carry through the map.
const COPIES_PER_LEVEL: usize = 16;
/// Maximum of credits: bounds the cost of one move.
const CREDITS_MAX: u32 = 1_024;

impl Ladder {
    pub fn new(spec: &InstrumentSpec, levels_max: u32) -> Self {
        let levels_max = levels_max.clamp(64, LEVELS_MAX) as usize;
        let count = LEVELS_FIRST.min(levels_max);
        let mut ladder = Self {
            base: UNPLACED,
            window: Window::new(count as u32),
            levels_max,
            source: None,
            outside: [BTreeMap::new(), BTreeMap::new()],
            best: [NO_KEY; 2],
            published: [NO_KEY; 2],
            band: (0, 0),
            credits: 0,
            look_at: 1,
        };
        ladder.set_band(spec);
        ladder
    }

    pub fn set_source(&mut self, source: Arc<dyn WindowSource>) {
        self.source = Some(source);
    }

    /// Releases pages that no order needs.
    pub fn release_unused(&mut self) {
        if self.window.is_oversized() {
            self.release_pages();
        }
    }

    /// Sets the instrument's band. A window with orders in it does not move.
    pub fn set_band(&mut self, spec: &InstrumentSpec) {
        self.band = (spec.band_low.0, spec.band_high.0.min(Ticks::ORDER_MAX.0));
        if !self.window.bits.is_empty() {
            return;
        }
        // A wide band waits for the first price.
        let leader = [Side::Buy, Side::Sell]
            .into_iter()
            .find_map(|side| self.best(side));
        match leader {
            _ if self.is_band_within(self.window.levels.len()) => self.move_to(spec.band_low),
            Some(price) => self.move_to(price),
            None => self.base = UNPLACED,
        }
    }

    /// True when the band fits a window of `count` ticks.
    fn is_band_within(&self, count: usize) -> bool {
        let (low, high) = self.band;
        high.saturating_sub(low) < count as i64
    }

    /// Prices of a window of `count` ticks when trading happens around `price`.
    fn range_for(&self, price: Ticks, count: usize) -> Range<Ticks> {
        let is_band_within = self.is_band_within(count);
        let count = count as i64;
        let (low, high) = self.band;
        let base = if is_band_within {
            low.saturating_sub((count - (high.saturating_sub(low) + 1)) / 2)
        } else {
            price
                .0
                .saturating_sub(count / 2)
                .clamp(low, high - count + 1)
        };
        let base = base.clamp(1, Ticks::ORDER_MAX.0 - count + 1);
        Ticks(base)..Ticks(base + count)
    }

    /// Moves the window to `price`, and its levels into the map or back into the window.
    #[cold]
    #[inline(never)]
    fn move_to(&mut self, price: Ticks) {
        let mut from = self.window.bits.up(0);
        while let Some(place) = from {
            let price = self.price(place);
            let side = self.side_of(price);
            self.outside[side.index()].insert(price, Level::of(self.window.levels[place]));
            self.window.levels[place] = Level::EMPTY.words();
            self.window.unmark(place);
            from = self.window.bits.up(place);
        }
        self.place_at(self.range_for(price, self.window.levels.len()));
    }

    /// Replaces the window by a wider one. Its levels are copied, not carried through the map.
    #[cold]
    #[inline(never)]
    fn grow_to(&mut self, range: Range<Ticks>, wider: Window) {
        let old = mem::replace(&mut self.window, wider);
        let base = mem::replace(&mut self.base, range.start.0);
        for from in old.places() {
            let price = Ticks(base + from as i64);
            if let Some(place) = self.place(price) {
                self.window.put(place, old.levels[from]);
            } else {
                let side = self.side_of(price);
                self.outside[side.index()].insert(price, Level::of(old.levels[from]));
            }
        }
        self.place_at(range);
        if let Some(source) = &self.source {
            source.free(old);
        }
    }

    /// Places the window at `range`, which has the window's width, and takes its levels from the
    /// map.
    fn place_at(&mut self, range: Range<Ticks>) {
        self.base = range.start.0;
        for outside in &mut self.outside {
            while let Some((price, level)) = outside.range(range.clone()).next() {
                let (price, level) = (*price, *level);
                let place = (price.0 - self.base) as usize;
                self.window.put(place, level.words());
                outside.remove(&price);
            }
        }
        (self.credits, self.look_at) = (0, 1);
    }

    /// Cost of a window of these prices, in levels carried through the map, counted up to `bound`.
    fn cost_of(&self, range: &Range<Ticks>, bound: usize) -> usize {
        let near = self.outside.iter().flat_map(|map| map.range(range.clone()));
        let near = near.take(bound).count();
        if near == bound {
            return near;
        }
        let last = self
            .base
            .saturating_add(self.window.levels.len() as i64 - 1);
        let is_copy = range.contains(&Ticks(self.base)) && range.contains(&Ticks(last));
        let copies = match is_copy && range.end.0 - range.start.0 > self.window.levels.len() as i64
        {
            true => COPIES_PER_LEVEL,
            false => 1,
        };
        near + self.window.places().take(bound * copies).count() / copies
    }

    /// Counts an order that rests outside the window. Once the credits suffice, grows the window if
    /// allowed, or moves it if the market is outside too.
    fn follow_market(&mut self, side: Side) {
        self.credits = (self.credits + 1).min(CREDITS_MAX);
        let is_inside = |price: Option<Ticks>| price.is_some_and(|p| self.place(p).is_some());
        let Some(leader) = self.best(side) else {
            return;
        };
        let count = next_step(self.window.levels.len(), self.levels_max);
        let has_market = is_inside(Some(leader)) || is_inside(self.best(side.opposite()));
        if self.credits < self.look_at || (has_market && count == self.window.levels.len()) {
            return;
        }
        let range = self.range_for(leader, count);
        let bound = self.credits as usize * LEVELS_PER_CREDIT;
        let is_wider = count != self.window.levels.len();
        let is_another = is_wider || range.start.0 != self.base;
        if !is_another || self.cost_of(&range, bound) >= bound {
            (self.credits, self.look_at) = (0, (self.look_at * 2).min(CREDITS_MAX));
        } else if is_wider {
            // While no window is ready, orders rest outside, and the next one asks again.
            let wider = match &self.source {
                Some(source) => source.take(count as u32),
                None => Some(Window::new(count as u32)),
            };
            if let Some(wider) = wider {
                self.grow_to(range, wider);
            }
        } else {
            self.move_to(leader);
        }
    }

    /// The side of an occupied price.
    fn side_of(&self, price: Ticks) -> Side {
        if key(Side::Buy, price) >= self.best[Side::Buy.index()] {
            Side::Buy
        } else {
            Side::Sell
        }
    }

    #[inline(always)]
    fn place(&self, price: Ticks) -> Option<usize> {
        let place = price.0.wrapping_sub(self.base) as u64;
        (place < self.window.levels.len() as u64).then_some(place as usize)
    }

    #[inline(always)]
    fn price(&self, place: usize) -> Ticks {
        Ticks(self.base + place as i64)
    }

    /// The level of a price; empty when nothing rests there.
    #[inline(always)]
    pub fn level(&self, side: Side, price: Ticks) -> Level {
        match self.place(price) {
            Some(place) => Level::of(self.window.levels[place]),
            None => self.level_outside(side, price),
        }
    }

    #[cold]
    #[inline(never)]
    fn level_outside(&self, side: Side, price: Ticks) -> Level {
        let level = self.outside[side.index()].get(&price);
        level.copied().unwrap_or(Level::EMPTY)
    }

    /// Stores a level that had orders; removes it when none are left.
    #[inline(always)]
    pub fn set_level(&mut self, side: Side, price: Ticks, level: Level) {
        match self.place(price) {
            Some(place) => self.set_level_at(place, side, price, level),
            None => self.set_level_outside(side, price, level),
        }
    }

    #[inline(always)]
    fn set_level_at(&mut self, place: usize, side: Side, price: Ticks, level: Level) {
        self.window.levels[place] = level.words();
        if level.head == NIL {
            assert!(level.open.is_zero(), "level sum differs from its orders");
            let is_oversized = self.window.unmark(place);
            self.refresh(side, price);
            if is_oversized {
                self.release_pages();
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn set_level_outside(&mut self, side: Side, price: Ticks, level: Level) {
        if level.head != NIL {
            self.outside[side.index()].insert(price, level);
            return;
        }
        assert!(level.open.is_zero(), "level sum differs from its orders");
        self.outside[side.index()].remove(&price);
        self.refresh(side, price);
    }

    /// Recomputes the best price if it was `gone`.
    #[inline(always)]
    fn refresh(&mut self, side: Side, gone: Ticks) {
        if self.best[side.index()] == key(side, gone) {
            let next = self.next(side, gone);
            self.best[side.index()] = next.map_or(NO_KEY, |price| key(side, price));
        }
    }

    /// Appends an order at the tail of its price; returns the link before it.
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
        let words = &mut self.window.levels[place];
        let mut level = Level::of(*words);
        let tail = level.push(link, open);
        *words = level.words();
        if self.window.mark(place) {
            self.release_pages();
        }
        tail
    }

    /// Replaces the window by one of the same prices, so that pages whose orders are gone are no
    /// longer resident. Without it a member could make every page of every book resident for good.
    /// While orders keep changing pages it happens rarely, since they need the pages again.
    #[cold]
    #[inline(never)]
    fn release_pages(&mut self) {
        let ticks = self.window.ticks();
        let empty = match &self.source {
            _ if !self.window.is_copied_fast() => None,
            Some(source) => source.take(ticks),
            None => Some(Window::new(ticks)),
        };
        let Some(empty) = empty else {
            return self.window.postpone();
        };
        let old = self.window.replace_with(empty);
        if let Some(source) = &self.source {
            source.free(old);
        }
    }

    #[cold]
    #[inline(never)]
    fn push_outside(&mut self, side: Side, price: Ticks, link: u32, open: Lots) -> u32 {
        if self.base == UNPLACED {
            self.move_to(price);
            if let Some(place) = self.place(price) {
                return self.push_at(place, link, open);
            }
        }
        let level = self.outside[side.index()].entry(price);
        let tail = level.or_insert(Level::EMPTY).push(link, open);
        self.follow_market(side);
        tail
    }

    /// Removes the order between these two links.
    #[inline(always)]
    pub fn unlink(&mut self, side: Side, price: Ticks, prev: u32, next: u32, open: Lots) {
        match self.place(price) {
            Some(place) => {
                let level = Level::of(self.window.levels[place]).without(prev, next, open);
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

    /// Reduces the sum of a price when one of its orders shrinks in place.
    #[inline(always)]
    pub fn shrink(&mut self, side: Side, price: Ticks, less: Lots) {
        let mut level = self.level(side, price);
        level.open -= less;
        self.set_level(side, price, level);
    }

    /// Place of a price, or the window's end when it is outside.
    #[inline(always)]
    pub fn nearest_place(&self, price: Ticks) -> u32 {
        let place = price.0.wrapping_sub(self.base) as u64;
        place.min(self.window.levels.len() as u64 - 1) as u32
    }

    /// Prefetches the level of a place.
    #[inline(always)]
    pub fn prefetch(&self, place: u32) {
        prefetch(&self.window.levels[place as usize]);
    }

    /// Last link of the level of a place.
    #[inline(always)]
    pub fn tail(&self, place: u32) -> u32 {
        Level::of(self.window.levels[place as usize]).tail
    }

    /// The next occupied price of the side that is worse than `price`.
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
        let count = self.window.levels.len() as i64;
        let place = price.0.saturating_sub(self.base);
        let found = match side {
            Side::Buy if place <= 0 => None,
            Side::Buy => self.window.bits.down((place - 1).min(count - 1) as usize),
            Side::Sell if place >= count - 1 => None,
            Side::Sell => self.window.bits.up((place + 1).max(0) as usize),
        };
        found.map(|place| self.price(place))
    }

    /// True when a best price changed since the last call.
    #[inline(always)]
    pub fn has_new_best(&mut self) -> bool {
        // Read by word: a combined read would miss store forwarding of a best price just written.
        let [bid, ask] = [0, 1].map(|side| self.best[side] ^ self.published[side]);
        let is_new = bid | ask != 0;
        if is_new {
            self.published = self.best;
        }
        is_new
    }

    /// Best price of a side.
    #[inline(always)]
    pub fn best(&self, side: Side) -> Option<Ticks> {
        let best = self.best[side.index()];
        (best != NO_KEY).then(|| Ticks(key(side, Ticks(best))))
    }

    /// True when an order of this side and limit would match the other side.
    #[inline(always)]
    pub fn crosses(&self, side: Side, limit: Ticks) -> bool {
        let other = side.opposite();
        let best = self.best[other.index()];
        (best <= key(other, limit)) & (best != NO_KEY)
    }

    /// As `crosses`, for a valid order price, which never equals the key of an empty side.
    #[inline(always)]
    pub fn meets(&self, side: Side, price: Ticks) -> bool {
        let other = side.opposite();
        self.best[other.index()] <= key(other, price)
    }

    /// True while every bid is below every ask.
    #[inline(always)]
    pub fn is_sound(&self) -> bool {
        key(Side::Buy, Ticks(self.best[0])) < self.best[1]
    }

    /// Prices of a side, best first.
    pub fn prices(&self, side: Side) -> impl Iterator<Item = Ticks> + '_ {
        successors(self.best(side), move |price| self.next(side, *price))
    }

    /// Every occupied price, found without the best prices: for the check of the structure. Panics
    /// if the map has a price of the window.
    pub fn marked(&self) -> impl Iterator<Item = (Side, Ticks)> + '_ {
        let outside = [Side::Buy, Side::Sell].into_iter().flat_map(move |side| {
            self.outside[side.index()].keys().map(move |price| {
                assert!(
                    self.place(*price).is_none(),
                    "price is in the window and in the map"
                );
                (side, *price)
            })
        });
        let inside = self.window.bits.iter().map(move |place| {
            let price = self.price(place);
            (self.side_of(price), price)
        });
        inside.chain(outside)
    }

    /// True when a price has a place in the window.
    #[cfg(test)]
    fn is_inside(&self, price: i64) -> bool {
        self.place(Ticks(price)).is_some()
    }
}

impl Level {
    /// Appends an order; returns the link that was last.
    #[inline(always)]
    fn push(&mut self, link: u32, open: Lots) -> u32 {
        let tail = self.tail;
        self.head = select_unpredictable(tail == NIL, link, self.head);
        self.tail = link;
        self.open += open;
        tail
    }

    /// The level without the order that was between these two links.
    #[inline(always)]
    fn without(self, prev: u32, next: u32, open: Lots) -> Self {
        Self {
            head: select_unpredictable(prev == NIL, next, self.head),
            tail: select_unpredictable(next == NIL, prev, self.tail),
            open: self.open - open,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::GROWTH;
    use alloc::vec::Vec;
    use types::{InstrumentId, InstrumentIx, InstrumentParams};

    fn spec(band_low: i64, band_high: i64) -> InstrumentSpec {
        InstrumentSpec::new(&InstrumentParams {
            ix: InstrumentIx(0),
            band_low: Ticks(band_low),
            band_high: Ticks(band_high),
            ..InstrumentParams::new(InstrumentId::new("TEST-1").unwrap())
        })
        .unwrap()
    }

    fn wide() -> Ladder {
        Ladder::new(&spec(1, Ticks::ORDER_MAX.0), 1_024)
    }

    /// One order per price, with the price as its link.
    fn push(ladder: &mut Ladder, side: Side, price: i64) {
        ladder.push(side, Ticks(price), price as u32, Lots(1));
    }

    fn pull(ladder: &mut Ladder, side: Side, price: i64) {
        ladder.unlink(side, Ticks(price), NIL, NIL, Lots(1));
    }

    fn prices(ladder: &Ladder) -> [Vec<i64>; 2] {
        let found = [Side::Buy, Side::Sell].map(|s| ladder.prices(s).map(|p| p.0).collect());
        let marked = ladder.marked().count();
        assert_eq!(marked, found.iter().map(Vec::len).sum::<usize>());
        found
    }

    #[test]
    fn the_window_leaves_a_stray_order_for_the_market() {
        let mut ladder = wide();
        push(&mut ladder, Side::Buy, 1);
        assert!(ladder.is_inside(1));
        push(&mut ladder, Side::Sell, 5_000_010);
        push(&mut ladder, Side::Buy, 5_000_000);
        assert!(ladder.is_inside(5_000_000) && ladder.is_inside(5_000_010));
        // Another stray order moves nothing while the market is inside.
        push(&mut ladder, Side::Buy, 2);
        push(&mut ladder, Side::Sell, 9_000_000);
        assert!(ladder.is_inside(5_000_000));
        assert_eq!(
            prices(&ladder),
            [
                alloc::vec![5_000_000, 2, 1],
                alloc::vec![5_000_010, 9_000_000]
            ]
        );
        for (side, price) in [(Side::Buy, 1), (Side::Sell, 5_000_010), (Side::Buy, 2)] {
            assert_eq!(ladder.level(side, Ticks(price)).head, price as u32);
            pull(&mut ladder, side, price);
        }
        assert_eq!(
            prices(&ladder),
            [alloc::vec![5_000_000], alloc::vec![9_000_000]]
        );
    }

    #[test]
    fn the_window_moves_from_many_stray_levels_only_after_enough_credits() {
        let mut ladder = wide();
        for price in 1..=400 {
            push(&mut ladder, Side::Buy, price);
        }
        let mut pushed = 0;
        while !ladder.is_inside(5_000_000) {
            push(&mut ladder, Side::Buy, 5_000_000 + pushed);
            pushed += 1;
            assert!(pushed < 400, "the window never moved");
        }
        assert!(pushed as usize * LEVELS_PER_CREDIT > 400);
        let bids: Vec<i64> = (5_000_000..5_000_000 + pushed)
            .rev()
            .chain((1..=400).rev())
            .collect();
        assert_eq!(prices(&ladder), [bids, Vec::new()]);
    }

    #[test]
    fn a_window_begins_small_and_grows_for_orders_outside() {
        let mut ladder = Ladder::new(&spec(1, Ticks::ORDER_MAX.0), 100_000);
        push(&mut ladder, Side::Buy, 500_000);
        assert_eq!(ladder.window.levels.len(), LEVELS_FIRST);
        push(&mut ladder, Side::Sell, 503_000);
        assert_eq!(ladder.window.levels.len(), LEVELS_FIRST * GROWTH);
        assert!(ladder.is_inside(503_000) && ladder.is_inside(500_000));
        // Levels inside must be paid for at each growth, until the maximum width is reached.
        for price in 490_000..490_800 {
            push(&mut ladder, Side::Buy, price);
        }
        let mut price = 540_000;
        while ladder.window.levels.len() < 100_000 {
            push(&mut ladder, Side::Sell, price);
            price += 1;
            assert!(price < 541_000, "the window never grew");
        }
        let paid = (price - 540_000) as usize * LEVELS_PER_CREDIT;
        assert!(paid > 800 / COPIES_PER_LEVEL);
        // Growth also works at the edge of the band, where a wider window begins at the same price.
        let mut low = Ladder::new(&spec(1, Ticks::ORDER_MAX.0), 100_000);
        push(&mut low, Side::Buy, 100);
        push(&mut low, Side::Sell, 5_000);
        assert!(low.is_inside(100) && low.is_inside(5_000));
        let bids = [500_000].into_iter().chain((490_000..490_800).rev());
        let asks = [503_000].into_iter().chain(540_000..price);
        assert_eq!(prices(&ladder), [bids.collect::<Vec<_>>(), asks.collect()]);
    }

    #[test]
    fn a_window_with_many_levels_grows_too() {
        let mut ladder = Ladder::new(&spec(1, Ticks::ORDER_MAX.0), LEVELS_DEFAULT);
        push(&mut ladder, Side::Sell, 503_000);
        push(&mut ladder, Side::Buy, 498_000);
        assert_eq!(ladder.window.levels.len(), LEVELS_FIRST * GROWTH);
        let bids = 471_000..498_000;
        for price in bids.clone() {
            push(&mut ladder, Side::Buy, price);
        }
        let mut end = 600_000;
        while ladder.window.levels.len() < LEVELS_DEFAULT as usize {
            push(&mut ladder, Side::Sell, end);
            end += 1;
            assert!(end < 602_000, "the window never grew");
        }
        assert!(ladder.is_inside(471_000) && ladder.is_inside(600_000));
        let bids = bids.chain([498_000]).rev();
        let asks = [503_000].into_iter().chain(600_000..end);
        assert_eq!(prices(&ladder), [bids.collect::<Vec<_>>(), asks.collect()]);
        for price in 471_000..=498_000 {
            assert_eq!(ladder.level(Side::Buy, Ticks(price)).head, price as u32);
        }
    }

    #[test]
    fn an_empty_window_follows_the_band_and_an_occupied_one_stays() {
        let mut ladder = Ladder::new(&spec(100, 200), 1_024);
        assert!(ladder.is_inside(100) && ladder.is_inside(200));
        ladder.set_band(&spec(90_000, 90_500));
        assert!(ladder.is_inside(90_000) && ladder.is_inside(90_500));
        assert!(ladder.is_inside(89_800), "slack for the next band");
        push(&mut ladder, Side::Buy, 90_100);
        ladder.set_band(&spec(100, 200));
        assert!(ladder.is_inside(90_100));
        push(&mut ladder, Side::Sell, 95_000);
        pull(&mut ladder, Side::Buy, 90_100);
        ladder.set_band(&spec(94_800, 95_200));
        assert!(ladder.is_inside(95_000));
        assert_eq!(prices(&ladder), [Vec::new(), alloc::vec![95_000]]);
        // A wide band's first price is not at the window's edge, and the window stays in the band.
        let mut ladder = wide();
        push(&mut ladder, Side::Buy, 5_000);
        assert!(ladder.is_inside(4_500) && ladder.is_inside(5_500));
        let mut ladder = Ladder::new(&spec(10_000, 20_000), 1_024);
        push(&mut ladder, Side::Sell, 20_000);
        assert!(ladder.is_inside(20_000) && !ladder.is_inside(20_001));
    }
}
