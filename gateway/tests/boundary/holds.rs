//! Trading holds: open, draw, resize, close. Holds that the ledger releases, blocks of the user,
//! and the sweeper's repairs.

use prost::Message;
use proto::ledger::v1 as books;
use proto::market::v1::*;
use tonic::Code;
use types::{RejectReason, Sequence, Side};
use wire::ServerMessage;

use crate::doubles::ReleaseLatch;
use crate::world::*;

/// Sets an instrument to matured in the registry, and publishes the change.
pub async fn mature(world: &World, instrument_id: &str) {
    world.registry.list(proto::cfa::v1::Instrument {
        status: proto::cfa::v1::InstrumentStatus::Matured.into(),
        ..bond(instrument_id)
    });
    let updated = proto::cfa::v1::InstrumentUpdatedEvent {
        context: context("u"),
        instrument_id: instrument_id.to_owned(),
        ..Default::default()
    };
    let type_name = "dfa.cfa.v1.InstrumentUpdatedEvent";
    let payload = updated.encode_to_vec();
    publish(world, events::topics::CFA, "k", type_name, payload).await;
}

fn figures(hold: &TradingHold) -> (String, String) {
    let text = |value: &Option<proto::common::v1::Decimal>| value.clone().unwrap().value;
    (text(&hold.undrawn), text(&hold.drawn))
}

async fn adjust(
    world: &World,
    user: &str,
    hold_id: &str,
    undrawn: &str,
) -> Result<TradingHold, tonic::Status> {
    let request = AdjustTradingHoldRequest {
        context: context(&unique()),
        hold_id: hold_id.into(),
        undrawn: decimal(undrawn),
    };
    let answer = world.trader(user).adjust_trading_hold(request).await?;
    Ok(answer.into_inner().trading_hold.unwrap())
}

async fn close(world: &World, user: &str, hold_id: &str) -> Result<TradingHold, tonic::Status> {
    let request = CloseTradingHoldRequest {
        context: context(&unique()),
        hold_id: hold_id.into(),
    };
    let answer = world.trader(user).close_trading_hold(request).await?;
    Ok(answer.into_inner().trading_hold.unwrap())
}

/// Creates a hold of the market that the journal does not know, as a crash leaves it.
async fn ledger_hold(
    world: &mut World,
    (user_id, instrument_id): (&str, &str),
    amount: &str,
    reason: &str,
) -> String {
    let hold = books::Hold {
        hold_id: unique(),
        subaccount_id: format!("{user_id}:{instrument_id}"),
        amount: Some(proto::common::v1::MonetaryAmount {
            currency_code: instrument_id.into(),
            amount: decimal(amount),
        }),
        reason: reason.into(),
        owner: "market".into(),
        ..Default::default()
    };
    let request = books::CreateHoldRequest {
        context: context(&unique()),
        hold: Some(hold),
    };
    let created = world.ledger.create_hold(request).await.unwrap();
    created.into_inner().hold.unwrap().hold_id
}

/// Waits until `amount` of ann's money is on hold in the ledger.
async fn until_held(world: &mut World, amount: &str) {
    let what = format!("the ledger holds {amount}");
    until_true(&what, async || {
        world.balance("ann", "CFA-RUB").await.1 == amount
    })
    .await;
}

// rows: R160
#[tokio::test]
async fn t49_defunded_money_is_released_after_settlement() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings {
        linger_ms: 1_000,
        ..Settings::default()
    };
    settings.gateway.release_wait_ms = 0;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "10").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    world.open_hold("bob", BOND, "10").await;
    world.settled().await;
    world.place(sell("bob", "10", "10")).await.unwrap();
    world.place(buy("ann", "10", "10")).await.unwrap();
    // The trade is not posted yet: the ledger's hold still includes its 100.10.
    let less = adjust(&world, "ann", &hold.hold_id, "100").await.unwrap();
    assert_eq!(figures(&less), ("100.00".into(), "0.00".into()));
    let id = types::Id128::parse(&hold.hold_id).unwrap();
    let replica = world.replica();
    let taken_at = replica.read(|state| state.hold_of(id).unwrap().taken_at);
    assert!(taken_at > Sequence::ZERO);
    until_held(&mut world, "100.00").await;
    let known = replica.settlement();
    assert!(known.posted >= taken_at, "{known:?} before {taken_at}");
    world.settled().await;
    let trade = world.trades("ann").await.remove(0);
    assert_eq!(trade.settlement_status(), SettlementStatus::Settled);
    world.stop().await;
}

// rows: R160
#[tokio::test]
async fn t49_a_trading_hold_is_opened_drawn_on_resized_and_closed() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    assert_eq!(hold.status(), TradingHoldStatus::Open);
    assert_eq!(hold.subaccount_id, "ann:CFA-RUB");
    assert_eq!(figures(&hold), ("600.00".into(), "0.00".into()));
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "600.00");
    let reason = &world.holds("ann", "CFA-RUB").await[0].reason;
    assert_eq!(*reason, format!("Trading hold {}", hold.hold_id));
    // A repeat of the call returns the same hold. A second hold is refused.
    assert_eq!(world.open_hold("ann", "CFA-RUB", "600").await, hold);
    let second = OpenTradingHoldRequest {
        context: context(&unique()),
        user_id: "ann".into(),
        instrument_id: "CFA-RUB".into(),
        amount: decimal("1"),
    };
    let refusal = world
        .trader("ann")
        .open_trading_hold(second)
        .await
        .unwrap_err();
    assert_eq!(refusal.code(), Code::AlreadyExists);

    world.identity.take_limit_checks();
    let order = world.place(buy("ann", "10", "50")).await.unwrap();
    assert_eq!(order.status(), OrderStatus::Open);
    let listed = world.trading_holds("ann").await;
    assert_eq!(
        figures(&listed[0]),
        ("99.50".into(), "500.50".into()),
        "the order draws its value and fee in memory"
    );
    assert_eq!(
        world.balance("ann", "CFA-RUB").await.1,
        "600.00",
        "the ledger's hold is unchanged"
    );

    // The trading hold does not cover this order, so it gets its own hold of available money.
    let own = world.place(buy("ann", "10", "30")).await.unwrap();
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "900.30");
    world.cancel("ann", &own.order_id).await.unwrap();

    // Only the undrawn amount can be reduced. A close is refused while orders are open.
    let less = adjust(&world, "ann", &hold.hold_id, "20").await.unwrap();
    assert_eq!(figures(&less), ("20.00".into(), "500.50".into()));
    world.settled().await;
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "520.50");
    let in_use = refused(close(&world, "ann", &hold.hold_id).await.unwrap_err());
    assert_eq!(
        in_use,
        (
            Code::FailedPrecondition,
            "Hold is in use".into(),
            "HOLD_IN_USE".into()
        )
    );
    let more = adjust(&world, "ann", &hold.hold_id, "100").await.unwrap();
    assert_eq!(figures(&more), ("100.00".into(), "500.50".into()));
    let too_much = refused(
        adjust(&world, "ann", &hold.hold_id, "5000")
            .await
            .unwrap_err(),
    );
    assert_eq!(too_much.1, "Insufficient balance");
    assert_eq!(
        adjust(&world, "bob", &hold.hold_id, "1")
            .await
            .unwrap_err()
            .code(),
        Code::PermissionDenied
    );
    assert_eq!(
        refused(adjust(&world, "ann", &unique(), "1").await.unwrap_err()).1,
        "Hold not found"
    );
    // The hold survives a restart.
    let mut world = world.restart(Settings::default()).await;
    let listed = world.trading_holds("ann").await;
    assert_eq!(figures(&listed[0]), ("100.00".into(), "500.50".into()));
    world.cancel("ann", &order.order_id).await.unwrap();
    let closed = close(&world, "ann", &hold.hold_id).await.unwrap();
    assert_eq!(closed.status(), TradingHoldStatus::Closed);
    world.settled().await;
    assert_eq!(
        world.balance("ann", "CFA-RUB").await,
        ("1000.00".into(), "0.00".into(), "1000.00".into())
    );
    world.stop().await;
}

/// Releases of a hold are serialized. One that waits for the ledger delays no release of another
/// hold.
#[tokio::test]
async fn a_release_that_waits_for_the_ledger_delays_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let latch = ReleaseLatch::default();
    let mut settings = Settings {
        release_latch: latch.clone(),
        ..Settings::default()
    };
    settings.gateway.release_wait_ms = 0;
    let mut world = World::with(folder.path(), settings).await;
    for user in ["ann", "bob"] {
        world.user(user, "1000", "0").await;
        world.open_hold(user, "CFA-RUB", "600").await;
    }
    let of_ann = world.trading_holds("ann").await.remove(0).hold_id;
    let of_bob = world.trading_holds("bob").await.remove(0).hold_id;
    let opened = latch.block(&of_ann);
    close(&world, "ann", &of_ann).await.unwrap();
    until_true("ann's release waits", async || latch.calls() > 0).await;
    close(&world, "bob", &of_bob).await.unwrap();
    until_true("bob's money is available", async || {
        world.balance("bob", "CFA-RUB").await.1 == "0.00"
    })
    .await;
    // The market makes three attempts, 10 s each. With one lock for all holds bob's release would
    // wait for the end of the last one.
    assert!(latch.calls() < 3, "bob's release waited for ann's");
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "600.00");
    opened.close();
    until_held(&mut world, "0.00").await;
    world.stop().await;
}

// rows: R158
#[tokio::test]
async fn r158_orders_of_a_hold_released_outside_are_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    let order = world.place(buy("ann", "10", "1")).await.unwrap();
    let release = books::ReleaseHoldRequest {
        context: context(&unique()),
        hold_id: hold.hold_id.clone(),
        reason: "by hand".into(),
    };
    world.ledger.release_hold(release).await.unwrap();
    world.until_ended(&order).await;
    let cancelled = world.order(&order.order_id).await.unwrap();
    assert_eq!(
        (cancelled.status(), cancelled.cancel_reason.as_str()),
        (OrderStatus::Cancelled, "HOLD_RELEASED")
    );
    world.stop().await;
}

/// D28: an order is cancelled if another service ends its hold, whatever the correlation id of the
/// event. An event under the key of another user's sub-account cancels no order.
// rows: R158 R338
#[tokio::test]
async fn r338_hold_events_end_the_orders_of_their_hold_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unsettled()).await;
    world.user("ann", "1000", "0").await;
    let (mut orders, mut holds) = (Vec::new(), Vec::new());
    for key in ["stays", "expires", "is consumed", "is released"] {
        let placed = world.place_with("ann", key, buy("ann", "10", "1")).await;
        orders.push(placed.unwrap().order_id);
        let reason = format!("Order of request {key}");
        let mut own = world.holds("ann", "CFA-RUB").await;
        own.retain(|hold| hold.reason == reason);
        assert_eq!(own.len(), 1, "{key}");
        holds.push(own.remove(0).hold_id);
    }
    let created = |hold_id: &str| {
        let event = books::HoldCreatedEvent {
            hold_id: hold_id.into(),
            ..Default::default()
        };
        ("HoldCreatedEvent", event.encode_to_vec())
    };
    let released = |hold_id: &str, reason: &str| {
        let event = books::HoldReleasedEvent {
            hold_id: hold_id.into(),
            reason: reason.into(),
            ..Default::default()
        };
        ("HoldReleasedEvent", event.encode_to_vec())
    };
    let consumed = |hold_id: &str| {
        let event = books::HoldConsumedEvent {
            hold_id: hold_id.into(),
            ..Default::default()
        };
        ("HoldConsumedEvent", event.encode_to_vec())
    };
    // Events are handled in this order, so the last one is awaited.
    let (own, other) = ("ann:CFA-RUB", "bob:CFA-RUB");
    for (key, (name, payload)) in [
        (own, created(&holds[0])),
        (other, released(&holds[0], "by hand")),
        (other, consumed(&holds[0])),
        (own, released(&unique(), "by hand")),
        (own, consumed("no uuid")),
        (own, released(&holds[1], "Expired")),
        (own, consumed(&holds[2])),
        (own, released(&holds[3], "by hand")),
    ] {
        let name = format!("dfa.ledger.v1.{name}");
        let mut event = event(events::topics::LEDGER, key, &name, payload);
        // Of the form that settlement uses. Callers of the ledger choose it.
        event.correlation_id = "settlement:1:final:1:1".into();
        world.log.publish(&[event]).await.unwrap();
    }
    let mut ended = Vec::new();
    until_true("the last order is cancelled", async || {
        ended.clear();
        for order_id in &orders {
            let order = world.order(order_id).await.unwrap();
            ended.push((order.status(), order.cancel_reason));
        }
        ended[3].0 == OrderStatus::Cancelled
    })
    .await;
    let cancelled = |reason: &str| (OrderStatus::Cancelled, reason.to_owned());
    let expected = [
        (OrderStatus::Open, String::new()),
        cancelled("HOLD_EXPIRED"),
        cancelled("HOLD_RELEASED"),
        cancelled("HOLD_RELEASED"),
    ];
    assert_eq!(ended, expected);
    world.stop().await;
}

/// When an order with a hold of its own has ended, admission's row of the hold keeps money that the
/// ledger has released. No order draws on it: neither another call, nor a session, nor a repeat of
/// the call.
#[tokio::test]
async fn no_order_draws_on_the_kept_amount_of_an_own_hold() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let order = || buy("ann", "10", "50");
    let own = world.place_with("ann", "k", order()).await.unwrap();
    let own = world.cancel("ann", &own.order_id).await.unwrap();
    world.settled().await;
    until_held(&mut world, "0.00").await;
    let kept = world.replica().read(|state| {
        let holds = state.core().admission().holds();
        holds.map(|(_, hold)| hold.undrawn.0).collect::<Vec<_>>()
    });
    assert_eq!(kept, [50_050], "500.00 and the fee");
    assert_eq!(world.trading_holds("ann").await, []);
    // Another hold blocks all of the user's money.
    ledger_hold(&mut world, ("ann", "CFA-RUB"), "1000", "by hand").await;
    let refusal = refused(world.place(buy("ann", "10", "1")).await.unwrap_err());
    assert_eq!(refusal.1, "Insufficient balance");
    let (session, mut reports) = world.session(login("ann", "a")).await;
    session
        .send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let refusal = until(&mut reports, rejected).await;
    assert_eq!(refusal.reason, RejectReason::NoTradingHold);
    let repeated = world.place_with("ann", "k", order()).await.unwrap();
    assert_eq!(repeated, own);
    world.stop().await;
}

#[tokio::test]
async fn t48_a_blocked_user_loses_its_orders_and_its_holds_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.open_hold("ann", "CFA-RUB", "600").await;
    let order = world.place(buy("ann", "10", "50")).await.unwrap();
    world.identity.upsert_user("ann", |ann| {
        ann.status = proto::identity::v1::UserStatus::Blocked
    });
    let blocked = proto::identity::v1::UserBlockedEvent {
        context: context("b"),
        user_id: "ann".into(),
        reason: "court".into(),
        at: None,
    };
    publish(
        &world,
        events::topics::IDENTITY,
        "ann",
        "dfa.identity.v1.UserBlockedEvent",
        blocked.encode_to_vec(),
    )
    .await;
    world.until_ended(&order).await;
    assert_eq!(
        world.order(&order.order_id).await.unwrap().cancel_reason,
        "USER_BLOCKED"
    );
    let refusal = refused(world.place(buy("ann", "10", "1")).await.unwrap_err());
    assert_eq!(
        (refusal.1.as_str(), refusal.2.as_str()),
        ("User is blocked", "USER_BLOCKED")
    );
    until_held(&mut world, "0.00").await;
    world.stop().await;
}

#[tokio::test]
async fn the_sweeper_repairs_what_a_crash_left_between_ledger_and_journal() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.orphan_hold_age_ms = 0;
    settings.gateway.sweep_interval_ms = 3_600_000;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    let mut orphan = async |reason: &str, amount: &str| {
        ledger_hold(&mut world, ("ann", "CFA-RUB"), amount, reason).await
    };
    let of_order = orphan("Order of request k", "100").await;
    let trading = orphan("Trading hold t", "300").await;
    world.gateway.sweep().await.unwrap();
    world.settled().await;
    world.gateway.sweep().await.unwrap();
    // The order's money is available again. The trading hold is adopted.
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "300.00");
    let holds = world.holds("ann", "CFA-RUB").await;
    let status = |id: &str| {
        holds
            .iter()
            .find(|hold| hold.hold_id == id)
            .unwrap()
            .status()
    };
    assert_eq!(status(&of_order), books::HoldStatus::Released);
    assert_eq!(status(&trading), books::HoldStatus::Active);
    let listed = world.trading_holds("ann").await;
    assert_eq!(
        (listed.len(), listed[0].hold_id.as_str()),
        (1, trading.as_str())
    );
    assert_eq!(figures(&listed[0]).0, "300.00");

    // The ledger's hold grows without a record in the journal.
    let grow = books::CreateOperationsRequest {
        context: context(&unique()),
        hold_steps: vec![books::HoldStep {
            step: Some(books::hold_step::Step::Grow(books::GrowHold {
                hold_id: trading.clone(),
                amount: Some(proto::common::v1::MonetaryAmount {
                    currency_code: "CFA-RUB".into(),
                    amount: decimal("50"),
                }),
            })),
            before_operation: 0,
        }],
        ..Default::default()
    };
    world.ledger.create_operations(grow).await.unwrap();
    world.gateway.sweep().await.unwrap();
    let listed = world.trading_holds("ann").await;
    assert_eq!(figures(&listed[0]).0, "350.00");
    world.stop().await;
}

#[tokio::test]
async fn t12_a_late_repeat_of_an_adjustment_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let hold = world.open_hold("ann", "CFA-RUB", "600").await;
    let set = async |key: &str, undrawn: &str| {
        let request = AdjustTradingHoldRequest {
            context: context(key),
            hold_id: hold.hold_id.clone(),
            undrawn: decimal(undrawn),
        };
        let mut market = world.trader("ann");
        let answer = market.adjust_trading_hold(request).await.unwrap();
        let replayed = answer.metadata().contains_key("idempotent-replayed");
        (
            figures(&answer.into_inner().trading_hold.unwrap()).0,
            replayed,
        )
    };
    // The first call shrinks the hold, the second grows it, the third changes nothing.
    for (key, target) in [("a", "10"), ("b", "50"), ("c", "50")] {
        assert_eq!(set(key, target).await, (format!("{target}.00"), false));
    }
    assert_eq!(set("d", "70").await, ("70.00".into(), false));
    for key in ["a", "b", "c"] {
        assert_eq!(set(key, "10").await, ("70.00".into(), true), "{key}");
    }
    // A service takes out of the hold, for a redemption, and adds nothing to it.
    let mut service = world.as_caller("sandbox.service");
    let mut set = async |undrawn: &str| {
        let request = AdjustTradingHoldRequest {
            context: context(&unique()),
            hold_id: hold.hold_id.clone(),
            undrawn: decimal(undrawn),
        };
        let answer = service.adjust_trading_hold(request).await?.into_inner();
        Ok::<_, tonic::Status>(figures(&answer.trading_hold.unwrap()).0)
    };
    assert_eq!(set("60").await.unwrap(), "60.00");
    assert_eq!(set("61").await.unwrap_err().message(), "Hold is in use");
    world.stop().await;
}

#[tokio::test]
async fn orders_at_the_same_time_share_what_the_trading_hold_can_spare() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1400", "0").await;
    world.open_hold("ann", "CFA-RUB", "600").await;
    // 650.65 each, not covered by the trading hold. One order uses available money, the other also
    // needs a part of the trading hold.
    let (first, second) = tokio::join!(
        world.place(buy("ann", "650", "1")),
        world.place(buy("ann", "650", "1"))
    );
    assert_eq!(first.unwrap().status(), OrderStatus::Open);
    assert_eq!(second.unwrap().status(), OrderStatus::Open);
    // The remaining 98.70 do not cover 99.10.
    let refusal = refused(world.place(buy("ann", "99", "1")).await.unwrap_err());
    assert_eq!(refusal.1, "Insufficient balance");
    world.stop().await;
}

#[tokio::test]
async fn t49_an_abandoned_trading_hold_is_closed_unless_its_user_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.trading_hold_idle_ms = 1;
    settings.gateway.sweep_interval_ms = 3_600_000;
    let mut world = World::with(folder.path(), settings).await;
    for user in ["ann", "bob"] {
        world.user(user, "1000", "0").await;
        world.open_hold(user, "CFA-RUB", "600").await;
    }
    // Bob never had a session and manages its hold by call.
    let (ann, mut reports) = world.session(login("ann", "a")).await;
    world.gateway.sweep().await.unwrap();
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "600.00");
    ann.send(0, wire::Logout {}).await.unwrap();
    until(&mut reports, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    })
    .await;
    until_true("the sweeper closes ann's hold", async || {
        world.gateway.sweep().await.unwrap();
        world.settled().await;
        world.balance("ann", "CFA-RUB").await.1 == "0.00"
    })
    .await;
    assert_eq!(world.balance("bob", "CFA-RUB").await.1, "600.00");
    world.stop().await;
}

#[tokio::test]
async fn t48_a_user_blocked_before_its_first_order_stays_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    // Identity's event precedes the change of its answers.
    let blocked = proto::identity::v1::UserBlockedEvent {
        context: context("b"),
        user_id: "ann".into(),
        reason: "court".into(),
        at: None,
    };
    let before = world.status().await.commit_sequence;
    publish(
        &world,
        events::topics::IDENTITY,
        "ann",
        "dfa.identity.v1.UserBlockedEvent",
        blocked.encode_to_vec(),
    )
    .await;
    // The journal has the binding and the block of the user.
    until_true("the block is journalled", async || {
        world.status().await.commit_sequence >= before + 2
    })
    .await;
    let (ann, mut reports) = world.session(login("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let reason = until(&mut reports, |m| match m {
        ServerMessage::Rejected(rejected) => Some(rejected.reason),
        _ => None,
    });
    assert_eq!(reason.await, RejectReason::UserBlocked);
    world.stop().await;
}

/// Money enters a hold only up to the rest of the year's purchases, unless its user is a qualified
/// investor (F35).
// rows: R340
#[tokio::test]
async fn f35_money_for_purchases_stays_within_the_rest_of_the_yearly_limit() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "10").await;
    world.user("bob", "1000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.investment_remaining_minor = Some(50_000));
    let open = async |world: &World, amount: &str| {
        let request = OpenTradingHoldRequest {
            context: context(&unique()),
            user_id: "ann".into(),
            instrument_id: "CFA-RUB".into(),
            amount: decimal(amount),
        };
        let opened = world.trader("ann").open_trading_hold(request).await;
        opened.map(|answer| answer.into_inner().trading_hold.unwrap())
    };
    let exceeded = |refused: tonic::Status| {
        assert_eq!(refused.code(), Code::FailedPrecondition);
        let reason = rpc::status::reason(&refused);
        assert_eq!(reason.as_deref(), Some("LIMIT_EXCEEDED"));
        assert!(refused.message().starts_with("Yearly investment limit"));
    };
    exceeded(open(&world, "500.01").await.unwrap_err());
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "0.00");
    let hold = open(&world, "300").await.unwrap();
    let above = adjust(&world, "ann", &hold.hold_id, "500.01").await;
    exceeded(above.unwrap_err());
    adjust(&world, "ann", &hold.hold_id, "400").await.unwrap();
    // The own hold of an order counts together with the trading hold.
    let order = world.place(buy("ann", "10", "50")).await;
    exceeded(order.unwrap_err());
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "400.00");
    world.place(buy("ann", "10", "30")).await.unwrap();
    // Units to sell and the money of a qualified investor have no such limit.
    world.open_hold("ann", BOND, "10").await;
    world.open_hold("bob", "CFA-RUB", "900").await;
    world.stop().await;
}

/// Units in a hold would have to be released before the redemption of their issue.
// rows: R097 R102
#[tokio::test]
async fn r102_no_units_of_a_matured_issue_enter_a_trading_hold() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.orphan_hold_age_ms = 0;
    settings.gateway.sweep_interval_ms = 3_600_000;
    let mut world = World::with(folder.path(), settings).await;
    for user in ["ann", "bob", "cid"] {
        world.user(user, "1000", "10").await;
    }
    let hold = world.open_hold("ann", BOND, "4").await;
    mature(&world, BOND).await;
    let replica = world.replica();
    until_true("the market knows of the maturity", async || {
        let spec = replica.names().find_instrument(types::InstrumentIx(0));
        spec.is_some_and(|spec| spec.phase == types::Phase::Matured)
    })
    .await;

    let matured = (
        Code::FailedPrecondition,
        "Instrument is not traded now".to_owned(),
        "INSTRUMENT_MATURED".to_owned(),
    );
    let open = OpenTradingHoldRequest {
        context: context(&unique()),
        user_id: "bob".into(),
        instrument_id: BOND.into(),
        amount: decimal("1"),
    };
    let opened = world.trader("bob").open_trading_hold(open).await;
    assert_eq!(refused(opened.unwrap_err()), matured);
    assert_eq!(world.balance("bob", BOND).await.2, "10");
    let more = adjust(&world, "ann", &hold.hold_id, "5").await;
    assert_eq!(refused(more.unwrap_err()), matured);
    let (session, mut reports) = world.session(login("ann", "a")).await;
    let more = wire::SetTradingHold {
        request_id: 1,
        asset: 1,
        undrawn_minor: 1_000,
    };
    session.send(0, more).await.unwrap();
    let answer = loop {
        if let ServerMessage::TradingHold(answer) = next_report(&mut reports).await.message {
            break answer;
        }
    };
    let reason = RejectReason::InstrumentMatured;
    assert_eq!(answer.outcome, reason.code());
    // A repeat of the call that opened the hold returns it. Less is never refused.
    world.open_hold("ann", BOND, "4").await;
    let less = adjust(&world, "ann", &hold.hold_id, "1").await.unwrap();
    assert_eq!(figures(&less).0, "1");
    let closed = close(&world, "ann", &hold.hold_id).await.unwrap();
    assert_eq!(closed.status(), TradingHoldStatus::Closed);
    world.settled().await;
    assert_eq!(world.balance("ann", BOND).await.2, "10");
    // Money may be held as before.
    world.open_hold("bob", "CFA-RUB", "100").await;

    // The hold of a call that a crash interrupted is released.
    ledger_hold(&mut world, ("cid", BOND), "3", "Trading hold t").await;
    assert_eq!(world.balance("cid", BOND).await.2, "7");
    world.gateway.sweep().await.unwrap();
    world.settled().await;
    world.gateway.sweep().await.unwrap();
    assert_eq!(world.balance("cid", BOND).await.2, "10");
    assert!(world.trading_holds("cid").await.is_empty());
    world.stop().await;
}
