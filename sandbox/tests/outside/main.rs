//! The sandboxes at their boundaries: identity over RPC, HTTP and events; the bank over HTTP.

mod bank;
mod bounds;
mod identity;
