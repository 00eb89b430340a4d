//! Reads of orders, trades and positions, and the events of orders and trades.

use proto::common::v1::PaginationRequest;
use proto::market::v1::*;
use sqlx::Connection;
use tonic::Code;
use wire::ServerMessage;

use crate::holds::mature;
use crate::orders::text;
use crate::world::*;

// rows: R141 R154 R155 R156 R175 R176 R305 R008
#[tokio::test]
async fn r156_trades_are_reported_to_both_sides_and_published_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "0", "100").await;
    world.user("bob", "10000", "0").await;
    let first = world.place(sell("ann", "100", "10")).await.unwrap();
    let second = world.place(sell("ann", "101", "5")).await.unwrap();
    let taker = world
        .place_with("bob", "sweep", buy("bob", "101", "12"))
        .await
        .unwrap();
    assert_eq!(taker.status(), OrderStatus::Filled);
    // (10 * 100 + 2 * 101) / 12.
    assert_eq!(text(&taker.average_price), "100.16666667");
    let (of_ann, of_bob) = (world.trades("ann").await, world.trades("bob").await);
    let ids = |trades: &[Trade]| {
        trades
            .iter()
            .map(|t| t.trade_id.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&of_ann), ids(&of_bob), "buyer and seller see the same");
    assert_eq!(of_bob.len(), 2);
    let trade = of_bob.last().unwrap();
    assert_eq!(trade.instrument_id, BOND);
    assert_eq!(
        (trade.buy_order_id.as_str(), trade.sell_order_id.as_str()),
        (&*taker.order_id, &*first.order_id)
    );
    assert_eq!(
        (text(&trade.price), text(&trade.quantity)),
        ("100.00", "10")
    );
    let fee = trade.fee.as_ref().unwrap();
    assert_eq!(fee.fee_type, "TRADING");
    assert_eq!(
        (
            fee.amount.as_ref().unwrap().currency_code.as_str(),
            text(&fee.amount.as_ref().unwrap().amount)
        ),
        ("RUB", "1.00")
    );
    assert_eq!(trade.aggressor_side(), OrderSide::Buy);
    assert!(trade.executed_at.is_some() && trade.trade_number == 1);
    let request = GetTradeRequest {
        context: None,
        trade_id: trade.trade_id.clone(),
    };
    // Trading is anonymous: a party sees only itself, staff sees both parties.
    for (mut caller, parties) in [
        (world.trader("ann"), ("", "ann")),
        (world.trader("bob"), ("bob", "")),
        (world.operator(), ("bob", "ann")),
    ] {
        let answer = caller.get_trade(request.clone()).await.unwrap();
        let got = answer.into_inner().trade.unwrap();
        assert_eq!((&*got.buyer_id, &*got.seller_id), parties);
    }
    assert!(of_ann.iter().all(|trade| trade.buyer_id.is_empty()));
    // Another user is refused.
    assert_eq!(
        world
            .trader("eve")
            .get_trade(request.clone())
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    assert_eq!(
        world
            .trader("ann")
            .get_trade(request)
            .await
            .unwrap()
            .into_inner()
            .trade,
        of_ann.last().cloned()
    );
    assert_eq!(
        world.order(&second.order_id).await.unwrap().status(),
        OrderStatus::PartiallyFilled
    );

    let events = world.events(events::topics::MARKET, 5, |_| true).await;
    let kinds: Vec<_> = events.iter().map(|event| event.short_type()).collect();
    assert_eq!(
        kinds,
        [
            "OrderPlacedEvent",
            "OrderPlacedEvent",
            "OrderPlacedEvent",
            "TradeExecutedEvent",
            "TradeExecutedEvent"
        ]
    );
    assert!(
        events.iter().all(|event| event.key == BOND),
        "the key is the instrument, so events keep their order"
    );
    let placed: OrderPlacedEvent = prost::Message::decode(&*events[2].payload).unwrap();
    assert_eq!(
        (
            placed.order_id.as_str(),
            placed.user_id.as_str(),
            placed.instrument_id.as_str()
        ),
        (&*taker.order_id, "bob", BOND)
    );
    assert_eq!(
        (
            placed.side(),
            placed.r#type(),
            text(&placed.price),
            text(&placed.quantity)
        ),
        (OrderSide::Buy, OrderType::Limit, "101.00", "12")
    );
    assert!(placed.placed_at.is_some());
    assert_eq!(
        placed.context.unwrap().correlation_id,
        "corr-sweep",
        "one correlation id from call to event (R004)"
    );
    let executed: TradeExecutedEvent = prost::Message::decode(&*events[3].payload).unwrap();
    assert_eq!(executed.trade_id, trade.trade_id);
    assert_eq!(executed.instrument_id, BOND);
    assert_eq!(
        (executed.buyer_id.as_str(), executed.seller_id.as_str()),
        ("bob", "ann")
    );
    assert_eq!(
        (
            text(&executed.price),
            text(&executed.quantity),
            executed.fee.as_ref()
        ),
        ("100.00", "10", Some(fee))
    );
    assert_eq!(executed.executed_at, trade.executed_at);

    // Settled in the ledger and by the registry's double.
    world.settled().await;
    let settled = world.trades("bob").await;
    assert!(
        settled
            .iter()
            .all(|t| t.settlement_status() == SettlementStatus::Settled)
    );
    world.stop().await;
}

// rows: R140 R010
#[tokio::test]
async fn r140_orders_are_listed_by_filters_alone_and_combined() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "0").await;
    let mut placed = Vec::new();
    for at in 0..5 {
        placed.push(
            world
                .place(buy("ann", &format!("{}", 10 + at), "1"))
                .await
                .unwrap()
                .order_id,
        );
    }
    world.place(buy("bob", "5", "1")).await.unwrap();
    world.cancel("ann", &placed[1]).await.unwrap();
    let list = |user: &str, instrument: &str, status: OrderStatus| ListOrdersRequest {
        context: None,
        user_id: user.into(),
        instrument_id: instrument.into(),
        status: status.into(),
        pagination: None,
    };
    let mut operator = world.operator();
    for (request, count) in [
        (list("", "", OrderStatus::Unspecified), 6),
        (list("ann", "", OrderStatus::Unspecified), 5),
        (list("", BOND, OrderStatus::Unspecified), 6),
        (list("", "", OrderStatus::Cancelled), 1),
        (list("bob", "", OrderStatus::Open), 1),
        (list("", BOND, OrderStatus::Open), 5),
        (list("ann", BOND, OrderStatus::Open), 4),
        (list("ann", BOND, OrderStatus::Cancelled), 1),
        (list("", "NO-SUCH", OrderStatus::Unspecified), 0),
        (list("stranger", "", OrderStatus::Unspecified), 0),
    ] {
        let answer = operator
            .list_orders(request.clone())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(answer.orders.len(), count, "{request:?}");
    }
    // A user sees only its own orders, without a filter too.
    let own = world
        .trader("bob")
        .list_orders(list("", "", OrderStatus::Unspecified))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(own.orders.len(), 1);
    assert_eq!(
        world
            .trader("bob")
            .list_orders(list("ann", "", OrderStatus::Unspecified))
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );

    // Pages of two have every order once, newest first.
    let mut request = list("ann", "", OrderStatus::Unspecified);
    let mut seen = Vec::new();
    loop {
        let token = request
            .pagination
            .as_ref()
            .map(|p| p.page_token.clone())
            .unwrap_or_default();
        request.pagination = Some(PaginationRequest {
            page_size: 2,
            page_token: token,
        });
        let answer = operator
            .list_orders(request.clone())
            .await
            .unwrap()
            .into_inner();
        seen.extend(answer.orders.into_iter().map(|order| order.order_id));
        assert!(seen.len() < 9, "the list has a last page");
        let next = answer.pagination.unwrap().next_page_token;
        if next.is_empty() {
            break;
        }
        request.pagination.as_mut().unwrap().page_token = next;
    }
    placed.reverse();
    assert_eq!(seen, placed);
    // Orders that trade move to another status.
    world.user("carl", "0", "10").await;
    world.place(sell("carl", "14", "1")).await.unwrap();
    world.place(buy("ann", "20", "3")).await.unwrap();
    world.place(sell("carl", "20", "1")).await.unwrap();
    for (request, count) in [
        (list("", "", OrderStatus::Filled), 3),
        (list("carl", BOND, OrderStatus::Filled), 2),
        (list("ann", "", OrderStatus::PartiallyFilled), 1),
        (list("carl", "", OrderStatus::PartiallyFilled), 0),
        (list("ann", BOND, OrderStatus::Unspecified), 6),
    ] {
        let answer = operator.list_orders(request.clone()).await.unwrap();
        assert_eq!(answer.into_inner().orders.len(), count, "{request:?}");
    }
    world.stop().await;
}

// rows: R159 R338
#[tokio::test]
async fn r159_positions_and_instruments_follow_the_registrys_events() {
    use prost::Message;
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let amount = |quantity: &str| {
        Some(proto::common::v1::MonetaryAmount {
            currency_code: BOND.into(),
            amount: decimal(quantity),
        })
    };
    let issued = proto::cfa::v1::CfaIssuedEvent {
        context: context("i"),
        operation_id: unique(),
        instrument_id: BOND.into(),
        holder_id: "ann".into(),
        amount: amount("10"),
        ..Default::default()
    };
    let moved = proto::cfa::v1::CfaTransferredEvent {
        context: context("t"),
        operation_id: unique(),
        instrument_id: BOND.into(),
        from_user_id: "ann".into(),
        to_user_id: "bob".into(),
        amount: amount("4"),
        ..Default::default()
    };
    let redeemed = proto::cfa::v1::CfaRedeemedEvent {
        context: context("r"),
        operation_id: unique(),
        instrument_id: BOND.into(),
        holder_id: "bob".into(),
        amount: amount("1"),
        ..Default::default()
    };
    publish(
        &world,
        events::topics::CFA,
        "k",
        "dfa.cfa.v1.CfaIssuedEvent",
        issued.encode_to_vec(),
    )
    .await;
    publish(
        &world,
        events::topics::CFA,
        "k",
        "dfa.cfa.v1.CfaTransferredEvent",
        moved.encode_to_vec(),
    )
    .await;
    publish(
        &world,
        events::topics::CFA,
        "k",
        "dfa.cfa.v1.CfaRedeemedEvent",
        redeemed.encode_to_vec(),
    )
    .await;
    // Events of one key are handled in order, so the last one is awaited.
    until_true("bob's position", async || {
        world.position("bob").await == "3"
    })
    .await;
    assert_eq!(world.position("ann").await, "6");

    // A new instrument trades after its event. A matured one does not trade, and its orders end.
    world.registry.list(bond("BOND-2"));
    let registered = proto::cfa::v1::InstrumentRegisteredEvent {
        context: context("n"),
        instrument_id: "BOND-2".into(),
        ..Default::default()
    };
    publish(
        &world,
        events::topics::CFA,
        "k",
        "dfa.cfa.v1.InstrumentRegisteredEvent",
        registered.encode_to_vec(),
    )
    .await;
    until_true("the second instrument", async || {
        world.status().await.instruments.len() == 2
    })
    .await;
    let open = world
        .place(Order {
            instrument_id: "BOND-2".into(),
            ..buy("ann", "10", "1")
        })
        .await
        .unwrap();
    assert_eq!(open.status(), OrderStatus::Open);
    mature(&world, "BOND-2").await;
    world.until_ended(&open).await;
    let ended = world.order(&open.order_id).await.unwrap();
    assert_eq!(
        (ended.status(), ended.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "INSTRUMENT_MATURED")
    );
    let late = world
        .place(Order {
            instrument_id: "BOND-2".into(),
            ..buy("ann", "10", "1")
        })
        .await
        .unwrap();
    assert_eq!(
        (late.status(), late.cancel_reason.as_str()),
        (OrderStatus::Rejected, "INSTRUMENT_MATURED")
    );
    world.stop().await;
}

#[tokio::test]
async fn a_history_that_cannot_write_is_not_read_and_cancels_pass() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    // Two reads wait for this long in vain. It is also the limit of the orders' own writes, which
    // wait for the disk.
    settings.gateway.read_wait_ms = 1_000;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    let [first, second, third] = [1, 2, 3].map(|price| buy("ann", &price.to_string(), "1"));
    let first = world.place(first).await.unwrap();
    let second = world.place(second).await.unwrap();
    world.place(third).await.unwrap();

    // Another connection locks the database.
    let file = folder.path().join("gateway/market.db");
    let mut lock = sqlx::SqliteConnection::connect(&format!("sqlite:{}", file.display()))
        .await
        .unwrap();
    sqlx::query("BEGIN IMMEDIATE")
        .execute(&mut lock)
        .await
        .unwrap();
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    let cancel = wire::Cancel {
        engine_order_id: first.engine_order_id,
        client_order_id: 0,
    };
    ann.send(0, cancel).await.unwrap();
    until(&mut of_ann, |m| {
        matches!(m, ServerMessage::Cancelled(_)).then_some(())
    })
    .await;
    // The stale history is not read: it would contradict the member's report.
    let order_id = first.order_id.clone();
    let request = GetOrderRequest {
        context: None,
        order_id,
    };
    let status = world.trader("ann").get_order(request.clone()).await;
    let (code, text, reason) = refused(status.unwrap_err());
    assert_eq!(
        (code, reason.as_str()),
        (Code::Unavailable, "HISTORY_BEHIND"),
        "{text}"
    );
    let status = world
        .trader("ann")
        .list_orders(ListOrdersRequest::default())
        .await;
    assert_eq!(refused(status.unwrap_err()).2, "HISTORY_BEHIND");
    let both = async {
        let one = world.cancel("ann", &second.order_id).await.unwrap();
        (one.status(), mass_cancel(&world).await)
    };
    let both = in_time("both cancels are answered", both).await;
    assert_eq!(both, (OrderStatus::Cancelled, 1));
    lock.close().await.unwrap();
    // The first reads may precede the history's catch-up.
    let read = testkit::eventually(async || {
        let read = world.trader("ann").get_order(request.clone()).await;
        read.ok()
    })
    .await;
    let order = read.into_inner().order.unwrap();
    assert_eq!(order.status(), OrderStatus::Cancelled);
    world.stop().await;
}

#[tokio::test]
async fn a_store_that_cannot_look_up_answers_stops_no_cancel() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let [first, second] = [1, 2].map(|price| buy("ann", &price.to_string(), "1"));
    let first = world.place(first).await.unwrap();
    world.place(second).await.unwrap();

    let file = folder.path().join("gateway/market.db");
    let mut store = sqlx::SqliteConnection::connect(&format!("sqlite:{}", file.display()))
        .await
        .unwrap();
    let mut rename = async |from: &str, to: &str| {
        let sql = format!("ALTER TABLE {from} RENAME TO {to}");
        let renamed = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut store);
        renamed.await.unwrap();
    };
    rename("answers", "away").await;
    let one = world.cancel("ann", &first.order_id);
    let rest = async {
        open_orders(&world, 1).await;
        mass_cancel(&world).await
    };
    let repair = async {
        open_orders(&world, 0).await;
        rename("away", "answers").await;
    };
    let all = async { tokio::join!(one, rest, repair) };
    let (one, rest, ()) = in_time("both cancels are answered", all).await;
    assert_eq!((one.unwrap().status(), rest), (OrderStatus::Cancelled, 1));
    world.stop().await;
}

/// Waits until the book has `wanted` orders.
async fn open_orders(world: &World, wanted: u64) {
    let what = format!("{wanted} open orders");
    until_true(&what, async || {
        world.status().await.instruments[0].open_orders == wanted
    })
    .await;
}

/// Cancels all of ann's orders. Returns their number.
async fn mass_cancel(world: &World) -> u32 {
    let request = MassCancelRequest {
        context: context("mass cancel"),
        user_id: "ann".into(),
        ..MassCancelRequest::default()
    };
    let answered = world.trader("ann").mass_cancel(request).await;
    answered.unwrap().into_inner().cancelled
}
