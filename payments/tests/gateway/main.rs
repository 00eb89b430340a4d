//! The payments gateway at its boundary: its RPC and HTTP, the sandbox bank over loopback, events from the log.

mod deposits;
mod payouts;
mod reconciliation;
mod webhooks;
mod world;
