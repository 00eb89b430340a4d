//! Checks settlement through chain confirmation at half of its measured capacity.

use anyhow::ensure;

use super::{check_duration, load, number};
use crate::shell;

/// Maximum lag of settlement at the end of the second run.
const LAG_MAX_S: f64 = 2.0;
/// Requests generated for the first run: more than it can send.
const FLOW_REQUESTS: u64 = 24_000_000;

/// Runs `wire` without a rate limit to measure settlement's capacity, then at half of that rate.
/// Prints the figures of both runs.
///
/// # Errors
/// A build or a run fails, a flow ends early, settlement lags, or the proof finds a difference.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    let program = load::build()?;
    let time = seconds.to_string();
    let requests = FLOW_REQUESTS.to_string();
    let full = load::figures(&program, &["--seconds", &time, "--flow", &requests])?;
    println!("{full}");
    check_duration(&full, seconds)?;
    let posted = number(&full, "/settlement_per_s")?;
    let finalized = number(&full, "/trades_final_per_s")?;
    ensure!(
        finalized > 0.0,
        "no trade became final during the full flow"
    );
    // In requests/s: the ledger's rate, or the chain's rate divided by the trades per order,
    // whichever is lower.
    let capacity_per_s = posted.min(finalized / number(&full, "/trades_per_order")?);
    let rate = (capacity_per_s / 2.0) as u64;
    ensure!(
        rate > 0,
        "settlement's capacity of {capacity_per_s:.2} requests/s is below 2/s: too low for the second run"
    );
    let rate = rate.to_string();
    let half = load::figures_then(
        &program,
        &["--seconds", &time, "--rate", &rate],
        |half, platform, address| {
            println!("{half}");
            let (platform, url) = (platform.to_string_lossy(), format!("http://{address}"));
            shell::run(&shell::root(), &platform, &["--url", &url, "proof"])
        },
    )?;
    check_duration(&half, seconds)?;
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
