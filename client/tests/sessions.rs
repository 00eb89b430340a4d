//! Session rules without a connection: server bytes in, events and client bytes out.

use std::time::{Duration, Instant};

use client::{Error, Event, LoginOptions, Sessions};
use types::{Id128, Side};
use wire::{
    CONNECTION_CHANNEL, Cancel, ClientMessage, Disconnect, DisconnectCode, LOGIN_FROM_NOW,
    LoginAccepted, NewOrder, OrderAck, ServerHeartbeat, ServerMessage, Text, append, parse,
};

fn accepted(last_client_seq: u64, next_sequence: u64, heartbeat_ms: u32) -> ServerMessage {
    LoginAccepted {
        session: 0,
        last_client_seq,
        next_sequence,
        node: 1,
        throttle_per_s: 0,
        heartbeat_ms,
        cancel_all_at_ns: 0,
        time_ns: 0,
    }
    .into()
}

fn ack(client_seq: u64) -> ServerMessage {
    OrderAck {
        client_seq,
        client_order_id: client_seq,
        engine_order_id: client_seq,
        order_id: Id128::from_u128(1),
        instrument: 0,
        side: Side::Buy,
        price_ticks: 1,
        open_lots: 1,
        node_sequence: 1,
        time_ns: 0,
        received_ns: 0,
    }
    .into()
}

fn end(code: DisconnectCode) -> ServerMessage {
    Disconnect {
        code: code.code(),
        text: Text::truncated(&code.to_string()),
    }
    .into()
}

fn order(id: u64) -> ClientMessage {
    NewOrder::limit(id, 0, Side::Buy, 100, 1).into()
}

/// Sessions with a simulated clock.
struct Client {
    sessions: Sessions,
    now: Instant,
}

impl Client {
    fn new() -> Self {
        let mut client = Self {
            sessions: Sessions::new(),
            now: Instant::now(),
        };
        client.sessions.connected(client.now);
        client
    }

    /// A client with sessions logged in on these channels.
    fn with(channels: &[u16]) -> Self {
        let mut client = Self::new();
        for channel in channels {
            client.login(*channel).unwrap();
            let event = client.receive(*channel, 0, &accepted(0, 1, 1_000));
            assert!(matches!(event, Ok(Event::LoggedIn { .. })), "{event:?}");
        }
        client.sent();
        client
    }

    fn login(&mut self, channel: u16) -> Result<(), Error> {
        let options = LoginOptions::new("token", "a session");
        self.sessions.login(channel, options)
    }

    fn receive(
        &mut self,
        channel: u16,
        sequence: u64,
        message: &ServerMessage,
    ) -> Result<Event, Error> {
        let mut bytes = Vec::new();
        append(message, channel, sequence, &mut bytes);
        // An incomplete message is not consumed.
        let short = self.sessions.receive(self.now, &bytes[..bytes.len() - 1]);
        assert!(matches!(short, Ok(None)), "{short:?}");
        let received = self.sessions.receive(self.now, &bytes)?;
        let (length, event) = received.expect("a complete message");
        assert_eq!(length, bytes.len());
        Ok(event)
    }

    /// Drains the transmitted messages: channel, client sequence, message.
    fn sent(&mut self) -> Vec<(u16, u64, ClientMessage)> {
        let mut bytes = Vec::new();
        self.sessions.poll_transmit(self.now, &mut bytes);
        let (mut at, mut all) = (0, Vec::new());
        while let Some((header, message)) = parse::<ClientMessage>(&bytes[at..]).unwrap() {
            at += usize::from(header.length);
            all.push((header.channel, header.sequence, message));
        }
        assert_eq!(at, bytes.len());
        all
    }

    /// The last sequence of each login, by channel.
    fn logins(&mut self) -> Vec<(u16, u64)> {
        let sent = self.sent().into_iter();
        sent.map(|(channel, _, message)| match message {
            ClientMessage::Login(login) => (channel, login.last_sequence),
            other => panic!("{other:?}"),
        })
        .collect()
    }

    /// Last sequence and flags of the only login that was sent.
    fn sent_login(&mut self) -> (u64, u8) {
        match self.sent().as_slice() {
            [(_, _, ClientMessage::Login(login))] => (login.last_sequence, login.flags),
            other => panic!("{other:?}"),
        }
    }

    /// Connects again and logs every session in.
    fn reconnect(&mut self) {
        self.sessions.disconnected();
        self.sessions.connected(self.now);
        self.sessions.resume().unwrap();
    }
}

// rows: R343
#[test]
fn r343_reports_arrive_in_order_and_once() {
    let mut client = Client::with(&[3]);
    assert!(matches!(client.receive(3, 1, &ack(1)), Ok(Event::Report(r)) if r.sequence == 1));
    assert!(matches!(client.receive(3, 1, &ack(1)), Ok(Event::Ignored)));
    assert_eq!(client.sessions.last_sequence(3), 1);
    // A message on a channel without a session is ignored.
    assert!(matches!(client.receive(4, 1, &ack(1)), Ok(Event::Ignored)));
    let gap = client.receive(3, 3, &ack(1));
    assert!(
        matches!(
            gap,
            Err(Error::Gap {
                expected: 2,
                got: 3
            })
        ),
        "{gap:?}"
    );
    let garbage = client.sessions.receive(client.now, &[0xff; 64]);
    assert!(matches!(garbage, Err(Error::Wire(_))), "{garbage:?}");
}

// rows: R343
#[test]
fn r343_a_resume_sends_what_was_not_seen_before_anything_new() {
    let mut client = Client::with(&[0, 1]);
    for (channel, id) in [(0, 1), (1, 2), (0, 3), (1, 4)] {
        let sent = client.sessions.send(channel, &order(id));
        assert_eq!(sent.unwrap(), Some(id.div_ceil(2)));
    }
    assert_eq!(client.sent().len(), 4);
    assert!(client.receive(0, 1, &ack(1)).is_ok());

    client.reconnect();
    assert_eq!(client.logins(), [(0, 1), (1, 0)]);
    assert!(client.receive(0, 0, &accepted(1, 2, 1_000)).is_ok());
    // The other session is not logged in yet: a new request must not overtake its unseen ones.
    let early = client.sessions.send(0, &order(9));
    assert!(matches!(early, Err(Error::NotLoggedIn)), "{early:?}");
    assert!(client.sent().is_empty());
    assert!(client.receive(1, 0, &accepted(1, 1, 1_000)).is_ok());
    assert_eq!(client.sessions.send(0, &order(5)).unwrap(), Some(3));
    let ids: Vec<_> = client
        .sent()
        .into_iter()
        .map(|(channel, seq, message)| match message {
            ClientMessage::NewOrder(order) => (channel, seq, order.client_order_id),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ids, [(0, 2, 3), (1, 2, 4), (0, 3, 5)]);
}

/// The connection of a new session is lost before its first message. Its resume requests every
/// message, although none was received: the option applies to the first login only.
// rows: R343
#[test]
fn r343_a_resume_of_a_login_from_now_skips_no_message() {
    let mut client = Client::new();
    let options = LoginOptions {
        from_now: true,
        ..LoginOptions::new("token", "a session")
    };
    client.sessions.login(0, options).unwrap();
    assert_eq!(client.sent_login(), (0, LOGIN_FROM_NOW));
    assert!(client.receive(0, 0, &accepted(0, 1, 1_000)).is_ok());
    assert_eq!(client.sessions.send(0, &order(1)).unwrap(), Some(1));
    assert_eq!(client.sent().len(), 1);

    client.reconnect();
    assert_eq!(client.sent_login(), (0, 0));
    // A server that skips the order's report is found out.
    let skipped = client.receive(0, 0, &accepted(1, 2, 1_000));
    let Ok(Event::LoginFailed { channel: 0, error }) = skipped else {
        panic!("{skipped:?}");
    };
    assert!(
        matches!(
            error,
            Error::Gap {
                expected: 1,
                got: 2
            }
        ),
        "{error:?}"
    );

    client.reconnect();
    assert_eq!(client.sent_login(), (0, 0));
    assert!(client.receive(0, 0, &accepted(1, 1, 1_000)).is_ok());
    assert!(matches!(client.receive(0, 1, &ack(1)), Ok(Event::Report(r)) if r.sequence == 1));
}

/// A session that exists already skips its old messages once, and resumes after the last number.
// rows: R343
#[test]
fn r343_a_login_from_now_skips_the_messages_before_it() {
    let mut client = Client::new();
    let options = LoginOptions {
        from_now: true,
        ..LoginOptions::new("token", "a session")
    };
    client.sessions.login(0, options).unwrap();
    client.sent();
    assert!(client.receive(0, 0, &accepted(9, 58, 1_000)).is_ok());
    assert_eq!(client.sessions.last_sequence(0), 57);
    client.reconnect();
    assert_eq!(client.sent_login(), (57, 0));
}

#[test]
fn unresumable_session_delays_others_until_forgotten() {
    let mut client = Client::with(&[0, 1]);
    client.sessions.send(1, &order(1)).unwrap();
    client.reconnect();
    client.sent();
    let refused = client.receive(0, 0, &end(DisconnectCode::UserBlocked));
    assert!(
        matches!(refused, Ok(Event::LoginFailed { channel: 0, .. })),
        "{refused:?}"
    );
    assert!(client.receive(1, 0, &accepted(0, 1, 1_000)).is_ok());
    assert!(client.sent().is_empty());
    client.sessions.forget(0);
    assert_eq!(client.sent().len(), 1);
    assert_eq!(client.sessions.send(1, &order(2)).unwrap(), Some(2));
}

#[test]
fn a_login_is_refused_without_harm_to_other_sessions() {
    let mut client = Client::with(&[0]);
    assert!(matches!(client.login(0), Err(Error::LoginField)));
    assert!(matches!(client.login(64), Err(Error::LoginField)));
    client.login(1).unwrap();
    assert!(matches!(client.login(1), Err(Error::LoginField)));
    let refused = client.receive(1, 0, &end(DisconnectCode::Credentials));
    let Ok(Event::LoginFailed { channel: 1, error }) = refused else {
        panic!("{refused:?}");
    };
    let code = Some(DisconnectCode::Credentials);
    assert!(matches!(error, Error::Disconnected { code: c, .. } if c == code));
    assert!(client.login(1).is_ok());
    assert!(client.sessions.send(0, &order(1)).is_ok());

    // A newer connection takes the session over: the report is delivered and the channel is free.
    let ended = client.receive(0, 0, &end(DisconnectCode::TakenOver));
    assert!(matches!(ended, Ok(Event::Report(_))), "{ended:?}");
    let sent = client.sessions.send(0, &order(2));
    assert!(matches!(sent, Err(Error::NotLoggedIn)));
    assert!(client.login(0).is_ok());

    // The server ends the connection.
    let over = client.receive(CONNECTION_CHANNEL, 0, &end(DisconnectCode::Shutdown));
    assert!(matches!(over, Ok(Event::Ended { .. })), "{over:?}");
    client.sessions.disconnected();
    assert!(matches!(client.login(2), Err(Error::Stream)));
}

#[test]
fn a_heartbeat_is_due_after_half_of_the_shortest_interval() {
    let mut client = Client::with(&[0, 1]);
    let begun = client.now;
    let due = client.sessions.poll_timeout().expect("a connection");
    assert_eq!(due - begun, Duration::from_millis(500));
    let is_heartbeat = |message: &ClientMessage| matches!(message, ClientMessage::Heartbeat(_));
    client.sessions.handle_timeout(begun);
    assert!(client.sent().is_empty(), "a heartbeat is not due");
    client.now = due;
    client.sessions.handle_timeout(due);
    let sent = client.sent();
    assert!(sent.len() == 1 && is_heartbeat(&sent[0].2), "{sent:?}");
    // Any sent message postpones the heartbeat.
    client.now += Duration::from_millis(400);
    let cancel = Cancel {
        client_order_id: 1,
        engine_order_id: 0,
    };
    client.sessions.send(0, &cancel.into()).unwrap();
    assert_eq!(client.sent().len(), 1);
    let due = client.sessions.poll_timeout().expect("a connection");
    assert_eq!(due - client.now, Duration::from_millis(500));
    let message = ServerHeartbeat { time_ns: 1 }.into();
    assert!(client.receive(CONNECTION_CHANNEL, 0, &message).is_ok());
    client.sessions.disconnected();
    assert!(client.sessions.poll_timeout().is_none());
}

#[test]
fn what_the_connection_does_not_take_is_bounded() {
    let mut client = Client::with(&[0]);
    let sent = (0..100_000).find(|id| {
        let sent = client.sessions.send(0, &order(id + 1));
        sent.unwrap().is_none()
    });
    let sent = usize::try_from(sent.expect("the send buffer is bounded")).unwrap();
    assert!(client.sessions.waiting_bytes() <= (1 << 20) + 64);
    assert_eq!(client.sent().len(), sent);
    assert!(client.sessions.send(0, &order(1)).unwrap().is_some());
}
