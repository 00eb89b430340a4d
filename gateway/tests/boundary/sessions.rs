//! Trading sessions over QUIC: orders beside those of calls, their order, holds and budget, and
//! malformed messages. Has the raw client and the members for the other tests of sessions.

use client::{LoginOptions, Report};
use proto::market::v1::{Order, OrderStatus, PlaceOrderRequest};
use types::{CancelReason, RejectReason, Side};
use wire::{DisconnectCode, ServerMessage};

use crate::world::*;

/// A world with two members that have money. Bob also has units in a trading hold.
pub async fn members(folder: &std::path::Path, settings: Settings) -> World {
    let mut world = World::with(folder, settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "1000").await;
    world.open_hold("bob", BOND, "1000").await;
    world
}

pub fn unknown() -> wire::ClientMessage {
    wire::Cancel {
        client_order_id: 77,
        engine_order_id: 0,
    }
    .into()
}

// rows: R344
#[tokio::test]
async fn r344_both_protocols_share_one_book() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    ann.send(0, wire_order(5, Side::Buy, 1_000, 10))
        .await
        .unwrap();
    let acked = until(&mut of_ann, ack).await;
    let order = world.order(&acked.order_id.to_string()).await.unwrap();
    assert_eq!(
        (order.engine_order_id, order.client_order_id.as_str()),
        (acked.engine_order_id, "5")
    );
    // Placed by one protocol, cancelled by the other.
    world.cancel("ann", &order.order_id).await.unwrap();
    let gone = until(&mut of_ann, cancelled).await;
    assert_eq!(
        (gone.client_order_id, gone.reason, gone.client_seq),
        (5, CancelReason::UserRequest, 0)
    );
    let placed = world.place(buy("ann", "9", "4")).await.unwrap();
    ann.send(
        0,
        wire::Cancel {
            client_order_id: 0,
            engine_order_id: placed.engine_order_id,
        },
    )
    .await
    .unwrap();
    let gone = until(&mut of_ann, cancelled).await;
    assert_eq!(
        (gone.engine_order_id, gone.client_seq),
        (placed.engine_order_id, 2)
    );
    assert_eq!(
        world.order(&placed.order_id).await.unwrap().status(),
        OrderStatus::Cancelled
    );
    // An order by call draws on the session's trading hold.
    let by_rpc = world.place(buy("ann", "9", "4")).await.unwrap();
    ann.send(
        0,
        wire::Amend {
            client_order_id: 0,
            engine_order_id: by_rpc.engine_order_id,
            price_ticks: 950,
            quantity_lots: 0,
            new_client_order_id: 0,
        },
    )
    .await
    .unwrap();
    let amended = until(&mut of_ann, |m| match m {
        ServerMessage::Amended(amended) => Some(*amended),
        _ => None,
    });
    let amended = amended.await;
    assert_eq!(
        (
            amended.client_seq,
            amended.price_ticks,
            amended.kept_priority
        ),
        (3, 950, 0)
    );
    world.stop().await;
}

/// A client order id is unique among the user's open orders of both protocols. A second order with
/// the id is refused by either protocol. A repeat under its own key or sequence gets the first
/// answer.
// rows: R344
#[tokio::test]
async fn r344_one_client_order_id_sent_by_both_protocols_acts_once() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    let call = |id: &str, key: &str| PlaceOrderRequest {
        context: context(key),
        order: Some(Order {
            client_order_id: id.into(),
            ..buy("ann", "9", "4")
        }),
    };
    let bid = |price: &str, quantity: &str| (price.to_owned(), quantity.to_owned());
    let trader = || world.trader("ann");
    let taken = (tonic::Code::AlreadyExists, "DUPLICATE_CLIENT_ORDER_ID");

    // First by the session, then by the call.
    let by_session = wire_order(5, Side::Buy, 1_000, 10);
    raw.send(0, 1, by_session).await;
    let (number, message) = raw.until(|m| ack(m).is_some()).await;
    let acked = ack(&message).unwrap();
    let refusal = refused(trader().place_order(call("5", "k1")).await.unwrap_err());
    assert_eq!((refusal.0, &*refusal.2), taken);
    raw.send(0, 1, by_session).await;
    let again = raw.until(|m| ack(m).is_some()).await;
    assert_eq!(again, (number, message), "the first answer");

    // First by the call, then by the session.
    let placed = trader().place_order(call("6", "k2")).await.unwrap();
    assert!(placed.metadata().get("idempotent-replayed").is_none());
    let placed = placed.into_inner().order.unwrap();
    raw.send(0, 2, wire_order(6, Side::Buy, 800, 1)).await;
    let (_, message) = raw.until(|m| rejected(m).is_some()).await;
    let refusal = rejected(&message).unwrap();
    assert_eq!(
        (refusal.reason, refusal.client_order_id),
        (RejectReason::DuplicateClientOrderId, 6)
    );
    let again = trader().place_order(call("6", "k2")).await.unwrap();
    assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
    assert_eq!(again.into_inner().order.unwrap(), placed);
    let both = vec![bid("10.00", "10"), bid("9.00", "4")];
    assert_eq!(world.book().await.0, both);

    // Concurrently by both: one of them acts.
    for id in 10..30_u64 {
        raw.send(0, id, wire_order(id, Side::Buy, 700, 1)).await;
        let (text, key) = (id.to_string(), format!("both-{id}"));
        let by_call = trader().place_order(call(&text, &key)).await;
        let answer = raw.until(|m| ack(m).is_some() || rejected(m).is_some());
        let (_, message) = answer.await;
        if let Some(acked) = ack(&message) {
            assert_eq!(acked.client_order_id, id);
            let refusal = refused(by_call.expect_err("the session's order has the id"));
            assert_eq!((refusal.0, &*refusal.2), taken);
        } else {
            let reason = rejected(&message).unwrap().reason;
            assert_eq!(reason, RejectReason::DuplicateClientOrderId);
            by_call.expect("the call's order has the id");
        }
    }
    assert_eq!(world.status().await.instruments[0].open_orders, 22);

    // After an order has ended, the other protocol may use its id. The key and the sequence of the
    // order keep their answers.
    world
        .cancel("ann", &acked.order_id.to_string())
        .await
        .unwrap();
    trader().place_order(call("5", "k3")).await.unwrap();
    world.cancel("ann", &placed.order_id).await.unwrap();
    raw.send(0, 40, wire_order(6, Side::Buy, 800, 1)).await;
    raw.until(|m| ack(m).is_some_and(|ack| ack.client_seq == 40))
        .await;
    let again = trader().place_order(call("6", "k2")).await.unwrap();
    assert_eq!(again.into_inner().order.unwrap().order_id, placed.order_id);
    assert_eq!(world.status().await.instruments[0].open_orders, 22);
    world.stop().await;
}

#[tokio::test]
async fn sessions_of_one_connection_keep_the_order_of_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let (connection, mut reports) = world.connect().await;
    for channel in 0..12u16 {
        let user = format!("member-{channel}");
        world.user(&user, "1000", "0").await;
        let options = LoginOptions {
            money_hold_minor: 90_000,
            ..login(&user, "m")
        };
        connection.login(channel, options).await.unwrap();
    }
    let mut expected = Vec::new();
    for at in 0..240u64 {
        let channel = (at * 7 % 12) as u16;
        connection
            .send(
                channel,
                wire_order(at + 1, Side::Buy, 100 + (at % 5) as i64, 1),
            )
            .await
            .unwrap();
        expected.push((channel, at + 1));
    }
    let mut acks: Vec<(u64, u16, u64)> = Vec::new();
    while acks.len() < 240 {
        let Report {
            channel, message, ..
        } = next_report(&mut reports).await;
        if let Some(ack) = ack(&message) {
            acks.push((ack.node_sequence, channel, ack.client_order_id));
        }
    }
    acks.sort_unstable();
    let entered: Vec<_> = acks
        .iter()
        .map(|(_, channel, id)| (*channel, *id))
        .collect();
    assert_eq!(entered, expected);
    world.stop().await;
}

/// A client that can send arbitrary bytes.
pub struct Raw {
    _endpoint: quinn::Endpoint,
    pub connection: quinn::Connection,
    pub send: quinn::SendStream,
    pub receive: quinn::RecvStream,
    buffer: bytes::BytesMut,
}

impl Raw {
    pub async fn connect(world: &World) -> Self {
        Self::try_connect(world).await.unwrap()
    }

    /// Client configuration that trusts the world's gateway.
    pub fn config(world: &World) -> quinn::ClientConfig {
        Self::config_of(world, wire::ALPN)
    }

    /// As [`Raw::config`], for the protocol of this name.
    pub fn config_of(world: &World, alpn: &[u8]) -> quinn::ClientConfig {
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let certificate = std::fs::read(world.folder.join("gateway/tls/cert.der")).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.into()).unwrap();
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![alpn.to_vec()];
        let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
        quinn::ClientConfig::new(std::sync::Arc::new(crypto))
    }

    pub async fn try_connect(world: &World) -> Result<Self, quinn::ConnectionError> {
        let address = world.gateway.trading_address();
        in_time("the handshake", Self::to(address, Self::config(world))).await
    }

    /// Connects from another address of the loopback.
    pub async fn connect_from(world: &World, own: [u8; 4]) -> Self {
        Self::try_connect_from(world, own).await.unwrap()
    }

    pub async fn try_connect_from(
        world: &World,
        own: [u8; 4],
    ) -> Result<Self, quinn::ConnectionError> {
        let connecting = Self::between(own, world.gateway.trading_address(), Self::config(world));
        in_time("the handshake", connecting).await
    }

    pub async fn to(
        address: std::net::SocketAddr,
        config: quinn::ClientConfig,
    ) -> Result<Self, quinn::ConnectionError> {
        Self::between([127, 0, 0, 1], address, config).await
    }

    async fn between(
        own: [u8; 4],
        address: std::net::SocketAddr,
        config: quinn::ClientConfig,
    ) -> Result<Self, quinn::ConnectionError> {
        let mut endpoint = quinn::Endpoint::client((own, 0).into()).unwrap();
        endpoint.set_default_client_config(config);
        let connection = endpoint.connect(address, "cfa-trade").unwrap().await?;
        let (send, receive) = connection.open_bi().await?;
        Ok(Self {
            _endpoint: endpoint,
            connection,
            send,
            receive,
            buffer: bytes::BytesMut::new(),
        })
    }

    pub async fn send(
        &mut self,
        channel: u16,
        sequence: u64,
        message: impl Into<wire::ClientMessage>,
    ) {
        let mut out = bytes::BytesMut::new();
        wire::encode(&message.into(), channel, sequence, &mut out);
        self.send.write_all(&out).await.unwrap();
    }

    /// Logs in on a channel.
    pub async fn login(&mut self, channel: u16, login: wire::Login) {
        self.send(channel, 0, login).await;
        self.until(|m| matches!(m, ServerMessage::LoginAccepted(_)))
            .await;
    }

    /// Logs the session of a channel out.
    pub async fn log_out(&mut self, channel: u16) {
        self.send(channel, 0, wire::Logout {}).await;
        let is_end = |m: &ServerMessage| matches!(m, ServerMessage::Disconnect(_));
        self.until(is_end).await;
    }

    /// The next message; `None` after the end of the connection.
    async fn next(&mut self) -> Option<(wire::Header, ServerMessage)> {
        loop {
            if let Some(next) = wire::decode(&mut self.buffer).unwrap() {
                return Some(next);
            }
            let chunk = self.receive.read_chunk(usize::MAX, true).await.ok()??;
            self.buffer.extend_from_slice(&chunk.bytes);
        }
    }

    /// Reads 16 KiB of what waits, without their messages.
    pub async fn read_a_little(&mut self) {
        const BYTES: usize = 16 << 10;
        let mut read = 0;
        while read < BYTES {
            let chunk = self.receive.read_chunk(BYTES - read, true).await.unwrap();
            let bytes = chunk.expect("the stream is open").bytes;
            read += bytes.len();
            self.buffer.extend_from_slice(&bytes);
        }
    }

    /// The next message within 60 s. Sends a heartbeat every second.
    pub async fn next_with_heartbeats(&mut self) -> (wire::Header, ServerMessage) {
        let beat = std::time::Duration::from_secs(1);
        for _ in 0..60 {
            if let Ok(next) = tokio::time::timeout(beat, self.next()).await {
                return next.expect("the connection is open");
            }
            self.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
                .await;
        }
        panic!("no message within 60 s");
    }

    /// Reads until a message is wanted. Returns its number and the message.
    pub async fn until(&mut self, wanted: impl Fn(&ServerMessage) -> bool) -> (u64, ServerMessage) {
        let reading = async {
            loop {
                let (header, message) = self.next_with_heartbeats().await;
                if wanted(&message) {
                    return (header.sequence, message);
                }
            }
        };
        in_time("the wanted message", reading).await
    }

    /// Reads until `pick` returns a value.
    pub async fn pick<T>(&mut self, pick: impl Fn(&ServerMessage) -> Option<T>) -> T {
        let (_, message) = self.until(|message| pick(message).is_some()).await;
        pick(&message).unwrap()
    }

    /// Reads to the end. Returns the code of the last `Disconnect` message and of the QUIC close.
    pub async fn end(mut self) -> (Option<u16>, u64) {
        let mut last = None;
        let reading = async {
            while let Some((header, message)) = self.next().await {
                if let ServerMessage::Disconnect(end) = message {
                    assert_eq!(header.channel, wire::CONNECTION_CHANNEL);
                    last = Some(end.code);
                }
            }
            self.connection.closed().await
        };
        match in_time("the end of the connection", reading).await {
            quinn::ConnectionError::ApplicationClosed(close) => {
                (last, close.error_code.into_inner())
            }
            other => panic!("{other}"),
        }
    }
}

pub fn raw_login(user: &str, name: &str, money_hold_minor: i64) -> wire::Login {
    wire::Login {
        token: wire::Text::new(&format!("sandbox.trader.{user}")).unwrap(),
        session_name: wire::Text::new(name).unwrap(),
        last_sequence: 0,
        flags: 0,
        heartbeat_ms: 0,
        stp_group: 0,
        money_hold_minor,
    }
}

#[tokio::test]
async fn garbage_gets_its_code_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    let before = world.status().await;
    let mut order = bytes::BytesMut::new();
    wire::encode(
        &wire::ClientMessage::from(wire_order(1, Side::Buy, 1, 1)),
        0,
        1,
        &mut order,
    );
    let mut bad_side = order.clone();
    bad_side[wire::HEADER_LEN + 12] = 9;
    let mut bad_channel = order.clone();
    bad_channel[4] = 200;
    let garbage: Vec<u8> = (0..64u32).map(|i| (i * 37 % 251) as u8).collect();
    for (bytes, code) in [
        (garbage, DisconnectCode::Version),
        (
            vec![14, 0, 0x55, wire::VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            DisconnectCode::UnknownType,
        ),
        (
            vec![13, 0, 0x02, wire::VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            DisconnectCode::Malformed,
        ),
        (bad_side.to_vec(), DisconnectCode::BadField),
        (bad_channel.to_vec(), DisconnectCode::BadField),
        // A valid order without a login.
        (order.to_vec(), DisconnectCode::LoginExpected),
    ] {
        let mut raw = Raw::connect(&world).await;
        raw.send.write_all(&bytes).await.unwrap();
        assert_eq!(
            raw.end().await,
            (Some(code.code()), u64::from(code.code())),
            "{code}"
        );
    }
    // Garbage in a session: its orders stay, and a request after the garbage is not executed.
    let mut raw = Raw::connect(&world).await;
    raw.login(0, raw_login("ann", "a", 5_000_000)).await;
    raw.send(0, 1, wire_order(1, Side::Buy, 1_000, 10)).await;
    raw.until(|m| ack(m).is_some()).await;
    raw.send.write_all(&[0xff; 20]).await.unwrap();
    raw.send(0, 2, wire_order(2, Side::Buy, 1_000, 10)).await;
    assert_eq!(raw.end().await.1, u64::from(DisconnectCode::Version.code()));
    assert_eq!(
        world.book().await.0,
        [("10.00".to_owned(), "10".to_owned())]
    );
    assert_eq!(before.instruments[0].open_orders, 0);
    world.stop().await;
}

#[tokio::test]
async fn a_session_sets_its_trading_holds() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = members(folder.path(), Settings::default()).await;
    let (bob, mut of_bob) = world.session(login("bob", "b")).await;
    let mut answer = async |asset: u32, undrawn_minor: i64| {
        bob.send(
            0,
            wire::SetTradingHold {
                request_id: 9,
                asset,
                undrawn_minor,
            },
        )
        .await
        .unwrap();
        until(&mut of_bob, |m| match m {
            ServerMessage::TradingHold(answer) => Some(*answer),
            _ => None,
        })
        .await
    };
    let opened = answer(0, 1_000).await;
    assert_eq!(
        (opened.request_id, opened.outcome, opened.undrawn_minor),
        (9, wire::REQUEST_DONE, 1_000)
    );
    assert_eq!(
        answer(1, 400).await.undrawn_minor,
        400,
        "units of instrument 0, in the hold opened before"
    );
    assert_eq!(
        answer(0, 100_000_000).await.outcome,
        RejectReason::InsufficientBalance.code()
    );
    assert_eq!(
        answer(7, 1).await.outcome,
        RejectReason::UnknownInstrument.code()
    );
    assert_eq!(answer(0, -1).await.outcome, RejectReason::Malformed.code());
    assert_eq!(world.balance("bob", "CFA-RUB").await.1, "10.00");
    world.stop().await;
}

#[tokio::test]
async fn past_the_budget_identity_is_asked_for_the_very_order() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    for id in 1..=2 {
        ann.send(0, wire_order(id, Side::Buy, 100, 10))
            .await
            .unwrap();
        until(&mut of_ann, ack).await;
    }
    assert!(
        world.identity.take_limit_checks().is_empty(),
        "20.00 of 25.00: identity is not asked"
    );
    ann.send(0, wire_order(3, Side::Buy, 100, 10))
        .await
        .unwrap();
    until(&mut of_ann, ack).await;
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    world
        .identity
        .upsert_user("ann", |ann| ann.refuse_with = Some("No more today".into()));
    ann.send(0, wire_order(4, Side::Buy, 100, 10))
        .await
        .unwrap();
    let report = loop {
        let report = next_numbered(&mut of_ann).await;
        if rejected(&report.message).is_some() {
            break report;
        }
    };
    assert_eq!(
        rejected(&report.message).unwrap().reason,
        RejectReason::LimitExceeded
    );
    world.stop().await;
}
