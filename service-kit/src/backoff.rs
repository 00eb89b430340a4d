//! Exponential backoff with a limit, and jitter.

use std::time::Duration;

use rand::Rng;

/// `first`, doubled `times` times, at most `max`.
pub fn doubled(first: Duration, times: u32, max: Duration) -> Duration {
    first.saturating_mul(1 << times.min(31)).min(max)
}

/// Like [`doubled`], but milliseconds in, microseconds out.
pub fn doubled_us(first_ms: u64, times: u32, max_ms: u64) -> i64 {
    let (first, max) = (
        Duration::from_millis(first_ms),
        Duration::from_millis(max_ms),
    );
    i64::try_from(doubled(first, times, max).as_micros()).unwrap_or(i64::MAX)
}

/// A random part of the pause, at most a quarter. Callers add or subtract it to spread retries.
pub fn jitter(pause: Duration) -> Duration {
    Duration::from_micros(rand::rng().random_range(0..=pause.as_micros() as u64 / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_limit() {
        let seconds = |times| doubled_us(1_000, times, 300_000) / 1_000_000;
        assert_eq!([0, 1, 2, 8, 9, 40].map(seconds), [1, 2, 4, 256, 300, 300]);
        let pause = Duration::from_secs(300);
        assert!(jitter(pause) <= pause / 4);
    }
}
