//! The journal's power losses over many seeds; the ordinary suite runs some hundreds.

use crate::shell;

/// Runs `journal/tests/powerloss.rs` over `seeds` seeds.
pub fn run(seeds: u64) -> anyhow::Result<()> {
    let seeds = seeds.to_string();
    shell::run_with(
        &shell::root(),
        "cargo",
        &[
            "test",
            "--release",
            "--package",
            "journal",
            "--test",
            "powerloss",
            "--",
            "--nocapture",
        ],
        &[("POWERLOSS_SEEDS", &seeds)],
    )
}
