//! Prefetches the memory that the next commands of a batch need.
//!
//! Prefetching changes only speed: a book larger than the cache is bound by memory latency. It has
//! two steps, because an order's record must be loaded before its neighbours are known. A small
//! book, which fits the cache, skips both.

use core::borrow::Borrow;

use types::{Command, Envelope, Ticks};

use crate::book::Book;
use crate::slab::prefetch_head;

/// Distance, in commands, at which a command itself is prefetched.
const READ_AHEAD: usize = 20;
/// Distances, in commands, at which a command's record and level are prefetched (first step), and
/// the records that these refer to (second step).
const FIRST_STEP: usize = 12;
const SECOND_STEP: usize = 6;
/// Size of the ring of targets; a power of two greater than the first step.
const TARGETS: usize = 16;
/// Minimum of resting orders for prefetching: with their levels they fill some hundred KiB.
const RESTING_MIN: u32 = 8_192;

const _: () = assert!(FIRST_STEP < TARGETS && SECOND_STEP < FIRST_STEP);

/// Parts of the book that a command will touch.
#[derive(Clone, Copy, Default)]
struct Target {
    link: u32,
    place: u32,
}

/// State of the prefetches for the commands of a batch after the current one.
struct Ahead {
    targets: [Target; TARGETS],
    /// Index of the current command.
    at: usize,
}

impl Ahead {
    #[cold]
    fn begin<T>(book: &Book, batch: &[T], target_of: impl Fn(&Book, &T) -> Target) -> Self {
        let mut targets = [Target::default(); TARGETS];
        for (target, item) in targets.iter_mut().zip(batch.iter().take(FIRST_STEP)) {
            *target = target_of(book, item);
        }
        for target in &targets[..SECOND_STEP] {
            book.second_step(*target);
        }
        Self { targets, at: 0 }
    }

    /// Advances by one command. Not inlined into the loop over a batch, so that a small book's loop
    /// keeps the registers.
    #[inline(never)]
    fn step<T>(&mut self, book: &Book, batch: &[T], target_of: impl Fn(&Book, &T) -> Target) {
        if let Some(next) = batch.get(self.at + FIRST_STEP) {
            self.targets[(self.at + FIRST_STEP) % TARGETS] = target_of(book, next);
        }
        book.second_step(self.targets[(self.at + SECOND_STEP) % TARGETS]);
        self.at += 1;
    }
}

impl Book {
    /// Calls `each` for every item of a batch, in order, with prefetching of the items after it.
    ///
    /// `command` returns an item's command, if it has one for this book.
    #[inline]
    pub fn each_of_batch<C, T: Borrow<C>>(
        &mut self,
        batch: &[T],
        command: impl Fn(&C) -> Option<&Envelope>,
        mut each: impl FnMut(&mut Self, &C),
    ) {
        let target_of = |book: &Self, item: &T| {
            command(item.borrow())
                .map_or_else(Target::default, |envelope| book.first_step(envelope))
        };
        let mut ahead = None;
        if self.resting() >= RESTING_MIN {
            for item in batch.iter().take(READ_AHEAD) {
                prefetch_head(item.borrow());
            }
            ahead = Some(Ahead::begin(self, batch, target_of));
        }
        let mut later = batch.get(READ_AHEAD..).unwrap_or_default().iter();
        // One call of `each`, so that the work on a command is inlined into this loop.
        for item in batch {
            if let Some(item) = later.next() {
                prefetch_head(item.borrow());
            }
            if let Some(ahead) = &mut ahead {
                ahead.step(self, batch, target_of);
            }
            each(self, item.borrow());
        }
    }

    /// Prefetches the record of the order that the command names, and the level of its price.
    #[inline(always)]
    fn first_step(&self, envelope: &Envelope) -> Target {
        let (slot, price) = match &envelope.command {
            Command::New(c) => (c.handle.slot, c.price),
            Command::Cancel(c) => (c.handle.slot, Ticks::ZERO),
            Command::Amend(c) => (c.handle.slot, c.price.unwrap_or(Ticks::ZERO)),
            _ => return Target::default(),
        };
        let target = Target {
            link: self.slab.nearest_link(slot),
            place: self.ladder.nearest_place(price),
        };
        self.slab.prefetch(target.link);
        self.ladder.prefetch(target.place);
        target
    }

    /// Prefetches the neighbours of the record from the first step, and the order's own level.
    #[inline(always)]
    fn second_step(&self, target: Target) {
        let order = self.slab.at(target.link);
        self.slab.prefetch(order.prev);
        self.slab.prefetch(order.next);
        self.ladder.prefetch(self.ladder.nearest_place(order.price));
        self.slab.prefetch(self.ladder.tail(target.place));
    }
}
