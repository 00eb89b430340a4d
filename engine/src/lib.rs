//! Room `engine`: the order book and the matching of one instrument, pure.
//!
//! `Book::apply(&Envelope, &mut impl EventSink)` is the whole of it: a sequenced command goes in, numbered
//! events come out. No clock, no configuration, no randomness; integers only. The same commands give the same
//! events and the same state hash on every machine (R180).
//!
//! | file | what |
//! |---|---|
//! | `book` | the book and the dispatch of commands |
//! | `entry` | new orders and amends: what is refused, what enters |
//! | `matching` | the match loop, self-trade prevention, the fill-or-kill look-ahead |
//! | `sweep` | mass cancel, expiry, phase changes |
//! | `dates` | which order with a date ends next |
//! | `slab` | resting orders, addressed by admission's slot |
//! | `ladder`, `bits` | price levels: a window of ticks with an occupancy bitmap, a map outside it |
//! | `velocity` | the halt of a market whose price moves too fast |
//! | `view` | depth, order-by-order walk, state hash |
//! | `ahead` | asking for memory before a command's turn |
//! | `image` | the book as a snapshot |
//! | `invariants` | the walk that proves the structure |
//! | `sink` | where events go |
//!
//! Architecture invariants: no `unsafe` but in `slab`, for its records' memory and for prefetches; a book is
//! never crossed; no heap allocation in `apply` as long as slots stay below the capacity given and prices
//! inside the window, but for the room that the first order with a date, the first mass cancel and each growth
//! of the window make.
#![no_std]

extern crate alloc;

mod ahead;
mod bits;
mod book;
mod dates;
mod entry;
mod image;
mod invariants;
mod ladder;
mod matching;
mod sink;
mod slab;
mod sweep;
mod velocity;
mod view;

pub use book::{Book, BookConfig};
pub use image::{BookImage, RestingOrder};
pub use ladder::{LEVELS_DEFAULT, LEVELS_MAX};
pub use sink::EventSink;
pub use velocity::VelocityState;
pub use view::DepthLevel;
