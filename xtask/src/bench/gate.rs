//! Checks that the market's default bounds on settlement's lag hold under the full flow.

use anyhow::ensure;

use super::{load, number};

/// Stage of the intake in which no new order is accepted.
const CLOSED: f64 = 3.0;

/// Factor on the bound: cancels and requests in flight are still journalled after the market closes
/// to new orders.
const MARGIN: f64 = 1.1;

/// Runs the full flow until the market closes to new orders; prints the figures.
///
/// # Errors
/// A build or the run fails, the market stays open, or the lag exceeds its bound.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    let program = load::build()?;
    let seconds = seconds.to_string();
    let figures = load::figures_within_bounds(&program, &["--seconds", &seconds])?;
    let stage = number(&figures, "/intake_stage")?;
    let refused = number(&figures, "/reject_rate")?;
    let records = number(&figures, "/settlement_lag_records")?;
    let bound = number(&figures, "/trading/bounds/settlement")?;
    println!(
        "gate: stage {stage}, {:.1} % of the requests refused, settlement lag {records:.0} records (bound {bound:.0})",
        refused * 100.0
    );
    ensure!(stage >= CLOSED, "the market stayed open: stage {stage}");
    ensure!(refused > 0.0, "no order was refused");
    ensure!(
        records <= bound * MARGIN,
        "settlement's lag of {records:.0} records exceeds its bound {bound:.0}"
    );
    Ok(())
}
