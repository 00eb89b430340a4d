//! The machine's clocks.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// The clocks that platform time is derived from.
pub trait Source: Send + Sync {
    /// Nanoseconds of the monotonic clock.
    fn monotonic_ns(&self) -> u64;

    /// Unix time in nanoseconds, from the clock that can step.
    fn realtime_ns(&self) -> u64;

    /// Whether the system reports its real-time clock as synchronised. May be a system call.
    fn is_synchronised(&self) -> bool;
}

/// `CLOCK_MONOTONIC`, `CLOCK_REALTIME` and the kernel's synchronisation status.
pub struct Machine;

impl Source for Machine {
    #[inline]
    fn monotonic_ns(&self) -> u64 {
        monotonic_ns()
    }

    fn realtime_ns(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
    }

    fn is_synchronised(&self) -> bool {
        is_synchronised()
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`, never negative: for intervals and rates.
#[inline]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// True while a time service corrects the clock: `STA_UNSYNC` is clear. False on a system without
/// that status.
#[cfg(target_os = "linux")]
fn is_synchronised() -> bool {
    // SAFETY: `timex` is plain old data, zero is valid, and without `modes` the call only reads.
    #[allow(unsafe_code)]
    let (clock_state, status) = unsafe {
        let mut timex: libc::timex = std::mem::zeroed();
        (libc::adjtimex(&mut timex), timex.status)
    };
    clock_state >= 0 && clock_state != libc::TIME_ERROR && status & libc::STA_UNSYNC == 0
}

#[cfg(not(target_os = "linux"))]
fn is_synchronised() -> bool {
    false
}
