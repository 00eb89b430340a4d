//! Restarts after `kill -9` at seeded moments of order flow and after aborts between two steps.
//! Nothing acknowledged is lost, no trade is settled twice, no hold is orphaned, and the proof of
//! balances passes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, context_with_key, number, text};
use tests::flow::{Flow, Random, Received};
use tests::member::resume;
use tests::process::{PATIENCE, Platform};
use tests::shared::run;
use tests::world::{User, is_settled, limit_order, rub};
use types::Decimal;

const KILLS: usize = 3;

/// Seed of the flow and its kills; `TESTS_SEED` overrides it.
fn seed() -> u64 {
    tests::seed::seed(20_260_101)
}

/// Two buyers with money (even indexes) and two sellers with units, all of it in trading holds.
async fn members(platform: &Platform, bond: &str) -> Vec<User> {
    let mut members = Vec::new();
    for at in 0..4 {
        let user = platform.trader().await;
        for limit in ["DEPOSIT", "TRADING"] {
            platform.set_limit(&user, limit, "1000000000.00").await;
        }
        if at % 2 == 0 {
            platform.deposit(&user, "5000000.00").await;
            platform.trading_hold(&user, "CFA-RUB", "5000000.00").await;
        } else {
            platform.issue(bond, &user, "50000").await;
            platform.trading_hold(&user, bond, "50000").await;
        }
        members.push(user);
    }
    members
}

#[test]
fn kill_at_random_moments_of_order_flow_loses_and_doubles_nothing() {
    run(async {
        let mut platform = Platform::start().await;
        let bond = platform.bond().await;
        let members = members(&platform, &bond).await;
        let seed = seed();
        let flow = Flow::start(&platform, &members, &bond, seed).await;
        let mut random = Random::new(seed);
        for kill in 0..KILLS {
            let acknowledged = flow.acknowledged();
            let more = usize::try_from(100 + random.below(300)).expect("small");
            flow.until_acknowledged(acknowledged + more).await;
            // The kill must not always follow right after a commit.
            tokio::time::sleep(Duration::from_micros(random.below(20_000))).await;
            platform.kill().await;
            platform.restart().await;
            if kill == 1 {
                // A second kill shortly after the first restart.
                tokio::time::sleep(Duration::from_millis(random.below(200))).await;
                platform.kill().await;
                platform.restart().await;
            }
            resume(&flow.connection).await;
        }
        let acknowledged = flow.acknowledged();
        flow.until_acknowledged(acknowledged + 100).await;
        let received = flow.finish().await;
        println!(
            "{} orders, {} fills, {:?}",
            received.acknowledged.len(),
            received.fills.len(),
            received.rejects
        );
        assert_eq!(received.violations, Vec::<String>::new());
        assert!(
            !received.fills.is_empty() && !received.cancelled.is_empty(),
            "the flow made no trade or no cancel"
        );
        check_state(&platform, &bond, &members, &received).await;
        platform.stop().await;
    });
}

/// Compares the members' record with the platform's state. Cancels all open orders and closes all
/// trading holds on the way.
async fn check_state(platform: &Platform, bond: &str, members: &[User], received: &Received) {
    platform.assert_no_orphans(&HashMap::new()).await;

    // The history contains exactly the acknowledged orders.
    for (channel, member) in members.iter().enumerate() {
        let orders = platform
            .all(
                AUDITOR,
                "market.ListOrders",
                "orders",
                json!({ "userId": member.id }),
            )
            .await;
        let known: BTreeSet<String> = orders.iter().map(|order| text(order, "/orderId")).collect();
        assert_eq!(known.len(), orders.len(), "an order is listed twice");
        let channel = u16::try_from(channel).expect("small");
        let acknowledged: BTreeSet<String> = received
            .acknowledged
            .iter()
            .filter(|(_, owner)| **owner == channel)
            .map(|(id, _)| id.clone())
            .collect();
        assert_eq!(known, acknowledged, "orders of member {channel}");
        let mass_cancel = json!({ "userId": member.id });
        platform
            .ok(OPERATOR, "market.MassCancel", mass_cancel)
            .await;
    }

    // Each trade is reported to both sides once, listed once and settled once.
    let mut sides: BTreeMap<&str, Vec<(u16, u64, i64)>> = BTreeMap::new();
    for ((trade, channel), fill) in &received.fills {
        sides
            .entry(trade)
            .or_default()
            .push((*channel, fill.quantity_lots, fill.price_ticks));
    }
    assert!(
        sides
            .values()
            .all(|sides| sides.len() == 2 && sides[0].1 == sides[1].1),
        "a trade was not reported once to each side"
    );
    let trades = all_settled(platform, bond).await;
    let listed: BTreeSet<&str> = trades
        .iter()
        .map(|trade| trade["tradeId"].as_str().expect("an id"))
        .collect();
    assert_eq!(listed.len(), trades.len(), "a trade is listed twice");
    assert_eq!(listed, sides.keys().copied().collect::<BTreeSet<_>>());
    assert_settled_once(platform, &listed).await;

    // Balances of units and money match the fills.
    for (channel, member) in members.iter().enumerate() {
        let mine = received
            .fills
            .iter()
            .filter(|((_, owner), _)| usize::from(*owner) == channel);
        let (units, kopecks) = mine.fold((0, 0), |(units, kopecks), (_, fill)| {
            let lots = i64::try_from(fill.quantity_lots).expect("small");
            (units + lots, kopecks + lots * fill.price_ticks)
        });
        if channel % 2 == 0 {
            assert_eq!(
                platform.balance(&member.units(bond)).await,
                Decimal::from(units)
            );
        } else {
            assert_eq!(
                platform.balance(&member.cash()).await,
                Decimal::from_minor(kopecks, 2)
            );
            assert_eq!(
                platform.balance(&member.units(bond)).await,
                Decimal::from(50_000 - units)
            );
        }
    }
    close_holds_and_prove(platform).await;
}

/// Waits until every trade of the instrument is settled; returns them.
async fn all_settled(platform: &Platform, bond: &str) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let trades = platform
            .all(
                AUDITOR,
                "market.ListTrades",
                "trades",
                json!({ "instrumentId": bond }),
            )
            .await;
        let open = trades.iter().filter(|trade| !is_settled(trade)).count();
        if open == 0 {
            return trades;
        }
        assert!(
            Instant::now() < deadline,
            "{open} of {} trades are not settled",
            trades.len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Asserts that the ledger has one buy and one sell operation per trade, all final.
async fn assert_settled_once(platform: &Platform, trades: &BTreeSet<&str>) {
    for (kind, suffix) in [("TRADE_BUY", ""), ("TRADE_SELL", ":sell")] {
        let request = json!({ "type": format!("OPERATION_TYPE_{kind}") });
        let operations = platform
            .all(AUDITOR, "ledger.ListOperations", "operations", request)
            .await;
        let mut keys: Vec<String> = operations
            .iter()
            .map(|operation| text(operation, "/idempotencyKey"))
            .collect();
        keys.sort();
        let expected: Vec<String> = trades
            .iter()
            .map(|trade| format!("{trade}{suffix}"))
            .collect();
        assert_eq!(keys, expected, "{kind}: not one operation per trade");
        for operation in &operations {
            assert_eq!(
                operation["status"],
                json!("OPERATION_STATUS_FINALIZED"),
                "{operation}"
            );
        }
    }
}

/// Closes every trading hold, waits until no hold is active, and asserts that the proof passes.
async fn close_holds_and_prove(platform: &Platform) {
    let request = json!({ "pagination": { "pageSize": 1000 } });
    let holds = platform
        .ok(AUDITOR, "market.ListTradingHolds", request)
        .await;
    for hold in holds["tradingHolds"].as_array().into_iter().flatten() {
        if hold["status"] == json!("TRADING_HOLD_STATUS_OPEN") {
            assert_eq!(number(&hold["drawn"]), Decimal::from(0), "{hold}");
            platform
                .ok(
                    &format!("sandbox.trader.{}", text(hold, "/userId")),
                    "market.CloseTradingHold",
                    json!({ "holdId": hold["holdId"] }),
                )
                .await;
        }
    }
    let request = json!({ "status": "HOLD_STATUS_ACTIVE" });
    platform
        .until("every hold to end", "ledger.ListHolds", request, |answer| {
            answer["holds"].as_array().is_none_or(Vec::is_empty)
        })
        .await;
    platform.proof().await;
}

/// Places an order at 100.00 under a key; returns its id, or `None` if the platform died during the
/// call.
async fn place(
    platform: &Platform,
    user: &User,
    bond: &str,
    side: &str,
    quantity: &str,
    key: &str,
) -> Option<String> {
    let request = json!({
        "context": context_with_key(key), "order": limit_order(user, bond, side, "100.00", quantity),
    });
    match platform
        .call(&user.token(), "market.PlaceOrder", request)
        .await
    {
        Ok(answer) => Some(text(&answer, "/order/orderId")),
        Err(refusal) => {
            assert_eq!(refusal.code, "transport", "{refusal:?}");
            None
        }
    }
}

// rows: R174
#[test]
fn r174_the_book_comes_back_from_a_kill_order_by_order() {
    run(async {
        let mut platform = Platform::start().await;
        let (seller, buyer, bond) = (
            platform.trader().await,
            platform.rich("10000.00").await,
            platform.bond().await,
        );
        platform.issue(&bond, &seller, "100").await;
        let mut offers = Vec::new();
        for (price, quantity) in [
            ("101.00", "2"),
            ("100.00", "3"),
            ("101.00", "4"),
            ("100.00", "5"),
        ] {
            let order = platform
                .place(&seller, &bond, "SELL", price, quantity)
                .await;
            offers.push(text(&order, "/orderId"));
        }
        for price in ["90.00", "91.00"] {
            platform.place(&buyer, &bond, "BUY", price, "1").await;
        }
        // Partially fills the oldest offer at its price, which keeps its priority.
        platform.place(&buyer, &bond, "BUY", "100.00", "1").await;
        platform.settled(&bond, 1).await;
        let book_sides = async |platform: &Platform| {
            let book = platform
                .ok(
                    AUDITOR,
                    "market.GetOrderBook",
                    json!({ "instrumentId": bond }),
                )
                .await;
            ["bids", "asks"].map(|side| book["snapshot"][side].clone())
        };
        let before = book_sides(&platform).await;
        platform.kill().await;
        platform.restart().await;
        assert_eq!(book_sides(&platform).await, before);
        // The next taker trades with the same orders in the same order.
        platform.place(&buyer, &bond, "BUY", "101.00", "13").await;
        let mut trades = platform.settled(&bond, 5).await;
        trades.sort_by_key(|trade| {
            text(trade, "/tradeNumber")
                .parse::<u64>()
                .expect("a number")
        });
        let makers: Vec<String> = trades[1..]
            .iter()
            .map(|trade| text(trade, "/sellOrderId"))
            .collect();
        let expected = [1, 3, 0, 2].map(|at: usize| offers[at].clone());
        assert_eq!(makers, expected);
        let rest = json!({ "userId": buyer.id });
        platform.ok(OPERATOR, "market.MassCancel", rest).await;
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

#[test]
fn kill_during_the_first_starts_does_not_break_a_later_start() {
    run(async {
        let mut random = Random::new(seed());
        let moments: Vec<Duration> = (0..6)
            .map(|_| Duration::from_millis(random.below(900)))
            .collect();
        let mut platform = Platform::start_after_kills(&moments).await;
        let (seller, buyer, bond) = (
            platform.trader().await,
            platform.rich("1000.00").await,
            platform.bond().await,
        );
        platform.issue(&bond, &seller, "5").await;
        platform.place(&seller, &bond, "SELL", "100.00", "5").await;
        platform.place(&buyer, &bond, "BUY", "100.00", "5").await;
        platform.settled(&bond, 1).await;
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

#[test]
fn kill_amid_deposits_and_redemptions_moves_each_rouble_once() {
    run(async {
        let mut platform = Platform::start().await;
        let mut random = Random::new(seed());
        let user = platform.rich("1000.00").await;
        let mut payments = Vec::new();
        let mut payouts = Vec::new();
        for _ in 0..KILLS {
            // Pays at the bank and requests redemptions without waiting for their end.
            for _ in 0..3 {
                let intent = platform.intent(&user, "100.00").await;
                platform.pay(&intent).await;
                payments.push(text(&intent, "/paymentId"));
                let payout = uuid::Uuid::now_v7().to_string();
                let request = json!({ "context": context_with_key(&payout), "userId": user.id, "payoutId": payout,
                    "amount": rub("30.00") });
                platform
                    .ok(&user.token(), "cfa.RedeemCfaRub", request)
                    .await;
                payouts.push(payout);
            }
            tokio::time::sleep(Duration::from_micros(random.below(200_000))).await;
            platform.kill().await;
            platform.restart().await;
        }
        for reference in payments.iter().chain(&payouts) {
            let request = json!({ "userId": user.id, "externalRef": reference });
            let what = format!("{reference} to be final");
            let answer = platform
                .until(&what, "cfa.ListOperations", request, |answer| {
                    answer.pointer("/operations/0/status")
                        == Some(&json!("OPERATION_STATUS_FINALIZED"))
                })
                .await;
            assert_eq!(
                answer["operations"].as_array().map(Vec::len),
                Some(1),
                "{answer}"
            );
        }
        // 1000 and nine times 100 in, nine times 30 out.
        platform.balance_is(&user.cash(), "1630.00").await;
        let transfers = platform
            .all(AUDITOR, "sandbox.ListTransfers", "transfers", json!({}))
            .await;
        assert_eq!(transfers.len(), payouts.len(), "{transfers:?}");
        let bank = platform
            .ok(AUDITOR, "sandbox.GetBankBalance", json!({}))
            .await;
        assert_eq!(
            number(&bank["balance"]["amount"]),
            number(&json!("1630.00"))
        );
        let report = platform
            .ok(
                "sandbox.treasury",
                "payments.Reconcile",
                json!({ "businessDate": "2026-01-01T00:00:00Z" }),
            )
            .await;
        assert_eq!(report["report"]["notes"], json!("Balanced"), "{report}");
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

#[test]
fn abort_between_the_steps_of_settlement_settles_each_trade_once() {
    run(async {
        let mut platform = Platform::start().await;
        let bond = platform.bond().await;
        // The buyer has a trading hold, the seller's orders have their own holds.
        let (buyer, seller) = (platform.rich("100000.00").await, platform.trader().await);
        platform.trading_hold(&buyer, "CFA-RUB", "50000.00").await;
        platform.issue(&bond, &seller, "100").await;
        let points = [
            "settlement.sealed",
            "settlement.posted",
            "settlement.submitted",
            "settlement.finalized",
        ];
        for (at, point) in points.into_iter().enumerate() {
            platform.stop().await;
            platform.restart_with(&[("PLATFORM_CRASH_AT", point)]).await;
            let (sell, buy) = (format!("sell-{point}"), format!("buy-{point}"));
            let first = [
                place(&platform, &seller, &bond, "SELL", "5", &sell).await,
                place(&platform, &buyer, &bond, "BUY", "3", &buy).await,
            ];
            platform.aborted().await;
            platform.restart().await;
            // A repeat under the same key returns the same order, or places it if the first call
            // did not.
            for ((user, side, quantity, key), known) in
                [(&seller, "SELL", "5", &sell), (&buyer, "BUY", "3", &buy)]
                    .into_iter()
                    .zip(&first)
            {
                let again = place(&platform, user, &bond, side, quantity, key)
                    .await
                    .expect("the platform runs");
                assert!(
                    known.as_ref().is_none_or(|known| *known == again),
                    "{point}: the repeat of {known:?} returned {again}"
                );
            }
            platform.settled(&bond, at + 1).await;
            let trades = all_settled(&platform, &bond).await;
            assert_settled_once(
                &platform,
                &trades
                    .iter()
                    .map(|trade| trade["tradeId"].as_str().expect("an id"))
                    .collect(),
            )
            .await;
            // Cancels the remaining two of five, so that this round leaves no orders.
            platform
                .ok(
                    OPERATOR,
                    "market.MassCancel",
                    json!({ "userId": seller.id }),
                )
                .await;
            platform.assert_no_orphans(&HashMap::new()).await;
            platform
                .balance_is(&seller.units(&bond), &(100 - 3 * (at + 1)).to_string())
                .await;
        }
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

#[test]
fn kill_amid_orders_with_own_holds_places_one_order_per_key() {
    run(async {
        let mut platform = Platform::start().await;
        let mut random = Random::new(seed());
        let bond = platform.bond().await;
        let (buyer, seller) = (platform.rich("100000.00").await, platform.trader().await);
        platform.issue(&bond, &seller, "1000").await;
        let mut orders: HashMap<String, String> = HashMap::new();
        for round in 0..KILLS {
            let keys: Vec<String> = (0..24).map(|at| format!("{round}-{at}")).collect();
            let known = place_until_killed(
                &mut platform,
                &bond,
                &buyer,
                &seller,
                &keys,
                random.below(250),
            )
            .await;
            platform.restart().await;
            let again = place_all(&platform, &bond, &buyer, &seller, &keys).await;
            for (key, order) in again {
                let order = order.expect("the platform runs");
                let before = known.get(&key).cloned().flatten();
                assert!(
                    before.is_none_or(|before| before == order),
                    "repeating {key} placed another order"
                );
                orders.insert(key, order);
            }
        }
        let mut listed = Vec::new();
        for user in [&buyer, &seller] {
            let request = json!({ "userId": user.id });
            listed.extend(
                platform
                    .all(AUDITOR, "market.ListOrders", "orders", request)
                    .await,
            );
        }
        let listed: BTreeSet<String> = listed.iter().map(|order| text(order, "/orderId")).collect();
        assert_eq!(
            listed,
            orders.values().cloned().collect(),
            "not one order per key"
        );
        let trades = all_settled(&platform, &bond).await;
        assert!(!trades.is_empty());
        assert_settled_once(
            &platform,
            &trades
                .iter()
                .map(|trade| trade["tradeId"].as_str().expect("an id"))
                .collect(),
        )
        .await;
        platform.assert_no_orphans(&orders).await;
        for user in [&buyer, &seller] {
            platform
                .ok(OPERATOR, "market.MassCancel", json!({ "userId": user.id }))
                .await;
        }
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

type Placed = HashMap<String, Option<String>>;

/// Places an order per key, alternately a buy and a sell, concurrently; returns the order id by
/// key.
async fn place_all(
    platform: &Platform,
    bond: &str,
    buyer: &User,
    seller: &User,
    keys: &[String],
) -> Placed {
    let placed = keys.iter().enumerate().map(|(at, key)| async move {
        let (user, side) = if at % 2 == 0 {
            (buyer, "BUY")
        } else {
            (seller, "SELL")
        };
        let quantity = (at % 5 + 1).to_string();
        (
            key.clone(),
            place(platform, user, bond, side, &quantity, key).await,
        )
    });
    futures::future::join_all(placed)
        .await
        .into_iter()
        .collect()
}

/// Like [`place_all`], with a kill after `after_ms`.
async fn place_until_killed(
    platform: &mut Platform,
    bond: &str,
    buyer: &User,
    seller: &User,
    keys: &[String],
    after_ms: u64,
) -> Placed {
    let pid = platform.pid();
    let kill = async {
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        let killed = tokio::process::Command::new("kill")
            .args(["-9", &pid])
            .status()
            .await;
        assert!(killed.expect("kill runs").success());
    };
    let (placed, ()) = tokio::join!(place_all(platform, bond, buyer, seller, keys), kill);
    platform.aborted().await;
    placed
}

#[test]
fn retry_after_abort_between_hold_and_journal_places_once() {
    run(async {
        let mut platform = Platform::start().await;
        let bond = platform.bond().await;
        let user = platform.rich("1000.00").await;
        platform.stop().await;
        platform
            .restart_with(&[("PLATFORM_CRASH_AT", "market.hold_placed")])
            .await;
        assert_eq!(
            place(&platform, &user, &bond, "BUY", "2", "the-key").await,
            None
        );
        platform.aborted().await;

        platform.restart().await;
        let holds = platform.active_holds().await;
        assert_eq!(
            holds.len(),
            1,
            "the hold was not created before the abort: {holds:?}"
        );
        let order = place(&platform, &user, &bond, "BUY", "2", "the-key")
            .await
            .expect("placed");
        assert_eq!(
            place(&platform, &user, &bond, "BUY", "2", "the-key").await,
            Some(order.clone())
        );
        let orders = platform
            .all(
                AUDITOR,
                "market.ListOrders",
                "orders",
                json!({ "userId": user.id }),
            )
            .await;
        assert_eq!(orders.len(), 1, "{orders:?}");
        platform
            .assert_no_orphans(&HashMap::from([("the-key".to_owned(), order.clone())]))
            .await;
        // 2 at 100.00 plus a fee of one thousandth.
        let wanted = number(&json!("200.20"));
        platform
            .until(
                "the order's money to be held once",
                "ledger.GetBalance",
                json!({ "subaccountId": user.cash() }),
                |answer| number(&answer["held"]) == wanted,
            )
            .await;
        platform
            .ok(
                &user.token(),
                "market.CancelOrder",
                json!({ "orderId": order }),
            )
            .await;
        platform.balance_is(&user.cash(), "1000.00").await;
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}

#[test]
fn an_orphaned_hold_is_released_and_its_key_expires() {
    run(async {
        let mut platform = Platform::start().await;
        let bond = platform.bond().await;
        let user = platform.rich("1000.00").await;
        platform.stop().await;
        platform
            .restart_with(&[("PLATFORM_CRASH_AT", "market.hold_placed")])
            .await;
        assert_eq!(
            place(&platform, &user, &bond, "BUY", "2", "lost").await,
            None
        );
        platform.aborted().await;
        let short_delays = [
            ("PLATFORM_MARKET__ORPHAN_HOLD_AGE_MS", "1000"),
            ("PLATFORM_MARKET__SWEEP_INTERVAL_MS", "200"),
        ];
        platform.restart_with(&short_delays).await;
        platform.assert_no_orphans(&HashMap::new()).await;
        platform.balance_is(&user.cash(), "1000.00").await;

        // A repeat after the hold's release must not place an order.
        let late = json!({
            "context": context_with_key("lost"), "order": limit_order(&user, &bond, "BUY", "100.00", "2"),
        });
        let refusal = platform
            .refused(&user.token(), "market.PlaceOrder", late)
            .await;
        assert_eq!(
            (refusal.code.as_str(), refusal.reason.as_str()),
            ("failed_precondition", "REQUEST_EXPIRED"),
            "{refusal:?}"
        );
        let orders = platform
            .all(
                AUDITOR,
                "market.ListOrders",
                "orders",
                json!({ "userId": user.id }),
            )
            .await;
        assert!(orders.is_empty(), "{orders:?}");
        platform.place(&user, &bond, "BUY", "100.00", "2").await;
        platform
            .ok(OPERATOR, "market.MassCancel", json!({ "userId": user.id }))
            .await;
        close_holds_and_prove(&platform).await;
        platform.stop().await;
    });
}
