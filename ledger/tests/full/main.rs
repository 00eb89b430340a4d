//! The boundary tests on a real PostgreSQL and a real Kafka broker, tests of several ledgers on one
//! server, and tests of servers that stop or are killed. `cargo test` skips them. Run
//! `tests/services/postgres.sh start` and `tests/services/kafka.sh start`, then
//! `POSTGRES_URL=<printed URL> KAFKA_BROKERS=<printed address> cargo test -p ledger --test full`.

#[path = "../boundary/audit.rs"]
mod audit;
#[path = "../boundary/batches.rs"]
mod batches;
#[path = "../boundary/client.rs"]
mod client;
#[path = "../boundary/clock.rs"]
mod clock;
#[path = "../boundary/concurrency.rs"]
mod concurrency;
#[path = "../boundary/consumed.rs"]
mod consumed;
#[path = "../boundary/crash.rs"]
mod crash;
#[path = "../boundary/durations.rs"]
mod durations;
#[path = "../boundary/emitted.rs"]
mod emitted;
#[path = "../boundary/harness.rs"]
mod harness;
#[path = "../boundary/holds.rs"]
mod holds;
mod kafka;
#[path = "../boundary/large.rs"]
mod large;
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
#[path = "../boundary/refused_holds.rs"]
mod refused_holds;
#[path = "../boundary/refused_reads.rs"]
mod refused_reads;
#[path = "../boundary/requests.rs"]
mod requests;
#[path = "../boundary/rows.rs"]
mod rows;
mod scans;
#[path = "../../../tests/services/server.rs"]
mod server;
mod several;
#[path = "../boundary/statement.rs"]
mod statement;
mod stopped;
#[path = "../boundary/twin.rs"]
mod twin;
#[path = "../boundary/unavailable.rs"]
mod unavailable;
#[path = "../../../events/tests/common/victim.rs"]
mod victim;
#[path = "../plans/workload.rs"]
mod workload;

/// The Kafka brokers to use.
fn brokers() -> String {
    std::env::var("KAFKA_BROKERS").expect(
        "KAFKA_BROKERS is not set: run `tests/services/kafka.sh start` and pass the printed address",
    )
}

/// URL of the PostgreSQL server.
fn server() -> Option<String> {
    Some(std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `tests/services/postgres.sh start` and pass the printed URL",
    ))
}
