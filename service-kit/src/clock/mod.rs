//! The clock of the shells. Cores never read it: time is one of their inputs.
//!
//! All services of a process read one [`Disciplined`] clock, which a thread corrects once a second
//! ([`keep`]). A read costs one `clock_gettime(CLOCK_MONOTONIC)` without a system call.

mod machine;
mod shared;

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use machine::{Machine, Source, monotonic_ns};
pub use shared::Disciplined;

use crate::discipline::{Confirmed, State, Stored};

/// Pause between two looks at the machine's clocks.
const OBSERVE_EVERY: Duration = Duration::from_secs(1);

static PROCESS: LazyLock<Arc<Disciplined>> = LazyLock::new(|| Arc::new(Disciplined::new(Machine)));

/// The clock that all services of this process share. Begins at the machine's real time.
pub fn process() -> &'static Arc<Disciplined> {
    &PROCESS
}

/// Compares the process's clock with the machine's once a second from now on, on a thread of its own.
/// A second call changes nothing.
///
/// # Errors
/// The system has no room for a thread.
pub fn keep() -> std::io::Result<()> {
    static IS_KEPT: AtomicBool = AtomicBool::new(false);
    if IS_KEPT.swap(true, Ordering::SeqCst) {
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

/// Nanoseconds since the epoch.
#[inline]
pub fn now_ns() -> u64 {
    process().now_ns()
}

/// Microseconds since the epoch.
pub fn now_us() -> i64 {
    i64::try_from(now_ns() / 1_000).unwrap_or(i64::MAX)
}

/// Seconds since the epoch.
pub fn now_s() -> i64 {
    now_us() / 1_000_000
}

/// A clock as a node reads it. A closure is one that is always trusted: simulations and measurements
/// hold time by hand.
pub trait Time: Send + Sync {
    /// Nanoseconds since the epoch.
    fn now_ns(&self) -> u64;

    /// How time and the machine's real time relate.
    fn state(&self) -> State {
        State::Normal { slew_ns: 0 }
    }

    /// Nanoseconds by which real time is ahead while that is not confirmed. The hot thread asks in each
    /// round.
    fn suspect_ns(&self) -> Option<i64> {
        self.state().suspect_ns()
    }

    /// The latest time that is stored or was given out: what a confirmation accepts.
    fn latest_ns(&self) -> u64 {
        self.now_ns()
    }

    /// Compares what a store holds with the machine's clock. To be called by each store at its start.
    fn stored(&self, _stored: Stored) {}

    /// Takes the machine's real time as it is; `None` when it agrees with time.
    fn confirm(&self) -> Option<Confirmed> {
        None
    }
}

impl<F: Fn() -> u64 + Send + Sync> Time for F {
    fn now_ns(&self) -> u64 {
        self()
    }
}

/// Microseconds since the epoch, from the machine or set by hand.
#[derive(Clone, Default)]
pub enum Clock {
    /// The clock of the process.
    #[default]
    System,
    /// Moves only by [`Clock::advance_us`]: tests of expiry and maturity, the sandbox's forward
    /// button.
    Manual(Arc<AtomicI64>),
    /// Another one.
    Given(Arc<dyn Time>),
}

impl Clock {
    pub fn manual(start_us: i64) -> Self {
        Self::Manual(Arc::new(AtomicI64::new(start_us)))
    }

    /// Moves a manual clock forward; the others ignore it.
    pub fn advance_us(&self, by_us: i64) {
        if let Self::Manual(now) = self {
            now.fetch_add(by_us, Ordering::SeqCst);
        }
    }

    pub fn now_us(&self) -> i64 {
        match self {
            Self::System => now_us(),
            Self::Manual(now) => now.load(Ordering::SeqCst),
            Self::Given(time) => i64::try_from(time.now_ns() / 1_000).unwrap_or(i64::MAX),
        }
    }

    /// A manual clock is always trusted.
    pub fn state(&self) -> State {
        self.time()
            .map_or(State::Normal { slew_ns: 0 }, |time| time.state())
    }

    /// Compares the time of the last write with the machine's clock.
    pub fn stored_us(&self, last_us: i64) {
        if let Some(time) = self.time() {
            time.stored(Stored {
                last_ns: u64::try_from(last_us).unwrap_or(0).saturating_mul(1_000),
                ..Stored::default()
            });
        }
    }

    fn time(&self) -> Option<&dyn Time> {
        match self {
            Self::System => Some(&**process()),
            Self::Manual(_) => None,
            Self::Given(time) => Some(&**time),
        }
    }
}
