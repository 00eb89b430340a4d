//! The ledger at its boundary: a real store in a temporary folder, the real log, the real access
//! layer; every call through the client of the contract. One test binary, since linking costs more
//! than running. `tests/full` runs the same tests on PostgreSQL, except `crash` and `remembered`,
//! which test the SQLite writer.

mod audit;
mod away;
mod batches;
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

/// URL of the PostgreSQL server; `None`: SQLite.
fn server() -> Option<String> {
    None
}
