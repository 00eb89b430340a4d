//! Checks settlement, up to the confirmations on the chain, at a rate that it can keep up with.

use anyhow::ensure;

use super::{load, number};
use crate::shell;

/// Maximum lag of settlement at the end of the second run.
const LAG_MAX_S: f64 = 2.0;

/// Runs the full flow, then half the rate that settlement reached in it. Prints the figures of both
/// runs.
///
/// # Errors
/// A build or a run fails, settlement lags, or the proof finds a difference.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    let program = load::build()?;
    let seconds = seconds.to_string();
    let full = load::figures(&program, &["--seconds", &seconds, "--flow", "24000000"])?;
    println!("{full}");
    let posted = number(&full, "/settlement_per_s")?;
    let finalized = number(&full, "/trades_final_per_s")?;
    // The slower of ledger and chain bounds settlement.
    let kept = posted.min(finalized / number(&full, "/trades_per_order")?);
    let rate = (kept / 2.0) as u64;
    ensure!(rate > 0, "no trade became final during the full flow");
    let rate = rate.to_string();
    let half = load::figures_and(
        &program,
        &["--seconds", &seconds, "--rate", &rate],
        |half, platform, address| {
            println!("{half}");
            let (platform, url) = (platform.to_string_lossy(), format!("http://{address}"));
            shell::run(&shell::root(), &platform, &["--url", &url, "proof"])
        },
    )?;
    let lag = number(&half, "/settlement_lag_end_s")?;
    println!(
        "settlement during the full flow: {posted:.0} records/s posted, {finalized:.0} trades/s final; \
         at {rate} requests/s its lag at the end is {lag:.2} s"
    );
    ensure!(
        lag < LAG_MAX_S,
        "settlement's lag at the end is {lag:.2} s, the maximum is {LAG_MAX_S} s"
    );
    Ok(())
}
