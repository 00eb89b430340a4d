//! Room `service-kit`: what the shell of every service needs and no contract names.
//!
//! | file | what |
//! |---|---|
//! | `backoff` | pauses between attempts |
//! | `clock` | the clock that all services of a process share, or one set by hand |
//! | `discipline` | the rule by which the machine's clock becomes that one |
//! | `failpoint` | places where a test may kill the process |
//! | `keyed_mutex` | one at a time per key |
//!
//! Architecture invariants: no money, no contract, no store; cores are given time and never read
//! this clock.

pub mod backoff;
pub mod clock;
pub mod discipline;
pub mod failpoint;
mod keyed_mutex;

pub use clock::Clock;
pub use keyed_mutex::KeyedMutex;
