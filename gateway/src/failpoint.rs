//! Places at which a test may stop the process, exactly between two steps: `PLATFORM_CRASH_AT=<name>` aborts there, as a power cut would.

use std::sync::LazyLock;

static CRASH_AT: LazyLock<Option<String>> =
    LazyLock::new(|| std::env::var("PLATFORM_CRASH_AT").ok());

/// Behind the ledger's hold of an order, before the journal knows of it.
pub const HOLD_PLACED: &str = "market.hold_placed";

/// Aborts when this place was named. Costs one comparison.
pub fn crash_at(name: &str) {
    if CRASH_AT.as_deref() == Some(name) {
        eprintln!("aborting at {name}, as asked by PLATFORM_CRASH_AT");
        std::process::abort();
    }
}
