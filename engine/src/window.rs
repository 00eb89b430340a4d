//! Memory of price windows. Another thread can prepare it, so that a book that grows neither
//! allocates nor waits for the system.

use core::fmt;
use core::hint::black_box;
use core::iter::successors;
use core::mem;

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
/// Changes of pages that a replacement waits for, per page that the window before had touched. A
/// page that becomes resident again costs a page fault, so a fault per 64 changes at most.
const CHANGES_PER_PAGE: u32 = 64;
/// Maximum levels to copy to another window at once. A window with more is not replaced.
const COPIED_MAX: usize = 1 << 14;

/// Empty price levels, 16 bytes each, with their occupancy bitmap.
pub struct Window {
    pub(crate) levels: Mapped<Words>,
    pub(crate) bits: Bits,
    pages: Pages,
}

/// The pages of a window that orders have touched. A page stays resident after its last order.
struct Pages {
    touched: Vec<u64>,
    touched_count: u32,
    /// Pages with orders.
    used_count: u32,
    /// Changes until orders may cause a replacement.
    wait: u32,
}

impl Pages {
    fn new(levels: usize) -> Self {
        let pages = levels.div_ceil(LEVELS_PER_PAGE);
        Self {
            touched: vec![0; pages.div_ceil(64)],
            touched_count: 0,
            used_count: 0,
            wait: 0,
        }
    }

    /// Records a page whose first order rests now.
    fn use_page(&mut self, page: usize) {
        let word = &mut self.touched[page / 64];
        let before = *word;
        *word |= 1 << (page % 64);
        self.touched_count += u32::from(before != *word);
        self.used_count += 1;
    }

    /// True when the window uses more memory than its orders need. It is then worth replacing: that
    /// frees more pages than it copies.
    fn is_oversized(&self) -> bool {
        self.touched_count > 2 * self.used_count + PAGES_KEPT
    }

    /// Counts a change of a page. True when an oversized window should be replaced now.
    fn is_due(&mut self) -> bool {
        self.wait = self.wait.saturating_sub(1);
        self.wait == 0 && self.is_oversized()
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

    /// Writes a level with orders to an empty place.
    pub(crate) fn put(&mut self, place: usize, words: Words) {
        self.levels[place] = words;
        self.mark(place);
    }

    /// Marks a place as occupied. True when the window should be replaced.
    #[inline(always)]
    pub(crate) fn mark(&mut self, place: usize) -> bool {
        self.bits.set(place) && self.note_used(place)
    }

    /// Marks a place as free. True when the window should be replaced.
    #[inline(always)]
    pub(crate) fn unmark(&mut self, place: usize) -> bool {
        self.bits.clear(place) && self.note_unused(place)
    }

    #[cold]
    fn note_used(&mut self, place: usize) -> bool {
        let page = place / LEVELS_PER_PAGE;
        // The word of the place alone: the page had no order before.
        if self.used_words(page) == 1 {
            self.pages.use_page(page);
        }
        self.pages.is_due()
    }

    #[cold]
    fn note_unused(&mut self, place: usize) -> bool {
        if self.used_words(place / LEVELS_PER_PAGE) == 0 {
            self.pages.used_count -= 1;
        }
        self.pages.is_due()
    }

    fn used_words(&self, page: usize) -> usize {
        let first = page * LEVELS_PER_PAGE;
        self.bits.used_words(first..first + LEVELS_PER_PAGE)
    }

    /// True when the window uses more memory than its orders need.
    pub(crate) fn is_oversized(&self) -> bool {
        self.pages.is_oversized()
    }

    /// Postpones the replacement: the window has more than [`COPIED_MAX`] levels, or no other one
    /// is ready.
    pub(crate) fn postpone(&mut self) {
        self.pages.wait = PAGES_KEPT;
    }

    /// True if its levels may be copied at once. Cost: at most [`COPIED_MAX`] look-ups.
    pub(crate) fn is_copied_fast(&self) -> bool {
        self.places().take(COPIED_MAX + 1).count() <= COPIED_MAX
    }

    /// Occupied places, in order.
    pub(crate) fn places(&self) -> impl Iterator<Item = usize> + '_ {
        successors(self.bits.up(0), |place| self.bits.up(place + 1))
    }

    /// Copies the levels with orders to an empty window of the same width.
    pub(crate) fn copy_to(&self, empty: &mut Self) {
        for place in self.places() {
            empty.put(place, self.levels[place]);
        }
    }

    /// Moves the levels with orders to an empty window of the same width, which stays for a while.
    pub(crate) fn replace_with(&mut self, mut empty: Self) -> Self {
        self.copy_to(&mut empty);
        empty.pages.wait = CHANGES_PER_PAGE * self.pages.touched_count;
        mem::replace(self, empty)
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
