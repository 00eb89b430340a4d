//! Amend, cancel, mass cancel and kill switch, and the money that they release.

use std::time::Duration;

use proto::ledger::v1 as books;
use proto::market::v1::*;
use tonic::Code;
use types::Side;
use wire::ServerMessage;

use crate::orders::text;
use crate::world::*;

// rows: R151 R153 R160 R138 R157
#[tokio::test]
async fn r160_an_orders_own_hold_is_created_first_and_released_once() {
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

    // Settlement splits off the order's two holds, which name it.
    let mut own = Vec::new();
    until_true("the order's two holds", async || {
        own = world.holds("ann", "CFA-RUB").await;
        own.retain(|hold| hold.parent_hold_id.is_some());
        own.len() == 2
    })
    .await;
    let is_named = |hold: &books::Hold| hold.reason.contains(&order.order_id);
    assert!(own.iter().all(is_named), "{own:?}");
    let amount = |hold: &books::Hold| text(&hold.amount.as_ref().unwrap().amount).to_owned();
    let mut amounts: Vec<_> = own.iter().map(amount).collect();
    amounts.sort_unstable();
    assert_eq!(amounts, ["0.50", "500.00"]);
    // The ledger publishes the creation of both.
    let created = |event: &events::Event| -> books::HoldCreatedEvent {
        prost::Message::decode(&*event.payload).unwrap()
    };
    let is_own = |event: &events::Event| {
        event.short_type() == "HoldCreatedEvent" && created(event).reason.contains(&order.order_id)
    };
    let mut published = Vec::new();
    for event in world.events(events::topics::LEDGER, 2, is_own).await {
        let created = created(&event);
        assert_eq!(created.subaccount_id, "ann:CFA-RUB");
        published.push(text(&created.amount.unwrap().amount).to_owned());
    }
    published.sort_unstable();
    assert_eq!(published, ["0.50", "500.00"]);

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

// rows: R161 R339
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
            new_client_order_id: String::new(),
        };
        let refusal = refused(world.trader("ann").amend_order(amend).await.unwrap_err());
        assert_eq!(refusal.1, "Order is not open");
    }
    let foreign = world.place(buy("ann", "1", "1")).await.unwrap();
    let refusal = world.cancel("bob", &foreign.order_id).await.unwrap_err();
    assert_eq!(refusal.code(), Code::PermissionDenied);
    world.stop().await;
}

/// D37: an amend by either protocol may change the client order id. The order id stays, and the
/// history has the new client order id.
// rows: R328
#[tokio::test]
async fn r328_an_amend_may_give_the_order_another_client_order_id() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let order = world
        .place(Order {
            client_order_id: "first".into(),
            ..buy("ann", "10", "20")
        })
        .await
        .unwrap();
    let amend = |id: &str| AmendOrderRequest {
        context: context(&unique()),
        order_id: order.order_id.clone(),
        price: None,
        quantity: None,
        new_client_order_id: id.into(),
    };
    let mut trader = world.trader("ann");
    let amended = trader.amend_order(amend("second")).await.unwrap();
    let amended = amended.into_inner().order.unwrap();
    let shown = (&*amended.order_id, &*amended.client_order_id);
    assert_eq!(shown, (&*order.order_id, "second"));
    let stored = world.order(&order.order_id).await.unwrap();
    assert_eq!(stored.client_order_id, "second");
    // The first id is free again. The second is in use.
    let named = |id: &str| Order {
        client_order_id: id.into(),
        ..buy("ann", "9", "1")
    };
    world.place(named("first")).await.unwrap();
    let status = world.place(named("second")).await.unwrap_err();
    assert_eq!(refused(status).2, "DUPLICATE_CLIENT_ORDER_ID");
    let status = trader.amend_order(amend("first")).await.unwrap_err();
    assert_eq!(refused(status).2, "DUPLICATE_CLIENT_ORDER_ID");
    // An amend without a change, and one with an id that is too long.
    let status = trader.amend_order(amend("")).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let status = trader.amend_order(amend(&"x".repeat(129))).await;
    assert_eq!(status.unwrap_err().code(), Code::InvalidArgument);
    // A session sets a numeric id.
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    let rename = wire::Amend {
        client_order_id: 0,
        engine_order_id: order.engine_order_id,
        price_ticks: 0,
        quantity_lots: 0,
        new_client_order_id: 77,
    };
    ann.send(0, rename).await.unwrap();
    let amended = until(&mut of_ann, |m| match m {
        ServerMessage::Amended(amended) => Some(*amended),
        _ => None,
    });
    let amended = amended.await;
    assert_eq!((amended.client_order_id, amended.kept_priority), (77, 1));
    let stored = world.order(&order.order_id).await.unwrap();
    assert_eq!(stored.client_order_id, "77");
    world.stop().await;
}

// rows: R143 R190
#[tokio::test]
async fn r143_amend_changes_price_and_total_and_the_blocked_money() {
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
        new_client_order_id: String::new(),
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
    // A larger quantity at a better price: the order's hold grows.
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
    // 480.00 and 50.00, each with a fee of 0.1 %.
    let both: (String, String, String) = ("1000.00".into(), "530.53".into(), "469.47".into());
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await, both);
    // A quantity above the balance is refused, and the order is unchanged.
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
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await, both);
    let bad = trader
        .amend_order(amend(Some("10.005"), None))
        .await
        .unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
    let nothing = trader.amend_order(amend(None, None)).await.unwrap_err();
    assert_eq!(nothing.code(), Code::InvalidArgument);

    // The cancels release all money.
    for order in [&order, &later] {
        world.cancel("ann", &order.order_id).await.unwrap();
    }
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await.2, "1000.00");
    world.stop().await;
}

#[tokio::test]
async fn kill_switch_cancels_and_blocks_orders_until_lifted() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "10").await;
    world.user("bob", "1000", "0").await;
    let anns = world.place(buy("ann", "1", "1")).await.unwrap();
    world.place(buy("bob", "2", "1")).await.unwrap();
    let switch = |key: &str, user: &str, engaged: bool| SetKillSwitchRequest {
        context: context(key),
        user_id: user.into(),
        engaged,
        reason: "drill".into(),
    };

    // A trader may engage the switch of its own user, but not lift it, nor engage another user's.
    let mut ann = world.trader("ann");
    let mine = ann.set_kill_switch(switch("k1", "", true)).await.unwrap();
    assert_eq!(mine.get_ref().cancelled, 1);
    assert_eq!(mine.get_ref().user_id, "ann");
    let again = ann.set_kill_switch(switch("k1", "", true)).await.unwrap();
    assert_eq!(again.get_ref().cancelled, 1, "the stored answer");
    for refused in [switch("k2", "ann", false), switch("k3", "bob", true)] {
        let status = ann.set_kill_switch(refused).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied);
    }
    let refused = world.place(buy("ann", "1", "1")).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "Kill switch is engaged");
    world.place(buy("bob", "3", "1")).await.unwrap();

    // The switch of all users is independent of a user's switch. Both survive a restart.
    let mut operator = world.operator();
    let all = operator.set_kill_switch(switch("k4", "", true)).await;
    assert_eq!(all.unwrap().get_ref().cancelled, 2);
    let world = world.restart(Settings::default()).await;
    let refused = world.place(buy("bob", "3", "1")).await.unwrap_err();
    assert_eq!(refused.message(), "Kill switch is engaged");
    let status = world.status().await;
    assert!(status.kill_switch_engaged);
    assert_eq!(status.killed_user_ids, ["ann"]);
    // Lifting it takes two persons (D32).
    let mut operator = world.operator();
    for (key, user) in [("k7", ""), ("k8", "ann")] {
        let alone = operator.set_kill_switch(switch(key, user, false)).await;
        let reason = rpc::status::reason(&alone.unwrap_err());
        assert_eq!(reason.as_deref(), Some("APPROVAL_REQUIRED"));
    }
    let mut approved = world.approved();
    let lifted = approved.set_kill_switch(switch("k5", "", false)).await;
    assert_eq!(lifted.unwrap().get_ref().cancelled, 0);
    world.place(buy("bob", "3", "1")).await.unwrap();
    let refused = world.place(buy("ann", "1", "1")).await.unwrap_err();
    assert_eq!(refused.message(), "Kill switch is engaged");
    let order = world.order(&anns.order_id).await.unwrap();
    assert_eq!(order.cancel_reason, "KILL_SWITCH");
    let hers = approved.set_kill_switch(switch("k6", "ann", false)).await;
    hers.unwrap();
    world.place(buy("ann", "1", "1")).await.unwrap();
    world.stop().await;
}

/// The caller disconnects while its orders are cancelled in slices of 256.
#[tokio::test]
async fn t12_a_repeat_of_a_mass_cancel_that_goes_on_in_slices_is_answered_with_all_of_them() {
    const ORDERS: u32 = 3_000;
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unthrottled()).await;
    world.user("ann", "100000", "0").await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let mut answers = Vec::new();
    for round in 0..3 {
        for nth in 1..=ORDERS {
            let order = wire_order(u64::from(round * ORDERS + nth), Side::Buy, 100, 1);
            ann.send(0, order).await.unwrap();
        }
        for _ in 0..ORDERS {
            until(&mut of_ann, |message| match message {
                ServerMessage::OrderAck(ack) => Some(*ack),
                _ => None,
            })
            .await;
        }
        let request = MassCancelRequest {
            context: context(&format!("all of round {round}")),
            ..MassCancelRequest::default()
        };
        let (mut first, again) = (world.trader("ann"), request.clone());
        let left = tokio::spawn(async move { first.mass_cancel(request).await });
        tokio::time::sleep(Duration::from_millis(1 << round)).await;
        left.abort();
        let answer = world.trader("ann").mass_cancel(again).await.unwrap();
        answers.push(answer.into_inner().cancelled);
    }
    assert_eq!(answers, [ORDERS; 3]);
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
        "an operator's mass cancel without a user is for all users"
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

#[tokio::test]
async fn t12_a_repeat_of_a_change_that_the_book_refused_gets_the_same_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "1").await;
    world.place(sell("bob", "12", "1")).await.unwrap();
    let mut order = buy("ann", "10", "1");
    order.post_only = true;
    let order = world.place(order).await.unwrap();
    let context = context("would trade");
    let amend = AmendOrderRequest {
        context,
        order_id: order.order_id.clone(),
        price: decimal("12"),
        quantity: None,
        new_client_order_id: String::new(),
    };
    for _ in 0..2 {
        let status = world.trader("ann").amend_order(amend.clone()).await;
        let (code, text, reason) = refused(status.unwrap_err());
        assert_eq!(
            (code, text.as_str(), reason.as_str()),
            (
                Code::FailedPrecondition,
                "Order would trade at once",
                "POST_ONLY"
            )
        );
    }
    assert_eq!(
        world.order(&order.order_id).await.unwrap().status(),
        OrderStatus::Open
    );
    world.stop().await;
}
