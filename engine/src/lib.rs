//! Order book and matching of one instrument, as a pure function of its commands.
//!
//! `Book::apply(&Envelope, &mut impl EventSink)` takes a sequenced command and emits numbered
//! events. Commands whose orders admission lists enter by `Book::apply_listed`. No clock, no
//! configuration, no randomness; integers only. The same commands produce the same events and the
//! same state hash on every machine (R180).
//!
//! | file | contents |
//! |---|---|
//! | `book` | the book and the dispatch of commands |
//! | `entry` | new orders and amends: rejects, accepts, loss of priority |
//! | `matching` | the match loop, self-trade prevention, the fill-or-kill look-ahead |
//! | `sweep` | mass cancel, expiry, phase changes |
//! | `dates` | expiry times of resting orders |
//! | `slab` | resting orders, addressed by admission's slot |
//! | `ladder`, `bits` | price levels: a window of ticks with a bitmap, a map outside it |
//! | `window` | memory of that window, which another thread can prepare |
//! | `velocity` | velocity halt: trading stops when the price moves too fast |
//! | `view` | depth, order-by-order view, state hash |
//! | `ahead` | prefetching of upcoming commands |
//! | `image` | the book as a snapshot |
//! | `invariants` | full check of the structure |
//! | `sink` | event output |
//!
//! Architecture invariants:
//! - `unsafe` is only in `slab`, for its records' memory and for prefetches.
//! - A book is never crossed.
//! - `apply` does not allocate while slots are below the configured capacity and prices inside the
//!   window. Exceptions: the first order with an expiry, the first mass cancel, and the growth of
//!   the window in a book without a source of windows.
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
mod window;

pub use book::{Book, BookConfig};
pub use image::{BookImage, RestingOrder};
pub use ladder::{LEVELS_DEFAULT, LEVELS_MAX};
pub use sink::EventSink;
pub use velocity::VelocityState;
pub use view::DepthLevel;
pub use window::{Window, WindowSource, window_steps};
