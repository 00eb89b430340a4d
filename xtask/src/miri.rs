//! The book's rules under Miri, which sees undefined behaviour: `engine` has one `unsafe` block (`slab.rs`).
//!
//! Needs a nightly toolchain with Miri: `rustup toolchain install nightly --component miri rust-src`.

use crate::shell;

/// Runs the scripted rules of the engine under Miri; the seeded comparison with the twin would take hours there.
pub fn run() -> anyhow::Result<()> {
    shell::run_with(
        &shell::root(),
        "cargo",
        &[
            "+nightly",
            "miri",
            "test",
            "--package",
            "engine",
            "--test",
            "rules",
        ],
        &[("CARGO_TARGET_DIR", "target/miri")],
    )
}
