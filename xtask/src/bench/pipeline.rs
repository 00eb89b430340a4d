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
/// Maximum cost of a command with the journal, as a ratio to that without it.
const JOURNAL_COST_MAX: f64 = 1.3;
/// Maximum page faults of the hot thread after the warm-up, in every round.
const PAGE_FAULTS_MAX: f64 = 0.0;
/// Maximum requests that the node did not submit, in every round: they have no latency.
const NOT_SUBMITTED_MAX: f64 = 0.0;
/// Maximum share of refused requests in every round. The flow may cancel an order that trades
/// meanwhile.
const REFUSED_MAX: f64 = 0.01;
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
    /// Maximum median ratio of each percentile to that of the bare rings with a client that only
    /// counts. `None`: no goal.
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
    /// Bare rings with the same load and writes, and a client that only counts: the baseline of the
    /// goals. A client that does the work of the measured run would wait on its own core in both.
    bare: [f64; 2],
    /// As `bare`, with the client of the measured run: what that client alone costs on its core.
    same_client: [f64; 2],
    /// As `same_client`, with the inline cost of a command per message: the least that the rates
    /// allow.
    same_cost: [f64; 2],
    /// Page faults of the hot thread after the warm-up.
    page_faults: f64,
    /// Requests that are not in the journal and not in `accepted`.
    not_submitted: f64,
    /// Share of the requests that were rejected.
    refused: f64,
}

impl Run {
    fn of(figures: &Value) -> anyhow::Result<Self> {
        let both = |name: &str| -> anyhow::Result<[f64; 2]> {
            let [p50, p99] = PERCENTILES.map(|at| number(figures, &format!("/{name}/{at}")));
            Ok([p50?, p99?])
        };
        Ok(Self {
            accepted: both("accepted")?,
            bare: both("floor_plain")?,
            same_client: both("floor")?,
            same_cost: both("floor_service")?,
            page_faults: number(figures, "/hot_page_faults")?,
            not_submitted: number(figures, "/not_submitted")?,
            refused: number(figures, "/refused")? / number(figures, "/requests")?.max(1.0),
        })
    }

    /// Ratios to the bare rings, which are judged.
    fn ratios(&self) -> [f64; 2] {
        [0, 1].map(|at| self.accepted[at] / self.bare[at].max(1.0))
    }

    /// Ratios to the bare rings with the same client, which explain the others.
    fn client_ratios(&self) -> [f64; 2] {
        [0, 1].map(|at| self.accepted[at] / self.same_client[at].max(1.0))
    }

    fn format(&self, ratios: [f64; 2], client_ratios: [f64; 2]) -> String {
        let us = |ns: f64| ns / 1_000.0;
        let of = |name: &str, at: usize| {
            format!(
                "{name} {:.2} us, bare rings {:.2} us, ratio {:.2} (with the same client {:.2} us, \
                 ratio {:.2}; with the same cost {:.2} us)",
                us(self.accepted[at]),
                us(self.bare[at]),
                ratios[at],
                us(self.same_client[at]),
                client_ratios[at],
                us(self.same_cost[at]),
            )
        };
        format!("{}; {}", of("p50", 0), of("p99", 1))
    }

    fn format_counts(&self) -> String {
        let (faults, not_submitted) = (self.page_faults, self.not_submitted);
        let refused = self.refused * 100.0;
        format!("page faults {faults:.0}, not submitted {not_submitted:.0}, refused {refused:.2} %")
    }
}

/// Runs the rounds; prints each run, then the medians.
///
/// # Errors
/// The build or a run fails, the median cost of the journal or a median ratio exceeds its goal, or
/// a round has page faults, requests that were not submitted, or too many refused ones.
pub fn run(rounds: usize, seconds: u64, hot_core: usize) -> anyhow::Result<()> {
    // With two cores the client has the other one.
    let client_core = usize::from(hot_core == 0).to_string();
    let hot_core = hot_core.to_string();
    let cores = ["--hot-core", &hot_core, "--client-core", &client_core];
    let program = shell::build_release("benches", "pipeline")?;
    let seconds = seconds.to_string();
    let (mut runs, mut journal_costs) = (LOADS.map(|_| Vec::new()), Vec::new());
    for round in 1..=rounds {
        let run = |args: &[&str]| figures(&program, &[&cores[..], args].concat());
        let inline = run(&["--inline", INLINE_COMMANDS])?;
        let volatile = run(&["--inline", INLINE_COMMANDS, "--no-journal"])?;
        let round_costs = costs(&inline, &volatile)?;
        let capacity = number(&inline, CAPACITY)?;
        let cost_ns = (1e9 / capacity).round().to_string();
        println!(
            "round {round}: capacity {capacity:.0}/s; {}",
            format_costs(round_costs)
        );
        journal_costs.push(round_costs);
        for step in 0..LOADS.len() {
            // Each round starts with another load, so the loads' order does not matter.
            let at = (round + step) % LOADS.len();
            let rate = match LOADS[at].rate {
                Rate::Share(share) => (capacity * share) as u64,
                Rate::PerS(rate) => rate,
            };
            let rate = rate.to_string();
            let load = ["--rate", &rate, "--seconds", &seconds];
            let run = run(&[&load[..], &["--service-ns", &cost_ns]].concat())?;
            let run = Run::of(&run)?;
            println!(
                "round {round}, {} ({rate}/s): {}; {}",
                LOADS[at].name,
                run.format(run.ratios(), run.client_ratios()),
                run.format_counts()
            );
            runs[at].push(run);
        }
    }
    report(&runs, &journal_costs)
}

/// Cost of a command with the journal as a ratio to that without, by number of requests per poll.
fn costs(with: &Value, without: &Value) -> anyhow::Result<[f64; 3]> {
    let cost =
        |figures: &Value, at: usize| number(figures, &format!("/by_hand/{at}/ns_per_command"));
    let mut ratios = [0.0; 3];
    for (at, ratio) in ratios.iter_mut().enumerate() {
        *ratio = cost(with, at)? / cost(without, at)?;
    }
    Ok(ratios)
}

fn format_costs([one, eight, many]: [f64; 3]) -> String {
    format!(
        "cost with the journal, ratio to that without: {one:.2}, {eight:.2}, {many:.2} \
         (1, 8, 64 requests per poll)"
    )
}

/// Prints the medians and the highest counts, and compares them with the goals.
fn report(runs: &[Vec<Run>], journal_costs: &[[f64; 3]]) -> anyhow::Result<()> {
    let mut missed = Vec::new();
    let costs = [0, 1, 2].map(|at| median(journal_costs.iter().map(|costs| costs[at]).collect()));
    println!("medians: {}", format_costs(costs));
    if costs[1] > JOURNAL_COST_MAX {
        let cost = costs[1];
        missed.push(format!(
            "cost with the journal {cost:.2}, goal {JOURNAL_COST_MAX}"
        ));
    }
    for (load, runs) in LOADS.iter().zip(runs) {
        let medians = |of: fn(&Run) -> [f64; 2]| {
            [0, 1].map(|at| median(runs.iter().map(|run| of(run)[at]).collect()))
        };
        let highest = |of: fn(&Run) -> f64| runs.iter().map(of).fold(0.0, f64::max);
        let ratios = medians(Run::ratios);
        let run = Run {
            accepted: medians(|run| run.accepted),
            bare: medians(|run| run.bare),
            same_client: medians(|run| run.same_client),
            same_cost: medians(|run| run.same_cost),
            page_faults: highest(|run| run.page_faults),
            not_submitted: highest(|run| run.not_submitted),
            refused: highest(|run| run.refused),
        };
        let client_ratios = medians(Run::client_ratios);
        println!(
            "medians, {}: {}; highest of the rounds: {}",
            load.name,
            run.format(ratios, client_ratios),
            run.format_counts()
        );
        for (is, max, what) in [
            (run.page_faults, PAGE_FAULTS_MAX, "page faults"),
            (
                run.not_submitted,
                NOT_SUBMITTED_MAX,
                "requests not submitted",
            ),
            (run.refused, REFUSED_MAX, "of the requests refused"),
        ] {
            if is > max {
                missed.push(format!("{}: {is} {what} in a round, goal {max}", load.name));
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A round in which every percentile is that of the bare rings.
    const AT_BARE_RINGS: Run = Run {
        accepted: [1_000.0; 2],
        bare: [1_000.0; 2],
        same_client: [1_000.0; 2],
        same_cost: [1_000.0; 2],
        page_faults: 0.0,
        not_submitted: 0.0,
        refused: 0.0,
    };

    /// Compares rounds of the last load with its goals.
    fn missed(rounds: [Run; 3]) -> String {
        let mut runs = LOADS.map(|_| Vec::new());
        runs[3].extend(rounds);
        let result = report(&runs, &[[1.0; 3]]);
        result
            .err()
            .map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn medians_of_the_ratios_are_compared_with_the_goals() {
        let run = |p50, p99| Run {
            accepted: [p50, p99],
            // Not judged.
            same_client: [1.0; 2],
            same_cost: [1.0; 2],
            ..AT_BARE_RINGS
        };
        let runs = |p50: [f64; 3]| {
            let mut runs = LOADS.map(|_| Vec::new());
            runs[0].extend(p50.map(|p50| run(p50, 9_000.0)));
            runs[1].push(run(9_000.0, 2_000.0));
            runs
        };
        let costs = [[9.0, 1.3, 9.0]];
        report(&runs([2_500.0, 9_000.0, 1_000.0]), &costs).expect("all at their goals");
        let error = report(&runs([2_500.0; 3]), &[[1.0, 1.4, 1.0]]).expect_err("above 1.3");
        assert!(error.to_string().contains("journal 1.40"), "{error}");
        let error = report(&runs([2_600.0, 9_000.0, 1_000.0]), &costs).expect_err("above 2.5");
        let text = error.to_string();
        assert!(
            text.contains("60 % of capacity: p50_ns ratio 2.60"),
            "{text}"
        );
    }

    #[test]
    fn the_judged_ratio_is_that_to_a_client_that_only_counts() {
        let both = |ns: f64| serde_json::json!({ "p50_ns": ns, "p99_ns": ns });
        let run = Run::of(&serde_json::json!({
            "accepted": both(1_200.0), "floor_plain": both(400.0), "floor": both(600.0),
            "floor_service": both(800.0), "hot_page_faults": 0,
            "not_submitted": 0, "refused": 5, "requests": 1_000,
        }));
        let run = run.expect("complete");
        assert_eq!(run.ratios(), [3.0; 2]);
        assert_eq!(run.client_ratios(), [2.0; 2]);
        assert_eq!(run.refused, 0.005);
    }

    #[test]
    fn page_faults_in_one_round_miss_the_goal() {
        let with = |page_faults| Run {
            page_faults,
            ..AT_BARE_RINGS
        };
        assert_eq!(missed([0.0; 3].map(with)), "");
        assert_eq!(
            missed([0.0, 9.0, 0.0].map(with)),
            "not met: 1,500,000/s: 9 page faults in a round, goal 0"
        );
    }

    #[test]
    fn requests_without_a_latency_and_refused_ones_miss_the_goal() {
        let with = |(not_submitted, refused)| Run {
            not_submitted,
            refused,
            ..AT_BARE_RINGS
        };
        assert_eq!(missed([(0.0, 0.01); 3].map(with)), "");
        assert_eq!(
            missed([(0.0, 0.0), (0.0, 0.0), (1.0, 0.5)].map(with)),
            "not met: 1,500,000/s: 1 requests not submitted in a round, goal 0; \
             1,500,000/s: 0.5 of the requests refused in a round, goal 0.01"
        );
    }

    #[test]
    fn figures_without_page_faults_are_an_error() {
        let both = serde_json::json!({ "p50_ns": 1.0, "p99_ns": 2.0 });
        let mut figures = serde_json::json!({
            "hot_page_faults": 4, "not_submitted": 0, "refused": 0, "requests": 1,
        });
        for name in ["accepted", "floor", "floor_service", "floor_plain"] {
            figures[name] = both.clone();
        }
        assert_eq!(Run::of(&figures).expect("complete").page_faults, 4.0);
        figures["hot_page_faults"] = Value::Null;
        let error = Run::of(&figures).map(drop).expect_err("not counted");
        assert!(error.to_string().contains("hot_page_faults"), "{error}");
    }
}
