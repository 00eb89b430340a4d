//! A trading client under chaos: sessions on one connection through a proxy, seeded requests, and a
//! record of every numbered message. It dies by order, without a word to the server, and comes back.
//!
//! It dies in one of two ways. As a process: connection and client library are gone, and it logs in
//! anew with the last number it has recorded; what the server has not seen it asks again under a new
//! client sequence. As a line: the library's `resume` goes on on the same connection.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use client::{Connection, Error, LoginOptions, Report, Reports, Trust};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use types::{RejectReason, Side, TimeInForce};
use wire::{Amend, Cancel, ClientMessage, MassCancel, NewOrder, ServerMessage};

use super::judge::encoded;
use super::now_ns;
use crate::flow::Random;
use crate::member::instrument_of;
use crate::process::PATIENCE;
use crate::udp_proxy::Proxy;
use crate::world::User;

/// Price around which everybody trades, in kopecks, and how far away orders rest that never trade.
const MIDDLE_TICKS: u64 = 10_000;
const FAR_TICKS: u64 = 3_000;
/// Requests of a session without an answer, and its open orders, at most.
const WAITING_MAX: usize = 64;
const OPEN_MAX: usize = 40;
/// Silence after which the client gives the connection up: the server speaks twice a second.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// How long one attempt to come back may take.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// What the driver wants of a trader.
pub enum Order {
    /// Dies without a word and comes back after this time.
    Die { is_process: bool, away: Duration },
    /// Sends no more, ends its orders, hears everything, returns.
    Finish,
}

/// When a client died, and when it tried to come back: nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Death {
    pub at_ns: u64,
    pub back_ns: u64,
}

/// A request that acts and was not answered.
struct Asked {
    message: ClientMessage,
    /// The login under which it was sent last.
    login: u32,
}

/// One session as its client knows it.
pub struct Session {
    pub name: String,
    pub cancel_on_disconnect: bool,
    /// Message n at place n - 1, as bytes on channel 0.
    pub messages: Vec<Bytes>,
    waiting: BTreeMap<u64, Asked>,
    answered: BTreeSet<u64>,
    acknowledged: BTreeSet<u64>,
    /// Client ids of open orders.
    open: Vec<u64>,
    /// Client sequence of the mass cancel that ends it all.
    last: Option<u64>,
}

pub struct Trader {
    pub user: User,
    pub sessions: Vec<Session>,
    pub proxy: Arc<Proxy>,
    /// What should never have been told.
    pub wrong: Vec<String>,
    pub deaths: Vec<Death>,
    /// Logins by the library's resume, and by a new process.
    pub resumes: u64,
    pub restarts: u64,
    /// Requests asked again by the library and by the client itself.
    pub asked_again: u64,
    /// Requests whose refusal was lost with a connection: the server has not seen them.
    pub refusals_lost: u64,
    /// Why connections ended, and reasons of refused requests.
    pub troubles: BTreeMap<String, u64>,
    bond: String,
    random: Random,
    pace: Duration,
    link: Option<(Connection, Reports)>,
    instrument: u32,
    is_lost: bool,
    /// The library has given a session up: only a new connection has all of them.
    is_broken: bool,
    is_ending: bool,
    logins: u32,
    next_order: u64,
    heard: Instant,
    progress: Arc<AtomicU64>,
}

impl Trader {
    /// `number` tells the traders of one run apart.
    pub fn new(number: u64, user: User, bond: &str, proxy: Proxy, seed: u64) -> Self {
        let session = |name: &str, cancel_on_disconnect| Session {
            name: name.to_owned(),
            cancel_on_disconnect,
            messages: Vec::new(),
            waiting: BTreeMap::new(),
            answered: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            open: Vec::new(),
            last: None,
        };
        Self {
            user,
            sessions: vec![session("cancels", true), session("keeps", false)],
            proxy: Arc::new(proxy),
            wrong: Vec::new(),
            deaths: Vec::new(),
            resumes: 0,
            restarts: 0,
            asked_again: 0,
            refusals_lost: 0,
            troubles: BTreeMap::new(),
            bond: bond.to_owned(),
            random: Random::new(seed.wrapping_add(number << 32)),
            pace: Duration::from_millis(10),
            link: None,
            instrument: 0,
            is_lost: false,
            is_broken: false,
            is_ending: false,
            logins: 0,
            next_order: 1,
            heard: Instant::now(),
            progress: Arc::default(),
        }
    }

    /// One request in this time.
    #[must_use]
    pub fn paced(mut self, pace: Duration) -> Self {
        self.pace = pace;
        self
    }

    /// Numbered messages received so far.
    pub fn progress(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Trades until it is told to finish, and is back with everything it was told.
    ///
    /// # Panics
    /// It cannot log in, or does not hear the last answers, within a minute.
    pub async fn run(mut self, mut orders: mpsc::Receiver<Order>) -> Self {
        self.connect().await;
        let mut tick = tokio::time::interval(self.pace);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ending_by = None;
        loop {
            tokio::select! {
                order = orders.recv(), if !self.is_ending => match order {
                    Some(Order::Die { is_process, away }) => self.die(is_process, away).await,
                    Some(Order::Finish) | None => {
                        self.is_ending = true;
                        ending_by = Some(Instant::now() + PATIENCE);
                    }
                },
                report = next(&mut self.link) => self.take(report),
                _ = tick.tick() => self.act().await,
            }
            if self.has_finished() {
                self.check_unanswered();
                self.link = None;
                return self;
            }
            if let Some(by) = ending_by {
                assert!(
                    Instant::now() < by,
                    "{} lacks its last answers: {:?}",
                    self.user.id,
                    self.troubles
                );
            }
        }
    }

    async fn act(&mut self) {
        if self.heard.elapsed() > SILENCE_MAX {
            self.trouble("silence");
            self.is_lost = true;
        }
        if self.is_broken {
            self.link = None;
        }
        if self.is_lost || self.link.is_none() {
            self.connect().await;
        }
        if self.is_ending {
            for channel in 0..self.sessions.len() {
                if self.sessions[channel].last.is_none() {
                    let all = MassCancel {
                        scope: 0,
                        instrument: wire::ALL_INSTRUMENTS,
                        side: wire::BOTH_SIDES,
                    };
                    self.sessions[channel].last = self.ask(channel, all.into());
                }
            }
        } else {
            let channel = usize::from(self.random.below(2) == 1);
            let session = &self.sessions[channel];
            if session.waiting.len() < WAITING_MAX {
                let request = self.request(channel);
                self.ask(channel, request);
            }
        }
    }

    /// Nothing of it reaches the server any more, not even a goodbye.
    async fn die(&mut self, is_process: bool, away: Duration) {
        let at_ns = now_ns();
        if is_process {
            self.proxy.cut();
            self.link = None;
            tokio::time::sleep(away).await;
        } else {
            self.proxy.silence();
            if let Some((connection, _)) = &self.link {
                connection.cut();
            }
            tokio::time::sleep(away).await;
            self.proxy.restore();
        }
        let back_ns = now_ns();
        self.deaths.push(Death { at_ns, back_ns });
        self.connect().await;
    }

    async fn connect(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let attempt = tokio::time::timeout(ATTEMPT_MAX, self.try_connect()).await;
            let trouble = match attempt {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    self.judge_error(&error);
                    error.to_string()
                }
                Err(_) => "no answer to an attempt".to_owned(),
            };
            assert!(
                Instant::now() < deadline,
                "{} cannot log in: {trouble}",
                self.user.id
            );
            self.trouble(&trouble);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.heard = Instant::now();
        self.is_lost = false;
        self.is_broken = false;
    }

    async fn try_connect(&mut self) -> Result<(), Error> {
        let login = self.logins + 1;
        if let Some((connection, _)) = &self.link {
            let infos = connection.resume().await?;
            self.logins = login;
            self.resumes += 1;
            for (channel, info) in infos {
                let waiting = &mut self.sessions[usize::from(channel)].waiting;
                for (_, asked) in waiting.range_mut(info.last_client_seq + 1..) {
                    asked.login = login;
                    self.asked_again += 1;
                }
            }
            return Ok(());
        }
        let (connection, reports) =
            Connection::connect(self.proxy.address(), Trust::Loopback).await?;
        let mut seen = Vec::new();
        for (channel, session) in (0u16..).zip(&self.sessions) {
            let mut options = LoginOptions::new(&self.user.token(), &session.name);
            options.cancel_on_disconnect = session.cancel_on_disconnect;
            options.last_sequence = session.messages.len() as u64;
            seen.push(connection.login(channel, options).await?.last_client_seq);
        }
        self.instrument = instrument_of(&connection, &self.bond);
        self.link = Some((connection, reports));
        self.logins = login;
        self.restarts += 1;
        for (channel, seen) in seen.into_iter().enumerate() {
            let unseen = self.sessions[channel].waiting.split_off(&(seen + 1));
            for (client_seq, asked) in unseen {
                self.asked_again += 1;
                let now = self.ask(channel, asked.message);
                let last = &mut self.sessions[channel].last;
                if *last == Some(client_seq) {
                    *last = now;
                }
            }
        }
        Ok(())
    }

    /// Sends a request that acts; its client sequence, unless the connection is gone.
    fn ask(&mut self, channel: usize, message: ClientMessage) -> Option<u64> {
        let (connection, _) = self.link.as_ref()?;
        let number = u16::try_from(channel).expect("two sessions");
        match connection.try_send(number, message) {
            Ok(Some(client_seq)) => {
                let login = self.logins;
                let asked = Asked { message, login };
                self.sessions[channel].waiting.insert(client_seq, asked);
                Some(client_seq)
            }
            Ok(None) => None,
            Err(_) => {
                self.is_lost = true;
                None
            }
        }
    }

    /// The next request of the flow: orders that rest, cross, are immediate or far away; cancels; amends.
    fn request(&mut self, channel: usize) -> ClientMessage {
        let random = &mut self.random;
        let session = &self.sessions[channel];
        let roll = random.below(100);
        if !session.open.is_empty() && (roll < 30 || session.open.len() >= OPEN_MAX) {
            let at = random.below(session.open.len() as u64);
            let client_order_id = session.open[usize::try_from(at).expect("small")];
            if roll < 20 || session.open.len() >= OPEN_MAX {
                return Cancel {
                    client_order_id,
                    engine_order_id: 0,
                }
                .into();
            }
            let near = MIDDLE_TICKS - 20 + random.below(40);
            return Amend {
                client_order_id,
                engine_order_id: 0,
                price_ticks: (random.below(2) * near).cast_signed(),
                quantity_lots: 1 + random.below(4),
            }
            .into();
        }
        let side = match random.below(2) {
            0 => Side::Buy,
            _ => Side::Sell,
        };
        let price = match (roll < 50, side) {
            (true, Side::Buy) => MIDDLE_TICKS - FAR_TICKS,
            (true, Side::Sell) => MIDDLE_TICKS + FAR_TICKS,
            (false, _) => MIDDLE_TICKS - 15 + random.below(30),
        };
        // Unique among all orders of the user, in both sessions.
        let id = self.next_order;
        self.next_order += 1;
        let quantity = 1 + random.below(3);
        let mut order = NewOrder::limit(id, self.instrument, side, price.cast_signed(), quantity);
        if roll >= 80 {
            order.time_in_force = TimeInForce::Ioc;
        }
        order.into()
    }

    fn take(&mut self, report: Option<Result<Report, Error>>) {
        match report {
            Some(Ok(report)) => self.hear(&report),
            Some(Err(error)) => {
                self.judge_error(&error);
                self.trouble(&error.to_string());
                self.is_lost = true;
            }
            None => self.link = None,
        }
    }

    fn judge_error(&mut self, error: &Error) {
        if let Error::Gap { .. } | Error::Wire(_) = error {
            self.wrong.push(error.to_string());
        }
    }

    fn hear(&mut self, report: &Report) {
        self.heard = Instant::now();
        let Some(session) = self.sessions.get_mut(usize::from(report.channel)) else {
            return; // Of the connection: a heartbeat, or why it ends.
        };
        let message = &report.message;
        if report.sequence > 0 {
            let due = session.messages.len() as u64 + 1;
            if report.sequence != due {
                let text = format!(
                    "{}: number {} where {due} was due",
                    session.name, report.sequence
                );
                return self.wrong.push(text);
            }
            session.messages.push(encoded(message, report.sequence));
            self.progress.fetch_add(1, Relaxed);
            if let Some(text) = session.note(message) {
                self.wrong.push(format!("{}: {text}", session.name));
            }
            return;
        }
        match message {
            ServerMessage::Rejected(refused) => {
                session.waiting.remove(&refused.client_seq);
                if session.last == Some(refused.client_seq) {
                    session.last = None;
                }
                if refused.reason == RejectReason::AlreadySeen {
                    self.wrong.push(format!("already seen: {refused:?}"));
                }
                self.trouble(refused.reason.as_str());
            }
            ServerMessage::Disconnect(end) => {
                self.is_broken = true;
                let text = end.text.as_str().to_owned();
                self.trouble(&text);
            }
            _ => {}
        }
    }

    fn trouble(&mut self, what: &str) {
        *self.troubles.entry(what.to_owned()).or_default() += 1;
    }

    fn has_finished(&self) -> bool {
        let is_over = |session: &Session| {
            let last = session.last;
            last.is_some_and(|last| session.answered.contains(&last))
        };
        self.is_ending && self.sessions.iter().all(is_over)
    }

    /// Requests of a session are answered in order: what is left lost its refusal with a connection.
    fn check_unanswered(&mut self) {
        for session in &self.sessions {
            for (client_seq, asked) in &session.waiting {
                self.refusals_lost += 1;
                if asked.login == self.logins {
                    let text = format!("{}: request {client_seq} has no answer", session.name);
                    self.wrong.push(text);
                }
            }
        }
    }
}

impl Session {
    /// Takes note of a numbered message; a text when it must not be.
    fn note(&mut self, message: &ServerMessage) -> Option<String> {
        let answers = message.answers();
        if answers != 0 {
            self.waiting.remove(&answers);
            if !self.answered.insert(answers) {
                return Some(format!("request {answers} was answered twice"));
            }
        }
        match message {
            ServerMessage::OrderAck(ack) => {
                self.open.push(ack.client_order_id);
                if !self.acknowledged.insert(ack.client_order_id) {
                    return Some(format!("order {} acted twice", ack.client_order_id));
                }
            }
            ServerMessage::Cancelled(cancelled) => self.ended(cancelled.client_order_id),
            ServerMessage::Fill(fill) if fill.open_lots == 0 => self.ended(fill.client_order_id),
            _ => {}
        }
        None
    }

    fn ended(&mut self, client_order_id: u64) {
        self.open.retain(|open| *open != client_order_id);
    }

    /// Orders that were acknowledged as durable.
    pub fn orders(&self) -> usize {
        self.acknowledged.len()
    }
}

async fn next(link: &mut Option<(Connection, Reports)>) -> Option<Result<Report, Error>> {
    match link {
        Some((_, reports)) => reports.recv().await,
        None => std::future::pending().await,
    }
}
