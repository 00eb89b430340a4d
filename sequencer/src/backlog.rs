//! How far settlement is behind, and how far it may be: past the bounds new orders, and amends that
//! better a price or grow, are refused with `SETTLEMENT_BACKLOG`; cancels still pass.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Written by settlement and the replica, read by the hot thread.
pub struct Backlog {
    /// Trades that are durable and not final yet.
    pub pending_trades: AtomicU64,
    /// Records that settlement has not applied yet.
    pub pending_records: AtomicU64,
    /// At the bound orders still pass, one past it they do not.
    pub trades_max: u64,
    pub records_max: u64,
    is_closed: AtomicBool,
}

impl Backlog {
    pub fn new(trades_max: u64, records_max: u64) -> Self {
        Self {
            pending_trades: AtomicU64::new(0),
            pending_records: AtomicU64::new(0),
            trades_max,
            records_max,
            is_closed: AtomicBool::new(false),
        }
    }

    /// Refuses new orders until the next start, whatever settlement says: what stands behind the
    /// journal is not to be trusted.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Trades and records that are not settled; more than any bound once it is closed.
    pub(crate) fn pending(&self) -> (u64, u64) {
        if self.is_closed.load(Ordering::Relaxed) {
            return (u64::MAX, u64::MAX);
        }
        (
            self.pending_trades.load(Ordering::Relaxed),
            self.pending_records.load(Ordering::Relaxed),
        )
    }
}

impl Default for Backlog {
    fn default() -> Self {
        Self::new(200_000, 1_000_000)
    }
}
