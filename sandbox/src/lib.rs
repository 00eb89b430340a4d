//! Sandbox replacements of external services: identity, and the bank with the fast-payment system.
//!
//! They implement the real contracts, keep their state through a `kill -9`, and have injectable
//! faults. A platform with the real services does not run them. Outside tests only `node` depends
//! on this crate. The development chain is in the crate `chain`.

mod api;
pub mod bank;
pub mod identity;
