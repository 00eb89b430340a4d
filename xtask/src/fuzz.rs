//! Runs the fuzz targets of the decoders (`fuzz/src/lib.rs` lists them) under libFuzzer, with the
//! workspace's compiler. The coverage instrumentation is an LLVM pass, so neither a nightly
//! toolchain nor a sanitizer is needed.
//!
//! Needs a C++ compiler: Cargo fetches libFuzzer as C++ source in the crate `libfuzzer-sys`.
//! Nothing is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::shell;

/// A separate workspace: only this task needs libFuzzer.
pub const MANIFEST: &str = "fuzz/libfuzzer/Cargo.toml";

/// LLVM instrumentation of every crate: edge counters, their addresses, comparison operands.
const COVERAGE: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Longest input: fits a journal segment or a checkpoint of a small market.
const INPUT_BYTES_MAX: &str = "16384";
/// Timeout per input in seconds.
const TIMEOUT_S: &str = "10";
const MEMORY_MB: &str = "2048";

/// Runs the targets one after the other for `seconds` each: all of them, or the named ones.
///
/// # Errors
/// A compiler is missing, a target is unknown, or an input fails. The error names the input's file.
pub fn run(seconds: u64, names: &[String]) -> anyhow::Result<()> {
    let root = shell::root();
    let fuzzer = build(&root)?;
    let all = shell::output_with(&root, &fuzzer.to_string_lossy(), &[], &[("FUZZ_LIST", "1")])?;
    let all: Vec<&str> = all.lines().collect();
    for name in names {
        ensure!(
            all.contains(&&**name),
            "unknown target `{name}`: the targets are {}",
            all.join(", ")
        );
    }
    for name in all
        .iter()
        .filter(|name| names.is_empty() || names.iter().any(|wanted| wanted == *name))
    {
        fuzz(&root, &fuzzer, name, seconds)?;
    }
    Ok(())
}

/// Builds all targets as one program and returns its path.
fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let works = Command::new(&compiler)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    ensure!(
        works,
        "libFuzzer needs a C++ compiler: `{compiler}` does not run; set CXX to another"
    );
    let host = shell::host(root)?;
    // A separate folder: its flags differ from those of every other build.
    let target = shell::target()?.join("fuzz");
    // With `--target`, RUSTFLAGS do not apply to build scripts and macros.
    let args = [
        "build",
        "--locked",
        "--release",
        "--manifest-path",
        MANIFEST,
        "--target",
        &host,
    ];
    let folder = target.to_string_lossy();
    let environment = [
        ("RUSTFLAGS", &*COVERAGE.join(" ")),
        ("CARGO_TARGET_DIR", &*folder),
    ];
    shell::run_with(root, "cargo", &args, &environment)?;
    Ok(target.join(host).join("release/fuzz"))
}

/// Runs one target on its corpus, which is kept for the next run.
fn fuzz(root: &Path, fuzzer: &Path, name: &str, seconds: u64) -> anyhow::Result<()> {
    let folder = |kind: &str| -> anyhow::Result<String> {
        let folder = shell::target()?.join("fuzz").join(kind).join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder.to_string_lossy().into_owned())
    };
    let (corpus, seeds, found) = (folder("corpus")?, folder("seeds")?, folder("found")?);
    let program = fuzzer.to_string_lossy();
    let target = ("FUZZ_TARGET", name);
    shell::run_with(root, &program, &[], &[target, ("FUZZ_SEEDS", &seeds)])?;
    let committed = root
        .join("fuzz/seeds")
        .join(name)
        .to_string_lossy()
        .into_owned();
    let mut folders = vec![&*corpus, &*seeds];
    if Path::new(&committed).is_dir() {
        folders.push(&committed);
    }
    let (time, prefix) = (
        format!("-max_total_time={seconds}"),
        format!("-artifact_prefix={found}/"),
    );
    let limits = [
        format!("-max_len={INPUT_BYTES_MAX}"),
        format!("-timeout={TIMEOUT_S}"),
        format!("-rss_limit_mb={MEMORY_MB}"),
    ];
    let mut args = vec![&*time, &*prefix, "-print_final_stats=1"];
    args.extend(limits.iter().map(String::as_str));
    args.extend(folders);
    println!("fuzz: {name}, {seconds} s");
    let output = Command::new(fuzzer)
        .args(&args)
        .env(target.0, target.1)
        .current_dir(root)
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    // libFuzzer writes to standard error only.
    let log = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        println!("fuzz: {name}: {}", summary(&log));
        return Ok(());
    }
    let last: Vec<&str> = log.lines().rev().take(30).collect();
    last.iter().rev().for_each(|line| println!("{line}"));
    bail!("{name}: {}; ended with {}", artifact(&log), output.status)
}

/// Summary of libFuzzer's final statistics.
fn summary(log: &str) -> String {
    let of = |name: &str| {
        let line = log
            .lines()
            .find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name));
        line.map_or("?", |line| line.trim_start_matches(':').trim())
            .to_owned()
    };
    let edges = log
        .lines()
        .rev()
        .find_map(|line| line.split_once(" cov: ")?.1.split(' ').next());
    format!(
        "{} executions, {} per second, {} edges, {} MB, no finding",
        of("number_of_executed_units"),
        of("average_exec_per_sec"),
        edges.unwrap_or("?"),
        of("peak_rss_mb"),
    )
}

/// Path of the failing input.
fn artifact(log: &str) -> String {
    let path = log
        .lines()
        .find_map(|line| Some(line.split_once("Test unit written to ")?.1.trim()));
    path.map_or_else(
        || "no input was written".to_owned(),
        |path| {
            format!(
                "the input is {path}: copy it to `fuzz/seeds/<target>` so that the tests run it"
            )
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libfuzzer_output_is_parsed() {
        let log = "\
#2\tINITED cov: 10 ft: 11 corp: 1/1b exec/s: 0 rss: 30Mb
#1234\tDONE   cov: 210 ft: 311 corp: 9/100b lim: 4 exec/s: 617 rss: 31Mb
stat::number_of_executed_units: 1234
stat::average_exec_per_sec:     617
stat::peak_rss_mb:              31
";
        assert_eq!(
            summary(log),
            "1234 executions, 617 per second, 210 edges, 31 MB, no finding"
        );
        let crash = "artifact_prefix='/f/'; Test unit written to /f/crash-1\nBase64: AA==\n";
        assert!(artifact(crash).contains("/f/crash-1"));
        assert_eq!(artifact(""), "no input was written");
    }
}
