//! Tests of the ledger at its boundary: a real store in a temporary folder, the real log, the real
//! access layer, and calls through the client of the contract. They are one test binary because
//! linking costs more than running. `tests/full` runs the same tests on PostgreSQL, except
//! `row_cache`: only the SQLite writer has a row cache.

mod audit;
mod batches;
mod client;
mod clock;
mod concurrency;
mod consumed;
mod crash;
mod durations;
mod emitted;
mod harness;
mod holds;
mod large;
mod limits;
mod operations;
mod reads;
mod refusals;
mod refused_holds;
mod refused_reads;
mod requests;
mod row_cache;
mod rows;
mod statement;
mod twin;
mod unavailable;
#[path = "../../../events/tests/common/victim.rs"]
mod victim;

/// URL of the PostgreSQL server; `None`: SQLite.
fn server() -> Option<String> {
    None
}
