//! Payments gateway (specification 1.2, 2.4, 3.4, 4.2): roubles in, roubles out, and every day the
//! proof that tokens and roubles agree.
//!
//! | module | what |
//! |---|---|
//! | `intent`, `payout`, `reconcile` | the pure core: life cycles, arithmetic |
//! | `repo` | the store: all SQL of this room |
//! | `service` | use cases: deposits, payouts, reconciliation |
//! | `worker` | what goes on without a caller: polls, expiry, payouts, cut-off |
//! | `tokens` | the token side, as other services have it |
//! | `api` | RPC, HTTP and events: the only files that know generated messages |
//! | `alert` | where critical alerts go |
//!
//! Architecture invariants: an unverified webhook changes nothing; money leaves only after the burn
//! is final (T06); no state change without its event in the same transaction; the bank is asked
//! again only with the same request id.

pub mod alert;
mod api;
pub mod config;
pub mod intent;
pub mod payout;
pub mod reconcile;
mod repo;
mod service;
mod start;
mod tokens;
mod worker;

pub use alert::AlertSinks;
pub use config::PaymentsConfig;
pub use start::{Error, PaymentsDeps, PaymentsHandle, start};
