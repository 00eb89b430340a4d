//! What the hot thread counts. It writes plain numbers once a turn; whoever exports metrics reads them from outside.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the start, relaxed: each is right, together they may be a turn apart.
#[derive(Debug, Default)]
pub struct Stats {
    /// Last node sequence.
    pub sequence: AtomicU64,
    pub commands: AtomicU64,
    pub events: AtomicU64,
    pub trades: AtomicU64,
    /// Requests answered without a journal record.
    pub not_taken: AtomicU64,
    /// Of these, refused `BUSY` (rings or journal behind).
    pub busy: AtomicU64,
    /// Most commands that were under way between rings at once.
    pub in_flight_max: AtomicU64,
    /// How often the hot thread went to sleep.
    pub parks: AtomicU64,
}

/// The hot thread's own copy.
#[derive(Default)]
pub(crate) struct Tally {
    pub commands: u64,
    pub events: u64,
    pub not_taken: u64,
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
        set(&stats.not_taken, self.not_taken);
        set(&stats.busy, self.busy);
        set(&stats.in_flight_max, self.in_flight_max);
        set(&stats.parks, self.parks);
    }
}
