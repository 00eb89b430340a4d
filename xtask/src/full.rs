//! The full suite: what needs services of its own. Each is installed and started by the project's own scripts, used, and stopped.

use std::path::Path;

use anyhow::Context;

use crate::shell;

/// Runs everything; the first failure stops it, the services are stopped all the same.
pub fn run() -> anyhow::Result<()> {
    conformance()?;
    kafka()
}

/// The official Connect conformance suite against the protocol layer, all three protocols.
fn conformance() -> anyhow::Result<()> {
    println!("Connect conformance suite");
    let root = shell::root();
    shell::run(&root, &script(&root, "conformance/run.sh"), &[])
}

/// The event contract on a real Kafka broker.
fn kafka() -> anyhow::Result<()> {
    println!("event log on a real Kafka broker");
    let root = shell::root();
    let kafka = script(&root, "services/kafka.sh");
    let brokers = shell::output(&root, &kafka, &["start"])?;
    let brokers = brokers
        .lines()
        .last()
        .context("the script prints the address of the broker")?
        .trim()
        .to_owned();
    let tested = shell::run_with(
        &root,
        "cargo",
        &["test", "--workspace", "--test", "full"],
        &[("KAFKA_BROKERS", &brokers)],
    );
    let stopped = shell::run(&root, &kafka, &["stop"]);
    tested.and(stopped)
}

fn script(root: &Path, name: &str) -> String {
    root.join("tests").join(name).to_string_lossy().into_owned()
}
