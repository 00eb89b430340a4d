//! The stand-ins at their boundaries: identity over RPC, HTTP and events; the bank over its signed HTTP contract.

mod bank;
mod bounds;
mod identity;
