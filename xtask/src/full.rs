//! The full suite: tests that need services, nodes of chains or file systems. The project's scripts
//! install, start and stop them.

use std::path::Path;

use anyhow::{Context, bail};

use crate::attacks::{self, Attacks};
use crate::{fuzz, shell};

/// Programs that the suite runs, with their Debian packages. PostgreSQL is not listed: its script
/// installs it.
const PROGRAMS: [(&str, &str); 12] = [
    ("go", "golang-go"),
    ("node", "nodejs"),
    ("npm", "npm"),
    ("python3", "python3-venv"),
    ("java", "openjdk-17-jre-headless"),
    ("mvn", "maven"),
    ("mount", "mount"),
    ("mkfs.ext4", "e2fsprogs"),
    ("flock", "util-linux"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("timeout", "coreutils"),
];

/// Runs everything. The first failure aborts the suite; the services are stopped in any case.
pub fn run() -> anyhow::Result<()> {
    check_programs()?;
    fuzz_lock_file()?;
    conformance()?;
    clients()?;
    disk_full()?;
    load_attacks()?;
    with_services()
}

/// Checks the programs before anything runs; the error names all missing ones.
fn check_programs() -> anyhow::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |program: &str| std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    let missing: Vec<String> = (PROGRAMS.iter())
        .filter(|(program, _)| !is_there(program))
        .map(|(program, package)| format!("{program} (Debian: {package})"))
        .collect();
    if !missing.is_empty() {
        bail!(
            "the full suite needs programs that are not in PATH: {}",
            missing.join(", ")
        );
    }
    Ok(())
}

/// Checks that the lock file of the fuzz targets is current: no other step builds that workspace.
fn fuzz_lock_file() -> anyhow::Result<()> {
    println!("lock file of the fuzz targets");
    let metadata = ["metadata", "--locked", "--format-version", "1"];
    let manifest = ["--manifest-path", fuzz::MANIFEST];
    let args = [&metadata[..], &manifest].concat();
    shell::output(&shell::root(), "cargo", &args)
        .map(drop)
        .context("update it: run the same command without --locked, and commit the file")
}

/// Runs the official Connect conformance suite on the protocol layer with all three protocols.
fn conformance() -> anyhow::Result<()> {
    println!("Connect conformance suite");
    let root = shell::root();
    shell::run(&root, &script(&root, "conformance/run.sh"), &[])
}

/// Tests generated clients in three languages, `buf curl` and grpcurl.
fn clients() -> anyhow::Result<()> {
    println!("generated clients in Go, TypeScript and Python, buf curl, grpcurl");
    // With the features of `cargo test --workspace`, whose artifacts it reuses.
    let test = [
        "test",
        "--workspace",
        "--test",
        "binary",
        "--test",
        "clients",
    ];
    shell::run(&shell::root(), "cargo", &test)
}

/// Tests full disks. Mounts file systems, so it needs root.
fn disk_full() -> anyhow::Result<()> {
    println!("full disks that recover space, on tmpfs and on ext4");
    let root = shell::root();
    // With the features of `cargo test --workspace`, whose artifacts it reuses. Building the test
    // `binary` of `node` builds the platform binary.
    let test = [
        "test",
        "--workspace",
        "--test",
        "binary",
        "--test",
        "disk_full",
    ];
    let one_by_one = ["--", "--test-threads=1"];
    shell::run(&root, "cargo", &[&test[..], &one_by_one].concat())
}

/// Runs every load attack for a short time; checks its outcome and the platform's memory.
fn load_attacks() -> anyhow::Result<()> {
    println!("load attacks next to an honest member");
    let short = Attacks {
        seconds: 5,
        packets: 20_000,
        runs: 1,
        only: Vec::new(),
    };
    // The artifacts of `cargo test --workspace`, as above.
    attacks::run_with(&shell::root(), &["--workspace"], &short)
}

/// Runs the tests named `full` of every crate: events on a real Kafka broker, ledger and outbox on
/// a real PostgreSQL, the platform on both, the connector on anvil and geth. Tests that stop or
/// kill a service start their own.
fn with_services() -> anyhow::Result<()> {
    println!("full tests on a real Kafka broker, a real PostgreSQL, anvil and geth");
    let root = shell::root();
    // Now, and not in a test, whose output is hidden: the build of geth takes minutes.
    for node in ["services/anvil.sh", "services/geth.sh"] {
        shell::run(&root, &script(&root, node), &["install"])?;
    }
    let kafka = script(&root, "services/kafka.sh");
    let postgres = script(&root, "services/postgres.sh");
    let tested = (|| {
        let brokers = start(&root, &kafka)?;
        let url = start(&root, &postgres)?;
        shell::run_with(
            &root,
            "cargo",
            // The test `binary` of `node` builds the platform binary.
            &["test", "--workspace", "--test", "binary", "--test", "full"],
            &[("KAFKA_BROKERS", &brokers), ("POSTGRES_URL", &url)],
        )
    })();
    let stopped = [kafka, postgres].map(|service| shell::run(&root, &service, &["stop"]));
    tested.and(stopped.into_iter().collect())
}

/// Starts a service and returns its address.
fn start(root: &Path, service: &str) -> anyhow::Result<String> {
    let printed = shell::output(root, service, &["start"])?;
    let address = printed
        .lines()
        .last()
        .context("the script printed no address of its service")?;
    Ok(address.trim().to_owned())
}

fn script(root: &Path, name: &str) -> String {
    root.join("tests").join(name).to_string_lossy().into_owned()
}
