//! Runs a public matching-engine benchmark harness on `engine`: its conformance cases and its five
//! scenarios with seed 23. The hashes of the scenarios' reports must equal the harness's reference
//! hashes.
//!
//! The harness is the public repository flash1-dev/matching-engine-benchmark. The caller provides a
//! checkout built as its documents describe: `harness`, `generator`, the three adapters that its
//! conformance gate compares with, and the two that its state audit replays. This task builds only
//! the adapter in `benches/harness`. In the checkout only the files that the harness writes change
//! (workloads, `results/`).

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::shell;

const SCENARIOS: [&str; 5] = ["static", "normal", "swing-25", "swing-40", "flash-crash"];
/// Seed and number of orders whose hashes the harness publishes.
const SEED: &str = "23";
const ORDERS: &str = "1000000";
/// Cases of the conformance gate.
const CASES: usize = 34;

/// Required files of the checkout, and how to obtain them.
const PARTS: &[(&str, &str)] = &[
    ("harness", "build the harness as its README describes"),
    ("generator", "build the harness as its README describes"),
    (
        "scripts/conformance_check.py",
        "this is not a checkout of the harness",
    ),
    (
        "reference/correctness_hash.txt",
        "this is not a checkout of the harness",
    ),
    (
        "cpp_orderbook_adapter.so",
        "build the adapters that docs/CONFORMANCE.md names",
    ),
    (
        "llc993_adapter.so",
        "build the adapters that docs/CONFORMANCE.md names",
    ),
    (
        "hroptatyr_clob_adapter.so",
        "build the adapters that docs/CONFORMANCE.md names",
    ),
    (
        "liquibook_adapter.so",
        "build the baselines as the README describes",
    ),
    (
        "quantcup_adapter.so",
        "build the baselines as the README describes",
    ),
];

/// Runs the gate and the scenarios of the checkout `source` on the given cores.
///
/// # Errors
/// The checkout is incomplete, or a case or a hash differs.
pub fn run(source: &Path, matcher_core: u32, drainer_core: u32) -> anyhow::Result<()> {
    let source = source
        .canonicalize()
        .with_context(|| format!("--source {}: no such folder", source.display()))?;
    for (part, how) in PARTS {
        ensure!(
            source.join(part).is_file(),
            "{} has no {part}: {how}",
            source.display()
        );
    }
    let adapter = build()?;
    let adapter = adapter
        .to_str()
        .context("the target folder's path is not UTF-8")?;
    conformance(&source, adapter)?;
    let cores = [matcher_core, drainer_core].map(|core| core.to_string());
    for scenario in SCENARIOS {
        let (hash, speed) = perf(&source, adapter, scenario, &cores)?;
        println!("{scenario}: hash {hash} matches the reference; {speed}");
    }
    println!(
        "harness: {CASES} of {CASES} cases, {0} of {0} hashes",
        SCENARIOS.len()
    );
    Ok(())
}

fn build() -> anyhow::Result<PathBuf> {
    let root = shell::root();
    shell::run(
        &root,
        "cargo",
        &["build", "--release", "--package", "harness"],
    )?;
    Ok(shell::target()?.join("release/libharness.so"))
}

/// Runs the conformance gate, which compares reports and book of each case with those of other
/// engines. The scenarios' own audit of the book is skipped: its reference engine is slower than
/// the harness's timeout.
fn conformance(source: &Path, adapter: &str) -> anyhow::Result<()> {
    // The exit code is not sufficient: it is 0 even if a case could not be compared.
    let output = shell::stdout_of(
        source,
        "python3",
        &["scripts/conformance_check.py", adapter],
    )?;
    print!("{output}");
    match check_gate(&output) {
        Ok(()) => Ok(()),
        Err(why) => bail!("conformance: {why}"),
    }
}

/// Checks that the gate's output is a pass of every case; the error has the reason.
fn check_gate(output: &str) -> Result<(), String> {
    let cases: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("report="))
        .collect();
    if cases.len() != CASES {
        return Err(format!("{} cases ran, {CASES} expected", cases.len()));
    }
    // `-`: the case is too long for the state audit.
    let is_pass = |line: &&&str| {
        let word = |key: &str| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix(key))
        };
        word("report=") == Some("PASS") && matches!(word("state="), Some("PASS" | "-"))
    };
    let passed = cases.iter().filter(is_pass).count();
    let is_conformant = output
        .lines()
        .any(|line| line.starts_with("VERDICT:") && line.contains(": CONFORMANT"));
    if passed == CASES && is_conformant {
        return Ok(());
    }
    Err(format!("{passed} of {CASES} cases pass"))
}

/// One timed run: the hash of its reports, and its throughput.
fn perf(
    source: &Path,
    adapter: &str,
    scenario: &str,
    cores: &[String; 2],
) -> anyhow::Result<(String, String)> {
    let args = [
        &[
            "--engine",
            adapter,
            "--scenario",
            scenario,
            "--mode",
            "perf",
        ][..],
        &["--seed", SEED, "--count", ORDERS],
        &["--matcher-core", &cores[0], "--drainer-core", &cores[1]],
    ];
    let output = shell::stdout_of(source, "./harness", &args.concat())?;
    let hash = field(&output, "Computed hash:").context("the harness computed no hash")?;
    let expected = field(&output, "Expected hash:").context("the harness has no reference hash")?;
    ensure!(
        hash == expected && field(&output, "Status:") == Some("PASS"),
        "{scenario}: hash {hash} differs from the reference {expected}"
    );
    let speed = field(&output, "Throughput:").unwrap_or("no throughput");
    Ok((hash.to_owned(), speed.to_owned()))
}

/// Text after `name` at the start of a line.
fn field<'a>(output: &'a str, name: &str) -> Option<&'a str> {
    output
        .lines()
        .find_map(|line| Some(line.trim().strip_prefix(name)?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(state: &str, cases: usize, verdict: &str) -> String {
        let mut output = "=== conformance: x ===\n".to_owned();
        for case in 0..cases {
            output += &format!("  case_{case} report=PASS  state={state}\n");
        }
        output + "VERDICT: x: " + verdict + "\n"
    }

    #[test]
    fn the_gate_passes_only_if_every_case_passes() {
        assert_eq!(check_gate(&gate("PASS", CASES, "CONFORMANT (..)")), Ok(()));
        assert_eq!(check_gate(&gate("-", CASES, "CONFORMANT (..)")), Ok(()));
        for output in [
            gate("SKIP", CASES, "CONFORMANT (..)"),
            gate("FAIL", CASES, "NON-CONFORMANT"),
            gate("PASS", CASES, "NON-CONFORMANT"),
            gate("PASS", CASES - 1, "CONFORMANT (..)"),
            gate("PASS", CASES, "CONFORMANT (..)").replacen("report=PASS", "report=SKIP", 1),
            String::new(),
        ] {
            assert!(check_gate(&output).is_err(), "{output}");
        }
    }

    #[test]
    fn fields_are_read_by_their_name() {
        let output = "  Computed hash: ab\n  Status: PASS\n";
        assert_eq!(field(output, "Computed hash:"), Some("ab"));
        assert_eq!(field(output, "Status:"), Some("PASS"));
        assert_eq!(field(output, "Expected hash:"), None);
    }

    #[test]
    fn a_folder_that_is_not_a_checkout_is_refused_with_the_missing_file() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let error = run(folder.path(), 0, 1).expect_err("the folder is empty");
        assert!(
            error
                .to_string()
                .contains("has no harness: build the harness"),
            "{error}"
        );
        let missing =
            run(&folder.path().join("none"), 0, 1).expect_err("the folder does not exist");
        assert!(missing.to_string().contains("no such folder"), "{missing}");
    }
}
