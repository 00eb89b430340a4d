//! Settlement resumes at the ledger's position from a node checkpoint: the same state as from the
//! first record, also after a kill, and without the earlier records.

mod world;

use std::path::Path;
use std::time::Duration;

use settlement::trading_state::{Change, HoldBalance, TradingState};
use types::{Event, HoldIx, Sequence};
use world::journalled::{CHECKPOINT_COMMANDS, checkpoints, truncate};
use world::services::{Platform, config};
use world::{CHILD_FOLDER, Market, Record, killed_at, node, replayed};

const PATIENCE: Duration = Duration::from_secs(60);

fn market(seed: u64) -> Market {
    let mut market = Market::new(seed);
    for _ in 0..200 {
        market.random();
    }
    market
}

/// The trading state, and the changes of the following records.
fn applied(
    mut trading_state: TradingState,
    records: &[Record],
) -> (
    (Sequence, u64),
    Vec<replica::Order>,
    Vec<(HoldIx, HoldBalance)>,
    Vec<Change>,
) {
    let mut changes = Vec::new();
    for record in records {
        trading_state.apply(&record.applied, &mut changes);
    }
    let (orders, holds) = (trading_state.orders().copied(), trading_state.holds());
    (
        (trading_state.position(), trading_state.trades()),
        orders.collect(),
        holds.collect(),
        changes,
    )
}

// rows: R189
#[test]
fn r189_copies_taken_at_any_record_equal_the_copies_from_the_first() {
    for seed in testkit::seed::seeds(0..4) {
        let market = market(seed);
        let records = &market.records;
        let mut first = market.initial_state();
        for at in 0..=records.len() {
            if at > 0 {
                first.apply(&records[at - 1].applied, &mut Vec::new());
            }
            if at % 7 == 0 {
                let taken = TradingState::of(&replayed(&records[..at]), market.names().clone());
                let (tail, whole) = (
                    applied(taken, &records[at..]),
                    applied(first.clone(), &records[at..]),
                );
                assert_eq!(tail, whole, "seed {seed}, taken at {at}");
            }
        }
        let last = applied(market.trading_state(), &[]);
        assert_eq!(last, applied(first, &[]), "seed {seed}");
    }
}

async fn drained(platform: &Platform, sequence: Sequence) {
    tokio::time::timeout(PATIENCE, platform.settlement.drained(sequence))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
}

/// Waits until the health of part `settlement-journal` contains this text.
async fn journal_failing(platform: &Platform, what: &str) {
    let mut failing = platform.settlement.health().watch();
    let waiting = failing.wait_for(|parts| {
        let journal = parts.get("settlement-journal");
        journal.is_some_and(|reason| reason.contains(what))
    });
    let waited = tokio::time::timeout(PATIENCE, waiting).await.is_ok();
    let failing = platform.settlement.health().failing();
    assert!(waited, "{failing:?} {:?}", platform.settlement.stats());
}

/// Settles the market's journal to its end, one checkpoint at a time.
async fn settled(folder: &Path, market: &Market) -> Platform {
    let mut settings = config(folder);
    settings.batch_trades_max = 2;
    let mut platform = Platform::start(folder, settings, &[]).await;
    let funded = folder.join("funded");
    if !funded.exists() {
        platform.fund(market).await;
        std::fs::write(&funded, "").unwrap();
    }
    for records in market.records.chunks(CHECKPOINT_COMMANDS as usize) {
        platform.feed(records);
        let last = records.last().unwrap().command.sequence;
        drained(&platform, last).await;
    }
    platform
}

/// The process to kill; does nothing unless a parent test started it.
#[tokio::test]
async fn child() {
    if let Ok(folder) = std::env::var(CHILD_FOLDER) {
        settled(Path::new(&folder), &market(12)).await;
    }
}

// rows: R186 R189
#[tokio::test]
async fn r189_restart_from_checkpoint_settles_the_rest_once() {
    let market = market(12);
    for place in ["settlement.posted:12", "settlement.submitted:12"] {
        let folder = tempfile::tempdir().unwrap();
        killed_at(place, folder.path());
        // Truncate the journal as far as the oldest checkpoint permits.
        let oldest = *checkpoints(folder.path()).first().expect("a checkpoint");
        let removed = truncate(folder.path(), oldest);
        assert!(removed > Sequence::ZERO, "{place}: {oldest}");

        let mut platform = settled(folder.path(), &market).await;
        let moved = platform.chain.moved();
        let mut trades = 0;
        for event in market.records.iter().flat_map(|r| &r.events) {
            if matches!(event.event, Event::Trade(_)) {
                trades += 1;
                let id = event.trade_uuid(node()).to_string();
                assert_eq!(moved.get(&id), Some(&1), "{place}: trade {id}");
            }
        }
        assert!(trades > 10);
        assert_eq!(moved.len(), trades);
        assert_eq!(platform.settlement.stats().trades_settled, trades as u64);
        platform.assert_agrees(&market).await;
        platform.stop().await;
    }
}

fn damage(folder: &Path) {
    for at in checkpoints(folder) {
        let path = folder.join(format!("snapshots/{:020}.snap", at.get()));
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    assert_eq!(checkpoints(folder), []);
}

// A damaged checkpoint costs only time: recovery uses the previous one or the journal's first
// record.
#[tokio::test]
async fn damaged_checkpoints_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let market = market(13);
    settled(folder, &market).await.stop().await;
    damage(folder);
    let mut platform = settled(folder, &market).await;
    platform.assert_agrees(&market).await;
    platform.stop().await;
    damage(folder);
    // With the journal truncated, recovery has no starting point.
    assert!(truncate(folder, market.position()) > Sequence::ZERO);
    let refused = Platform::try_start(folder, config(folder), &[]).await;
    let error = refused.map(|_| ()).unwrap_err();
    assert!(error.is_truncated(), "{error}");
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

// Databases of an earlier point in time. From a whole journal settlement catches up from the
// ledger's position. From a truncated journal it cannot, and the health reports it.
#[tokio::test]
async fn a_restored_older_ledger_needs_the_whole_journal_to_catch_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let market = market(14);
    let half = market.records.len() / 2;
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    platform.fund(&market).await;
    std::fs::write(folder.join("funded"), "").unwrap();
    platform.feed(&market.records[..half]);
    drained(&platform, market.records[half - 1].command.sequence).await;
    platform.stop().await;
    let back_up = |folders: &[&str]| {
        for name in folders {
            copy(&folder.join(name), &folder.join("copies").join(name));
        }
    };
    let restore = |folders: &[&str]| {
        for name in folders {
            std::fs::remove_dir_all(folder.join(name)).unwrap();
            copy(&folder.join("copies").join(name), &folder.join(name));
        }
    };
    let databases = ["ledger", "settlement"];
    back_up(&databases);
    settled(folder, &market).await.stop().await;
    back_up(&["journal", "snapshots"]);

    // The node itself resumes from its newest checkpoint.
    let newest = *checkpoints(folder).last().expect("a checkpoint");
    assert!(newest > Sequence(half as u64 + CHECKPOINT_COMMANDS));
    restore(&databases);
    assert!(truncate(folder, newest) > Sequence(half as u64));
    let platform = Platform::start(folder, config(folder), &[]).await;
    journal_failing(&platform, "older copy").await;
    platform.stop().await;

    restore(&databases);
    restore(&["journal", "snapshots"]);
    let mut platform = settled(folder, &market).await;
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// The journal lacks records that the ledger has settled.
#[tokio::test]
async fn a_journal_that_ends_before_the_ledger_stops_settlement() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let market = market(15);
    settled(folder, &market).await.stop().await;
    std::fs::remove_dir_all(folder.join("journal")).unwrap();
    std::fs::remove_dir_all(folder.join("snapshots")).unwrap();
    let half = &market.records[..market.records.len() / 2];
    let platform = Platform::start(folder, config(folder), half).await;
    journal_failing(&platform, "a journal was lost").await;
    platform.stop().await;
}
