//! The payments gateway at its boundary: RPC, HTTP, the sandbox bank over loopback, published
//! events.

mod crash;
mod deposits;
mod lines;
mod logs;
mod payouts;
mod receipts;
mod reconciliation;
mod webhooks;
mod world;
