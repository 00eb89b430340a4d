//! Compares rates, latencies and lags of the trading path, measured by `wire`, with their goals.

use std::path::Path;

use anyhow::ensure;
use serde_json::Value;

use super::{check_duration, load, median, number};
use Bound::{AtLeast, AtMost};

enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// The compared figure of several runs.
#[derive(Clone, Copy)]
enum Compared {
    Median,
    /// For a goal on a maximum: a median would allow peaks above it in half of the runs.
    Highest,
}

/// A goal on the median of all runs, or on the highest of them.
struct Goal {
    name: &'static str,
    /// Reads the figure, or a ratio of figures, from a run.
    of: fn(&Value) -> anyhow::Result<f64>,
    bound: Bound,
    compared: Compared,
}

const fn goal(name: &'static str, of: fn(&Value) -> anyhow::Result<f64>, bound: Bound) -> Goal {
    Goal {
        name,
        of,
        bound,
        compared: Compared::Median,
    }
}

/// Growth of the replica's lag, from the median of the second quarter of a run to that of the last
/// quarter, up to which the lag counts as flat: a tenth of the bound on the lag.
const LAG_GROWTH_MAX_MS: f64 = 10.0;

/// Name and JSON pointer of the figures without a goal.
const FURTHER: [(&str, &str); 4] = [
    ("UDP round trip p50, us", "/net/p50_us"),
    (
        "share of cancels and amends whose order had ended",
        "/too_late_rate",
    ),
    (
        "share of orders cancelled by self-trade prevention",
        "/self_trade_rate",
    ),
    ("page faults of the hot thread", "/hot_page_faults"),
];

const GOALS: [Goal; 9] = [
    goal(
        "durable requests/s",
        |run| number(run, "/orders_per_s"),
        AtLeast(250_000.0),
    ),
    goal("accepted p50 / echo", accepted_ratio, AtMost(1.5)),
    goal(
        "durable p50 / (1.5 echo + 1.25 durable_floor)",
        durable_ratio,
        AtMost(1.0),
    ),
    goal(
        "replica lag, median of a run, ms",
        |run| number(run, "/replica_lag_p50_ms"),
        AtMost(100.0),
    ),
    Goal {
        compared: Compared::Highest,
        ..goal(
            "replica lag, maximum of all runs, ms",
            |run| number(run, "/replica_lag_ms"),
            AtMost(100.0),
        )
    },
    goal(
        "replica lag, growth from the second quarter of a run to the last, ms",
        lag_growth_ms,
        AtMost(LAG_GROWTH_MAX_MS),
    ),
    goal(
        "share refused before matching",
        |run| number(run, "/reject_rate"),
        AtMost(0.01),
    ),
    goal(
        "trades per request",
        |run| number(run, "/trades_per_order"),
        AtLeast(0.14),
    ),
    goal("resident MB", |run| number(run, "/rss_mb"), AtMost(6_442.0)),
];

/// Key in a run of the p50 of an echo outside this repository.
const PROBE: &str = "floor_probe_p50_us";

/// p50 of the echo, or of the floor probe if that is known and smaller.
fn echo_us(run: &Value) -> anyhow::Result<f64> {
    let echo = number(run, "/echo/p50_us")?;
    let probe = run.get(PROBE).and_then(Value::as_f64);
    Ok(probe.map_or(echo, |probe| probe.min(echo)))
}

fn accepted_ratio(run: &Value) -> anyhow::Result<f64> {
    Ok(number(run, "/accepted/p50_us")? / echo_us(run)?)
}

fn durable_ratio(run: &Value) -> anyhow::Result<f64> {
    let write = number(run, "/durable_floor/p50_us")?;
    Ok(number(run, "/durable/p50_us")? / (1.5 * echo_us(run)? + 1.25 * write))
}

fn lag_growth_ms(run: &Value) -> anyhow::Result<f64> {
    let median = |quarter| number(run, &format!("/replica_lag_quarters_ms/{quarter}"));
    Ok(median(3)? - median(1)?)
}

/// Prints each run, then each compared figure and whether it meets its goal. `probe_us`: p50 of an
/// echo outside this repository, measured beside these runs; the smaller of it and `wire`'s own is
/// the echo of the goals.
///
/// # Errors
/// A build or a run fails, a flow ends early, a run's trades differ from the reference book's, or a
/// figure misses its goal.
pub fn run(
    runs: usize,
    seconds: u64,
    rate: u64,
    file: Option<&Path>,
    probe_us: Option<f64>,
) -> anyhow::Result<()> {
    let program = load::build()?;
    let count = (seconds * rate * 5 / 4).to_string();
    let file = file.map(|file| file.to_string_lossy().into_owned());
    let flow = match &file {
        Some(file) => ["--file", file],
        None => ["--flow", &count],
    };
    let (time, rate) = (seconds.to_string(), rate.to_string());
    let mut found = Vec::new();
    for _ in 0..runs {
        let args = [
            &["--seconds", &time, "--rate", &rate][..],
            &["--window", "128", "--judge"],
            &flow,
        ];
        let mut run = load::figures(&program, &args.concat())?;
        if let Some(probe) = probe_us {
            run[PROBE] = probe.into();
        }
        println!("{run}");
        check_duration(&run, seconds)?;
        found.push(run);
    }
    report(&found)
}

/// Names the echo that the goals of a run refer to.
fn echo_of(run: &Value) -> &'static str {
    match run.get(PROBE) {
        Some(_) => "echo of the goals: the smaller of wire's own and the floor probe",
        None => {
            "echo of the goals: wire's own alone, the floor probe was not measured (--probe-us)"
        }
    }
}

fn report(runs: &[Value]) -> anyhow::Result<()> {
    let mut missed = Vec::new();
    if let Some(run) = runs.first() {
        println!("{}", echo_of(run));
    }
    for goal in GOALS {
        let name = goal.name;
        let figures: Vec<f64> = runs.iter().map(goal.of).collect::<anyhow::Result<_>>()?;
        let figure = match goal.compared {
            Compared::Median => median(figures),
            Compared::Highest => figures.into_iter().fold(0.0, f64::max),
        };
        let is_met = match goal.bound {
            AtLeast(min) => figure >= min,
            AtMost(max) => figure <= max,
        };
        println!(
            "{name}: {figure:.3}{}",
            if is_met { "" } else { ", not met" }
        );
        if !is_met {
            missed.push(name);
        }
    }
    for (name, pointer) in FURTHER {
        let figures = runs.iter().map(|run| number(run, pointer));
        let median = median(figures.collect::<anyhow::Result<_>>()?);
        println!("{name}: {median:.3}");
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
            "replica_lag_quarters_ms": [1.0, 2.0, 7.0, 12.0],
            "net": { "p50_us": 5.0 }, "too_late_rate": 0.1, "self_trade_rate": 0.01,
            "hot_page_faults": 0.0,
        })
    }

    #[test]
    fn each_median_is_compared_with_its_goal() {
        let runs = [250_000.0, 1.0, 260_000.0].map(|per_s| figures(per_s, 100.0));
        report(&runs).expect("all at their goals");
        let error = report(&[figures(249_999.0, 101.0)]).expect_err("two are missed");
        let text = error.to_string();
        assert_eq!(
            text,
            "not met: durable requests/s; replica lag, maximum of all runs, ms"
        );
    }

    #[test]
    fn the_highest_lag_of_all_runs_is_compared_with_its_goal() {
        let runs = [100.0, 90.0, 101.0].map(|lag_ms| figures(250_000.0, lag_ms));
        let error = report(&runs).expect_err("one run is above").to_string();
        assert_eq!(error, "not met: replica lag, maximum of all runs, ms");
    }

    #[test]
    fn a_lag_that_grows_is_not_flat() {
        let mut run = figures(250_000.0, 100.0);
        run["replica_lag_quarters_ms"][3] = serde_json::json!(12.1);
        let error = report(&[run]).expect_err("it grows by 10.1 ms").to_string();
        assert!(error.contains("growth from the second quarter"), "{error}");
    }

    #[test]
    fn the_smaller_of_echo_and_probe_is_the_echo_of_the_goals() {
        let mut run = figures(250_000.0, 100.0);
        assert!(echo_of(&run).contains("was not measured"));
        run[PROBE] = serde_json::json!(25.0);
        assert!(echo_of(&run).contains("the smaller of"));
        report(std::slice::from_ref(&run)).expect("the echo is smaller");
        run[PROBE] = serde_json::json!(19.0);
        let error = report(&[run]).expect_err("the probe is smaller");
        assert_eq!(
            error.to_string(),
            "not met: accepted p50 / echo; durable p50 / (1.5 echo + 1.25 durable_floor)"
        );
    }
}
