//! Limits of a member: journal quota, sessions, message rates. And which role may lift a halt.

use client::{Connection, Error, Reports};
use prost::Message;
use proto::cfa::v1::{InstrumentStatus, InstrumentUpdatedEvent};
use proto::market::v1::{
    GetMarketStatusRequest, MemberBounds, Order, OrderBounds, OrderStatus, SetMemberBoundsRequest,
    SetMemberGroupRequest, SetTradingPhaseRequest, TradingPhase,
};
use tonic::{Code, Status};
use types::{RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::world::*;

/// Publishes a change of an instrument in the registry.
async fn publish_instrument_updated(world: &World, instrument_id: &str) {
    let updated = InstrumentUpdatedEvent {
        context: context(&unique()),
        instrument_id: instrument_id.into(),
        ..Default::default()
    };
    let (topic, name) = (events::topics::CFA, "dfa.cfa.v1.InstrumentUpdatedEvent");
    publish(world, topic, "k", name, updated.encode_to_vec()).await;
}

/// `design.md` 7: bytes of journal per user and minute.
// rows: R341
#[tokio::test]
async fn r341_a_member_above_its_journal_quota_cancels_and_others_trade() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.gateway.journal_mib_per_minute = 1;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    let (ann, mut reports) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    until(&mut reports, |message| {
        matches!(message, ServerMessage::OrderAck(_)).then_some(())
    })
    .await;
    let named = |client_order_id| wire::Cancel {
        client_order_id,
        engine_order_id: 0,
    };
    // Journalled refusals use up the quota. 1 MiB has space for about ten thousand.
    let mut asked = 0;
    let wait_us = 'full: loop {
        for _ in 0..500 {
            ann.send(0, named(77)).await.unwrap();
        }
        asked += 500;
        assert!(asked <= 40_000, "the quota does not apply");
        for _ in 0..500 {
            let refusal = until(&mut reports, |message| match message {
                ServerMessage::Rejected(refusal) => Some(*refusal),
                _ => None,
            });
            let refusal = refusal.await;
            if refusal.reason == RejectReason::JournalQuota {
                // The hot thread's refusal names the request (B7 of the protocol's review).
                let named = (refusal.request, refusal.client_order_id);
                assert_eq!(named, (types::command::RequestKind::Cancel, 77));
                break 'full refusal.limit;
            }
            assert_eq!(refusal.reason, RejectReason::UnknownOrder);
        }
    };
    assert!((1..=60_000_000).contains(&wait_us), "{wait_us}");
    let status = world.place(buy("ann", "10", "1")).await.unwrap_err();
    let (code, _, reason) = refused(status);
    assert_eq!(
        (code, reason.as_str()),
        (Code::ResourceExhausted, "JOURNAL_QUOTA")
    );
    world.place(buy("bob", "10", "1")).await.unwrap();
    ann.send(0, named(1)).await.unwrap();
    until(&mut reports, |message| {
        matches!(message, ServerMessage::Cancelled(_)).then_some(())
    })
    .await;
    let mut trader = world.trader("ann");
    let status = trader.get_market_status(GetMarketStatusRequest::default());
    let bounds = status.await.unwrap().into_inner().bounds.unwrap();
    let shown = (
        bounds.journal_mib_per_minute,
        bounds.order_messages_per_trade,
    );
    assert_eq!(shown, (1, 500));
    world.stop().await;
}

/// Order bounds that no test reaches. Rates and number of sessions are the exchange's.
fn wide() -> OrderBounds {
    OrderBounds {
        open_orders_per_user: 50_000,
        open_orders_per_instrument: 50_000,
        ..OrderBounds::default()
    }
}

/// Sets or removes the bounds of a user or a group. Returns the bounds of the answer.
async fn set_bounds(
    world: &World,
    (user_id, group): (&str, u32),
    bounds: Option<OrderBounds>,
) -> Result<Option<OrderBounds>, Status> {
    let request = SetMemberBoundsRequest {
        context: context(&unique()),
        user_id: user_id.into(),
        group,
        bounds,
        reason: "test".into(),
    };
    let answer = world.approved().set_member_bounds(request).await?;
    Ok(answer.into_inner().bounds)
}

async fn set_group(world: &World, user_id: &str, group: u32) {
    let request = SetMemberGroupRequest {
        context: context(&unique()),
        user_id: user_id.into(),
        group,
        reason: "test".into(),
    };
    world.approved().set_member_group(request).await.unwrap();
}

/// Maximum number of sessions, then the rates per session, user and group.
fn rates(bounds: Option<MemberBounds>) -> [u32; 4] {
    let bounds = bounds.unwrap();
    [
        bounds.sessions_per_user,
        bounds.messages_per_second_session,
        bounds.messages_per_second_user,
        bounds.messages_per_second_group,
    ]
}

/// The [`rates`] that ann reads.
async fn own_rates(world: &World) -> [u32; 4] {
    let mut trader = world.trader("ann");
    let status = trader.get_market_status(GetMarketStatusRequest::default());
    rates(status.await.unwrap().into_inner().bounds)
}

/// A session of ann that sends orders in bursts.
struct Trader {
    connection: Connection,
    reports: Reports,
    /// The last client order id.
    last: u64,
}

impl Trader {
    /// Logs in. Also returns the session's rate from the answer.
    async fn login(world: &World, name: &str, last: u64) -> (Self, u32) {
        let (connection, reports) = world.connect().await;
        let answer = connection.login(0, with_money("ann", name));
        let info = in_time("the login is answered", answer).await.unwrap();
        let trader = Self {
            connection,
            reports,
            last,
        };
        (trader, info.throttle_per_s)
    }

    /// Sends 20 orders in a burst. Returns true if the rate refuses some of them.
    async fn is_throttled(&mut self) -> bool {
        for _ in 0..20 {
            self.last += 1;
            let order = wire_order(self.last, Side::Buy, 100, 1);
            self.connection.send(0, order).await.unwrap();
        }
        let mut refused = 0;
        for _ in 0..20 {
            let reason = until(&mut self.reports, |message| match message {
                ServerMessage::OrderAck(_) => Some(None),
                ServerMessage::Rejected(refusal) => Some(Some(refusal.reason)),
                _ => None,
            });
            if let Some(reason) = reason.await {
                assert_eq!(reason, RejectReason::Throttle);
                refused += 1;
            }
        }
        refused > 0
    }

    async fn until_throttled(&mut self, what: &str) {
        until_true(what, async || self.is_throttled().await).await;
    }

    async fn until_unthrottled(&mut self, what: &str) {
        until_true(what, async || !self.is_throttled().await).await;
    }
}

/// `design.md` 7: rates are reference data of users and groups. They apply without a new login.
// rows: R341
#[tokio::test]
async fn r341_a_changed_rate_or_group_applies_to_open_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::with(folder.path(), Settings::unthrottled()).await;
    world.user("ann", "200000", "0").await;
    let (mut ann, stated) = Trader::login(&world, "a", 0).await;
    assert_eq!(stated, 0);
    assert!(!ann.is_throttled().await);
    let user = ("ann", 0);

    let of_user = OrderBounds {
        messages_per_second_user: Some(5),
        ..wide()
    };
    let set = set_bounds(&world, user, Some(of_user)).await;
    let expected = OrderBounds {
        sessions_per_user: Some(1_000),
        messages_per_second_session: Some(0),
        messages_per_second_user: Some(5),
        ..wide()
    };
    assert_eq!(
        set.unwrap(),
        Some(expected),
        "unset bounds are the exchange's"
    );
    ann.until_throttled("the user's rate").await;
    assert_eq!(own_rates(&world).await, [1_000, 0, 5, 50_000]);
    set_bounds(&world, user, None).await.unwrap();
    ann.until_unthrottled("no rate of the user").await;

    let of_session = OrderBounds {
        messages_per_second_session: Some(5),
        ..wide()
    };
    set_bounds(&world, user, Some(of_session)).await.unwrap();
    ann.until_throttled("the session's rate").await;
    let (mut other, stated) = Trader::login(&world, "b", 1_000_000).await;
    assert_eq!(stated, 5, "the answer to the login has the rate");
    other.until_throttled("the rate of a later session").await;
    set_bounds(&world, user, None).await.unwrap();
    ann.until_unthrottled("no rate of the session").await;
    other
        .until_unthrottled("no rate of the later session")
        .await;

    let of_group = |rate| OrderBounds {
        messages_per_second_group: Some(rate),
        ..wide()
    };
    let group = ("", 7);
    set_bounds(&world, group, Some(of_group(5))).await.unwrap();
    assert!(!ann.is_throttled().await, "ann is in no group");
    set_group(&world, "ann", 7).await;
    ann.until_throttled("the rate of the user's group").await;
    assert_eq!(own_rates(&world).await, [1_000, 0, 0, 5]);
    set_bounds(&world, group, Some(of_group(0))).await.unwrap();
    ann.until_unthrottled("the group's raised rate").await;
    set_bounds(&world, group, Some(of_group(5))).await.unwrap();
    ann.until_throttled("the group's lowered rate").await;
    set_group(&world, "ann", 0).await;
    ann.until_unthrottled("no group").await;
    assert_eq!(own_rates(&world).await, [1_000, 0, 0, 50_000]);

    // A start with other settings journals them. The group keeps its bounds.
    set_group(&world, "ann", 7).await;
    drop((ann, other));
    let world = world.restart(Settings::default()).await;
    let node = rates(world.status().await.bounds);
    assert_eq!(node, [1_000, 5_000, 20_000, 50_000]);
    assert_eq!(own_rates(&world).await, [1_000, 0, 0, 5]);
    world.stop().await;
}

/// Logs ann in under a session name. Returns the code of a refusal.
async fn refused_login(world: &World, name: &str) -> Option<DisconnectCode> {
    let (connection, _reports) = world.connect().await;
    match in_time("an answer", connection.login(0, login("ann", name))).await {
        Ok(_) => None,
        Err(Error::Disconnected { code, .. }) => code,
        Err(other) => panic!("{other:?}"),
    }
}

/// `design.md` 7: sessions per user.
// rows: R341
#[tokio::test]
async fn sessions_of_a_user_are_limited_by_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    let most = |sessions| OrderBounds {
        sessions_per_user: Some(sessions),
        ..wide()
    };
    let user = ("ann", 0);
    let too_many = Some(DisconnectCode::TooManySessions);
    set_bounds(&world, user, Some(most(1))).await.unwrap();
    assert_eq!(own_rates(&world).await, [1, 5_000, 20_000, 50_000]);
    assert_eq!(refused_login(&world, "a").await, None);
    assert_eq!(refused_login(&world, "b").await, too_many);
    set_bounds(&world, user, Some(most(2))).await.unwrap();
    assert_eq!(refused_login(&world, "b").await, None);
    assert_eq!(refused_login(&world, "c").await, too_many);
    // A lower bound does not end existing sessions.
    set_bounds(&world, user, Some(most(1))).await.unwrap();
    assert_eq!(refused_login(&world, "b").await, None);
    assert_eq!(refused_login(&world, "c").await, too_many);
    // The bound of the group applies, then the bound of the exchange.
    set_bounds(&world, ("", 7), Some(most(2))).await.unwrap();
    set_group(&world, "ann", 7).await;
    set_bounds(&world, user, None).await.unwrap();
    assert_eq!(refused_login(&world, "c").await, too_many);
    set_group(&world, "ann", 0).await;
    assert_eq!(refused_login(&world, "c").await, None);
    let of_no_group = OrderBounds {
        messages_per_second_group: Some(5),
        ..wide()
    };
    for wrong in [most(0), of_no_group] {
        let refusal = set_bounds(&world, user, Some(wrong)).await.unwrap_err();
        assert_eq!(refusal.code(), Code::InvalidArgument, "{refusal}");
    }
    world.stop().await;
}

/// Waits until the market has at least `count` instruments.
async fn listed(world: &World, count: usize) {
    let what = format!("{count} instruments");
    until_true(&what, async || {
        world.status().await.instruments.len() >= count
    })
    .await;
}

/// `design.md` 10: the registry halts a market at once and does not reopen it.
#[tokio::test]
async fn a_halt_is_lifted_by_the_markets_supervision_and_not_by_the_registry() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.registry.list(bond("BOND-2"));
    publish_instrument_updated(&world, "BOND-2").await;
    listed(&world, 2).await;
    let order = || Order {
        instrument_id: "BOND-2".into(),
        ..buy("ann", "10", "1")
    };
    let placed = world.place(order()).await.unwrap();
    assert_eq!(placed.status(), OrderStatus::Open);
    let phase = async |world: &World| world.status().await.instruments[1].phase();
    let set = |status: InstrumentStatus| {
        let mut listed = bond("BOND-2");
        listed.status = status.into();
        listed
    };
    world.registry.list(set(InstrumentStatus::Halted));
    publish_instrument_updated(&world, "BOND-2").await;
    until_true("the halt", async || {
        phase(&world).await == TradingPhase::Halt
    })
    .await;
    world.registry.list(set(InstrumentStatus::Active));
    publish_instrument_updated(&world, "BOND-2").await;
    // Events are handled in order: once BOND-3 is known, the change of BOND-2 has been handled.
    world.registry.list(bond("BOND-3"));
    publish_instrument_updated(&world, "BOND-3").await;
    listed(&world, 3).await;
    assert_eq!(phase(&world).await, TradingPhase::Halt);
    let lift = SetTradingPhaseRequest {
        context: context(&unique()),
        instrument_id: "BOND-2".into(),
        phase: TradingPhase::Open.into(),
        reason: "test".into(),
    };
    let trader = world.trader("ann").set_trading_phase(lift.clone()).await;
    assert_eq!(trader.unwrap_err().code(), Code::PermissionDenied);
    world.approved().set_trading_phase(lift).await.unwrap();
    assert_eq!(phase(&world).await, TradingPhase::Open);
    let placed = world.place(order()).await.unwrap();
    assert_eq!(placed.status(), OrderStatus::Open);
    world.stop().await;
}
