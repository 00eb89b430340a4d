//! Figures of an attack against its control, and what is wrong with them.

use std::time::Duration;

use super::Outcome;
use super::honest::Figures;

/// Median of the honest p50, against that of the control.
const RATIO_MAX: f64 = 1.25;
/// How much longer than the control's longest gap one may be.
const GAP_MORE: Duration = Duration::from_millis(50);
/// Resident memory after the first run: so many percent of what it was, and this.
const RESIDENT_PERCENT: u64 = 110;
const RESIDENT_MORE: u64 = 32 << 20;
/// What a second run may add: what an allocator's pages move by.
const SECOND_RUN_MORE: u64 = 8 << 20;

/// What came of an attack.
pub struct Verdict {
    pub name: &'static str,
    /// What breaks a bound.
    pub wrong: Vec<String>,
    pub(super) resident_bytes: Vec<u64>,
    judges_latency: bool,
    figures: Vec<Figures>,
    outcomes: Vec<String>,
    latency: String,
}

impl Verdict {
    pub(super) fn new(name: &'static str, judges_latency: bool) -> Self {
        Self {
            name,
            wrong: Vec::new(),
            resident_bytes: Vec::new(),
            judges_latency,
            figures: Vec::new(),
            outcomes: Vec::new(),
            latency: String::new(),
        }
    }

    pub(super) fn add(&mut self, figures: Figures, outcome: &Outcome) {
        let run = format!("{} honest requests", figures.durable_us.len());
        self.note(&run, outcome);
        self.figures.push(figures);
    }

    /// What a run had to say.
    pub(super) fn note(&mut self, run: &str, outcome: &Outcome) {
        self.outcomes.push(format!("{run}; {}", outcome.said));
        self.wrong.extend(outcome.wrong.iter().cloned());
    }

    /// Compares latency with the control's, and memory with what it was.
    pub(super) fn compare(&mut self, control: &[Figures]) {
        let (ours, theirs) = (median_p50(&self.figures), median_p50(control));
        let ratio = ours as f64 / theirs.max(1) as f64;
        let (gap, control_gap) = (longest_gap(&self.figures), longest_gap(control));
        self.latency = format!(
            "honest p50 {ours} us, control {theirs} us, ratio {ratio:.2}; longest gap {} ms, control {} ms",
            gap.as_millis(),
            control_gap.as_millis()
        );
        if self.judges_latency && ratio > RATIO_MAX {
            self.wrong
                .push(format!("honest p50 {ratio:.2} of the control's"));
        }
        if self.judges_latency && gap > control_gap + GAP_MORE {
            self.wrong
                .push(format!("gap of {gap:?}, control {control_gap:?}"));
        }
        if let [before, after, ..] = self.resident_bytes[..]
            && after > before * RESIDENT_PERCENT / 100 + RESIDENT_MORE
        {
            self.wrong
                .push(format!("memory {} -> {} MiB", before >> 20, after >> 20));
        }
        if let [_, first, second, ..] = self.resident_bytes[..]
            && second > first + SECOND_RUN_MORE
        {
            let (first, second) = (first >> 20, second >> 20);
            self.wrong
                .push(format!("memory of a second run {first} -> {second} MiB"));
        }
    }
}

/// Median over the runs.
fn median_p50(runs: &[Figures]) -> u64 {
    let p50 = |figures: &Figures| figures.durable_us.value_at_quantile(0.5);
    let mut values: Vec<u64> = runs.iter().map(p50).collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn longest_gap(runs: &[Figures]) -> Duration {
    runs.iter()
        .map(|figures| figures.gap)
        .max()
        .unwrap_or_default()
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let resident: Vec<String> = self
            .resident_bytes
            .iter()
            .map(|b| (b >> 20).to_string())
            .collect();
        writeln!(
            f,
            "{}: {}; memory {} MiB",
            self.name,
            self.latency,
            resident.join(" -> ")
        )?;
        for outcome in &self.outcomes {
            writeln!(f, "    {outcome}")?;
        }
        for wrong in &self.wrong {
            writeln!(f, "    WRONG: {wrong}")?;
        }
        Ok(())
    }
}
