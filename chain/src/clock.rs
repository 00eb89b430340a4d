//! The machine's time, for rows, events and blocks.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

pub(crate) fn now_us() -> i64 {
    since_epoch().as_micros() as i64
}

pub(crate) fn now_s() -> u64 {
    since_epoch().as_secs()
}
