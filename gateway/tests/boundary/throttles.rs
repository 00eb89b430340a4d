//! Limits of sessions: message rates, logins and sessions of a user, invalid tokens, connections.

use client::{Error, LoginOptions};
use testkit::Machine;
use types::command::RequestKind;
use types::{RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::resend::answers;
use crate::sessions::{Raw, members, raw_login};
use crate::world::*;

// rows: R341
#[tokio::test]
async fn d33_a_session_past_its_throttle_is_refused_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 10;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let begun = std::time::Instant::now();
    for id in 1..=200 {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
    }
    let (mut acks, mut refusals) = (0, 0);
    while acks + refusals < 200 {
        let report = next_report(&mut of_ann).await;
        match report.message {
            ServerMessage::OrderAck(_) => acks += 1,
            ServerMessage::Rejected(m) => {
                assert_eq!(
                    (m.reason, report.sequence),
                    (RejectReason::Throttle, 0),
                    "unnumbered: the request was not seen"
                );
                // The rate replenishes one message in 100 ms.
                assert!((1..=100_000).contains(&m.limit), "{}", m.limit);
                refusals += 1;
            }
            _ => {}
        }
    }
    // A burst, and what the rate has replenished since.
    let most = 10 + 10 * (begun.elapsed().as_secs() + 1);
    assert!((10..=most).contains(&acks), "{acks}, {most} at most");
    assert_eq!(world.status().await.instruments[0].open_orders, acks);
    world.stop().await;
}

/// A repeat above the rate gets the first answer. `THROTTLE` means that the request was not seen,
/// so the client would send it as a new order.
// rows: R341
#[tokio::test]
async fn r341_a_repeat_past_the_rate_gets_the_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 10;
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    let first = ann.until(|m| ack(m).is_some()).await;
    for seq in 2..=100 {
        ann.send(0, seq, wire_order(seq, Side::Buy, 100, 1)).await;
    }
    let mut refused = 0;
    for _ in 2..=100 {
        let (_, answer) = ann
            .until(|m| ack(m).is_some() || rejected(m).is_some())
            .await;
        refused += u64::from(rejected(&answer).is_some());
    }
    assert!(refused > 50, "{refused}");
    for _ in 0..20 {
        ann.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    }
    assert_eq!(answers(&mut ann, 20, &first).await, (20, 0));
    world.stop().await;
}

/// Five invalid tokens within a minute lock out their session name, fifty lock out the address.
/// Logged-in sessions continue.
#[tokio::test]
async fn invalid_tokens_lock_out_a_session_name_then_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "desk")).await;
    let (connection, _reports) = world.connect().await;
    let refused = async |options: LoginOptions| match connection.login(3, options).await {
        Err(Error::Disconnected { code, .. }) => code.unwrap(),
        other => panic!("{other:?}"),
    };
    for name in 0..10 {
        for _ in 0..5 {
            let wrong = LoginOptions::new("wrong", &format!("n{name}"));
            assert_eq!(refused(wrong).await, DisconnectCode::Credentials);
        }
        let locked = login("bob", &format!("n{name}"));
        assert_eq!(refused(locked).await, DisconnectCode::TooManyLogins);
        if name == 8 {
            let (_bob, _) = world.session(login("bob", "desk")).await;
        }
    }
    let trust: client::Trust = world.gateway.fingerprint().parse().unwrap();
    let again = client::Connection::connect(world.gateway.trading_address(), trust);
    assert!(again.await.is_err());
    ann.send(0, wire_order(1, Side::Buy, 100, 1)).await.unwrap();
    until(&mut of_ann, ack).await;
    world.stop().await;
}

#[tokio::test]
async fn sessions_and_logins_per_user_are_limited() {
    const RATE: u64 = 5;
    const LOGINS: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.sessions_per_user_max = 2;
    let world = members(folder.path(), settings).await;
    let mut open = Vec::new();
    for name in ["a", "b", "a"] {
        open.push(world.session(login("ann", name)).await);
    }
    let (connection, _reports) = world.connect().await;
    match in_time("an answer", connection.login(0, login("ann", "c"))).await {
        Err(Error::Disconnected { code, .. }) => {
            assert_eq!(code, Some(DisconnectCode::TooManySessions))
        }
        other => panic!("{other:?}"),
    }
    drop(open);
    world.stop().await;

    // Logins above the rate are refused. All have names of their own, far fewer than the maximum.
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.logins_per_s = RATE as u32;
    let world = members(folder.path(), settings).await;
    let mut ann = Raw::connect(&world).await;
    let begun = std::time::Instant::now();
    for channel in 0..LOGINS as u16 {
        ann.send(channel, 0, raw_login("ann", &format!("s-{channel}"), 0))
            .await;
    }
    let (mut accepted, mut refused) = (0, 0);
    while accepted + refused < LOGINS {
        match ann.next_with_heartbeats().await.1 {
            ServerMessage::LoginAccepted(_) => accepted += 1,
            ServerMessage::Disconnect(end) => {
                assert_eq!(end.code, DisconnectCode::TooManySessions.code());
                refused += 1;
            }
            _ => {}
        }
    }
    // A burst, and what the rate has replenished since.
    let most = RATE + RATE * (begun.elapsed().as_secs() + 1);
    assert!(
        (RATE..=most).contains(&accepted),
        "{accepted}, {most} at most"
    );
    assert!(refused > 0, "no login of {LOGINS} was above the rate");
    world.stop().await;
}

// rows: R341
#[tokio::test]
async fn r341_a_new_login_does_not_refill_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 50;
    settings.gateway.user_throttle_per_s = 80;
    let world = members(folder.path(), settings).await;
    let begun = std::time::Instant::now();
    let (mut acked, mut refused, mut id) = (0, 0, 0);
    // Two sessions log in by turns, each login on a new connection.
    for round in 0..6 {
        let options = LoginOptions {
            from_now: true,
            ..with_money("ann", if round % 2 == 0 { "a" } else { "b" })
        };
        let (ann, mut reports) = world.session(options).await;
        for _ in 0..60 {
            id += 1;
            ann.send(0, wire_order(id, Side::Buy, 100, 1))
                .await
                .unwrap();
        }
        let mut answers = 0;
        while answers < 60 {
            match next_report(&mut reports).await.message {
                ServerMessage::OrderAck(_) => acked += 1,
                ServerMessage::Rejected(m) => {
                    assert_eq!(m.reason, RejectReason::Throttle);
                    refused += 1;
                }
                _ => continue,
            }
            answers += 1;
        }
    }
    // The user's rate allows a burst and what it has replenished since.
    let most = 80 + 80 * (begun.elapsed().as_secs() + 1);
    assert!(
        acked >= 80 && acked <= most,
        "{acked} of {id}, {most} at most"
    );
    assert!(refused > 0);
    world.stop().await;
}

/// The rate counts monotonic time. Steps of the machine's real time forward, which platform time
/// follows, do not refill it. Steps back, after which platform time stands still here, do not stop
/// its credit.
// rows: R341
#[tokio::test]
async fn r341_steps_of_the_clock_neither_refill_nor_block_the_rate() {
    const RATE: u64 = 10;
    let machine = Machine::at(1_800_000_000_000_000_000);
    let process = machine.process();
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings {
        clock: Some(process.clone()),
        ..Settings::default()
    };
    settings.gateway.throttle_per_s = RATE as u32;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let mut id = 0;
    let mut is_admitted = async || {
        id += 1;
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        let refusal = until(&mut of_ann, |message| match rejected(message) {
            Some(refusal) => Some(Some(refusal.reason)),
            None => ack(message).map(|_| None),
        });
        let refusal = refusal.await;
        let is_throttle = |reason: RejectReason| reason == RejectReason::Throttle;
        assert!(refusal.is_none_or(is_throttle), "{refusal:?}");
        refusal.is_none()
    };
    let begun = std::time::Instant::now();
    let mut admitted = 0;
    for round in 1..=20 {
        // Steps of 30 s forward and 50 s back: within the bound of a suspect clock.
        for wrong_by_s in [30 * round, 30 * round - 50] {
            machine.set_wrong_by_s(wrong_by_s);
            process.observe();
            for _ in 0..RATE {
                admitted += u64::from(is_admitted().await);
            }
        }
    }
    // A burst, and what the rate has replenished since.
    let most = RATE + RATE * (begun.elapsed().as_secs() + 1);
    assert!(
        (RATE..=most).contains(&admitted),
        "{admitted}, {most} at most"
    );
    until_true("the rate admits an order again", is_admitted).await;
    world.stop().await;
}

/// Requests without a client sequence count in the rate too. Above it their answers state the wait.
// rows: R341
#[tokio::test]
async fn r341_answers_without_a_client_sequence_state_the_wait_above_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 1;
    let world = members(folder.path(), settings).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    let listing = |request_id| wire::OpenOrders {
        request_id,
        scope: 0,
    };
    // In one write: the first one uses up the rate of the next second.
    let requests: [wire::ClientMessage; 4] = [
        listing(1).into(),
        listing(2).into(),
        wire::Retransmit {
            request_id: 3,
            first: 1,
            last: 1,
        }
        .into(),
        wire::SetTradingHold {
            request_id: 4,
            asset: 0,
            undrawn_minor: 1,
        }
        .into(),
    ];
    let mut out = bytes::BytesMut::new();
    for request in &requests {
        wire::encode(request, 0, 0, &mut out);
    }
    raw.send.write_all(&out).await.unwrap();
    let mut answers = std::collections::BTreeMap::new();
    while answers.len() < requests.len() {
        let (request_id, outcome, limit) = match raw.next_with_heartbeats().await.1 {
            ServerMessage::OpenOrdersEnd(end) => (end.request_id, end.outcome, end.limit),
            ServerMessage::RetransmitEnd(end) => (end.request_id, end.outcome, end.limit),
            ServerMessage::TradingHold(hold) => (hold.request_id, hold.outcome, hold.limit),
            _ => continue,
        };
        answers.insert(request_id, (outcome, limit));
    }
    assert_eq!(answers[&1], (wire::REQUEST_DONE, 0));
    for request_id in 2..=4 {
        let (outcome, wait_us) = answers[&request_id];
        assert_eq!(outcome, RejectReason::Throttle.code(), "{request_id}");
        assert!(
            (1..=1_000_000).contains(&wait_us),
            "{request_id}: {wait_us}"
        );
    }
    world.stop().await;
}

// rows: R345
#[tokio::test]
async fn r345_a_session_past_its_rate_cancels_its_open_orders() {
    const UNKNOWN: u64 = 100;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.throttle_per_s = 5;
    let world = members(folder.path(), settings).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    let begun = std::time::Instant::now();
    for id in 1..=5 {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    let named = |client_order_id| wire::Cancel {
        client_order_id,
        engine_order_id: 0,
    };
    // Cancels of an unknown order count in the rate and use it up. The cancels of open orders after
    // them pass.
    for _ in 0..UNKNOWN {
        ann.send(0, named(77)).await.unwrap();
    }
    for id in 1..=4 {
        ann.send(0, named(id)).await.unwrap();
    }
    let all = wire::MassCancel {
        scope: 1,
        instrument: wire::ALL_INSTRUMENTS,
        side: wire::BOTH_SIDES,
    };
    ann.send(0, all).await.unwrap();
    let (mut gone, mut throttled, mut in_rate) = (Vec::new(), 0, 0);
    while gone.len() < 5 {
        match next_report(&mut of_ann).await.message {
            ServerMessage::Cancelled(m) => gone.push(m.client_order_id),
            ServerMessage::Rejected(m) if m.reason == RejectReason::Throttle => {
                assert_eq!((m.request, m.client_order_id), (RequestKind::Cancel, 77));
                throttled += 1;
            }
            ServerMessage::Rejected(m) => {
                assert_eq!(m.reason, RejectReason::UnknownOrder);
                in_rate += 1;
            }
            _ => {}
        }
    }
    assert_eq!(gone, [1, 2, 3, 4, 5]);
    assert_eq!(throttled + in_rate, UNKNOWN);
    // The orders and a part of the unknown cancels are within the rate.
    let most = 5 + 5 * (begun.elapsed().as_secs() + 1);
    assert!(5 + in_rate <= most, "{in_rate}, {most} at most");
    assert!(throttled > 0, "the rate was never used up");
    world.stop().await;
}

#[tokio::test]
async fn connections_are_limited_per_address_and_in_total() {
    // One address gets half of all places.
    for (per_address, in_all) in [(2, 1_024), (512, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.gateway.connections_per_address_max = per_address;
        settings.gateway.connections_max = in_all;
        let world = members(folder.path(), settings).await;
        let first = Raw::connect(&world).await;
        let _second = Raw::connect(&world).await;
        let refused = Raw::try_connect(&world).await.err();
        assert!(
            matches!(refused, Some(quinn::ConnectionError::ConnectionClosed(_))),
            "{refused:?}"
        );
        first.connection.close(0_u32.into(), b"");
        until_true("a connection is accepted again", async || {
            Raw::try_connect(&world).await.is_ok()
        })
        .await;
        world.stop().await;
    }
}

/// A connection whose first packet fails the handshake, here for its protocol, takes no place, in
/// total and of its address.
#[tokio::test]
async fn connections_whose_handshake_fails_take_no_place() {
    const PLACES: u32 = 3;
    /// The TLS alert `no_application_protocol`.
    const NO_APPLICATION_PROTOCOL: u8 = 120;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.connections_per_address_max = PLACES;
    settings.gateway.connections_max = 2 * PLACES;
    let world = members(folder.path(), settings).await;
    let address = world.gateway.trading_address();
    for attempt in 0..=PLACES {
        let connecting = Raw::to(address, Raw::config_of(&world, b"other"));
        let failed = in_time("the handshake fails", connecting).await.err();
        let Some(quinn::ConnectionError::ConnectionClosed(close)) = &failed else {
            panic!("{attempt}: {failed:?}");
        };
        let code = quinn::TransportErrorCode::crypto(NO_APPLICATION_PROTOCOL);
        assert_eq!(close.error_code, code, "{attempt}");
    }
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    world.stop().await;
}

/// `design.md` 7: above the limit, handshakes from spoofed addresses create no state.
#[tokio::test]
async fn address_is_validated_past_64_half_open_connections() {
    use transport::proto as quic;
    const BOUND: usize = 64;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    // On a slow machine the first connections would end before the last one begins.
    settings.gateway.login_timeout_ms = 600_000;
    settings.gateway.heartbeat_ms = 60_000;
    let world = members(folder.path(), settings).await;
    let address = world.gateway.trading_address();
    let config = std::sync::Arc::new(quic::EndpointConfig::default());
    let mut endpoint = quic::Endpoint::new(config, None, true, None);
    let mut sockets = Vec::new();
    for begun in 0..=BOUND {
        let now = std::time::Instant::now();
        let connecting = endpoint.connect(now, Raw::config(&world), address, "cfa-trade");
        let (_, mut connection) = connecting.unwrap();
        let mut initial = Vec::new();
        let sent = connection.poll_transmit(now, 1, &mut initial);
        assert!(sent.is_some());
        // Each handshake has its own socket and sends only its first datagram. The first datagram
        // received is the answer.
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.send_to(&initial, address).await.unwrap();
        let mut answer = [0; 2_048];
        let answered = socket.recv(&mut answer);
        in_time("an answer", answered).await.unwrap();
        let is_retry = answer[0] & 0x30 == 0x30;
        assert_eq!(is_retry, begun == BOUND, "after {begun}");
        sockets.push(socket);
    }
    // A client that completes a Retry is accepted.
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 0)).await;
    world.stop().await;
}
