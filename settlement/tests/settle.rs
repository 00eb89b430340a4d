//! Settlement against the real ledger: postings of a trade, stops at any moment, trades that the
//! chain refuses.

mod world;

use std::path::Path;
use std::time::{Duration, Instant};

use proto::common::v1::{OperationStatus, OperationType};
use proto::ledger::v1 as wire;
use rand::Rng;
use testkit::Registry;
use testkit::messages::tx_hash;
use types::command::Bust;
use types::*;
use types::{HoldPart, order_hold};
use world::services::{Platform, config, store};
use world::{FUNDED, Market, in_time, node};

/// Generous for slow machines; no test measures it.
const PATIENCE: Duration = Duration::from_secs(60);

async fn drained(platform: &Platform, sequence: Sequence) {
    tokio::time::timeout(PATIENCE, platform.settlement.drained(sequence))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
}

/// Ids of all trades, with the sequences of their commands.
fn trades(market: &Market) -> Vec<(Sequence, String)> {
    market
        .records
        .iter()
        .flat_map(|r| &r.events)
        .filter(|e| matches!(e.event, Event::Trade(_)))
        .map(|e| (e.sequence, e.trade_uuid(node()).to_string()))
        .collect()
}

fn order_ids(market: &Market) -> Vec<Id128> {
    market
        .records
        .iter()
        .filter(|r| matches!(r.command.command, Command::New(_)))
        .map(|r| order_uuid(r.command.time_ns, node(), r.command.sequence))
        .collect()
}

/// A buy at 105 meets a resting sell at 100: 10 units for 1000.00, fee 1.00.
fn one_trade() -> Market {
    let mut market = Market::new(1);
    market
        .order(1, 0, Side::Sell, 10_000, 10, TimeInForce::Gtc)
        .unwrap();
    market
        .order(0, 0, Side::Buy, 10_500, 10, TimeInForce::Gtc)
        .unwrap();
    market
}

// rows: R181 R182 R183 R184 R185 R187 R188 R191
#[tokio::test]
async fn r181_a_trade_is_settled_in_ledger_and_on_chain() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let market = one_trade();
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;

    let (sequence, trade) = trades(&market).remove(0);
    // R181: TRADE_BUY under the trade's id, two postings. R184: final with the transaction hash.
    let (buy, postings) = platform.operation(&trade).await.unwrap();
    assert_eq!(buy.r#type(), OperationType::TradeBuy);
    assert_eq!(buy.status(), OperationStatus::Finalized);
    let hash = buy.onchain_tx_hash.clone().unwrap();
    let batch = platform.chain.batch_of(&trade).unwrap();
    assert!(
        batch.starts_with("1:") && batch.ends_with(&format!("-{sequence}")),
        "{batch}"
    );
    assert_eq!(hash, tx_hash(&batch));
    let rows = |postings: &[wire::Posting]| -> Vec<(String, String, String)> {
        postings
            .iter()
            .map(|p| {
                let amount = p.amount.clone().unwrap().amount.unwrap().value;
                (
                    p.debit_subaccount_id.clone(),
                    p.credit_subaccount_id.clone(),
                    amount,
                )
            })
            .collect()
    };
    let row = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
    assert_eq!(
        rows(&postings),
        vec![
            row("user-0:CFA-RUB", "system:reserve:CFA-RUB", "1000.00"),
            row("system:reserve:BOND-0", "user-0:BOND-0", "10"),
        ]
    );
    // R187: the mirror operation pays the seller and takes the units.
    let (sell, postings) = platform.operation(&format!("{trade}:sell")).await.unwrap();
    assert_eq!(
        (sell.r#type(), sell.status()),
        (OperationType::TradeSell, OperationStatus::Finalized)
    );
    assert_eq!(
        rows(&postings),
        vec![
            row("system:reserve:CFA-RUB", "user-1:CFA-RUB", "1000.00"),
            row("user-1:BOND-0", "system:reserve:BOND-0", "10"),
        ]
    );
    // R185
    let (fee, postings) = platform.operation(&format!("{trade}:fee")).await.unwrap();
    assert_eq!(
        (fee.r#type(), fee.status()),
        (OperationType::Fee, OperationStatus::Finalized)
    );
    assert_eq!(
        rows(&postings),
        vec![row("user-0:CFA-RUB", "system:fees:CFA-RUB", "1.00")]
    );
    // Ids begin with the milliseconds of the trade or order, so a batch's rows are adjacent in
    // every index (`design.md` 4).
    let millis = |id: &str| id[..13].to_owned();
    for operation in [&buy, &sell, &fee] {
        assert_eq!(millis(&operation.operation_id), millis(&trade));
        assert_eq!(&operation.operation_id[14..15], "8");
    }
    // R182: seller to buyer, quantity, trade id; the money leg with it.
    let leg = platform.chain.state.lock().unwrap().legs[&trade].clone();
    assert_eq!(
        (leg.seller_id.as_str(), leg.buyer_id.as_str()),
        ("user-1", "user-0")
    );
    let text = |d: Option<proto::common::v1::Decimal>| d.unwrap().value;
    assert_eq!(
        (
            text(leg.quantity),
            text(leg.payment),
            text(leg.fee),
            leg.trade_number
        ),
        ("10".into(), "1000.00".into(), "1.00".into(), 1)
    );
    // R183 and R191: both orders' holds are consumed; 5 per unit returned to the trading hold.
    let orders = order_ids(&market);
    for order in &orders {
        let hold = platform.hold(order_hold(*order, HoldPart::Main)).await;
        assert_eq!(hold.status(), wire::HoldStatus::Consumed);
        assert!(hold.reason.contains(&order.to_string()));
        assert_eq!(millis(&hold.hold_id), millis(&order.to_string()));
    }
    let main = platform.hold(order_hold(orders[1], HoldPart::Main)).await;
    assert_eq!(text(main.amount.unwrap().amount), "1050.00");
    assert_eq!(
        (text(main.consumed), text(main.released)),
        ("1000.00".into(), "50.00".into())
    );
    let left = Decimal::from_minor(FUNDED - 100_100, 2).to_string();
    assert_eq!(
        platform.balance("user-0:CFA-RUB").await,
        [left.clone(), left, "0.00".into(), "0.00".into()]
    );
    // Received assets are settled and available.
    let [balance, _, unsettled, available] = platform.balance("user-1:CFA-RUB").await;
    assert_eq!(
        balance,
        Decimal::from_minor(FUNDED + 100_000, 2).to_string()
    );
    assert_eq!(
        (unsettled.as_str(), available.as_str()),
        ("0.00", "1000.00")
    );
    platform.assert_agrees(&market).await;

    let stats = platform.settlement.stats();
    assert_eq!(
        (
            stats.trades_settled,
            stats.trades_pending,
            stats.trades_failed
        ),
        (1, 0, 0)
    );
    assert!(!platform.is_bust(&trade));
    platform.reported(sequence).await;
    platform.stop().await;
}

// rows: R190
#[tokio::test]
async fn r190_several_trades_consume_one_hold_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = Market::new(2);
    market
        .order(0, 0, Side::Buy, 100, 30, TimeInForce::Gtc)
        .unwrap();
    let mut fed = 0;
    platform.fund(&market).await;
    for (seller, left) in [(1, "20.00"), (2, "10.00"), (3, "0.00")] {
        market
            .order(seller, 0, Side::Sell, 100, 10, TimeInForce::Gtc)
            .unwrap();
        platform.feed(&market.records[fed..]);
        fed = market.records.len();
        drained(&platform, market.position()).await;
        let hold = platform
            .hold(order_hold(order_ids(&market)[0], HoldPart::Main))
            .await;
        assert_eq!(
            hold.remaining_amount.clone().unwrap().amount.unwrap().value,
            left
        );
    }
    assert_eq!(platform.settlement.stats().trades_settled, 3);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// rows: R186 R188 R189
#[tokio::test]
async fn r186_stopped_anywhere_it_resumes_and_settles_every_trade_once() {
    for seed in testkit::seed::seeds(0..3) {
        let folder = tempfile::tempdir().unwrap();
        let mut market = Market::new(seed);
        for _ in 0..250 {
            market.random();
        }
        let mut starts = 0;
        let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
        platform.fund(&market).await;
        platform.feed(&market.records);
        loop {
            starts += 1;
            if starts > 5 {
                break;
            }
            let posts = market.rng.random_range(0..400);
            for _ in 0..posts {
                tokio::task::yield_now().await;
            }
            platform.stop().await;
            // The replica starts at its newest checkpoint, settlement at the ledger's position.
            platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
        }
        drained(&platform, market.position()).await;
        let trades = trades(&market);
        assert!(trades.len() > 30);
        let moved = platform.chain.moved();
        for (_, trade) in &trades {
            assert_eq!(moved.get(trade), Some(&1), "trade {trade}");
            let (buy, _) = platform.operation(trade).await.unwrap();
            let (sell, _) = platform.operation(&format!("{trade}:sell")).await.unwrap();
            assert_eq!(buy.status(), OperationStatus::Finalized);
            assert_eq!(sell.status(), OperationStatus::Finalized);
        }
        assert_eq!(moved.len(), trades.len());
        platform.assert_agrees(&market).await;
        let stats = platform.settlement.stats();
        assert_eq!(
            (stats.trades_settled, stats.halted.as_str()),
            (trades.len() as u64, "")
        );
        assert!(platform.settlement.breaks().await.unwrap().is_empty());
        platform.stop().await;
    }
}

/// State of a trade's leg for a reader of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    Nothing,
    Posted,
    Final,
}

async fn leg(platform: &mut Platform, key: &str) -> Seen {
    match platform.operation(key).await {
        None => Seen::Nothing,
        Some((operation, _)) if operation.status() == OperationStatus::Finalized => Seen::Final,
        Some(_) => Seen::Posted,
    }
}

/// Reads the seller's leg, then the buyer's, then the seller's again. A leg never returns to an
/// earlier state. So if one is ahead of a later reading, the reader has seen half of a trade.
async fn read_trade(platform: &mut Platform, trade: &str) -> Seen {
    let sells = format!("{trade}:sell");
    let sold = leg(platform, &sells).await;
    let bought = leg(platform, trade).await;
    let again = leg(platform, &sells).await;
    assert!(
        sold <= bought && bought <= again,
        "half of {trade}: {sold:?} {bought:?} {again:?}"
    );
    sold
}

// rows: R186
#[tokio::test]
async fn r186_a_reader_never_sees_half_of_a_trade() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    // The chain is unavailable, so trades wait between ledger and chain.
    *platform.chain.away.lock().unwrap() = u32::MAX;
    let mut market = Market::new(7);
    for _ in 0..150 {
        market.random();
    }
    let (trades, end) = (trades(&market), market.position());
    assert!(trades.len() > 20, "{}", trades.len());
    platform.fund(&market).await;
    platform.feed(&market.records);
    let reading = async {
        while platform.settlement.stats().progress.settled < end {
            for (_, trade) in &trades {
                assert!(read_trade(&mut platform, trade).await < Seen::Final);
            }
        }
    };
    in_time("the postings", reading).await;
    for (_, trade) in &trades {
        assert_eq!(read_trade(&mut platform, trade).await, Seen::Posted);
    }
    assert!(platform.chain.moved().is_empty());

    *platform.chain.away.lock().unwrap() = 0;
    let reading = async {
        while platform.settlement.stats().progress.finalized < end {
            for (_, trade) in &trades {
                assert!(read_trade(&mut platform, trade).await > Seen::Nothing);
            }
        }
    };
    in_time("the end of all trades", reading).await;
    for (_, trade) in &trades {
        assert_eq!(read_trade(&mut platform, trade).await, Seen::Final);
    }
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

/// Number of batches in settlement's store.
async fn batches(folder: &Path) -> i64 {
    let count = sqlx::query_scalar("SELECT COUNT(*) FROM batches");
    count.fetch_one(&mut store(folder).await).await.unwrap()
}

/// While the maximum number of batches is in flight, orders that need their own holds do not make
/// small batches with trades due: each batch costs a chain transaction.
#[tokio::test]
async fn batches_fill_up_while_the_chain_is_busy() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(folder.path());
    (settings.chain_busy_batches, settings.wait_ms) = (1, 400);
    (settings.batch_trades_max, settings.batch_rows_max) = (250, 5_000);
    let wait = Duration::from_millis(settings.wait_ms);
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    *platform.chain.away.lock().unwrap() = u32::MAX;
    let mut market = one_trade();
    platform.fund(&market).await;
    platform.feed(&market.records);
    in_time("the trade", platform.settlement.settled(market.position())).await;
    let before = batches(folder.path()).await;
    market.step_ns = 2_000;
    let started = Instant::now();
    while started.elapsed() < 3 * wait {
        let fed = market.records.len();
        market.time_ns = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        for (user, side, price) in [
            (1, Side::Sell, 10_000),
            (0, Side::Buy, 10_000),
            (0, Side::Buy, 9_000),
        ] {
            let order = market.order(user, 0, side, price, 1, TimeInForce::Gtc);
            order.expect("is covered");
        }
        platform.feed(&market.records[fed..]);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    in_time("the holds", platform.settlement.settled(market.position())).await;
    let batches = batches(folder.path()).await - before;
    let elapsed = started.elapsed().div_duration_f64(wait);
    assert!(
        batches as f64 <= elapsed + 2.0,
        "{batches} in {elapsed} wait times"
    );
    *platform.chain.away.lock().unwrap() = 0;
    drained(&platform, market.position()).await;
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// rows: R186
#[tokio::test]
async fn r186_before_a_trade_is_final_neither_party_can_use_what_it_receives() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    *platform.chain.away.lock().unwrap() = u32::MAX;
    let market = one_trade();
    platform.fund(&market).await;
    platform.feed(&market.records);
    let posted = platform.settlement.settled(market.position());
    in_time("the postings", posted).await;

    let money = |minor: i64| Decimal::from_minor(minor, 2).to_string();
    for is_final in [false, true] {
        if is_final {
            *platform.chain.away.lock().unwrap() = 0;
            drained(&platform, market.position()).await;
        }
        // Each party has paid. What it receives is credited at once and available once final.
        let [given, ..] = platform.balance("user-0:CFA-RUB").await;
        assert_eq!(given, money(FUNDED - 100_100));
        let [given, ..] = platform.balance("user-1:BOND-0").await;
        assert_eq!(given, (FUNDED - 10).to_string());
        let [units, _, unsettled, available] = platform.balance("user-0:BOND-0").await;
        assert_eq!(units, (FUNDED + 10).to_string());
        let usable = (unsettled.as_str(), available.as_str());
        assert_eq!(usable, if is_final { ("0", "10") } else { ("10", "0") });
        let [received, _, unsettled, available] = platform.balance("user-1:CFA-RUB").await;
        assert_eq!(received, money(FUNDED + 100_000));
        let usable = (unsettled.as_str(), available.as_str());
        let (nothing, price) = ("0.00", "1000.00");
        assert_eq!(
            usable,
            if is_final {
                (nothing, price)
            } else {
                (price, nothing)
            }
        );
        platform.assert_zero_sum().await;
        let (_, trade) = trades(&market).remove(0);
        assert_eq!(platform.chain.moved().contains_key(&trade), is_final);
    }
    platform.stop().await;
}

// rows: R189
#[tokio::test]
async fn r189_an_unavailable_chain_is_retried_and_a_repeat_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    *platform.chain.away.lock().unwrap() = 2;
    let market = one_trade();
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;
    let (_, trade) = trades(&market).remove(0);
    let before = platform.balance("user-1:CFA-RUB").await;
    platform.stop().await;

    let mut platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
    drained(&platform, market.position()).await;
    assert_eq!(platform.chain.moved()[&trade], 1);
    assert_eq!(platform.balance("user-1:CFA-RUB").await, before);
    assert_eq!(platform.settlement.stats().trades_settled, 1);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// rows: R186
#[tokio::test]
async fn r186_a_trade_the_chain_refuses_twice_is_bust_and_its_money_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    platform.chain.left_out_once.lock().unwrap().insert(1);
    platform.chain.left_out.lock().unwrap().insert(2);
    let mut market = one_trade();
    let sell = market.order_of_session(0, 71, 2, Side::Sell);
    let buy = market.order_of_session(1, 72, 3, Side::Buy);
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;

    let trades = trades(&market);
    platform.reported(market.position()).await;
    assert!(!platform.is_bust(&trades[0].1) && platform.is_bust(&trades[1].1));
    // Both orders have ended; their sessions receive the bust under the orders' own ids.
    let bust_command = Command::Bust(Bust {
        trade: Id128::parse(&trades[1].1).unwrap(),
        trade_number: 2,
        instrument: InstrumentIx(0),
        buy,
        sell,
    });
    assert!(platform.has_submitted(bust_command), "{bust_command:?}");
    // The bust is journalled before any position that includes the trade.
    let submitted = platform.submitted.lock().unwrap().clone();
    let bust = submitted.iter().position(|c| matches!(c, Command::Bust(_)));
    let finalized = submitted
        .iter()
        .position(|c| matches!(c, Command::Settled(s) if s.finalized >= trades[1].0));
    assert!(bust < finalized, "{submitted:?}");
    let (kept, _) = platform.operation(&trades[0].1).await.unwrap();
    let batch = platform.chain.batch_of(&trades[0].1).unwrap();
    assert!(batch.ends_with("/2"), "{batch}");
    assert_eq!(kept.onchain_tx_hash, Some(tx_hash(&batch)));
    let (bust, _) = platform.operation(&trades[1].1).await.unwrap();
    assert_eq!(bust.status(), OperationStatus::Failed);
    // Neither side keeps anything: the buyer's money and the seller's units are available again.
    let [balance, _, unsettled, available] = platform.balance("user-3:CFA-RUB").await;
    assert_eq!(balance, Decimal::from_minor(FUNDED, 2).to_string());
    // 5.00 and the fee of 0.01.
    assert_eq!((unsettled.as_str(), available.as_str()), ("0.00", "5.01"));
    let [balance, _, unsettled, available] = platform.balance("user-2:BOND-0").await;
    assert_eq!(
        (balance, unsettled.as_str(), available.as_str()),
        (FUNDED.to_string(), "0", "5")
    );
    assert_eq!(platform.balance("user-2:CFA-RUB").await[2], "0.00");
    assert_eq!(platform.settlement.stats().trades_failed, 1);
    platform.assert_agrees(&market).await;
    platform.stop().await;
    // The journal lacks the bust, as after a kill of the node. So settlement reports it again from
    // its store.
    let platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
    platform.reported(market.position()).await;
    assert!(
        platform.has_submitted(bust_command),
        "{:?}",
        platform.submitted
    );
    platform.stop().await;
}

/// One order trades with eight others: trades 1 to 8, in one batch.
fn eight_trades() -> Market {
    let mut market = Market::new(1);
    for seller in [1, 2, 3, 4, 5, 1, 2, 3] {
        let sell = market.order(seller, 0, Side::Sell, 100, 1, TimeInForce::Gtc);
        sell.expect("is covered");
    }
    let buy = market.order(0, 0, Side::Buy, 100, 8, TimeInForce::Gtc);
    buy.expect("is covered");
    market
}

/// Attempts on chain, with their numbers of trades.
fn sizes(platform: &Platform) -> Vec<(String, usize)> {
    let state = platform.chain.state.lock().unwrap();
    let size = |(id, trades): &(String, Vec<String>)| {
        let attempt = id.split_once('/').map_or("1", |(_, attempt)| attempt);
        (attempt.to_owned(), trades.len())
    };
    state.batches.iter().map(size).collect()
}

// rows: R186 R189
#[tokio::test]
async fn r186_a_batch_that_reverts_is_settled_in_parts_and_no_trade_is_bust() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(Registry::TRADES_MAX), "3").unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = eight_trades();
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;
    let expected: [(&str, usize); 7] = [
        ("1", 8),
        ("2", 4),
        ("3", 2),
        ("4", 2),
        ("5", 4),
        ("6", 2),
        ("7", 2),
    ];
    assert_eq!(
        sizes(&platform),
        expected.map(|(attempt, trades)| (attempt.to_owned(), trades))
    );
    let moved = platform.chain.moved();
    for (_, trade) in trades(&market) {
        assert_eq!(moved.get(&trade), Some(&1), "trade {trade}");
        let (operation, _) = platform.operation(&trade).await.unwrap();
        assert_eq!(operation.status(), OperationStatus::Finalized);
        let batch = platform.chain.batch_of(&trade).unwrap();
        assert_eq!(operation.onchain_tx_hash, Some(tx_hash(&batch)));
    }
    let stats = platform.settlement.stats();
    assert_eq!((stats.trades_settled, stats.trades_failed), (8, 0));

    // The next batches have at most half as many trades: a part is a batch of its own.
    let (fed, before) = (market.records.len(), sizes(&platform).len());
    for seller in [1, 2, 3, 4, 5] {
        let sell = market.order(seller, 0, Side::Sell, 100, 1, TimeInForce::Gtc);
        sell.expect("is covered");
    }
    let buy = market.order(0, 0, Side::Buy, 100, 5, TimeInForce::Gtc);
    buy.expect("is covered");
    platform.feed(&market.records[fed..]);
    drained(&platform, market.position()).await;
    let sizes = sizes(&platform);
    let later = sizes[before..].iter().map(|(_, trades)| *trades);
    assert_eq!(later.max(), Some(4));
    assert_eq!(platform.settlement.stats().trades_settled, 13);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

// rows: R186
/// A trade that needs what an earlier batch delivers is not bust while that batch is not final.
#[tokio::test]
async fn r186_a_trade_left_out_is_retried_after_the_parts_of_an_earlier_batch() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(Registry::TRADES_MAX), "1").unwrap();
    let mut settings = config(folder.path());
    settings.batch_trades_max = 8;
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    // Both batches are posted before the first one is submitted.
    *platform.chain.away.lock().unwrap() = u32::MAX;
    platform.chain.left_out_before.lock().unwrap().insert(9, 8);
    let mut market = eight_trades();
    for (user, side) in [(5, Side::Sell), (4, Side::Buy)] {
        let order = market.order(user, 0, side, 100, 1, TimeInForce::Gtc);
        order.expect("is covered");
    }
    platform.fund(&market).await;
    platform.feed(&market.records);
    let posted = platform.settlement.settled(market.position());
    in_time("the postings", posted).await;
    *platform.chain.away.lock().unwrap() = 0;
    drained(&platform, market.position()).await;
    let (_, last) = trades(&market).pop().expect("nine trades");
    let batch = platform.chain.batch_of(&last).expect("on chain");
    assert!(batch.ends_with("/2"), "{batch}");
    let stats = platform.settlement.stats();
    assert_eq!((stats.trades_settled, stats.trades_failed), (9, 0));
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

/// `design.md` 6: at most ten `Settled` per second, however many batches there are.
#[tokio::test]
async fn progress_is_journalled_at_most_ten_times_per_second() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let begun = Instant::now();
    let mut market = one_trade();
    let mut fed = 0;
    for _ in 0..30 {
        market
            .order(1, 0, Side::Sell, 10_600, 1, TimeInForce::Gtc)
            .unwrap();
        if fed == 0 {
            platform.fund(&market).await;
        }
        platform.feed(&market.records[fed..]);
        fed = market.records.len();
        drained(&platform, market.position()).await;
    }
    platform.reported(market.position()).await;
    let settled = |command: &&Command| matches!(command, Command::Settled(_));
    let reports = platform
        .submitted
        .lock()
        .unwrap()
        .iter()
        .filter(settled)
        .count();
    let most = 1 + begun.elapsed().as_millis() / 100;
    assert!(reports as u128 <= most, "{reports} > {most}");
    platform.stop().await;
}
