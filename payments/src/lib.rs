//! Payments gateway (specification 1.2, 2.4, 3.4, 4.2): rouble deposits, rouble payouts, and a
//! daily reconciliation of tokens with roubles.
//!
//! | module | content |
//! |---|---|
//! | `intent`, `receipt`, `payout`, `reconcile` | the pure core: life cycles, arithmetic |
//! | `repo` | the store: all SQL of this crate |
//! | `service` | use cases: deposits, payouts, reconciliation |
//! | `worker` | background work: polls, expiry, payouts, cut-off, alerts |
//! | `tokens` | the token side, read from the CFA service and the chain |
//! | `api` | RPC, HTTP and events: the only module that uses generated messages |
//! | `alert` | sinks of critical alerts |
//! | `failpoint` | places where tests kill the process |
//!
//! Architecture invariants:
//! - An unverified webhook changes nothing.
//! - Money leaves only after a final burn, or as the refund of a refused deposit (T06, T24).
//! - Every state change commits with its event in one transaction.
//! - Acts of persons are sealed in audit records in the transaction of the act (D34).
//! - A bank request is repeated only with the same request id.

mod alert;
mod api;
pub mod config;
pub mod failpoint;
pub mod intent;
pub mod payout;
pub mod receipt;
pub mod reconcile;
mod repo;
mod service;
mod start;
mod tokens;
mod worker;

pub use alert::AlertSinks;
pub use config::PaymentsConfig;
pub use start::{Error, PaymentsDeps, PaymentsHandle, sealed_store, start, verify_audit};
