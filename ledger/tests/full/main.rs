//! The boundary tests on a real PostgreSQL and a real Kafka broker, and tests of several ledgers on
//! one server. Not part of the quick run: `tests/services/postgres.sh start` and
//! `tests/services/kafka.sh start` first, then
//! `POSTGRES_URL=<what it prints> KAFKA_BROKERS=<what it prints> cargo test -p ledger --test full`.

#[path = "../boundary/audit.rs"]
mod audit;
#[path = "../boundary/away.rs"]
mod away;
#[path = "../boundary/batches.rs"]
mod batches;
#[path = "../boundary/concurrency.rs"]
mod concurrency;
#[path = "../boundary/consumed.rs"]
mod consumed;
#[path = "../boundary/emitted.rs"]
mod emitted;
#[path = "../boundary/harness.rs"]
mod harness;
#[path = "../boundary/holds.rs"]
mod holds;
mod kafka;
#[path = "../boundary/large.rs"]
mod large;
#[path = "../plans/life.rs"]
mod life;
#[path = "../boundary/limits.rs"]
mod limits;
mod lost;
#[path = "../boundary/operations.rs"]
mod operations;
mod plans;
mod proxy;
#[path = "../boundary/reads.rs"]
mod reads;
#[path = "../boundary/refusals.rs"]
mod refusals;
#[path = "../boundary/requests.rs"]
mod requests;
#[path = "../boundary/rows.rs"]
mod rows;
mod scans;
mod several;
#[path = "../boundary/statement.rs"]
mod statement;
#[path = "../boundary/twin.rs"]
mod twin;

/// The Kafka brokers to use.
fn brokers() -> String {
    std::env::var("KAFKA_BROKERS").expect(
        "KAFKA_BROKERS is not set: run `tests/services/kafka.sh start` and pass what it prints",
    )
}

/// URL of the PostgreSQL server.
fn server() -> Option<String> {
    Some(std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `tests/services/postgres.sh start` and pass what it prints",
    ))
}
