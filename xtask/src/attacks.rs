//! Load attacks on a release platform next to an honest member; the full suite runs 5 s of each.

use std::path::Path;

use crate::shell;

/// Parameters of the attacks.
pub struct Attacks {
    /// Duration of each run.
    pub seconds: u64,
    /// Packets per second.
    pub packets: u64,
    /// Runs per attack.
    pub runs: usize,
    /// Names of attacks; empty = all.
    pub only: Vec<String>,
}

/// Runs `tests/tests/attacks.rs` with a release build.
///
/// # Errors
/// A bound is broken; latency bounds are only printed below 30 s.
pub fn run(attacks: &Attacks) -> anyhow::Result<()> {
    // Building the test `binary` of `node` builds the platform binary that the attacks start.
    let packages = ["--release", "--package", "node", "--package", "tests"];
    run_with(&shell::root(), &packages, attacks)
}

/// As [`run`], with these arguments that select packages and profile.
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
