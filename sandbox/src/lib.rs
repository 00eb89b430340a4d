//! Sandbox replacements of external services: identity, and the bank with the fast-payment system.
//!
//! They implement the real contracts, keep their state through a `kill -9`, and have injectable
//! faults. They are not needed where the real service is connected, and no other crate depends on
//! this one. (The development chain is in the crate `chain`.)

pub mod bank;
pub mod identity;
