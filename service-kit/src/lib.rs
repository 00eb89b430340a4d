//! Room `service-kit`: what the shell of every service needs and no contract names.
//!
//! | file | what |
//! |---|---|
//! | `backoff` | pauses between attempts |
//! | `clock` | the wall clock, from the machine or set by hand |
//! | `failpoint` | places where a test may kill the process |
//! | `keyed_mutex` | one at a time per key |
//!
//! Architecture invariants: no money, no contract, no store; cores are given time and never read
//! this clock.

pub mod backoff;
pub mod clock;
pub mod failpoint;
mod keyed_mutex;

pub use clock::Clock;
pub use keyed_mutex::KeyedMutex;
