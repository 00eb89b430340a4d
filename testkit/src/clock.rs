//! A machine with clocks that the test controls.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use service_kit::clock::{Disciplined, Source};

/// Clocks that move only when the test moves them. Clones are the same machine.
#[derive(Clone)]
pub struct Machine {
    start_ns: u64,
    passed_ns: Arc<AtomicU64>,
    /// Error of real time.
    wrong_ns: Arc<AtomicI64>,
}

impl Machine {
    /// Starts at this Unix time in nanoseconds.
    pub fn at(start_ns: u64) -> Self {
        Self {
            start_ns,
            passed_ns: Arc::default(),
            wrong_ns: Arc::default(),
        }
    }

    /// The clock of the machine's next process.
    pub fn process(&self) -> Arc<Disciplined> {
        Arc::new(Disciplined::new(self.clone()))
    }

    pub fn pass_ms(&self, ms: u64) {
        self.passed_ns.fetch_add(ms * 1_000_000, Ordering::SeqCst);
    }

    /// Sets real time this number of seconds ahead of true time.
    pub fn set_wrong_by_s(&self, seconds: i64) {
        self.wrong_ns
            .store(seconds * 1_000_000_000, Ordering::SeqCst);
    }
}

impl Source for Machine {
    fn monotonic_ns(&self) -> u64 {
        self.passed_ns.load(Ordering::SeqCst)
    }

    fn realtime_ns(&self) -> u64 {
        let wrong_ns = self.wrong_ns.load(Ordering::SeqCst);
        (self.start_ns + self.monotonic_ns()).saturating_add_signed(wrong_ns)
    }

    fn is_synchronised(&self) -> bool {
        true
    }
}
