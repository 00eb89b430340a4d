//! A front that is polled in rounds.
//!
//! It shares the hot thread (layout `fused`) or has a thread of its own. The rounds are the same.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::park::Parker;

/// Longest sleep of an idle thread.
pub(crate) const PARK: Duration = Duration::from_millis(500);

/// Work that a thread polls in rounds.
pub trait Polled: Send {
    /// One round, which never blocks; true when it did work.
    fn round(&mut self) -> bool;

    /// True when a round has work that neither the descriptor nor a deadline announces.
    fn has_work(&self) -> bool;

    /// Earliest time at which a round has work without input.
    fn next_deadline(&self) -> Option<Instant>;

    /// Descriptor that is readable when a round has input.
    fn fd(&self) -> BorrowedFd<'_>;

    /// True when no further round is needed.
    fn is_over(&self) -> bool;
}

/// How long a thread may sleep until the next deadline of `polled`.
pub(crate) fn sleep_for(polled: &dyn Polled) -> Duration {
    let next = polled.next_deadline();
    next.map_or(PARK, |at| {
        at.saturating_duration_since(Instant::now()).min(PARK)
    })
}

/// Polls on the calling thread until `polled` is over. Spins for `spin` after the last work, then
/// parks.
pub fn run_polled(mut polled: Box<dyn Polled>, parker: &Parker, spin: Duration) {
    let mut idle_since = None;
    while !polled.is_over() {
        if polled.round() {
            idle_since = None;
        } else if idle_since.get_or_insert_with(Instant::now).elapsed() < spin {
            std::hint::spin_loop();
        } else {
            let sleep = sleep_for(&*polled);
            parker.park(sleep, &[polled.fd()], || polled.has_work());
        }
    }
}
