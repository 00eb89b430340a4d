//! A member's share of the journal, and the authority to lift a halt.

use prost::Message;
use proto::cfa::v1::{InstrumentStatus, InstrumentUpdatedEvent};
use proto::market::v1::{
    GetMarketStatusRequest, Order, OrderStatus, SetTradingPhaseRequest, TradingPhase,
};
use tonic::Code;
use types::{RejectReason, Side};
use wire::ServerMessage;

use crate::world::*;

/// Publishes a change of an instrument in the registry.
async fn registry_tells(world: &World, instrument_id: &str) {
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
    // Journalled refusals until the quota is used up: 1 MiB is some ten thousand of them.
    let mut asked = 0;
    let wait_us = 'full: loop {
        for _ in 0..500 {
            ann.send(0, named(77)).await.unwrap();
        }
        asked += 500;
        assert!(asked <= 40_000, "no quota applies");
        for _ in 0..500 {
            let refusal = until(&mut reports, |message| match message {
                ServerMessage::Rejected(refusal) => Some(*refusal),
                _ => None,
            });
            let refusal = refusal.await;
            if refusal.reason == RejectReason::JournalQuota {
                // Refused by the hot thread, which names the request (B7 of the protocol's review).
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
    registry_tells(&world, "BOND-2").await;
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
    registry_tells(&world, "BOND-2").await;
    until_true("the halt", async || {
        phase(&world).await == TradingPhase::Halt
    })
    .await;
    world.registry.list(set(InstrumentStatus::Active));
    registry_tells(&world, "BOND-2").await;
    // Events are handled in order: once BOND-3 is known, the change of BOND-2 has been handled.
    world.registry.list(bond("BOND-3"));
    registry_tells(&world, "BOND-3").await;
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
    let mut supervisor = world.as_caller("sandbox.market-supervisor");
    supervisor.set_trading_phase(lift).await.unwrap();
    assert_eq!(phase(&world).await, TradingPhase::Open);
    let placed = world.place(order()).await.unwrap();
    assert_eq!(placed.status(), OrderStatus::Open);
    world.stop().await;
}
