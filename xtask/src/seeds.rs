//! Runs the seeded tests with fresh seeds. The ordinary suite has fixed seeds, so it repeats the
//! same cases in every run.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::shell;

/// Test targets of one run of cargo, and prefixes of the tests to run. Without a prefix all tests
/// run.
struct Suite {
    targets: &'static [&'static str],
    tests: &'static [&'static str],
}

/// All tests that read `TESTS_SEED` or `PROPTEST_RNG_SEED`. The test `binary` of `node` builds the
/// platform binary.
const SUITES: [Suite; 4] = [
    // Comparisons with naive books and naive settlement state; folds, layouts, batch plans, power
    // losses.
    Suite {
        targets: &[
            "twin",
            "fold",
            "layouts",
            "batch_plans",
            "settle",
            "checkpoint",
            "powerloss",
        ],
        tests: &[],
    },
    // Property tests.
    Suite {
        targets: &["--lib"],
        tests: &[
            "text_round_trips",
            "fills_never_exceed_the_first_reserve",
            "finds_the_same_places_as_a_sorted_set",
            "pops_in_the_order_of_a_sorted_set",
            "records_round_trip",
            "any_body_is_read_or_refused",
            "random_sequences_of_calls_agree_with_the_twin",
        ],
    },
    // Random walks of the ledger; sequences and lost calls of the CFA service.
    Suite {
        targets: &["boundary", "service"],
        tests: &[
            "r214_random_walks_agree_with_the_naive_twin",
            "r030_holders_chain_and_ledger_agree_after_any_sequence",
            "r091_chain_ledger_and_bank_agree_after_random_failures",
        ],
    },
    // Crashes and garbage on real processes; the journal's power losses.
    Suite {
        targets: &[
            "binary",
            "crash",
            "data_folder",
            "chaos",
            "refusals",
            "schema_fuzz",
            "money_attacks",
            "sagas",
        ],
        tests: &[
            "the_block_of_a_user_and_its_end_killed_at_any_moment_reach_ledger_and_market",
            "kill_",
            "a_power_loss_loses_nothing_that_was_reported_durable",
            "the_same_power_losses_without_the_sync_are_detected",
            "a_first_start_that_was_killed_anywhere_is_repeated",
            "r343_clients_receive_all_messages_under_chaos",
            "garbage_on_the_trading_port_ends_that_connection",
            "every_method_refuses_mutated_requests_without_a_fault",
            "r071_redemption_order_transfer_and_block_at_once_spend_the_money_once",
        ],
    },
];

/// Runs every suite with one fresh seed after the other; no seed starts after `minutes`. A given
/// seed runs once. Each seed is printed before its run.
///
/// # Errors
/// A test fails; the message names the seed.
pub fn run(minutes: u64, given: Option<u64>) -> anyhow::Result<()> {
    let limit = Duration::from_secs(60 * minutes);
    let begun = Instant::now();
    loop {
        let seed = given.unwrap_or_else(fresh);
        println!("seeds: TESTS_SEED={seed} ({} s)", begun.elapsed().as_secs());
        for suite in &SUITES {
            run_suite(suite, seed)
                .with_context(|| format!("repeat it with `cargo xtask seeds --seed {seed}`"))?;
        }
        if given.is_some() || begun.elapsed() >= limit {
            return Ok(());
        }
    }
}

fn run_suite(suite: &Suite, seed: u64) -> anyhow::Result<()> {
    let seed = seed.to_string();
    let environment = [
        ("TESTS_SEED", seed.as_str()),
        ("PROPTEST_RNG_SEED", seed.as_str()),
    ];
    shell::run_with(&shell::root(), "cargo", &arguments(suite), &environment)
}

/// Arguments of cargo. `--workspace`: the run reuses the artifacts of `cargo test --workspace`.
fn arguments(suite: &Suite) -> Vec<&'static str> {
    let mut arguments = vec!["test", "--workspace"];
    for target in suite.targets {
        if !target.starts_with("--") {
            arguments.push("--test");
        }
        arguments.push(target);
    }
    if !suite.tests.is_empty() {
        arguments.push("--");
        arguments.extend(suite.tests);
    }
    arguments
}

/// A random seed of 32 bits, short enough to type. Tests use it and the following numbers.
fn fresh() -> u64 {
    RandomState::new().hash_one(std::process::id()) >> 32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::files;

    #[test]
    fn fresh_seeds_differ_and_are_short() {
        let seeds: BTreeSet<u64> = (0..100).map(|_| fresh()).collect();
        assert!(seeds.len() > 90, "{seeds:?}");
        assert!(seeds.iter().all(|seed| *seed <= u64::from(u32::MAX)));
    }

    #[test]
    fn targets_and_tests_become_arguments() {
        let suite = Suite {
            targets: &["--lib", "twin"],
            tests: &["one", "two"],
        };
        let wanted = [
            "test",
            "--workspace",
            "--lib",
            "--test",
            "twin",
            "--",
            "one",
            "two",
        ];
        assert_eq!(arguments(&suite), wanted);
    }

    /// Target of a file: `--lib`, or the name of an integration test.
    fn target_of(path: &str) -> String {
        match path.split_once("/tests/") {
            Some((package, rest)) if !package.contains("/src/") => {
                let name = rest.split('/').next().unwrap_or(rest);
                name.trim_end_matches(".rs").to_owned()
            }
            _ => "--lib".to_owned(),
        }
    }

    #[test]
    fn every_file_with_a_seed_of_the_environment_is_in_a_suite() {
        let root = shell::root();
        let run: BTreeSet<String> = SUITES
            .iter()
            .flat_map(|suite| suite.targets)
            .map(|target| (*target).to_owned())
            .collect();
        let (mut tests, mut seeded) = (String::new(), 0);
        for path in files::below(&root, &["rs"]).expect("the sources") {
            let text = std::fs::read_to_string(root.join(&path)).expect("readable");
            let path = path.to_string_lossy().into_owned();
            // The attacks and the maturity of a large issue have their own tasks and run for
            // minutes.
            let has_task = path.contains("/attacks/") || path == "tests/tests/maturity.rs";
            let is_other = path.starts_with("xtask/") || has_task;
            if !is_other && (text.contains("seed::seed") || text.contains("proptest! {")) {
                assert!(run.contains(&target_of(&path)), "{path} is in no suite");
                seeded += 1;
            }
            if !path.starts_with("xtask/") {
                tests.push_str(&text);
            }
        }
        assert!(seeded > 12, "only {seeded} files have a seed");
        for test in SUITES.iter().flat_map(|suite| suite.tests) {
            assert!(tests.contains(&format!("fn {test}")), "no test {test}");
        }
    }
}
