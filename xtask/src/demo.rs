//! Runs the README's commands on a release build: its first command, the demonstration, and the
//! tests of both against the same binary.

use anyhow::Context;

use crate::platform::{self, Running};
use crate::shell;

/// Tests of `tests/tests/lifecycle.rs`: a start with the sandbox, the demonstration, the README.
const TESTS: [&str; 3] = ["r349_", "r350_", "the_commands_of_the_readme_work"];

/// Builds with the packages and features of `cargo run`. Runs the README's first command until the
/// platform is ready, then the demonstration in a separate process, then the tests.
///
/// # Errors
/// The build, a start, a stop, the demonstration or a test fails.
pub fn run() -> anyhow::Result<()> {
    let root = shell::root();
    // The default member alone.
    shell::run(&root, "cargo", &["build", "--release", "--locked"])?;
    println!("demo: cargo run --release");
    let folder = shell::target()?.join("demo");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("remains of an earlier run")?;
    }
    let mut first = shell::command("cargo");
    first
        .args(["run", "--release", "--locked", "--", "--json", "run"])
        .arg("--data-dir")
        .arg(&folder)
        .current_dir(&root);
    platform::on_free_ports(&mut first);
    Running::start(first)?.stop("INT")?;
    std::fs::remove_dir_all(&folder).context("the data folder")?;
    println!("demo: cargo run --release -- demo");
    let demo = ["run", "--release", "--locked", "--", "demo"];
    shell::run(&root, "cargo", &demo)?;
    let binary = shell::target()?.join("release/platform");
    let binary = binary.to_string_lossy();
    // `--workspace`: the build reuses the artifacts of `cargo test --workspace`.
    let test = ["test", "--workspace", "--test", "lifecycle", "--"];
    let test = [&test[..], &TESTS[..]].concat();
    shell::run_with(&root, "cargo", &test, &[("PLATFORM_BIN", &*binary)])
}
