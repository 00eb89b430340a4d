//! The services' clock. Cores never read it: they receive time as an input.
//!
//! All services of a process share one [`Disciplined`] clock. A thread ([`start_discipline`])
//! corrects it once per second. A read costs one `clock_gettime(CLOCK_MONOTONIC)` without a system
//! call.

mod machine;
mod shared;

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use machine::{Machine, Source, monotonic_ns};
pub use shared::Disciplined;

use crate::discipline::{Confirmed, State, Stored};

/// Interval between observations of the machine's clocks.
const OBSERVE_EVERY: Duration = Duration::from_secs(1);

static PROCESS: LazyLock<Arc<Disciplined>> = LazyLock::new(|| Arc::new(Disciplined::new(Machine)));

/// The clock shared by all services of this process. It starts at the machine's real time.
pub fn process() -> &'static Arc<Disciplined> {
    &PROCESS
}

/// Starts the thread that compares the process's clock with the machine's once per second. Later
/// calls have no effect.
///
/// # Errors
/// The thread cannot be spawned.
pub fn start_discipline() -> std::io::Result<()> {
    static IS_STARTED: AtomicBool = AtomicBool::new(false);
    if IS_STARTED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let observing = || {
        loop {
            process().observe();
            std::thread::sleep(OBSERVE_EVERY);
        }
    };
    let thread = std::thread::Builder::new().name("clock".to_owned());
    thread.spawn(observing).map(drop)
}

/// Nanoseconds since the Unix epoch.
#[inline]
pub fn now_ns() -> u64 {
    process().now_ns()
}

/// Microseconds since the Unix epoch.
pub fn now_us() -> i64 {
    i64::try_from(now_ns() / 1_000).unwrap_or(i64::MAX)
}

/// Seconds since the Unix epoch.
pub fn now_s() -> i64 {
    now_us() / 1_000_000
}

/// A node's clock. A closure implements it as a clock that is always trusted, for simulations and
/// measurements with controlled time.
pub trait Time: Send + Sync {
    /// Nanoseconds since the Unix epoch.
    fn now_ns(&self) -> u64;

    /// Relation of platform time to the machine's real time.
    fn state(&self) -> State {
        State::Normal { slew_ns: 0 }
    }

    /// Nanoseconds by which real time is ahead of platform time, negative if real time is earlier.
    /// `None` while the clock is trusted. The hot thread reads it in each round.
    fn suspect_ns(&self) -> Option<i64> {
        self.state().suspect_ns()
    }

    /// Latest time stored or returned. A confirmation accepts times up to this one.
    fn latest_ns(&self) -> u64 {
        self.now_ns()
    }

    /// Compares a store's times with the machine's clock. Every store's owner calls this at start.
    fn check_stored(&self, _stored: Stored) {}

    /// Accepts the machine's real time as platform time. `None` if the clock is not suspect.
    fn confirm(&self) -> Option<Confirmed> {
        None
    }
}

impl<F: Fn() -> u64 + Send + Sync> Time for F {
    fn now_ns(&self) -> u64 {
        self()
    }
}

/// A service's clock in microseconds: the process clock, a manual one, or a custom one.
#[derive(Clone, Default)]
pub enum Clock {
    /// The process clock.
    #[default]
    System,
    /// Moves only by [`Clock::advance_us`]. For tests of expiry and maturity, and for the sandbox's
    /// forward button.
    Manual(Arc<AtomicI64>),
    Custom(Arc<dyn Time>),
}

impl Clock {
    /// A manual clock that starts at `start_us` since the Unix epoch.
    pub fn manual(start_us: i64) -> Self {
        Self::Manual(Arc::new(AtomicI64::new(start_us)))
    }

    /// Advances a manual clock. Has no effect on other clocks.
    pub fn advance_us(&self, by_us: i64) {
        if let Self::Manual(now) = self {
            now.fetch_add(by_us, Ordering::SeqCst);
        }
    }

    pub fn now_us(&self) -> i64 {
        match self {
            Self::System => now_us(),
            Self::Manual(now) => now.load(Ordering::SeqCst),
            Self::Custom(time) => i64::try_from(time.now_ns() / 1_000).unwrap_or(i64::MAX),
        }
    }

    /// Relation to the machine's real time. A manual clock is always trusted.
    pub fn state(&self) -> State {
        self.time()
            .map_or(State::Normal { slew_ns: 0 }, |time| time.state())
    }

    /// Compares the time of a store's last write with the machine's clock.
    pub fn check_stored_us(&self, last_us: i64) {
        if let Some(time) = self.time() {
            time.check_stored(Stored {
                last_ns: u64::try_from(last_us).unwrap_or(0).saturating_mul(1_000),
                ..Stored::default()
            });
        }
    }

    fn time(&self) -> Option<&dyn Time> {
        match self {
            Self::System => Some(&**process()),
            Self::Manual(_) => None,
            Self::Custom(time) => Some(&**time),
        }
    }
}
