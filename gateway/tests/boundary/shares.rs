//! A member's share of the front: slots in flight, windows in memory, reads of the journal.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use sequencer::{Core, Layout};
use tokio::sync::Semaphore;
use types::{RejectReason, Side};
use wire::ServerMessage;

use crate::sessions::{Raw, raw_login};
use crate::world::*;

/// True for a message that answers a request.
fn is_answer(message: &ServerMessage) -> bool {
    ack(message).is_some() || rejected(message).is_some() || cancelled(message).is_some()
}

/// The request that a message answers; false if it is `BUSY`.
fn answer(message: &ServerMessage) -> (u64, bool) {
    match (ack(message), cancelled(message), rejected(message)) {
        (Some(acked), ..) => (acked.client_seq, true),
        (_, Some(end), _) => (end.client_seq, true),
        (.., Some(refusal)) if refusal.reason == RejectReason::Busy => (refusal.client_seq, false),
        _ => panic!("{message:?}"),
    }
}

fn cancel(client_order_id: u64) -> wire::Cancel {
    wire::Cancel {
        client_order_id,
        engine_order_id: 0,
    }
}

fn order(id: u64) -> wire::NewOrder {
    wire_order(id, Side::Buy, 100, 1)
}

/// Cancel of an order that was never entered.
fn unknown() -> wire::Cancel {
    cancel(1 << 40)
}

/// Amend of an order that was never entered.
fn unknown_amend() -> wire::Amend {
    wire::Amend {
        client_order_id: 1 << 40,
        engine_order_id: 0,
        price_ticks: 100,
        quantity_lots: 0,
        new_client_order_id: 0,
    }
}

/// A world with ann and bob, both with money.
async fn members(folder: &std::path::Path, settings: Settings) -> World {
    let mut world = World::with(folder, settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    world
}

/// Stops the hot thread between two commands until the sender is dropped.
async fn stall(world: &World) -> SyncSender<()> {
    let (release, released) = sync_channel::<()>(1);
    let is_stalled = Arc::new(AtomicBool::new(false));
    let stalled = is_stalled.clone();
    let wait = move |_: &Core| {
        stalled.store(true, Ordering::SeqCst);
        let _ = released.recv();
    };
    world.port().inspect_with(Box::new(wait)).unwrap();
    let is_stalled = async || is_stalled.load(Ordering::SeqCst);
    until_true("the hot thread stops", is_stalled).await;
    release
}

/// The front reads connections while the hot thread is stopped. Orders above the member's slots are
/// `BUSY`, and repeats of requests in flight are not answered. A cancel and other members' orders
/// pass. The second round shows that every slot was returned.
// rows: R341
#[tokio::test]
async fn r341_past_its_slots_a_members_orders_are_busy_and_cancels_and_others_pass() {
    /// Half of the slots for orders: no other member has orders in flight.
    const SLOTS: u64 = 1_024;
    const ORDERS: u64 = 1_500;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    // The front runs on its own thread.
    settings.layout = Some(Layout::Shared);
    let world = members(folder.path(), settings).await;
    let (mut ann, mut bob) = (Raw::connect(&world).await, Raw::connect(&world).await);
    for (raw, user) in [(&mut ann, "ann"), (&mut bob, "bob")] {
        raw.login(0, raw_login(user, "a", 5_000_000)).await;
        raw.send(0, 1, order(1)).await;
        raw.until(|m| ack(m).is_some()).await;
    }
    let mut seq = 1;
    for round in 1..=2 {
        let stalled = stall(&world).await;
        let first = seq + 1;
        for id in first..first + ORDERS {
            ann.send(0, id, order(id)).await;
        }
        for id in first..first + 20 {
            ann.send(0, id, order(id)).await;
        }
        seq = first + ORDERS;
        // Orders 1 and 2 are open when their round begins.
        ann.send(0, seq, cancel(round)).await;
        bob.send(0, 1 + round, order(1 + round)).await;
        // The front answers a repeat itself: before it a refusal of the order would have come.
        bob.send(0, 1, order(1)).await;
        let (_, message) = bob.until(is_answer).await;
        assert_eq!(answer(&message), (1, true));
        for id in first + SLOTS..first + ORDERS {
            let (number, message) = ann.until(is_answer).await;
            let refusal = rejected(&message).expect("only refusals are sent");
            let is = (number, refusal.client_seq, refusal.reason);
            assert_eq!(is, (0, id, RejectReason::Busy));
        }
        drop(stalled);
        // Each request is answered once, those that were carried out in order. On a busy machine
        // the engine's ring may stay full until the hot thread refuses some.
        let (mut answered, mut last) = (HashSet::new(), 0);
        for _ in 0..=SLOTS {
            let (_, message) = ann.until(is_answer).await;
            let (id, is_done) = answer(&message);
            if is_done {
                assert!(id > last, "{message:?}");
                last = id;
            }
            assert!(answered.insert(id), "answered twice: {message:?}");
        }
        assert_eq!(answered, (first..first + SLOTS).chain([seq]).collect());
        let (_, message) = bob.until(is_answer).await;
        assert_eq!(answer(&message).0, 1 + round, "{message:?}");
    }
    world.stop().await;
}

/// At most 64 requests of a session wait for identity, the checked order included. Their repeats do
/// not get `BUSY`, because the client would send them again as new orders.
// rows: R341
#[tokio::test]
async fn r341_repeats_of_requests_that_wait_for_identity_are_not_busy() {
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let mut ann = Raw::connect(&world).await;
    ann.login(0, raw_login("ann", "a", 5_000_000)).await;
    world.identity.take_limit_checks();
    let latch = Arc::new(Semaphore::new(0));
    world
        .identity
        .with(|state| state.limit_latch = Some(latch.clone()));
    let past_budget = wire_order(1, Side::Buy, 100, 30);
    ann.send(0, 1, past_budget).await;
    let is_asked = async || !world.identity.take_limit_checks().is_empty();
    until_true("identity is asked", is_asked).await;
    for seq in 2..=65 {
        ann.send(0, seq, unknown_amend()).await;
    }
    ann.send(0, 1, past_budget).await;
    for seq in 2..=64 {
        ann.send(0, seq, unknown_amend()).await;
    }
    ann.send(0, 66, unknown_amend()).await;
    for seq in [65, 66] {
        let (number, message) = ann.until(is_answer).await;
        let refusal = rejected(&message).expect("only refusals are sent");
        let is = (number, refusal.client_seq, refusal.reason);
        assert_eq!(is, (0, seq, RejectReason::Busy));
    }
    latch.close();
    let (number, message) = ann.until(is_answer).await;
    let acked = ack(&message).map(|ack| ack.client_seq);
    assert_eq!((number, acked), (1, Some(1)));
    ann.send(0, 67, unknown()).await;
    for (number, seq) in (2..=64).map(|seq| (seq, seq)).chain([(65, 67)]) {
        let (found, message) = ann.until(is_answer).await;
        let refusal = rejected(&message).expect("the order is unknown");
        let is = (found, refusal.client_seq, refusal.reason);
        assert_eq!(is, (number, seq, RejectReason::UnknownOrder), "once");
    }
    world.stop().await;
}

/// A metrics recorder that counts journal lookups of fronts that start on this thread.
#[derive(Default)]
struct LookupCounter(Arc<AtomicU64>);

impl LookupCounter {
    fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Recorder for LookupCounter {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match key.name() {
            "trading_look_ups_total" => Counter::from_arc(self.0.clone()),
            _ => Counter::noop(),
        }
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// A member with more messages than the pool of windows keeps only its own newest messages. Another
/// member's idle session still resumes from memory.
// rows: R341
#[tokio::test]
async fn r341_a_busy_member_does_not_evict_the_window_of_another() {
    const OF_BOB: u64 = 100;
    /// More than the smallest pool, 2,048 messages.
    const OF_ANN: u64 = 3_000;
    let look_ups = LookupCounter::default();
    let _recording = metrics::set_default_local_recorder(&look_ups);
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.gateway.window_bytes_max = 0;
    let world = members(folder.path(), settings).await;
    let (mut ann, mut bob) = (Raw::connect(&world).await, Raw::connect(&world).await);
    for (raw, user, messages) in [(&mut bob, "bob", OF_BOB), (&mut ann, "ann", OF_ANN)] {
        raw.login(0, raw_login(user, "a", 0)).await;
        for seq in 1..=messages {
            raw.send(0, seq, unknown()).await;
        }
        for number in 1..=messages {
            assert_eq!(raw.until(is_answer).await.0, number);
        }
        if user == "bob" {
            raw.connection.close(0_u32.into(), b"");
        }
    }
    let mut bob = Raw::connect(&world).await;
    bob.send(0, 0, raw_login("bob", "a", 0)).await;
    for number in 1..=OF_BOB {
        assert_eq!(bob.until(is_answer).await.0, number);
    }
    assert_eq!(look_ups.count(), 0, "resumed from memory");
    world.stop().await;
}

/// A client with a small receive window: unread messages stay with the exchange.
struct SmallWindow {
    _endpoint: quinn::Endpoint,
    _connection: quinn::Connection,
    send: quinn::SendStream,
    receive: quinn::RecvStream,
    buffer: bytes::BytesMut,
}

impl SmallWindow {
    async fn connect(world: &World) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let certificate = std::fs::read(world.folder.join("gateway/tls/cert.der")).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate.into()).unwrap();
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![wire::ALPN.to_vec()];
        let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
        let mut transport = quinn::TransportConfig::default();
        transport.stream_receive_window((16_u32 << 10).into());
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport));
        let mut endpoint = quinn::Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
        endpoint.set_default_client_config(config);
        let address = world.gateway.trading_address();
        let connecting = endpoint.connect(address, "cfa-trade").unwrap();
        let connection = in_time("the handshake", connecting).await.unwrap();
        let (send, receive) = connection.open_bi().await.unwrap();
        Self {
            _endpoint: endpoint,
            _connection: connection,
            send,
            receive,
            buffer: bytes::BytesMut::new(),
        }
    }

    async fn send(&mut self, channel: u16, message: impl Into<wire::ClientMessage>) {
        let mut out = bytes::BytesMut::new();
        wire::encode(&message.into(), channel, 0, &mut out);
        self.send.write_all(&out).await.unwrap();
    }

    async fn next(&mut self) -> (wire::Header, ServerMessage) {
        loop {
            if let Some(next) = wire::decode(&mut self.buffer).unwrap() {
                return next;
            }
            let chunk = self.receive.read_chunk(usize::MAX, true).await.unwrap();
            let chunk = chunk.expect("the connection is open");
            self.buffer.extend_from_slice(&chunk.bytes);
        }
    }
}

/// Sessions of one connection resume from the journal while their client does not read. Each range
/// is read once and kept until the connection has space.
// rows: R343
#[tokio::test]
async fn r343_what_a_slow_client_lacks_is_read_from_the_journal_once() {
    const SESSIONS: u16 = 4;
    /// About 200 KiB per session. Two sessions fill the connection.
    const MESSAGES: u64 = 3_000;
    let look_ups = LookupCounter::default();
    let _recording = metrics::set_default_local_recorder(&look_ups);
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.gateway.window_messages_max = 16;
    let world = members(folder.path(), settings).await;
    let login = |channel: u16| raw_login("ann", &format!("s-{channel}"), 0);
    let mut first = Raw::connect(&world).await;
    for channel in 0..SESSIONS {
        first.login(channel, login(channel)).await;
        for seq in 1..=MESSAGES {
            first.send(channel, seq, unknown()).await;
        }
        for number in 1..=MESSAGES {
            assert_eq!(first.until(is_answer).await.0, number);
        }
    }
    let mut slow = SmallWindow::connect(&world).await;
    for channel in 0..SESSIONS {
        slow.send(channel, login(channel)).await;
    }
    // Gives every lookup time to start and to complete, so that its messages wait for space.
    // Without that the test passes but proves less.
    let are_asked = async || look_ups.count() >= u64::from(SESSIONS);
    let asked = until_true("every session is looked up", are_asked);
    let _ = tokio::time::timeout(Duration::from_secs(2), asked).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    slow.send(wire::CONNECTION_CHANNEL, wire::Heartbeat {})
        .await;
    let mut next = [1; SESSIONS as usize];
    let reading = async {
        while next.iter().any(|next| *next <= MESSAGES) {
            let (header, message) = slow.next().await;
            if header.sequence == 0 {
                let ended = matches!(message, ServerMessage::Disconnect(_));
                assert!(!ended, "{message:?}");
                continue;
            }
            let next = &mut next[usize::from(header.channel)];
            assert_eq!(header.sequence, *next, "in order, and once");
            let refusal = rejected(&message).expect("a refused cancel");
            assert_eq!(refusal.client_seq, *next);
            *next += 1;
        }
    };
    in_time("every message", reading).await;
    // Fewer if a window still had all messages: it drops none that is not durable and sent, and on
    // a busy machine few are when the last one arrives.
    let look_ups = look_ups.count();
    assert!(
        (1..=u64::from(SESSIONS)).contains(&look_ups),
        "at most one look-up per session, and {look_ups}"
    );
    world.stop().await;
}
