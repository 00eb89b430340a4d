//! What tests of several crates share. A dev-dependency only: no program that runs in production is
//! built with it.
//!
//! | file | what |
//! |---|---|
//! | `messages` | contexts and amounts of the contract, in short words |
//! | `doubles` | doubles of services, and a service in memory |
//! | `ports` | limits that no test waits for, and raw sockets |
//! | `wait` | waiting for what becomes so |
//! | `clock` | a machine whose clocks the test holds |
//! | `plans` | query plans of every statement that runs |

mod clock;
mod doubles;
pub mod messages;
pub mod plans;
pub mod ports;
mod wait;

pub use clock::Machine;
pub use doubles::{Fault, Peers, Person, Registry, in_memory};
pub use wait::{PATIENCE, eventually};
