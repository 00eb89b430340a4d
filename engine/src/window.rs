//! Memory of price windows. Another thread can prepare it, so that a book that grows neither
//! allocates nor waits for the system.

use core::fmt;
use core::hint::black_box;
use core::iter::successors;

use alloc::vec;
use alloc::vec::Vec;

use crate::bits::Bits;
use crate::ladder::{LEVELS_MAX, Level, Words};
use crate::slab::Mapped;

/// Initial width of a window, in ticks: 64 KiB of levels.
pub(crate) const LEVELS_FIRST: usize = 1 << 12;
/// Factor by which a window grows.
pub(crate) const GROWTH: usize = 16;
/// Levels of a page of memory.
const LEVELS_PER_PAGE: usize = 4_096 / size_of::<Words>();
/// Pages that a window may use in addition to twice those of its orders: 256 KiB.
const PAGES_KEPT: u32 = 64;

/// Empty price levels, 16 bytes each, with their occupancy bitmap.
pub struct Window {
    pub(crate) levels: Mapped<Words>,
    pub(crate) bits: Bits,
    pages: Pages,
}

/// The pages of a window that orders have touched. A page stays resident after its last order.
struct Pages {
    touched: Vec<u64>,
    count: u32,
    /// Count at which the window is worth replacing.
    max: u32,
}

impl Pages {
    fn new(levels: usize) -> Self {
        let pages = levels.div_ceil(LEVELS_PER_PAGE);
        Self {
            touched: vec![0; pages.div_ceil(64)],
            count: 0,
            max: PAGES_KEPT,
        }
    }

    /// Records the page of a level; true when the page is new.
    fn touch(&mut self, place: usize) -> bool {
        let page = place / LEVELS_PER_PAGE;
        let word = &mut self.touched[page / 64];
        let before = *word;
        *word |= 1 << (page % 64);
        let is_new = before != *word;
        self.count += u32::from(is_new);
        is_new
    }
}

impl Window {
    /// A window of this many ticks. It costs only address space until orders rest there.
    pub fn new(ticks: u32) -> Self {
        Self {
            levels: Mapped::new(ticks as usize),
            bits: Bits::new(ticks as usize),
            pages: Pages::new(ticks as usize),
        }
    }

    /// Writes a level with orders to an empty window or an empty place.
    pub(crate) fn put(&mut self, place: usize, words: Words) {
        self.levels[place] = words;
        self.bits.set(place);
        self.pages.touch(place);
    }

    /// Records the first order in a part of the window. True when the window uses more memory than
    /// its orders need, and should be replaced.
    #[cold]
    pub(crate) fn touch(&mut self, place: usize) -> bool {
        self.pages.touch(place) && self.pages.count > self.pages.max
    }

    /// Copies the levels with orders to an empty window of the same width. That one is replaced
    /// once it has touched twice as many pages, and some more: a touched page pays for a copied
    /// one.
    pub(crate) fn copy_to(&self, empty: &mut Self) {
        for place in successors(self.bits.up(0), |place| self.bits.up(place + 1)) {
            empty.put(place, self.levels[place]);
        }
        empty.pages.max = 2 * empty.pages.count + PAGES_KEPT;
    }

    /// Touches the middle, where the market will be: as many levels as a first window has. More
    /// would let a member make much memory resident by an order in each book.
    #[must_use]
    pub fn with_middle_touched(mut self) -> Self {
        let count = self.levels.len();
        let first = count.saturating_sub(LEVELS_FIRST) / 2;
        let middle = self.levels.iter_mut().skip(first).take(LEVELS_FIRST);
        for level in middle.step_by(LEVELS_PER_PAGE) {
            *level = black_box(Level::EMPTY.words());
        }
        self.bits.set(count / 2);
        black_box(&mut self.bits).clear(count / 2);
        self
    }

    /// Width in ticks.
    pub fn ticks(&self) -> u32 {
        u32::try_from(self.levels.len()).expect("at most LEVELS_MAX")
    }
}

impl Clone for Window {
    fn clone(&self) -> Self {
        let mut copy = Self::new(self.ticks());
        self.copy_to(&mut copy);
        copy
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let occupied = self.bits.iter();
        let levels = occupied.map(|place| (place, Level::of(self.levels[place])));
        f.debug_map().entries(levels).finish()
    }
}

/// Source of the memory of wider windows.
///
/// The time at which a window grows changes speed, never results, so the source may be late.
pub trait WindowSource: fmt::Debug + Send + Sync {
    /// A window of this many ticks, one of [`window_steps`]; `None` when none is ready. The book
    /// asks again later.
    fn take(&self, ticks: u32) -> Option<Window>;

    /// Frees a window that a book has replaced.
    fn free(&self, window: Window);
}

/// Widths, in ticks, that a window grows to, up to the maximum of its book.
pub fn window_steps(levels_max: u32) -> impl Iterator<Item = u32> {
    let max = levels_max.min(LEVELS_MAX) as usize;
    let wider = move |ticks: &usize| (*ticks < max).then(|| next_step(*ticks, max));
    let steps = successors(Some(LEVELS_FIRST.min(max)), wider).skip(1);
    steps.map(|ticks| u32::try_from(ticks).expect("at most LEVELS_MAX"))
}

/// Width after one growth.
pub(crate) fn next_step(ticks: usize, max: usize) -> usize {
    (ticks * GROWTH).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_in_steps_up_to_the_maximum() {
        let steps = |max| window_steps(max).collect::<Vec<_>>();
        assert_eq!(steps(1 << 20), [1 << 16, 1 << 20]);
        assert_eq!(steps(100_000), [1 << 16, 100_000]);
        assert!(steps(1 << 12).is_empty() && steps(64).is_empty());
    }

    #[test]
    fn a_new_window_is_empty() {
        for ticks in [1, 64, 1 << 12, 100_000] {
            let window = Window::new(ticks).with_middle_touched();
            assert_eq!(window.ticks(), ticks);
            assert!(window.bits.is_empty() && window.bits.iter().next().is_none());
            assert!(window.levels.iter().all(|level| *level == [0; 2]));
        }
    }
}
