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
use wire::{CHANNELS_MAX, DisconnectCode, ServerMessage};

use crate::sessions::{Raw, raw_login};
use crate::world::*;

/// True for a message that answers a request.
pub fn is_answer(message: &ServerMessage) -> bool {
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
pub fn unknown() -> wire::Cancel {
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
pub async fn members(folder: &std::path::Path, settings: Settings) -> World {
    let mut world = World::with(folder, settings).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    world
}

/// Stops the hot thread between two commands until the sender is dropped.
pub async fn stall(world: &World) -> SyncSender<()> {
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

/// Sends orders 1 to `count` in one write, and waits until the operating system has their
/// datagrams.
async fn send_together(raw: &mut Raw, count: u64) {
    let frames = raw.connection.stats().frame_tx.stream;
    let mut orders = bytes::BytesMut::new();
    for id in 1..=count {
        wire::encode(&wire::ClientMessage::from(order(id)), 0, id, &mut orders);
    }
    raw.send.write_all(&orders).await.unwrap();
    let are_sent = async || raw.connection.stats().frame_tx.stream > frames;
    until_true("the orders are sent", are_sent).await;
}

async fn next_ack(raw: &mut Raw) -> wire::OrderAck {
    let (_, message) = raw.until(|m| ack(m).is_some()).await;
    ack(&message).expect("`until` returns an OrderAck")
}

/// The front reads at most 32 messages of a connection per round, however its bytes arrive. Another
/// member's order of the same round follows them.
// rows: R341
#[tokio::test]
async fn r341_a_members_orders_that_arrive_together_delay_another_by_32_at_most() {
    const PER_ROUND: usize = 32;
    /// As many as a client may send before the first acknowledgement.
    const ORDERS: u64 = 150;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    // While the hot thread is stopped, the front reads nothing.
    settings.layout = Some(Layout::Fused);
    let world = members(folder.path(), settings).await;
    let (mut ann, mut bob) = (Raw::connect(&world).await, Raw::connect(&world).await);
    for (raw, user) in [(&mut ann, "ann"), (&mut bob, "bob")] {
        raw.login(0, raw_login(user, "a", 5_000_000)).await;
    }
    let stalled = stall(&world).await;
    send_together(&mut ann, ORDERS).await;
    send_together(&mut bob, 1).await;
    drop(stalled);
    let of_bob = next_ack(&mut bob).await.node_sequence;
    let mut before = 0;
    for id in 1..=ORDERS {
        let acked = next_ack(&mut ann).await;
        assert_eq!(acked.client_seq, id);
        before += usize::from(acked.node_sequence < of_bob);
    }
    assert!(before <= PER_ROUND, "{before} orders of ann");
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

/// Identity answers nothing about ann, and an address waits with more logins of ann than its share.
/// The rest is refused. A member at another address logs in and trades.
// rows: R341
#[tokio::test]
async fn r341_logins_of_one_address_that_wait_delay_no_login_of_another() {
    /// 1,280 logins; the share is half of the 2,048 that may wait.
    const CONNECTIONS: u16 = 20;
    const OTHER: [u8; 4] = [127, 0, 0, 2];
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.logins_per_s = 0;
    settings.gateway.login_timeout_ms = 600_000;
    settings.gateway.heartbeat_ms = 60_000;
    let world = members(folder.path(), settings).await;
    let latch = block_profile(&world, "ann");
    let mut flood = Vec::new();
    for connection in 0..CONNECTIONS {
        let mut raw = Raw::connect_from(&world, OTHER).await;
        for channel in 0..CHANNELS_MAX as u16 {
            let name = format!("{connection}-{channel}");
            raw.send(channel, 0, raw_login("ann", &name, 0)).await;
        }
        flood.push(raw);
    }
    let (_, refusal) = flood[usize::from(CONNECTIONS) - 1]
        .until(is_login_answer)
        .await;
    assert_eq!(
        refused_with(&refusal),
        Some(DisconnectCode::NotReady.code())
    );

    let (bob, mut of_bob) = world.session(with_money("bob", "b")).await;
    bob.send(0, order(1)).await.unwrap();
    until(&mut of_bob, ack).await;
    // Each answer returns its place, although the connections have ended.
    drop(flood);
    latch.close();
    until_true("the address logs in", async || {
        let mut raw = Raw::connect_from(&world, OTHER).await;
        raw.send(0, 0, raw_login("bob", "c", 0)).await;
        let (_, answer) = raw.until(is_login_answer).await;
        refused_with(&answer).is_none()
    })
    .await;
    world.stop().await;
}

/// A login above the user's rate is refused without a call of identity, which does not answer here.
// rows: R341
#[tokio::test]
async fn r341_logins_above_the_rate_do_not_wait_for_identity() {
    const LOGINS: u16 = 20;
    let folder = tempfile::tempdir().unwrap();
    let world = members(folder.path(), Settings::default()).await;
    drop(world.session(login("ann", "a")).await);
    // After a restart the user is known, and no profile is cached.
    let mut settings = Settings::default();
    settings.gateway.logins_per_s = 1;
    settings.gateway.login_timeout_ms = 600_000;
    let world = world.restart(settings).await;
    let latch = block_profile(&world, "ann");
    let mut ann = Raw::connect(&world).await;
    for channel in 0..LOGINS {
        ann.send(channel, 0, raw_login("ann", &format!("s-{channel}"), 0))
            .await;
    }
    let (_, refusal) = ann.until(is_login_answer).await;
    let code = DisconnectCode::TooManySessions.code();
    assert_eq!(refused_with(&refusal), Some(code));
    latch.close();
    ann.until(|m| matches!(m, ServerMessage::LoginAccepted(_)))
        .await;
    world.stop().await;
}

/// Identity answers questions for the user's profile after the returned latch is closed.
pub fn block_profile(world: &World, user_id: &str) -> Arc<Semaphore> {
    let latch = Arc::new(Semaphore::new(0));
    world.identity.with(|state| {
        let latches = &mut state.profile_latches;
        latches.insert(user_id.to_owned(), latch.clone());
    });
    latch
}

fn is_login_answer(message: &ServerMessage) -> bool {
    matches!(message, ServerMessage::LoginAccepted(_)) || refused_with(message).is_some()
}

/// The code of a refused login.
fn refused_with(message: &ServerMessage) -> Option<u16> {
    match message {
        ServerMessage::Disconnect(end) => Some(end.code),
        _ => None,
    }
}

/// A metrics recorder of one counter, for handles that are made on this thread.
pub struct OneCounter(&'static str, Arc<AtomicU64>);

impl OneCounter {
    pub fn new(name: &'static str) -> Self {
        Self(name, Arc::default())
    }

    pub fn count(&self) -> u64 {
        self.1.load(Ordering::SeqCst)
    }
}

impl Recorder for OneCounter {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match key.name() == self.0 {
            true => Counter::from_arc(self.1.clone()),
            false => Counter::noop(),
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
    let look_ups = OneCounter::new("trading_look_ups_total");
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
    connection: quinn::Connection,
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
            connection,
            send,
            receive,
            buffer: bytes::BytesMut::new(),
        }
    }

    async fn send(&mut self, channel: u16, sequence: u64, message: impl Into<wire::ClientMessage>) {
        let mut out = bytes::BytesMut::new();
        wire::encode(&message.into(), channel, sequence, &mut out);
        self.send.write_all(&out).await.unwrap();
    }

    /// Logs in on channel 0.
    async fn login(&mut self, login: wire::Login) {
        self.send(0, 0, login).await;
        let reading =
            async { while !matches!(self.next().await.1, ServerMessage::LoginAccepted(_)) {} };
        in_time("the login", reading).await;
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
    let look_ups = OneCounter::new("trading_look_ups_total");
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
        slow.send(channel, 0, login(channel)).await;
    }
    // Gives every lookup time to start and to complete, so that its messages wait for space.
    // Without that the test passes but proves less.
    let are_asked = async || look_ups.count() >= u64::from(SESSIONS);
    let asked = until_true("every session is looked up", are_asked);
    let _ = tokio::time::timeout(Duration::from_secs(2), asked).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    slow.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
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

/// The front has work only when a round may send something: the hot thread parks while a client
/// reads nothing of a retransmission. The client is disconnected although it sends heartbeats.
// rows: R345
#[tokio::test]
async fn r345_a_client_that_reads_nothing_it_asked_for_costs_no_rounds_and_is_disconnected() {
    const BATCH: u64 = 512;
    /// About 400 KiB: more than the front appends for a client that does not read.
    const ORDERS: u64 = 8 * BATCH;
    let folder = tempfile::tempdir().unwrap();
    // On a busy machine the hot thread needs some seconds to park.
    let settings = Settings::for_unread(15_000);
    let world = members(folder.path(), settings).await;
    let mut first = Raw::connect(&world).await;
    first.login(0, raw_login("ann", "a", 5_000_000)).await;
    for batch in 0..ORDERS / BATCH {
        for id in 1 + batch * BATCH..=(batch + 1) * BATCH {
            first.send(0, id, order(id)).await;
        }
        for _ in 0..BATCH {
            next_ack(&mut first).await;
        }
    }
    let mut slow = SmallWindow::connect(&world).await;
    let from_now = wire::Login {
        flags: wire::LOGIN_FROM_NOW,
        ..raw_login("ann", "a", 0)
    };
    slow.login(from_now).await;
    let received = slow.connection.stats().udp_rx.bytes;
    let wanted = wire::Retransmit {
        request_id: 1,
        first: 1,
        last: ORDERS,
    };
    slow.send(0, 0, wanted).await;
    let has_begun = async || slow.connection.stats().udp_rx.bytes > received + (8 << 10);
    until_true("the retransmission begins", has_begun).await;
    let parks = world.parks();
    until_true("the hot thread parks", async || world.parks() > parks + 1).await;
    let ended = slow.connection.close_reason();
    assert!(ended.is_none(), "parks only without the client: {ended:?}");
    let ending = async {
        loop {
            let closed = tokio::time::timeout(Duration::from_secs(1), slow.connection.closed());
            if let Ok(reason) = closed.await {
                return reason;
            }
            slow.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
                .await;
        }
    };
    match in_time("the exchange closes the connection", ending).await {
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

/// A balance waits for a client without space. The front does not poll it meanwhile, and another
/// session of the user is sent the balance.
#[tokio::test]
async fn a_balance_for_a_client_that_does_not_read_costs_no_rounds() {
    /// About 350 KiB of reports: no space for more, and not enough for a slow consumer.
    const REQUESTS: u64 = 5_000;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unthrottled();
    settings.layout = Some(Layout::Fused);
    let mut world = members(folder.path(), settings).await;
    let mut slow = SmallWindow::connect(&world).await;
    slow.login(raw_login("ann", "a", 0)).await;
    let mut other = Raw::connect(&world).await;
    other.login(0, raw_login("ann", "b", 0)).await;
    for seq in 1..=REQUESTS {
        slow.send(0, seq, unknown()).await;
    }
    // The hot thread parks after the reports. If it parks earlier, the test passes but proves less.
    let parks = world.parks();
    until_true("the requests are read", async || world.parks() > parks).await;
    world.deposit("ann", "CFA-RUB", "1").await;
    let is_new = |m: &ServerMessage| matches!(m, ServerMessage::LedgerBalance(b) if b.balance_minor == 10_000_100);
    other.until(is_new).await;
    slow.send(wire::CONNECTION_CHANNEL, 0, wire::Heartbeat {})
        .await;
    let parks = world.parks();
    until_true("the hot thread parks", async || world.parks() > parks + 1).await;
    let ended = slow.connection.close_reason();
    assert!(ended.is_none(), "parks only without the client: {ended:?}");
    world.stop().await;
}
