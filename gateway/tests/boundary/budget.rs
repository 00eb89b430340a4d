//! The TRADING budget of a day: the untraded part of an ended order returns to it (`design.md` 3).

use std::sync::Arc;

use admission::Request;
use prost::Message;
use proto::cfa::v1::Instrument;
use proto::identity::v1::{CheckLimitsRequest, UserUpdatedEvent};
use sequencer::{Layout, Reply, SubmitError};
use testkit::Registry;
use types::{OrderType, RejectReason, SessionIx, Side, TimeInForce, UserId};

use crate::checkpoints::cancel_own;
use crate::shares::stall;
use crate::world::*;

/// Publishes identity's event that a user has changed.
pub async fn publish_updated(world: &World, user_id: &str) {
    let payload = UserUpdatedEvent {
        context: context(&unique()),
        user_id: user_id.into(),
        ..Default::default()
    };
    let (topic, name) = (events::topics::IDENTITY, "dfa.identity.v1.UserUpdatedEvent");
    publish(world, topic, user_id, name, payload.encode_to_vec()).await;
}

/// Waits until a user's limit of the day is journalled.
pub async fn until_limit(world: &World, user_id: &str, minor: i64) {
    let id = UserId::new(user_id).unwrap();
    until_true("the limit is journalled", async || {
        world.replica().read(|state| {
            let admission = state.core().admission();
            let user = admission.user_ix(&id).and_then(|ix| admission.user(ix));
            user.is_some_and(|user| user.budget.limit.0 == minor)
        })
    })
    .await;
}

/// Orders and cancels within the limit cause no question to identity, on both protocols.
#[tokio::test]
async fn cancelled_orders_return_their_budget_and_traded_ones_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    // 25.00 roubles a day.
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    world.identity.take_limit_checks();
    for id in 1..=20 {
        ann.send(0, wire_order(id, Side::Buy, 100, 20))
            .await
            .unwrap();
        assert_eq!(until(&mut of_ann, ack).await.client_order_id, id);
        ann.send(0, cancel_own(id)).await.unwrap();
        assert_eq!(until(&mut of_ann, cancelled).await.client_order_id, id);
    }
    // An order of 20.00, of which 15.00 are traded and the rest is cancelled.
    ann.send(0, wire_order(21, Side::Buy, 100, 20))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    bob.send(0, wire_order(1, Side::Sell, 100, 15))
        .await
        .unwrap();
    until(&mut of_bob, ack).await;
    ann.send(0, cancel_own(21)).await.unwrap();
    assert_eq!(until(&mut of_ann, cancelled).await.client_order_id, 21);
    // An order by call uses the remaining 10.00.
    world.place(buy("ann", "1.00", "10")).await.unwrap();
    assert_eq!(world.identity.take_limit_checks(), []);
    // The session's budget contains the call's order: identity is asked about the next order.
    ann.send(0, wire_order(22, Side::Buy, 100, 1))
        .await
        .unwrap();
    let answer = until(&mut of_ann, |m| match rejected(m) {
        Some(refusal) => Some(Err(refusal.reason)),
        None => ack(m).map(|ack| Ok(ack.client_order_id)),
    });
    assert_eq!(answer.await, Ok(22));
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    // Identity's event of a raised limit is journalled: 15.00 traded and 10.00 open of 40.00. The
    // limit is 45.00, because the double has counted another 5.00.
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 4_000);
    publish_updated(&world, "ann").await;
    until_limit(&world, "ann", 4_500).await;
    world.place(buy("ann", "1.00", "15")).await.unwrap();
    assert_eq!(world.identity.take_limit_checks(), []);
    world.stop().await;
}

/// A sell far below the best bid is valued at the bid. Admission refuses it, and identity is asked
/// about that value, on both protocols.
#[tokio::test]
async fn a_sell_below_the_best_bid_is_judged_by_what_it_would_get() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "1000").await;
    world.user("eve", "0", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    for user_id in ["bob", "eve"] {
        world
            .identity
            .upsert_user(user_id, |user| user.trading_remaining_minor = 2_500);
    }
    let (_ann, _) = world.session(with_money("ann", "a")).await;
    world.place(buy("ann", "3.00", "30")).await.unwrap();
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    world.identity.take_limit_checks();
    // 10.00 at its own price and 30.00 at the bid; the limit is 25.00.
    bob.send(0, wire_order(1, Side::Sell, 100, 10))
        .await
        .unwrap();
    let refused = until(&mut of_bob, rejected);
    assert_eq!(refused.await.reason, RejectReason::LimitExceeded);
    bob.send(0, wire_order(2, Side::Sell, 100, 10))
        .await
        .unwrap();
    assert_eq!(until(&mut of_bob, ack).await.client_order_id, 2);
    let asked = |world: &World| {
        let questions = world.identity.take_limit_checks();
        let notional = |question: &CheckLimitsRequest| format!("{question:?}");
        questions.iter().map(notional).collect::<Vec<_>>()
    };
    assert_eq!(asked(&world).len(), 1);
    // By call, with a hold of its own.
    world.place(sell("eve", "1.00", "10")).await.unwrap();
    let asked = asked(&world);
    assert!(asked.len() == 1 && asked[0].contains("30.00"), "{asked:?}");
    world.stop().await;
}

/// Without a band a market order has no highest value. It is valued by the book, as by admission.
/// Identity is asked only if the budget does not cover that value.
#[tokio::test]
async fn a_market_order_without_a_band_is_judged_by_the_best_price() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Arc::new(Registry::default());
    registry.list(Instrument {
        price_band_low: None,
        price_band_high: None,
        ..bond(BOND)
    });
    let settings = Settings::default();
    let mut world = World::start(folder.path(), settings, Arc::default(), registry).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "0", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    world.place(sell("bob", "1.00", "30")).await.unwrap();
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    let market_order = |id, lots| wire::NewOrder {
        order_type: OrderType::Market,
        time_in_force: TimeInForce::Ioc,
        ..wire_order(id, Side::Buy, 0, lots)
    };
    // 10.00 at the best offer, 10.50 with the collar; the limit is 25.00.
    ann.send(0, market_order(1, 10)).await.unwrap();
    assert_eq!(until(&mut of_ann, fill).await.quantity_lots, 10);
    assert_eq!(world.identity.take_limit_checks(), []);
    // 21.00 of the remaining 15.00.
    ann.send(0, market_order(2, 20)).await.unwrap();
    assert_eq!(until(&mut of_ann, fill).await.quantity_lots, 20);
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    world.stop().await;
}

/// A limit that identity does not answer is read later and delays no other user's limit.
#[tokio::test]
async fn a_limit_that_cannot_be_read_delays_no_other_users_limit() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    for (user_id, name) in [("ann", "a"), ("bob", "b")] {
        world.user(user_id, "100000", "0").await;
        drop(world.session(login(user_id, name)).await);
    }
    let set_unavailable = |is_unavailable| {
        world.identity.with(|state| {
            match is_unavailable {
                true => state.limits_unavailable.insert("ann".to_owned()),
                false => state.limits_unavailable.remove("ann"),
            };
        });
    };
    set_unavailable(true);
    for user_id in ["ann", "bob"] {
        world
            .identity
            .upsert_user(user_id, |user| user.trading_remaining_minor = 4_000);
        publish_updated(&world, user_id).await;
    }
    // Ann was bound first, so her limit is read first.
    until_limit(&world, "bob", 4_500).await;
    set_unavailable(false);
    until_limit(&world, "ann", 4_500).await;
    world.stop().await;
}

/// A raised limit that is refused `BUSY` is submitted again. The market is busy here because its
/// queue of calls is full.
#[tokio::test]
async fn a_raised_limit_that_is_refused_busy_is_journalled_later() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unsettled();
    // The front runs on its own thread.
    settings.layout = Some(Layout::Shared);
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    // A login reads the limit of the day.
    let (_ann, _) = world.session(login("ann", "a")).await;
    let reads = || world.identity.with(|state| state.limit_reads["ann"]);
    let before = reads();
    let stalled = stall(&world).await;
    let port = world.port();
    let full = loop {
        // Changes nothing: there is no such session.
        let request = Request::CloseSession {
            session: SessionIx::NONE,
            epoch: None,
            keep_orders: true,
        };
        if let Err(error) = port.submit(request, Reply::None) {
            break error;
        }
    };
    assert_eq!(full, SubmitError::Busy);
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 4_000);
    publish_updated(&world, "ann").await;
    let is_repeated = async || reads() >= before + 2;
    until_true("the limit is read again after a refusal", is_repeated).await;
    drop(stalled);
    until_limit(&world, "ann", 4_500).await;
    world.stop().await;
}
