//! The floor of the `settle` benchmark writes the rows and executes the batches of the platform
//! that it is compared with. Otherwise the benchmark would compare different work.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use benches::settle::capture::Capture;
use benches::settle::files::{self, STORES, Store};
use benches::settle::floor::Floor;
use benches::settle::flow::Flow;
use benches::settle::members;
use benches::settle::platform::Platform;
use sequencer::Record;

const MEMBERS: u32 = 4;
const TRADES: u64 = 300;

/// Number of rows of a table, and the sum of an integer column.
fn sum(folder: &Path, store: &Store, table: &str, column: &str) -> (i64, i64) {
    let sql = format!("SELECT COUNT(*), COALESCE(SUM({column}), 0) FROM {table}");
    let db = files::open(folder, store).unwrap();
    db.query_row(&sql, [], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
}

async fn settle(platform: &Platform, records: Vec<Record>) {
    let last = records.last().unwrap().command.sequence;
    platform.feed(Arc::from(records)).await.unwrap();
    platform.drained(last).await.unwrap();
    files::quiet(&platform.folder).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_floor_writes_the_rows_of_the_platform() {
    let folder = tempfile::tempdir().unwrap();
    let [seeded, captured, bare] = ["seeded", "captured", "bare"].map(|of| folder.path().join(of));
    let (mut flow, setup) = Flow::new(MEMBERS, 7);
    let platform = Platform::start(&seeded).await.unwrap();
    members::create(&platform, MEMBERS).await.unwrap();
    settle(&platform, setup).await;
    platform.stop().await.unwrap();
    for copy in [&captured, &bare] {
        files::copy(&seeded, copy).unwrap();
    }

    let mut capture = Capture::install(&captured).unwrap();
    let mut floor = Floor::open(&bare).await.unwrap();
    let platform = Platform::start(&captured).await.unwrap();
    let records = flow.take(TRADES);
    settle(&platform, records).await;
    let stats = platform.stats();
    assert_eq!(
        (stats.trades_failed, stats.trades_settled),
        (0, flow.trades())
    );
    assert!(platform.proof().await.unwrap().ok);
    platform.stop().await.unwrap();
    // Of a stopped platform: a running one gives waiting orders holds of their own after a while.
    let spent = floor.run(&mut capture, &captured).await.unwrap();
    assert!(!spent.rows.is_zero() && !spent.evm.is_zero() && spent.ledger <= spent.rows);
    let rows = capture.rows().unwrap();
    capture.end().unwrap();

    let written = |table: &str| rows.iter().find(|(name, _)| name == table).unwrap().1;
    let trades = i64::try_from(flow.trades()).unwrap();
    // A buy, a sell and a fee per trade.
    assert!(written("ledger.operations") >= 3 * trades, "{rows:?}");
    assert!(written("cfa.operation") >= trades, "{rows:?}");
    for (store, table, column) in [
        ("ledger", "operations", "status"),
        ("ledger", "postings", "credit_balance_after"),
        ("ledger", "holds", "consumed"),
        ("cfa", "operation", "status"),
        ("cfa", "holding", "units"),
        ("settlement", "batches", "through_sequence"),
    ] {
        let store = STORES.iter().find(|of| of.name == store).unwrap();
        let [captured, bare] = [&captured, &bare].map(|of| sum(of, store, table, column));
        assert_eq!(captured, bare, "{}.{table}", store.name);
        assert!(captured.0 > 0, "{}.{table}", store.name);
    }
}

/// The test's own future is no spawned task, as that of `main`. A service that blocks its thread on
/// a future of its own would take the wake-ups of the other calls in flight.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_calls_of_one_future_outside_of_tasks_all_end() {
    let folder = tempfile::tempdir().unwrap();
    let platform = Platform::start(folder.path()).await.unwrap();
    let created = members::create(&platform, 200);
    let created = tokio::time::timeout(Duration::from_secs(120), created).await;
    created.expect("a wake-up was lost").unwrap();
    platform.stop().await.unwrap();
}
