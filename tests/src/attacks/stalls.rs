//! Times at which the machine itself does not run a core, as hosts of virtual machines do for up to
//! 100 ms. A thread per core of the highest real-time priority sleeps for a millisecond at a time.
//! If it wakes much too late without having waited for its core, the core was stopped; other cores
//! may have run. A gap in the honest member's reports is judged without these times, and a run
//! whose attack has more of them than the control is void.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

const SLEEP: Duration = Duration::from_millis(1);
/// Delay from which on a late wake is a stall.
const STALL_MIN: Duration = Duration::from_millis(5);
/// A late thread that waited longer than this for its core was kept from it by the kernel, perhaps
/// by a system call of the platform.
const WAIT_MAX: Duration = Duration::from_millis(1);

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
    /// the permission for real-time priority (`CAP_SYS_NICE`), or without the kernel's times of
    /// waiting (`schedstat`), there are none.
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
    let times = File::open("/proc/thread-self/schedstat");
    let (true, true, Ok(times)) = (is_first, core_affinity::set_for_current(core), times) else {
        return stalls;
    };
    let mut waited_before = waited(&times);
    while !ended.load(Ordering::Relaxed) {
        let due = Instant::now() + SLEEP;
        std::thread::sleep(SLEEP);
        let woken = Instant::now();
        let waited_now = waited(&times);
        let has_waited = match (waited_before, waited_now) {
            (Some(before), Some(now)) => now.saturating_sub(before) > WAIT_MAX,
            _ => true,
        };
        waited_before = waited_now;
        if woken - due >= STALL_MIN && !has_waited {
            stalls.push((due, woken));
        }
    }
    stalls
}

/// Time that this thread has waited for its core while it was ready, the second number of its
/// `schedstat`.
fn waited(times: &File) -> Option<Duration> {
    let mut text = [0; 80];
    let length = times.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..length]).ok()?;
    let waited_ns = text.split_whitespace().nth(1)?;
    Some(Duration::from_nanos(waited_ns.parse().ok()?))
}

/// Time with a stall of at least one core. `stalls` are ordered by their beginning.
pub fn total(stalls: &[Span]) -> Duration {
    match stalls {
        [] => Duration::ZERO,
        [(first, _), ..] => {
            let last = stalls.iter().map(|(_, ended)| *ended).max();
            let all = (*first, last.unwrap_or(*first));
            (all.1 - all.0).saturating_sub(without(all, stalls))
        }
    }
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
        assert_eq!(total(&stalls).as_millis(), 20 + 40 + 205 + 100);
        assert_eq!(total(&[]), Duration::ZERO);
    }
}
