//! The ledger at its boundary: a real store in a temporary folder, the real log, the real access
//! layer; every call through the client of the contract. One test binary, since linking costs more
//! than running. `tests/full` runs the same tests on PostgreSQL, except `remembered`, which tests
//! the row cache of the SQLite writer.

mod audit;
mod away;
mod batches;
mod client;
mod clock;
mod concurrency;
mod consumed;
mod crash;
mod emitted;
mod harness;
mod holds;
mod large;
mod limits;
mod operations;
mod reads;
mod refusals;
mod remembered;
mod requests;
mod rows;
mod statement;
mod twin;
#[path = "../../../events/tests/common/victim.rs"]
mod victim;

/// URL of the PostgreSQL server; `None`: SQLite.
fn server() -> Option<String> {
    None
}
