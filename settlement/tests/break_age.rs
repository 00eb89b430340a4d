//! The age of the oldest open difference in the metrics. A test binary of its own, because the
//! metrics are process-wide.

mod world;

use std::time::Duration;

use proto::ledger::v1::AdjustHoldRequest;
use types::*;
use world::Market;
use world::services::{Platform, config, context, store};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a gauge has such a value, and returns the value.
async fn becomes(metrics: &rpc::MetricsHandle, name: &str, is_such: impl Fn(f64) -> bool) -> f64 {
    let waiting = async {
        loop {
            let text = metrics.render();
            let found: Option<f64> = text.lines().find_map(|line| {
                let (series, value) = line.split_once(' ')?;
                (series == name).then(|| value.parse().expect("a number"))
            });
            if let Some(value) = found.filter(|value| is_such(*value)) {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, waiting).await;
    waited.unwrap_or_else(|_| panic!("{name}:\n{}", metrics.render()))
}

// rows: R188
#[tokio::test(flavor = "multi_thread")]
async fn r188_the_age_of_the_oldest_difference_is_a_gauge() {
    const OPEN: &str = "settlement_breaks_open";
    const AGE: &str = "settlement_break_age_seconds";
    let metrics = rpc::metrics_init();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut platform = Platform::start(folder, config(folder), &[]).await;
    let mut market = Market::new(1);
    for (user, side) in [(1, Side::Sell), (0, Side::Buy)] {
        let placed = market.order(user, 0, side, 100, 10, TimeInForce::Gtc);
        placed.expect("is covered");
    }
    platform.fund(&market).await;
    platform.feed(&market.records);
    let drained = platform.settlement.drained(market.position());
    let drained = tokio::time::timeout(PATIENCE, drained).await;
    drained.expect("drained");
    becomes(&metrics, OPEN, |open| open == 0.0).await;
    becomes(&metrics, AGE, |age| age == 0.0).await;

    // Money leaves user 0's trading hold without a journal record.
    let trading_hold = Market::trading_hold(UserIx(0), AssetIx::MONEY);
    let trading_hold = *market.admission().hold(trading_hold).unwrap();
    let adjust = |minor: i64, key: &str| AdjustHoldRequest {
        context: context(key),
        hold_id: trading_hold.hold_id.to_string(),
        remaining_amount: Some(proto::convert::to_monetary_amount_minor(
            "CFA-RUB", minor, 2,
        )),
    };
    let taken = adjust(trading_hold.undrawn.0 - 1, "taken");
    platform.ledger.adjust_hold(taken).await.unwrap();
    platform.stop().await;
    let platform = Platform::start(folder, config(folder), &market.records).await;
    becomes(&metrics, OPEN, |open| open == 1.0).await;
    let found = becomes(&metrics, AGE, |age| age > 0.0).await;
    assert!(found < 3_600.0, "{found} s");
    becomes(&metrics, AGE, |age| age > found).await;

    // A restart keeps the age.
    platform.stop().await;
    let mut db = store(folder).await;
    let earlier = "UPDATE breaks SET found_at_us = found_at_us - 3600000000";
    sqlx::query(earlier).execute(&mut db).await.unwrap();
    sqlx::Connection::close(db).await.unwrap();
    let mut platform = Platform::start(folder, config(folder), &market.records).await;
    becomes(&metrics, AGE, |age| (3_600.0..7_200.0).contains(&age)).await;

    let repaired = adjust(trading_hold.undrawn.0, "repaired");
    platform.ledger.adjust_hold(repaired).await.unwrap();
    becomes(&metrics, OPEN, |open| open == 0.0).await;
    becomes(&metrics, AGE, |age| age == 0.0).await;
    platform.stop().await;
}
