//! Compares the orders per second with and without idle sessions.

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{load, median, number};

/// Requests of the latency measurement, which is not compared.
const LATENCY: [&str; 2] = ["--requests", "2000"];
/// Minimum of the median ratio of the rate with idle sessions to the rate without.
const RATIO_MIN: f64 = 0.9;
/// Maximum share of refused requests. Rates above it are not comparable.
const REFUSED_MAX: f64 = 0.01;

/// Runs the pairs and prints each rate.
///
/// # Errors
/// A build or a run fails, or the idle sessions cost more than a tenth of the rate.
pub fn run(sessions: usize, pairs: usize, seconds: u64) -> anyhow::Result<()> {
    let wire = load::build()?;
    let seconds = seconds.to_string();
    let (mut without, mut with_idle) = (Vec::new(), Vec::new());
    for pair in 1..=pairs {
        let order = match pair % 2 {
            1 => [false, true],
            _ => [true, false],
        };
        for has_idle in order {
            let (idle, rates) = match has_idle {
                true => (sessions, &mut with_idle),
                false => (0, &mut without),
            };
            let count = idle.to_string();
            let args = ["--idle", &count, "--seconds", &seconds];
            let rate = load::figures(&wire, &[&args[..], &LATENCY].concat())
                .and_then(|found| orders_per_s(&found))
                .with_context(|| format!("pair {pair}, {idle} idle sessions"))?;
            println!("pair {pair}, {idle} idle sessions: {rate:.0} orders/s");
            rates.push(rate);
        }
    }
    let ratios = without.iter().zip(&with_idle);
    let ratio = median(
        ratios
            .map(|(without, with_idle)| with_idle / without)
            .collect(),
    );
    println!(
        "medians: {:.0} orders/s without, {:.0} with {sessions} idle sessions; \
         median ratio of the pairs {ratio:.3}",
        median(without),
        median(with_idle)
    );
    ensure!(ratio >= RATIO_MIN, "the ratio is below {RATIO_MIN}");
    Ok(())
}

fn orders_per_s(found: &Value) -> anyhow::Result<f64> {
    let refused = number(found, "/reject_rate")?;
    ensure!(
        refused <= REFUSED_MAX,
        "the share of refused requests is {refused}"
    );
    number(found, "/orders_per_s")
}
