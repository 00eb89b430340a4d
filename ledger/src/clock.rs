//! The clock of the shell. The fold never reads it: time enters with each group as `now_us`.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};
use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds since the epoch, from the machine or set by hand.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    #[default]
    System,
    /// Stands still until somebody moves it; tests of expiry use it.
    Manual(Arc<AtomicI64>),
}

impl Clock {
    pub fn manual(start_us: i64) -> Self {
        Clock::Manual(Arc::new(AtomicI64::new(start_us)))
    }

    /// Moves a manual clock forward; the system clock ignores it.
    pub fn advance_us(&self, by_us: i64) {
        if let Clock::Manual(now) = self {
            now.fetch_add(by_us, Ordering::SeqCst);
        }
    }

    pub fn now_us(&self) -> i64 {
        match self {
            Clock::System => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_micros() as i64),
            Clock::Manual(now) => now.load(Ordering::SeqCst),
        }
    }
}
