//! Changes of orders while the history cannot write. Open orders are read from the replica, changes
//! are executed and answered, and each answer equals a later read. While the replica lags, no
//! order is read, and the refusal contains the replica's lag.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use client::{Connection, Reports};
use journal::fault::MemoryStorage;
use proto::market::v1::*;
use sqlx::Connection as _;
use testkit::eventually;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use types::Side;
use wire::ServerMessage;

use crate::checkpoints::cancel_own;
use crate::entered::lock_database;
use crate::orders::text;
use crate::world::*;

/// Enters an order that the history has not seen. Returns its public id.
async fn enter(session: &mut (Connection, Reports), order: wire::NewOrder) -> String {
    session.0.send(0, order).await.unwrap();
    let ack = until(&mut session.1, |message| match message {
        ServerMessage::OrderAck(ack) => Some(*ack),
        _ => None,
    });
    ack.await.order_id.to_string()
}

fn amend(order_id: &str, price: Option<&str>, quantity: Option<&str>) -> AmendOrderRequest {
    AmendOrderRequest {
        context: context(&unique()),
        order_id: order_id.to_owned(),
        price: price.and_then(decimal),
        quantity: quantity.and_then(decimal),
        new_client_order_id: String::new(),
    }
}

async fn amend_order(world: &World, request: AmendOrderRequest) -> Result<Order, Status> {
    let answer = world.trader("ann").amend_order(request).await?;
    Ok(answer.into_inner().order.unwrap())
}

async fn cancel_order(world: &World, request: CancelOrderRequest) -> Result<Order, Status> {
    let answer = world.trader("ann").cancel_order(request).await?;
    Ok(answer.into_inner().order.unwrap())
}

/// Checks that the history has these orders: a list reads only the history.
async fn assert_listed(world: &World, orders: &[Order]) {
    let request = ListOrdersRequest::default();
    let listed = world.operator().list_orders(request).await.unwrap();
    let listed = listed.into_inner().orders;
    for order in orders {
        assert!(listed.contains(order), "{order:?} is not in {listed:?}");
    }
}

fn assert_history_behind(refusal: Status) {
    let (code, text, reason) = refused(refusal);
    let is_behind = (code, &*reason) == (Code::Unavailable, "HISTORY_BEHIND");
    assert!(is_behind, "{code:?} {reason}: {text}");
}

#[tokio::test]
async fn a_history_that_is_behind_delays_no_change_of_an_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unsettled();
    // Several calls wait for this long in vain. It is also the limit of every other access to the
    // store, so a thread that loses its core for a moment must not use it up.
    settings.gateway.read_wait_ms = 1_000;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "100").await;
    world.open_hold("bob", BOND, "100").await;
    let mut ann = world.session(with_money("ann", "a")).await;
    let mut bob = world.session(login("bob", "b")).await;
    let named = Order {
        client_order_id: "first".to_owned(),
        ..buy("ann", "6", "9")
    };
    let named = world.place(named).await.unwrap().order_id;

    let lock = lock_database(folder.path(), "gateway/market.db").await;
    let order = |id, price| wire_order(id, Side::Buy, price, 10);
    let first = enter(&mut ann, order(1, 900)).await;
    let second = enter(&mut ann, order(2, 1_000)).await;
    enter(&mut ann, order(3, 500)).await;
    let stays = enter(&mut bob, wire_order(21, Side::Sell, 2_000, 3)).await;
    enter(&mut bob, wire_order(22, Side::Sell, 1_000, 4)).await;
    let all = async {
        let mut orders = vec![world.order(&stays).await.unwrap()];
        let read = world.order(&second).await.unwrap();
        let filled = (read.status(), text(&read.filled_quantity));
        assert_eq!(filled, (OrderStatus::PartiallyFilled, "4"));
        assert_eq!((&*read.client_order_id, &*read.order_id), ("2", &*second));
        let foreign = world.cancel("bob", &first).await.unwrap_err();
        assert_eq!(foreign.code(), Code::PermissionDenied);

        let smaller = amend(&second, None, Some("6"));
        let answer = amend_order(&world, smaller.clone()).await.unwrap();
        assert_eq!(answer.status(), OrderStatus::PartiallyFilled);
        assert_eq!(world.order(&second).await.unwrap(), answer);
        assert_history_behind(amend_order(&world, smaller.clone()).await.unwrap_err());
        orders.push(
            amend_order(&world, amend(&named, None, Some("7")))
                .await
                .unwrap(),
        );
        assert_eq!(orders[1].client_order_id, "first");

        let end = CancelOrderRequest {
            context: context("end"),
            order_id: first.clone(),
        };
        let ended = cancel_order(&world, end.clone()).await.unwrap();
        let reason = (ended.status(), &*ended.cancel_reason);
        assert_eq!(reason, (OrderStatus::Cancelled, "USER_REQUEST"));
        assert_history_behind(cancel_order(&world, end.clone()).await.unwrap_err());
        orders.push(ended.clone());
        orders.push(world.cancel("ann", &second).await.unwrap());
        assert_eq!(text(&orders[3].filled_quantity), "4");
        // Without the history it is unknown whether this order was ever entered.
        assert_history_behind(world.cancel("ann", &unique()).await.unwrap_err());
        (orders, smaller, end, ended)
    };
    let (orders, smaller, end, ended) = in_time("changes are answered", all).await;
    let mass = MassCancelRequest {
        context: context("mass"),
        side: OrderSide::Buy.into(),
        ..MassCancelRequest::default()
    };
    // Bob engages a kill switch, which ends all of bob's orders.
    let switch = SetKillSwitchRequest {
        context: context("switch"),
        user_id: "bob".to_owned(),
        engaged: true,
        reason: "drill".to_owned(),
    };
    let all = async {
        let mass_cancelled = world.trader("ann").mass_cancel(mass.clone()).await;
        assert_eq!(mass_cancelled.unwrap().into_inner().cancelled, 2);
        let again = world.trader("ann").mass_cancel(mass.clone()).await;
        assert_history_behind(again.unwrap_err());
        let killed = world.trader("bob").set_kill_switch(switch).await;
        assert_eq!(killed.unwrap().into_inner().cancelled, 1);
    };
    in_time("mass cancels are answered", all).await;

    lock.close().await.unwrap();
    // A repeat does not act again and gets the order's current state. The first repeats may precede
    // the history's catch-up.
    let again = eventually(async || cancel_order(&world, end.clone()).await.ok()).await;
    assert_eq!(again, ended);
    let again = amend_order(&world, smaller).await.unwrap();
    assert_eq!(again.status(), OrderStatus::Cancelled);
    let again = world.trader("ann").mass_cancel(mass).await.unwrap();
    assert_eq!(again.into_inner().cancelled, 2);
    // The orders that were answered as open have ended by the mass cancel and the kill switch.
    let [stayed, renamed, ..] = &orders[..] else {
        panic!("{orders:?}")
    };
    for (order, reason) in [(stayed, "KILL_SWITCH"), (renamed, "MASS_CANCEL")] {
        let read = world.order(&order.order_id).await.unwrap();
        let unchanged = Order {
            status: OrderStatus::Cancelled.into(),
            cancel_reason: reason.to_owned(),
            updated_at: read.updated_at,
            ..order.clone()
        };
        assert_eq!(read, unchanged);
    }
    assert_listed(&world, &orders[2..]).await;
    world.stop().await;
}

/// Risk-reducing calls need no answer of identity, also of a member whose profile is not cached.
// rows: R339
#[tokio::test]
async fn r339_risk_is_reduced_while_identity_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let placed = world.place(buy("ann", "10", "5")).await.unwrap().order_id;
    let world = world.restart(Settings::default()).await;
    world.end_identity();
    let refusal = world.place(buy("ann", "10", "1")).await.unwrap_err();
    assert_eq!(refusal.code(), Code::Unavailable);
    let reduced = amend_order(&world, amend(&placed, None, Some("2"))).await;
    assert_eq!(text(&reduced.unwrap().quantity), "2");
    let grown = amend_order(&world, amend(&placed, None, Some("3"))).await;
    assert_eq!(grown.unwrap_err().code(), Code::Unavailable);
    let switch = |user: &str| SetKillSwitchRequest {
        context: context(&unique()),
        user_id: user.to_owned(),
        engaged: true,
        reason: "drill".to_owned(),
    };
    // An id that the market does not know may be mistyped.
    let unknown = world.operator().set_kill_switch(switch("ghost")).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unavailable);
    let killed = world.operator().set_kill_switch(switch("ann")).await;
    assert_eq!(killed.unwrap().into_inner().cancelled, 1);
    world.stop().await;
}

fn assert_replica_behind(refusal: &Status) {
    let info = StatusExt::get_details_error_info(refusal).unwrap();
    let is_behind = (refusal.code(), &*info.reason) == (Code::Unavailable, "REPLICA_BEHIND");
    assert!(is_behind, "{refusal:?}");
    let lag: u64 = info.metadata["lagRecords"].parse().unwrap();
    assert!(lag > 0, "{refusal:?}");
}

/// The replica cannot read the journal, so that the history lacks the records too. A call that
/// waited for the replica in vain does not wait for the history, and reports the replica's lag.
// rows: R178
#[tokio::test]
async fn r178_an_order_is_not_read_while_the_replica_lags() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(MemoryStorage::default());
    let mut settings = Settings {
        journal: Some(storage.clone()),
        ..Settings::unsettled()
    };
    settings.gateway.replica_wait_ms = 100;
    // The first cancel waits for this long in vain.
    settings.gateway.read_wait_ms = 3_000;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    let mut ann = world.session(with_money("ann", "a")).await;
    let open = enter(&mut ann, wire_order(1, Side::Buy, 900, 1)).await;
    enter(&mut ann, wire_order(2, Side::Buy, 800, 1)).await;
    let (replica, unknown) = (world.replica(), unique());
    let before = replica.assigned();
    let passed = in_time("the replica has both orders", replica.wait(before)).await;
    passed.unwrap();

    storage.open_fails_every.store(1, Ordering::SeqCst);
    ann.0.send(0, cancel_own(2)).await.unwrap();
    let is_sequenced = async || replica.assigned() > before;
    until_true("the cancel is sequenced", is_sequenced).await;
    for order_id in [&open, &unknown] {
        let read = in_time("the read is answered", world.order(order_id)).await;
        assert_replica_behind(&read.unwrap_err());
    }
    // The cancel is durable; its effect on the order is unknown without the replica.
    let cancel = in_time("the cancel is answered", world.cancel("ann", &open)).await;
    assert_replica_behind(&cancel.unwrap_err());
    // A change of an order waits longer for the replica than a read.
    let resume = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        storage.open_fails_every.store(0, Ordering::SeqCst);
    };
    let both = async { tokio::join!(world.cancel("ann", &unknown), resume) };
    let (cancel, ()) = in_time("the second cancel is answered", both).await;
    assert_eq!(refused(cancel.unwrap_err()).2, "ORDER_NOT_FOUND");
    let read = eventually(async || world.order(&open).await.ok()).await;
    assert_eq!(read.status(), OrderStatus::Cancelled);
    world.stop().await;
}

/// For every outcome of a change, the answer and the read of the order from the replica equal the
/// history.
#[tokio::test]
async fn the_answer_to_a_change_equals_a_later_list() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "10000", "10").await;
    world.user("bob", "0", "1000").await;
    let order = world.place(buy("ann", "10", "10")).await.unwrap().order_id;
    let decrement = Order {
        self_trade_prevention: SelfTradePrevention::Decrement.into(),
        ..buy("ann", "7", "3")
    };
    let own = world.place(decrement).await.unwrap().order_id;
    let renamed = AmendOrderRequest {
        new_client_order_id: "another".to_owned(),
        ..amend(&order, None, None)
    };
    world.place(sell("bob", "10", "2")).await.unwrap();
    world.place(sell("bob", "12", "3")).await.unwrap();
    world.place(sell("ann", "14", "2")).await.unwrap();
    world.place(sell("bob", "15", "1")).await.unwrap();
    for (request, status) in [
        (renamed, OrderStatus::PartiallyFilled),
        (amend(&order, None, Some("9")), OrderStatus::PartiallyFilled),
        (amend(&order, Some("9"), None), OrderStatus::PartiallyFilled),
        // The order trades, and its remainder stays open.
        (
            amend(&order, Some("12"), None),
            OrderStatus::PartiallyFilled,
        ),
        // Self-trade prevention decrements two of three lots.
        (amend(&own, Some("14"), None), OrderStatus::Open),
        (amend(&own, Some("15"), None), OrderStatus::Filled),
    ] {
        let answer = amend_order(&world, request).await.unwrap();
        assert_eq!(answer.status(), status, "{answer:?}");
        assert_eq!(world.order(&answer.order_id).await.unwrap(), answer);
        assert_listed(&world, &[answer]).await;
    }
    let answer = world.cancel("ann", &order).await.unwrap();
    let filled = (&*answer.client_order_id, text(&answer.filled_quantity));
    assert_eq!(filled, ("another", "5"));
    assert_eq!(world.order(&order).await.unwrap(), answer);
    assert_listed(&world, &[answer]).await;
    world.stop().await;
}
