//! Results of a load run: counts, and latencies measured from each request's scheduled send time
//! (no coordinated omission).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// A request sent more than this after its scheduled time is late.
const LATE: Duration = Duration::from_millis(1);
/// Printed percentiles.
const QUANTILES: [(&str, f64); 5] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p999", 0.999),
    ("p9999", 0.9999),
];

/// Counts and histograms; durations in nanoseconds.
pub struct Tally {
    /// Requests that became due.
    pub offered: u64,
    pub sent: u64,
    /// Requests answered by a numbered message other than a refusal.
    pub durable_answers: u64,
    /// Refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Trades, counted by the taker's fills.
    pub trades: u64,
    /// Requests delayed because every session's window was full.
    pub delayed_by_window: u64,
    /// Requests sent more than 1 ms after their scheduled time.
    pub late: u64,
    pub late_max: Duration,
    /// Scheduled time to *accepted*.
    pub accepted: Histogram<u64>,
    /// Scheduled time to the durable answer.
    pub durable: Histogram<u64>,
    /// Duration of the sending phase.
    pub elapsed: Duration,
}

impl Default for Tally {
    fn default() -> Self {
        let times = || Histogram::new_with_bounds(1, 600_000_000_000, 3).expect("fixed bounds");
        Self {
            offered: 0,
            sent: 0,
            durable_answers: 0,
            refused: BTreeMap::new(),
            trades: 0,
            delayed_by_window: 0,
            late: 0,
            late_max: Duration::ZERO,
            accepted: times(),
            durable: times(),
            elapsed: Duration::ZERO,
        }
    }
}

impl Tally {
    /// Counts a request sent `delay` after its scheduled time.
    pub fn record_sent(&mut self, delay: Duration) {
        self.sent += 1;
        self.late += u64::from(delay > LATE);
        self.late_max = self.late_max.max(delay);
    }

    pub fn record_accepted(&mut self, latency: Duration) {
        record(&mut self.accepted, latency);
    }

    pub fn record_durable_answer(&mut self, latency: Duration) {
        self.durable_answers += 1;
        record(&mut self.durable, latency);
    }

    pub fn record_refused(&mut self, reason: &'static str) {
        *self.refused.entry(reason).or_default() += 1;
    }

    pub fn refused_count(&self) -> u64 {
        self.refused.values().sum()
    }

    pub fn unsent(&self) -> u64 {
        self.offered - self.sent
    }

    pub fn unanswered(&self) -> u64 {
        self.sent - self.durable_answers - self.refused_count()
    }

    /// The results, latencies in microseconds.
    pub fn to_json(&self) -> Value {
        let seconds = self.elapsed.as_secs_f64();
        json!({
            "elapsed_s": (seconds * 1_000.0).round() / 1_000.0,
            "offered": self.offered,
            "sent": self.sent,
            "unsent": self.unsent(),
            "acknowledged": self.durable_answers,
            "refused": self.refused_count(),
            "refused_by_reason": self.refused,
            "unanswered": self.unanswered(),
            "trades": self.trades,
            "acknowledged_per_s": (self.durable_answers as f64 / seconds.max(1e-9)).round(),
            "late": {
                "over_1_ms": self.late,
                "held_by_window": self.delayed_by_window,
                "max_us": self.late_max.as_micros() as u64,
            },
            "accepted_us": percentiles(&self.accepted),
            "durable_us": percentiles(&self.durable),
        })
    }

    /// Notes on what the percentiles exclude or include.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.late > 0 {
            notes.push(format!(
                "{} of {} requests were sent more than 1 ms late; latency is measured from the \
                 scheduled time; {} requests waited for a full window",
                self.late, self.sent, self.delayed_by_window
            ));
        }
        if self.unsent() > 0 {
            notes.push(format!(
                "{} requests were due and never sent: the percentiles exclude them",
                self.unsent()
            ));
        }
        if self.unanswered() > 0 {
            notes.push(format!(
                "{} requests have no answer: the percentiles exclude them",
                self.unanswered()
            ));
        }
        notes
    }
}

fn record(times: &mut Histogram<u64>, latency: Duration) {
    times.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(1));
}

fn percentiles(times: &Histogram<u64>) -> Value {
    let us = |ns: u64| ns as f64 / 1_000.0;
    let mut result = json!({ "count": times.len() });
    for (name, quantile) in QUANTILES {
        result[name] = json!(us(times.value_at_quantile(quantile)));
    }
    result["max"] = json!(us(times.max()));
    result
}

/// Due times of a session's unanswered requests, by client sequence.
#[derive(Default)]
pub struct Pending {
    /// Client sequence of the first entry.
    first: u64,
    due: VecDeque<Option<Duration>>,
    count: usize,
}

impl Pending {
    pub fn len(&self) -> usize {
        self.count
    }

    /// `client_seq` must be one above that of the previous call.
    pub fn sent(&mut self, client_seq: u64, due: Duration) {
        if self.due.is_empty() {
            self.first = client_seq;
        }
        self.due.push_back(Some(due));
        self.count += 1;
    }

    pub fn due(&self, client_seq: u64) -> Option<Duration> {
        let at = client_seq.checked_sub(self.first)?;
        *self.due.get(usize::try_from(at).ok()?)?
    }

    /// Removes an answered request.
    pub fn answered(&mut self, client_seq: u64) -> Option<Duration> {
        let at = usize::try_from(client_seq.checked_sub(self.first)?).ok()?;
        let due = self.due.get_mut(at)?.take()?;
        self.count -= 1;
        while let Some(None) = self.due.front() {
            self.due.pop_front();
            self.first += 1;
        }
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_times_are_found_for_answers_in_any_order() {
        let at = Duration::from_millis;
        let mut pending = Pending::default();
        for seq in 5..8 {
            pending.sent(seq, at(seq));
        }
        assert_eq!(pending.answered(6), Some(at(6)));
        assert_eq!(pending.answered(6), None);
        assert_eq!((pending.due(5), pending.due(6)), (Some(at(5)), None));
        assert_eq!(pending.answered(5), Some(at(5)));
        assert_eq!(
            (pending.len(), pending.due(4), pending.due(9)),
            (1, None, None)
        );
        assert_eq!(pending.answered(7), Some(at(7)));
        pending.sent(8, at(8));
        assert_eq!((pending.len(), pending.due(8)), (1, Some(at(8))));
    }

    #[test]
    fn results_add_up_and_missing_answers_are_noted() {
        let mut tally = Tally {
            offered: 10,
            elapsed: Duration::from_secs(2),
            ..Tally::default()
        };
        for ms in 0..8 {
            tally.record_sent(Duration::from_millis(ms));
        }
        for ms in 1..=5 {
            tally.record_durable_answer(Duration::from_millis(ms));
        }
        tally.record_refused("THROTTLE");
        let results = tally.to_json();
        assert_eq!(results["unsent"], 2);
        assert_eq!(results["unanswered"], 2);
        assert_eq!(results["refused_by_reason"]["THROTTLE"], 1);
        assert_eq!(results["late"]["over_1_ms"], 6);
        assert_eq!(results["durable_us"]["count"], 5);
        assert_eq!(tally.notes().len(), 3);
        assert!(Tally::default().notes().is_empty());
    }
}
