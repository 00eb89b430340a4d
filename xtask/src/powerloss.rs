//! Power losses of the journal and the embedded log over many seeds; the ordinary suite runs some
//! hundreds.

use crate::shell;

/// Runs `journal/tests/powerloss.rs` and `events/tests/powerloss.rs` over `seeds` seeds.
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
            "--package",
            "events",
            "--test",
            "powerloss",
            "--",
            "--nocapture",
        ],
        &[("POWERLOSS_SEEDS", &seeds)],
    )
}
