//! The sagas that `tests/tests/issue_sagas.rs` kills at each step.

use crate::shell;

/// Runs them on a debug build.
///
/// # Errors
/// A saga does not end once, or the proof finds a difference.
pub fn run() -> anyhow::Result<()> {
    // With the features of `cargo test --workspace`, whose artifacts it reuses. Building the test
    // `binary` of `node` builds the platform binary that the tests start.
    let test = [
        "test",
        "--workspace",
        "--test",
        "binary",
        "--test",
        "issue_sagas",
    ];
    shell::run(&shell::root(), "cargo", &test)
}
