//! Times at which the machine itself does not run a core, as hosts of virtual machines do for up to
//! 100 ms. A thread per core of the highest real-time priority sleeps for a millisecond at a time,
//! and each time it wakes much too late is a stall: nothing else on that core ran either. A gap in
//! the honest member's reports is judged without them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

const SLEEP: Duration = Duration::from_millis(1);
/// Delay from which on a late wake is a stall. Interrupts and the kernel take less.
const STALL_MIN: Duration = Duration::from_millis(5);

/// A time from its first to its last instant.
pub type Span = (Instant, Instant);

/// Watches the cores until it is finished.
pub struct Watch {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Span>>>,
}

impl Watch {
    /// Starts a thread per core.
    pub fn begin() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let cores = core_affinity::get_core_ids().unwrap_or_default();
        let threads = cores.into_iter().map(|core| {
            let ended = Arc::clone(&ended);
            std::thread::spawn(move || watch(core, &ended))
        });
        Self {
            threads: threads.collect(),
            ended,
        }
    }

    /// Ends the threads and returns the stalls of all cores, ordered by their beginning. Without
    /// the permission for real-time priority (`CAP_SYS_NICE`) there are none.
    ///
    /// # Panics
    /// If a thread has panicked.
    pub fn finish(self) -> Vec<Span> {
        self.ended.store(true, Ordering::Relaxed);
        let spans = self.threads.into_iter().map(JoinHandle::join);
        let mut stalls: Vec<Span> = spans
            .flat_map(|spans| spans.expect("the thread finishes"))
            .collect();
        stalls.sort_unstable();
        stalls
    }
}

/// Returns the stalls of a core.
fn watch(core: core_affinity::CoreId, ended: &AtomicBool) -> Vec<Span> {
    let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);
    let is_first =
        set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Max, policy).is_ok();
    let mut stalls = Vec::new();
    if !is_first || !core_affinity::set_for_current(core) {
        return stalls;
    }
    while !ended.load(Ordering::Relaxed) {
        let due = Instant::now() + SLEEP;
        std::thread::sleep(SLEEP);
        let woken = Instant::now();
        if woken - due >= STALL_MIN {
            stalls.push((due, woken));
        }
    }
    stalls
}

/// Length of a gap without the stalls in it. `stalls` are ordered by their beginning; those of two
/// cores may overlap.
pub fn without((from, to): Span, stalls: &[Span]) -> Duration {
    let mut counted_to = from;
    let mut rest = to - from;
    for (begun, ended) in stalls {
        let (begun, ended) = ((*begun).max(counted_to), (*ended).min(to));
        if begun < ended {
            rest -= ended - begun;
            counted_to = ended;
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_without_the_stalls_in_it() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let stalls = [(0, 20), (30, 60), (40, 50), (50, 70), (95, 300), (400, 500)];
        let stalls = stalls.map(|(from, to)| (at(from), at(to)));
        let rest = |from, to| without((at(from), at(to)), &stalls).as_millis();
        assert_eq!(rest(10, 100), 35);
        assert_eq!(rest(70, 95), 25);
        assert_eq!(rest(310, 390), 80);
        assert_eq!(rest(100, 200), 0);
        assert_eq!(without((at(0), at(9)), &[]).as_millis(), 9);
    }
}
