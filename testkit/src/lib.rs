//! Test helpers of several crates. Tests and benchmarks depend on it; no production binary does.
//!
//! | file | contents |
//! |---|---|
//! | `messages` | short constructors of contexts and amounts |
//! | `doubles` | doubles of services, and in-memory serving |
//! | `seed` | seeds of tests, fixed or from `TESTS_SEED` |
//! | `ports` | limits that no test reaches, and raw sockets |
//! | `wait` | waiting for a condition |
//! | `clock` | a machine with clocks that the test controls |
//! | `plans` | query plans of every executed statement |
//! | `pdf` | reads a PDF of the platform |

mod clock;
mod doubles;
pub mod messages;
pub mod pdf;
pub mod plans;
pub mod ports;
pub mod seed;
mod wait;

pub use clock::Machine;
pub use doubles::{Fault, Registry, Reservation, ServiceDoubles, TestUser, in_memory};
pub use wait::{PATIENCE, eventually};

/// Credential of the calls that the approvals service makes for two persons (D32).
pub const APPROVED: &str = "sandbox.service.approvals";
