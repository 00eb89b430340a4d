//! Logins that end at once, that take a session over, and that use up connections.

use std::time::Duration;

use types::{RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::orders::text;
use crate::sessions::{Raw, raw_login};
use crate::shares::{is_answer, members, unknown};
use crate::world::*;

fn is_code(message: &ServerMessage, code: DisconnectCode) -> bool {
    matches!(message, ServerMessage::Disconnect(end) if end.code == code.code())
}

/// After a takeover the client reads only answers to its own requests: a request of the earlier
/// login that the exchange refuses may have had the same client sequence.
// rows: R343
#[tokio::test]
async fn r343_a_login_gets_no_refusal_of_an_earlier_logins_request() {
    const TAKEOVERS: usize = 60;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.gateway.logins_per_s = 100_000;
    let world = members(folder.path(), settings).await;
    let mut current = Raw::connect(&world).await;
    current.login(0, raw_login("ann", "a", 0)).await;
    let mut last = 0;
    for _ in 0..TAKEOVERS {
        let mut earlier = current;
        let sending = tokio::spawn(async move {
            for seq in last + 1.. {
                let mut out = bytes::BytesMut::new();
                wire::encode(&wire::ClientMessage::from(unknown()), 0, seq, &mut out);
                if earlier.send.write_all(&out).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        });
        current = Raw::connect(&world).await;
        let from_now = wire::Login {
            flags: wire::LOGIN_FROM_NOW,
            ..raw_login("ann", "a", 0)
        };
        current.send(0, 0, from_now).await;
        let is_accepted = |m: &ServerMessage| matches!(m, ServerMessage::LoginAccepted(_));
        let (_, accepted) = current.until(is_accepted).await;
        let ServerMessage::LoginAccepted(accepted) = accepted else {
            unreachable!()
        };
        last = accepted.last_client_seq + 1;
        current.send(0, last, unknown()).await;
        let (_, answer) = current.until(is_answer).await;
        let refusal = rejected(&answer).unwrap();
        let got = (refusal.client_seq, refusal.reason);
        assert_eq!(got, (last, RejectReason::UnknownOrder));
        sending.abort();
    }
    world.stop().await;
}

/// A logout that arrives before the answer to its login ends the session as any logout.
// rows: R345
#[tokio::test]
async fn r345_a_logout_before_the_answer_to_the_login_keeps_the_orders() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let guarded = wire::Login {
        flags: wire::LOGIN_CANCEL_ON_DISCONNECT,
        ..raw_login("ann", "a", 5_000_000)
    };
    let mut raw = Raw::connect(&world).await;
    raw.login(0, guarded).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 100, 1)).await;
    raw.until(|m| ack(m).is_some()).await;
    raw.send(0, 0, wire::Logout {}).await;
    raw.until(|m| is_code(m, DisconnectCode::Logout)).await;

    let mut out = bytes::BytesMut::new();
    for message in [guarded.into(), wire::Logout {}.into()] {
        wire::encode::<wire::ClientMessage>(&message, 0, 0, &mut out);
    }
    raw.send.write_all(&out).await.unwrap();
    raw.until(|m| is_code(m, DisconnectCode::Logout)).await;
    raw.connection.close(0_u32.into(), b"");
    // Longer than the grace period of 50 ms.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(world.book().await.0, [("1.00".to_owned(), "1".to_owned())]);
    world.stop().await;
}

/// A logout does not end the session's request to change a trading hold.
#[tokio::test]
async fn a_hold_that_is_set_before_a_logout_is_changed() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    let none = wire::SetTradingHold {
        request_id: 1,
        asset: 0,
        undrawn_minor: 0,
    };
    let mut out = bytes::BytesMut::new();
    for message in [none.into(), wire::Logout {}.into()] {
        wire::encode::<wire::ClientMessage>(&message, 0, 0, &mut out);
    }
    raw.send.write_all(&out).await.unwrap();
    raw.until(|m| is_code(m, DisconnectCode::Logout)).await;
    until_true("the hold is empty", async || {
        let holds = world.trading_holds("ann").await;
        holds.iter().all(|hold| text(&hold.undrawn) == "0.00")
    })
    .await;
    world.stop().await;
}

/// A member with several addresses does not take all connections.
// rows: R341
#[tokio::test]
async fn r341_a_members_connections_leave_places_for_others() {
    const IN_ALL: u32 = 16;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.connections_max = IN_ALL;
    let world = members(folder.path(), settings).await;
    let mut of_ann = Vec::new();
    for at in 0..IN_ALL / 2 {
        let mut raw = Raw::connect(&world).await;
        raw.login(0, raw_login("ann", &format!("s-{at}"), 0)).await;
        of_ann.push(raw);
    }
    assert!(Raw::try_connect(&world).await.is_err(), "of one address");
    let mut other = Raw::connect_from(&world, [127, 0, 0, 2]).await;
    other.send(0, 0, raw_login("ann", "one more", 0)).await;
    let refused = |m: &ServerMessage| is_code(m, DisconnectCode::TooManySessions);
    other.until(refused).await;
    other.login(1, raw_login("bob", "b", 0)).await;
    // A place is free again after a connection has ended.
    of_ann.pop().unwrap().connection.close(0_u32.into(), b"");
    until_true("ann logs in again", async || {
        let Ok(mut again) = Raw::try_connect_from(&world, [127, 0, 0, 3]).await else {
            return false;
        };
        again.send(0, 0, raw_login("ann", "one more", 0)).await;
        let is_answer = |m: &ServerMessage| {
            matches!(
                m,
                ServerMessage::LoginAccepted(_) | ServerMessage::Disconnect(_)
            )
        };
        let (_, answer) = again.until(is_answer).await;
        matches!(answer, ServerMessage::LoginAccepted(_))
    })
    .await;
    world.stop().await;
}
