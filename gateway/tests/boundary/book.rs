//! Views: order book, diagnostic reads, metrics.

use proto::market::v1::*;
use testkit::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;
use tonic::Code;

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
    let unknown = GetOrderBookRequest {
        context: None,
        instrument_id: "NO-SUCH".into(),
        depth: 0,
    };
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

/// A snapshot may be 3,600 s old (4.5.7). None is kept (T42): each is captured within its call,
/// also of a book that has not changed for longer than that, and the next one has the next order.
// rows: R178
#[tokio::test]
async fn r178_a_snapshot_is_of_its_call_also_of_a_book_that_is_at_rest_for_3600_s() {
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

    // Refused, since its age would be unknown.
    world.lose_trading_path().await;
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
    // Best price first, then the earlier order.
    for expected in [&better, &first, &first, &second] {
        world.place(sell("eve", "10", "1")).await.unwrap();
        let trade = &world.trades("eve").await[0];
        assert_eq!(trade.buy_order_id, expected.order_id);
    }
    world.stop().await;
}

async fn get(address: std::net::SocketAddr, path: &str, token: &str) -> (u16, String) {
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

// rows: R274 R275 R276 R277 R293 R294 R295
#[tokio::test]
async fn r293_http_reads_equal_the_calls_and_metrics_count() {
    // Before anything is counted, as in the platform.
    let recorder = rpc::metrics_init();
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "100").await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn(rpc::serve(
        listener,
        vec![world.gateway.service()],
        rpc::Authenticator::Sandbox,
        recorder,
        stop.clone(),
    ));
    let resting = world.place(buy("ann", "10", "5")).await.unwrap();
    world.place(sell("bob", "10", "2")).await.unwrap();
    let trade = &world.trades("ann").await[0];

    let (status, body) = get(
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
    let (status, body) = get(
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
    let (status, body) = get(
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
            get(address, &path, "sandbox.operator").await.0,
            404,
            "{path}"
        );
    }
    assert_eq!(
        get(
            address,
            &format!("/orders/{}", resting.order_id),
            "sandbox.trader.ann"
        )
        .await
        .0,
        403,
        "staff reads"
    );

    let (session, mut reports) = world.session(login("ann", "metrics")).await;
    session
        .send(0, wire_order(1, types::Side::Buy, 100, 1))
        .await
        .unwrap();
    numbered(&mut reports).await;
    drop(session);

    // One scrape after the gauges have been updated.
    let metrics = loop {
        let (_, body) = get(address, "/metrics", "").await;
        let depth = "order_book_depth{instrument_id=\"BOND-1\",side=\"BUY\"} 1";
        // A sample of the live messages was compared with those of the journal.
        let compared = "trading_messages_compared_total{outcome=\"equal\"} ";
        if body.contains(depth) && body.contains(compared) {
            break body;
        }
        tokio::task::yield_now().await;
    };
    for line in [
        "orders_placed_total{instrument_id=\"BOND-1\",side=\"BUY\"} ",
        "orders_placed_total{instrument_id=\"BOND-1\",side=\"SELL\"} ",
        "trades_executed_total{instrument_id=\"BOND-1\"} ",
        "order_book_depth{instrument_id=\"BOND-1\",side=\"SELL\"} 0",
        "trade_execution_duration_seconds_count",
        "trading_packets_sent_total ",
        "trading_packets_lost_total ",
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
    for name in ["trading_logins_total ", "trading_requests_total "] {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        let count: u64 = line.expect(name).parse().expect("a count");
        assert!(count > 0, "{name}");
    }
    let (status, body) = get(address, "/health", "").await;
    assert_eq!((status, body.contains("\"ok\"")), (200, true));
    assert!(!metrics.contains("trading_messages_compared_total{outcome=\"differs\"}"));
    stop.cancel();
    serving.await.unwrap().unwrap();
    world.stop().await;
}

#[tokio::test]
async fn t12_a_late_repeat_of_a_phase_does_not_undo_a_halt() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new(folder.path()).await;
    let mut supervisor = world.as_caller("sandbox.market-supervisor");
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
    // Already open: nothing to do, and recorded all the same.
    assert_eq!(set("a", TradingPhase::Open).await, TradingPhase::Open);
    assert_eq!(set("b", TradingPhase::Halt).await, TradingPhase::Halt);
    assert_eq!(set("a", TradingPhase::Open).await, TradingPhase::Halt);
    assert_eq!(set("c", TradingPhase::Open).await, TradingPhase::Open);
    assert_eq!(set("d", TradingPhase::Halt).await, TradingPhase::Halt);
    assert_eq!(set("c", TradingPhase::Open).await, TradingPhase::Halt);
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
    world.lose_trading_path().await;
    changes
        .wait_for(|failing| failing.contains_key("trading_path"))
        .await
        .unwrap();
    world.stop().await;
}
