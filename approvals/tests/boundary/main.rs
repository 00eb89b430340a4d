//! The approvals service at its boundary: RPC, the calls that it makes of identity, audit records.

mod approvals;
mod database;
#[allow(dead_code, reason = "each test target uses its part")]
mod world;

/// URL of the PostgreSQL server; `None`: SQLite.
fn server() -> Option<String> {
    None
}
