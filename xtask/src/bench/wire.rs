//! The trading path end to end against its goals: rates, latencies and lags of `wire`.

use std::path::Path;

use anyhow::ensure;
use serde_json::Value;

use super::{load, median, number};

/// One goal on the median of all runs.
struct Goal {
    name: &'static str,
    /// The figure, or a ratio of figures.
    of: fn(&Value) -> anyhow::Result<f64>,
    min: f64,
    max: f64,
}

const GOALS: [Goal; 8] = [
    Goal {
        name: "durable requests/s",
        of: |run| number(run, "/orders_per_s"),
        min: 250_000.0,
        max: f64::INFINITY,
    },
    Goal {
        name: "accepted p50 / echo p50",
        of: |run| Ok(number(run, "/accepted/p50_us")? / number(run, "/echo/p50_us")?),
        min: 0.0,
        max: 1.5,
    },
    Goal {
        name: "durable p50 / (1.5 echo + 1.25 durable_floor)",
        of: |run| {
            let floor = 1.25 * number(run, "/durable_floor/p50_us")?;
            Ok(number(run, "/durable/p50_us")? / (1.5 * number(run, "/echo/p50_us")? + floor))
        },
        min: 0.0,
        max: 1.0,
    },
    Goal {
        name: "replica lag, median of a run, ms",
        of: |run| number(run, "/replica_lag_p50_ms"),
        min: 0.0,
        max: 100.0,
    },
    Goal {
        name: "replica lag, maximum of a run, ms",
        of: |run| number(run, "/replica_lag_ms"),
        min: 0.0,
        max: 100.0,
    },
    Goal {
        name: "share refused before matching",
        of: |run| number(run, "/reject_rate"),
        min: 0.0,
        max: 0.01,
    },
    Goal {
        name: "trades per request",
        of: |run| number(run, "/trades_per_order"),
        min: 0.14,
        max: 1.0,
    },
    Goal {
        name: "resident MB",
        of: |run| number(run, "/rss_mb"),
        min: 0.0,
        max: 6_442.0,
    },
];

/// Prints each run, then each median beside its goal.
///
/// # Errors
/// A build or a run fails, a run's trades differ from the reference book's, or a median misses its
/// goal.
pub fn run(runs: usize, seconds: u64, rate: u64, file: Option<&Path>) -> anyhow::Result<()> {
    let program = load::build()?;
    let count = (seconds * rate * 5 / 4).to_string();
    let file = file.map(|file| file.to_string_lossy().into_owned());
    let flow = match &file {
        Some(file) => ["--file", file],
        None => ["--flow", &count],
    };
    let (seconds, rate) = (seconds.to_string(), rate.to_string());
    let mut found = Vec::new();
    for _ in 0..runs {
        let args = [
            &["--seconds", &seconds, "--rate", &rate][..],
            &["--window", "128", "--judge"],
            &flow,
        ];
        let run = load::figures(&program, &args.concat())?;
        println!("{run}");
        found.push(run);
    }
    report(&found)
}

fn report(runs: &[Value]) -> anyhow::Result<()> {
    let mut missed = Vec::new();
    for Goal { name, of, min, max } in GOALS {
        let median = median(runs.iter().map(of).collect::<anyhow::Result<_>>()?);
        let is_met = (min..=max).contains(&median);
        println!(
            "{name}: {median:.3}{}",
            if is_met { "" } else { ", not met" }
        );
        if !is_met {
            missed.push(name);
        }
    }
    ensure!(missed.is_empty(), "not met: {}", missed.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(orders_per_s: f64, lag_ms: f64) -> Value {
        serde_json::json!({
            "orders_per_s": orders_per_s, "reject_rate": 0.0, "trades_per_order": 0.15,
            "echo": { "p50_us": 20.0 }, "accepted": { "p50_us": 30.0 },
            "durable": { "p50_us": 92.5 }, "durable_floor": { "p50_us": 50.0 },
            "replica_lag_ms": lag_ms, "replica_lag_p50_ms": 2.0, "rss_mb": 900.0,
        })
    }

    #[test]
    fn each_median_is_compared_with_its_goal() {
        let runs = [100.0, 90.0, 900.0].map(|lag_ms| figures(250_000.0, lag_ms));
        report(&runs).expect("all at their goals");
        let error = report(&[figures(249_999.0, 101.0)]).expect_err("two are missed");
        let text = error.to_string();
        assert_eq!(
            text,
            "not met: durable requests/s; replica lag, maximum of a run, ms"
        );
    }
}
