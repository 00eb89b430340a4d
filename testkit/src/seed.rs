//! Seeds of randomised tests: fixed, unless `TESTS_SEED` is set (`cargo xtask seeds`). Tests of
//! crates that do not depend on this crate include the file.

use std::ops::Range;

/// Returns `TESTS_SEED`, or else the test's own seed. Prints the seed, because a failed test shows
/// its output.
///
/// # Panics
/// If `TESTS_SEED` is not a number.
pub fn seed(own: u64) -> u64 {
    let seed = std::env::var("TESTS_SEED").map_or(own, |text| {
        let number = text.parse();
        number.unwrap_or_else(|_| panic!("TESTS_SEED={text} is not a number"))
    });
    println!("TESTS_SEED={seed}");
    seed
}

/// The test's own seeds, or the same number from `TESTS_SEED` on if it is set.
///
/// # Panics
/// If `TESTS_SEED` is not a number.
#[allow(dead_code, reason = "some tests include this file for one seed")]
pub fn seeds(own: Range<u64>) -> Range<u64> {
    let first = seed(own.start);
    first..first + (own.end - own.start)
}
