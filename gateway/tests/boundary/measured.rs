//! The duration of a trade in the metrics, from its match to its record in the history.

use std::time::{Duration, Instant};

use sqlx::Connection as _;
use types::Side;

use crate::book::{http_get, serve};
use crate::entered::lock_database;
use crate::victim::Victim;
use crate::world::*;

/// Time for which the history cannot write.
const LOCKED: Duration = Duration::from_millis(500);
const TRADES: u64 = 3;

const NAME: &str = "trade_execution_duration_seconds";

/// True in a process that runs only this test, as metrics are process-wide. Otherwise runs the test
/// in such a process and returns false once it has passed.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "MARKET_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = Victim::spawn(test, [(ALONE, "1")]);
    let lines: Vec<String> = std::iter::from_fn(|| child.next_line()).collect();
    assert!(child.end().success(), "{test}: {}", lines.join("\n"));
    let has_run = lines.iter().any(|line| line.contains("1 passed"));
    assert!(has_run, "{test} is not a test: {}", lines.join("\n"));
    false
}

/// Value of a series; 0 before its first record.
fn value(scrape: &str, series: &str) -> f64 {
    let of_series = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    scrape.lines().find_map(of_series).unwrap_or(0.0)
}

// rows: R277
#[tokio::test]
async fn r277_a_duration_contains_the_wait_for_the_history_and_counts_each_trade_once() {
    if !is_alone(
        "measured::r277_a_duration_contains_the_wait_for_the_history_and_counts_each_trade_once",
    ) {
        return;
    }
    // The recorder is installed before the services start, as in the platform.
    rpc::metrics_init();
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unsettled()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "100").await;
    world.open_hold("bob", BOND, "100").await;
    let mut ann = world.session(with_money("ann", "a")).await;
    let mut bob = world.session(login("bob", "b")).await;
    let (address, stop, serving) = serve(&world).await;
    let metrics = async || http_get(address, "/metrics", "").await.1;
    for id in 1..=TRADES {
        let order = wire_order(id, Side::Buy, 1_000, 1);
        ann.0.send(0, order).await.unwrap();
        until(&mut ann.1, ack).await;
    }
    let count = format!("{NAME}_count");
    assert_eq!(value(&metrics().await, &count), 0.0);

    let lock = lock_database(folder.path(), "gateway/market.db").await;
    let began = Instant::now();
    let sweep = wire_order(1, Side::Sell, 1_000, TRADES);
    bob.0.send(0, sweep).await.unwrap();
    for _ in 0..TRADES {
        until(&mut bob.1, fill).await;
    }
    // The trades are durable, and not in the history.
    let traded = Instant::now();
    tokio::time::sleep(LOCKED).await;
    assert_eq!(value(&metrics().await, &count), 0.0);
    let waited_s = traded.elapsed().as_secs_f64();
    lock.close().await.unwrap();
    until_true("the trades are in the history", async || {
        value(&metrics().await, &count) >= TRADES as f64
    })
    .await;
    let elapsed_s = began.elapsed().as_secs_f64();

    let after = metrics().await;
    assert_eq!(value(&after, &count), TRADES as f64);
    let executed = format!("trades_executed_total{{instrument_id=\"{BOND}\"}}");
    assert_eq!(value(&after, &executed), TRADES as f64);
    let bucket = |bound: &str| value(&after, &format!("{NAME}_bucket{{le=\"{bound}\"}}"));
    assert_eq!(bucket("+Inf"), TRADES as f64);
    assert!(
        after.contains(&format!("{NAME}_bucket{{le=\"0.1\"}} ")),
        "{after}"
    );
    assert_eq!(bucket("0.1"), 0.0, "the bounds are seconds");
    // The process clock may be slewed meanwhile, by far less than this.
    let mean_s = value(&after, &format!("{NAME}_sum")) / TRADES as f64;
    let due = waited_s * 0.9..=elapsed_s * 1.1;
    assert!(due.contains(&mean_s), "{mean_s} s, not in {due:?}");
    stop.cancel();
    serving.await.unwrap();
    world.stop().await;
}
