//! Clients that violate the protocol, and the content of refusals.

use std::time::Duration;

use prost::Message;
use proto::identity::v1::UserBlockedEvent;
use types::{CancelReason, RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::sessions::{Raw, raw_login};
use crate::world::*;

const CANCEL_ON_DISCONNECT: u8 = 1;

async fn logged_in(world: &World, login: wire::Login) -> Raw {
    let mut raw = Raw::connect(world).await;
    raw.login(0, login).await;
    raw
}

fn is_ack(message: &ServerMessage) -> bool {
    matches!(message, ServerMessage::OrderAck(_))
}

/// B8 of the protocol's review: a client that finishes its stream ends the connection, with cancel
/// on disconnect.
#[tokio::test]
async fn finished_stream_ends_session_and_cancels_its_orders() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let login = wire::Login {
        flags: CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "a", 5_000_000)
    };
    let mut raw = logged_in(&world, login).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 1_000, 1)).await;
    raw.until(is_ack).await;
    raw.send.finish().unwrap();
    let code = DisconnectCode::StreamFinished.code();
    assert_eq!(raw.end().await, (Some(code), u64::from(code)));
    until_true("no order is open", async || {
        world.status().await.instruments[0].open_orders == 0
    })
    .await;
    world.stop().await;
}

/// H4: QUIC drops what is written to a stopped stream, so that nothing is unread. A logout before
/// the stop still counts.
// rows: R345
#[tokio::test]
async fn r345_a_client_that_stops_the_stream_is_disconnected_and_its_orders_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let login = |name| wire::Login {
        flags: CANCEL_ON_DISCONNECT,
        ..raw_login("ann", name, 5_000_000)
    };
    let mut raw = logged_in(&world, login("a")).await;
    raw.login(1, login("b")).await;
    for (channel, id, price_ticks) in [(0, 1, 1_000), (1, 2, 900)] {
        let order = wire_order(id, Side::Buy, price_ticks, 1);
        raw.send(channel, 1, order).await;
        raw.until(is_ack).await;
    }
    raw.send(1, 0, wire::Logout {}).await;
    raw.receive.stop(0_u32.into()).unwrap();
    let code = DisconnectCode::StreamFinished.code();
    assert_eq!(raw.end().await.1, u64::from(code));
    until_true("the order of the lost session ends", async || {
        world.book().await.0 == [("9.00".to_owned(), "1".to_owned())]
    })
    .await;
    world.stop().await;
}

/// The transport parameters allow one stream and no datagram frames.
#[tokio::test]
async fn a_client_gets_no_second_stream_and_no_datagrams() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let mut raw = logged_in(&world, raw_login("ann", "a", 5_000_000)).await;
    // Stream credit would arrive with the handshake, before the first answer.
    for sequence in 1..=2 {
        let order = wire_order(sequence, Side::Buy, 1_000, 1);
        raw.send(0, sequence, order).await;
        raw.until(is_ack).await;
        let second = tokio::time::timeout(Duration::ZERO, raw.connection.open_bi()).await;
        assert!(second.is_err(), "no stream credit");
        let one_way = tokio::time::timeout(Duration::ZERO, raw.connection.open_uni()).await;
        assert!(one_way.is_err(), "no stream credit");
        assert!(raw.connection.max_datagram_size().is_none());
    }
    world.stop().await;
}

/// B8: a log or a screen would show such a name incorrectly.
#[tokio::test]
async fn session_names_have_no_control_characters() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    for name in ["a\n<b>", "\u{7}", ""] {
        let mut raw = Raw::connect(&world).await;
        raw.send(0, 0, raw_login("ann", name, 0)).await;
        let refused = raw
            .until(|message| matches!(message, ServerMessage::Disconnect(_)))
            .await;
        let ServerMessage::Disconnect(end) = refused.1 else {
            unreachable!("`until` returns a Disconnect");
        };
        assert_eq!(end.code, DisconnectCode::BadField.code(), "{name:?}");
    }
    world.stop().await;
}

/// B7: the refusal of a change has both ids of the open order, from admission and from the book.
#[tokio::test]
async fn a_refused_change_names_the_order_by_both_ids() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let mut raw = logged_in(&world, raw_login("ann", "a", 5_000_000)).await;
    raw.send(0, 1, wire_order(7, Side::Buy, 1_000, 5)).await;
    let ServerMessage::OrderAck(acked) = raw.until(is_ack).await.1 else {
        unreachable!("`until` returns an OrderAck");
    };
    let amend = |client_order_id, engine_order_id, price_ticks, quantity_lots| wire::Amend {
        client_order_id,
        engine_order_id,
        price_ticks,
        quantity_lots,
        new_client_order_id: 0,
    };
    // Refused by admission, and by the book: the price is outside the band.
    let cases = [
        (0, 0, RejectReason::InvalidAmend),
        (1, 0, RejectReason::PriceBand),
    ];
    let mut sequence = 1;
    for (price_ticks, quantity_lots, reason) in cases {
        for (client_order_id, engine_order_id) in [(7, 0), (0, acked.engine_order_id)] {
            sequence += 1;
            let change = amend(client_order_id, engine_order_id, price_ticks, quantity_lots);
            raw.send(0, sequence, change).await;
            let refusal = raw.until(|message| matches!(message, ServerMessage::Rejected(_)));
            let ServerMessage::Rejected(refusal) = refusal.await.1 else {
                unreachable!("`until` returns a Rejected");
            };
            assert_eq!(refusal.reason, reason);
            assert_eq!(
                (refusal.client_order_id, refusal.engine_order_id),
                (7, acked.engine_order_id),
                "{reason} by {client_order_id} {engine_order_id}"
            );
        }
    }
    world.stop().await;
}

/// B9: a blocked user receives the end of its orders before the session ends.
#[tokio::test]
async fn a_blocked_user_reads_the_end_of_its_orders_first() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    let mut raw = logged_in(&world, raw_login("ann", "a", 5_000_000)).await;
    for sequence in 1..=20 {
        let order = wire_order(sequence, Side::Buy, 1_000, 1);
        raw.send(0, sequence, order).await;
        raw.until(is_ack).await;
    }
    let blocked = UserBlockedEvent {
        context: context("b"),
        user_id: "ann".into(),
        reason: "court".into(),
        at: None,
    };
    let (topic, name) = (events::topics::IDENTITY, "dfa.identity.v1.UserBlockedEvent");
    publish(&world, topic, "ann", name, blocked.encode_to_vec()).await;
    let mut ended = 0;
    let code = loop {
        match raw.next_with_heartbeats().await.1 {
            ServerMessage::Cancelled(end) => {
                assert_eq!(end.reason, CancelReason::UserBlocked);
                ended += 1;
            }
            ServerMessage::Disconnect(end) => break end.code,
            _ => {}
        }
    };
    assert_eq!((code, ended), (DisconnectCode::UserBlocked.code(), 20));
    world.stop().await;
}

/// A user may have eight concurrent lookups in the journal. With more sessions to resume, each
/// session still receives every missed message unchanged and once.
// rows: R343
#[tokio::test]
async fn r343_more_sessions_than_may_read_the_journal_at_once_all_resume() {
    const SESSIONS: u16 = 12;
    const MESSAGES: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.window_messages_max = 16;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "100000", "0").await;
    let unknown = wire::Cancel {
        client_order_id: 77,
        engine_order_id: 0,
    };
    let mut expected = vec![Vec::new(); usize::from(SESSIONS)];
    // Round 0 sends the requests. Round 1 resumes from the first message, round 2 from a different
    // message per session.
    for round in 0..3 {
        let last_of = |channel: u16| match round {
            2 => u64::from(channel),
            _ => 0,
        };
        let mut raw = Raw::connect(&world).await;
        for channel in 0..SESSIONS {
            let mut login = raw_login("ann", &format!("s-{channel}"), 0);
            login.last_sequence = last_of(channel);
            raw.send(channel, 0, login).await;
        }
        let mut now: Vec<Vec<_>> = (0..SESSIONS)
            .map(|channel| expected[usize::from(channel)][..last_of(channel) as usize].to_vec())
            .collect();
        let mut logins = 0;
        while logins < SESSIONS || now.iter().any(|of| (of.len() as u64) < MESSAGES) {
            let (header, message) = raw.next_with_heartbeats().await;
            match message {
                ServerMessage::LoginAccepted(accepted) => {
                    logins += 1;
                    let (seen, next) = (accepted.last_client_seq, accepted.next_sequence);
                    if round > 0 {
                        assert_eq!((seen, next), (MESSAGES, last_of(header.channel) + 1));
                        continue;
                    }
                    for sequence in 1..=MESSAGES {
                        raw.send(header.channel, sequence, unknown).await;
                    }
                }
                ServerMessage::Disconnect(end) => panic!("{}", end.text.as_str()),
                _ if header.sequence > 0 => {
                    let of = &mut now[usize::from(header.channel)];
                    assert_eq!(header.sequence, of.len() as u64 + 1, "in order, and once");
                    of.push(message);
                }
                _ => {}
            }
        }
        for (sequence, message) in now.iter().flat_map(|of| (1..).zip(of)) {
            let ServerMessage::Rejected(refusal) = message else {
                panic!("{message:?}");
            };
            let got = (refusal.client_seq, refusal.reason);
            assert_eq!(got, (sequence, RejectReason::UnknownOrder));
        }
        if round > 0 {
            assert!(now == expected, "the same messages as before");
        }
        expected = now;
    }
    world.stop().await;
}
