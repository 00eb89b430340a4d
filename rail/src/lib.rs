//! Room `rail`: everything that is the bank's and the fast-payment system's contract, and nothing that
//! is the platform's (specification 2.4).
//!
//! | file | what |
//! |---|---|
//! | `rub` | roubles in kopecks |
//! | `account` | account numbers and their control key |
//! | `sbp_link`, `purpose_code` | what a payer scans or types |
//! | `messages` | requests, answers and webhooks as JSON |
//! | `request_signature`, `webhook`, `keys` | how both sides sign, and the key files |
//! | `client`, `policy` | the platform's client of the bank and its limits |
//!
//! Another bank is another crate like this one. The payments gateway speaks these messages from one
//! side, the sandbox bank from the other.
//!
//! Architecture invariants: neither of the two sides is a dependency; no store, no rules of payments.

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
