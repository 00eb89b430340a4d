//! A machine with clocks that the test controls.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use service_kit::clock::{Disciplined, Source};

/// Clocks that advance only when the test advances them. Clones are the same machine.
#[derive(Clone)]
pub struct Machine {
    start_ns: u64,
    passed_ns: Arc<AtomicU64>,
    /// Error of real time, in nanoseconds.
    error_ns: Arc<AtomicI64>,
}

impl Machine {
    /// Starts at this Unix time in nanoseconds.
    pub fn at(start_ns: u64) -> Self {
        Self {
            start_ns,
            passed_ns: Arc::default(),
            error_ns: Arc::default(),
        }
    }

    /// The clock of the machine's next process.
    pub fn process(&self) -> Arc<Disciplined> {
        Arc::new(Disciplined::new(self.clone()))
    }

    pub fn pass_ms(&self, ms: u64) {
        self.passed_ns.fetch_add(ms * 1_000_000, Ordering::SeqCst);
    }

    /// Sets real time this many seconds ahead of true time.
    pub fn set_wrong_by_s(&self, seconds: i64) {
        self.error_ns
            .store(seconds * 1_000_000_000, Ordering::SeqCst);
    }
}

impl Source for Machine {
    fn monotonic_ns(&self) -> u64 {
        self.passed_ns.load(Ordering::SeqCst)
    }

    fn realtime_ns(&self) -> u64 {
        let error_ns = self.error_ns.load(Ordering::SeqCst);
        (self.start_ns + self.monotonic_ns()).saturating_add_signed(error_ns)
    }

    fn is_synchronised(&self) -> bool {
        true
    }
}
