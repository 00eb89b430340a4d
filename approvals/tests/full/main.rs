//! The boundary tests on a real PostgreSQL, and the query plans there. `cargo test` skips them. Run
//! `tests/services/postgres.sh start`, then
//! `POSTGRES_URL=<printed URL> cargo test -p approvals --test full`.

#[path = "../boundary/approvals.rs"]
mod approvals;
#[path = "../boundary/database.rs"]
mod database;
mod scans;
#[path = "../plans/workload.rs"]
mod workload;
#[path = "../boundary/world.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod world;

/// URL of the PostgreSQL server.
fn server() -> Option<String> {
    Some(std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `tests/services/postgres.sh start` and pass the printed URL",
    ))
}
