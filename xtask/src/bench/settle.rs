//! Settles two million trades and compares the last tenth with the first.

use std::path::Path;

use anyhow::ensure;
use serde_json::Value;

use super::{figures, number};
use crate::shell;

/// Minimum ratio of settlement to its floor.
const RATIO_MIN: f64 = 0.6;
/// Minimum ratio of the last tenth to the first, each relative to the bare statements of the same
/// tenth.
const LAST_TO_FIRST_MIN: f64 = 0.9;
/// Bytes per trade in all stores, after the retention of the event log.
const BYTES_MAX: f64 = 6.0 * 1024.0;
/// Members up to which the lower limit of gas per trade applies.
const FEW_MEMBERS: u32 = 16;
const GAS_MAX: [f64; 2] = [25_000.0, 45_000.0];

/// Runs `settle` and prints its figures.
///
/// # Errors
/// The build or the run fails, the proof finds a difference, or a goal is missed.
pub fn run(trades: u64, members: u32, dir: Option<&Path>) -> anyhow::Result<()> {
    let program = shell::build_release("benches", "settle")?;
    let (trades, count) = (trades.to_string(), members.to_string());
    let mut args = vec!["--trades", &trades, "--members", &count];
    let dir = dir.map(|dir| dir.to_string_lossy().into_owned());
    if let Some(dir) = &dir {
        args.extend(["--dir", dir.as_str()]);
    }
    let found = figures(&program, &args)?;
    println!("{found}");
    let missed = missed(&found, members)?;
    ensure!(missed.is_empty(), "missed: {}", missed.join("; "));
    Ok(())
}

/// The goals that the figures miss.
fn missed(found: &Value, members: u32) -> anyhow::Result<Vec<String>> {
    let gas_max = GAS_MAX[usize::from(members > FEW_MEMBERS)];
    let mut missed = Vec::new();
    for (pointer, min) in [("/ratio", RATIO_MIN), ("/last_to_first", LAST_TO_FIRST_MIN)] {
        let is = number(found, pointer)?;
        if is < min {
            missed.push(format!("{pointer} is {is:.3}, the minimum is {min}"));
        }
    }
    for (pointer, max) in [
        ("/gas_per_trade", gas_max),
        ("/archived_bytes_per_trade", BYTES_MAX),
    ] {
        let is = number(found, pointer)?;
        if is > max {
            missed.push(format!("{pointer} is {is:.0}, the maximum is {max:.0}"));
        }
    }
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ratio: f64, last_to_first: f64, gas: u64, bytes: u64) -> Value {
        serde_json::json!({
            "ratio": ratio, "last_to_first": last_to_first,
            "gas_per_trade": gas, "archived_bytes_per_trade": bytes,
        })
    }

    #[test]
    fn goals_are_met_at_their_limits_and_missed_beyond() {
        let missed = |found: &Value, members| missed(found, members).expect("figures").len();
        assert_eq!(missed(&of(0.6, 0.9, 25_000, 6_144), 16), 0);
        assert_eq!(missed(&of(0.59, 0.89, 25_001, 6_145), 16), 4);
        assert_eq!(missed(&of(0.6, 0.9, 45_000, 1), 1_000), 0);
        assert_eq!(missed(&of(0.6, 0.9, 45_001, 1), 1_000), 1);
    }
}
