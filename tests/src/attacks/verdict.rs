//! Figures of an attack compared with those of its control, and violated bounds.

use std::time::Duration;

use super::Outcome;
use super::honest::Figures;

/// Largest ratio of the honest member's median p50 next to the attack to that next to the control.
const RATIO_MAX: f64 = 1.25;
/// Largest excess of the honest member's longest gap over that next to the control, both without
/// the machine's stalls.
const GAP_EXCESS_MAX: Duration = Duration::from_millis(50);
/// Largest excess of a run's stalls of the machine over those of a control run. With more, the
/// attack may cause them, and a gap without them proves nothing.
const STALLED_EXCESS_MAX: Duration = Duration::from_secs(1);
/// Bound of resident memory after the first run and after each further control run: this percentage
/// of the memory before the first run, plus these bytes.
const RESIDENT_PERCENT: u64 = 110;
const RESIDENT_EXCESS_MAX: u64 = 32 << 20;
/// Most bytes that a further run of the attack may add: noise of the allocator's pages.
const FURTHER_RUN_EXCESS_MAX: u64 = 8 << 20;

/// Verdict on an attack.
pub struct Verdict {
    pub name: &'static str,
    /// Violated bounds.
    pub violations: Vec<String>,
    /// Resident memory before the first run and after each run, further control runs included.
    pub(super) resident_bytes: Vec<u64>,
    /// Indexes in `resident_bytes` of further control runs.
    control_steps: Vec<usize>,
    /// Bytes that bounded caches may add in the first run.
    pub(super) caches_bytes: u64,
    checks_latency: bool,
    figures: Vec<Figures>,
    outcomes: Vec<String>,
    latency: String,
}

impl Verdict {
    pub(super) fn new(name: &'static str, checks_latency: bool) -> Self {
        Self {
            name,
            violations: Vec::new(),
            resident_bytes: Vec::new(),
            control_steps: Vec::new(),
            caches_bytes: 0,
            checks_latency,
            figures: Vec::new(),
            outcomes: Vec::new(),
            latency: String::new(),
        }
    }

    /// Adds the figures and the outcome of a run of the attack.
    pub(super) fn add(&mut self, figures: Figures, outcome: &Outcome) {
        let run = format!("{} honest requests", figures.durable_us.len());
        self.note(&run, outcome);
        self.figures.push(figures);
    }

    /// Adds the outcome of a run, of the attack or of the control.
    pub(super) fn note(&mut self, run: &str, outcome: &Outcome) {
        self.outcomes.push(format!("{run}; {}", outcome.summary));
        self.violations.extend(outcome.violations.iter().cloned());
    }

    /// Adds the memory after a further control run. The next attack's growth counts from here.
    pub(super) fn add_control_memory(&mut self, bytes: u64) {
        self.control_steps.push(self.resident_bytes.len());
        self.resident_bytes.push(bytes);
    }

    /// Compares latency and gap with the control's, and memory after each run with its bound.
    pub(super) fn compare(&mut self, control: &[Figures]) {
        let (ours, theirs) = (median_p50(&self.figures), median_p50(control));
        let ratio = ours as f64 / theirs.max(1) as f64;
        let gaps = |runs: &[Figures]| {
            let all = longest(runs, |run| run.gap).as_millis();
            let own = longest(runs, |run| run.own_gap).as_millis();
            let stalled = longest(runs, |run| run.stalled).as_millis();
            format!("{own} ms ({all} with stalls of the machine, {stalled} ms in a run)")
        };
        self.latency = match self.figures.is_empty() {
            true => format!("honest p50 {theirs} us; longest gap {}", gaps(control)),
            false => format!(
                "honest p50 {ours} us, control {theirs} us, ratio {ratio:.2}; \
                 longest gap {}, control {}",
                gaps(&self.figures),
                gaps(control)
            ),
        };
        if self.checks_latency && ratio > RATIO_MAX {
            self.violations
                .push(format!("honest p50 is {ratio:.2} times the control's"));
        }
        let gap = longest(&self.figures, |run| run.own_gap);
        let control_gap = longest(control, |run| run.own_gap);
        if self.checks_latency && gap > control_gap + GAP_EXCESS_MAX {
            self.violations
                .push(format!("gap of {gap:?}, control {control_gap:?}"));
        }
        let stalled = longest(&self.figures, |run| run.stalled);
        let control_stalled = longest(control, |run| run.stalled);
        if self.checks_latency && stalled > control_stalled + STALLED_EXCESS_MAX {
            self.violations.push(format!(
                "the machine stalled for {stalled:?} in a run, in a control run for \
                 {control_stalled:?}: gaps cannot be judged, repeat the attack"
            ));
        }
        for step in 1..self.resident_bytes.len() {
            let (before, after) = self.resident_bytes.split_at(step);
            let is_control = self.control_steps.contains(&step);
            let (compared, most) = memory_bound(before, self.caches_bytes, is_control);
            if after[0] > most {
                let controls = self.control_steps.iter().filter(|at| **at <= step);
                let run = match is_control {
                    true => "a further control run".to_owned(),
                    false => format!("run {}", step - controls.count()),
                };
                let (before, after) = (compared >> 20, after[0] >> 20);
                self.violations
                    .push(format!("memory of {run}: {before} -> {after} MiB"));
            }
        }
    }

    /// True if the platform may have this much memory after the next run of the attack.
    pub(super) fn allows_memory(&self, bytes: u64) -> bool {
        let (_, most) = memory_bound(&self.resident_bytes, self.caches_bytes, false);
        bytes <= most
    }
}

/// The memory with which that after a run is compared, and the most that the run may leave.
/// `before` has the memory before the first run and after each earlier one.
///
/// A further run of the attack is compared with the highest of them: the allocator returns more
/// after some runs than after others. A further control run has the bound of the first run: its
/// orders make all services work, and each thread's freed pages return only with its next work.
fn memory_bound(before: &[u64], caches_bytes: u64, is_control: bool) -> (u64, u64) {
    match before {
        [] => (0, u64::MAX),
        [first, later @ ..] if is_control || later.is_empty() => {
            let most = first * RESIDENT_PERCENT / 100 + RESIDENT_EXCESS_MAX + caches_bytes;
            (*first, most)
        }
        [first, ..] => {
            let highest = before.iter().copied().max().unwrap_or(*first);
            (highest, highest + FURTHER_RUN_EXCESS_MAX)
        }
    }
}

/// Median of the runs' p50.
fn median_p50(runs: &[Figures]) -> u64 {
    let p50 = |figures: &Figures| figures.durable_us.value_at_quantile(0.5);
    let mut values: Vec<u64> = runs.iter().map(p50).collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn longest(runs: &[Figures], gap: fn(&Figures) -> Duration) -> Duration {
    runs.iter().map(gap).max().unwrap_or_default()
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
        for violation in &self.violations {
            writeln!(f, "    VIOLATION: {violation}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_first_run_may_add_a_share_and_a_further_one_only_noise() {
        let is_allowed = |before: &[u64], bytes: u64, caches: u64| {
            let (_, most) = memory_bound(before, caches, false);
            bytes <= most
        };
        assert!(is_allowed(&[], 1_000 * MIB, 0));
        assert!(is_allowed(&[100 * MIB], 142 * MIB, 0));
        assert!(!is_allowed(&[100 * MIB], 143 * MIB, 0));
        assert!(is_allowed(&[100 * MIB], 143 * MIB, MIB));
        assert!(is_allowed(&[100 * MIB, 140 * MIB], 148 * MIB, 0));
        assert!(!is_allowed(&[100 * MIB, 140 * MIB], 149 * MIB, 0));
        let with_a_low = [100 * MIB, 140 * MIB, 120 * MIB];
        assert!(is_allowed(&with_a_low, 148 * MIB, 0));
        assert!(!is_allowed(&with_a_low, 149 * MIB, 0));
        assert!(is_allowed(&[100 * MIB, 80 * MIB], 108 * MIB, 0));
        assert!(!is_allowed(&[100 * MIB, 80 * MIB], 109 * MIB, 0));
    }

    #[test]
    fn a_further_control_run_has_the_memory_bound_of_the_first_run() {
        // Memory in MiB before and after the first run, after a control run, after the second run.
        let judged = |resident: [u64; 4]| {
            let mut verdict = Verdict::new("x", false);
            verdict.caches_bytes = 64 * MIB;
            let [before, first, control, second] = resident.map(|mib| mib * MIB);
            verdict.resident_bytes.extend([before, first]);
            verdict.add_control_memory(control);
            verdict.resident_bytes.push(second);
            verdict.compare(&[]);
            verdict.violations.join("; ")
        };
        assert_eq!(judged([100, 120, 206, 214]), "");
        assert_eq!(
            judged([100, 207, 150, 150]),
            "memory of run 1: 100 -> 207 MiB"
        );
        assert_eq!(
            judged([100, 120, 207, 207]),
            "memory of a further control run: 100 -> 207 MiB"
        );
        assert_eq!(
            judged([100, 120, 206, 215]),
            "memory of run 2: 206 -> 215 MiB"
        );
    }

    #[test]
    fn a_long_run_checks_latency_and_a_short_one_does_not() {
        let figures = |us: u64, own_gap_ms, stalled_ms| {
            let mut durable_us = hdrhistogram::Histogram::new_with_bounds(1, 1_000_000, 3).unwrap();
            durable_us.record(us).unwrap();
            Figures {
                durable_us,
                gap: Duration::from_millis(100),
                own_gap: Duration::from_millis(own_gap_ms),
                stalled: Duration::from_millis(stalled_ms),
                violations: Vec::new(),
            }
        };
        let judged = |is_long, us, own_gap_ms, stalled_ms| {
            let mut verdict = Verdict::new("x", is_long);
            verdict.figures.push(figures(us, own_gap_ms, stalled_ms));
            verdict.compare(&[figures(400, 10, 500)]);
            verdict.violations.len()
        };
        assert_eq!(judged(true, 500, 60, 1_500), 0);
        assert_eq!(judged(true, 510, 60, 1_500), 1);
        assert_eq!(judged(true, 510, 61, 1_501), 3);
        assert_eq!(judged(false, 510, 61, 1_501), 0);
    }
}
