//! Seeded order flow of a few members over the binary protocol, and a record of the messages that
//! they received.
//!
//! The flow is open loop up to a bound of requests in flight. It survives a server crash: the
//! client library resumes the sessions and resends the requests that the server has not seen. The
//! record spans all connections. This module detects gaps, malformed messages and repeated reports;
//! the tests check the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use client::{Connection, LoginOptions, Reports, Trust};
use types::Side;
use wire::{Cancel, ClientMessage, ServerMessage};

use crate::Platform;
use crate::member::{instrument_of, limit};
use crate::process::PATIENCE;
use crate::world::User;

/// Most unanswered requests.
const IN_FLIGHT_MAX: usize = 128;
/// Price around which the flow trades, in kopecks.
const MIDDLE_TICKS: i64 = 10_000;

/// SplitMix64 generator: a seed gives the same numbers on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; its modulo bias is negligible for small bounds.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// One member's view of one trade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    pub price_ticks: i64,
    pub quantity_lots: u64,
}

/// Record of the messages that the members received.
#[derive(Debug, Default)]
pub struct Received {
    /// Public order id to the channel of its owner.
    pub acknowledged: BTreeMap<String, u16>,
    /// (trade id, channel) to the fill.
    pub fills: BTreeMap<(String, u16), Fill>,
    /// Client order ids of cancelled orders.
    pub cancelled: BTreeSet<u64>,
    /// Reasons of rejected requests.
    pub rejects: BTreeMap<&'static str, u64>,
    /// Requests sent and not answered.
    waiting: BTreeSet<(u16, u64)>,
    /// Answers that arrived before their request was recorded.
    early: BTreeSet<(u16, u64)>,
    /// Violations.
    pub violations: Vec<String>,
}

impl Received {
    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn on_sent(&mut self, request: (u16, u64)) {
        if !self.early.remove(&request) {
            self.waiting.insert(request);
        }
    }

    fn on_message(&mut self, channel: u16, message: &ServerMessage) {
        let answered = (channel, message.answers());
        if answered.1 != 0 && !self.waiting.remove(&answered) {
            self.early.insert(answered);
        }
        match message {
            ServerMessage::OrderAck(ack) => {
                let id = ack.order_id.to_string();
                if self.acknowledged.insert(id.clone(), channel).is_some() {
                    self.violations
                        .push(format!("order {id} was acknowledged twice"));
                }
            }
            ServerMessage::Fill(fill) => {
                let id = fill.trade_id.to_string();
                let received = Fill {
                    price_ticks: fill.price_ticks,
                    quantity_lots: fill.quantity_lots,
                };
                if self.fills.insert((id.clone(), channel), received).is_some() {
                    self.violations.push(format!(
                        "trade {id} was reported twice on channel {channel}"
                    ));
                }
            }
            ServerMessage::Cancelled(cancelled) => {
                self.cancelled.insert(cancelled.client_order_id);
            }
            ServerMessage::Rejected(rejected) => {
                *self.rejects.entry(rejected.reason.as_str()).or_default() += 1;
            }
            _ => {}
        }
    }
}

/// The members on one connection: even channels buy, odd channels sell.
pub struct Flow {
    pub connection: Connection,
    received: Arc<Mutex<Received>>,
    stop: Arc<AtomicBool>,
    sender: tokio::task::JoinHandle<()>,
    listener: tokio::task::JoinHandle<()>,
}

impl Flow {
    /// Logs the members in and starts the flow.
    pub async fn start(platform: &Platform, members: &[User], instrument: &str, seed: u64) -> Self {
        let (connection, reports) =
            Connection::connect(platform.address("trading"), Trust::Loopback)
                .await
                .expect("a connection");
        for (channel, member) in members.iter().enumerate() {
            let channel = u16::try_from(channel).expect("a few members");
            connection
                .login(channel, LoginOptions::new(&member.token(), "flow"))
                .await
                .expect("a login");
        }
        let instrument = instrument_of(&connection, instrument);
        let (received, stop) = (
            Arc::<Mutex<Received>>::default(),
            Arc::new(AtomicBool::new(false)),
        );
        let channels = u16::try_from(members.len()).expect("a few members");
        let source = Source {
            random: Random::new(seed),
            channels,
            instrument,
            next_id: 1,
            sent: Vec::new(),
        };
        let sender = tokio::spawn(send(
            connection.clone(),
            source,
            received.clone(),
            stop.clone(),
        ));
        let listener = tokio::spawn(listen(reports, received.clone()));
        Self {
            connection,
            received,
            stop,
            sender,
            listener,
        }
    }

    /// Orders acknowledged so far.
    pub fn acknowledged(&self) -> usize {
        self.received().acknowledged.len()
    }

    fn received(&self) -> MutexGuard<'_, Received> {
        lock(&self.received)
    }

    /// Waits until this many orders are acknowledged.
    pub async fn until_acknowledged(&self, orders: usize) {
        self.until(&format!("{orders} acknowledgements"), |received| {
            received.acknowledged.len() >= orders
        })
        .await;
    }

    async fn until(&self, what: &str, done: impl Fn(&Received) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(&self.received()) {
            assert!(
                Instant::now() < deadline,
                "timed out waiting for {what}: {} in flight",
                self.received().in_flight()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Stops sending, waits for every answer, and returns the record.
    pub async fn finish(mut self) -> Received {
        self.stop.store(true, Ordering::SeqCst);
        // The sender may send one more request before it ends.
        (&mut self.sender).await.expect("the sender ends");
        self.until("the last answers", |received| received.in_flight() == 0)
            .await;
        self.listener.abort();
        drop(self.connection);
        std::mem::take(&mut *lock(&self.received))
    }
}

fn lock(received: &Mutex<Received>) -> MutexGuard<'_, Received> {
    received.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Generator of requests.
struct Source {
    random: Random,
    channels: u16,
    instrument: u32,
    next_id: u64,
    /// (channel, client id) of orders sent.
    sent: Vec<(u16, u64)>,
}

impl Source {
    fn next(&mut self) -> (u16, ClientMessage) {
        if !self.sent.is_empty() && self.random.below(100) < 30 {
            let at = usize::try_from(self.random.below(self.sent.len() as u64)).expect("an index");
            let (channel, id) = self.sent.swap_remove(at);
            return (
                channel,
                Cancel {
                    client_order_id: id,
                    engine_order_id: 0,
                }
                .into(),
            );
        }
        let channel =
            u16::try_from(self.random.below(u64::from(self.channels))).expect("a channel");
        let id = self.next_id;
        self.next_id += 1;
        let side = if channel.is_multiple_of(2) {
            Side::Buy
        } else {
            Side::Sell
        };
        let away = i64::try_from(self.random.below(40)).expect("small") - 20;
        self.sent.push((channel, id));
        let order = limit(
            id,
            self.instrument,
            side,
            MIDDLE_TICKS + away,
            self.random.below(9) + 1,
        );
        (channel, order.into())
    }
}

async fn send(
    connection: Connection,
    mut source: Source,
    received: Arc<Mutex<Received>>,
    stop: Arc<AtomicBool>,
) {
    while !stop.load(Ordering::SeqCst) {
        let (channel, message) = source.next();
        // The test resumes the connection after it has restarted the server.
        loop {
            match connection.send(channel, message).await {
                Ok(client_seq) => {
                    lock(&received).on_sent((channel, client_seq));
                    break;
                }
                Err(_) if stop.load(Ordering::SeqCst) => return,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        while lock(&received).in_flight() >= IN_FLIGHT_MAX && !stop.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn listen(mut reports: Reports, received: Arc<Mutex<Received>>) {
    while let Some(report) = reports.recv().await {
        match report {
            Ok(report) => lock(&received).on_message(report.channel, &report.message),
            Err(error @ (client::Error::Gap { .. } | client::Error::Wire(_))) => {
                lock(&received).violations.push(error.to_string())
            }
            // The connection is lost; the reports continue after the resume.
            Err(_) => {}
        }
    }
}
