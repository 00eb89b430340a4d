//! Load attacks on a release platform beside an honest member: the full suite runs 5 s of each.

use std::path::Path;

use crate::shell;

/// How the attacks are run.
pub struct Attacks {
    /// Of each run.
    pub seconds: u64,
    /// Per second.
    pub packets: u64,
    /// Of each attack.
    pub runs: usize,
    /// Names; empty: all.
    pub only: Vec<String>,
}

/// Runs `tests/tests/attacks.rs` with a release build.
///
/// # Errors
/// A bound is broken; below 30 s those of latency are only printed.
pub fn run(attacks: &Attacks) -> anyhow::Result<()> {
    // A test of `node` brings the binary along, which the attacks start.
    let packages = ["--release", "--package", "node", "--package", "tests"];
    run_with(&shell::root(), &packages, attacks)
}

/// The same with these artifacts.
///
/// # Errors
/// As [`run`].
pub fn run_with(root: &Path, packages: &[&str], attacks: &Attacks) -> anyhow::Result<()> {
    let tests = ["--test", "binary", "--test", "attacks", "--", "--nocapture"];
    let args = [&["test"], packages, &tests[..]].concat();
    let settings = [
        ("ATTACKS_SECONDS", attacks.seconds.to_string()),
        ("ATTACKS_PACKETS", attacks.packets.to_string()),
        ("ATTACKS_RUNS", attacks.runs.to_string()),
        ("ATTACKS_ONLY", attacks.only.join(",")),
    ];
    let settings = settings
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    shell::run_with(root, "cargo", &args, &settings)
}
