//! The duration of a write in the metrics, while the store makes it wait.

use std::time::{Duration, Instant};

use proto::ledger::v1::CreateHoldRequest;

use crate::{
    harness::*,
    requests::{Port, is_alone, value},
};

/// Time for which the store is locked. Less than the store's busy timeout of 5 s, also if the lock
/// is released 2 s late.
const LOCKED: Duration = Duration::from_millis(2_600);
/// Least part of that time within which the call reaches the ledger. Above the bound below.
const MEASURED_S_MIN: f64 = 0.3;

const NAME: &str = "ledger_operation_duration_seconds";

// rows: R281
#[tokio::test(flavor = "multi_thread")]
async fn r281_a_duration_contains_the_wait_for_the_store_and_counts_once() {
    if !is_alone("durations::r281_a_duration_contains_the_wait_for_the_store_and_counts_once") {
        return;
    }
    // The recorder must be installed before the ledger starts.
    rpc::metrics_init();
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let port = Port::of(&world).await;
    let rows = world.rows().await;
    let before = port.metrics().await;

    let lock = rows.lock().await;
    let began = Instant::now();
    let client = world.client.clone();
    let hold = CreateHoldRequest {
        context: write("h1"),
        hold: Some(new_hold("u1", RUB, "4")),
    };
    let held = tokio::spawn(async move { { client }.create_hold(hold).await });
    tokio::time::sleep(LOCKED).await;
    assert!(!held.is_finished(), "the store is locked");
    lock.release().await;
    let held = tokio::time::timeout(PATIENCE, held).await;
    held.expect("in time").unwrap().unwrap();
    let elapsed_s = began.elapsed().as_secs_f64();

    let after = port.metrics().await;
    let grown = |suffix: &str| {
        let series = format!("{NAME}{suffix}");
        value(&after, &series) - value(&before, &series)
    };
    assert_eq!(grown("_count"), 1.0);
    assert_eq!(grown("_bucket{le=\"+Inf\"}"), 1.0);
    let quick = "_bucket{le=\"0.25\"}";
    assert!(after.contains(&format!("{NAME}{quick} ")), "{after}");
    assert_eq!(grown(quick), 0.0, "the bounds are seconds");
    let sum_s = grown("_sum");
    assert!(
        (MEASURED_S_MIN..=elapsed_s).contains(&sum_s),
        "{sum_s} s of {elapsed_s} s"
    );
    // A read is no operation.
    world.balance("u1:CFA-RUB").await;
    let read = port.metrics().await;
    let count = format!("{NAME}_count");
    assert_eq!(value(&read, &count), value(&after, &count));
    rows.close().await;
}
