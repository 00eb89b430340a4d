//! Counters of the hot thread, published once per iteration and read by metrics exporters.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Counters since the start. Each is exact; together they may differ by an iteration.
#[derive(Debug, Default)]
pub struct Stats {
    /// Last node sequence.
    pub sequence: AtomicU64,
    pub commands: AtomicU64,
    pub events: AtomicU64,
    pub trades: AtomicU64,
    /// Requests answered without a journal record.
    pub not_submitted: AtomicU64,
    /// Of these, refused `BUSY`: rings or journal are full.
    pub busy: AtomicU64,
    /// Maximum number of commands in flight.
    pub in_flight_max: AtomicU64,
    /// Number of times that the hot thread has parked.
    pub parks: AtomicU64,
    /// Thread id of the hot thread; 0 before it runs.
    thread: AtomicI32,
}

impl Stats {
    /// Records the id of the calling thread, which is the hot thread.
    pub(crate) fn begin(&self) {
        let thread = rustix::thread::gettid();
        let id = thread.as_raw_nonzero().get();
        self.thread.store(id, Ordering::Relaxed);
    }

    /// Page faults of the hot thread since its start; none are expected while it trades.
    ///
    /// `None` before the thread runs. Reads a file, so it is not for the hot thread.
    pub fn page_faults(&self) -> Option<u64> {
        let thread = self.thread.load(Ordering::Relaxed);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
        page_faults_of(&stat)
    }
}

/// Minor and major faults in a `stat` line: fields 10 and 12 of `proc_pid_stat(5)`. The name before
/// them may contain any byte.
fn page_faults_of(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(7).step_by(2);
    let minor: u64 = fields.next()?.parse().ok()?;
    let major: u64 = fields.next()?.parse().ok()?;
    Some(minor + major)
}

/// The hot thread's own copy of the counters.
#[derive(Default)]
pub(crate) struct Tally {
    pub commands: u64,
    pub events: u64,
    pub not_submitted: u64,
    pub busy: u64,
    pub in_flight_max: u64,
    pub parks: u64,
}

impl Tally {
    pub fn publish(&self, stats: &Stats, sequence: u64, trades: u64) {
        let set = |counter: &AtomicU64, value| counter.store(value, Ordering::Relaxed);
        set(&stats.sequence, sequence);
        set(&stats.commands, self.commands);
        set(&stats.events, self.events);
        set(&stats.trades, trades);
        set(&stats.not_submitted, self.not_submitted);
        set(&stats.busy, self.busy);
        set(&stats.in_flight_max, self.in_flight_max);
        set(&stats.parks, self.parks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_faults_are_read_after_any_name() {
        let stat = "4711 (a) b (c) R 1 2 3 4 5 4194304 120 0 7 0 10 20";
        assert_eq!(page_faults_of(stat), Some(127));
        assert_eq!(page_faults_of("4711 (hot) R 1"), None);
    }

    #[test]
    fn a_thread_that_touches_new_memory_has_page_faults() {
        let stats = Stats::default();
        assert_eq!(stats.page_faults(), None);
        stats.begin();
        let before = stats.page_faults().unwrap();
        let pages = vec![1_u8; 16 << 20];
        assert!(stats.page_faults().unwrap() > before, "{}", pages.len());
    }
}
