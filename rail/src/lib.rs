//! The contract of the bank and the fast-payment system, without any platform logic (specification
//! 2.4).
//!
//! | module | content |
//! |---|---|
//! | `rub` | roubles in kopecks |
//! | `account` | account numbers and their control key |
//! | `sbp_link`, `purpose_code` | what a payer scans or types |
//! | `messages` | requests, responses and webhooks as JSON |
//! | `request_signature`, `webhook`, `keys` | signatures of both sides and the key files |
//! | `client`, `policy` | the gateway's bank client and its limits |
//!
//! A further bank needs a further crate like this one. The payments gateway is the client of this
//! contract, the sandbox bank is a server.
//!
//! Architecture invariants: no dependency on either side, no store, no payment rules.

pub mod account;
pub mod client;
pub mod keys;
pub mod messages;
pub mod policy;
pub mod purpose_code;
pub mod request_signature;
mod rub;
pub mod sbp_link;
pub mod webhook;

pub use rub::{CURRENCY, Rub, RubError};
