//! Stand-ins for what lies outside the platform: identity, and the bank with the fast-payment system.
//!
//! They speak the real contracts, keep their state through a `kill -9`, and have buttons for what
//! goes wrong outside. None of them is needed where the real thing is connected; no other room
//! depends on this one. (The development chain is in the crate `chain`.)

pub mod bank;
pub mod identity;
