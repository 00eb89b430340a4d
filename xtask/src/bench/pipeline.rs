//! Measures the latency of the trading path at shares of its inline capacity and at fixed rates.

use anyhow::ensure;
use serde_json::Value;

use super::{figures, median, number};
use crate::shell;

/// Commands of a measurement of the inline capacity; one measurement per number of requests per
/// poll.
const INLINE_COMMANDS: &str = "1000000";
/// The capacity at 8 requests per poll, the middle one of three measurements.
const CAPACITY: &str = "/by_hand/1/capacity_per_s";
/// Compared percentiles.
const PERCENTILES: [&str; 2] = ["p50_ns", "p99_ns"];

enum Rate {
    /// Share of the inline capacity.
    Share(f64),
    PerS(u64),
}

struct Load {
    name: &'static str,
    rate: Rate,
    /// Maximum median ratio of each percentile to that of the bare rings. `None`: no goal.
    goals: [Option<f64>; 2],
}

const LOADS: [Load; 4] = [
    Load {
        name: "60 % of capacity",
        rate: Rate::Share(0.6),
        goals: [Some(2.5), None],
    },
    Load {
        name: "20 % of capacity",
        rate: Rate::Share(0.2),
        goals: [None, Some(2.0)],
    },
    Load {
        name: "1,000,000/s",
        rate: Rate::PerS(1_000_000),
        goals: [None, None],
    },
    Load {
        name: "1,500,000/s",
        rate: Rate::PerS(1_500_000),
        goals: [None, None],
    },
];

/// Figures of one run, in nanoseconds by percentile.
struct Run {
    accepted: [f64; 2],
    /// The same load over bare rings with the same writes.
    bare: [f64; 2],
}

impl Run {
    fn of(figures: &Value) -> anyhow::Result<Self> {
        let both = |name: &str| -> anyhow::Result<[f64; 2]> {
            let [p50, p99] = PERCENTILES.map(|at| number(figures, &format!("/{name}/{at}")));
            Ok([p50?, p99?])
        };
        Ok(Self {
            accepted: both("accepted")?,
            bare: both("floor")?,
        })
    }

    fn ratios(&self) -> [f64; 2] {
        [0, 1].map(|at| self.accepted[at] / self.bare[at].max(1.0))
    }
}

/// Runs the rounds; prints each run, then the medians.
///
/// # Errors
/// The build or a run fails, or a median ratio exceeds its goal.
pub fn run(rounds: usize, seconds: u64) -> anyhow::Result<()> {
    let program = shell::build_release("benches", "pipeline")?;
    let seconds = seconds.to_string();
    let mut runs = LOADS.map(|_| Vec::new());
    for round in 1..=rounds {
        let inline = figures(&program, &["--inline", INLINE_COMMANDS])?;
        let capacity = number(&inline, CAPACITY)?;
        println!("round {round}: capacity {capacity:.0}/s");
        for step in 0..LOADS.len() {
            // Each round starts with another load, so the loads' order does not matter.
            let at = (round + step) % LOADS.len();
            let rate = match LOADS[at].rate {
                Rate::Share(share) => (capacity * share) as u64,
                Rate::PerS(rate) => rate,
            };
            let rate = rate.to_string();
            let run = figures(&program, &["--rate", &rate, "--seconds", &seconds])?;
            let faults = &run["hot_page_faults"];
            let run = Run::of(&run)?;
            println!(
                "round {round}, {} ({rate}/s): {}; page faults {faults}",
                LOADS[at].name,
                format_latencies(run.accepted, run.bare, run.ratios())
            );
            runs[at].push(run);
        }
    }
    report(&runs)
}

/// Prints the medians and compares their ratios with the goals.
fn report(runs: &[Vec<Run>]) -> anyhow::Result<()> {
    let mut missed = Vec::new();
    for (load, runs) in LOADS.iter().zip(runs) {
        let medians = |of: fn(&Run) -> [f64; 2]| {
            [0, 1].map(|at| median(runs.iter().map(|run| of(run)[at]).collect()))
        };
        let ratios = medians(Run::ratios);
        let (accepted, bare) = (medians(|run| run.accepted), medians(|run| run.bare));
        println!(
            "medians, {}: {}",
            load.name,
            format_latencies(accepted, bare, ratios)
        );
        for ((name, ratio), goal) in PERCENTILES.iter().zip(ratios).zip(load.goals) {
            if let Some(goal) = goal
                && ratio > goal
            {
                let load = load.name;
                missed.push(format!("{load}: {name} ratio {ratio:.2}, goal {goal}"));
            }
        }
    }
    ensure!(missed.is_empty(), "not met: {}", missed.join("; "));
    Ok(())
}

fn format_latencies(accepted: [f64; 2], bare: [f64; 2], ratios: [f64; 2]) -> String {
    let us = |ns: f64| ns / 1_000.0;
    format!(
        "p50 {:.2} us, bare rings {:.2} us, ratio {:.2}; p99 {:.1} us, bare rings {:.1} us, \
         ratio {:.2}",
        us(accepted[0]),
        us(bare[0]),
        ratios[0],
        us(accepted[1]),
        us(bare[1]),
        ratios[1]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_the_ratios_are_compared_with_the_goals() {
        let run = |p50, p99| Run {
            accepted: [p50, p99],
            bare: [1_000.0, 1_000.0],
        };
        let runs = |p50: [f64; 3]| {
            let mut runs = LOADS.map(|_| Vec::new());
            runs[0].extend(p50.map(|p50| run(p50, 9_000.0)));
            runs[1].push(run(9_000.0, 2_000.0));
            runs
        };
        report(&runs([2_500.0, 9_000.0, 1_000.0])).expect("both at their goals");
        let error = report(&runs([2_600.0, 9_000.0, 1_000.0])).expect_err("above 2.5");
        let text = error.to_string();
        assert!(
            text.contains("60 % of capacity: p50_ns ratio 2.60"),
            "{text}"
        );
    }
}
