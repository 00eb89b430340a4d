//! Seeds of tests that draw at random: fixed, unless `TESTS_SEED` gives another (`cargo xtask
//! seeds`). Tests of crates without this crate as a dependency include the file.

use std::ops::Range;

/// `TESTS_SEED`, else the test's own seed. Prints it: a failed test shows its output.
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

/// As many seeds as the test's own, from `TESTS_SEED` on if it is set.
///
/// # Panics
/// If `TESTS_SEED` is not a number.
#[allow(dead_code, reason = "some tests include this file for one seed")]
pub fn seeds(own: Range<u64>) -> Range<u64> {
    let first = seed(own.start);
    first..first + (own.end - own.start)
}
