//! Samples of histograms do not accumulate in a process that is never scraped. A test binary of its
//! own, because it counts the memory of the whole process.

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn live_bytes() -> isize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as isize - stats.bytes_deallocated as isize
}

#[test]
fn samples_that_are_not_scraped_are_released() {
    let _metrics = rpc::metrics_init();
    let before = live_bytes();
    for _ in 0..200_000 {
        metrics::histogram!("upkeep_test_seconds").record(0.5);
    }
    let recorded = live_bytes() - before;
    assert!(
        recorded > 1_000_000,
        "samples are kept at first: {recorded}"
    );
    let deadline = std::time::Instant::now() + testkit::PATIENCE;
    while live_bytes() - before > recorded / 10 {
        assert!(std::time::Instant::now() < deadline, "samples are kept");
        // Memory of drained samples is freed by later samples.
        for _ in 0..20 {
            metrics::histogram!("upkeep_test_seconds").record(0.5);
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
