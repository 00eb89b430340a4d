//! Order book reads, diagnostic HTTP reads, metrics, health.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::market::v1::*;
use testkit::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use types::Side;

use crate::world::*;

// rows: R142 R177 R178 R339
#[tokio::test]
async fn r177_levels_are_aggregated_best_first_and_never_stale() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "100").await;
    assert_eq!(
        world.book().await,
        (vec![], vec![]),
        "a known empty book has empty sides"
    );
    for (price, quantity) in [("10", "1"), ("11", "2"), ("10", "3")] {
        world.place(buy("ann", price, quantity)).await.unwrap();
    }
    for (price, quantity) in [("13", "4"), ("12", "5")] {
        world.place(sell("bob", price, quantity)).await.unwrap();
    }
    let level = |price: &str, quantity: &str| (price.to_owned(), quantity.to_owned());
    assert_eq!(
        world.book().await,
        (
            vec![level("11.00", "2"), level("10.00", "4")],
            vec![level("12.00", "5"), level("13.00", "4")]
        )
    );
    let request = GetOrderBookRequest {
        context: None,
        instrument_id: BOND.into(),
        depth: 1,
    };
    let snapshot = world
        .trader("eve")
        .get_order_book(request)
        .await
        .unwrap()
        .into_inner()
        .snapshot
        .unwrap();
    assert_eq!((snapshot.bids.len(), snapshot.asks.len()), (1, 1));
    assert_eq!(
        (snapshot.instrument_id.as_str(), snapshot.phase()),
        (BOND, TradingPhase::Open)
    );
    assert!(snapshot.captured_at.is_some());
    // Every durable order is in the next snapshot.
    let placed = world.place(buy("ann", "11", "1")).await.unwrap();
    let request = GetOrderBookRequest {
        context: None,
        instrument_id: BOND.into(),
        depth: 0,
    };
    let snapshot = world
        .operator()
        .get_order_book(request)
        .await
        .unwrap()
        .into_inner()
        .snapshot
        .unwrap();
    assert!(snapshot.sequence >= placed.sequence);
    assert_eq!(snapshot.bids[0].quantity.as_ref().unwrap().value, "3");
    let of = |instrument_id: &str| GetOrderBookRequest {
        context: None,
        instrument_id: instrument_id.into(),
        depth: 0,
    };
    let missing = world.operator().get_order_book(of("")).await.unwrap_err();
    assert_eq!(missing.code(), Code::InvalidArgument, "{missing}");
    let unknown = of("NO-SUCH");
    let refusal = refused(world.operator().get_order_book(unknown).await.unwrap_err());
    assert_eq!(
        refusal,
        (
            Code::NotFound,
            "Instrument not found".into(),
            "INSTRUMENT_NOT_FOUND".into()
        )
    );
    world.stop().await;
}

/// D40: 50 levels per side if the caller names no number, and 1,000 at most.
// rows: R177
#[tokio::test]
async fn d40_a_book_has_50_levels_per_side_by_default_and_1000_at_most() {
    const LEVELS: u64 = 1_010;
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unthrottled()).await;
    world.user("ann", "100000", "0").await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    // Prices of 1.01 to 11.10 roubles.
    for (id, price) in (1..=LEVELS).zip(101..) {
        ann.send(0, wire_order(id, Side::Buy, price, 1))
            .await
            .unwrap();
    }
    until(&mut of_ann, |m| {
        ack(m).filter(|ack| ack.client_order_id == LEVELS)
    })
    .await;
    for (depth, expected) in [
        (0, 50),
        (60, 60),
        (1_000, 1_000),
        (1_001, 1_000),
        (u32::MAX, 1_000),
    ] {
        let request = GetOrderBookRequest {
            context: None,
            instrument_id: BOND.into(),
            depth,
        };
        let answer = world.operator().get_order_book(request).await.unwrap();
        let bids = answer.into_inner().snapshot.unwrap().bids;
        assert_eq!(bids.len(), expected, "depth {depth}");
        assert_eq!(bids[0].price.as_ref().unwrap().value, "11.10");
    }
    world.stop().await;
}

/// A snapshot may be at most 3,600 s old (4.5.7). No snapshot is cached (T42): each call captures
/// one, also of a book that has been idle for longer. The next snapshot has the next order, so
/// no update is published to a cache. Book updates per instrument come with the market data feed.
// rows: R178, R309
#[tokio::test]
async fn r178_snapshot_of_a_book_idle_for_3600_s_is_current() {
    const AGE_MAX_S: i64 = 3_600;
    let machine = Machine::at(1_800_000_000_000_000_000);
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        clock: Some(machine.process()),
        ..Settings::default()
    };
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    let request = || GetOrderBookRequest {
        context: None,
        instrument_id: BOND.into(),
        depth: 0,
    };
    let micros = |at: Option<_>| proto::convert::timestamp_us(&at.unwrap());
    let mut reader = world.trader("eve");
    let mut captured = async || {
        let before = service_kit::clock::now_us();
        let answer = reader.get_order_book(request()).await.unwrap();
        let snapshot = answer.into_inner().snapshot.unwrap();
        let at = micros(snapshot.captured_at);
        let call = before..=service_kit::clock::now_us();
        assert!(call.contains(&at), "{at} is not in {call:?}");
        (snapshot.sequence, snapshot.bids)
    };
    let first = world.place(buy("ann", "10", "1")).await.unwrap();
    let (sequence, bids) = captured().await;
    assert!(sequence >= first.sequence && bids.len() == 1);
    machine.pass_ms(AGE_MAX_S.unsigned_abs() * 1_000 + 1_000);
    assert_eq!(captured().await.1, bids);
    let second = world.place(buy("ann", "9", "1")).await.unwrap();
    let placed_at = |order: &Order| micros(order.created_at);
    assert!(placed_at(&second) - placed_at(&first) > AGE_MAX_S * 1_000_000);
    let (sequence, bids) = captured().await;
    assert!(sequence >= second.sequence && bids.len() == 2);

    // Without the trading path the age of a snapshot is unknown, so the read is refused.
    world.stop_trading_path().await;
    let refusal = refused(reader.get_order_book(request()).await.unwrap_err());
    assert_eq!(
        (refusal.0, &*refusal.2),
        (Code::Unavailable, "REPLICA_BEHIND")
    );
    world.stop().await;
}

// rows: R174
#[tokio::test]
async fn r174_the_book_survives_a_restart_with_its_priorities() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "0").await;
    world.user("eve", "0", "100").await;
    let first = world.place(buy("ann", "10", "2")).await.unwrap();
    let second = world.place(buy("bob", "10", "2")).await.unwrap();
    let better = world.place(buy("bob", "11", "1")).await.unwrap();
    let (before, status) = (world.book().await, world.status().await);
    let world = world.restart(Settings::default()).await;
    assert_eq!(world.book().await, before);
    assert_eq!(world.status().await.instruments, status.instruments);
    // Price priority, then time priority.
    for expected in [&better, &first, &first, &second] {
        world.place(sell("eve", "10", "1")).await.unwrap();
        let trade = &world.trades("eve").await[0];
        assert_eq!(trade.buy_order_id, expected.order_id);
    }
    world.stop().await;
}

pub async fn http_get(address: SocketAddr, path: &str, token: &str) -> (u16, String) {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer[9..12].parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, body.to_owned())
}

/// Serves the market's HTTP reads and metrics until the token is cancelled.
pub async fn serve(world: &World) -> (SocketAddr, CancellationToken, JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let services = vec![world.gateway.service()];
    let (auth, recorder) = (rpc::Authenticator::Sandbox, rpc::metrics_init());
    let serving = rpc::serve(listener, services, auth, recorder, stop.clone());
    let serving = tokio::spawn(async move { serving.await.unwrap() });
    (address, stop, serving)
}

// rows: R293 R294 R295
#[tokio::test]
async fn r293_http_reads_equal_the_calls() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "100").await;
    let (address, stop, serving) = serve(&world).await;
    let resting = world.place(buy("ann", "10", "5")).await.unwrap();
    world.place(sell("bob", "10", "2")).await.unwrap();
    let trade = &world.trades("ann").await[0];

    let (status, body) = http_get(
        address,
        &format!("/orderbook?instrument_id={BOND}"),
        "sandbox.auditor",
    )
    .await;
    assert_eq!(status, 200, "{body}");
    let book: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(book["instrumentId"], BOND);
    assert_eq!(book["bids"][0]["price"]["value"], "10.00");
    assert_eq!(book["bids"][0]["quantity"]["value"], "3");
    let (status, body) = http_get(
        address,
        &format!("/orders/{}", resting.order_id),
        "sandbox.operator",
    )
    .await;
    let order: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, order["status"].as_str().unwrap()),
        (200, "PARTIALLY_FILLED"),
        "bare enum names"
    );
    assert_eq!(order["orderId"], resting.order_id.as_str());
    let (status, body) = http_get(
        address,
        &format!("/trades/{}", trade.trade_id),
        "sandbox.operator",
    )
    .await;
    let found: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, found["tradeId"].as_str().unwrap()),
        (200, &*trade.trade_id)
    );
    assert_eq!(found["fee"]["feeType"], "TRADING");
    for path in [
        format!("/orders/{}", unique()),
        format!("/trades/{}", unique()),
        "/orderbook?instrument_id=NO".into(),
    ] {
        assert_eq!(
            http_get(address, &path, "sandbox.operator").await.0,
            404,
            "{path}"
        );
    }
    assert_eq!(
        http_get(
            address,
            &format!("/orders/{}", resting.order_id),
            "sandbox.trader.ann"
        )
        .await
        .0,
        403,
        "only staff may read"
    );

    let (status, body) = http_get(address, "/health", "").await;
    assert_eq!((status, body.contains("\"ok\"")), (200, true));
    stop.cancel();
    serving.await.unwrap();
    world.stop().await;
}

/// Value of a time series; 0 before its first sample.
fn sample(metrics: &str, series: &str) -> u64 {
    let mut lines = metrics.lines();
    let value = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().expect(series))
}

/// Waits until the series have these values.
async fn until_metrics(address: SocketAddr, expected: &[(String, u64)]) {
    let what = format!("metrics {expected:?}");
    until_true(&what, async || {
        let (_, metrics) = http_get(address, "/metrics", "").await;
        let is_equal = |(series, value): &(String, u64)| sample(&metrics, series) == *value;
        expected.iter().all(is_equal)
    })
    .await;
}

/// Metrics are process-wide and other tests write them too. Only this test has this instrument.
// rows: R274 R275 R276
#[tokio::test]
async fn r274_r275_r276_orders_trades_and_levels_of_an_instrument_are_counted() {
    const METERED: &str = "BOND-METERED";
    // The recorder is installed before the services start, as in the platform.
    rpc::metrics_init();
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(testkit::Registry::default());
    registry.list(bond(METERED));
    let settings = Settings::default();
    let mut world = World::start(folder.path(), settings, Arc::default(), registry).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "0").await;
    world.deposit("bob", METERED, "100").await;
    let (address, stop, serving) = serve(&world).await;
    let until_counted = async |orders: [u64; 2], trades: u64| {
        let request = GetOrderBookRequest {
            context: None,
            instrument_id: METERED.into(),
            depth: 0,
        };
        let book = world.operator().get_order_book(request).await.unwrap();
        let book = book.into_inner().snapshot.unwrap();
        let levels = [book.bids.len() as u64, book.asks.len() as u64];
        let instrument = format!("instrument_id=\"{METERED}\"");
        let mut expected = vec![(format!("trades_executed_total{{{instrument}}}"), trades)];
        for (at, side) in ["BUY", "SELL"].into_iter().enumerate() {
            let labels = format!("{{{instrument},side=\"{side}\"}}");
            expected.push((format!("orders_placed_total{labels}"), orders[at]));
            expected.push((format!("order_book_depth{labels}"), levels[at]));
        }
        until_metrics(address, &expected).await;
        levels
    };
    let metered = |order: Order| Order {
        instrument_id: METERED.into(),
        ..order
    };
    assert_eq!(until_counted([0, 0], 0).await, [0, 0]);
    for order in [
        buy("ann", "10", "2"),
        buy("ann", "10", "1"),
        buy("ann", "9", "1"),
        sell("bob", "12", "1"),
    ] {
        world.place(metered(order)).await.unwrap();
    }
    assert_eq!(until_counted([3, 1], 0).await, [2, 1]);
    // One sell order makes three trades.
    let sweep = world.place(metered(sell("bob", "9", "4"))).await.unwrap();
    assert_eq!(sweep.status(), OrderStatus::Filled);
    assert_eq!(until_counted([3, 2], 3).await, [0, 1]);
    // A refused order does not count. A session's order counts.
    let dear = world.place(metered(buy("ann", "5000", "100"))).await;
    assert_eq!(refused(dear.unwrap_err()).2, "INSUFFICIENT_BALANCE");
    let (session, mut reports) = world.session(with_money("ann", "metered")).await;
    session
        .send(0, wire_order(1, Side::Buy, 100, 1))
        .await
        .unwrap();
    next_numbered(&mut reports).await;
    assert_eq!(until_counted([4, 2], 3).await, [1, 1]);
    stop.cancel();
    serving.await.unwrap();
    world.stop().await;
}

/// Metrics without a label of this test's own. Other tests add to them too, so each must only grow.
#[tokio::test]
async fn metrics_of_trading_grow_with_logins_and_requests() {
    const GROW: [&str; 4] = [
        "trading_logins_total",
        "trading_requests_total",
        "trading_packets_sent_total",
        // Counts live messages that were compared with the journal.
        "trading_messages_compared_total{outcome=\"equal\"}",
    ];
    rpc::metrics_init();
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "100").await;
    let (address, stop, serving) = serve(&world).await;
    let values = async || {
        let (_, metrics) = http_get(address, "/metrics", "").await;
        GROW.map(|series| sample(&metrics, series))
    };
    let before = values().await;
    world.place(sell("bob", "10", "2")).await.unwrap();
    world.place(buy("ann", "10", "2")).await.unwrap();
    let (session, mut reports) = world.session(with_money("ann", "metrics")).await;
    let mut id = 0;
    until_true("every metric grows", async || {
        id += 1;
        let order = wire_order(id, Side::Buy, 100, 1);
        session.send(0, order).await.unwrap();
        next_numbered(&mut reports).await;
        let now = values().await;
        now.iter().zip(before).all(|(now, before)| *now > before)
    })
    .await;
    let (_, metrics) = http_get(address, "/metrics", "").await;
    assert!(metrics.contains("trading_packets_lost_total "));
    assert!(metrics.contains("replica_lag_records_max "));
    assert!(sample(&metrics, "journal_assigned_sequence") > 0);
    assert!(!metrics.contains("trading_messages_compared_total{outcome=\"differs\"}"));
    stop.cancel();
    serving.await.unwrap();
    world.stop().await;
}

#[tokio::test]
async fn t12_a_late_repeat_of_a_phase_does_not_undo_a_halt() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new(folder.path()).await;
    let mut supervisor = world.approved();
    let mut set = async |key: &str, phase: TradingPhase| {
        let request = SetTradingPhaseRequest {
            context: context(key),
            instrument_id: BOND.into(),
            phase: phase.into(),
            reason: "test".into(),
        };
        supervisor.set_trading_phase(request).await.unwrap();
        world.status().await.instruments[0].phase()
    };
    // The market is already open. The answer is stored under the key all the same.
    assert_eq!(set("a", TradingPhase::Open).await, TradingPhase::Open);
    assert_eq!(set("b", TradingPhase::Halt).await, TradingPhase::Halt);
    assert_eq!(set("a", TradingPhase::Open).await, TradingPhase::Halt);
    assert_eq!(set("c", TradingPhase::Open).await, TradingPhase::Open);
    assert_eq!(set("d", TradingPhase::Halt).await, TradingPhase::Halt);
    assert_eq!(set("c", TradingPhase::Open).await, TradingPhase::Halt);
    // Another phase under a used key is noticed and not set.
    let series = r#"idempotency_mismatches_total{call="phase.set"}"#;
    let before = sample(&rpc::metrics_init().render(), series);
    assert_eq!(set("d", TradingPhase::Open).await, TradingPhase::Halt);
    let after = sample(&rpc::metrics_init().render(), series);
    assert!(after > before);
    world.stop().await;
}

#[tokio::test]
async fn the_state_is_hashed_for_staff_alone() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new(folder.path()).await;
    assert_eq!(world.status().await.state_hash.len(), 16);
    let request = GetMarketStatusRequest { context: None };
    let mut market = world.trader("ann");
    let answer = market.get_market_status(request).await;
    assert_eq!(answer.unwrap().into_inner().state_hash, "");
    world.stop().await;
}

// rows: R261
#[tokio::test]
async fn r261_health_fails_when_no_more_orders_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    let health = world.gateway.service().health;
    assert!(health.failing().is_empty());
    let mut changes = health.watch();
    world.stop_trading_path().await;
    let fails = changes.wait_for(|failing| failing.contains_key("trading_path"));
    drop(in_time("the health read fails", fails).await.unwrap());
    world.stop().await;
}
