//! A trading client under chaos: sessions on one connection through a proxy, seeded requests, and a
//! record of every numbered message. On the driver's order it dies without a packet to the server,
//! and returns.
//!
//! It dies in one of two ways. A process death drops connection and client library: it logs in anew
//! with the last recorded number, and sends requests that the server has not seen again under new
//! client sequences. A path death cuts the network: the library's `resume` continues.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use client::{Connection, Error, LoginOptions, Report, Reports, Trust};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use types::RejectReason;
use wire::{ClientMessage, MassCancel, ServerMessage};

use super::judge::encoded;
use super::now_ns;
use super::session::{Asked, Session};
use crate::flow::Random;
use crate::member::instrument_of;
use crate::process::PATIENCE;
use crate::udp_proxy::Proxy;
use crate::world::User;

/// Most unanswered requests of a session.
const WAITING_MAX: usize = 64;
/// Silence after which the client drops the connection: the server sends at least twice a second.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Timeout of one reconnect attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// Orders of the driver to a trader.
pub enum Order {
    /// Dies abruptly and returns after this time.
    Die { is_process: bool, away: Duration },
    /// Sends no new orders, cancels the open ones, waits for the last answers, finishes.
    Finish,
}

/// When a client died, and when it tried to return: nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Death {
    pub at_ns: u64,
    pub back_ns: u64,
}

pub struct Trader {
    pub user: User,
    pub sessions: Vec<Session>,
    pub proxy: Arc<Proxy>,
    /// Violations.
    pub wrong: Vec<String>,
    pub deaths: Vec<Death>,
    /// Logins by the library's resume, and by a new process.
    pub resumes: u64,
    pub restarts: u64,
    /// Requests sent again by the library and by the client itself.
    pub asked_again: u64,
    /// Requests whose rejection was lost with a connection: the server has not seen them.
    pub refusals_lost: u64,
    /// Why connections ended, and reasons of rejected requests.
    pub troubles: BTreeMap<String, u64>,
    bond: String,
    random: Random,
    pace: Duration,
    link: Option<(Connection, Reports)>,
    instrument: u32,
    is_lost: bool,
    /// The library has dropped a session: only a new connection restores all of them.
    is_broken: bool,
    is_ending: bool,
    logins: u32,
    next_order: u64,
    heard: Instant,
    progress: Arc<AtomicU64>,
}

impl Trader {
    /// `number` is unique among the traders of one run.
    pub fn new(number: u64, user: User, bond: &str, proxy: Proxy, seed: u64) -> Self {
        Self {
            user,
            sessions: vec![Session::new("cancels", true), Session::new("keeps", false)],
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

    /// Sets the interval of requests.
    #[must_use]
    pub fn paced(mut self, pace: Duration) -> Self {
        self.pace = pace;
        self
    }

    /// Numbered messages received so far.
    pub fn progress(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Trades until it is ordered to finish, and returns with its record.
    ///
    /// # Panics
    /// If it cannot log in, or does not receive the last answers, within a minute.
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
                let (instrument, id) = (self.instrument, self.next_order);
                self.next_order += 1;
                let request = session.request(&mut self.random, instrument, id);
                self.ask(channel, request);
            }
        }
    }

    /// Dies: no packet reaches the server any more, not even a close.
    async fn die(&mut self, is_process: bool, away: Duration) {
        let at_ns = now_ns();
        if is_process {
            self.proxy.block_current_clients();
            self.link = None;
            tokio::time::sleep(away).await;
        } else {
            self.proxy.blackhole();
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
                Err(_) => "reconnect attempt timed out".to_owned(),
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

    /// Sends a request that acts; returns its client sequence, `None` if the connection is lost.
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
            return; // On the connection channel: a heartbeat or `Disconnect`.
        };
        let message = &report.message;
        if report.sequence > 0 {
            let due = session.messages.len() as u64 + 1;
            if report.sequence != due {
                let text = format!(
                    "{}: received number {}, expected {due}",
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
                    self.wrong
                        .push(format!("unexpected ALREADY_SEEN: {refused:?}"));
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
        self.is_ending && self.sessions.iter().all(Session::has_finished)
    }

    /// Requests of a session are answered in order: an unanswered one lost its rejection with a
    /// connection.
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

async fn next(link: &mut Option<(Connection, Reports)>) -> Option<Result<Report, Error>> {
    match link {
        Some((_, reports)) => reports.recv().await,
        None => std::future::pending().await,
    }
}
