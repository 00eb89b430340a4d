//! Checks that lags and memory stay flat at a fixed rate.

use anyhow::ensure;
use serde_json::Value;

use super::{check_duration, load, number};
use crate::shell;

/// Lag of settlement that counts as flat whatever it was before.
const SETTLEMENT_LAG_S: f64 = 2.0;
/// Growth of settlement's lag from the second tenth of the run to the last, as a factor.
const LAG_GROWTH: f64 = 1.5;
/// Lag at which the history counts as current.
const HISTORY_LAG_S: f64 = 1.0;
/// Growth of resident memory from the first half of the run to the last tenth, as a factor.
const MEMORY_GROWTH: f64 = 1.1;
/// Time that settlement has after the run before the proof judges, in seconds.
const DRAIN_S: &str = "600";
/// Share of requests that may be refused.
const REFUSED_MAX: f64 = 0.01;
/// Share of the rate that the platform must answer.
const ANSWERED_MIN: f64 = 0.99;

/// Runs `wire` at a rate with the default bounds on settlement's lag, then proves the balances.
///
/// # Errors
/// A build or the run fails, the flow ends early, the proof finds a difference, or something is not
/// flat.
pub fn run(rate: u64, seconds: u64) -> anyhow::Result<()> {
    let program = load::build()?;
    let (flow, per_s) = ((rate * (seconds + 1)).to_string(), rate.to_string());
    let time = seconds.to_string();
    let args = ["--rate", &per_s, "--seconds", &time, "--flow", &flow];
    let found = load::figures_within_bounds_then(&program, &args, |found, platform, address| {
        println!("{found}");
        let (platform, url) = (platform.to_string_lossy(), format!("http://{address}"));
        shell::run(
            &shell::root(),
            &platform,
            &["--url", &url, "proof", "--wait", DRAIN_S],
        )
    })?;
    check_duration(&found, seconds)?;
    let missed = missed(&found, rate as f64)?;
    ensure!(missed.is_empty(), "not flat: {}", missed.join("; "));
    Ok(())
}

/// What is not flat.
fn missed(found: &Value, rate: f64) -> anyhow::Result<Vec<String>> {
    let of = |tenth: usize, name: &str| number(found, &format!("/tenths/{tenth}/{name}"));
    let count = found["tenths"].as_array().map_or(0, Vec::len);
    ensure!(count >= 4, "the run is too short: {count} tenths");
    let last = count - 1;
    let mut missed = Vec::new();
    let mut at_most = |what: &str, is: f64, max: f64| {
        if is > max {
            missed.push(format!("{what} is {is:.3}, the maximum is {max:.3}"));
        }
    };
    let lag_max = (of(1, "settlement_lag_s")? * LAG_GROWTH).max(SETTLEMENT_LAG_S);
    let lag = of(last, "settlement_lag_s")?;
    at_most("settlement's lag at the end, in seconds,", lag, lag_max);
    let lag = of(last, "history_lag_s")?;
    at_most(
        "the history's lag at the end, in seconds,",
        lag,
        HISTORY_LAG_S,
    );
    let mut before = 0.0_f64;
    for tenth in 0..count / 2 {
        before = before.max(of(tenth, "rss_mb")?);
    }
    let memory = of(last, "rss_mb")?;
    at_most(
        "resident memory at the end, in MB,",
        memory,
        before * MEMORY_GROWTH,
    );
    let refused = number(found, "/reject_rate")?;
    at_most("the share of refused requests", refused, REFUSED_MAX);
    let unanswered = 1.0 - number(found, "/answered_per_s")? / rate;
    at_most(
        "the share of unanswered requests",
        unanswered,
        1.0 - ANSWERED_MIN,
    );
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(lags: [f64; 4], memory: [f64; 4]) -> Value {
        let tenths = lags.iter().zip(memory).map(
            |(lag, rss)| json!({ "settlement_lag_s": lag, "history_lag_s": 0.01, "rss_mb": rss }),
        );
        let tenths: Vec<Value> = tenths.collect();
        json!({ "tenths": tenths, "reject_rate": 0.0, "answered_per_s": 1_000.0 })
    }

    #[test]
    fn a_growing_lag_and_growing_memory_are_not_flat() {
        let memory = [500.0, 600.0, 620.0, 640.0];
        let flat = found([0.4, 1.1, 1.2, 1.6], memory);
        assert_eq!(missed(&flat, 1_000.0).expect("figures"), [""; 0]);
        let late = found([0.5, 2.0, 3.0, 4.0], memory);
        let text = missed(&late, 1_000.0).expect("figures");
        assert!(text[0].contains("settlement's lag at the end"), "{text:?}");
        let large = found([0.5; 4], [500.0, 600.0, 700.0, 800.0]);
        let text = missed(&large, 1_000.0).expect("figures");
        assert!(text[0].contains("resident memory"), "{text:?}");
        let slow = missed(&flat, 2_000.0).expect("figures");
        assert!(slow[0].contains("unanswered"), "{slow:?}");
    }
}
