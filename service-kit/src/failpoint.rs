//! Places where a test can kill the process between two steps.
//! `PLATFORM_CRASH_AT=settlement.posted` aborts there like a power cut, `settlement.posted:3` at
//! the third time.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Place and hit count.
static WANTED: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
    let text = std::env::var("PLATFORM_CRASH_AT").ok()?;
    Some(parse(&text))
});
static REACHED: AtomicU64 = AtomicU64::new(0);

/// Aborts the process if the environment asks for it here. Costs one comparison.
pub fn reach(place: &str) {
    if let Some((name, times)) = &*WANTED
        && name == place
        && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *times
    {
        eprintln!("aborting at {place}, as PLATFORM_CRASH_AT asks");
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
