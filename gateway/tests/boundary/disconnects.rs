//! The end of sessions and connections, and which orders are cancelled then: lost connections, slow
//! and silent clients, the dead man's switch, heartbeats and the login deadline.

use client::{Error, LoginOptions};
use proto::market::v1::OrderCancelledEvent;
use testkit::Machine;
use types::command::RequestKind;
use types::{CancelReason, RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::sessions::{Raw, members, raw_login};
use crate::world::*;

/// F12: the session sets a timer, and sets it again by the same request only. Neither heartbeats
/// nor other requests restart it. It ends the session's orders at its time, once.
// rows: R345
#[tokio::test]
async fn r345_a_dead_mans_switch_ends_the_sessions_orders() {
    const SECOND_NS: u64 = 1_000_000_000;
    let machine = Machine::at(1_800_000_000 * SECOND_NS);
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        clock: Some(machine.process()),
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let placed = ann.pick(ack).await;
    let set = |message: &ServerMessage| match message {
        ServerMessage::CancelAllAfterSet(set) => Some(*set),
        _ => None,
    };
    let switch = |timeout_s| wire::CancelAllAfter { timeout_s };
    ann.send(0, 2, switch(600)).await;
    let armed = ann.pick(set).await;
    assert_eq!(armed.client_seq, 2);
    assert_eq!(armed.cancel_all_at_ns, armed.time_ns + 600 * SECOND_NS);
    ann.send(0, 3, switch(601)).await;
    let refusal = ann.pick(rejected).await;
    let expected = (RejectReason::Malformed, RequestKind::CancelAllAfter, 600);
    assert_eq!((refusal.reason, refusal.request, refusal.limit), expected);
    ann.send(0, 4, switch(60)).await;
    let armed = ann.pick(set).await;
    assert_eq!(armed.cancel_all_at_ns, armed.time_ns + 60 * SECOND_NS);
    for id in 2..=6 {
        machine.pass_ms(10_000);
        ann.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
            .await;
        ann.send(0, id + 3, wire_order(id, Side::Buy, 100, 1)).await;
        assert!(ann.pick(ack).await.time_ns < armed.cancel_all_at_ns);
    }
    let bids = |lots: &str| vec![("1.00".to_owned(), lots.to_owned())];
    assert_eq!(world.book().await.0, bids("6"));
    machine.pass_ms(10_000);
    for _ in 1..=6 {
        let gone = ann.pick(cancelled).await;
        assert_eq!(gone.reason, CancelReason::CancelAllAfter);
        assert_eq!(gone.time_ns, armed.cancel_all_at_ns);
    }
    let stored = world.order(&placed.order_id.to_string()).await.unwrap();
    assert_eq!(stored.cancel_reason, "CANCEL_ALL_AFTER");
    // Later orders stay: the switch is off.
    for id in 7..=8 {
        ann.send(0, id + 3, wire_order(id, Side::Buy, 100, 1)).await;
        ann.pick(ack).await;
        machine.pass_ms(60_000);
    }
    assert_eq!(world.book().await.0, bids("2"));
    world.stop().await;
}

// rows: R345
#[tokio::test]
async fn r345_orders_are_cancelled_on_disconnect_and_by_mass_cancel() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "guarded")
    };
    let (ann, mut of_ann) = world.session(guarded.clone()).await;
    let (plain, mut of_plain) = world.session(login("ann", "plain")).await;
    plain
        .send(0, wire_order(1, Side::Buy, 500, 1))
        .await
        .unwrap();
    until(&mut of_plain, ack).await;
    for id in 2..5 {
        ann.send(0, wire_order(id, Side::Buy, 1_000 + id as i64, 1))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    ann.send(
        0,
        wire::MassCancel {
            scope: 0,
            instrument: wire::ALL_INSTRUMENTS,
            side: wire::BOTH_SIDES,
        },
    )
    .await
    .unwrap();
    for _ in 0..3 {
        assert_eq!(
            until(&mut of_ann, cancelled).await.reason,
            CancelReason::MassCancel
        );
    }
    let done = until(&mut of_ann, |m| match m {
        ServerMessage::MassCancelled(done) => Some(*done),
        _ => None,
    });
    let done = done.await;
    assert_eq!((done.client_seq, done.count), (4, 3));

    // A logout cancels nothing.
    ann.send(0, wire_order(5, Side::Buy, 1_100, 1))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    ann.send(0, wire::Logout {}).await.unwrap();
    let ended = until(&mut of_ann, |m| match m {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    });
    assert_eq!(ended.await, DisconnectCode::Logout.code());
    assert_eq!(world.book().await.0.len(), 2);

    // A lost connection cancels after the grace period. The order of the session without the
    // option stays, although its connection was lost before.
    let (ann, mut of_ann) = world
        .session(LoginOptions {
            from_now: true,
            ..guarded.clone()
        })
        .await;
    cut(&plain, &mut of_plain).await;
    cut(&ann, &mut of_ann).await;
    let mut cancelled_events = world
        .events(events::topics::MARKET, 4, |event| {
            event.short_type() == "OrderCancelledEvent"
        })
        .await;
    let last: OrderCancelledEvent =
        prost::Message::decode(&*cancelled_events.pop().unwrap().payload).unwrap();
    assert_eq!(last.reason, "CANCEL_ON_DISCONNECT");
    assert_eq!(world.book().await.0, [("5.00".to_owned(), "1".to_owned())]);
    let (_back, mut reports) = world
        .session(LoginOptions {
            last_sequence: 8,
            ..guarded
        })
        .await;
    assert_eq!(
        until(&mut reports, cancelled).await.reason,
        CancelReason::CancelOnDisconnect
    );
    world.stop().await;
}

// rows: R345
#[tokio::test]
async fn r345_a_refused_login_does_not_save_the_orders_of_a_lost_session() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings {
        grace_ms: 300,
        ..Settings::default()
    };
    let world = members(folder.path(), settings).await;
    let guarded = LoginOptions {
        cancel_on_disconnect: true,
        ..with_money("ann", "a")
    };
    let (ann, mut of_ann) = world.session(guarded.clone()).await;
    ann.send(0, wire_order(1, Side::Buy, 1_000, 1))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    cut(&ann, &mut of_ann).await;
    let (connection, _reports) = world.connect().await;
    let wrong = LoginOptions {
        last_sequence: 99,
        ..guarded
    };
    match in_time("an answer", connection.login(0, wrong)).await {
        Err(Error::Disconnected { code, .. }) => {
            assert_eq!(code, Some(DisconnectCode::SequenceAhead))
        }
        other => panic!("{other:?}"),
    }
    until_no_bids(&world).await;
    world.stop().await;
}

/// Waits until there are no bids.
async fn until_no_bids(world: &World) {
    until_true("no bid is open", async || world.book().await.0.is_empty()).await;
}

/// M7: a channel is used again after its session has ended with a request in flight. A loss of the
/// connection disconnects the new session, not the one that logged out.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_new_session_on_a_used_channel_are_cancelled_on_disconnect() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = |name| wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", name, 5_000_000)
    };
    let mut raw = Raw::connect(&world).await;
    raw.login(0, guarded("a")).await;
    // The first order is in flight when the session ends. The second one arrives later.
    let mut out = bytes::BytesMut::new();
    let order = |id, price| wire::ClientMessage::from(wire_order(id, Side::Buy, price, 1));
    wire::encode(&order(1, 100), 0, 1, &mut out);
    wire::encode(&wire::ClientMessage::from(wire::Logout {}), 0, 0, &mut out);
    wire::encode(&order(2, 200), 0, 2, &mut out);
    raw.send.write_all(&out).await.unwrap();
    raw.until(|m| rejected(m).is_some_and(|m| m.reason == RejectReason::UnknownSession))
        .await;
    raw.login(0, guarded("b")).await;
    raw.send(0, 1, order(3, 300)).await;
    raw.until(|m| ack(m).is_some_and(|ack| ack.client_order_id == 3))
        .await;
    let bids = async || {
        let (bids, _) = world.book().await;
        bids.into_iter().map(|(price, _)| price).collect::<Vec<_>>()
    };
    assert_eq!(bids().await, ["3.00", "1.00"]);
    raw.connection.close(0_u32.into(), b"");
    until_true("the order of the new session ends", async || {
        bids().await == ["1.00"]
    })
    .await;
    world.stop().await;
}

/// Checks that a client that sends these requests and reads nothing is disconnected, and that its
/// orders are cancelled. `request` returns client sequence and message for a number from 2 on.
async fn assert_slow_consumer_closed(request: impl Fn(u64) -> (u64, wire::ClientMessage)) {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::unthrottled()).await;
    let mut raw = Raw::connect(&world).await;
    let guarded = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "a", 5_000_000)
    };
    raw.login(0, guarded).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    raw.until(|m| ack(m).is_some()).await;
    let sending = async {
        for number in 2..2_000_000u64 {
            let (seq, message) = request(number);
            let mut out = bytes::BytesMut::new();
            wire::encode(&message, 0, seq, &mut out);
            if raw.send.write_all(&out).await.is_err() {
                return;
            }
            // Lets the QUIC client read its socket, so that the close is not lost.
            tokio::task::yield_now().await;
        }
        panic!("the exchange does not close the connection");
    };
    in_time("the exchange closes the connection", sending).await;
    match in_time("the end of the connection", raw.connection.closed()).await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let code = u64::from(DisconnectCode::SlowConsumer.code());
            assert_eq!(close.error_code.into_inner(), code);
        }
        // On a busy machine this client may wake up after the exchange has forgotten the
        // connection.
        quinn::ConnectionError::Reset => {}
        // Or its socket loses datagrams until it gives up before the exchange does.
        quinn::ConnectionError::TransportError(error)
            if error.code == quinn::TransportErrorCode::INTERNAL_ERROR => {}
        other => panic!("{other}"),
    }
    until_no_bids(&world).await;
    world.stop().await;
}

/// Each refused cancel causes a numbered report of 72 bytes.
// rows: R345
#[tokio::test]
async fn r345_slow_reader_is_disconnected_and_its_orders_cancelled() {
    let cancel = wire::Cancel {
        client_order_id: 7,
        engine_order_id: 0,
    };
    assert_slow_consumer_closed(|number| (number, cancel.into())).await;
}

/// Repeats are answered with the original report under its number.
// rows: R345
#[tokio::test]
async fn r345_a_client_that_reads_no_repeats_is_disconnected() {
    assert_slow_consumer_closed(|_| (1, wire_order(1, Side::Buy, 100, 1).into())).await;
}

/// The peer no longer sends packets, not even acknowledgements.
// rows: R345
#[tokio::test]
async fn r345_the_orders_of_a_peer_that_falls_silent_are_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        // A peer that loses its core for a moment has not fallen silent yet.
        heartbeat_ms: 5_000,
        ..raw_login("ann", "a", 5_000_000)
    };
    let (address, config) = (world.gateway.trading_address(), Raw::config(&world));
    // The peer has its own runtime. It keeps its socket open and is not polled any more.
    let peer = tokio::task::spawn_blocking(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        let raw = runtime.block_on(async {
            let mut raw = Raw::to(address, config).await.unwrap();
            raw.login(0, guarded).await;
            raw.send(0, 1, wire_order(1, Side::Buy, 1_000, 1)).await;
            raw.until(|m| ack(m).is_some()).await;
            raw
        });
        (raw, runtime)
    });
    let (raw, runtime) = peer.await.unwrap();
    let is_cancel = |event: &events::Event| event.short_type() == "OrderCancelledEvent";
    let cancels = world.events(events::topics::MARKET, 1, is_cancel).await;
    let event: OrderCancelledEvent = prost::Message::decode(&*cancels[0].payload).unwrap();
    assert_eq!(event.reason, "CANCEL_ON_DISCONNECT");
    assert_eq!(world.book().await, (vec![], vec![]));
    // The member receives the cancel after its next login.
    let options = LoginOptions {
        last_sequence: 1,
        ..login("ann", "a")
    };
    let (_back, mut reports) = world.session(options).await;
    let gone = until(&mut reports, cancelled).await;
    assert_eq!(gone.reason, CancelReason::CancelOnDisconnect);
    drop(raw);
    runtime.shutdown_background();
    world.stop().await;
}

// rows: R343
#[tokio::test]
async fn r343_heartbeats_use_requested_interval_not_replace_login() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 4_000;
    let world = members(folder.path(), settings).await;
    // A client that sends only heartbeats stays connected for longer than its interval.
    let mut beating = Raw::connect(&world).await;
    let seldom = wire::Login {
        heartbeat_ms: 6_000,
        ..raw_login("bob", "b", 0)
    };
    beating.login(0, seldom).await;
    let beating = tokio::spawn(async move {
        // The server sends a heartbeat after 3 s without a message. `until` sends one every second.
        for _ in 0..3 {
            beating
                .until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
                .await;
        }
        beating
            .send(0, 1, wire_order(1, Side::Sell, 1_000, 1))
            .await;
        beating.until(|m| ack(m).is_some()).await;
    });
    // A client that is silent for its requested interval is closed, although the server's default
    // is 10 s.
    let mut silent = Raw::connect(&world).await;
    let often = wire::Login {
        heartbeat_ms: 2_000,
        ..raw_login("ann", "a", 0)
    };
    silent.send(0, 0, often).await;
    let accepted = silent.until(|m| matches!(m, ServerMessage::LoginAccepted(_)));
    let (_, accepted) = accepted.await;
    assert!(matches!(accepted, ServerMessage::LoginAccepted(a) if a.heartbeat_ms == 2_000));
    silent
        .until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
        .await;
    let code = DisconnectCode::HeartbeatTimeout.code();
    assert_eq!(silent.end().await, (Some(code), u64::from(code)));
    // Without a login heartbeats do not keep the connection open.
    let mut idle = Raw::connect(&world).await;
    let mut out = bytes::BytesMut::new();
    let beat = wire::ClientMessage::from(wire::Heartbeat {});
    wire::encode(&beat, wire::CONNECTION_CHANNEL, 0, &mut out);
    until_true("the exchange closes the connection", async || {
        idle.send.write_all(&out).await.is_err()
    })
    .await;
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(idle.end().await.1, u64::from(code));
    beating.await.unwrap();
    world.stop().await;
}

/// M11: QUIC's keep-alive does not extend the time to log in, with or without a stream.
// rows: R343
#[tokio::test]
async fn r343_a_connection_without_a_stream_ends_at_the_login_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 3_000;
    let world = World::with(folder.path(), settings).await;
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(std::time::Duration::from_millis(100)));
    let mut config = Raw::config(&world);
    config.transport_config(std::sync::Arc::new(transport));
    let endpoint = quinn::Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let address = world.gateway.trading_address();
    let connecting = endpoint.connect_with(config, address, "cfa-trade").unwrap();
    let connection = in_time("the handshake", connecting).await.unwrap();
    let ended = in_time("the exchange closes the connection", connection.closed()).await;
    let quinn::ConnectionError::ApplicationClosed(close) = &ended else {
        panic!("{ended}");
    };
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(close.error_code.into_inner(), u64::from(code));
    world.stop().await;
}

/// M11: one credential does not keep a connection open after its last session. A session that is
/// left, and a new login, do.
// rows: R343
#[tokio::test]
async fn r343_a_connection_without_a_session_ends_at_the_login_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.login_timeout_ms = 3_000;
    let world = members(folder.path(), settings).await;
    let mut raw = Raw::connect(&world).await;
    let of = |name| wire::Login {
        heartbeat_ms: 4_000,
        ..raw_login("ann", name, 0)
    };
    raw.login(0, of("a")).await;
    raw.log_out(0).await;
    raw.login(0, of("a")).await;
    raw.login(1, of("b")).await;
    raw.log_out(1).await;
    // The server sends a heartbeat after 2 s without a message: two of them exceed the deadline.
    for _ in 0..2 {
        raw.until(|m| matches!(m, ServerMessage::ServerHeartbeat(_)))
            .await;
    }
    raw.log_out(0).await;
    let mut beat = bytes::BytesMut::new();
    let message = wire::ClientMessage::from(wire::Heartbeat {});
    wire::encode(&message, wire::CONNECTION_CHANNEL, 0, &mut beat);
    until_true("the exchange closes the connection", async || {
        raw.send.write_all(&beat).await.is_err()
    })
    .await;
    let ended = raw.connection.close_reason();
    let Some(quinn::ConnectionError::ApplicationClosed(close)) = &ended else {
        panic!("{ended:?}");
    };
    let code = DisconnectCode::LoginExpected.code();
    assert_eq!(close.error_code.into_inner(), u64::from(code));
    world.stop().await;
}
