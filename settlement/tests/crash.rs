//! The process is killed between two steps of a batch, then restarted: every trade is settled once
//! and all money is accounted for.

mod world;

use std::path::PathBuf;
use std::time::Duration;

use proto::common::v1::OperationStatus;
use testkit::Registry;
use types::Event;
use world::services::{Platform, config, context};
use world::{CHILD_FOLDER, Market, in_time, killed_at, node};

const PATIENCE: Duration = Duration::from_secs(60);

/// File in the folder: the chain leaves out trades with the number [`LEFT_OUT`] in every attempt.
const REFUSES: &str = "refuses";
const LEFT_OUT: u64 = 2;

/// File in the folder: the ledger refuses the first trade, and an operator busts it.
const LEDGER_REFUSES: &str = "ledger-refuses";

/// The public id of the market's first trade.
fn first_trade(market: &Market) -> String {
    let mut events = market.records.iter().flat_map(|record| &record.events);
    let trade = events.find(|event| matches!(event.event, Event::Trade(_)));
    trade.expect("a trade").trade_uuid(node()).to_string()
}

/// Busts a trade as soon as its batch is stuck.
async fn bust(platform: &Platform, trade: &str) {
    let (mut operators, _slot) = platform.operators();
    let request = || proto::settlement::v1::BustTradeRequest {
        context: context(&format!("bust-{trade}")),
        trade_id: trade.to_owned(),
        reason: "test".to_owned(),
    };
    let busting = async {
        while operators.bust_trade(request()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    in_time("the bust", busting).await;
}

fn market() -> Market {
    let mut market = Market::new(11);
    for _ in 0..150 {
        market.random();
    }
    market
}

async fn run(folder: &std::path::Path) -> Platform {
    let market = market();
    // Small batches: a journal that is read at once fills at least two, so the process is killed
    // twice.
    let mut settings = config(folder);
    settings.batch_trades_max = 2;
    if folder.join(Registry::TRADES_MAX).exists() {
        // The attempts of a batch follow each other, so they can be counted.
        settings.chain_batches_max = 1;
    }
    // The gateway's blocked money and the journal outlive the process.
    let funded = folder.join("funded");
    let is_refused = folder.join(LEDGER_REFUSES).exists();
    let refused = is_refused.then(|| first_trade(&market));
    let platform = if funded.exists() {
        Platform::start(folder, settings, &market.records).await
    } else {
        let mut platform = Platform::start(folder, settings, &[]).await;
        if folder.join(REFUSES).exists() {
            platform.chain.left_out.lock().unwrap().insert(LEFT_OUT);
        }
        platform.fund(&market).await;
        if let Some(trade) = &refused {
            platform.occupy(trade).await;
        }
        std::fs::write(&funded, "").unwrap();
        platform.feed(&market.records);
        platform
    };
    if let Some(trade) = &refused {
        bust(&platform, trade).await;
    }
    let end = market.position();
    tokio::time::timeout(PATIENCE, platform.settlement.drained(end))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
    platform
}

/// The process to kill; does nothing unless a parent test started it.
#[tokio::test]
async fn child() {
    if let Ok(folder) = std::env::var(CHILD_FOLDER) {
        run(&PathBuf::from(folder)).await;
    }
}

// rows: R186 R189
#[tokio::test]
async fn r186_killed_between_any_two_steps_every_trade_is_settled_once() {
    let places = [
        "settlement.sealed",
        "settlement.posted",
        "settlement.submitted",
        "settlement.finalized",
    ];
    for place in places {
        let folder = tempfile::tempdir().unwrap();
        for time in 1..=2 {
            killed_at(&format!("{place}:{time}"), folder.path());
        }
        let market = market();
        let mut platform = run(folder.path()).await;
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
        platform.assert_agrees(&market).await;
        platform.stop().await;
    }
}

// rows: R186 R189
#[tokio::test]
async fn r186_killed_between_the_halves_of_a_reverted_batch_every_trade_is_settled_once() {
    for place in ["settlement.submitted", "settlement.finalized"] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(Registry::TRADES_MAX), "1").unwrap();
        // The last kill is after the second half of a batch, whose first half is repeated.
        for time in [1, 2, 2] {
            killed_at(&format!("{place}:{time}"), folder.path());
        }
        let market = market();
        let mut platform = run(folder.path()).await;
        let moved = platform.chain.moved();
        let mut trades = 0;
        for event in market.records.iter().flat_map(|r| &r.events) {
            if matches!(event.event, Event::Trade(_)) {
                trades += 1;
                let id = event.trade_uuid(node()).to_string();
                assert_eq!(moved.get(&id), Some(&1), "{place}: trade {id}");
                assert!(!platform.is_bust(&id), "{place}: trade {id}");
            }
        }
        assert_eq!(moved.len(), trades);
        let batches = platform.chain.state.lock().unwrap().batches.clone();
        let mut ids = batches.iter().map(|(id, _)| id);
        assert!(ids.any(|id| id.ends_with("/3")), "{batches:?}");
        platform.assert_agrees(&market).await;
        platform.stop().await;
    }
}

// rows: R186 R190
#[tokio::test]
async fn r190_killed_after_its_operations_are_reversed_a_trade_is_bust_once() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(REFUSES), "").unwrap();
    killed_at("settlement.busted:1", folder.path());
    let market = market();
    let mut platform = run(folder.path()).await;
    // A bust is journalled before a final position that includes it.
    platform.reported(market.position()).await;
    let moved = platform.chain.moved();
    let events = market.records.iter().flat_map(|record| &record.events);
    let mut bust = 0;
    for event in events {
        if !matches!(event.event, Event::Trade(_)) {
            continue;
        }
        let id = event.trade_uuid(node()).to_string();
        let (operation, _) = platform.operation(&id).await.expect("posted");
        match moved.get(&id) {
            Some(count) => {
                assert_eq!(*count, 1, "trade {id}");
                assert_eq!(operation.status(), OperationStatus::Finalized, "trade {id}");
            }
            None => {
                bust += 1;
                assert_eq!(operation.status(), OperationStatus::Failed, "trade {id}");
                assert!(platform.is_bust(&id), "trade {id} is journalled as bust");
            }
        }
    }
    // At least the trade of the batch at which the process was killed.
    assert!(bust > 0);
    let (mut operators, slot) = platform.operators();
    let cases = operators.list_cases(proto::settlement::v1::ListCasesRequest::default());
    assert_eq!(cases.await.unwrap().into_inner().cases.len(), bust);
    drop(slot);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// rows: R186 R190
#[tokio::test]
async fn r190_killed_while_a_trade_leaves_a_refused_batch_it_is_bust_once() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(LEDGER_REFUSES), "").unwrap();
    for place in ["settlement.withdrawn:1", "settlement.busted:1"] {
        killed_at(place, folder.path());
    }
    let market = market();
    let refused = first_trade(&market);
    let mut platform = run(folder.path()).await;
    platform.reported(market.position()).await;
    assert!(platform.is_bust(&refused));
    assert_eq!(platform.operation(&refused).await, None);
    let moved = platform.chain.moved();
    for event in market.records.iter().flat_map(|record| &record.events) {
        if matches!(event.event, Event::Trade(_)) {
            let id = event.trade_uuid(node()).to_string();
            let expected = (id != refused).then_some(&1);
            assert_eq!(moved.get(&id), expected, "trade {id}");
        }
    }
    let (mut operators, slot) = platform.operators();
    let cases = operators.list_cases(proto::settlement::v1::ListCasesRequest::default());
    assert_eq!(cases.await.unwrap().into_inner().cases.len(), 1);
    drop(slot);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}
