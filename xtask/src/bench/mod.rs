//! Comparisons that take several runs of a benchmark (`benches/README.md`). The runs are
//! interleaved, so a drift of the machine affects both sides.

mod gate;
mod idle;
mod load;
mod pipeline;
mod settle;
mod settlement;
mod steady;
mod wire;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Subcommand;
use serde_json::Value;

use crate::shell;

#[derive(Subcommand)]
pub enum Task {
    /// `wire` with and without idle sessions, in pairs of runs in the order ABBA, each on a new
    /// platform. Fails if the median of the pairs loses more than a tenth of the orders/s.
    Idle {
        /// Sessions that only send heartbeats.
        #[arg(long, default_value_t = 1_000)]
        sessions: usize,
        /// Pairs of runs.
        #[arg(long, default_value_t = 5)]
        pairs: usize,
        /// Seconds of the flow in each run.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// `wire` with its flow at a fixed rate, each run on a new platform. Compares the trades of
    /// each run with the reference book. Fails if a median, or the highest lag of the replica in
    /// any run, misses its goal.
    Wire {
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Seconds of the flow in each run.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Requests offered per second.
        #[arg(long, default_value_t = 256_000)]
        rate: u64,
        /// File with a flow in the `XFLOW001` format; default: a generated flow.
        #[arg(long)]
        file: Option<PathBuf>,
        /// p50 in microseconds of an echo outside this repository that was measured beside these
        /// runs. The smaller of it and the echo of `wire` is the one of the goals.
        #[arg(long, value_name = "MICROSECONDS")]
        probe_us: Option<f64>,
    },
    /// `wire` with its full flow and the default bounds on settlement's lag. Fails unless the
    /// market closes to new orders and the lag stays at its bound.
    Gate {
        /// Seconds of the flow.
        #[arg(long, default_value_t = 15)]
        seconds: u64,
    },
    /// `wire` with its full flow, then at half the rate that settlement reached in that run. Fails
    /// unless settlement's lag at the end is below two seconds and the proof of balances holds.
    Settlement {
        /// Seconds of the flow in each of the two runs.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
    /// `settle` with two million trades. Fails if it is below 0.6 of its floor, if the last tenth
    /// is below 0.9 of the first, or if gas or bytes per trade exceed their goals.
    Settle {
        #[arg(long, default_value_t = 2_000_000)]
        trades: u64,
        #[arg(long, default_value_t = 16)]
        members: u32,
        /// Folder for the data, about 45 GB for two million trades; default: the system's
        /// temporary folder.
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// `wire` at a fixed rate with the default bounds on settlement's lag, then the proof of
    /// balances. Fails unless lags and memory stay flat and the history is current.
    Steady {
        /// Requests offered per second.
        #[arg(long, default_value_t = 20_000)]
        rate: u64,
        /// Seconds of the flow.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// `pipeline` at 60 % and 20 % of the round's inline capacity, at 1,000,000/s and at
    /// 1,500,000/s. Prints medians over the rounds, their ratios to the bare rings, and the bare
    /// rings with the same client and with the same cost per message. Fails if a ratio to the bare
    /// rings or the journal's part of the cost of a command exceeds its goal, or if in any round
    /// the hot thread has page faults after the warm-up, a request is not submitted, or more than
    /// 1 % are refused.
    Pipeline {
        /// Rounds, each with a run of every load.
        #[arg(long, default_value_t = 9)]
        rounds: usize,
        /// Measured seconds of each run.
        #[arg(long, default_value_t = 4)]
        seconds: u64,
        /// Core of the hot thread, preferably without the disk's interrupts (`/proc/interrupts`).
        #[arg(long, default_value_t = 1)]
        hot_core: usize,
    },
}

/// Runs a comparison.
///
/// # Errors
/// A build or a run fails, or a goal is not met.
pub fn run(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Idle {
            sessions,
            pairs,
            seconds,
        } => idle::run(sessions, pairs, seconds),
        Task::Wire {
            runs,
            seconds,
            rate,
            file,
            probe_us,
        } => wire::run(runs, seconds, rate, file.as_deref(), probe_us),
        Task::Gate { seconds } => gate::run(seconds),
        Task::Settle {
            trades,
            members,
            dir,
        } => settle::run(trades, members, dir.as_deref()),
        Task::Settlement { seconds } => settlement::run(seconds),
        Task::Steady { rate, seconds } => steady::run(rate, seconds),
        Task::Pipeline {
            rounds,
            seconds,
            hot_core,
        } => pipeline::run(rounds, seconds, hot_core),
    }
}

/// Runs a benchmark and returns its figures.
fn figures(program: &Path, args: &[&str]) -> anyhow::Result<Value> {
    let args = [&["--json"][..], args].concat();
    let output = shell::output(&shell::root(), &program.to_string_lossy(), &args)?;
    serde_json::from_str(&output).with_context(|| format!("the output is not JSON: {output}"))
}

/// Share of the seconds of a flow that it must last.
const LASTED_MIN: f64 = 0.99;

/// Checks that the flow of a run of `wire` has lasted `seconds`. It ends with its last request.
fn check_duration(figures: &Value, seconds: u64) -> anyhow::Result<()> {
    let lasted_s = number(figures, "/duration_s")?;
    ensure!(
        lasted_s >= seconds as f64 * LASTED_MIN,
        "the flow ended after {lasted_s:.1} of {seconds} s: use one with more requests"
    );
    Ok(())
}

/// The figure at a JSON pointer.
fn number(figures: &Value, pointer: &str) -> anyhow::Result<f64> {
    let number = figures.pointer(pointer).and_then(Value::as_f64);
    number.with_context(|| format!("the figures have no {pointer}"))
}

/// Median, the upper one of the two middle values; 0 for no values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_of_an_odd_count() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![2.0, 1.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }

    #[test]
    fn a_flow_that_ends_early_is_an_error() {
        let figures = |lasted_s: f64| serde_json::json!({ "duration_s": lasted_s });
        check_duration(&figures(59.5), 60).expect("99 %");
        let error = check_duration(&figures(9.8), 60).expect_err("too short");
        let error = error.to_string();
        assert!(error.contains("after 9.8 of 60 s"), "{error}");
        check_duration(&serde_json::json!({}), 60).expect_err("no duration");
    }

    #[test]
    fn figures_are_read_by_pointer() {
        let figures = serde_json::json!({ "a": [{ "b": 5 }] });
        assert_eq!(number(&figures, "/a/0/b").expect("a number"), 5.0);
        let error = number(&figures, "/a/1/b").expect_err("no such figure");
        assert!(error.to_string().contains("/a/1/b"), "{error}");
    }
}
