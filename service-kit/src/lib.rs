//! Room `service-kit`: infrastructure that the services share.
//!
//! | file | contents |
//! |---|---|
//! | `audit` | the chain of audit records |
//! | `backoff` | pauses between attempts |
//! | `clock` | the clock shared by all services of a process, or a manual one |
//! | `csv` | rows of CSV |
//! | `discipline` | the state machine that derives platform time from the machine's clocks |
//! | `failpoint` | places where tests kill the process |
//! | `keyed_mutex` | mutual exclusion per key |
//! | `pdf` | lines of text and tables as PDF |
//! | `rate` | rate of messages or calls |
//!
//! Architecture invariants: no money, no contract, no store. Cores receive time as input and never
//! read this clock.

pub mod audit;
pub mod backoff;
pub mod clock;
pub mod csv;
pub mod discipline;
pub mod failpoint;
mod keyed_mutex;
pub mod pdf;
pub mod rate;

pub use clock::Clock;
pub use keyed_mutex::KeyedMutex;
