//! Runs the book's rules under Miri, which detects undefined behaviour. All `unsafe` code of
//! `engine` is in `slab.rs`.
//!
//! Needs a nightly toolchain with Miri: `rustup toolchain install nightly --component miri
//! rust-src`.

use crate::shell;

/// Runs the tests of `slab.rs` and the scripted rules of the engine under Miri. The seeded
/// comparison with the naive book is left out: it would take hours.
pub fn run() -> anyhow::Result<()> {
    let root = shell::root();
    let target = shell::target()?.join("miri");
    let target = target.to_string_lossy();
    for which in [&["--lib", "--", "slab"][..], &["--test", "rules"]] {
        let words = [&["+nightly", "miri", "test", "--package", "engine"], which].concat();
        shell::run_with(&root, "cargo", &words, &[("CARGO_TARGET_DIR", &*target)])?;
    }
    Ok(())
}
