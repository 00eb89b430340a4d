//! How far settlement is behind, and how far it may be: past the bounds new orders, and amends that better a price or grow, are refused with
//! `SETTLEMENT_BACKLOG`; cancels still pass.

use std::sync::atomic::AtomicU64;

/// Written by settlement, read by the hot thread.
pub struct Backlog {
    /// Trades that are durable and not final yet.
    pub pending_trades: AtomicU64,
    /// Journal bytes that settlement has not read yet.
    pub pending_bytes: AtomicU64,
    /// At the bound orders still pass, one past it they do not.
    pub trades_max: u64,
    pub bytes_max: u64,
}

impl Backlog {
    pub fn new(trades_max: u64, bytes_max: u64) -> Self {
        Self {
            pending_trades: AtomicU64::new(0),
            pending_bytes: AtomicU64::new(0),
            trades_max,
            bytes_max,
        }
    }
}

impl Default for Backlog {
    fn default() -> Self {
        Self::new(200_000, 256 << 20)
    }
}
