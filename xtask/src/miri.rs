//! The book's rules under Miri, which detects undefined behaviour. `engine` has all its `unsafe` in
//! `slab.rs`, the only `unsafe` of the trading path.
//!
//! Needs a nightly toolchain with Miri: `rustup toolchain install nightly --component miri
//! rust-src`.

use crate::shell;

/// Runs the tests of that file and the scripted rules of the engine under Miri; the seeded
/// comparison with the twin would take hours.
pub fn run() -> anyhow::Result<()> {
    for which in [&["--lib", "--", "slab"][..], &["--test", "rules"]] {
        let words = [&["+nightly", "miri", "test", "--package", "engine"], which].concat();
        shell::run_with(
            &shell::root(),
            "cargo",
            &words,
            &[("CARGO_TARGET_DIR", "target/miri")],
        )?;
    }
    Ok(())
}
