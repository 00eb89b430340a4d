//! Redemption of a large issue at its maturity on a release platform, and the full check of its
//! stores.

use crate::shell;

/// Runs `tests/tests/maturity.rs` on the platform built as the README does. Prints the rates of a
/// tenth of the holders and of all, and the rows per second of the full check.
///
/// # Errors
/// A build fails, a holder is not paid exactly, an order is not cancelled, the proof or the full
/// check finds a difference, or the run takes longer than `minutes`.
pub fn run(holders: usize, seed: u64, minutes: u64) -> anyhow::Result<()> {
    let root = shell::root();
    // The default member alone.
    shell::run(&root, "cargo", &["build", "--release", "--locked"])?;
    let binary = shell::target()?.join("release/platform");
    let settings = [
        ("PLATFORM_BIN", binary.to_string_lossy().into_owned()),
        ("MATURITY_HOLDERS", holders.to_string()),
        ("MATURITY_MINUTES", minutes.to_string()),
        ("TESTS_SEED", seed.to_string()),
    ];
    let settings = settings
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    // `--workspace`: the build reuses the artifacts of `cargo test --workspace`.
    let test = ["test", "--workspace", "--test", "maturity", "--"];
    let test = [&test[..], &["--nocapture"]].concat();
    shell::run_with(&root, "cargo", &test, &settings)
}
