//! Load attacks next to an honest member. `cargo xtask attacks` runs them long, `cargo xtask full`
//! runs them for 5 s each.

use std::time::Duration;

use tests::attacks::{Kind, Plan, run};

/// A number from an environment variable.
fn env_number(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else {
        return default;
    };
    text.parse()
        .unwrap_or_else(|_| panic!("{name}={text} is not a number"))
}

/// `ATTACKS_SECONDS`, `ATTACKS_PACKETS` (per second), `ATTACKS_RUNS` and `ATTACKS_ONLY` (names,
/// comma-separated) configure the run.
// rows: R341
#[test]
fn r341_no_load_of_one_member_or_stranger_takes_the_market_from_others() {
    let only = std::env::var("ATTACKS_ONLY").unwrap_or_default();
    let names: Vec<&str> = only.split(',').filter(|name| !name.is_empty()).collect();
    let all = Kind::ATTACKS;
    for name in &names {
        let known = all.map(Kind::name);
        assert!(
            known.contains(name),
            "unknown attack {name} in ATTACKS_ONLY: the attacks are {known:?}"
        );
    }
    let is_wanted = |kind: &Kind| names.is_empty() || names.contains(&kind.name());
    let plan = Plan {
        attacks: all.into_iter().filter(is_wanted).collect(),
        duration: Duration::from_secs(env_number("ATTACKS_SECONDS", 5)),
        packets_per_s: env_number("ATTACKS_PACKETS", 20_000),
        runs: usize::try_from(env_number("ATTACKS_RUNS", 1)).expect("few"),
    };
    let verdicts = tests::shared::run(run(&plan));
    let failed = verdicts
        .iter()
        .filter(|verdict| !verdict.violations.is_empty());
    let failed: Vec<String> = failed.map(ToString::to_string).collect();
    assert!(failed.is_empty(), "{}", failed.concat());
}
