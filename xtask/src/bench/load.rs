//! Runs `wire` against a new platform.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use crate::platform::{self, Running};
use crate::shell;

/// Limits of members above the load, as in `docs/measurements/trading-gateway.md`.
const LIMITS: [(&str, &str); 3] = [
    ("PLATFORM_MARKET__THROTTLE_PER_S", "100000"),
    ("PLATFORM_MARKET__USER_THROTTLE_PER_S", "200000"),
    ("PLATFORM_MARKET__JOURNAL_MIB_PER_MINUTE", "1024"),
];

/// Hot thread and journal share the second of two cores, on which `wire` has its echo server: its
/// client spins on the first while it measures latencies, and the journal would interrupt it there.
const CORES: [(&str, &str); 2] = [
    ("PLATFORM_TRADING__CORE", "1"),
    ("PLATFORM_TRADING__JOURNAL_CORE", "1"),
];

/// Bounds on settlement's lag that no run reaches.
const BOUNDS: [(&str, &str); 2] = [
    ("PLATFORM_TRADING__BOUNDS__SETTLEMENT", "100000000"),
    ("PLATFORM_TRADING__BOUNDS__TRADES", "100000000"),
];

/// Builds the platform, as the README does, and `wire`. Returns the path of `wire`.
///
/// # Errors
/// A build fails.
pub fn build() -> anyhow::Result<PathBuf> {
    // The default member alone.
    shell::run(&shell::root(), "cargo", &["build", "--release", "--locked"])?;
    shell::build_release("benches", "wire")
}

/// Figures of one run on a new platform.
///
/// # Errors
/// The platform does not start, or the run fails.
pub fn figures(wire: &Path, args: &[&str]) -> anyhow::Result<Value> {
    figures_then(wire, args, |_, _, _| Ok(()))
}

/// As [`figures`], with the default bounds on settlement's lag.
///
/// # Errors
/// As [`figures`].
pub fn figures_within_bounds(wire: &Path, args: &[&str]) -> anyhow::Result<Value> {
    figures_within_bounds_then(wire, args, |_, _, _| Ok(()))
}

/// As [`figures_then`], with the default bounds on settlement's lag.
///
/// # Errors
/// As [`figures_then`].
pub fn figures_within_bounds_then(
    wire: &Path,
    args: &[&str],
    after: impl FnOnce(&Value, &Path, &str) -> anyhow::Result<()>,
) -> anyhow::Result<Value> {
    run(wire, args, &[], after)
}

/// As [`figures`]; then calls `after` with the figures, the path of the platform's program and its
/// RPC address.
///
/// # Errors
/// As [`figures`], and the errors of `after`.
pub fn figures_then(
    wire: &Path,
    args: &[&str],
    after: impl FnOnce(&Value, &Path, &str) -> anyhow::Result<()>,
) -> anyhow::Result<Value> {
    run(wire, args, &BOUNDS, after)
}

fn run(
    wire: &Path,
    args: &[&str],
    bounds: &[(&str, &str)],
    after: impl FnOnce(&Value, &Path, &str) -> anyhow::Result<()>,
) -> anyhow::Result<Value> {
    let folder = shell::target()?.join("bench-wire");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("remains of an earlier run")?;
    }
    std::fs::create_dir_all(&folder)?;
    let data = folder.join("data");
    let binary = shell::target()?.join("release/platform");
    let has_two_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 2);
    let mut program = shell::command(&binary.to_string_lossy());
    program
        .args(["--json", "run", "--data-dir"])
        .arg(&data)
        .envs(LIMITS)
        .envs(CORES.into_iter().filter(|_| has_two_cores))
        .envs(bounds.iter().copied())
        .current_dir(&folder)
        .stderr(std::fs::File::create(folder.join("platform.log"))?);
    platform::on_free_ports(&mut program);
    let running = Running::start(program)
        .with_context(|| format!("see platform.log in {}", folder.display()))?;
    let address = |listener: &str| {
        let found = running.ready["listen"][listener].as_str();
        found.with_context(|| format!("the ready line has no address of {listener}"))
    };
    let found = super::figures(
        wire,
        &[
            &["--rpc", address("all")?, "--trading", address("trading")?][..],
            &["--data-dir", &data.to_string_lossy()],
            args,
        ]
        .concat(),
    )?;
    after(&found, &binary, address("all")?)?;
    // Killed, not stopped: a stop would wait for settlement's backlog.
    drop(running);
    std::fs::remove_dir_all(&folder).context("the data folder")?;
    Ok(found)
}
