//! Failpoints: places where a test aborts the process between two steps.
//!
//! `PLATFORM_CRASH_AT=settlement.posted` aborts when that place is first reached,
//! `settlement.posted:3` at the third time.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Place, and the hit at which the process aborts.
static CRASH_AT: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
    let text = std::env::var("PLATFORM_CRASH_AT").ok()?;
    Some(parse(&text))
});
static REACHED: AtomicU64 = AtomicU64::new(0);

/// Aborts the process if `PLATFORM_CRASH_AT` names this place and hit. Costs one comparison
/// otherwise.
pub fn reach(place: &str) {
    if let Some((name, times)) = &*CRASH_AT
        && name == place
        && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *times
    {
        eprintln!("aborting at {place} (PLATFORM_CRASH_AT)");
        std::process::abort();
    }
}

fn parse(text: &str) -> (String, u64) {
    match text.rsplit_once(':') {
        Some((name, times)) if times.bytes().all(|b| b.is_ascii_digit()) => {
            (name.to_owned(), times.parse().unwrap_or(1))
        }
        _ => (text.to_owned(), 1),
    }
}
