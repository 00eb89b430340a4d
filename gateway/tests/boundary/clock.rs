//! Effects of a clock step on members, the market supervisor and the health read (`design.md` 8).

use proto::convert::to_timestamp_us;
use proto::market::v1::*;
use testkit::{Machine, eventually};
use tonic::{Code, Status};
use types::{RejectReason, Side};
use wire::ServerMessage;

use crate::world::*;

const START_NS: u64 = 1_800_000_000_000_000_000;
/// The start is at 11:00 in Moscow. This is one second before midnight.
const EVENING_NS: u64 = START_NS + (13 * 3_600 - 1) * 1_000_000_000;
const DAY_S: i64 = 86_400;

fn confirm(key: &str, offset_seconds: i64) -> ConfirmClockRequest {
    ConfirmClockRequest {
        context: context(key),
        offset_seconds,
        reason: "the time server was replaced".into(),
    }
}

fn reason(refused_by: Result<impl Sized, Status>) -> (Code, String) {
    let (code, _, reason) = refused(refused_by.err().expect("refused"));
    (code, reason)
}

/// Settings for the next process of the machine.
fn settings_on(machine: &Machine) -> Settings {
    Settings {
        clock: Some(machine.process()),
        ..Settings::default()
    }
}

/// Waits until the clock fails in the health read. Returns the reason.
async fn until_clock_fails(world: &World) -> String {
    let health = world.gateway.service().health;
    eventually(async || health.failing().get("clock").cloned()).await
}

/// Waits until the clock no longer fails in the health read.
async fn until_clock_is_ok(world: &World) {
    let health = world.gateway.service().health;
    eventually(async || (!health.failing().contains_key("clock")).then_some(())).await;
}

/// Enters an order by a session. Returns the reason of a refusal.
async fn enter(world: &World, user_id: &str, name: &str, number: u64) -> Result<(), RejectReason> {
    let (session, mut reports) = world.session(with_money(user_id, name)).await;
    let order = wire_order(number, Side::Buy, 1_000, 1);
    session.send(0, order).await.unwrap();
    until(&mut reports, |message| match message {
        ServerMessage::OrderAck(_) => Some(Ok(())),
        ServerMessage::Rejected(rejected) => Some(Err(rejected.reason)),
        _ => None,
    })
    .await
}

#[tokio::test]
async fn clock_a_day_ahead_blocks_orders_until_confirmed() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::at(START_NS));
    let settings = settings_on(&machine);
    let process = settings.clock.clone().unwrap();
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "10").await;
    let kept = world.place(buy("ann", "1", "1")).await.unwrap();
    let mut dated = buy("ann", "2", "1");
    dated.time_in_force = TimeInForce::Gtd.into();
    let expires_us = i64::try_from(START_NS / 1_000).unwrap() + 3_600_000_000;
    dated.expires_at = Some(to_timestamp_us(expires_us));
    let dated = world.place(dated).await.unwrap();
    enter(&world, "ann", "before", 1).await.unwrap();
    let nothing = world.approved().confirm_clock(confirm("c0", DAY_S)).await;
    let expected = (Code::FailedPrecondition, "CLOCK_NOT_SUSPECT".to_owned());
    assert_eq!(reason(nothing), expected);

    machine.set_wrong_by_s(DAY_S);
    process.observe();
    let reason_text = until_clock_fails(&world).await;
    assert!(reason_text.contains("86400 s ahead"), "{reason_text}");
    assert!(
        reason_text.contains("confirm-clock --offset-seconds 86400"),
        "{reason_text}"
    );
    let placed = world.place(buy("ann", "1", "1")).await;
    let expected = (Code::Unavailable, "CLOCK_UNCONFIRMED".to_owned());
    assert_eq!(reason(placed), expected);
    let entered = enter(&world, "ann", "during", 2).await;
    assert_eq!(entered, Err(RejectReason::ClockUnconfirmed));
    world.cancel("ann", &kept.order_id).await.unwrap();
    let order = world.order(&dated.order_id).await.unwrap();
    assert_eq!(order.status(), OrderStatus::Open, "not expired");

    // Two persons confirm the clock (D32), with the offset of the health read.
    let alone = world.operator().confirm_clock(confirm("c9", DAY_S)).await;
    let expected = (Code::FailedPrecondition, "APPROVAL_REQUIRED".to_owned());
    assert_eq!(reason(alone), expected);
    let own = world
        .trader("ann")
        .confirm_clock(confirm("c1", DAY_S))
        .await;
    assert_eq!(reason(own).0, Code::PermissionDenied);
    let other = world.approved().confirm_clock(confirm("c2", -DAY_S)).await;
    let expected = (Code::FailedPrecondition, "CLOCK_OFFSET".to_owned());
    assert_eq!(reason(other), expected);
    // A repeat of the key is answered with what the first call confirmed (D50).
    for asked in [DAY_S, DAY_S, -DAY_S] {
        let confirmed = world.approved().confirm_clock(confirm("c3", asked)).await;
        assert_eq!(confirmed.unwrap().get_ref().offset_seconds, DAY_S);
    }
    until_clock_is_ok(&world).await;
    world.place(buy("ann", "1", "1")).await.unwrap();
    enter(&world, "ann", "after", 3).await.unwrap();
    eventually(async || {
        let order = world.order(&dated.order_id).await.unwrap();
        (order.cancel_reason == "EXPIRED").then_some(())
    })
    .await;

    let hash = world.status().await.state_hash;
    let world = world.restart(settings_on(&machine)).await;
    assert!(!hash.is_empty());
    world.place(buy("ann", "1", "1")).await.unwrap();
    world.stop().await;
}

/// H8: with journalled time a day ahead, sessions were refused for a day (`LIMIT_EXCEEDED`).
#[tokio::test]
async fn a_journal_a_day_ahead_is_confirmed_and_sessions_trade_on() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::at(START_NS));
    machine.set_wrong_by_s(DAY_S);
    let mut world = World::with(folder.path(), settings_on(&machine)).await;
    world.user("ann", "100000", "10").await;
    enter(&world, "ann", "before", 1).await.unwrap();

    machine.set_wrong_by_s(0);
    let world = world.restart(settings_on(&machine)).await;
    let reason_text = until_clock_fails(&world).await;
    assert!(reason_text.contains("s behind"), "{reason_text}");
    let entered = enter(&world, "ann", "during", 2).await;
    assert_eq!(entered, Err(RejectReason::ClockUnconfirmed));
    let confirmed = world.approved().confirm_clock(confirm("c1", -DAY_S)).await;
    confirmed.unwrap();
    until_clock_is_ok(&world).await;
    enter(&world, "ann", "after", 3).await.unwrap();

    let world = world.restart(settings_on(&machine)).await;
    enter(&world, "ann", "later", 4).await.unwrap();
    until_clock_is_ok(&world).await;
    world.stop().await;
}

/// H8: at each Moscow midnight the gateway judged orders by a day other than that of admission, and
/// they were refused (`LIMIT_EXCEEDED`).
#[tokio::test]
async fn an_open_session_trades_on_after_moscow_midnight() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::at(EVENING_NS));
    let mut world = World::with(folder.path(), settings_on(&machine)).await;
    world.user("ann", "100000", "0").await;
    // 25.00 roubles a day, of which each order takes 20.00.
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (session, mut reports) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    let mut days = Vec::new();
    for id in 1..=2 {
        session
            .send(0, wire_order(id, Side::Buy, 100, 20))
            .await
            .unwrap();
        let answer = until(&mut reports, |message| match rejected(message) {
            Some(refusal) => Some(Err(refusal.reason)),
            None => ack(message).map(Ok),
        });
        days.push(admission::moscow_day(answer.await.unwrap().time_ns));
        machine.pass_ms(2_000);
    }
    assert_eq!(days[1], days[0] + 1);
    // The order of the new day is within that day's limit: identity is not asked about it.
    assert_eq!(world.identity.take_limit_checks(), []);
    world.stop().await;
}

/// H8: after midnight admission had no budget for a user until a new order of the user, and refused
/// amends that raise the value.
#[tokio::test]
async fn an_amend_is_the_first_request_of_a_moscow_day() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::at(EVENING_NS));
    let mut world = World::with(folder.path(), settings_on(&machine)).await;
    world.user("ann", "100000", "0").await;
    let (session, mut reports) = world.session(with_money("ann", "a")).await;
    let order = wire_order(1, Side::Buy, 100, 20);
    session.send(0, order).await.unwrap();
    until(&mut reports, ack).await;
    machine.pass_ms(8_000);
    let raise = wire::Amend {
        client_order_id: 1,
        engine_order_id: 0,
        price_ticks: 0,
        quantity_lots: 21,
        new_client_order_id: 0,
    };
    until_true("the day's budget is read", async || {
        session.send(0, raise).await.unwrap();
        until(&mut reports, |message| match message {
            ServerMessage::Amended(_) => Some(true),
            ServerMessage::Rejected(refusal) => {
                assert_eq!(refusal.reason, RejectReason::LimitExceeded);
                Some(false)
            }
            _ => None,
        })
        .await
    })
    .await;
    world.stop().await;
}

#[tokio::test]
async fn a_clock_that_is_back_opens_the_market_by_itself() {
    let (folder, machine) = (tempfile::tempdir().unwrap(), Machine::at(START_NS));
    let settings = settings_on(&machine);
    let process = settings.clock.clone().unwrap();
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "10").await;
    machine.set_wrong_by_s(-DAY_S);
    process.observe();
    until_clock_fails(&world).await;
    let placed = world.place(buy("ann", "1", "1")).await;
    assert_eq!(reason(placed).1, "CLOCK_UNCONFIRMED");
    machine.set_wrong_by_s(0);
    process.observe();
    until_clock_is_ok(&world).await;
    eventually(async || world.place(buy("ann", "1", "1")).await.ok()).await;
    world.stop().await;
}
