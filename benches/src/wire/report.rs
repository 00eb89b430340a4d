//! Figures of a run, as JSON.

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::baselines::Baselines;
use super::closed_loop::Latencies;
use super::flow::Counts;
use super::reference::Verified;
use super::sample::{Sample, Samples};
use super::settings::Settings;
use super::setup::Status;
use crate::median;

/// What a run has measured, and the settings that applied.
pub struct Report {
    /// The load, as JSON.
    pub load: Value,
    pub cores: usize,
    pub settings: Settings,
    pub status: Status,
    /// TRADING limit of a user, as JSON of the contract.
    pub trading_budget: Value,
    pub latencies: Latencies,
    pub baselines: Baselines,
    pub counts: Counts,
    pub samples: Samples,
    /// `None` without a replay of the journal.
    pub verified: Option<Verified>,
}

impl Report {
    /// All figures, by name.
    pub fn json(&self) -> Value {
        let (settings, counts) = (&self.settings, &self.counts);
        let share = |part: u64| part as f64 / counts.answered().max(1) as f64;
        let per_s = |requests: u64| (requests as f64 / counts.seconds).round();
        let mut figures = json!({
            "load": self.load,
            "cores": self.cores,
            "layout": settings.layout,
            "trading": settings.trading,
            "bounds": self.status.bounds,
            "trading_budget": self.trading_budget,
            "trading_limit_basis": settings.trading_limit_basis,
            "echo": percentiles(&self.baselines.echo),
            "net": percentiles(&self.baselines.net),
            "accepted": percentiles(&self.latencies.accepted),
            "durable": percentiles(&self.latencies.durable),
            "durable_floor": percentiles(&self.baselines.durable),
            "orders_per_s": per_s(counts.durable),
            "answered_per_s": per_s(counts.answered()),
            "reject_rate": share(counts.refused),
            "too_late_rate": share(counts.too_late),
            "self_trade_rate": share(counts.prevented),
            "overdue_max": counts.overdue_max,
            "trades": counts.trades,
            "trades_per_order": share(counts.trades),
            "duration_s": counts.seconds,
            "judged": self.verified.map(|Verified { commands, trades }| {
                json!({ "commands": commands, "trades": trades })
            }),
        });
        let load_metrics = load_metrics(&self.samples, counts);
        for (key, value) in load_metrics.as_object().into_iter().flatten() {
            figures[key] = value.clone();
        }
        figures
    }
}

fn percentiles(histogram: &Histogram<u64>) -> Value {
    let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1_000.0;
    json!({ "p50_us": us(0.5), "p99_us": us(0.99), "p999_us": us(0.999) })
}

/// Rates and lags during the flow.
fn load_metrics(samples: &Samples, counts: &Counts) -> Value {
    let Samples {
        seconds,
        end,
        after,
    } = samples;
    let max_of = |of: fn(&Sample) -> f64| {
        let all = seconds.iter().chain([end, after]);
        all.map(of).fold(0.0, f64::max)
    };
    // Rates are those between two samples of the flow: the first one is taken one second into it,
    // and the last one before its end, so that neither includes time without requests.
    let rate = |of: fn(&Sample) -> f64| match &seconds[..] {
        [first, .., last] => {
            (of(last) - of(first)) / last.at.duration_since(first.at).as_secs_f64()
        }
        _ => 0.0,
    };
    let per_s = rate(|s| s.assigned);
    // A follower processes the assigned records that it does not lag by.
    let processed_per_s = |lag_growth_per_s: f64| (per_s - lag_growth_per_s).max(0.0).round();
    let trades_per_s = (counts.trades as f64 / counts.seconds).max(1.0);
    // Time to post the records that are not in the ledger, plus time to finalize the posted trades.
    let settlement_lag_s = |s: &Sample| s.settlement_lag / per_s + s.trades_pending / trades_per_s;
    let ms = |records: f64| (records / per_s * 1e5).round() / 100.0;
    let lags_ms: Vec<f64> = seconds.iter().map(|s| ms(s.replica_lag)).collect();
    let faults_before = seconds.first().map_or(end.page_faults, |s| s.page_faults);
    json!({
        "records_per_s": per_s.round(),
        "replica_lag_ms": ms(max_of(|s| s.replica_lag.max(s.replica_lag_max))),
        "replica_lags_ms": lags_ms,
        "replica_lag_p50_ms": median(lags_ms.clone()),
        "replica_lag_quarters_ms": quarters(&lags_ms),
        "history_per_s": processed_per_s(rate(|s| s.history_lag)),
        "settlement_per_s": processed_per_s(rate(|s| s.settlement_lag)),
        "settlement_lag_records": max_of(|s| s.settlement_lag),
        "settlement_lag_end_s": settlement_lag_s(end),
        "trades_final_per_s": rate(|s| s.trades_final).round(),
        "intake_stage": max_of(|s| s.stage),
        "hot_page_faults": after.page_faults - faults_before,
        "rss_mb": (max_of(|s| s.resident_bytes) / 1e6).round(),
        "tenths": tenths(seconds, settlement_lag_s, per_s),
    })
}

/// Median of each quarter of the values, in their order.
fn quarters(values: &[f64]) -> [f64; 4] {
    [0, 1, 2, 3].map(|quarter| {
        let bounds = values.len() * quarter / 4..values.len() * (quarter + 1) / 4;
        median(values[bounds].to_vec())
    })
}

/// Highest lags in seconds and memory of each tenth of the flow.
fn tenths(samples: &[Sample], settlement_lag_s: impl Fn(&Sample) -> f64, per_s: f64) -> Vec<Value> {
    let tenths = samples.chunks(samples.len().div_ceil(10).max(1));
    let tenths = tenths.map(|tenth| {
        let max = |of: &dyn Fn(&Sample) -> f64| tenth.iter().map(of).fold(0.0, f64::max);
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        json!({
            "settlement_lag_s": rounded(max(&settlement_lag_s)),
            "history_lag_s": rounded(max(&|s| s.history_lag / per_s)),
            "replica_lag_s": rounded(max(&|s| s.replica_lag / per_s)),
            "rss_mb": (max(&|s| s.resident_bytes) / 1e6).round(),
        })
    });
    tenths.collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::hop::histogram;

    /// Figures that other programs read, and which do not change.
    const PUBLISHED: [&str; 15] = [
        "echo",
        "net",
        "accepted",
        "durable",
        "durable_floor",
        "orders_per_s",
        "cores",
        "layout",
        "reject_rate",
        "trades",
        "duration_s",
        "replica_lag_ms",
        "rss_mb",
        "settlement_per_s",
        "history_per_s",
    ];
    const DISTRIBUTIONS: [&str; 5] = ["echo", "net", "accepted", "durable", "durable_floor"];
    /// Figures of `cargo xtask bench`, and settings.
    const FURTHER: [&str; 21] = [
        "overdue_max",
        "trading",
        "records_per_s",
        "answered_per_s",
        "load",
        "bounds",
        "trading_budget",
        "trading_limit_basis",
        "too_late_rate",
        "self_trade_rate",
        "trades_per_order",
        "judged",
        "replica_lags_ms",
        "replica_lag_p50_ms",
        "replica_lag_quarters_ms",
        "settlement_lag_records",
        "settlement_lag_end_s",
        "trades_final_per_s",
        "intake_stage",
        "hot_page_faults",
        "tenths",
    ];

    fn sample(at: Instant, second: u32, replica_lag: f64, replica_lag_max: f64) -> Sample {
        Sample {
            at: at + Duration::from_secs(second.into()),
            assigned: f64::from(second) * 1_000.0,
            replica_lag,
            replica_lag_max,
            history_lag: 0.0,
            settlement_lag: 0.0,
            trades_pending: 0.0,
            trades_final: 0.0,
            stage: 0.0,
            resident_bytes: 1e9,
            page_faults: 0.0,
        }
    }

    /// A run of 1,000 requests/s with these samples of the replica's lag and its maximum, in
    /// records. The last one is also that of the end and that after it.
    fn report(lags: &[(f64, f64)]) -> Report {
        let begun = Instant::now();
        let samples = lags.iter().zip(1..);
        let seconds: Vec<Sample> = samples
            .map(|((lag, highest), second)| sample(begun, second, *lag, *highest))
            .collect();
        let last = *seconds.last().expect("at least one sample");
        Report {
            load: json!({}),
            cores: 2,
            settings: Settings {
                layout: "fused".to_owned(),
                trading: json!({}),
                trading_limit_basis: json!("quantity"),
            },
            status: Status {
                commit: 1,
                bounds: json!({}),
            },
            trading_budget: json!({}),
            latencies: Latencies {
                accepted: histogram(),
                durable: histogram(),
            },
            baselines: Baselines {
                echo: histogram(),
                net: histogram(),
                durable: histogram(),
            },
            counts: Counts {
                durable: 10_000,
                seconds: 10.0,
                ..Counts::default()
            },
            samples: Samples {
                seconds,
                end: last,
                after: last,
            },
            verified: None,
        }
    }

    fn keys(value: &Value) -> Vec<&str> {
        let object = value.as_object().expect("an object");
        let mut keys: Vec<&str> = object.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn the_figures_have_their_published_names() {
        let figures = report(&[(1.0, 1.0); 4]).json();
        let mut expected = [&PUBLISHED[..], &FURTHER[..]].concat();
        expected.sort_unstable();
        assert_eq!(keys(&figures), expected);
        for name in DISTRIBUTIONS {
            assert_eq!(keys(&figures[name]), ["p50_us", "p999_us", "p99_us"]);
        }
        assert_eq!(figures["layout"], "fused");
        let numbers = PUBLISHED.iter().filter(|name| figures[**name].is_number());
        assert_eq!(
            numbers.count() + DISTRIBUTIONS.len() + 1,
            PUBLISHED.len(),
            "all but the distributions and the layout are numbers"
        );
    }

    #[test]
    fn refused_requests_are_answered_but_not_durable() {
        let mut report = report(&[(1.0, 1.0); 4]);
        report.counts.refused = 1_000;
        report.counts.too_late = 9_000;
        let figures = report.json();
        assert_eq!(figures["orders_per_s"], 1_000.0);
        assert_eq!(figures["answered_per_s"], 2_000.0);
        assert_eq!(figures["reject_rate"], 0.05);
        assert_eq!(figures["too_late_rate"], 0.45);
    }

    #[test]
    fn the_highest_lag_includes_peaks_that_no_sample_has() {
        let figures = report(&[(2.0, 3.0), (4.0, 250.0), (1.0, 250.0)]).json();
        assert_eq!(figures["replica_lag_ms"], 250.0);
        assert_eq!(figures["replica_lag_p50_ms"], 2.0);
    }

    #[test]
    fn the_highest_lag_includes_a_peak_in_the_last_second() {
        let mut report = report(&[(2.0, 3.0); 4]);
        report.samples.after.replica_lag_max = 270.0;
        assert_eq!(report.json()["replica_lag_ms"], 270.0);
    }

    #[test]
    fn rates_and_lag_exclude_the_time_after_the_flow() {
        let mut report = report(&[(1.0, 1.0); 5]);
        for (second, number) in report.samples.seconds.iter_mut().zip(1_u32..) {
            // It processes 100 of the 1,000 records per second.
            second.settlement_lag = 900.0 * f64::from(number);
            second.history_lag = 10.0;
        }
        report.samples.end.settlement_lag = 4_500.0;
        report.samples.after.settlement_lag = 4_000.0;
        let figures = report.json();
        assert_eq!(figures["records_per_s"], 1_000.0);
        assert_eq!(figures["settlement_per_s"], 100.0);
        assert_eq!(figures["history_per_s"], 1_000.0);
        assert_eq!(figures["settlement_lag_end_s"], 4.5);
    }

    #[test]
    fn each_quarter_of_the_flow_has_its_own_median() {
        let lags = [1.0, 1.0, 1.0, 2.0, 9.0, 2.0, 3.0, 3.0, 3.0, 8.0, 9.0, 9.0];
        let figures = report(&lags.map(|lag| (lag, lag))).json();
        let expected = json!([1.0, 2.0, 3.0, 9.0]);
        assert_eq!(figures["replica_lag_quarters_ms"], expected);
    }
}
