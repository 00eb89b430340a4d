//! Orders over RPC: fields, checks, idempotency keys, outcomes.

use std::sync::Arc;

use proto::cfa::v1::Instrument;
use proto::common::v1::{KycStatus, LimitType, OperationType};
use proto::market::v1::*;
use testkit::Registry;
use tonic::Code;
use tonic_types::StatusExt;
use types::{RejectReason, Side, StpMode};
use wire::ServerMessage;

use crate::world::*;

/// The text of a decimal; empty if unset.
pub fn text(value: &Option<proto::common::v1::Decimal>) -> &str {
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
        "an order id of the caller becomes the client order id (D37)"
    );
    assert_ne!(placed.order_id, "my-name");
    assert!(placed.engine_order_id != 0 && placed.sequence != 0);
    assert_eq!(text(&placed.filled_quantity), "0");
    assert_eq!(world.order(&placed.order_id).await.unwrap(), placed);
    // Only the owner may read the order.
    let request = GetOrderRequest {
        context: None,
        order_id: placed.order_id.clone(),
    };
    assert!(world.trader("ann").get_order(request.clone()).await.is_ok());
    let foreign = world.trader("bob").get_order(request).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    world.stop().await;
}

// rows: R339
#[tokio::test]
async fn r339_unknown_enum_value_is_refused_under_its_field() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let set: [(&str, fn(&mut Order)); 4] = [
        ("order.side", |order| order.side = 7),
        ("order.type", |order| order.r#type = 8),
        ("order.time_in_force", |order| order.time_in_force = 99),
        ("order.self_trade_prevention", |order| {
            order.self_trade_prevention = 9
        }),
    ];
    for (field, set) in set {
        let mut order = buy("ann", "10", "1");
        set(&mut order);
        let status = world.place(order).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, field);
        assert!(
            violations[0].description.contains("has no value"),
            "{violations:?}"
        );
    }
    assert_eq!(world.status().await.instruments[0].open_orders, 0);
    let (orders, cancel, phase) = (
        ListOrdersRequest {
            status: 77,
            ..Default::default()
        },
        MassCancelRequest {
            context: context(&unique()),
            side: 7,
            ..Default::default()
        },
        SetTradingPhaseRequest {
            context: context(&unique()),
            phase: 77,
            ..Default::default()
        },
    );
    let mut ann = world.trader("ann");
    for (field, refusal) in [
        ("status", ann.list_orders(orders).await.unwrap_err()),
        ("side", ann.mass_cancel(cancel).await.unwrap_err()),
        (
            "phase",
            world.operator().set_trading_phase(phase).await.unwrap_err(),
        ),
    ] {
        assert_eq!(refusal.code(), Code::InvalidArgument, "{field}");
        let violations = refusal.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, field);
    }
    world.stop().await;
}

/// `design.md` 7: open orders per user and per instrument.
#[tokio::test]
async fn open_orders_of_a_user_are_bounded_on_both_protocols_and_cancels_pass() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.open_orders_per_user = 3;
    settings.gateway.open_orders_per_instrument = 2;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    let placed = world.place(buy("ann", "1", "1")).await.unwrap();
    world.place(buy("ann", "1", "1")).await.unwrap();
    let (code, text, reason) = refused(world.place(buy("ann", "1", "1")).await.unwrap_err());
    assert_eq!(
        (code, reason.as_str()),
        (Code::ResourceExhausted, "INSTRUMENT_ORDER_LIMIT"),
        "{text}"
    );
    let (ann, mut of_ann) = world.session(login("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    let rejected = until(&mut of_ann, |m| match m {
        ServerMessage::Rejected(m) => Some((m.reason, m.limit)),
        _ => None,
    });
    assert_eq!(rejected.await, (RejectReason::InstrumentOrderLimit, 2));
    world.cancel("ann", &placed.order_id).await.unwrap();
    world.place(buy("ann", "1", "1")).await.unwrap();
    let bounds = world.status().await.bounds.unwrap();
    let shown = (
        bounds.open_orders_per_user,
        bounds.open_orders_per_instrument,
    );
    assert_eq!(shown, (3, 2));
    // A start with other settings journals the new bounds.
    let world = world.restart(Settings::default()).await;
    let bounds = world.status().await.bounds.unwrap();
    let shown = (
        bounds.open_orders_per_user,
        bounds.open_orders_per_instrument,
    );
    assert_eq!(shown, (65_536, 16_384));
    world.place(buy("ann", "1", "1")).await.unwrap();
    world.stop().await;
}

/// Order bounds of a user and of a member group (F07, `design.md` 7). Staff sets them, and the user
/// reads them. A trader may not set its own.
// rows: R333 R341
#[tokio::test]
async fn r341_members_and_groups_have_bounds_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    let bounds = |value: Option<&str>, lots_per_order| OrderBounds {
        open_orders_per_user: 10,
        open_orders_per_instrument: 10,
        lots_per_order,
        value_per_order: value.and_then(decimal),
        ..OrderBounds::default()
    };
    let set = |user_id: &str, group, bounds| SetMemberBoundsRequest {
        context: context(&unique()),
        user_id: user_id.into(),
        group,
        bounds,
        reason: "test".into(),
    };
    let put = |user_id: &str, group| SetMemberGroupRequest {
        context: context(&unique()),
        user_id: user_id.into(),
        group,
        reason: "test".into(),
    };
    let mut operator = world.operator();
    let mut trader = world.trader("ann");
    let own = trader.set_member_bounds(set("ann", 0, Some(bounds(None, 0))));
    assert_eq!(own.await.unwrap_err().code(), Code::PermissionDenied);
    let of_group = Some(bounds(Some("100"), 0));
    let mut approved = world.approved();
    approved
        .set_member_bounds(set("", 7, of_group))
        .await
        .unwrap();
    world.place(buy("ann", "10", "11")).await.unwrap();
    let request = put("ann", 7);
    for replayed in [false, true] {
        let answer = approved.set_member_group(request.clone()).await.unwrap();
        let is_again = answer.metadata().contains_key("idempotent-replayed");
        assert_eq!((answer.get_ref().group, is_again), (7, replayed));
    }
    let status = world.place(buy("ann", "10", "11")).await.unwrap_err();
    let (code, text, reason) = refused(status);
    assert_eq!(
        (code, reason.as_str()),
        (Code::FailedPrecondition, "ORDER_VALUE_LIMIT"),
        "{text}"
    );
    world.place(buy("ann", "10", "10")).await.unwrap();
    world.place(buy("bob", "10", "11")).await.unwrap();
    let shown = |status: GetMarketStatusResponse| {
        let bounds = status.bounds.unwrap();
        let value = bounds.value_per_order.map(|value| value.value);
        (bounds.group, bounds.lots_per_order, value)
    };
    let status = trader.get_market_status(GetMarketStatusRequest::default());
    let status = shown(status.await.unwrap().into_inner());
    assert_eq!(status, (7, 0, Some("100.00".to_owned())));
    // The user's own bounds take precedence until they are removed.
    let own = Some(bounds(None, 3));
    approved
        .set_member_bounds(set("ann", 0, own))
        .await
        .unwrap();
    let status = world.place(buy("ann", "100", "4")).await.unwrap_err();
    assert_eq!(refused(status).2, "ORDER_SIZE_LIMIT");
    world.place(buy("ann", "100", "3")).await.unwrap();
    // One person lowers bounds, and two raise them (D32), also by another group.
    let lower = operator.set_member_bounds(set("ann", 0, Some(bounds(None, 2))));
    lower.await.unwrap();
    let again = set("ann", 0, Some(bounds(None, 3)));
    let raised = operator.set_member_bounds(again.clone()).await;
    assert_eq!(refused(raised.unwrap_err()).2, "APPROVAL_REQUIRED");
    let removed = operator.set_member_bounds(set("ann", 0, None)).await;
    assert_eq!(refused(removed.unwrap_err()).2, "APPROVAL_REQUIRED");
    approved.set_member_bounds(again).await.unwrap();
    approved
        .set_member_bounds(set("ann", 0, None))
        .await
        .unwrap();
    let moved = operator.set_member_group(put("ann", 0)).await;
    assert_eq!(refused(moved.unwrap_err()).2, "APPROVAL_REQUIRED");
    let status = world.place(buy("ann", "100", "3")).await.unwrap_err();
    assert_eq!(refused(status).2, "ORDER_VALUE_LIMIT");
    for wrong in [
        set("", 0, Some(bounds(None, 0))),
        set("ann", 7, Some(bounds(None, 0))),
        set("ann", 0, Some(OrderBounds::default())),
        set("ann", 0, Some(bounds(Some("-1"), 0))),
    ] {
        let status = operator.set_member_bounds(wrong).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    }
    let unknown = operator.set_member_group(put("unknown", 7)).await;
    assert_eq!(unknown.unwrap_err().code(), Code::NotFound);
    // The bounds survive a restart.
    let world = world.restart(Settings::default()).await;
    let status = world.place(buy("ann", "100", "3")).await.unwrap_err();
    assert_eq!(refused(status).2, "ORDER_VALUE_LIMIT");
    world.stop().await;
}

// rows: R341
#[tokio::test]
async fn d50_a_repeat_of_a_setting_that_changed_nothing_does_not_act() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let mut operator = world.operator();
    let mut trader = world.trader("ann");
    for (key, group, is_again, expected) in [
        ("k-1", 7, false, 7),
        // The user is already in this group.
        ("k-2", 7, false, 7),
        ("k-3", 8, false, 8),
        ("k-2", 7, true, 8),
        ("k-1", 7, true, 8),
    ] {
        let request = SetMemberGroupRequest {
            context: context(key),
            user_id: "ann".into(),
            group,
            reason: "test".into(),
        };
        let answer = operator.set_member_group(request).await.unwrap();
        let marked = answer.metadata().contains_key("idempotent-replayed");
        assert_eq!(marked, is_again, "{key}");
        let status = trader.get_market_status(GetMarketStatusRequest::default());
        let bounds = status.await.unwrap().into_inner().bounds.unwrap();
        assert_eq!(bounds.group, expected, "{key}");
    }
    world.stop().await;
}

// rows: R146 R147 R148 R149 R150 R152 R250 R252 R253
#[tokio::test]
async fn r150_checks_run_in_order_and_the_first_message_wins() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    // The order needs 100.00 and a fee of 0.10. One kopeck is missing.
    world.user("ann", "100.09", "0").await;
    world.identity.upsert_user("ann", |ann| {
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
        world.identity.take_limit_checks().is_empty(),
        "the limit is not checked after the KYC refusal"
    );

    world
        .identity
        .upsert_user("ann", |ann| ann.kyc = KycStatus::Enhanced);
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
    let questions = world.identity.take_limit_checks();
    assert_eq!(questions.len(), 1);
    assert_eq!(questions[0].limit_type(), LimitType::Trading);
    assert_eq!(questions[0].operation_type(), OperationType::Trading);
    let amount = questions[0].amount.clone().unwrap();
    assert_eq!(
        (amount.currency_code.as_str(), text(&amount.amount)),
        ("RUB", "10"),
        "the amount is the quantity, as specified"
    );
    assert_eq!(
        text(&questions[0].notional.clone().unwrap().amount),
        "100.00"
    );

    world
        .identity
        .upsert_user("ann", |ann| ann.refuse_with = None);
    let status = world.place(order()).await.unwrap_err();
    let info = StatusExt::get_details_error_info(&status).unwrap();
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

    // A sell without units, and without a sub-account in the ledger.
    let refusal = refused(world.place(sell("ann", "10", "1")).await.unwrap_err());
    assert_eq!(refusal.1, "Insufficient balance");
    world.deposit("ann", "CFA-RUB", "0.01").await;
    assert_eq!(
        world.place(order()).await.unwrap().status(),
        OrderStatus::Open
    );
    world.stop().await;
}

/// Publishes a user's update, and waits until the market has evicted the cached profile.
async fn publish_user_updated(world: &World, user_id: &str) {
    use prost::Message;
    let payload = proto::identity::v1::UserUpdatedEvent {
        context: context("update"),
        user_id: user_id.into(),
        ..Default::default()
    };
    // Cleared once: the market itself may read the profile after the event.
    world.identity.with(|state| state.trail.clear());
    publish(
        world,
        events::topics::IDENTITY,
        user_id,
        "dfa.identity.v1.UserUpdatedEvent",
        payload.encode_to_vec(),
    )
    .await;
    let asked = format!("profile {user_id}");
    until_true("identity is asked for the evicted profile", async || {
        let _ = world.place(buy(user_id, "99999", "1")).await;
        world.identity.trail().contains(&asked)
    })
    .await;
    world.identity.take_limit_checks();
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
    // A repeat is recognised by its key alone (T12).
    let request = PlaceOrderRequest {
        context: context("key-1"),
        order: Some(buy("ann", "11", "2")),
    };
    let again = world.trader("ann").place_order(request).await.unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner().order.unwrap(), first);
    assert_eq!(world.book().await.0, [("10.00".to_owned(), "1".to_owned())]);

    // Concurrent calls under one key enter one order.
    let calls = (0..8).map(|_| world.place_with("ann", "key-2", buy("ann", "9", "1")));
    let placed = join_all(calls).await;
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

    // The key is known after a restart.
    let world = world.restart(Settings::default()).await;
    let again = world
        .place_with("ann", "key-1", buy("ann", "10", "1"))
        .await
        .unwrap();
    assert_eq!(again.order_id, first.order_id);
    assert_eq!(
        again.status(),
        OrderStatus::Cancelled,
        "the order's current state"
    );
    world.stop().await;
}

/// Awaits all futures concurrently.
async fn join_all<T>(calls: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
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

// rows: R328 R339
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
            "order.instrument_id",
            Order {
                instrument_id: String::new(),
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
        let bad = StatusExt::get_details_bad_request(&status).unwrap();
        assert_eq!(bad.field_violations[0].field, field);
    }
    for status in [
        world.order("").await.unwrap_err(),
        world.cancel("ann", "").await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
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
    let unknown = world.place(buy("ghost", "10", "1")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(world.holds("ann", "CFA-RUB").await.is_empty());
    let status = world.status().await;
    assert_eq!(status.instruments[0].open_orders, 0);
    world.stop().await;
}

// rows: R333
#[tokio::test]
async fn r333_a_reading_role_does_not_widen_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let placed = world.place(buy("ann", "10", "1")).await.unwrap();
    let mut mixed = world.as_caller("sandbox.investor+auditor.mallory");
    let foreign = mixed
        .place_order(PlaceOrderRequest {
            context: context(&unique()),
            order: Some(buy("ann", "10", "1")),
        })
        .await
        .unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let foreign = mixed
        .cancel_order(CancelOrderRequest {
            context: context(&unique()),
            order_id: placed.order_id.clone(),
        })
        .await
        .unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let foreign = mixed
        .mass_cancel(MassCancelRequest {
            context: context(&unique()),
            user_id: "ann".into(),
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let amend = AmendOrderRequest {
        context: context(&unique()),
        order_id: placed.order_id.clone(),
        price: decimal("11"),
        quantity: None,
        new_client_order_id: String::new(),
    };
    let foreign = mixed.amend_order(amend).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let open = OpenTradingHoldRequest {
        context: context(&unique()),
        user_id: "ann".into(),
        instrument_id: "CFA-RUB".into(),
        amount: decimal("1"),
    };
    let foreign = mixed.open_trading_hold(open).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    assert!(world.trading_holds("ann").await.is_empty());
    let hold = world.open_hold("ann", "CFA-RUB", "10").await;
    let close = CloseTradingHoldRequest {
        context: context(&unique()),
        hold_id: hold.hold_id.clone(),
    };
    let foreign = mixed.close_trading_hold(close).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    assert_eq!(world.trading_holds("ann").await, [hold]);
    // Without a reading role also reads are refused.
    let mut stranger = world.trader("mallory");
    let of_ann = ListTradingHoldsRequest {
        user_id: "ann".into(),
        ..Default::default()
    };
    let foreign = stranger.list_trading_holds(of_ann).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    let of_ann = GetPositionRequest {
        context: None,
        user_id: "ann".into(),
        instrument_id: BOND.into(),
    };
    let foreign = stranger.get_position(of_ann).await.unwrap_err();
    assert_eq!(foreign.code(), Code::PermissionDenied);
    // The role auditor permits the read.
    let request = GetOrderRequest {
        context: None,
        order_id: placed.order_id.clone(),
    };
    let read = mixed.get_order(request).await.unwrap().into_inner();
    assert_eq!(read.order.unwrap(), placed, "nothing has changed it");
    let mut own = world.as_caller("sandbox.auditor+investor.ann");
    let cancelled = own
        .cancel_order(CancelOrderRequest {
            context: context(&unique()),
            order_id: placed.order_id,
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(cancelled.order.unwrap().status(), OrderStatus::Cancelled);
    world.stop().await;
}

// rows: R143 R173 R328
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
    // The better offer trades first, although the other one is older. The rest of the order goes on
    // to the next price.
    world.place(sell("ann", "51.50", "2")).await.unwrap();
    world.place(sell("ann", "50", "1")).await.unwrap();
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
        ("3", "51")
    );
    let trades = world.trades("bob").await;
    let fills = trades.iter().rev();
    let fills = fills.map(|trade| (text(&trade.price), text(&trade.quantity)));
    let fills: Vec<_> = fills.collect();
    assert_eq!(fills, [("50.00", "1"), ("51.50", "2")]);
    assert_eq!(
        text(&part.price),
        "52.50",
        "the protection price: best offer and collar"
    );
    // A market order has ended before a change of it can arrive (T22).
    let amend = AmendOrderRequest {
        context: context(&unique()),
        order_id: part.order_id.clone(),
        price: decimal("60"),
        quantity: None,
        new_client_order_id: String::new(),
    };
    let refusal = refused(world.trader("bob").amend_order(amend).await.unwrap_err());
    assert_eq!(refusal.2, "ORDER_NOT_OPEN");
    assert_eq!(world.order(&part.order_id).await.unwrap(), part);
    assert_eq!(world.book().await, (vec![], vec![]));
    world.settled().await;
    assert_eq!(
        world.balance("bob", "CFA-RUB").await,
        ("846.85".into(), "0.00".into(), "846.85".into())
    );
    world.stop().await;
}

/// D38: where two orders of a user meet, the mode of the incoming one decides, by call and by
/// session. Nothing trades.
#[tokio::test]
async fn d38_the_incoming_orders_mode_decides_by_call_and_by_session() {
    let folder = tempfile::tempdir().unwrap();
    let world = crate::sessions::members(folder.path(), Settings::default()).await;
    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    // Quantities of a resting sell of 5 and of an incoming buy of 8 afterwards; `None` = cancelled.
    let cases = [
        (
            SelfTradePrevention::CancelNewest,
            StpMode::CancelNewest,
            [Some("5"), None],
        ),
        (
            SelfTradePrevention::CancelOldest,
            StpMode::CancelOldest,
            [None, Some("8")],
        ),
        (
            SelfTradePrevention::CancelBoth,
            StpMode::CancelBoth,
            [None, None],
        ),
        (
            SelfTradePrevention::Decrement,
            StpMode::Decrement,
            [None, Some("3")],
        ),
    ];
    for (client_order_id, (by_call, by_session, left)) in (1..).zip(cases) {
        for is_call in [true, false] {
            let resting = world.place(sell("bob", "10", "5")).await.unwrap().order_id;
            let incoming = if is_call {
                let order = Order {
                    self_trade_prevention: by_call.into(),
                    ..buy("bob", "10", "8")
                };
                world.place(order).await.unwrap().order_id
            } else {
                let order = wire::NewOrder {
                    stp: by_session,
                    ..wire_order(client_order_id, Side::Buy, 1_000, 8)
                };
                bob.send(0, order).await.unwrap();
                until(&mut of_bob, ack).await.order_id.to_string()
            };
            for (order_id, left) in [&resting, &incoming].into_iter().zip(left) {
                let order = world.order(order_id).await.unwrap();
                let expected = match left {
                    Some(_) => (OrderStatus::Open, ""),
                    None => (OrderStatus::Cancelled, "SELF_TRADE"),
                };
                let found = (order.status(), order.cancel_reason.as_str());
                assert_eq!(found, expected, "{by_session}, by call: {is_call}");
                if let Some(quantity) = left {
                    assert_eq!(text(&order.quantity), quantity);
                    world.cancel("bob", order_id).await.unwrap();
                }
            }
        }
    }
    assert_eq!(world.trades("bob").await, []);
    world.stop().await;
}

/// The hold of a market order covers the far limit of the band if the balance suffices. Admission
/// then alone decides the price. Settlement releases the rest.
#[tokio::test]
async fn t19_a_market_orders_own_hold_covers_the_band() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(Registry::default());
    let (low, high) = (decimal("1"), decimal("100"));
    registry.list(Instrument {
        price_band_low: low,
        price_band_high: high,
        ..bond(BOND)
    });
    let settings = Settings::default();
    let mut world = World::start(folder.path(), settings, Arc::default(), registry).await;
    world.user("ann", "0", "10").await;
    world.user("bob", "301", "0").await;
    world.place(sell("ann", "50", "4")).await.unwrap();
    let market = |quantity: &str| Order {
        r#type: OrderType::Market.into(),
        time_in_force: 0,
        price: None,
        ..limit("bob", OrderSide::Buy, "1", quantity)
    };
    let bought = world.place(market("2")).await.unwrap();
    assert_eq!(bought.status(), OrderStatus::Filled);
    world.settled().await;
    let holds = world.holds("bob", "CFA-RUB").await;
    let own = holds
        .iter()
        .find(|hold| hold.reason.starts_with("Order of"));
    let amount = own.unwrap().amount.clone().unwrap().amount;
    assert_eq!(text(&amount), "200.20", "two at 100 and the fee");
    let left = ("200.90".into(), "0.00".into(), "200.90".into());
    assert_eq!(world.balance("bob", "CFA-RUB").await, left);
    // The balance covers three at 52.50, but not three at 100.
    let part = world.place(market("3")).await.unwrap();
    assert_eq!(part.cancel_reason, "IOC_REMAINDER");
    assert_eq!(text(&part.filled_quantity), "2");
    world.settled().await;
    world.stop().await;
}

// rows: R324
#[tokio::test]
async fn r324_an_orders_status_moves_as_specified() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "0", "100").await;
    world.user("bob", "10000", "0").await;
    let status = async |world: &World, order: &Order| {
        let order = world.order(&order.order_id).await.unwrap();
        (order.status(), text(&order.filled_quantity).to_owned())
    };
    let moved = |status: OrderStatus, filled: &str| (status, filled.to_owned());
    // OPEN -> PARTIALLY_FILLED -> FILLED.
    let filled = world.place(sell("ann", "10", "3")).await.unwrap();
    assert_eq!(status(&world, &filled).await, moved(OrderStatus::Open, "0"));
    world.place(buy("bob", "10", "1")).await.unwrap();
    assert_eq!(
        status(&world, &filled).await,
        moved(OrderStatus::PartiallyFilled, "1")
    );
    world.place(buy("bob", "10", "2")).await.unwrap();
    assert_eq!(
        status(&world, &filled).await,
        moved(OrderStatus::Filled, "3")
    );
    // OPEN -> CANCELLED and PARTIALLY_FILLED -> CANCELLED. The latter keeps the filled quantity and
    // the average price.
    let untouched = world.place(sell("ann", "11", "3")).await.unwrap();
    world.cancel("ann", &untouched.order_id).await.unwrap();
    assert_eq!(
        status(&world, &untouched).await,
        moved(OrderStatus::Cancelled, "0")
    );
    let touched = world.place(sell("ann", "12", "3")).await.unwrap();
    world.place(buy("bob", "12", "1")).await.unwrap();
    world.cancel("ann", &touched.order_id).await.unwrap();
    assert_eq!(
        status(&world, &touched).await,
        moved(OrderStatus::Cancelled, "1")
    );
    let kept = world.order(&touched.order_id).await.unwrap();
    assert_eq!(text(&kept.average_price), "12");
    // Directly to a final status: FILLED, CANCELLED, REJECTED.
    world.place(sell("ann", "10", "1")).await.unwrap();
    let taker = world.place(buy("bob", "10", "1")).await.unwrap();
    assert_eq!(
        status(&world, &taker).await,
        moved(OrderStatus::Filled, "1")
    );
    let mut hasty = buy("bob", "9", "1");
    hasty.set_time_in_force(TimeInForce::Ioc);
    let hasty = world.place(hasty).await.unwrap();
    assert_eq!(
        (hasty.status(), hasty.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "IOC_REMAINDER")
    );
    let outside = world.place(buy("bob", "0.50", "1")).await.unwrap();
    assert_eq!(outside.status(), OrderStatus::Rejected);
    // A final status never changes.
    for (ended, owner) in [
        (&filled, "ann"),
        (&untouched, "ann"),
        (&touched, "ann"),
        (&taker, "bob"),
        (&hasty, "bob"),
        (&outside, "bob"),
    ] {
        let before = status(&world, ended).await;
        let refusal = refused(world.cancel(owner, &ended.order_id).await.unwrap_err());
        assert_eq!(refusal.2, "ORDER_NOT_OPEN");
        assert_eq!(status(&world, ended).await, before);
    }
    world.stop().await;
}

// rows: R324
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
    // Halting takes one person, lifting the halt two (D32).
    let alone = supervisor
        .set_trading_phase(phase(TradingPhase::Open))
        .await
        .unwrap_err();
    assert_eq!(
        rpc::status::reason(&alone).as_deref(),
        Some("APPROVAL_REQUIRED")
    );
    assert_eq!(
        world.status().await.instruments[0].phase(),
        TradingPhase::Halt
    );
    world
        .approved()
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
    // The phase survives a restart.
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
