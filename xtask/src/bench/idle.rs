//! Orders per second beside idle sessions, compared with those without.

use std::path::Path;

use anyhow::{Context, ensure};

use super::{figures, median, number};
use crate::platform::{self, Running};
use crate::shell;

/// Limits above the load, as in `benches/README.md`.
const SETTINGS: [(&str, &str); 5] = [
    ("PLATFORM_MARKET__THROTTLE_PER_S", "100000"),
    ("PLATFORM_MARKET__USER_THROTTLE_PER_S", "200000"),
    ("PLATFORM_MARKET__JOURNAL_MIB_PER_MINUTE", "1024"),
    ("PLATFORM_TRADING__BOUNDS__SETTLEMENT", "100000000"),
    ("PLATFORM_TRADING__BOUNDS__TRADES", "100000000"),
];
/// Requests of the latency part, which is not compared.
const LATENCY_REQUESTS: &str = "2000";
/// Smallest median ratio of the rate beside idle sessions to the rate without.
const RATIO_MIN: f64 = 0.9;
/// Largest share of refused requests: above it rates are not comparable.
const REFUSED_MAX: f64 = 0.01;

/// Runs the pairs and prints each rate.
///
/// # Errors
/// A build or a run fails, or the idle sessions cost more than a tenth of the rate.
pub fn run(sessions: usize, pairs: usize, seconds: u64) -> anyhow::Result<()> {
    // As the README builds it: the default member alone.
    shell::run(&shell::root(), "cargo", &["build", "--release", "--locked"])?;
    let wire = shell::build_release("benches", "wire")?;
    let (mut without, mut beside) = (Vec::new(), Vec::new());
    for pair in 1..=pairs {
        let order = match pair % 2 {
            1 => [false, true],
            _ => [true, false],
        };
        for has_idle in order {
            let (idle, rates) = match has_idle {
                true => (sessions, &mut beside),
                false => (0, &mut without),
            };
            let rate = orders_per_s(&wire, idle, seconds)
                .with_context(|| format!("pair {pair}, {idle} idle sessions"))?;
            println!("pair {pair}, {idle} idle sessions: {rate:.0} orders/s");
            rates.push(rate);
        }
    }
    let ratios = without.iter().zip(&beside);
    let ratio = median(ratios.map(|(without, beside)| beside / without).collect());
    println!(
        "medians: {:.0} orders/s without, {:.0} beside {sessions} idle sessions; \
         median ratio of the pairs {ratio:.3}",
        median(without),
        median(beside)
    );
    ensure!(ratio >= RATIO_MIN, "the ratio is below {RATIO_MIN}");
    Ok(())
}

/// One run of `wire` on a new platform.
fn orders_per_s(wire: &Path, idle: usize, seconds: u64) -> anyhow::Result<f64> {
    let root = shell::root();
    let folder = shell::target(&root).join("bench-idle");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("remains of an earlier run")?;
    }
    std::fs::create_dir_all(&folder)?;
    let data = folder.join("data");
    let binary = shell::target(&root).join("release/platform");
    let mut program = shell::command(&binary.to_string_lossy());
    program
        .args(["--json", "run", "--data-dir"])
        .arg(&data)
        .envs(SETTINGS)
        .current_dir(&folder)
        .stderr(std::fs::File::create(folder.join("platform.log"))?);
    platform::on_free_ports(&mut program);
    let running = Running::start(program)
        .with_context(|| format!("see platform.log in {}", folder.display()))?;
    let address = |listener: &str| {
        let found = running.ready["listen"][listener].as_str();
        found.with_context(|| format!("the ready line has no address of {listener}"))
    };
    let (idle, seconds) = (idle.to_string(), seconds.to_string());
    let found = figures(
        wire,
        &[
            &["--rpc", address("all")?, "--trading", address("trading")?][..],
            &["--data-dir", &data.to_string_lossy()],
            &["--idle", &idle, "--seconds", &seconds],
            &["--requests", LATENCY_REQUESTS],
        ]
        .concat(),
    )?;
    // Killed, not stopped: the backlog of settlement is of no interest.
    drop(running);
    std::fs::remove_dir_all(&folder).context("the data folder")?;
    let refused = number(&found, "/reject_rate")?;
    ensure!(
        refused <= REFUSED_MAX,
        "the share of refused requests is {refused}"
    );
    number(&found, "/orders_per_s")
}
