//! Orders over RPC: checks, money, life, events.

use proto::common::v1::{KycStatus, LimitType, OperationType, PaginationRequest};
use proto::ledger::v1 as books;
use proto::market::v1::*;
use tonic::Code;

use crate::world::*;

fn text(value: &Option<proto::common::v1::Decimal>) -> &str {
    value.as_ref().map_or("", |value| value.value.as_str())
}

// rows: R137 R139 R144 R145 R328
#[tokio::test]
async fn r137_an_order_is_placed_and_reads_back_with_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let mut order = buy("ann", "10.50", "7");
    order.order_id = "my-name".into();
    let placed = world.place(order).await.unwrap();
    assert_eq!(placed.status(), OrderStatus::Open);
    assert_eq!(
        (placed.side(), placed.r#type()),
        (OrderSide::Buy, OrderType::Limit)
    );
    assert_eq!(placed.time_in_force(), TimeInForce::Gtc);
    assert_eq!(
        (text(&placed.price), text(&placed.quantity)),
        ("10.50", "7")
    );
    assert_eq!(
        (placed.user_id.as_str(), placed.instrument_id.as_str()),
        ("ann", BOND)
    );
    assert_eq!(
        placed.client_order_id, "my-name",
        "a given order id is the caller's name (D37)"
    );
    assert_ne!(placed.order_id, "my-name");
    assert!(placed.engine_order_id != 0 && placed.sequence != 0);
    assert_eq!(text(&placed.filled_quantity), "0");
    assert_eq!(world.order(&placed.order_id).await.unwrap(), placed);
    // His own, and nobody else's.
    let request = GetOrderRequest {
        context: None,
        order_id: placed.order_id.clone(),
    };
    assert!(world.trader("ann").get_order(request.clone()).await.is_ok());
    let foreign = world.trader("bob").get_order(request).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    world.stop().await;
}

// rows: R146 R147 R148 R149 R150 R152 R250 R252 R253
#[tokio::test]
async fn r150_checks_run_in_order_and_the_first_message_wins() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    // 100.00 for the order, 0.10 for its fee, one kopeck short.
    world.user("ann", "100.09", "0").await;
    world.identity.change("ann", |ann| {
        ann.kyc = KycStatus::Simplified;
        ann.refuse_with = Some("Daily limit of trading".into());
    });
    let order = || buy("ann", "10", "10");
    let refusal = refused(world.place(order()).await.unwrap_err());
    assert_eq!(
        refusal,
        (
            Code::FailedPrecondition,
            "KYC level too low for trading".into(),
            "KYC_LEVEL_TOO_LOW".into()
        )
    );
    assert!(
        world.identity.limit_questions().is_empty(),
        "no limit question behind the KYC refusal"
    );

    world
        .identity
        .change("ann", |ann| ann.kyc = KycStatus::Enhanced);
    publish_user_updated(&world, "ann").await;
    let refusal = refused(world.place(order()).await.unwrap_err());
    assert_eq!(
        refusal,
        (
            Code::FailedPrecondition,
            "Daily limit of trading".into(),
            "LIMIT_EXCEEDED".into()
        )
    );
    let questions = world.identity.limit_questions();
    assert_eq!(questions.len(), 1);
    assert_eq!(questions[0].limit_type(), LimitType::Trading);
    assert_eq!(questions[0].operation_type(), OperationType::Trading);
    let amount = questions[0].amount.clone().unwrap();
    assert_eq!(
        (amount.currency_code.as_str(), text(&amount.amount)),
        ("RUB", "10"),
        "the quantity, as the text says"
    );
    assert_eq!(
        text(&questions[0].notional.clone().unwrap().amount),
        "100.00"
    );

    world.identity.change("ann", |ann| ann.refuse_with = None);
    let status = world.place(order()).await.unwrap_err();
    let info = tonic_types::StatusExt::get_details_error_info(&status).unwrap();
    assert_eq!(status.message(), "Insufficient balance");
    assert_eq!(info.reason, "INSUFFICIENT_BALANCE");
    assert_eq!(
        (
            info.metadata["available"].as_str(),
            info.metadata["required"].as_str()
        ),
        ("100.09", "100.10")
    );
    assert!(
        world.holds("ann", "CFA-RUB").await.is_empty(),
        "a refused order leaves no hold"
    );

    // Nothing to sell, and nothing in the ledger at all.
    let refusal = refused(world.place(sell("ann", "10", "1")).await.unwrap_err());
    assert_eq!(refusal.1, "Insufficient balance");
    world.give("ann", "CFA-RUB", "0.01").await;
    assert_eq!(
        world.place(order()).await.unwrap().status(),
        OrderStatus::Open
    );
    world.stop().await;
}

/// Tells the market to forget what it knows of a user, and waits until it has.
async fn publish_user_updated(world: &World, user_id: &str) {
    use prost::Message;
    let payload = proto::identity::v1::UserUpdatedEvent {
        context: context("update"),
        user_id: user_id.into(),
        ..Default::default()
    };
    publish(
        world,
        events::topics::IDENTITY,
        user_id,
        "platform.identity.v1.UserUpdatedEvent",
        payload.encode_to_vec(),
    )
    .await;
    // The cache has dropped him when identity is asked again.
    loop {
        world.identity.asked.lock().unwrap().clear();
        let _ = world.place(buy(user_id, "99999", "1")).await;
        let asked = world.identity.asked.lock().unwrap().clone();
        if asked
            .iter()
            .any(|a| matches!(a, crate::doubles::Asked::Profile(_)))
        {
            world.identity.asked.lock().unwrap().clear();
            return;
        }
        tokio::task::yield_now().await;
    }
}

pub async fn publish(world: &World, topic: &str, key: &str, type_name: &str, payload: Vec<u8>) {
    let event = events::Event {
        id: uuid::Uuid::now_v7(),
        topic: topic.into(),
        key: key.into(),
        type_name: type_name.into(),
        subject: key.into(),
        source: "test".into(),
        correlation_id: "c".into(),
        occurred_at_us: 1,
        payload,
    };
    world.log.publish(&[event]).await.unwrap();
}

// rows: R151 R153 R160 R138 R157
#[tokio::test]
async fn r160_an_orders_own_hold_is_made_first_and_given_back_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let order = world.place(buy("ann", "10", "50")).await.unwrap();
    let own = world.holds("ann", "CFA-RUB").await;
    let own = own
        .iter()
        .find(|hold| hold.parent_hold_id.is_none())
        .unwrap();
    assert_eq!(own.owner, "market");
    assert_eq!(
        text(&own.amount.as_ref().unwrap().amount),
        "500.50",
        "value and fee reserve"
    );
    assert_eq!(
        world.balance("ann", "CFA-RUB").await,
        ("1000.00".into(), "500.50".into(), "499.50".into())
    );

    // Settlement carves the order's two holds, which name it.
    loop {
        let holds = world.holds("ann", "CFA-RUB").await;
        let carved: Vec<_> = holds
            .iter()
            .filter(|h| h.parent_hold_id.is_some())
            .collect();
        if carved.len() == 2 {
            assert!(
                carved
                    .iter()
                    .all(|hold| hold.reason.contains(&order.order_id))
            );
            let mut amounts: Vec<_> = carved
                .iter()
                .map(|h| text(&h.amount.as_ref().unwrap().amount))
                .collect();
            amounts.sort_unstable();
            assert_eq!(amounts, ["0.50", "500.00"]);
            break;
        }
        tokio::task::yield_now().await;
    }

    let cancelled = world.cancel("ann", &order.order_id).await.unwrap();
    assert_eq!(
        (cancelled.status(), cancelled.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "USER_REQUEST")
    );
    world.settled().await;
    assert_eq!(
        world.balance("ann", "CFA-RUB").await,
        ("1000.00".into(), "0.00".into(), "1000.00".into())
    );
    let holds = world.holds("ann", "CFA-RUB").await;
    assert!(
        holds
            .iter()
            .all(|hold| hold.status() == books::HoldStatus::Released)
    );
    let events = world.events(events::topics::MARKET, 2, |_| true).await;
    assert_eq!(events[0].short_type(), "OrderPlacedEvent");
    assert_eq!(events[1].short_type(), "OrderCancelledEvent");
    let event: OrderCancelledEvent = prost::Message::decode(&*events[1].payload).unwrap();
    assert_eq!(
        (event.order_id.as_str(), event.reason.as_str()),
        (order.order_id.as_str(), "USER_REQUEST")
    );
    assert!(event.cancelled_at.is_some());
    world.stop().await;
}

// rows: R161
#[tokio::test]
async fn r161_cancel_of_what_is_not_open_has_its_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "10").await;
    world.user("bob", "1000", "0").await;
    let not_found = (
        Code::NotFound,
        "Order not found".to_owned(),
        "ORDER_NOT_FOUND".to_owned(),
    );
    for unknown in [unique(), "no-id".to_owned()] {
        assert_eq!(
            refused(world.cancel("ann", &unknown).await.unwrap_err()),
            not_found
        );
        assert_eq!(refused(world.order(&unknown).await.unwrap_err()), not_found);
    }
    let cancelled = world.place(buy("ann", "1", "1")).await.unwrap();
    world.cancel("ann", &cancelled.order_id).await.unwrap();
    let filled = world.place(sell("ann", "5", "1")).await.unwrap();
    world.place(buy("bob", "5", "1")).await.unwrap();
    for order in [cancelled, filled] {
        let refusal = refused(world.cancel("ann", &order.order_id).await.unwrap_err());
        assert_eq!(
            refusal,
            (
                Code::FailedPrecondition,
                "Order is not open".into(),
                "ORDER_NOT_OPEN".into()
            )
        );
        let amend = AmendOrderRequest {
            context: context(&unique()),
            order_id: order.order_id,
            price: decimal("2"),
            quantity: None,
        };
        let refusal = refused(world.trader("ann").amend_order(amend).await.unwrap_err());
        assert_eq!(refusal.1, "Order is not open");
    }
    let foreign = world.place(buy("ann", "1", "1")).await.unwrap();
    let refusal = world.cancel("bob", &foreign.order_id).await.unwrap_err();
    assert_eq!(refusal.code(), Code::PermissionDenied);
    world.stop().await;
}

// rows: R344
#[tokio::test]
async fn t12_a_repeated_key_answers_with_the_stored_order_and_acts_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let first = world
        .place_with("ann", "key-1", buy("ann", "10", "1"))
        .await
        .unwrap();
    // Other fields do not count, the key does (T12).
    let request = PlaceOrderRequest {
        context: context("key-1"),
        order: Some(buy("ann", "11", "2")),
    };
    let again = world.trader("ann").place_order(request).await.unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner().order.unwrap(), first);
    assert_eq!(world.book().await.0, [("10.00".to_owned(), "1".to_owned())]);

    // Many at once under one key: one order.
    let calls = (0..8).map(|_| world.place_with("ann", "key-2", buy("ann", "9", "1")));
    let placed = futures(calls).await;
    let ids: std::collections::HashSet<_> = placed
        .into_iter()
        .map(|order| order.unwrap().order_id)
        .collect();
    assert_eq!(ids.len(), 1);
    let cancel = || CancelOrderRequest {
        context: context("key-3"),
        order_id: first.order_id.clone(),
    };
    let cancelled = world
        .trader("ann")
        .cancel_order(cancel())
        .await
        .unwrap()
        .into_inner();
    let again = world.trader("ann").cancel_order(cancel()).await.unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner(), cancelled);

    // Also after a restart.
    let world = world.restart(Settings::default()).await;
    let again = world
        .place_with("ann", "key-1", buy("ann", "10", "1"))
        .await
        .unwrap();
    assert_eq!(again.order_id, first.order_id);
    assert_eq!(
        again.status(),
        OrderStatus::Cancelled,
        "the order as it now stands"
    );
    world.stop().await;
}

async fn futures<T>(calls: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut calls: Vec<_> = calls.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (call, done) in calls.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(value) = call.as_mut().poll(cx)
            {
                *done = Some(value);
            }
        }
        match done.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

// rows: R141 R154 R155 R156 R175 R176 R305 R008
#[tokio::test]
async fn r156_trades_are_told_to_both_sides_and_published_in_order() {
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
    // 10 * 100 and 2 * 101 over 12.
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
    assert_eq!(
        (
            trade.buyer_id.as_str(),
            trade.seller_id.as_str(),
            trade.aggressor_side()
        ),
        ("bob", "ann", OrderSide::Buy)
    );
    assert!(trade.executed_at.is_some() && trade.trade_number == 1);
    // Nobody else's.
    let request = GetTradeRequest {
        context: None,
        trade_id: trade.trade_id.clone(),
    };
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
            .trade
            .unwrap(),
        *trade
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
        "key = instrument, so order is kept"
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
        "correlation-sweep",
        "one correlation id from call to event (R004)"
    );
    let executed: TradeExecutedEvent = prost::Message::decode(&*events[3].payload).unwrap();
    assert_eq!(executed.trade_id, trade.trade_id);
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

    // Settled in the ledger and on the (doubled) chain.
    world.settled().await;
    let settled = world.trades("bob").await;
    assert!(
        settled
            .iter()
            .all(|t| t.settlement_status() == SettlementStatus::Settled)
    );
    world.stop().await;
}

// rows: R143 R190
#[tokio::test]
async fn r143_amend_changes_price_and_total_and_the_money_behind_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let order = world.place(buy("ann", "10", "20")).await.unwrap();
    let later = world.place(buy("ann", "10", "5")).await.unwrap();
    let amend = |price: Option<&str>, quantity: Option<&str>| AmendOrderRequest {
        context: context(&unique()),
        order_id: order.order_id.clone(),
        price: price.and_then(decimal),
        quantity: quantity.and_then(decimal),
    };
    let mut trader = world.trader("ann");
    let amended = trader
        .amend_order(amend(None, Some("15")))
        .await
        .unwrap()
        .into_inner()
        .order
        .unwrap();
    assert_eq!(text(&amended.quantity), "15");
    assert_eq!(world.book().await.0, [("10.00".into(), "20".into())]);
    // More, at a better price: its hold grows with it.
    let amended = trader
        .amend_order(amend(Some("12"), Some("40")))
        .await
        .unwrap()
        .into_inner()
        .order
        .unwrap();
    assert_eq!(
        (text(&amended.price), text(&amended.quantity)),
        ("12.00", "40")
    );
    assert_eq!(
        world.book().await.0,
        [("12.00".into(), "40".into()), ("10.00".into(), "5".into())]
    );
    let held: f64 = world.balance("ann", "CFA-RUB").await.1.parse().unwrap();
    assert!(held >= 480.48 + 50.05, "{held} covers both orders");
    // Past the money: refused, the order stands.
    let refusal = refused(
        trader
            .amend_order(amend(None, Some("90")))
            .await
            .unwrap_err(),
    );
    assert_eq!(refusal.1, "Insufficient balance");
    assert_eq!(
        text(&world.order(&order.order_id).await.unwrap().quantity),
        "40"
    );
    let bad = trader
        .amend_order(amend(Some("10.005"), None))
        .await
        .unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
    let nothing = trader.amend_order(amend(None, None)).await.unwrap_err();
    assert_eq!(nothing.code(), Code::InvalidArgument);

    // Everything goes back in the end.
    for order in [&order, &later] {
        world.cancel("ann", &order.order_id).await.unwrap();
    }
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await.2, "1000.00");
    world.stop().await;
}

// rows: R328
#[tokio::test]
async fn d35_bad_fields_are_named_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let good = || buy("ann", "10", "1");
    let cases: Vec<(&str, Order)> = vec![
        (
            "order.quantity",
            Order {
                quantity: decimal("-1"),
                ..good()
            },
        ),
        (
            "order.quantity",
            Order {
                quantity: decimal("0"),
                ..good()
            },
        ),
        (
            "order.quantity",
            Order {
                quantity: decimal("1.5"),
                ..good()
            },
        ),
        (
            "order.quantity",
            Order {
                quantity: decimal("ten"),
                ..good()
            },
        ),
        (
            "order.quantity",
            Order {
                quantity: None,
                ..good()
            },
        ),
        (
            "order.price",
            Order {
                price: decimal("10.001"),
                ..good()
            },
        ),
        (
            "order.price",
            Order {
                price: decimal("-10"),
                ..good()
            },
        ),
        (
            "order.price",
            Order {
                price: None,
                ..good()
            },
        ),
        ("order.side", Order { side: 0, ..good() }),
        (
            "order.type",
            Order {
                r#type: 0,
                ..good()
            },
        ),
        (
            "order.time_in_force",
            Order {
                r#type: OrderType::Market.into(),
                ..good()
            },
        ),
        (
            "order.expires_at",
            Order {
                time_in_force: TimeInForce::Gtd.into(),
                ..good()
            },
        ),
    ];
    for (field, order) in cases {
        let status = world.place(order).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status}");
        let bad = tonic_types::StatusExt::get_details_bad_request(&status).unwrap();
        assert_eq!(bad.field_violations[0].field, field);
    }
    let unknown = world
        .place(Order {
            instrument_id: "NO-SUCH".into(),
            ..good()
        })
        .await
        .unwrap_err();
    assert_eq!(
        refused(unknown),
        (
            Code::NotFound,
            "Instrument not found".into(),
            "INSTRUMENT_NOT_FOUND".into()
        )
    );
    let foreign = world
        .place_with("bob", &unique(), good())
        .await
        .unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let no_key = PlaceOrderRequest {
        context: None,
        order: Some(good()),
    };
    assert_eq!(
        world
            .trader("ann")
            .place_order(no_key)
            .await
            .unwrap_err()
            .code(),
        Code::InvalidArgument
    );
    let nobody = world.place(buy("ghost", "10", "1")).await.unwrap_err();
    assert_eq!(nobody.code(), Code::NotFound);
    assert!(world.holds("ann", "CFA-RUB").await.is_empty());
    let status = world.status().await;
    assert_eq!(status.instruments[0].open_orders, 0);
    world.stop().await;
}

// rows: R173
#[tokio::test]
async fn t19_market_orders_never_rest_and_say_why_they_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "0", "10").await;
    world.user("bob", "1000", "0").await;
    let market = |user: &str, side: OrderSide, quantity: &str| Order {
        r#type: OrderType::Market.into(),
        time_in_force: 0,
        price: None,
        ..limit(user, side, "1", quantity)
    };
    let alone = world
        .place(market("bob", OrderSide::Buy, "5"))
        .await
        .unwrap();
    assert_eq!(
        (alone.status(), alone.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "NO_LIQUIDITY")
    );
    assert_eq!(alone.time_in_force(), TimeInForce::Ioc);
    world.place(sell("ann", "50", "3")).await.unwrap();
    let part = world
        .place(market("bob", OrderSide::Buy, "5"))
        .await
        .unwrap();
    assert_eq!(
        (part.status(), part.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "IOC_REMAINDER")
    );
    assert_eq!(
        (text(&part.filled_quantity), text(&part.average_price)),
        ("3", "50")
    );
    assert_eq!(
        text(&part.price),
        "52.50",
        "the protection price: best offer and collar"
    );
    assert_eq!(world.book().await, (vec![], vec![]));
    world.settled().await;
    assert_eq!(
        world.balance("bob", "CFA-RUB").await,
        ("849.85".into(), "0.00".into(), "849.85".into())
    );
    world.stop().await;
}

// rows: R320
#[tokio::test]
async fn d13_what_the_book_refuses_is_a_rejected_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let phase = |phase: TradingPhase| SetTradingPhaseRequest {
        context: context(&unique()),
        instrument_id: BOND.into(),
        phase: phase.into(),
        reason: "test".into(),
    };
    let mut supervisor = world.as_caller("sandbox.market-supervisor");
    supervisor
        .set_trading_phase(phase(TradingPhase::Halt))
        .await
        .unwrap();
    let rejected = world.place(buy("ann", "10", "1")).await.unwrap();
    assert_eq!(
        (rejected.status(), rejected.cancel_reason.as_str()),
        (OrderStatus::Rejected, "INSTRUMENT_HALTED")
    );
    assert_eq!(world.order(&rejected.order_id).await.unwrap(), rejected);
    supervisor
        .set_trading_phase(phase(TradingPhase::Open))
        .await
        .unwrap();
    let outside = world.place(buy("ann", "0.50", "1")).await.unwrap();
    assert_eq!(
        (outside.status(), outside.cancel_reason.as_str()),
        (OrderStatus::Rejected, "PRICE_BAND")
    );
    assert_eq!(
        world.place(buy("ann", "10", "1")).await.unwrap().status(),
        OrderStatus::Open
    );
    assert_eq!(
        world
            .trader("ann")
            .set_trading_phase(phase(TradingPhase::Halt))
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    // A supervisor's phase outlives a restart.
    supervisor
        .set_trading_phase(phase(TradingPhase::Halt))
        .await
        .unwrap();
    let world = world.restart(Settings::default()).await;
    assert_eq!(
        world.status().await.instruments[0].phase(),
        TradingPhase::Halt
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
        (list("ann", BOND, OrderStatus::Open), 4),
        (list("ann", BOND, OrderStatus::Cancelled), 1),
        (list("", "NO-SUCH", OrderStatus::Unspecified), 0),
        (list("nobody", "", OrderStatus::Unspecified), 0),
    ] {
        let answer = operator
            .list_orders(request.clone())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(answer.orders.len(), count, "{request:?}");
    }
    // Users see their own, whether they say so or not.
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

    // Pages of two: everything once, newest first.
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
        let next = answer.pagination.unwrap().next_page_token;
        if next.is_empty() {
            break;
        }
        request.pagination.as_mut().unwrap().page_token = next;
    }
    placed.reverse();
    assert_eq!(seen, placed);
    world.stop().await;
}

#[tokio::test]
async fn mass_cancel_takes_what_its_filters_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "10").await;
    world.user("bob", "1000", "0").await;
    for price in ["1", "2", "3"] {
        world.place(buy("ann", price, "1")).await.unwrap();
    }
    world.place(sell("ann", "20", "1")).await.unwrap();
    world.place(buy("bob", "4", "1")).await.unwrap();
    let mass = |key: &str, user: &str, side: OrderSide| MassCancelRequest {
        context: context(key),
        user_id: user.into(),
        instrument_id: BOND.into(),
        side: side.into(),
    };
    let cancelled = world
        .trader("ann")
        .mass_cancel(mass("m1", "", OrderSide::Buy))
        .await
        .unwrap();
    assert_eq!(cancelled.into_inner().cancelled, 3);
    let again = world
        .trader("ann")
        .mass_cancel(mass("m1", "", OrderSide::Buy))
        .await
        .unwrap();
    assert_eq!(again.into_inner().cancelled, 3, "the stored answer");
    assert_eq!(
        world
            .trader("ann")
            .mass_cancel(mass("m2", "bob", OrderSide::Buy))
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    let all = world
        .operator()
        .mass_cancel(mass("m3", "", OrderSide::Unspecified))
        .await
        .unwrap();
    assert_eq!(
        all.into_inner().cancelled,
        2,
        "the kill switch takes everybody's"
    );
    assert_eq!(world.book().await, (vec![], vec![]));
    let orders = world
        .operator()
        .list_orders(ListOrdersRequest {
            user_id: "ann".into(),
            ..Default::default()
        })
        .await
        .unwrap();
    let reasons: Vec<_> = orders
        .into_inner()
        .orders
        .into_iter()
        .map(|order| order.cancel_reason)
        .collect();
    assert_eq!(
        reasons,
        ["KILL_SWITCH", "MASS_CANCEL", "MASS_CANCEL", "MASS_CANCEL"]
    );
    world.stop().await;
}

// rows: R159
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
        "platform.cfa.v1.CfaIssuedEvent",
        issued.encode_to_vec(),
    )
    .await;
    publish(
        &world,
        events::topics::CFA,
        "k",
        "platform.cfa.v1.CfaTransferredEvent",
        moved.encode_to_vec(),
    )
    .await;
    publish(
        &world,
        events::topics::CFA,
        "k",
        "platform.cfa.v1.CfaRedeemedEvent",
        redeemed.encode_to_vec(),
    )
    .await;
    // Events of one key are handled in order: the last one tells that all were.
    while world
        .gateway
        .position("bob", BOND)
        .await
        .unwrap()
        .to_string()
        != "3"
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        world
            .gateway
            .position("ann", BOND)
            .await
            .unwrap()
            .to_string(),
        "6"
    );

    // A new instrument is traded from its event on; a matured one is not, and its orders end.
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
        "platform.cfa.v1.InstrumentRegisteredEvent",
        registered.encode_to_vec(),
    )
    .await;
    while world.status().await.instruments.len() < 2 {
        tokio::task::yield_now().await;
    }
    let open = world
        .place(Order {
            instrument_id: "BOND-2".into(),
            ..buy("ann", "10", "1")
        })
        .await
        .unwrap();
    assert_eq!(open.status(), OrderStatus::Open);
    let mut matured = bond("BOND-2");
    matured.status = proto::cfa::v1::InstrumentStatus::Matured.into();
    world.registry.list(matured);
    let updated = proto::cfa::v1::InstrumentUpdatedEvent {
        context: context("u"),
        instrument_id: "BOND-2".into(),
        ..Default::default()
    };
    publish(
        &world,
        events::topics::CFA,
        "k",
        "platform.cfa.v1.InstrumentUpdatedEvent",
        updated.encode_to_vec(),
    )
    .await;
    while world.order(&open.order_id).await.unwrap().status() != OrderStatus::Cancelled {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        world.order(&open.order_id).await.unwrap().cancel_reason,
        "INSTRUMENT_MATURED"
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
