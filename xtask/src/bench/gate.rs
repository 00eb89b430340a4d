//! The market's default bounds on settlement's lag, under the full flow.

use anyhow::ensure;

use super::{load, number};

/// Stage of the intake in which no new order is accepted.
const CLOSED: f64 = 3.0;

/// Runs the full flow until the market closes to new orders; prints the figures.
///
/// # Errors
/// A build or the run fails, or the market stays open.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    let program = load::build()?;
    let seconds = seconds.to_string();
    let figures = load::figures_within_bounds(&program, &["--seconds", &seconds])?;
    println!("{figures}");
    let stage = number(&figures, "/intake_stage")?;
    let refused = number(&figures, "/reject_rate")?;
    let records = number(&figures, "/settlement_lag_records")?;
    println!(
        "gate: stage {stage}, {records:.0} records behind, {:.1} % refused",
        refused * 100.0
    );
    ensure!(stage >= CLOSED, "the market stayed open: stage {stage}");
    ensure!(refused > 0.0, "no order was refused");
    Ok(())
}
