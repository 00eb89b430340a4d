//! Room `service-clients`: typed clients of our own services, with one policy for all of them.
//!
//! | file | what |
//! |---|---|
//! | `policy` | deadline, retry, and what a failed call becomes ([`CallError`]) |
//! | `convert` | numbers and amounts out of messages |
//! | `ledger`, `cfa`, `identity`, `payments`, `market`, `chain` | one client per service |
//!
//! Architecture invariants: no service is a dependency; no generated message is public; a write is
//! repeated only as the same message, with the same idempotency key.

pub mod cfa;
mod chain;
mod convert;
pub mod identity;
pub mod ledger;
mod market;
mod payments;
mod policy;

pub use cfa::CfaClient;
pub use chain::ChainClient;
pub use identity::IdentityClient;
pub use ledger::LedgerClient;
pub use market::{MarketClient, TradingHold};
pub use payments::PaymentsClient;
pub use policy::{Answer, CallError, Policy, caused_by};
pub use types::{HoldStatus, LimitType, OperationStatus, OperationType, PaymentStatus};
