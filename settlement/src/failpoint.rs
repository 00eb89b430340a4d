//! Places where a test may kill the process: `PLATFORM_CRASH_AT=settlement.posted` aborts there, `settlement.posted:3` at the third time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names of the places, in the order of a batch's life.
pub const SEALED: &str = "settlement.sealed";
pub const POSTED: &str = "settlement.posted";
pub const SUBMITTED: &str = "settlement.submitted";
pub const FINALIZED: &str = "settlement.finalized";

static WANTED: OnceLock<Option<(String, u64)>> = OnceLock::new();
static REACHED: AtomicU64 = AtomicU64::new(0);

/// Aborts the process when the environment asks for it here.
pub fn reach(place: &str) {
    let wanted = WANTED.get_or_init(|| {
        std::env::var("PLATFORM_CRASH_AT")
            .ok()
            .map(|text| parse(&text))
    });
    if let Some((name, times)) = wanted
        && name == place
        && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *times
    {
        tracing::error!(place, "aborting at a failpoint");
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
