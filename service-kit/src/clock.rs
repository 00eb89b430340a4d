//! The wall clock of the shells. Cores never read it: time is one of their inputs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Nanoseconds since the epoch.
pub fn now_ns() -> u64 {
    u64::try_from(since_epoch().as_nanos()).unwrap_or(u64::MAX)
}

/// Microseconds since the epoch.
pub fn now_us() -> i64 {
    i64::try_from(since_epoch().as_micros()).unwrap_or(i64::MAX)
}

/// Seconds since the epoch.
pub fn now_s() -> i64 {
    now_us() / 1_000_000
}

/// Microseconds since the epoch, from the machine or set by hand.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    #[default]
    System,
    /// Moves only by [`Clock::advance_us`]: tests of expiry and maturity, the sandbox's forward
    /// button.
    Manual(Arc<AtomicI64>),
}

impl Clock {
    pub fn manual(start_us: i64) -> Self {
        Self::Manual(Arc::new(AtomicI64::new(start_us)))
    }

    /// Moves a manual clock forward; the system clock ignores it.
    pub fn advance_us(&self, by_us: i64) {
        if let Self::Manual(now) = self {
            now.fetch_add(by_us, Ordering::SeqCst);
        }
    }

    pub fn now_us(&self) -> i64 {
        match self {
            Self::System => now_us(),
            Self::Manual(now) => now.load(Ordering::SeqCst),
        }
    }
}
