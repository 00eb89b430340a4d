//! Answers to logins: roles and refusals, takeovers, and clients that read their answer slowly.

use client::{Error, LoginOptions};
use proto::common::v1::KycStatus;
use proto::ledger::v1::HoldStatus;
use proto::market::v1::{OrderStatus, SetTradingPhaseRequest, TradingPhase};
use types::{Phase, RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::forgetting::replica_sessions;
use crate::orders::text;
use crate::sessions::{Raw, members, raw_login, unknown};
use crate::world::*;

/// The roles that may place orders by calls may log in, and no others. An order is changed by its
/// owner alone.
// rows: R333
#[tokio::test]
async fn r333_sessions_admit_the_roles_and_owners_that_calls_admit() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    for (credential, is_admitted) in [
        ("sandbox.investor.ann", true),
        ("sandbox.trader.ann", true),
        ("sandbox.issuer.ann", false),
        ("sandbox.operator", false),
        ("sandbox.treasury", false),
        ("sandbox.compliance", false),
        ("sandbox.market-supervisor", false),
        ("sandbox.auditor", false),
        ("sandbox.service", false),
    ] {
        let (connection, _reports) = world.connect().await;
        let login = connection.login(0, LoginOptions::new(credential, "role"));
        match in_time("an answer", login).await {
            Ok(_) => assert!(is_admitted, "{credential}"),
            Err(Error::Disconnected { code, .. }) => {
                assert!(!is_admitted, "{credential}");
                assert_eq!(code, Some(DisconnectCode::Role), "{credential}");
            }
            Err(other) => panic!("{credential}: {other:?}"),
        }
    }

    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    ann.send(0, wire_order(1, Side::Buy, 100, 2)).await.unwrap();
    let engine_order_id = until(&mut of_ann, ack).await.engine_order_id;
    let cancel = wire::Cancel {
        client_order_id: 0,
        engine_order_id,
    };
    let amend = wire::Amend {
        client_order_id: 0,
        engine_order_id,
        price_ticks: 0,
        quantity_lots: 1,
        new_client_order_id: 0,
    };
    bob.send(0, cancel).await.unwrap();
    let refusal = until(&mut of_bob, rejected).await;
    assert_eq!(refusal.reason, RejectReason::NotOwner);
    bob.send(0, amend).await.unwrap();
    let refusal = until(&mut of_bob, rejected).await;
    assert_eq!(refusal.reason, RejectReason::NotOwner);
    assert_eq!(world.book().await.0, [("1.00".to_owned(), "2".to_owned())]);
    world.stop().await;
}

// rows: R332
#[tokio::test]
async fn logins_that_are_refused_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("low", |low| low.kyc = KycStatus::Simplified);
    world.identity.upsert_user("poor", |_| {});
    let refused = async |options: LoginOptions| {
        let (connection, _reports) = world.connect().await;
        match in_time("an answer", connection.login(3, options)).await {
            Err(Error::Disconnected { code, .. }) => code.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let auditor = LoginOptions::new("sandbox.auditor", "a");
    assert_eq!(refused(auditor).await, DisconnectCode::Role);
    assert_eq!(refused(login("low", "a")).await, DisconnectCode::KycLevel);
    assert_eq!(
        refused(with_money("poor", "a")).await,
        DisconnectCode::TradingHold
    );
    assert_eq!(
        refused(LoginOptions {
            last_sequence: 9,
            ..login("ann", "a")
        })
        .await,
        DisconnectCode::SequenceAhead
    );
    world.stop().await;
}

#[tokio::test]
async fn a_newer_login_takes_a_session_over() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (first, mut of_first) = world.session(with_money("ann", "a")).await;
    let (second, mut of_second) = world.session(login("ann", "a")).await;
    let ended = until(&mut of_first, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::TakenOver.code());
    assert!(matches!(
        first.send(0, wire_order(1, Side::Buy, 100, 1)).await,
        Err(Error::NotLoggedIn)
    ));
    drop(first);
    second
        .send(0, wire_order(1, Side::Buy, 100, 1))
        .await
        .unwrap();
    until(&mut of_second, ack).await;
    world.stop().await;
}

/// The late end of a replaced connection does not close the session. Orders of the new connection
/// stay open, although the grace period is 1 ms.
// rows: R343
#[tokio::test]
async fn r343_late_close_of_old_connection_keeps_resumed_session() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        grace_ms: 1,
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let options = LoginOptions {
        cancel_on_disconnect: true,
        from_now: true,
        ..login("ann", "a")
    };
    let mut old = world.session(with_money("ann", "a")).await;
    let mut placed = None;
    for id in 1..=40u64 {
        let (connection, mut reports) = world.connect().await;
        assert_open(&world, placed).await;
        // The old connection ends during the new login, at a different moment each time.
        let dying = async {
            for _ in 0..id % 20 {
                tokio::task::yield_now().await;
            }
            old.0.cut();
        };
        let both = async { tokio::join!(connection.login(0, options.clone()), dying) };
        let (infos, ()) = in_time("the login is answered", both).await;
        infos.unwrap();
        connection
            .send(0, wire_order(id, Side::Buy, 1_000, 1))
            .await
            .unwrap();
        placed = Some(until(&mut reports, ack).await);
        old = (connection, reports);
    }
    // The order of a session that is lost last ends last. Then the placed order must still be open.
    let other = LoginOptions {
        cancel_on_disconnect: true,
        ..login("ann", "other")
    };
    let (other, mut of_other) = world.session(other).await;
    other
        .send(0, wire_order(41, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let last = until(&mut of_other, ack).await.order_id.to_string();
    cut(&other, &mut of_other).await;
    until_true("the order of the lost session ends", async || {
        world.order(&last).await.unwrap().cancel_reason == "CANCEL_ON_DISCONNECT"
    })
    .await;
    assert_open(&world, placed).await;
    world.stop().await;
}

async fn assert_open(world: &World, placed: Option<wire::OrderAck>) {
    if let Some(placed) = placed {
        let order = world.order(&placed.order_id.to_string()).await.unwrap();
        assert_eq!(order.status(), OrderStatus::Open, "{}", order.cancel_reason);
    }
}

#[tokio::test]
async fn t49_sessions_logging_in_together_share_one_trading_hold() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let _open = tokio::join!(
        world.session(with_money("ann", "a")),
        world.session(with_money("ann", "b")),
        world.session(with_money("ann", "c")),
        world.session(with_money("ann", "d")),
    );
    let holds = world.trading_holds("ann").await;
    let undrawn = holds.iter().map(|hold| text(&hold.undrawn));
    assert_eq!(undrawn.collect::<Vec<_>>(), ["50000.00"]);
    let mut active = world.holds("ann", "CFA-RUB").await;
    active.retain(|hold| hold.status() == HoldStatus::Active);
    let ids = active.iter().map(|hold| &hold.hold_id);
    assert_eq!(ids.collect::<Vec<_>>(), [&holds[0].hold_id]);
    let held = ("100000.00".into(), "50000.00".into(), "50000.00".into());
    assert_eq!(world.balance("ann", "CFA-RUB").await, held);
    world.stop().await;
}

#[tokio::test]
async fn in_flight_request_of_an_ended_session_affects_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    for (channel, name) in [(0, "a"), (1, "b")] {
        raw.login(channel, raw_login("ann", name, 5_000_000)).await;
    }
    // Requests after a logout and after a refused login.
    raw.send(0, 0, wire::Logout {}).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let unknown =
        |m: &ServerMessage| rejected(m).is_some_and(|m| m.reason == RejectReason::UnknownSession);
    assert_eq!(raw.until(unknown).await.0, 0, "unnumbered: not seen");
    raw.send(2, 0, raw_login("stranger", "x", 0)).await;
    raw.send(2, 1, wire_order(2, Side::Buy, 100, 1)).await;
    raw.until(unknown).await;
    // After a takeover by another connection the session's requests are refused here. The other
    // session continues.
    let (other, mut of_other) = world.session(login("ann", "b")).await;
    raw.until(|m| matches!(m, ServerMessage::Disconnect(end) if end.code == DisconnectCode::TakenOver.code()))
        .await;
    raw.send(1, 1, wire_order(3, Side::Buy, 100, 1)).await;
    raw.until(unknown).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    raw.send(0, 2, wire_order(4, Side::Buy, 100, 1)).await;
    raw.until(|m| ack(m).is_some()).await;
    other
        .send(0, wire_order(5, Side::Buy, 100, 1))
        .await
        .unwrap();
    until(&mut of_other, ack).await;
    world.stop().await;
}

/// Number of instruments whose definitions take 42 KiB per login.
const INSTRUMENTS: usize = 400;

/// A world with [`INSTRUMENTS`], and a client with a small receive window.
async fn many_instruments(folder: &std::path::Path, settings: Settings) -> (World, Raw) {
    let registry = std::sync::Arc::new(testkit::Registry::default());
    registry.list(bond(BOND));
    for number in 1..INSTRUMENTS {
        registry.list(bond(&format!("OTHER-{number}")));
    }
    let identity = std::sync::Arc::default();
    let mut world = World::start(folder, settings, identity, registry).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    let mut transport = quinn::TransportConfig::default();
    transport.stream_receive_window(65_536_u32.into());
    let mut config = Raw::config(&world);
    config.transport_config(std::sync::Arc::new(transport));
    let connecting = Raw::to(world.gateway.trading_address(), config);
    let raw = in_time("the handshake", connecting).await.unwrap();
    (world, raw)
}

/// Waits until ann has this number of sessions. Sends heartbeats meanwhile. Reads less than the
/// answer to one login per second: a client that reads nothing is disconnected after a while.
async fn until_opened(world: &World, raw: &mut Raw, sessions: u16) {
    let mut read_at = std::time::Instant::now();
    until_true("the sessions are open", async || {
        raw.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
            .await;
        if read_at.elapsed() >= std::time::Duration::from_secs(1) {
            raw.read_a_little().await;
            read_at = std::time::Instant::now();
        }
        replica_sessions(world, "ann", "").0 == u32::from(sessions)
    })
    .await;
}

/// H4: instruments of logins do not count as unread. A client that hardly reads is sent those of a
/// few logins. The other logins are answered once it reads.
// rows: R341
#[tokio::test]
async fn r341_logins_on_one_connection_are_answered_as_fast_as_the_client_reads() {
    const SESSIONS: u16 = 64;
    let folder = tempfile::tempdir().unwrap();
    let (world, mut raw) = many_instruments(folder.path(), Settings::default()).await;
    for channel in 0..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    // The instruments of a later answer have the new phase.
    let (_bob, mut of_bob) = world.session(login("bob", "b")).await;
    let halt = SetTradingPhaseRequest {
        context: context(&unique()),
        instrument_id: BOND.into(),
        phase: TradingPhase::Halt.into(),
        reason: "test".into(),
    };
    let mut supervisor = world.as_caller("sandbox.market-supervisor");
    supervisor.set_trading_phase(halt).await.unwrap();
    let phase = |message: &ServerMessage| match message {
        ServerMessage::InstrumentDefinition(m) if m.id.as_str() == BOND => Some(m.phase),
        _ => None,
    };
    until(&mut of_bob, |m| {
        phase(m).filter(|phase| *phase == Phase::Halt)
    })
    .await;
    let (mut answered, mut early) = (0, 0);
    let mut definitions = [0; SESSIONS as usize];
    while answered < SESSIONS {
        let (header, message) = raw.next_with_heartbeats().await;
        match message {
            ServerMessage::InstrumentDefinition(_) => {
                definitions[usize::from(header.channel)] += 1;
                early += u16::from(phase(&message) == Some(Phase::Open));
            }
            ServerMessage::LoginAccepted(_) => {
                assert_eq!(definitions[usize::from(header.channel)], INSTRUMENTS);
                answered += 1;
            }
            ServerMessage::Disconnect(end) => panic!("{}", end.text.as_str()),
            _ => {}
        }
    }
    assert!((1..SESSIONS / 2).contains(&early), "{early}");
    raw.send(SESSIONS - 1, 1, unknown()).await;
    raw.until(|m| rejected(m).is_some()).await;
    world.stop().await;
}

/// While logins wait for a client that reads nothing, the front has no work and the hot thread
/// parks. Then the client is disconnected.
// rows: R345
#[tokio::test]
async fn r345_logins_that_wait_for_a_client_that_does_not_read_cost_no_rounds() {
    const SESSIONS: u16 = 16;
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine the hot thread needs some seconds to park.
    let settings = Settings::for_unread(15_000);
    let (world, mut raw) = many_instruments(folder.path(), settings).await;
    for channel in 0..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    let parks = world.parks();
    until_true("the hot thread parks", async || world.parks() > parks + 1).await;
    let ended = raw.connection.close_reason();
    assert!(ended.is_none(), "parks only without the client: {ended:?}");
    let closing = raw.connection.closed();
    match in_time("the exchange closes the connection", closing).await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = u64::from(DisconnectCode::SlowConsumer.code());
            assert_eq!(close.error_code.into_inner(), code);
        }
        // On a busy machine this client may wake up after the exchange has forgotten the
        // connection.
        quinn::ConnectionError::Reset => {}
        other => panic!("{other}"),
    }
    world.stop().await;
}

/// The session of a login that is not answered yet ends with its connection.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_login_that_waits_for_its_client_are_cancelled_after_a_loss() {
    const SESSIONS: u16 = 41;
    let folder = tempfile::tempdir().unwrap();
    let (world, mut raw) = many_instruments(folder.path(), Settings::default()).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "guarded")
    };
    let (ann, mut of_ann) = world.session(guarded).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    let placed = until(&mut of_ann, ack).await;
    for channel in 1..SESSIONS {
        let login = raw_login("ann", &format!("s-{channel}"), 0);
        raw.send(channel, 0, login).await;
    }
    until_opened(&world, &mut raw, SESSIONS).await;
    let again = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "guarded", 0)
    };
    raw.send(0, 0, again).await;
    let ended = until(&mut of_ann, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::TakenOver.code());
    assert_open(&world, Some(placed)).await;
    raw.connection.close(0_u32.into(), b"");
    let id = placed.order_id.to_string();
    until_true("the order of the lost session ends", async || {
        world.order(&id).await.unwrap().cancel_reason == "CANCEL_ON_DISCONNECT"
    })
    .await;
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_trades_during_a_login_are_reported_once_and_in_order() {
    const LOTS: u64 = 400;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, LOTS))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    drop((ann, of_ann));
    // After a restart the front knows no session. Ann's session opens while its order trades.
    let world = world.restart(Settings::default()).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let (ann, mut of_ann) = world.connect().await;
    let selling = async {
        for id in 1..=LOTS {
            bob.send(0, wire_order(id, Side::Sell, 1_000, 1))
                .await
                .unwrap();
            tokio::task::yield_now().await;
        }
    };
    let both = async { tokio::join!(ann.login(0, login("ann", "a")), selling) };
    let (logged_in, ()) = in_time("the login is answered", both).await;
    logged_in.unwrap();
    // The acknowledgement of the order, and one fill per lot.
    for number in 1..=LOTS + 1 {
        assert_eq!(next_numbered(&mut of_ann).await.sequence, number);
    }
    until(&mut of_bob, |m| {
        fill(m).filter(|fill| fill.client_order_id == LOTS)
    })
    .await;
    world.stop().await;
}
